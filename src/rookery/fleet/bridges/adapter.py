"""The `slot` and `adapter` bridges: an adapter in training, published under a new name each time.

With `slot` a server takes it from memory into an idle slot of its own (see `vllm_plugin`); with
`adapter` it reads a PEFT folder. Requests in flight keep their version, and nothing pauses.
"""

from collections.abc import Sequence

from rookery.concurrency import together
from rookery.errors import FleetError
from rookery.fleet.adapters.served import require_adapter
from rookery.fleet.bridges.canary import Canary, Logprobs
from rookery.fleet.fleet import Fleet
from rookery.fleet.http.client import ServerLost
from rookery.fleet.routing.replica import Replica
from rookery.types import ModelRef, Weights

__all__ = ["AdapterBridge"]


class AdapterBridge:
    """A Publisher: every server shows that it has the new weights before the old ones are retired.

    Publications follow one another: await one before the next.
    """

    def __init__(self, fleet: Fleet, *, canary: Canary, logprobs: Logprobs) -> None:
        """`logprobs` computes with the weights that are published next."""
        self._fleet = fleet
        self._canary = canary
        self._logprobs = logprobs
        self._published: dict[str, ModelRef] = {}

    async def publish(self, weights: Weights) -> ModelRef:
        adapter = require_adapter(weights)
        ref = await self._fleet.load(adapter)
        try:
            expected = await self._logprobs(self._canary)
            up = [replica for replica in self._fleet.pool.replicas if replica.load.is_open]
            await together(self._prove(replica, ref, expected) for replica in up)
        except BaseException:  # whatever it was: nobody will name this version
            await self._fleet.unload(ref)
            raise
        before = self._published.get(weights.name)
        self._published[weights.name] = ref
        if before is not None:
            await self._fleet.unload(before)
        return ref

    async def _prove(self, replica: Replica, ref: ModelRef, expected: Sequence[float]) -> None:
        try:
            gap = await self._canary.gap(replica, expected, ref, self._fleet.find(ref))
        except ServerLost as error:
            # It gets the adapter with the first request that names it, when it is back.
            self._fleet.pool.suspect(replica, str(error))
            return
        if self._canary.is_far(gap):
            raise FleetError(
                f"{replica.url} was given {ref.served_name} and computes with other weights: "
                f"log-probabilities are off by {gap:.2g} nats, more than "
                f"{self._canary.limit_nats:g}. Check that server and trainer load the same base "
                "model in the same dtype."
            )
