"""Code in vLLM's workers that loads adapters from memory instead of PEFT files.

vLLM loads it by `--worker-extension-cls` and calls it through `/collective_rpc`.

Stock `load_lora_adapter` reads a tensor per factor, pins each in page-locked memory, and starts one
to four kernels per layer to write the slot. A buffer (`shared_memory.py`) holds all factors in one
file in shared memory or one CUDA allocation of the sender. It goes to the device in one piece, and
a few kernels write the whole slot (`slots.py`) from there. A member of a population
(`population.py`) is a seed, and is computed here. Names, ids, slots and eviction stay vLLM's own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .population import Centre, PopulationMember, read_member
from .shared_memory import (
    FORMAT,
    MANIFEST,
    SharedFile,
    bit_sum,
    export_gpu,
    factor_view,
    lay_out,
    open_buffer,
    open_tensors,
    view,
)
from .slots import SlotWriter, find_parts, install_token_index

__all__ = ["WorkerExtension", "install_output_layer", "load_weights"]


if TYPE_CHECKING:
    import torch


def why_not_shared(runner: Any, *, is_live: bool) -> str:
    """Return why a trainer cannot compute with this worker's own memory; empty if it can."""
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
    """Return a layer of experts; vLLM's classes differ by version, their weights do not."""
    for name, _ in model.named_parameters():
        layer, _, leaf = name.rpartition(".")
        if leaf == "w13_weight":
            return str(layer)
    return ""


class SharedWeights:
    """All weights of a worker, in memory shared with a trainer."""

    def __init__(self, runner: Any, source: str) -> None:
        """On the CPU, move the weights to a new file, or use the file at `source` with the
        trainer's weights, which another worker shares or a dead one shared."""
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
    """Return the weights by their names without adapters; tied weights under all names."""
    return {
        name.replace(".base_layer.", "."): parameter
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def load_weights(worker: Any, manifest: str) -> None:
    """Replace all weights by those of another process, in the layout of the model's folder; vLLM
    cuts, packs and quantises them as at its start."""
    tensors = open_tensors(json.loads(manifest))
    worker.reload_weights(weights_iterator=iter(tensors.items()))


def sum_weights(runner: Any) -> dict[str, int]:
    """Return `bit_sum` of every weight of this worker."""
    return {name: bit_sum(weight) for name, weight in _named_weights(runner.get_model()).items()}


_WHOLE = "rookery.whole"
"""The single layer of a buffer, as vLLM sees it."""


class WorkerExtension:
    """Methods that vLLM adds to its worker class. Their names must not collide with vLLM's."""

    model_runner: Any
    device: Any
    rookery_is_live = False
    """True if it computes with the weights themselves; see `live_weights.py`."""
    rookery_shared: SharedWeights | None = None

    def rookery_share(self, source: str = "") -> dict[str, Any]:
        """Return where a trainer on this machine finds the base weights, or {"refusal": why}.
        `source` is a file to take them from; without it, shared weights stay shared."""
        if self.rookery_shared is None or source:
            reason = why_not_shared(self.model_runner, is_live=self.rookery_is_live)
            if reason:
                return {"refusal": reason}
            self.rookery_shared = SharedWeights(self.model_runner, source)
        return self.rookery_shared.manifest

    def rookery_load(self, manifest: str) -> None:
        load_weights(self, manifest)

    def rookery_sums(self) -> dict[str, int]:
        """Return the bit sum of every base weight, to find a wrong one."""
        return sum_weights(self.model_runner)

    def rookery_attach(self) -> dict[str, Any]:
        """Take over the loading of buffer folders and return the report. Idempotent."""
        # Servers without adapters have no manager.
        manager = getattr(self.model_runner, "lora_manager", None)
        if manager is not None and not isinstance(manager.__dict__.get("_rookery"), _Loader):
            manager._rookery = _Loader(manager, device=self.device)
        return self.rookery_report()

    def rookery_report(self) -> dict[str, Any]:
        """Return sizes, and the adaptable layers of the model by their Hugging Face names."""
        config = self.model_runner.vllm_config
        lora = config.lora_config
        report: dict[str, Any] = {
            "format": FORMAT,
            "max_num_seqs": config.scheduler_config.max_num_seqs,
            "max_logprobs": config.model_config.max_logprobs,
            "device": str(self.device).partition(":")[0],
        }
        if lora is not None:
            is_whole = config.parallel_config.tensor_parallel_size == 1
            manager = self.model_runner.lora_manager
            parts = find_parts(manager._adapter_manager) if is_whole else {}
            report |= {
                "token_index": manager._rookery.has_token_index,
                "output_layer": manager._rookery.has_output_layer,
                "max_loras": lora.max_loras,
                "max_cpu_loras": lora.max_cpu_loras,
                "max_lora_rank": lora.max_lora_rank,
                "lora_dtype": str(lora.lora_dtype).removeprefix("torch."),
                "layers": {
                    name: [module.lora_a_stacked[i].shape[-1], module.lora_b_stacked[i].shape[-2]]
                    for name, (module, i) in parts.items()
                },
            }
        return report


class _Loader:
    """Replaces five methods of one worker's adapter managers.

    To add an adapter (`add_adapter`), vLLM loads it (`_load_adapter`), registers it
    (`_create_merged_loras_inplace`) and activates it. A buffer that fits whole linear layers
    becomes one LoRAModel with one pseudo-layer, which is written to its slot at once. Any other
    buffer becomes an ordinary LoRAModel.

    Before each step vLLM adds all adapters of its requests again (`_apply_adapters`), and copies
    the list of all adapters for each: with 512 that takes as long as the step. Here, present
    adapters are only marked as used, and members that arrived since the last step are computed.

    A request may be on its way when its adapter proves broken. vLLM would add the adapter again in
    the middle of a step, and die; it gets one without layers instead.
    """

    def __init__(self, manager: Any, *, device: Any) -> None:
        self._manager, self._inner = manager, manager._adapter_manager
        self._device = device
        self._stock_add = manager.add_adapter
        self._stock_apply = manager._apply_adapters
        self._stock_load = manager._load_adapter
        self._stock_merge = self._inner._create_merged_loras_inplace
        self._stock_activate = self._inner.activate_adapter
        self._broken: set[int] = set()
        self._layouts: dict[str, tuple[int, tuple[Any, ...]]] = {}
        self._writer = SlotWriter(self._inner, device)
        self.has_token_index = install_token_index(self._inner, device)
        self.has_output_layer = install_output_layer(self._inner, device)
        manager.add_adapter = self._add
        manager._apply_adapters = self._apply
        manager._load_adapter = self._load
        self._inner._create_merged_loras_inplace = self._merge
        self._inner.activate_adapter = self._activate

    def _add(self, request: Any) -> Any:
        try:
            return self._stock_add(request)
        except Exception:  # remember the id on any failure
            self._broken.add(request.lora_int_id)
            self._inner.remove_adapter(request.lora_int_id)
            raise

    def _apply(self, requests: Any) -> None:
        """Fill the slots that the next step needs."""
        registered, active = self._inner._registered_adapters, self._inner._active_adapters
        ids = {request.lora_int_id for request in requests if request}
        if all(id in active and id in registered for id in ids):
            for id in ids:
                registered.touch(id)
                active.touch(id)
        else:
            self._stock_apply(requests)
        self._writer.fill()

    def _load(self, request: Any) -> Any:
        """Load a buffer folder or a member as vLLM's LoRAModel; other folders the stock way."""
        if request.lora_int_id in self._broken:
            from vllm.lora.lora_model import LoRAModel

            return LoRAModel(request.lora_int_id, 1, {})
        member = read_member(request.lora_path, self._device)
        if member is not None:
            return self._load_member(request, *member)
        folder = Path(request.lora_path)
        try:
            text = (folder / MANIFEST).read_text(encoding="utf-8")
        except FileNotFoundError:
            return self._stock_load(request)
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.lora_weights import LoRALayerWeights

        manifest = json.loads(text)
        if manifest["format"] != FORMAT:
            raise ValueError(f"buffer format {manifest['format']}, this worker reads {FORMAT}")
        rank, layers = self._layout(request, manifest["layers"])
        buffer = open_buffer(folder, manifest, layers)
        if self._writer.fits(layers):
            whole = LoRALayerWeights(_WHOLE, rank, rank, buffer, buffer, scaling=1.0)
            return LoRAModel(request.lora_int_id, rank, {_WHOLE: whole})
        memory, weights = buffer.on(self._device), {}
        for name, layer_rank, size_in, size_out, offset_a, offset_b in layers:
            a = factor_view(memory, offset_a, (layer_rank, size_in))
            b = factor_view(memory, offset_b, (size_out, layer_rank))
            weights[name] = LoRALayerWeights(name, layer_rank, layer_rank, a, b, scaling=1.0)
        return LoRAModel(request.lora_int_id, rank, weights)

    def _load_member(self, request: Any, centre: Centre, seed: int, amount: float) -> Any:
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.lora_weights import LoRALayerWeights

        rank, layers = self._layout(request, centre.layout, skip=1)
        if self._writer.fits(layers):
            named = zip(layers, centre.begins, strict=True)
            places = tuple((*layer[:4], *begins) for layer, begins in named)
            member = PopulationMember(centre, places, seed, amount)
            whole = LoRALayerWeights(_WHOLE, rank, rank, member, member, scaling=1.0)
            return LoRAModel(request.lora_int_id, rank, {_WHOLE: whole})
        weights = {}
        [(_, [line])] = centre.members([seed], [amount], self._manager.lora_config.lora_dtype)
        for (name, layer_rank, *_), (a, b) in zip(layers, centre.factors(line), strict=True):
            weights[name] = LoRALayerWeights(name, layer_rank, layer_rank, a, b, scaling=1.0)
        return LoRAModel(request.lora_int_id, rank, weights)

    def _merge(self, model: Any) -> None:
        """Skip packing for buffers and empty adapters."""
        if model.loras and _WHOLE not in model.loras:
            self._stock_merge(model)

    def _activate(self, lora_id: int) -> Any:
        """Let vLLM find the slot and write its layers: for a buffer, its one pseudo-layer."""
        inner = self._inner
        if lora_id in inner._active_adapters:
            return self._stock_activate(lora_id)
        if _WHOLE not in inner._registered_adapters[lora_id].loras:
            self._writer.fill()
            return self._stock_activate(lora_id)
        modules, inner.modules = inner.modules, {_WHOLE: self._writer}
        try:
            return self._stock_activate(lora_id)
        except BaseException:  # on any failure, free the half-written slot
            inner.deactivate_adapter(lora_id)
            raise
        finally:
            inner.modules = modules

    def _layout(self, request: Any, text: str, *, skip: int = 0) -> tuple[int, tuple[Any, ...]]:
        """Return the highest rank, and the layers by vLLM's names; the layout is cached. `skip`
        fields come between a layer's name and its rank."""
        if text not in self._layouts:
            layers = [(name, *sizes[skip:]) for name, *sizes in json.loads(text)]
            rank = max(layer[1] for layer in layers)
            self._check(request, [layer[0] for layer in layers], rank)
            named = tuple((self._module_name(name), *sizes) for name, *sizes in layers)
            self._layouts[text] = rank, named
        return self._layouts[text]

    def _check(self, request: Any, layers: list[str], rank: int) -> None:
        if rank > self._manager.lora_config.max_lora_rank:
            limit = self._manager.lora_config.max_lora_rank
            raise ValueError(f"{request.lora_name} has rank {rank}, at most {limit} is allowed")
        packed = self._inner.packed_modules_mapping
        known: set[str] = set()
        for module in self._inner.supported_lora_modules:
            known.update(packed.get(module, (module,)))
        wrong = [layer for layer in layers if layer.rpartition(".")[2] not in known]
        if wrong:
            raise ValueError(f"{request.lora_name} adapts {wrong[0]}; known are {sorted(known)}")

    def _module_name(self, layer: str) -> str:
        from vllm.lora.utils import parse_fine_tuned_lora_name

        name = f"base_model.model.{layer}.lora_A.weight"
        return str(parse_fine_tuned_lora_name(name, self._mapper())[0])

    def _mapper(self) -> Any:
        """Return vLLM's renaming without its stacking of q, k and v: vLLM stacks adapters itself.
        The method's name differs between versions; older mappers have no stacking."""
        mapper = getattr(self._inner.model, "hf_to_vllm_mapper", None)
        for rename in ("get_rename_mapper", "get_unstacked_mapper"):
            if hasattr(mapper, rename):
                return getattr(mapper, rename)()
        return mapper


if TYPE_CHECKING:
    import torch


# Keeps adapters of the output layer from tokens of the base model, on the CPU.
#
# vLLM marks a token without an adapter by slot -1. Its GPU kernels skip such tokens; its CPU code
# applies the last slot to them, even in a batch without any adapter. An input of zeros adds nothing
# to the logits in any slot.


def install_output_layer(inner: Any, device: Any) -> bool:
    """Keep adapted output layers from base tokens; True if they do not reach them."""
    if device.type != "cpu":
        return True
    tables = list(getattr(inner, "punica_wrapper_mapping", {}).values())
    if not tables or not all(hasattr(table, "sampler_indices") for table in tables):
        return False  # another version keeps them elsewhere
    for table in tables:
        table.add_lora_logits = _Logits(table)
    return True


class _Logits:
    """Replaces `add_lora_logits` of one `PunicaWrapper`."""

    def __init__(self, table: Any) -> None:
        self._table = table
        self._stock = table.add_lora_logits

    def __call__(self, y: torch.Tensor, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        is_adapted = (self._table.sampler_indices >= 0).unsqueeze(-1)
        return self._stock(y, x.where(is_adapted, 0), *args, **kwargs)


try:
    from . import kernels
except ImportError:  # no triton, so no GPU
    pass
else:
    kernels.install()
