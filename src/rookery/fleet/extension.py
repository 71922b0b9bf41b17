"""Runs inside vLLM's worker processes: loads adapters from memory instead of from PEFT files.

It is given to vLLM by `--worker-extension-cls` and called through `/collective_rpc`. It imports
nothing of Rookery, and torch and vLLM only when called: `launch.py` puts a copy of this one file
where the server's Python finds it.

Stock `load_lora_adapter` reads a tensor per factor, pins each in page-locked memory, and starts a
kernel or four per layer to write the slot. An arena is one file in shared memory (or one CUDA
allocation of the sender) with all factors in it: it goes to the device in one piece, and the whole
slot is written from there by a few kernels. Names, ids, slots and eviction stay vLLM's own.

    arena folder:  rookery_arena.json   {"format": 2, "dtype": "float32", "bytes": 3686400,
                                         "scale": 2.0, "scaled_from": 1843200,
                                         "layers": "[[\"model.layers.0.self_attn.q_proj\",
                                                     rank, in, out, offset_a, offset_b], ...]"}
                   rookery_arena.bin    unless "cuda" in the manifest names the sender's memory

From byte `scaled_from` on, which is where the B factors are, numbers are still to be multiplied by
`scale`; 1.0 leaves them as they are.
"""

from __future__ import annotations

import base64
import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["WorkerExtension"]

MANIFEST, ARENA = "rookery_arena.json", "rookery_arena.bin"
FORMAT = 2
_WHOLE = "rookery.whole"
"""The one layer that vLLM sees of an arena: all of them."""
_READERS = 8
"""Threads that read an arena: one copies 20 MB in 5 ms."""


class WorkerExtension:
    """Methods that vLLM adds to its worker class. Their names must not meet any of vLLM's."""

    model_runner: Any
    device: Any

    def rookery_attach(self) -> dict[str, Any]:
        """Take over the loading of arena folders; what this worker can do. Twice is harmless."""
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
            parts = _parts(self.model_runner.lora_manager._adapter_manager) if is_whole else {}
            report |= {
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
    """Stands in for three methods of one worker's adapter managers.

    vLLM loads (`_load_adapter`), registers (`_create_merged_loras_inplace`) and activates an
    adapter. An arena that fits whole linear layers is one LoRAModel with one pseudo-layer, which
    is written to its slot at once; any other arena becomes an ordinary LoRAModel.
    """

    def __init__(self, manager: Any, *, device: Any) -> None:
        self._manager, self._inner = manager, manager._adapter_manager
        self._device = device
        self._stock_load = manager._load_adapter
        self._stock_merge = self._inner._create_merged_loras_inplace
        self._stock_activate = self._inner.activate_adapter
        self._layouts: dict[str, tuple[int, tuple[Any, ...]]] = {}
        self._writer = _SlotWriter(self._inner, device)
        manager._load_adapter = self._load
        self._inner._create_merged_loras_inplace = self._merge
        self._inner.activate_adapter = self._activate

    def _load(self, request: Any) -> Any:
        """An arena folder as vLLM's LoRAModel; other folders the stock way."""
        folder = Path(request.lora_path)
        try:
            text = (folder / MANIFEST).read_text(encoding="utf-8")
        except FileNotFoundError:
            return self._stock_load(request)
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.lora_weights import LoRALayerWeights

        manifest = json.loads(text)
        rank, layers = self._layout(request, manifest)
        arena = _open_arena(folder, manifest, layers)
        if self._writer.fits(layers):
            whole = LoRALayerWeights(_WHOLE, rank, rank, arena, arena, scaling=1.0)
            return LoRAModel(request.lora_int_id, rank, {_WHOLE: whole})
        memory, weights = arena.on(self._device), {}
        for name, layer_rank, size_in, size_out, offset_a, offset_b in layers:
            a = _view(memory, offset_a, (layer_rank, size_in))
            b = _view(memory, offset_b, (size_out, layer_rank))
            weights[name] = LoRALayerWeights(name, layer_rank, layer_rank, a, b, scaling=1.0)
        return LoRAModel(request.lora_int_id, rank, weights)

    def _merge(self, model: Any) -> None:
        """Arenas need neither packing nor page-locked copies."""
        if _WHOLE not in model.loras:
            self._stock_merge(model)

    def _activate(self, lora_id: int) -> Any:
        """vLLM finds the slot and writes its layers: of an arena, the one that stands for all."""
        inner = self._inner
        if lora_id in inner._active_adapters:
            return self._stock_activate(lora_id)
        if _WHOLE not in inner._registered_adapters[lora_id].loras:
            return self._stock_activate(lora_id)
        modules, inner.modules = inner.modules, {_WHOLE: self._writer}
        try:
            return self._stock_activate(lora_id)
        except BaseException:
            inner.deactivate_adapter(lora_id)
            raise
        finally:
            inner.modules = modules

    def _layout(self, request: Any, manifest: dict[str, Any]) -> tuple[int, tuple[Any, ...]]:
        """The highest rank, and the layers by vLLM's names; a population's are all alike."""
        if manifest["format"] != FORMAT:
            raise ValueError(f"arena format {manifest['format']}, this worker reads {FORMAT}")
        text = manifest["layers"]
        if text not in self._layouts:
            given = json.loads(text)
            rank = max(layer[1] for layer in given)
            self._check(request, [layer[0] for layer in given], rank)
            named = tuple((self._module_name(name), *sizes) for name, *sizes in given)
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


@dataclass(frozen=True)
class _Plan:
    """How a slot is written from arenas of one layout. Factors by their place in `_SlotWriter`."""

    sizes: list[int]
    """The arena cut in pieces: a factor, a gap, a factor, ..."""
    places: list[tuple[int, tuple[int, int] | None]]
    """Of every factor in turn; its shape where it does not fill its slot."""
    unfilled: list[int]
    """Places that no factor fills."""


class _SlotWriter:
    """Writes whole slots from arenas, as `set_lora` and `reset_lora` of all layers would."""

    def __init__(self, inner: Any, device: Any) -> None:
        self._device = device
        self._places: dict[str, tuple[int, int]] = {}
        """Of a layer's A and B."""
        self._slots: list[tuple[torch.Tensor, ...]] = []
        """Of every place: the factor's memory in every slot. vLLM never moves it, and a view of
        each would take longer to make than all of them to fill."""
        self._flat: list[tuple[torch.Tensor, ...]] = []
        self._plans: dict[tuple[Any, ...], _Plan] = {}
        plain: set[int] = set()
        for name, (module, i) in _parts(inner).items():
            if _is_plain(module):
                plain.add(id(module))
                self._places[name] = len(self._slots), len(self._slots) + 1
                for stacked in (module.lora_a_stacked[i], module.lora_b_stacked[i]):
                    self._slots.append(stacked[:, 0].unbind(0))
                    self._flat.append(stacked.view(len(stacked), -1).unbind(0))
        self._others = [m for m in inner.modules.values() if id(m) not in plain]

    def fits(self, layers: tuple[Any, ...]) -> bool:
        """Whether every layer is a whole linear one that can be written directly."""
        return all(layer[0] in self._places for layer in layers)

    def set_lora(self, index: int, arena: _Arena, _: _Arena) -> None:
        """Called by vLLM as if this were a layer."""
        import torch

        plan = self._plans.get(arena.layers)
        if plan is None:
            plan = self._plans[arena.layers] = self._plan(arena.layers, arena.itemsize)
        targets, sources = [], []
        memory = arena.on(self._device)
        pieces = torch.split(memory[: sum(plan.sizes)], plan.sizes)[::2]
        for (place, shape), piece in zip(plan.places, pieces, strict=True):
            if shape is None:
                targets.append(self._flat[place][index])
                sources.append(piece)
            else:
                targets.append(self._slots[place][index][: shape[0], : shape[1]])
                sources.append(piece.view(shape))
        for module in self._others:
            module.reset_lora(index)
        if plan.unfilled:
            torch._foreach_zero_([self._flat[place][index] for place in plan.unfilled])
        torch._foreach_copy_(targets, sources, non_blocking=True)

    def _plan(self, layers: tuple[Any, ...], itemsize: int) -> _Plan:
        found: list[tuple[int, int, tuple[int, int]]] = []
        for name, rank, size_in, size_out, offset_a, offset_b in layers:
            place_a, place_b = self._places[name]
            found.append((offset_a // itemsize, place_a, (rank, size_in)))
            found.append((offset_b // itemsize, place_b, (size_out, rank)))
        found.sort()
        sizes: list[int] = []
        places: list[tuple[int, tuple[int, int] | None]] = []
        for begin, place, shape in found:
            num = shape[0] * shape[1]
            if sizes:
                sizes.append(begin - sum(sizes))
            sizes.append(num)
            is_whole = tuple(self._slots[place][0].shape) == shape
            places.append((place, None if is_whole else shape))
        filled = {place for place, shape in places if shape is None}
        unfilled = [place for place in range(len(self._slots)) if place not in filled]
        return _Plan(sizes=sizes, places=places, unfilled=unfilled)


class _Arena:
    """All factors of one adapter: in a file that is read again whenever a slot is written."""

    landing: torch.Tensor | None = None
    """One page-locked buffer for all arenas of this process: copies from it are the quickest."""
    landed: Any = None
    """When the device has read it."""
    readers = ThreadPoolExecutor(_READERS, thread_name_prefix="rookery-arena")

    def __init__(
        self, manifest: dict[str, Any], layers: tuple[Any, ...], source: int | torch.Tensor
    ) -> None:
        import torch

        self.layers = layers
        self.size = manifest["bytes"]
        self.scale, self.scaled_from = manifest["scale"], manifest["scaled_from"]
        self.kind: torch.dtype = getattr(torch, manifest["dtype"])
        self.itemsize = self.kind.itemsize
        self._source = source

    def __del__(self) -> None:
        if isinstance(self._source, int):
            os.close(self._source)

    def on(self, device: Any) -> torch.Tensor:
        """The numbers in one line on the device, scaled."""
        import torch

        if isinstance(self._source, torch.Tensor):
            return self._source.to(device).view(self.kind)
        if device.type == "cuda":
            memory = self._through_landing(device)
        else:
            memory = torch.empty(self.size, dtype=torch.uint8)
            self._read(memory, 0, self.size)
            memory = memory.to(device)
        numbers = memory.view(self.kind)
        if self.scale != 1:
            numbers[self.scaled_from // self.itemsize :].mul_(self.scale)
        return numbers

    def _through_landing(self, device: Any) -> torch.Tensor:
        import torch

        if _Arena.landing is None or _Arena.landing.numel() < self.size:
            _Arena.landing = torch.empty(self.size, dtype=torch.uint8, pin_memory=True)
        elif _Arena.landed is not None:
            _Arena.landed.synchronize()
        landing = _Arena.landing
        memory = torch.empty(self.size, dtype=torch.uint8, device=device)
        step = -(-self.size // _READERS)
        parts = [(begin, min(begin + step, self.size)) for begin in range(0, self.size, step)]
        reads = [_Arena.readers.submit(self._read, landing, *part) for part in parts]
        for read, (begin, end) in zip(reads, parts, strict=True):
            read.result()
            memory[begin:end].copy_(landing[begin:end], non_blocking=True)
        _Arena.landed = torch.cuda.Event()  # type: ignore[no-untyped-call]
        _Arena.landed.record()
        return memory

    def _read(self, memory: torch.Tensor, begin: int, end: int) -> None:
        view = memory.numpy().data
        while begin < end:
            count = os.preadv(self._source, [view[begin:end]], begin)  # type: ignore[arg-type]
            if not count:
                raise ValueError(f"an arena ends after {begin} bytes of {self.size}")
            begin += count


def _open_arena(folder: Path, manifest: dict[str, Any], layers: tuple[Any, ...]) -> _Arena:
    """The sender's CUDA memory, or the file, kept open: its folder may be removed."""
    if "cuda" not in manifest:
        return _Arena(manifest, layers, os.open(folder / ARENA, os.O_RDONLY | os.O_CLOEXEC))
    import torch
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    sent = manifest["cuda"]
    uuids = [
        str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())
    ]
    if sent["uuid"] not in uuids:
        raise ValueError(f"the adapter is on GPU {sent['uuid']}, this worker sees {uuids}")
    memory = rebuild_cuda_tensor(  # type: ignore[no-untyped-call]
        torch.Tensor, (manifest["bytes"],), (1,), 0, torch.UntypedStorage, torch.uint8,
        uuids.index(sent["uuid"]), base64.b64decode(sent["handle"]), sent["size_bytes"],
        sent["offset_bytes"], False, base64.b64decode(sent["counter"]), sent["counter_offset"],
        base64.b64decode(sent["event"]), sent["event_sync"],
    )  # fmt: skip
    return _Arena(manifest, layers, memory)


def _view(numbers: torch.Tensor, offset: int, shape: tuple[int, int]) -> torch.Tensor:
    """A factor in an arena; `offset` is in bytes."""
    begin = offset // numbers.itemsize
    return numbers[begin : begin + shape[0] * shape[1]].view(shape)


def _parts(inner: Any) -> dict[str, tuple[Any, int]]:
    """Every layer that takes adapters, such as `model.layers.0.self_attn.q_proj`, as the part of
    vLLM's layer that it is."""
    found: dict[str, tuple[Any, int]] = {}
    for name, module in inner.modules.items():
        stacked = getattr(module, "lora_a_stacked", None)
        parent, _, leaf = name.rpartition(".")
        parts = inner.packed_modules_mapping.get(leaf, [leaf])
        if isinstance(stacked, tuple) and len(parts) == len(stacked):
            found.update({f"{parent}.{part}": (module, i) for i, part in enumerate(parts)})
    return found


def _is_plain(module: Any) -> bool:
    """A linear layer, whole on this GPU, that vLLM writes factor by factor."""
    from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
    from vllm.lora.layers.column_parallel_linear import MergedColumnParallelLinearWithLoRA

    kind = type(module)
    known = (BaseLinearLayerWithLoRA.set_lora, MergedColumnParallelLinearWithLoRA.set_lora)
    return (
        isinstance(module, BaseLinearLayerWithLoRA)
        and kind.reset_lora is BaseLinearLayerWithLoRA.reset_lora
        and kind.set_lora in known
        and module.tp_size == 1
    )
