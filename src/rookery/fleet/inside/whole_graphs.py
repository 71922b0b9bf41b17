"""The worker extension for servers whose CUDA graphs hold whole steps, prompts included.

vLLM 0.26 captures such graphs from one token per sequence. FlashAttention 3 leaves the causal mask
out of those, unless heads have 65 to 128 numbers, and the graph never puts it back: prompts come
out wrong, without a word. Later versions capture for a prompt as long as the batch. vLLM imports
this module in its workers before it loads the model, and older versions do the same from then on.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

from .extension import WorkerExtension

__all__ = ["WorkerExtension", "capture_for_prompts"]


class _ForPrompts:
    """A model state that prepares attention for one prompt as long as the batch."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)

    def prepare_attn(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Only the longest of `num_scheduled_tokens` is read there."""
        import numpy as np

        batch = copy.copy(batch)
        batch.num_scheduled_tokens = np.array([batch.num_tokens])
        return self._state.prepare_attn(batch, *args, **kwargs)


def capture_for_prompts(graphs: Any) -> None:
    """Change vLLM's module `cudagraph_utils` where it captures whole steps for single tokens."""
    if "max_query_len" in inspect.signature(graphs.prepare_inputs_to_capture).parameters:
        return
    stock = graphs.ModelCudaGraphManager.capture

    def capture(self: Any, model: Any, model_state: Any, *args: Any, **kwargs: Any) -> Any:
        # Other modes capture whole steps of single tokens alone.
        if self.cudagraph_mode == graphs.CUDAGraphMode.FULL:
            model_state = _ForPrompts(model_state)
        return stock(self, model, model_state, *args, **kwargs)

    graphs.ModelCudaGraphManager.capture = capture


try:
    from vllm.v1.worker.gpu import cudagraph_utils
except ImportError:  # not in vLLM's worker, or in one of its other model runners
    pass
else:
    capture_for_prompts(cudagraph_utils)
