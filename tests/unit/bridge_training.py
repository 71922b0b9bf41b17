"""A trainer that publishes to servers started for a test, by the bridge of a config."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tiny_training import make_batch

from rookery.compose.grpo.bridge import (
    Bridged,
    attach,
    choose_bridge,
)
from rookery.compose.grpo.setup import plan_bridge
from rookery.embedded.folders import ModelFolder
from rookery.engines import find_model, open_servers
from rookery.fleet.bridges.update import Canary
from rookery.loops.grpo import GrpoConfig
from rookery.loops.grpo.policy_weights import POLICY
from rookery.slots import load_model
from rookery.train import FullConfig, FullTrainer
from rookery.types import OptimStep, TrainRequest

TASKSETS = [{"type": "jsonl", "path": "none.jsonl", "scorer": {"type": "exact"}}]


def config_of(bridge: str, **launch: Any) -> GrpoConfig:
    """All weights are trained."""
    engine = {"type": "fleet", "launch": {"replicas": 1, "env": {"HF_HUB_OFFLINE": "1"}, **launch}}
    document = {"engine": engine, "bridge": bridge, "full": True, "tasksets": TASKSETS}
    return GrpoConfig.model_validate(document)


class Training:
    """A trainer that publishes to servers."""

    def __init__(self, opened: Bridged, folder: ModelFolder, *, is_float32: bool) -> None:
        self.fleet = opened.engine
        self.bridge = opened.bridge
        self.model = opened.model
        self.canary = Canary.of(
            self.fleet.capabilities, is_float32=is_float32, vocab_size=self.model.shape.vocab_size
        )
        self.trainer = FullTrainer(
            opened.model, name=POLICY, config=FullConfig(pass_tokens=256), like=folder.path
        )
        self.others = opened.publish_model(self.trainer, like=folder.path)

    async def step(self, *, learning_rate: float = 1e-2) -> None:
        data = tuple(make_batch((12, 9, 15)))
        request = TrainRequest(trainee=POLICY, data=data)
        [output] = await self.trainer.forward_backward([request])
        assert not output.error
        await self.trainer.optim_step([OptimStep(trainee=POLICY, learning_rate=learning_rate)])
        await self.trainer.publish(POLICY)

    async def gap(self) -> float:
        """The largest difference between the trainer and any server, of the ids that count."""
        request = TrainRequest(trainee=POLICY, data=(self.canary.datum,))
        [output] = await self.trainer.forward([request])
        replicas = self.fleet.pool.replicas
        found = [await self.canary.read(replica, self.fleet.base) for replica in replicas]
        expected = output.logprobs[0]
        gaps = [sorted(abs(a - b) for a, b in zip(own, expected, strict=True)) for own in found]
        return max(ordered[-1 - self.canary.num_spared] for ordered in gaps)


@asynccontextmanager
async def training(
    config: GrpoConfig, folder: Path, *, device: str = "cpu", is_as_configured: bool = False
) -> AsyncIterator[Training]:
    """`folder` is for models on their way. On the CPU both compute in float32."""
    found = find_model(config.engine, tokenizer=config.tokenizer)
    assert config.engine.type == "fleet"
    plan = plan_bridge(config, folder=found.path)
    async with open_servers(config.engine if is_as_configured else plan.engine) as engine:
        bridge = await choose_bridge(plan, engine)
        try:
            if bridge.shared is None:
                model = load_model(found.path, device=device)
            else:
                model = await attach(found, engine, bridge.shared, start=found.path)
            opened = Bridged(engine=engine, model=model, bridge=bridge, folder=folder)
            yield Training(opened, found, is_float32=device == "cpu")
        finally:
            bridge.release()
