"""The `merge` bridge: an adapter in training is added to the weights that a server computes with.

    bridge = MergeBridge(fleet, shared, base=base, served=served, canary=canary, logprobs=logprobs)
    ref = await bridge.publish(adapter)         # the base model is W + scale * B A from here on

The server has one policy and no others: nothing pays for kernels that hold many adapters apart.
Sums are made in float32 and rounded once to the server's type, so that the server differs from base
and adapter computed apart by the rounding of its weights.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from rookery.concurrency import run_in_thread
from rookery.fleet.adapters.residency import require_adapter
from rookery.fleet.bridges.alias import AliasBridge, SharedBase
from rookery.fleet.bridges.canary import Canary
from rookery.fleet.fleet import Fleet
from rookery.types import Adapter, LoraFactors, ModelRef, Weights

if TYPE_CHECKING:
    import torch

__all__ = ["MergeBridge"]

Linears = Mapping[str, "torch.Tensor"]
"""Weights of linear layers, by the layers' names."""
Expected = Callable[[Adapter], Awaitable[Sequence[float]]]
"""What base and adapter, computed apart, say after the canary's text."""


class MergeBridge:
    """A Publisher. An adapter without factors is the base model itself."""

    def __init__(
        self,
        fleet: Fleet,
        shared: SharedBase,
        *,
        base: Linears,
        served: Linears,
        canary: Canary,
        logprobs: Expected,
    ) -> None:
        """`base` is a copy of the weights without an adapter, `served` the servers' memory."""
        self._base = base
        self._served = served
        self._logprobs = logprobs
        self._adapter: Adapter | None = None
        self._changed = frozenset(served)
        """Layers that may differ from the base model: all of a server that ran before."""
        self._alias = AliasBridge(fleet, shared, canary=canary, logprobs=self._expected)

    async def publish(self, weights: Weights) -> ModelRef:
        adapter = self._adapter = require_adapter(weights)
        ref = ModelRef(name=adapter.name, version=adapter.version)
        async with self._alias.changing_base() as rename:
            await run_in_thread(self._merge, adapter.factors)
            rename(ref)
        return ref

    async def _expected(self, _canary: Canary) -> Sequence[float]:
        assert self._adapter is not None, "servers are proved after a publication"
        return await self._logprobs(self._adapter)

    def _merge(self, factors: Mapping[str, LoraFactors]) -> None:
        import torch

        with torch.no_grad():
            for layer in self._changed - factors.keys():
                self._served[layer].copy_(self._base[layer])
            for layer, lora in factors.items():
                base = self._base[layer]
                a, b = (factor.to(base.device, torch.float32) for factor in (lora.a, lora.b))
                self._served[layer].copy_(torch.addmm(base.float(), b, a, alpha=lora.scale))
            if any(served.is_cuda for served in self._served.values()):
                torch.cuda.synchronize()
        self._changed = frozenset(factors)
