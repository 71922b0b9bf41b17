"""The worker extension for servers whose CUDA graphs hold whole steps, prompts included.

FlashAttention 3 chooses its kernel and the layout of its schedule by the longest query of a batch.
A graph keeps the kernel it was captured with: vLLM 0.26 captures with single tokens, later versions
with one prompt as long as the batch. The schedule is computed for the queries of every step. If
kernel and schedule disagree (head sizes up to 64 or above 128: single tokens take no causal mask),
answers are silently wrong. Here every whole step is captured and run as one prompt as long as the
graph. vLLM imports this module in its workers before it captures.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

from .extension import WorkerExtension

__all__ = ["WorkerExtension", "agree_on_queries"]


def agree_on_queries(graphs: Any) -> None:
    """Patch vLLM's module `cudagraph_utils` so that all whole steps are prepared alike."""
    stock = graphs.ModelCudaGraphManager.capture
    full = graphs.CUDAGraphMode.FULL

    def capture(self: Any, model: Any, model_state: Any, *args: Any, **kwargs: Any) -> Any:
        # In other modes, only steps of single tokens are whole.
        if self.cudagraph_mode == full:
            model_state.prepare_attn = _as_one_prompt(model_state.prepare_attn, full)
        return stock(self, model, model_state, *args, **kwargs)

    graphs.ModelCudaGraphManager.capture = capture


def _as_one_prompt(prepare: Any, full: Any) -> Any:
    def prepare_attn(batch: Any, mode: Any, *args: Any, **kwargs: Any) -> Any:
        if mode == full or kwargs.get("for_capture"):
            longest = batch.num_tokens_after_padding
            batch = copy.copy(batch)
            # vLLM reads only the longest query: from this array, or later from `max_query_len`.
            batch.num_scheduled_tokens = np.full_like(batch.num_scheduled_tokens, longest)
            batch.max_query_len = longest
        return prepare(batch, mode, *args, **kwargs)

    return prepare_attn


try:
    from vllm.v1.worker.gpu import cudagraph_utils
except ImportError:  # not in vLLM's worker, or in one of its other model runners
    pass
else:
    agree_on_queries(cudagraph_utils)
