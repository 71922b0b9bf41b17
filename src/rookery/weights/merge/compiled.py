"""The passes in C, compiled when they are first needed: ten times as fast, the same bits.

    engine = load_engine()

A C compiler is used where there is one (`cc` on the PATH, half a second once per process); without
one the passes run in torch.
"""

import ctypes
import logging
import shutil
import subprocess
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from rookery.weights.merge.blend import Blend, Floats, Integers, Trim
from rookery.weights.merge.tensors import Tensors, as_tensors

__all__ = ["Compiled", "compile_engine", "load_engine"]

logger = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("entries.c")
_FLAGS = ("-O3", "-shared", "-fPIC", "-ffp-contract=off", "-fno-trapping-math")
"""No fused multiply-add, which would round otherwise than torch. Without -fno-trapping-math
comparisons stay scalar."""
_NATIVE = "-march=native"
"""Every instruction of this machine; a compiler that does not know the flag does without."""
_COMPILE_S = 60
_MOST_PARENTS = 8
"""As in the C source. More run in torch."""
_GROUP = 64
"""As in the C source: bytes are counted in groups."""


class _Blend(ctypes.Structure):
    """The struct of the C source."""

    _fields_ = (
        ("num_parents", ctypes.c_int64),
        ("num_stretches", ctypes.c_int64),
        ("bounds", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("limits", ctypes.c_void_p),
        ("tables", ctypes.c_void_p),
        ("starts", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
    )


class Compiled:
    """An Engine. Calls take whole rows and leave other threads running."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._limits = library.limits
        self._limits.argtypes = [
            *[ctypes.c_void_p] * 3,
            *[ctypes.c_int64] * 2,
            *[ctypes.c_void_p] * 2,
        ]
        self._limits.restype = None
        self._blend = library.blend
        self._blend.argtypes = [ctypes.POINTER(_Blend)]
        self._blend.restype = None

    def limits(self, row: Floats, *, bounds: Integers, counts: Integers) -> Floats:
        found = np.empty(len(bounds), np.float32)
        longest = int((bounds[:, 1] - bounds[:, 0]).max(initial=0))
        scratch = np.empty(2 * (longest + _GROUP), np.uint16)
        self._limits(
            _address(row),
            _address(bounds),
            _address(counts),
            len(bounds),
            longest,
            _address(scratch),
            _address(found),
        )
        return found

    def blend(self, blend: Blend[Floats]) -> None:
        if len(blend.rows) > _MOST_PARENTS:
            Tensors().blend(as_tensors(blend))
            return
        entries = blend.entries
        rows, limits, tables = _addresses(blend.rows), None, None
        given = _Blend(
            num_parents=len(blend.rows),
            num_stretches=len(blend.bounds),
            bounds=_address(blend.bounds),
            rows=ctypes.addressof(rows),
            weights=None if blend.weights is None else _address(blend.weights),
            out=_address(blend.out),
        )
        if isinstance(entries, Trim):
            limits = np.stack(list(entries.limits))
            given.limits = _address(limits)
        else:
            tables = _addresses(entries.tables)
            given.tables, given.starts = ctypes.addressof(tables), _address(entries.starts)
        self._blend(ctypes.byref(given))


def _address(array: Floats | Integers | np.ndarray) -> int:
    assert array.flags.c_contiguous
    return array.ctypes.data


def _addresses(arrays: list[Floats]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(arrays))(*[_address(array) for array in arrays])


def compile_engine(compiler: str) -> Compiled:
    """Raises CalledProcessError, TimeoutExpired or OSError where it cannot be built or loaded."""
    with TemporaryDirectory(prefix="rookery-") as folder:
        library = Path(folder) / "entries.so"
        try:
            _compile(compiler, library, _NATIVE)
        except subprocess.CalledProcessError:
            _compile(compiler, library)
        return Compiled(ctypes.CDLL(str(library)))


def _compile(compiler: str, library: Path, *flags: str) -> None:
    command = [compiler, *_FLAGS, *flags, str(_SOURCE), "-o", str(library)]
    subprocess.run(command, check=True, capture_output=True, timeout=_COMPILE_S)


@cache
def load_engine() -> Compiled | None:
    """The compiled passes; None where no compiler is found or it fails."""
    compiler = shutil.which("cc")
    if compiler is None:
        logger.info("No C compiler `cc`: TIES and DARE run in torch, slower and to the same bits.")
        return None
    try:
        return compile_engine(compiler)
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("%s did not compile %s (%s); using torch.", compiler, _SOURCE.name, error)
        return None
