"""A service elsewhere as an engine and a trainer, on which loops run as on local ones.

    async with open_client(ServiceClientConfig(url="http://gpu1:8000", model="smollm2")) as client:
        await client.trainer.create("policy", LoraShape(rank=8, seed=0))
        [output] = await client.trainer.forward_backward([TrainRequest(trainee="policy", ...)])
        ref = await client.trainer.publish("policy")
        [answers] = await client.engine.sample([SampleRequest(model=ref, prompt=(5, 6))])

engine.py   requests, retries, results, the session; ServiceEngine: Engine
trainer.py  ServiceTrainer: Trainer and Trainees
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from rookery.remote.engine import (
    Samplers,
    ServiceClientConfig,
    ServiceEngine,
    open_connection,
    read_facts,
)
from rookery.remote.trainer import ServiceTrainer, read_states

__all__ = [
    "ServiceClient",
    "ServiceClientConfig",
    "ServiceEngine",
    "ServiceTrainer",
    "open_client",
    "read_states",
]


@dataclass(frozen=True, slots=True)
class ServiceClient:
    """Engine and trainer of one base model of a service."""

    engine: ServiceEngine
    trainer: ServiceTrainer


@asynccontextmanager
async def open_client(
    config: ServiceClientConfig, *, has_last_states: bool = False
) -> AsyncIterator[ServiceClient]:
    """Open a session with the service. Unsaved training in it is lost at the end of the block. See
    `ServiceTrainer` for `has_last_states`."""
    async with open_connection(config) as connection:
        facts = await read_facts(connection, config.model)
        samplers = Samplers(connection, base=facts.base, base_model=facts.base_model)
        yield ServiceClient(
            engine=ServiceEngine(connection, samplers, facts),
            trainer=ServiceTrainer(
                connection,
                samplers,
                base_model=facts.base_model,
                has_last_states=has_last_states,
            ),
        )
