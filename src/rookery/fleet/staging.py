"""Where adapters wait for servers to read them: a folder in shared memory, or one given.

    with open_staging(None) as staging:
        staging.peft_folder(ref, adapter, base=root)     # for `load_lora_adapter` and the resolver
        staging.arena_folder(ref, adapter, dtype="bfloat16")     # for the worker extension

Both forms hold B with its scale multiplied in, in the adapter's own dtype, so that a server reads
the same numbers whichever way they come. Folders are named by content and never change.
"""

import base64
import contextlib
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from rookery.errors import AdapterError, FleetError, boundary
from rookery.fleet.extension import ARENA, FORMAT, MANIFEST
from rookery.types import Adapter, LoraFactors, ModelRef

if TYPE_CHECKING:
    import torch

__all__ = ["Staging", "as_safetensors", "open_staging", "wire_name"]

_MEMORY = Path("/dev/shm")
_PREFIX = "rookery-adapters-"
_DTYPES = ("float32", "float16", "bfloat16")
_ALIGNMENT = 256
"""Offsets in an arena: the strictest alignment of a CUDA copy."""
_MAX_PARTS = 1024
"""Buffers that one write takes, on every system."""


def wire_name(ref: ModelRef) -> str:
    """The name a server knows an adapter by: its served name, fit for a path and a URL."""
    return quote(ref.served_name, safe="@-_.~")


class Staging:
    """Folders of adapters under one root.

    `in_place` hands over adapters that are on a GPU by their address there, without a copy; every
    server must run on that GPU.
    """

    def __init__(self, root: Path, *, in_place: bool = False) -> None:
        self.root = root
        self._in_place = in_place
        self._arenas: dict[Path, torch.Tensor] = {}

    def peft_folder(self, ref: ModelRef, adapter: Adapter, *, base: str) -> Path:
        """A PEFT folder, written once. `base` is what the resolver compares with the server's."""
        folder = self.root / wire_name(ref)
        if not folder.is_dir():
            # Needed only where adapters are served, which is where torch is.
            from rookery.weights import write_adapter

            write_adapter(replace(_folded(adapter), base=base), folder)
        return folder

    def arena_folder(self, ref: ModelRef, adapter: Adapter, *, dtype: str) -> Path:
        """All factors in one piece, in the dtype of the servers' slots; written once."""
        folder = self.root / f"{wire_name(ref)}.{dtype}.arena"
        if folder.is_dir():
            return folder
        with boundary(FleetError, f"Writing {folder}", foreign=(OSError,)):
            temporary = Path(tempfile.mkdtemp(dir=self.root))
            self._write_arena(temporary, folder, _folded(adapter), dtype)
            temporary.chmod(0o755)
            temporary.rename(folder)
        return folder

    def remove(self, ref: ModelRef) -> None:
        """Forget an adapter's folders; a server that still has them open keeps what it mapped."""
        name = wire_name(ref)
        for folder in (self.root / name, *(self.root / f"{name}.{d}.arena" for d in _DTYPES)):
            shutil.rmtree(folder, ignore_errors=True)
            self._arenas.pop(folder, None)

    def _write_arena(self, temporary: Path, folder: Path, adapter: Adapter, dtype: str) -> None:
        layers, num_bytes, pieces = _layout(adapter, dtype)
        manifest: dict[str, Any] = {
            "format": FORMAT, "dtype": dtype, "bytes": num_bytes, "layers": layers,
        }  # fmt: skip
        if self._in_place:
            arena = _fill(pieces, num_bytes)
            manifest["cuda"] = _cuda_handle(arena)
            # The memory is the server's to read until the adapter is removed.
            self._arenas[folder] = arena
        else:
            _write_pieces(pieces, num_bytes, temporary / ARENA)
        (temporary / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")


@contextmanager
def open_staging(root: Path | None, *, in_place: bool = False) -> Iterator[Staging]:
    """A staging folder: the given one is kept, one of our own goes with the block.

    Folders that a killed process left in shared memory are removed: nobody holds their lock.
    """
    if root is not None:
        with boundary(FleetError, f"Creating {root}", foreign=(OSError,)):
            root.mkdir(parents=True, exist_ok=True)
        yield Staging(root, in_place=in_place)
        return
    parent = _MEMORY if os.access(_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    _remove_left_over(parent)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    folder.chmod(0o755)
    lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        yield Staging(folder, in_place=in_place)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


@contextmanager
def as_safetensors(path: Path) -> Iterator[Path]:
    """The folder itself, or a copy of one that holds adapter_model.bin in the safe format."""
    old = path / "adapter_model.bin"
    if (path / "adapter_model.safetensors").exists() or not old.exists():
        yield path
        return
    import torch
    from safetensors.torch import save_file

    tensors = torch.load(old, map_location="cpu", weights_only=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        shutil.copy(path / "adapter_config.json", folder)
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(contiguous, folder / "adapter_model.safetensors")
        yield folder


def _remove_left_over(parent: Path) -> None:
    for lock in parent.glob(f"{_PREFIX}*/.lock"):
        with contextlib.suppress(OSError):
            descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
            finally:
                os.close(descriptor)


def _folded(adapter: Adapter) -> Adapter:
    """The same adapter with scale 1: products in float32, then the dtype the factors had.

    torch multiplies half precision by a number in float32 and rounds once. Factors of one kind are
    multiplied together: a call for each costs more than the numbers.
    """
    import torch

    kinds: dict[tuple[float, torch.dtype, torch.device], list[str]] = {}
    for layer, lora in adapter.factors.items():
        if lora.scale != 1:
            kinds.setdefault((lora.scale, lora.b.dtype, lora.b.device), []).append(layer)
    factors = dict(adapter.factors)
    for (scale, _, _), layers in kinds.items():
        own = [adapter.factors[layer] for layer in layers]
        products = torch.cat([lora.b.detach().reshape(-1) for lora in own]).mul_(scale)
        parts = torch.split(products, [lora.b.numel() for lora in own])
        for layer, lora, part in zip(layers, own, parts, strict=True):
            factors[layer] = LoraFactors(a=lora.a, b=part.view(lora.b.shape), scale=1.0)
    return replace(adapter, factors=factors)


def _layout(
    adapter: Adapter, dtype: str
) -> tuple[list[list[Any]], int, list[tuple[int, "torch.Tensor"]]]:
    """Where every factor goes: the manifest's layers, the arena's size, (offset, tensor) pairs."""
    import torch

    if dtype not in _DTYPES:
        raise AdapterError(
            f"The servers keep adapters as {dtype}; Rookery sends {', '.join(_DTYPES)}. Start them "
            "with launch.extension: false to load adapters the stock way."
        )
    kind: torch.dtype = getattr(torch, dtype)
    layers: list[list[Any]] = []
    pieces: list[tuple[int, torch.Tensor]] = []
    end = 0
    for name, lora in adapter.factors.items():
        offsets = []
        for factor in (lora.a, lora.b):
            converted = factor.detach().to(kind).contiguous()
            pieces.append((end, converted))
            offsets.append(end)
            num_bytes = converted.numel() * converted.element_size()
            end += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        layers.append([name, lora.a.shape[0], lora.a.shape[1], lora.b.shape[0], *offsets])
    return layers, end, pieces


def _write_pieces(pieces: list[tuple[int, "torch.Tensor"]], num_bytes: int, path: Path) -> None:
    """The arena as a file, straight from the factors' own memory.

    Writing to shared memory costs half of mapping it: pages are not cleared before they are filled.
    """
    parts: list[memoryview] = []
    ends = [offset for offset, _ in pieces[1:]] + [num_bytes]
    for (offset, tensor), end in zip(pieces, ends, strict=True):
        flat = _as_bytes(tensor.cpu()).numpy().data
        parts.append(flat)
        if gap := end - offset - len(flat):
            parts.append(memoryview(bytes(gap)))
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        while parts:
            written = os.writev(descriptor, parts[:_MAX_PARTS])
            while parts and written >= len(parts[0]):
                written -= len(parts.pop(0))
            if written:
                parts[0] = parts[0][written:]
    finally:
        os.close(descriptor)


def _as_bytes(tensor: "torch.Tensor") -> "torch.Tensor":
    import torch

    return tensor.reshape(-1).view(torch.uint8)


def _fill(pieces: list[tuple[int, "torch.Tensor"]], num_bytes: int) -> "torch.Tensor":
    """The arena in memory of the GPU that the factors are on."""
    import torch

    devices = {tensor.device for _, tensor in pieces}
    if len(devices) != 1 or not next(iter(devices)).type == "cuda":
        raise AdapterError(
            f"An adapter is on {', '.join(sorted(map(str, devices)))}; handing adapters over "
            "in place needs all of it on the servers' GPU: write in_place: false."
        )
    arena = torch.empty(num_bytes, dtype=torch.uint8, device=devices.pop())
    sources = [_as_bytes(tensor) for _, tensor in pieces]
    places = [
        arena[offset : offset + source.numel()]
        for (offset, _), source in zip(pieces, sources, strict=True)
    ]
    torch._foreach_copy_(places, sources)
    torch.cuda.synchronize(arena.device)
    return arena


def _cuda_handle(arena: "torch.Tensor") -> dict[str, Any]:
    """What another process on this machine needs to open the arena's CUDA memory."""
    import torch
    from torch.multiprocessing.reductions import reduce_tensor

    fields = reduce_tensor(arena)[1]  # type: ignore[no-untyped-call]
    return {
        "uuid": str(torch.cuda.get_device_properties(arena.device).uuid),
        "handle": base64.b64encode(fields[7]).decode(),
        "size_bytes": fields[8],
        "offset_bytes": fields[9],
        "counter": base64.b64encode(fields[11]).decode(),
        "counter_offset": fields[12],
        "event": base64.b64encode(fields[13]).decode(),
        "event_sync": fields[14],
    }
