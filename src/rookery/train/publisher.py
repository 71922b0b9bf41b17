"""Publishing by loading: each new version of a trainee is an adapter loaded beside the old one."""

from rookery.errors import TrainError
from rookery.ports import Adapters
from rookery.types import Adapter, ModelRef, Weights

__all__ = ["AdapterPublisher"]


class AdapterPublisher:
    """A Publisher over anything adapters can be loaded into, the embedded engine for one.

    Publications of one name follow one another: await one before the next.
    """

    def __init__(self, adapters: Adapters) -> None:
        self._adapters = adapters
        self._published: dict[str, ModelRef] = {}

    async def publish(self, weights: Weights) -> ModelRef:
        if not isinstance(weights, Adapter):
            raise TrainError(
                f"{weights.name} is a whole model; only adapters can be loaded here. Train an "
                "adapter, or publish to an engine that takes whole weights."
            )
        ref = await self._adapters.load(weights)
        before = self._published.get(weights.name)
        self._published[weights.name] = ref
        if before is not None:
            # Equal weights are the same version, loaded twice and now unloaded once.
            await self._adapters.unload(before)
        return ref
