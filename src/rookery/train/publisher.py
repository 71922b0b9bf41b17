"""Publishing: adapters are loaded beside the version before, whole models take its place."""

from collections.abc import Awaitable, Callable

from rookery.errors import TrainError
from rookery.ports import Adapters
from rookery.types import Adapter, ModelRef, ModelWeights, Weights

__all__ = ["AdapterPublisher", "ModelPublisher"]


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


class ModelPublisher:
    """A Publisher of whole models to an engine that has one base model.

    `replace_base` is the embedded engine's, for one: it waits for requests in flight.
    """

    def __init__(self, replace_base: Callable[[ModelWeights], Awaitable[ModelRef]]) -> None:
        self._replace_base = replace_base

    async def publish(self, weights: Weights) -> ModelRef:
        if isinstance(weights, Adapter):
            raise TrainError(
                f"{weights.name} is an adapter; this publisher takes whole models. Use an "
                "AdapterPublisher."
            )
        return await self._replace_base(weights)
