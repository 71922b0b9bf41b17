"""Where adapters wait for servers to read them: a folder in shared memory, or a configured one.

    with open_staging(None) as staging:
        staging.peft_folder(ref, adapter, base=root)     # for `load_lora_adapter` and the resolver
        staging.buffer_folder(ref, adapter, dtype="bfloat16")     # for the worker extension
        staging.member_text(ref, adapter)                         # for the same, of a member

Servers get B multiplied by its scale, in the adapter's own dtype: every route gives the same
numbers. Folders are named by content and owner (`Owner`), and never change.
"""

import base64
import os
import tempfile
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from rookery.errors import FleetError

if TYPE_CHECKING:
    import torch
import contextlib
import ctypes
import json
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from urllib.parse import quote

from rookery.errors import AdapterError, boundary
from rookery.fleet.perturbed import PerturbedFactors, StepPopulation
from rookery.fleet.residency import Owner, claim_folder, find_left
from rookery.fleet.vllm_plugin.population import CENTRE, CENTRE_FORMAT, NUMBERS
from rookery.fleet.vllm_plugin.shared_memory import BUFFER, FORMAT, MANIFEST
from rookery.types import Adapter, LoraFactors, ModelRef

__all__ = ["BufferFile", "Staging", "as_safetensors", "memory_folder", "open_staging"]

# Memory for adapters on their way to a server, made before it is needed.
#
#     files = Spares(lambda size: [BufferFile(folder, size)])
#     file = files.take(20_185_088)         # made the last time one was taken, or now
#     file.numbers(torch.bfloat16)[:] = ...
#     file.name(folder / "poet" / "rookery_buffer.bin")
#     files.close()
#
# Writing to shared memory spends most of its time on making pages, and writing to a GPU on
# allocating. A population's adapters have one size, so a thread makes the next pieces after the
# last was taken.


_SLAB_BYTES = 128 * 2**20
"""Limit on GPU memory that is allocated ahead of need."""

Key = TypeVar("Key", bound=Hashable)
Made = TypeVar("Made")


class Spares(Generic[Key, Made]):
    """Spare pieces of memory of the size that was taken last; thread-safe.

    `make` returns one piece or several; it is called again when all are taken.
    """

    def __init__(self, make: Callable[[Key], list[Made]]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._ready: tuple[Key, list[Made]] | None = None
        self._coming: tuple[Key, Future[list[Made]]] | None = None
        self._maker: ThreadPoolExecutor | None = None

    def take(self, key: Key) -> Made:
        """Return a spare piece of this size, else a new one."""
        with self._lock:
            if self._ready is not None and self._ready[0] == key and self._ready[1]:
                return self._ready[1].pop()
            coming, self._coming = self._coming, None
        if coming is not None and coming[0] == key and coming[1].exception() is None:
            one, *others = coming[1].result()
        else:
            one, *others = self._make(key)
        with self._lock:
            self._ready = key, others
        return one

    def refill(self, key: Key, *, after: Made | None = None) -> None:
        """Start to make the next pieces if none is left. The thread that makes them drops `after`,
        as unmapping memory takes time."""
        with self._lock:
            is_left = self._ready is not None and self._ready[0] == key and self._ready[1]
            if self._coming is None and not is_left:
                self._maker = self._maker or ThreadPoolExecutor(1, thread_name_prefix="rookery")
                self._coming = key, self._maker.submit(self._remake, key, [after])

    def _remake(self, key: Key, after: list[Made | None]) -> list[Made]:
        after.clear()
        return self._make(key)

    def close(self) -> None:
        with self._lock:
            if self._maker is not None:
                self._maker.shutdown(cancel_futures=True)
            self._ready = self._coming = self._maker = None


class BufferFile:
    """A file without a name and its mapped memory: nothing is left when the process dies.

    On file systems that need names, it has a temporary one until `name` is called.
    """

    def __init__(self, folder: Path, num_bytes: int) -> None:
        import torch

        self._named: str | None = None
        try:
            flags = os.O_RDWR | os.O_CLOEXEC | os.O_TMPFILE
            self._descriptor = os.open(folder, flags, 0o644)
        except OSError:
            self._descriptor, self._named = tempfile.mkstemp(prefix=".buffer-", dir=folder)
            os.fchmod(self._descriptor, 0o644)
        # On a full disk this raises; a write to the mapping would kill the process.
        os.posix_fallocate(self._descriptor, 0, num_bytes)
        self.memory = torch.from_file(
            self._own_path, shared=True, size=num_bytes, dtype=torch.uint8
        ).zero_()

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)
            if self._named is not None:
                Path(self._named).unlink(missing_ok=True)

    @property
    def _own_path(self) -> str:
        return self._named or f"/proc/self/fd/{self._descriptor}"

    def name(self, path: Path) -> None:
        """Give the file its final path."""
        if self._named is not None:
            Path(self._named).rename(path)
            self._named = None
        else:
            # With a folder given, Python follows the link in /proc to the file itself.
            os.link(self._own_path, path, src_dir_fd=self._descriptor, follow_symlinks=True)


class CudaBuffer(NamedTuple):
    """Memory on a GPU, and the handle by which another process on this machine opens it."""

    memory: "torch.Tensor"
    handle: dict[str, Any]


def cuda_buffers(device: "torch.device", num_bytes: int) -> list[CudaBuffer]:
    """Make buffers in one allocation: another process opens it once for all of them. Writes to a
    buffer must have finished before its handle is given away."""
    import torch
    from torch.multiprocessing.reductions import reduce_tensor

    if device.type != "cuda":
        raise FleetError(f"{device} is not a GPU: write in_place: false.")
    num = max(1, _SLAB_BYTES // num_bytes)
    slab = torch.empty(num, num_bytes, dtype=torch.uint8, device=device)
    fields = reduce_tensor(slab)[1]  # type: ignore[no-untyped-call]
    handle = {
        "uuid": str(torch.cuda.get_device_properties(device).uuid),
        "handle": base64.b64encode(fields[7]).decode(),
        "size_bytes": fields[8],
        "offset_bytes": fields[9],
        "counter": base64.b64encode(fields[11]).decode(),
        "counter_offset": fields[12],
    }
    return [CudaBuffer(slab[i], handle | {"begin": i * num_bytes}) for i in range(num)]


SHARED_MEMORY = Path("/dev/shm")
_DTYPES = ("float32", "float16", "bfloat16")
_ALIGNMENT = 256
"""Alignment of offsets in a buffer, in bytes: the strictest of a CUDA copy."""


class Staging:
    """Folders of one owner's adapters.

    `in_place` passes adapters on a GPU by their address, without a copy; every server must run on
    that GPU. Adapters in host memory are written as usual. `is_searched`: servers search the
    owner's parent folder by name.
    """

    def __init__(self, owner: Owner, *, in_place: bool = False, is_searched: bool = False) -> None:
        self.owner = owner
        self.root = root = owner.folder
        self.in_place = in_place
        self._peft_root = owner.parent if is_searched else root
        self._cuda_buffers: dict[Path, CudaBuffer] = {}
        self._members: dict[ModelRef, tuple[Path, str]] = {}
        """Folder of a member's centre, and the text sent to servers instead of a path."""
        self._num_members: Counter[Path] = Counter()
        """Members by folder; a folder with none is not there."""
        self._centres = threading.Lock()
        """One lock for all folders: a waiter on a folder's own lock would outlast its removal."""
        self._writing: defaultdict[Path, threading.Lock] = defaultdict(threading.Lock)
        self._is_closed = False
        self._files: Spares[int, BufferFile] = Spares(lambda size: [BufferFile(root, size)])
        self._gpu: Spares[tuple[torch.device, int], CudaBuffer] = Spares(lambda k: cuda_buffers(*k))

    def is_in_place(self, adapter: Adapter) -> bool:
        """True if it is passed by its address on the GPU."""
        factors = adapter.factors.values()
        return self.in_place and any(not t.is_cpu for lora in factors for t in (lora.a, lora.b))

    def wire_name(self, ref: ModelRef) -> str:
        """Return the name servers know an adapter by: valid in paths and URLs, and unique."""
        return f"{quote(ref.served_name, safe='@-_.')}~{self.owner.token}"

    def peft_folder(self, ref: ModelRef, adapter: Adapter, *, base: str) -> Path:
        """Write a PEFT folder, once. The resolver compares `base` with the server's base model."""
        folder = self._peft_root / self.wire_name(ref)
        with self._writing[folder]:
            if not folder.is_dir():
                self._require_open()
                # Imported here: only processes that serve adapters have torch.
                from rookery.weights import write_adapter

                write_adapter(replace(_folded(adapter), base=base), folder)
        return folder

    def served_path(self, ref: ModelRef, *, dtype: str) -> str:
        """Return the path, or a member's text, that tells servers of a staged adapter."""
        member = self._members.get(ref)
        return str(self.buffer_path(ref, dtype=dtype)) if member is None else member[1]

    def member_text(self, ref: ModelRef, adapter: Adapter) -> str:
        """Return a member's centre folder and seed as text, sent in place of a path. The folder is
        written for the first member and removed with the last."""
        member = adapter.factors
        assert isinstance(member, PerturbedFactors)
        folder = self._centre_folder(member.population)
        with self._centres, boundary(FleetError, f"Writing {folder}", foreign=(OSError,)):
            if folder not in self._num_members:
                self._require_open()
                temporary = Path(tempfile.mkdtemp(dir=self.root))
                _write_centre(temporary, member.population)
                temporary.chmod(0o755)
                temporary.rename(folder)
            recipe = {"centre": str(folder), "seed": member.seed, "amount": member.amount}
            self._num_members[folder] += ref not in self._members
            self._members[ref] = folder, json.dumps(recipe)
        return self._members[ref][1]

    def has_centre(self, member: PerturbedFactors) -> bool:
        """True if `member_text` has nothing to write."""
        return self._centre_folder(member.population) in self._num_members

    def _centre_folder(self, population: StepPopulation) -> Path:
        named = ModelRef(name=population.centre.name, version=population.version)
        return self.root / f"{self.wire_name(named)}.centre"

    def buffer_path(self, ref: ModelRef, *, dtype: str) -> Path:
        return self.root / f"{self.wire_name(ref)}.{dtype}.buffer"

    def buffer_folder(self, ref: ModelRef, adapter: Adapter, *, dtype: str) -> Path:
        """Write all factors in one piece, in the dtype of the servers' slots, once."""
        folder = self.buffer_path(ref, dtype=dtype)
        # Several servers may need it at once, each in a thread.
        with self._writing[folder], boundary(FleetError, f"Writing {folder}", foreign=(OSError,)):
            if not folder.is_dir():
                self._require_open()
                temporary = Path(tempfile.mkdtemp(dir=self.root))
                self.write_buffer(temporary, folder, adapter, dtype)
                temporary.chmod(0o755)
                temporary.rename(folder)
        return folder

    def remove(self, ref: ModelRef) -> None:
        """Remove an adapter's folders; a server that has them open keeps what it mapped."""
        if ref in self._members:
            self._remove_member(ref)
            return
        buffers = [self.buffer_path(ref, dtype=dtype) for dtype in _DTYPES]
        for folder in (self._peft_root / self.wire_name(ref), *buffers):
            shutil.rmtree(folder, ignore_errors=True)
            self._cuda_buffers.pop(folder, None)
            self._writing.pop(folder, None)

    def _remove_member(self, ref: ModelRef) -> None:
        with self._centres:
            folder, _ = self._members.pop(ref)
            self._num_members[folder] -= 1
            if not self._num_members[folder]:
                del self._num_members[folder]
                shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Wait for writes in progress and refuse new ones; the folders stay. A thread outlives the
        request that it writes for, and would restore removed folders."""
        self._is_closed = True
        for lock in [self._centres, *self._writing.values()]:
            with lock:
                pass
        self._files.close()
        self._gpu.close()

    def _require_open(self) -> None:
        if self._is_closed:
            raise FleetError("The fleet was closed before this adapter was written.")

    def write_buffer(self, temporary: Path, folder: Path, adapter: Adapter, dtype: str) -> None:
        import torch

        is_in_place = self.is_in_place(adapter)
        layout = buffer_layout(adapter, dtype, is_on_host=not is_in_place)
        manifest: dict[str, Any] = {
            "format": FORMAT, "dtype": dtype, "bytes": layout.num_bytes, "scale": layout.scale,
            "scaled_from": layout.scaled_from, "layers": json.dumps(layout.layers),
        }  # fmt: skip
        if is_in_place:
            key = _only_gpu(layout), layout.num_bytes
            buffer = self._gpu.take(key)
            layout.fill_scaled(buffer.memory)
            # Not the whole device: the trainer may be computing on its own stream.
            torch.cuda.current_stream(buffer.memory.device).synchronize()
            # The server reads this memory until the adapter is removed.
            self._cuda_buffers[folder] = buffer
            manifest |= {"cuda": buffer.handle, "scale": 1.0}
            self._gpu.refill(key)
        else:
            file = self._files.take(layout.num_bytes)
            layout.fill(file.memory)
            file.name(temporary / BUFFER)
            self._files.refill(layout.num_bytes, after=file)
        (temporary / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")


def _write_centre(folder: Path, population: StepPopulation) -> None:
    """Write a centre as `population.py` of the servers reads it."""
    import torch

    factors = population.centre.factors
    layers = [
        [layer, *named, factors[layer].scale, *(str(kind).removeprefix("torch.") for kind in kinds)]
        for (layer, kinds), named in zip(
            population.dtypes.items(), population.noise.layers, strict=True
        )
    ]
    numbers = [f.reshape(-1) for layer in population.dtypes for f in
               (factors[layer].a, factors[layer].b)]  # fmt: skip
    (folder / NUMBERS).write_bytes(memoryview(torch.cat(numbers).numpy()))  # type: ignore[arg-type]
    manifest = {"format": CENTRE_FORMAT, "rank": population.noise.rank, "layers": layers}
    (folder / CENTRE).write_text(json.dumps(manifest), encoding="utf-8")


def memory_folder() -> Path:
    """Return shared memory, or the folder for temporary files if there is none."""
    return SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())


@contextmanager
def open_staging(
    parent: Path | None, *, in_place: bool = False, is_searched: bool = False
) -> Iterator[Staging]:
    """Make a folder for adapters under `parent`, by default in shared memory, for the block.
    Folders that killed processes left there are removed, unless a server may know of them."""
    parent = parent or memory_folder()
    with boundary(FleetError, f"Creating {parent}", foreign=(OSError,)):
        parent.mkdir(parents=True, exist_ok=True)
    with find_left(parent) as dead:
        for owner in dead:
            if not owner.servers:
                owner.remove()
    with (
        claim_folder(parent) as owner,
        contextlib.closing(Staging(owner, in_place=in_place, is_searched=is_searched)) as staging,
    ):
        yield staging


@contextmanager
def as_safetensors(path: Path) -> Iterator[Path]:
    """Yield the folder itself, or a safetensors copy if it holds adapter_model.bin."""
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


def _folded(adapter: Adapter) -> Adapter:
    """Return the adapter with scale 1: B is multiplied in float32, then rounded to its dtype. torch
    multiplies half precision by a number in float32 and rounds once. Factors of one kind are
    multiplied together, as a call for each would cost more than the arithmetic."""
    import torch

    kinds: dict[tuple[float, torch.dtype, torch.device], list[str]] = {}
    for layer, lora in adapter.factors.items():
        if lora.scale != 1:
            kinds.setdefault((lora.scale, lora.b.dtype, lora.b.device), []).append(layer)
    factors = dict(adapter.factors)
    for (scale, _, _), layers in kinds.items():
        same_kind = [adapter.factors[layer] for layer in layers]
        products = torch.cat([lora.b.detach().reshape(-1) for lora in same_kind]).mul_(scale)
        parts = torch.split(products, [lora.b.numel() for lora in same_kind])
        for layer, lora, part in zip(layers, same_kind, parts, strict=True):
            factors[layer] = LoraFactors(a=lora.a, b=part.view(lora.b.shape), scale=1.0)
    return replace(adapter, factors=factors)


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where every factor goes in a buffer: the A factors, then the B factors."""

    layers: list[list[Any]]
    num_bytes: int
    scaled_from: int
    """Offset of the first B factor, in bytes."""
    scale: float
    """Number that B must still be multiplied by."""
    pieces: list[tuple[int, "torch.Tensor"]]
    """(offset, factor) in order; on the host contiguous and in the buffer's dtype."""
    kind: "torch.dtype"

    def fill(self, memory: "torch.Tensor") -> None:
        """Copy every factor to its place; B is not multiplied yet."""
        # torch would split each copy over threads and wait for all of them every time.
        begin = memory.data_ptr()
        for offset, tensor in self.pieces:
            ctypes.memmove(begin + offset, tensor.data_ptr(), tensor.nbytes)

    def fill_scaled(self, memory: "torch.Tensor") -> None:
        """Write every factor to its place with B multiplied, in few operations. In a large model,
        one operation per factor takes longer to start than to run."""
        import torch

        numbers = memory.view(self.kind)
        first_b = self.scaled_from // self.kind.itemsize
        with torch.no_grad():
            factors = [factor for _, factor in self.pieces]
            if sum(factor.numel() for factor in factors) == numbers.numel():
                flat = torch._utils._flatten_dense_tensors(factors)  # type: ignore[no-untyped-call]
                if self.scale != 1:
                    flat[first_b:].mul_(self.scale)
                numbers.copy_(flat)
                return
            for offset, factor in self.pieces:
                first = offset // numbers.itemsize
                scaled = factor * self.scale if first >= first_b and self.scale != 1 else factor
                numbers[first : first + factor.numel()].copy_(scaled.reshape(-1))


def buffer_layout(adapter: Adapter, dtype: str, *, is_on_host: bool) -> _Layout:
    """Lay out the factors. A scale common to all is left to the reader or to `fill_scaled`, which
    multiply on their device with the same rounding."""
    import torch

    if dtype not in _DTYPES:
        raise AdapterError(
            f"The servers keep adapters as {dtype}; Rookery sends {', '.join(_DTYPES)}. Start them "
            "with launch.extension: false to load adapters the stock way."
        )
    kind: torch.dtype = getattr(torch, dtype)
    scales = {lora.scale for lora in adapter.factors.values()}
    has_one_scale = len(scales) == 1 and (
        not is_on_host or all(f.b.dtype == kind for f in adapter.factors.values())
    )
    factors = adapter.factors if has_one_scale else _folded(adapter).factors
    pieces: list[tuple[int, torch.Tensor]] = []
    ends = [0]

    def place(factor: torch.Tensor) -> int:
        if is_on_host and (factor.dtype is not kind or not factor.is_contiguous()):
            factor = factor.detach().to(kind).contiguous()
        if is_on_host:
            factor = factor.cpu()
        pieces.append((ends[-1], factor))
        num_bytes = factor.numel() * kind.itemsize
        ends.append(ends[-1] + -(-num_bytes // _ALIGNMENT) * _ALIGNMENT)
        return ends[-2]

    offsets_a = [place(lora.a) for lora in factors.values()]
    scaled_from = ends[-1]
    offsets_b = [place(lora.b) for lora in factors.values()]
    layers = [
        [name, *lora.a.shape, lora.b.shape[0], offset_a, offset_b]
        for (name, lora), offset_a, offset_b in zip(
            factors.items(), offsets_a, offsets_b, strict=True
        )
    ]
    scale = scales.pop() if has_one_scale else 1.0
    return _Layout(layers, ends[-1], scaled_from, scale, pieces, kind)


def _only_gpu(layout: _Layout) -> "torch.device":
    devices = {tensor.device for _, tensor in layout.pieces}
    device = devices.pop()
    if devices or device.type != "cuda":
        raise AdapterError(
            f"An adapter is on {', '.join(sorted(map(str, {device, *devices})))}; handing adapters "
            "over in place needs all of it on the servers' GPU: write in_place: false."
        )
    return device
