"""What runs in vLLM's workers: loads adapters from memory instead of from PEFT files.

It is given to vLLM by `--worker-extension-cls` and called through `/collective_rpc`.

Stock `load_lora_adapter` reads a tensor per factor, pins each in page-locked memory, and starts a
kernel or four per layer to write the slot. A buffer (`shared_memory.py`) is one file in shared
memory, or one CUDA allocation of the sender, with all factors in it: it goes to the device in one
piece, and the whole slot (`slots.py`) is written from there by a few kernels. A member of a
population (`population.py`) is a seed: its numbers are made here. Names, ids, slots and eviction
stay vLLM's own.
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


_WHOLE = "rookery.whole"
"""The one layer that vLLM sees of a buffer: all of them."""


class WorkerExtension:
    """Methods that vLLM adds to its worker class. Their names must not meet any of vLLM's."""

    model_runner: Any
    device: Any
    rookery_is_live = False
    """Whether it computes with the weights themselves, see `live_weights.py`."""
    rookery_shared: SharedWeights | None = None

    def rookery_share(self, source: str = "") -> dict[str, Any]:
        """Where a trainer on this machine finds the base weights, or {"refusal": why}. `source` is
        where to take them from; without one a worker that shares them already goes on to."""
        if self.rookery_shared is None or source:
            reason = why_not_shared(self.model_runner, is_live=self.rookery_is_live)
            if reason:
                return {"refusal": reason}
            self.rookery_shared = SharedWeights(self.model_runner, source)
        return self.rookery_shared.manifest

    def rookery_load(self, manifest: str) -> None:
        """Replace the base weights."""
        load_weights(self, manifest)

    def rookery_sums(self) -> dict[str, int]:
        """Of every base weight here, to find the one that is not what it should be."""
        return sum_weights(self.model_runner)

    def rookery_attach(self) -> dict[str, Any]:
        """Take over the loading of buffer folders; what this worker can do. Twice is harmless."""
        # A server without adapters has none.
        manager = getattr(self.model_runner, "lora_manager", None)
        if manager is not None and not isinstance(manager.__dict__.get("_rookery"), _Loader):
            manager._rookery = _Loader(manager, device=self.device)
        return self.rookery_report()

    def rookery_report(self) -> dict[str, Any]:
        """Sizes, and the adaptable layers of the model by their Hugging Face names."""
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
    """Stands in for five methods of one worker's adapter managers.

    vLLM adds an adapter (`add_adapter`): it loads (`_load_adapter`), registers
    (`_create_merged_loras_inplace`) and activates it. A buffer that fits whole linear layers is one
    LoRAModel with one pseudo-layer, which is written to its slot at once; any other buffer becomes
    an ordinary LoRAModel.

    Before each step vLLM adds all adapters of its requests again (`_apply_adapters`), and copies
    the list of all adapters for each of them: with 512 that takes as long as the step. Those that
    are there are only marked as used here. Members that came since the last step are made then.

    A request may be on its way when its adapter turns out to be broken. vLLM would then try to add
    it again in the middle of a step, and die; it gets one without layers instead.
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
        except Exception:  # whatever is wrong with it: it is raised, and remembered
            self._broken.add(request.lora_int_id)
            self._inner.remove_adapter(request.lora_int_id)
            raise

    def _apply(self, requests: Any) -> None:
        """What the next step needs is in its slots."""
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
        """A buffer folder or a member as vLLM's LoRAModel; other folders the stock way."""
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
        """Skips packing for buffers and empty adapters."""
        if model.loras and _WHOLE not in model.loras:
            self._stock_merge(model)

    def _activate(self, lora_id: int) -> Any:
        """vLLM finds the slot and writes its layers: of a buffer, the one that stands for all."""
        inner = self._inner
        if lora_id in inner._active_adapters:
            return self._stock_activate(lora_id)
        if _WHOLE not in inner._registered_adapters[lora_id].loras:
            self._writer.fill()
            return self._stock_activate(lora_id)
        modules, inner.modules = inner.modules, {_WHOLE: self._writer}
        try:
            return self._stock_activate(lora_id)
        except BaseException:  # whatever it was: a slot half written is given back
            inner.deactivate_adapter(lora_id)
            raise
        finally:
            inner.modules = modules

    def _layout(self, request: Any, text: str, *, skip: int = 0) -> tuple[int, tuple[Any, ...]]:
        """The highest rank, and the layers by vLLM's names; a population's are all alike. `skip`
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
        """Renames alone, without the maps that stack q, k and v: vLLM stacks adapters itself.

        The method's name differs between versions; older mappers have no such maps.
        """
        mapper = getattr(self._inner.model, "hf_to_vllm_mapper", None)
        for rename in ("get_rename_mapper", "get_unstacked_mapper"):
            if hasattr(mapper, rename):
                return getattr(mapper, rename)()
        return mapper


if TYPE_CHECKING:
    import torch


# Keeps adapters of the output layer from tokens of the base model, on the CPU.
#
# vLLM marks a token without an adapter by slot -1. Its GPU kernels skip those; its CPU code takes
# the last slot for them, also in a batch without any adapter. An input of zeros adds nothing to the
# logits, whichever slot it meets.


def install_output_layer(inner: Any, device: Any) -> bool:
    """Whether requests for the base model are answered without the adapters' output layers."""
    if device.type != "cpu":
        return True
    tables = list(getattr(inner, "punica_wrapper_mapping", {}).values())
    if not tables or not all(hasattr(table, "sampler_indices") for table in tables):
        return False  # another version keeps them elsewhere
    for table in tables:
        table.add_lora_logits = _Logits(table)
    return True


class _Logits:
    """Stands in for `add_lora_logits` of one `PunicaWrapper`."""

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
