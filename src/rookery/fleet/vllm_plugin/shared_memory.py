"""Tensors in memory that two processes see: a file that both map, or handles of GPU memory.

    manifest    {"path": "/proc/4711/fd/36", "bytes": 538214400,
                 "tensors": {"model.norm.weight": {"dtype": "float32", "shape": [576],
                                                   "offset": 0}, ...}}
    of a GPU    {"tensors": {"model.norm.weight": {"dtype": ..., "shape": ..., "cuda": {...}}, ...}}

Tensors that share their memory, as tied weights do, have one offset.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["SharedFile", "bit_sum", "export_gpu", "lay_out", "open_tensors", "view"]

_ALIGNMENT = 256


def lay_out(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The manifest of these tensors in a file, which has no path yet."""
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

    It has no name: nothing is left of it when all who map it have ended.
    """

    def __init__(self, source: str = "", *, num_bytes: int) -> None:
        """A new file, or the one at `source`."""
        import torch

        if source:
            self._descriptor = os.open(source, os.O_RDWR | os.O_CLOEXEC)
        else:
            self._descriptor = os.memfd_create("rookery-weights", os.MFD_CLOEXEC)
            # Too little memory is an error here, and the end of the process when it is written.
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
    """The manifest of tensors on a GPU; what was written there has arrived."""
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
    """All tensors of a manifest that another process made, without a copy."""
    entries: Mapping[str, Any] = manifest["tensors"]
    if "path" in manifest:
        file = SharedFile(manifest["path"], num_bytes=manifest["bytes"])
        return {name: view(file.memory, entry) for name, entry in entries.items()}
    return {name: _open_gpu(entry) for name, entry in entries.items()}


def view(memory: torch.Tensor, entry: Mapping[str, Any]) -> torch.Tensor:
    """A tensor in the bytes of a file."""
    import torch

    kind: torch.dtype = getattr(torch, entry["dtype"])
    num_bytes = kind.itemsize
    for size in entry["shape"]:
        num_bytes *= size
    begin = entry["offset"]
    return memory[begin : begin + num_bytes].view(kind).view(entry["shape"])


def bit_sum(tensor: torch.Tensor) -> int:
    """The sum of its numbers' bit patterns: exact, and that of a whole is the sum of its parts'."""
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
    # The sender has waited for what it wrote: there is no event to wait for.
    event, is_awaited = b"", False
    opened: torch.Tensor = rebuild_cuda_tensor(  # type: ignore[no-untyped-call]
        torch.Tensor, tuple(entry["shape"]), tuple(entry["stride"]), sent["begin"],
        torch.UntypedStorage, getattr(torch, entry["dtype"]), uuids.index(sent["uuid"]),
        base64.b64decode(sent["handle"]), sent["size_bytes"], sent["offset_bytes"], False,
        base64.b64decode(sent["counter"]), sent["counter_offset"], event, is_awaited,
    )  # fmt: skip
    return opened
