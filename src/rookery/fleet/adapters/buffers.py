"""Memory for adapters on their way to a server, made before it is needed: `staging.py` fills it.

    files = Spares(lambda size: [BufferFile(folder, size)])
    file = files.take(20_185_088)         # made the last time one was taken, or now
    file.numbers(torch.bfloat16)[:] = ...
    file.name(folder / "poet" / "rookery_buffer.bin")
    files.close()

Most of the time of writing to shared memory goes into making its pages, and most of that of writing
to a GPU into allocating there. A population's adapters have one size, so another thread makes the
next pieces when the last one was taken.
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

__all__ = ["BufferFile", "CudaBuffer", "Spares", "cuda_buffers"]

_SLAB_BYTES = 128 * 2**20
"""The most GPU memory that is allocated ahead of need."""

Key = TypeVar("Key", bound=Hashable)
Made = TypeVar("Made")


class Spares(Generic[Key, Made]):
    """Spare pieces of memory of the size that was taken last. For any number of threads.

    `make` gives one piece or several; only when all are taken are others made.
    """

    def __init__(self, make: Callable[[Key], list[Made]]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._ready: tuple[Key, list[Made]] | None = None
        self._coming: tuple[Key, Future[list[Made]]] | None = None
        self._maker: ThreadPoolExecutor | None = None

    def take(self, key: Key) -> Made:
        """A spare one where it has the size, else a new one."""
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
        """Start to make the next ones where none is left. `after` is let go of by the thread that
        does: unmapping memory takes time."""
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
    """A file that has no name yet, and its memory here: nothing is left when the process dies.

    File systems that know only names give it one until it gets its own.
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
        # A full disk is an error here, and the end of the process when a mapping meets it.
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
        """Put it where it belongs."""
        if self._named is not None:
            Path(self._named).rename(path)
            self._named = None
        else:
            # With a folder given, Python follows the link to the file itself.
            os.link(self._own_path, path, src_dir_fd=self._descriptor, follow_symlinks=True)


class CudaBuffer(NamedTuple):
    """Memory on a GPU, and what another process on this machine needs to open it."""

    memory: "torch.Tensor"
    handle: dict[str, Any]


def cuda_buffers(device: "torch.device", num_bytes: int) -> list[CudaBuffer]:
    """Buffers of one allocation: another process opens it once for all of them.

    What is written there must have arrived before the handle is given away.
    """
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
