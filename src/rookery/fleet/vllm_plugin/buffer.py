"""All factors of one adapter in one piece of memory, as a worker reads them.

    buffer folder:  rookery_buffer.json   {"format": 2, "dtype": "float32", "bytes": 3686400,
                                         "scale": 2.0, "scaled_from": 1843200,
                                         "layers": "[[\"model.layers.0.self_attn.q_proj\",
                                                     rank, in, out, offset_a, offset_b], ...]"}
                   rookery_buffer.bin    unless "cuda" in the manifest names the sender's memory

From byte `scaled_from` on, which is where the B factors are, numbers are still to be multiplied by
`scale`; 1.0 leaves them as they are.
"""

from __future__ import annotations

import base64
import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    import torch

__all__ = ["BUFFER", "FORMAT", "MANIFEST", "AdapterBuffer", "factor_view", "open_buffer"]

MANIFEST, BUFFER = "rookery_buffer.json", "rookery_buffer.bin"
FORMAT = 2
_READERS = 8
"""Threads that read a buffer: one copies 20 MB in 5 ms."""


class AdapterBuffer:
    """All factors of one adapter: in a file that is read again whenever a slot is written."""

    landing: torch.Tensor | None = None
    """One page-locked buffer for all buffers of this process: copies from it are the quickest."""
    landed: Any = None
    """When the device has read it."""
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
    """The sender's CUDA memory, or the file, kept open: its folder may be removed."""
    if "cuda" not in manifest:
        return AdapterBuffer(manifest, layers, os.open(folder / BUFFER, os.O_RDONLY | os.O_CLOEXEC))
    import torch
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    sent, uuids = manifest["cuda"], _gpus()
    if sent["uuid"] not in uuids:
        raise ValueError(f"the adapter is on GPU {sent['uuid']}, this worker sees {uuids}")
    # The sender has waited for what it wrote: there is no event to wait for.
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
    """The UUIDs of the GPUs that this worker sees."""
    import torch

    count = torch.cuda.device_count()
    return [str(torch.cuda.get_device_properties(i).uuid) for i in range(count)]


def factor_view(numbers: torch.Tensor, offset: int, shape: tuple[int, int]) -> torch.Tensor:
    """A factor in a buffer; `offset` is in bytes."""
    begin = offset // numbers.itemsize
    return numbers[begin : begin + shape[0] * shape[1]].view(shape)
