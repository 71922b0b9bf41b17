"""Tensors in memory shared by two processes: a file that both map, or handles of GPU memory.

    manifest    {"path": "/proc/4711/fd/36", "bytes": 538214400,
                 "tensors": {"model.norm.weight": {"dtype": "float32", "shape": [576],
                                                   "offset": 0}, ...}}
    of a GPU    {"tensors": {"model.norm.weight": {"dtype": ..., "shape": ..., "cuda": {...}}, ...}}

Tensors that share memory, such as tied weights, have one offset.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING, Any

__all__ = [
    "BUFFER",
    "FORMAT",
    "MANIFEST",
    "AdapterBuffer",
    "SharedFile",
    "bit_sum",
    "export_gpu",
    "factor_view",
    "lay_out",
    "open_buffer",
    "open_tensors",
    "view",
]


if TYPE_CHECKING:
    import torch


_ALIGNMENT = 256


def lay_out(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return the manifest of these tensors in a file, without a path yet."""
    entries: dict[str, Any] = {}
    offsets: dict[tuple[Any, ...], int] = {}
    end = 0
    for name, tensor in tensors.items():
        key = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tuple(tensor.shape))
        if key not in offsets:
            offsets[key] = end
            end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        entries[name] = {**_kind(tensor), "offset": offsets[key]}
    return {"bytes": end, "tensors": entries}


class SharedFile:
    """A file in memory that other processes of this user open by its path while this object lives.

    It has no name: nothing is left when all processes that map it have ended.
    """

    def __init__(self, source: str = "", *, num_bytes: int) -> None:
        """Make a new file, or open the one at `source`."""
        import torch

        if source:
            self._descriptor = os.open(source, os.O_RDWR | os.O_CLOEXEC)
        else:
            self._descriptor = os.memfd_create("rookery-weights", os.MFD_CLOEXEC)
            # If memory is short, this raises; a write to the mapping would kill the process.
            os.posix_fallocate(self._descriptor, 0, num_bytes)
        size = os.fstat(self._descriptor).st_size
        if size != num_bytes:
            raise ValueError(f"{source} has {size} bytes, and the weights take {num_bytes}")
        self.memory = torch.from_file(self.path, shared=True, size=num_bytes, dtype=torch.uint8)

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)

    @property
    def path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"


def export_gpu(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return the manifest of tensors on a GPU, after waiting for all writes to them."""
    import torch
    from torch.multiprocessing.reductions import reduce_tensor

    entries = {}
    for name, tensor in tensors.items():
        fields = reduce_tensor(tensor.detach())[1]  # type: ignore[no-untyped-call]
        entries[name] = _kind(tensor) | {
            "stride": list(tensor.stride()),
            "cuda": {
                "uuid": str(torch.cuda.get_device_properties(tensor.device).uuid),
                "begin": fields[3],
                "handle": base64.b64encode(fields[7]).decode(),
                "size_bytes": fields[8],
                "offset_bytes": fields[9],
                "counter": base64.b64encode(fields[11]).decode(),
                "counter_offset": fields[12],
            },
        }
    torch.cuda.synchronize()
    return {"tensors": entries}


def open_tensors(manifest: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Open all tensors of another process's manifest, without a copy."""
    entries: Mapping[str, Any] = manifest["tensors"]
    if "path" in manifest:
        file = SharedFile(manifest["path"], num_bytes=manifest["bytes"])
        return {name: view(file.memory, entry) for name, entry in entries.items()}
    return {name: _open_gpu(entry) for name, entry in entries.items()}


def view(memory: torch.Tensor, entry: Mapping[str, Any]) -> torch.Tensor:
    """Return a tensor in the bytes of a file."""
    import torch

    kind: torch.dtype = getattr(torch, entry["dtype"])
    num_bytes = kind.itemsize
    for size in entry["shape"]:
        num_bytes *= size
    begin = entry["offset"]
    return memory[begin : begin + num_bytes].view(kind).view(entry["shape"])


def bit_sum(tensor: torch.Tensor) -> int:
    """Return the exact sum of the numbers' bit patterns: a whole has the sum of its parts' sums."""
    import torch

    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    plain = tensor.detach().contiguous().view(-1)
    return int(plain.view(kinds.get(plain.itemsize, torch.uint8)).sum(dtype=torch.int64).item())


def _kind(tensor: torch.Tensor) -> dict[str, Any]:
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}


def _open_gpu(entry: Mapping[str, Any]) -> torch.Tensor:
    import torch
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    sent = entry["cuda"]
    count = torch.cuda.device_count()
    uuids = [str(torch.cuda.get_device_properties(i).uuid) for i in range(count)]
    if sent["uuid"] not in uuids:
        raise ValueError(f"the weights are on GPU {sent['uuid']}, this process sees {uuids}")
    # The sender waited for its writes, so there is no event to wait for.
    event, is_awaited = b"", False
    opened: torch.Tensor = rebuild_cuda_tensor(  # type: ignore[no-untyped-call]
        torch.Tensor, tuple(entry["shape"]), tuple(entry["stride"]), sent["begin"],
        torch.UntypedStorage, getattr(torch, entry["dtype"]), uuids.index(sent["uuid"]),
        base64.b64decode(sent["handle"]), sent["size_bytes"], sent["offset_bytes"], False,
        base64.b64decode(sent["counter"]), sent["counter_offset"], event, is_awaited,
    )  # fmt: skip
    return opened


if TYPE_CHECKING:
    from pathlib import Path

    import torch


# All factors of one adapter in one piece of memory, as a worker reads them.
#
#     buffer folder:  rookery_buffer.json   {"format": 2, "dtype": "float32", "bytes": 3686400,
#                                          "scale": 2.0, "scaled_from": 1843200,
#                                          "layers": "[["model.layers.0.self_attn.q_proj",
#                                                      rank, in, out, offset_a, offset_b], ...]"}
#                    rookery_buffer.bin    unless "cuda" in the manifest names the sender's memory
#
# The reader must multiply all numbers from byte `scaled_from` on, the B factors, by `scale`.


MANIFEST, BUFFER = "rookery_buffer.json", "rookery_buffer.bin"
FORMAT = 2
_READERS = 8
"""Threads that read a buffer: one thread copies 20 MB in 5 ms."""


class AdapterBuffer:
    """All factors of one adapter, in a file that is read again whenever a slot is written."""

    landing: torch.Tensor | None = None
    """Page-locked buffer shared by all buffers of this process, for the fastest copies."""
    landed: Any = None
    """Event after which the device has read `landing`."""
    readers = ThreadPoolExecutor(_READERS, thread_name_prefix="rookery-buffer")

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
        """Return the numbers in one line on the device, scaled."""
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

        if AdapterBuffer.landing is None or AdapterBuffer.landing.numel() < self.size:
            AdapterBuffer.landing = torch.empty(self.size, dtype=torch.uint8, pin_memory=True)
        elif AdapterBuffer.landed is not None:
            AdapterBuffer.landed.synchronize()
        landing = AdapterBuffer.landing
        memory = torch.empty(self.size, dtype=torch.uint8, device=device)
        step = -(-self.size // _READERS)
        parts = [(begin, min(begin + step, self.size)) for begin in range(0, self.size, step)]
        reads = [AdapterBuffer.readers.submit(self._read, landing, *part) for part in parts]
        for read, (begin, end) in zip(reads, parts, strict=True):
            read.result()
            memory[begin:end].copy_(landing[begin:end], non_blocking=True)
        AdapterBuffer.landed = torch.cuda.Event()  # type: ignore[no-untyped-call]
        AdapterBuffer.landed.record()
        return memory

    def _read(self, memory: torch.Tensor, begin: int, end: int) -> None:
        view = memory.numpy().data
        while begin < end:
            count = os.preadv(self._source, [view[begin:end]], begin)  # type: ignore[arg-type]
            if not count:
                raise ValueError(f"a buffer ends after {begin} bytes of {self.size}")
            begin += count


def open_buffer(folder: Path, manifest: dict[str, Any], layers: tuple[Any, ...]) -> AdapterBuffer:
    """Open the sender's CUDA memory, or the file, which stays open if its folder is removed."""
    if "cuda" not in manifest:
        return AdapterBuffer(manifest, layers, os.open(folder / BUFFER, os.O_RDONLY | os.O_CLOEXEC))
    import torch
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    sent, uuids = manifest["cuda"], _gpus()
    if sent["uuid"] not in uuids:
        raise ValueError(f"the adapter is on GPU {sent['uuid']}, this worker sees {uuids}")
    # The sender waited for its writes, so there is no event to wait for.
    event, is_awaited = b"", False
    memory = rebuild_cuda_tensor(  # type: ignore[no-untyped-call]
        torch.Tensor, (manifest["bytes"],), (1,), sent["begin"], torch.UntypedStorage, torch.uint8,
        uuids.index(sent["uuid"]), base64.b64decode(sent["handle"]), sent["size_bytes"],
        sent["offset_bytes"], False, base64.b64decode(sent["counter"]), sent["counter_offset"],
        event, is_awaited,
    )  # fmt: skip
    return AdapterBuffer(manifest, layers, memory)


@cache
def _gpus() -> list[str]:
    """Return the UUIDs of the GPUs that this worker sees."""
    import torch

    count = torch.cuda.device_count()
    return [str(torch.cuda.get_device_properties(i).uuid) for i in range(count)]


def factor_view(numbers: torch.Tensor, offset: int, shape: tuple[int, int]) -> torch.Tensor:
    """Return a factor in a buffer; `offset` is in bytes."""
    begin = offset // numbers.itemsize
    return numbers[begin : begin + shape[0] * shape[1]].view(shape)
