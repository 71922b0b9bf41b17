"""The worker extension for CPU servers whose base weights change while they serve.

vLLM packs the weights of linear layers for its CPU kernels and computes with the copies, so that a
change of the weights has no effect. The output layer of a model with tied embeddings keeps its
first weights even when vLLM reloads them. With the packing kernels disabled, vLLM computes with the
weights themselves. vLLM imports this module in its workers before it loads weights.
"""

from __future__ import annotations

from . import extension

__all__ = ["WorkerExtension"]


class WorkerExtension(extension.WorkerExtension):
    """The methods of `extension`, for weights that change in place."""

    rookery_is_live = True


try:
    import vllm._custom_ops as kernels
    from vllm.model_executor.layers import utils as layers
except ImportError:  # not in vLLM's worker
    pass
else:
    kernels._supports_onednn = False
    layers.check_cpu_sgl_kernel = lambda *_: False
