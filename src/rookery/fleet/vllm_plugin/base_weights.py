"""The base weights of one worker: shared with a trainer, replaced, or summed up to be compared."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from .shared_memory import SharedFile, bit_sum, export_gpu, lay_out, open_tensors, view

if TYPE_CHECKING:
    import torch

__all__ = ["SharedWeights", "load_weights", "sum_weights", "why_not_shared"]


def why_not_shared(runner: Any, *, is_live: bool) -> str:
    """Why a trainer cannot compute with this worker's own memory; empty: it can."""
    config = runner.vllm_config
    parallel, model = config.parallel_config, config.model_config
    if parallel.pipeline_parallel_size > 1:
        return f"its layers are spread over {parallel.pipeline_parallel_size} workers"
    if parallel.tensor_parallel_size > 1:
        return f"each of {parallel.tensor_parallel_size} workers has a part of every weight"
    if model.quantization is not None:
        return f"its weights are quantised ({model.quantization})"
    if getattr(model, "enable_sleep_mode", False):
        return "sleep mode takes its memory away"
    if model.use_mla:
        return "it computes with products of its weights (multi-head latent attention)"
    experts = _first_experts(runner.get_model())
    if experts:
        return f"{experts} holds the weights of all experts in a layout of its own"
    if str(runner.device).partition(":")[0] == "cpu" and not is_live:
        return (
            "on the CPU it computes with packed copies of its weights; start it with "
            "launch.live_weights: true"
        )
    return ""


def _first_experts(model: Any) -> str:
    """The name of a layer of experts; vLLM's classes differ by version, their weights do not."""
    for name, _ in model.named_parameters():
        layer, _, leaf = name.rpartition(".")
        if leaf == "w13_weight":
            return str(layer)
    return ""


class SharedWeights:
    """All weights of a worker in memory that a trainer sees too."""

    def __init__(self, runner: Any, source: str) -> None:
        """On the CPU they are moved to a new file, or taken from the one at `source`: the weights
        of a trainer, which another worker has too or one that died had."""
        model = runner.get_model()
        weights = _named_weights(model)
        packed = getattr(model, "packed_modules_mapping", {})
        self.manifest: dict[str, Any] = {"packed": {n: list(parts) for n, parts in packed.items()}}
        if str(runner.device).partition(":")[0] == "cuda":
            self.manifest |= export_gpu(weights)
            return
        self.manifest |= lay_out(weights)
        self._file = SharedFile(source, num_bytes=self.manifest["bytes"])
        self.manifest["path"] = self._file.path
        self._move(weights, has_values=bool(source))

    def _move(self, weights: dict[str, Any], *, has_values: bool) -> None:
        written: set[int] = set()
        for name, parameter in weights.items():
            entry = self.manifest["tensors"][name]
            shared = view(self._file.memory, entry)
            if not has_values and entry["offset"] not in written:
                shared.copy_(parameter.data)
                written.add(entry["offset"])
            parameter.data = shared


def _named_weights(model: Any) -> dict[str, torch.Tensor]:
    """By their names without adapters; tied ones by all their names."""
    return {
        name.replace(".base_layer.", "."): parameter
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def load_weights(worker: Any, manifest: str) -> None:
    """Replace all weights by those that another process has laid out, in the layout of the model's
    folder; vLLM cuts, packs and quantises them as when it was started."""
    tensors = open_tensors(json.loads(manifest))
    worker.reload_weights(weights_iterator=iter(tensors.items()))


def sum_weights(runner: Any) -> dict[str, int]:
    """`bit_sum` of every weight of this worker."""
    return {name: bit_sum(weight) for name, weight in _named_weights(runner.get_model()).items()}
