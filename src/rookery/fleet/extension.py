"""Runs inside vLLM's worker processes: loads adapters from memory instead of from PEFT files.

It is given to vLLM by `--worker-extension-cls` and called through `/collective_rpc`. It imports
nothing of Rookery, and torch and vLLM only when called: `launch.py` puts a copy of this one file
where the server's Python finds it.

Stock `load_lora_adapter` reads a tensor per factor, pins each in page-locked memory, and starts a
kernel or four per layer to write the slot. An arena is one file in shared memory (or one CUDA
allocation of the sender) with all factors in it: it is mapped, moved to the device in one copy, and
the whole slot is written from there together. Names, ids, slots and eviction stay vLLM's own.

    arena folder:  rookery_arena.json   {"format": 1, "dtype": "float32", "bytes": 3686400,
                                         "layers": [["model.layers.0.self_attn.q_proj",
                                                     rank, in, out, offset_a, offset_b], ...]}
                   rookery_arena.bin    unless "cuda" in the manifest names the sender's memory
"""

from __future__ import annotations

import base64
import functools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["WorkerExtension"]

MANIFEST, ARENA = "rookery_arena.json", "rookery_arena.bin"
FORMAT = 1


class WorkerExtension:
    """Methods that vLLM adds to its worker class. Their names must not meet any of vLLM's."""

    model_runner: Any
    device: Any

    def rookery_attach(self) -> dict[str, Any]:
        """Take over the loading of arena folders; what this worker can do. Twice is harmless."""
        # A server without adapters has none.
        manager = getattr(self.model_runner, "lora_manager", None)
        if manager is not None and not isinstance(manager.__dict__.get("_rookery"), _Loader):
            loader = _Loader(manager, device=self.device)
            manager._rookery = loader
            manager._load_adapter = loader.load_adapter
            manager.add_adapter = loader.add_adapter
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
            report |= {
                "max_loras": lora.max_loras,
                "max_cpu_loras": lora.max_cpu_loras,
                "max_lora_rank": lora.max_lora_rank,
                "lora_dtype": str(lora.lora_dtype).removeprefix("torch."),
                "layers": _layers(self.model_runner.lora_manager)
                if config.parallel_config.tensor_parallel_size == 1
                else {},
            }
        return report


class _Loader:
    """Stands in for two methods of one worker's adapter manager."""

    def __init__(self, manager: Any, *, device: Any) -> None:
        self._manager = manager
        self._device = device
        self._stock_load = manager._load_adapter
        self._stock_add = manager.add_adapter
        self._staged: dict[int, torch.Tensor] = {}
        self._names: dict[str, str] = {}
        self._landing: torch.Tensor | None = None
        self._writer = _SlotWriter(device)
        for module in manager._adapter_manager.modules.values():
            self._writer.attach(module)

    def load_adapter(self, request: Any) -> Any:
        """An arena folder as vLLM's LoRAModel, on the device; other folders the stock way."""
        folder = Path(request.lora_path)
        if not (folder / MANIFEST).is_file():
            return self._stock_load(request)
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.lora_weights import LoRALayerWeights

        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        layers = manifest["layers"]
        rank = max(layer[1] for layer in layers)
        self._check(request, manifest, rank)
        kept = _open_arena(folder, manifest)
        hot = self._arrive(folder, manifest, kept)
        kind = manifest["dtype"]
        on_device, in_memory = _typed(hot, kind), _typed(kept, kind)
        weights: dict[str, Any] = {}
        for name, layer_rank, size_in, size_out, offset_a, offset_b in layers:
            module = self._module_name(name)
            factors = []
            for offset, shape in (
                (offset_a, (layer_rank, size_in)),
                (offset_b, (size_out, layer_rank)),
            ):
                view = _view(on_device, offset, shape)
                if hot is not kept:
                    self._staged[id(view)] = _view(in_memory, offset, shape)
                factors.append(view)
            # The scale is in B already: vLLM must not multiply it in, the memory is shared.
            weights[module] = LoRALayerWeights(
                module, layer_rank, layer_rank, factors[0], factors[1], scaling=1.0
            )
        return LoRAModel(request.lora_int_id, rank, weights)

    def add_adapter(self, request: Any) -> bool:
        """Stock, then let go of the device copy: the slot has the weights, the arena keeps them.

        vLLM calls this before every step for every adapter in it, to bring back those whose slot
        was taken: mostly there is nothing to do.
        """
        try:
            with self._writer.together():
                return bool(self._stock_add(request))
        finally:
            if self._staged:
                self._let_go(request.lora_int_id)

    def _arrive(self, folder: Path, manifest: dict[str, Any], kept: torch.Tensor) -> torch.Tensor:
        """The arena on the device. Files go through one page-locked buffer: sooner than mapped."""
        import torch

        if self._device.type != "cuda" or kept.is_cuda:
            return kept.to(self._device)
        size = manifest["bytes"]
        if self._landing is None or self._landing.numel() < size:
            self._landing = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        landing = self._landing[:size]
        with (folder / ARENA).open("rb", buffering=0) as file:
            view, done = landing.numpy().data, 0
            while done < size:
                count = file.readinto(view[done:])
                if not count:
                    raise ValueError(f"{folder / ARENA} ends after {done} bytes of {size}")
                done += count
        return landing.to(self._device)

    def _let_go(self, lora_id: int) -> None:
        model = self._manager._adapter_manager.list_adapters().get(lora_id)
        for layer in model.loras.values() if model is not None else ():
            layer.lora_a = self._kept(layer.lora_a)
            layer.lora_b = self._kept(layer.lora_b)
        self._staged.clear()

    def _kept(self, factor: Any) -> Any:
        if isinstance(factor, list):
            return [self._kept(part) for part in factor]
        return self._staged.get(id(factor), factor)

    def _check(self, request: Any, manifest: dict[str, Any], rank: int) -> None:
        if manifest["format"] != FORMAT:
            raise ValueError(f"arena format {manifest['format']}, this worker reads {FORMAT}")
        if rank > self._manager.lora_config.max_lora_rank:
            limit = self._manager.lora_config.max_lora_rank
            raise ValueError(f"{request.lora_name} has rank {rank}, at most {limit} is allowed")
        packed = self._manager._adapter_manager.packed_modules_mapping
        known: set[str] = set()
        for module in self._manager._adapter_manager.supported_lora_modules:
            known.update(packed.get(module, (module,)))
        wrong = [layer[0] for layer in manifest["layers"] if layer[0].split(".")[-1] not in known]
        if wrong:
            raise ValueError(f"{request.lora_name} adapts {wrong[0]}; known are {sorted(known)}")

    def _module_name(self, layer: str) -> str:
        if layer not in self._names:
            from vllm.lora.utils import parse_fine_tuned_lora_name

            name = f"base_model.model.{layer}.lora_A.weight"
            self._names[layer] = str(parse_fine_tuned_lora_name(name, self._mapper())[0])
        return self._names[layer]

    def _mapper(self) -> Any:
        """Renames alone, without the maps that stack q, k and v: vLLM stacks adapters itself.

        The method's name differs between versions; older mappers have no such maps.
        """
        mapper = getattr(self._manager._adapter_manager.model, "hf_to_vllm_mapper", None)
        for rename in ("get_rename_mapper", "get_unstacked_mapper"):
            if hasattr(mapper, rename):
                return getattr(mapper, rename)()
        return mapper


class _SlotWriter:
    """Writes what `set_lora` and `reset_lora` of many layers write, in a few kernels for all."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._is_waiting = False
        self._found: dict[tuple[int, int], list[torch.Tensor]] = {}
        self._zeroed: list[torch.Tensor] = []
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def attach(self, module: Any) -> None:
        """Stand in for the two methods, of whole linear layers; others keep their own."""
        from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
        from vllm.lora.layers.column_parallel_linear import MergedColumnParallelLinearWithLoRA

        kind = type(module)
        known = (BaseLinearLayerWithLoRA, MergedColumnParallelLinearWithLoRA)
        is_linear = isinstance(module, BaseLinearLayerWithLoRA) and (
            kind.reset_lora is BaseLinearLayerWithLoRA.reset_lora
            and kind.set_lora in [own.set_lora for own in known]
        )
        if is_linear and module.tp_size == 1:
            module.reset_lora = functools.partial(self._reset, module)
            module.set_lora = functools.partial(self._set, module)

    @contextmanager
    def together(self) -> Iterator[None]:
        """What layers are told in the block is written at its end; nothing after an error."""
        self._is_waiting = True
        try:
            yield
            if self._zeroed or self._copies:
                self._write()
        finally:
            self._is_waiting = False
            self._zeroed, self._copies = [], []

    def _reset(self, module: Any, index: int) -> None:
        if not self._is_waiting:
            return type(module).reset_lora(module, index)  # type: ignore[no-any-return]
        self._zeroed += self._slots(module, index)
        return None

    def _set(self, module: Any, index: int, lora_a: Any, lora_b: Any) -> None:
        factors_a = lora_a if isinstance(lora_a, list) else [lora_a]
        factors_b = lora_b if isinstance(lora_b, list) else [lora_b]
        if not self._is_waiting or not len(factors_a) == len(factors_b) == module.n_slices:
            self._is_waiting, before = False, self._is_waiting
            try:
                type(module).set_lora(module, index, lora_a, lora_b)
            finally:
                self._is_waiting = before
            return
        slots = self._slots(module, index)
        for slot, factor in zip(slots, (*factors_a, *factors_b), strict=True):
            if factor is None or factor.shape != slot.shape:
                self._zeroed.append(slot)
            if factor is not None and factor.shape == slot.shape:
                self._copies.append((slot, factor))
            elif factor is not None:
                rows, columns = factor.shape
                self._copies.append((slot[:rows, :columns], factor))

    def _slots(self, module: Any, index: int) -> list[torch.Tensor]:
        """The slot of every factor of a layer, A's before B's. vLLM never moves them."""
        key = id(module), index
        if key not in self._found:
            stacks = (*module.lora_a_stacked, *module.lora_b_stacked)
            self._found[key] = [stacked[index, 0] for stacked in stacks]
        return self._found[key]

    def _write(self) -> None:
        import torch

        if self._zeroed:
            torch._foreach_zero_(self._zeroed)
        if self._copies:
            sources = self._on_device([factor for _, factor in self._copies])
            torch._foreach_copy_([part for part, _ in self._copies], sources, non_blocking=True)

    def _on_device(self, factors: list[torch.Tensor]) -> list[torch.Tensor]:
        """The factors; those of one arena in host memory as parts of one copy on the device."""
        import torch

        arenas: dict[int, torch.Tensor] = {}
        moved = []
        for factor in factors:
            storage = factor.untyped_storage()
            if factor.device == self._device or storage.nbytes() == factor.nbytes:
                moved.append(factor)
                continue
            key = storage.data_ptr()
            if key not in arenas:
                whole = torch.empty(0, dtype=torch.uint8).set_(storage)
                arenas[key] = whole.to(self._device)
            hot = torch.empty(0, dtype=factor.dtype, device=self._device)
            place = factor.storage_offset(), factor.shape, factor.stride()
            moved.append(hot.set_(arenas[key].untyped_storage(), *place))
        return moved


def _open_arena(folder: Path, manifest: dict[str, Any]) -> torch.Tensor:
    """The arena as bytes: the sender's CUDA memory, or a private mapping of the file."""
    import torch

    size = manifest["bytes"]
    if "cuda" not in manifest:
        return torch.from_file(str(folder / ARENA), shared=False, size=size, dtype=torch.uint8)
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    sent = manifest["cuda"]
    uuids = [
        str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())
    ]
    if sent["uuid"] not in uuids:
        raise ValueError(f"the adapter is on GPU {sent['uuid']}, this worker sees {uuids}")
    return rebuild_cuda_tensor(  # type: ignore[no-any-return, no-untyped-call]
        torch.Tensor, (size,), (1,), 0, torch.UntypedStorage, torch.uint8,
        uuids.index(sent["uuid"]), base64.b64decode(sent["handle"]), sent["size_bytes"],
        sent["offset_bytes"], False, base64.b64decode(sent["counter"]), sent["counter_offset"],
        base64.b64decode(sent["event"]), sent["event_sync"],
    )  # fmt: skip


def _typed(arena: torch.Tensor, dtype: str) -> torch.Tensor:
    import torch

    kind = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}[dtype]
    whole = arena.numel() // kind.itemsize * kind.itemsize
    return arena[:whole].view(kind)


def _view(arena: torch.Tensor, offset: int, shape: tuple[int, int]) -> torch.Tensor:
    """A factor in a typed arena; `offset` is in bytes. One operation: there are hundreds."""
    place = offset // arena.itemsize + arena.storage_offset()
    return arena.as_strided(shape, (shape[1], 1), place)


def _layers(manager: Any) -> dict[str, list[int]]:
    """[in, out] of every layer that takes adapters, such as `model.layers.0.self_attn.q_proj`."""
    found: dict[str, list[int]] = {}
    inner = manager._adapter_manager
    for name, module in inner.modules.items():
        stacked = getattr(module, "lora_a_stacked", None)
        if not isinstance(stacked, tuple):
            continue
        parent, _, leaf = name.rpartition(".")
        parts = inner.packed_modules_mapping.get(leaf, [leaf])
        if len(parts) != len(stacked):
            continue
        for part, a, b in zip(parts, stacked, module.lora_b_stacked, strict=True):
            found[f"{parent}.{part}"] = [a.shape[-1], b.shape[-2]]
    return found
