"""The worker extension for servers on the CPU whose base weights are changed while they serve.

vLLM packs the weights of linear layers for the CPU's kernels and computes with the copies: a change
of the weights themselves would not be seen, and the output layer of a model with tied embeddings
keeps its first weights even when vLLM reloads them. Without the kernels that pack, it computes with
the weights. vLLM imports this module in its workers before it loads them.
"""

from __future__ import annotations

from . import extension

__all__ = ["WorkerExtension"]


class WorkerExtension(extension.WorkerExtension):
    """The same methods, over weights that can be changed in place."""

    rookery_is_live = True


try:
    import vllm._custom_ops as kernels
    from vllm.model_executor.layers import utils as layers
except ImportError:  # not in vLLM's worker
    pass
else:
    kernels._supports_onednn = False
    layers.check_cpu_sgl_kernel = lambda *_: False
