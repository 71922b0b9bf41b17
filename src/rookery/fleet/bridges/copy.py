"""The `copy` bridge: the trainer's weights go to the servers of this machine through memory.

vLLM loads them as it loads a model folder, so that every layout is served: weights spread over
several workers, quantised ones, experts.
"""

import json
from typing import TYPE_CHECKING, Any

from rookery.concurrency import run_in_thread
from rookery.fleet.bridges.canary import Canary, Logprobs
from rookery.fleet.bridges.update import BaseUpdate
from rookery.fleet.fleet import Fleet
from rookery.fleet.routing.replica import Replica
from rookery.fleet.vllm_plugin.shared_memory import SharedFile, lay_out, view
from rookery.types import ModelRef, ModelWeights

if TYPE_CHECKING:
    import torch

__all__ = ["CopyBridge"]


class CopyBridge:
    """Gives whole models to servers that have the worker extension."""

    def __init__(self, fleet: Fleet, *, canary: Canary) -> None:
        self._fleet = fleet
        self._update = BaseUpdate(fleet, canary)
        self._file: SharedFile | None = None

    async def replace_base(self, weights: ModelWeights, logprobs: Logprobs) -> ModelRef:
        """Serve these weights in place of the base model; `logprobs` computes with them."""
        ref = ModelRef(name=weights.name, version=weights.version)
        async with self._fleet.updating(), self._update.lock:
            # Not before: a server that is started again meanwhile is given what is there.
            manifest = await run_in_thread(self._write, weights)

            async def give(replica: Replica) -> None:
                await replica.client.call_workers("rookery_load", manifest=manifest)
                await replica.client.reset_prefix_cache()

            await self._update.publish(give, logprobs, ref, again=give)
        return self._fleet.base

    def _write(self, weights: ModelWeights) -> str:
        """The manifest of a file that holds them. The file is kept for the next ones, and for a
        server that is started again."""
        tensors: dict[str, torch.Tensor] = dict(weights.tensors)
        manifest: dict[str, Any] = lay_out(tensors)
        if self._file is None or self._file.memory.numel() != manifest["bytes"]:
            self._file = SharedFile(num_bytes=manifest["bytes"])
        for name, tensor in tensors.items():
            view(self._file.memory, manifest["tensors"][name]).copy_(tensor)
        return json.dumps(manifest | {"path": self._file.path})
