"""Entry-wise merge passes in C, compiled at first use: ten times as fast as in torch, equal bits.

    engine = load_compiled()

A C compiler (`cc` on the PATH) runs for 0.5 s per process; without one, passes run in torch.
"""

import ctypes
import logging
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from rookery.weights.merge.cross import Rows, blocks

__all__ = [
    "Blend",
    "Drop",
    "Floats",
    "Integers",
    "PassRunner",
    "Tensors",
    "Trim",
    "as_tensors",
    "compile_passes",
    "load_compiled",
    "open_rows",
]

# A pass makes one child entry by entry. A row is cut into stretches. In each stretch, all parents'
# entries are trimmed by a limit or multiplied by random factors. Then the parents are added, or a
# sign is elected.


Floats = NDArray[np.float32]
Integers = NDArray[np.int64]
NEXT_TO_NOTHING = np.float32(1e-30)
"""Added to the elected parents' weight: with none, 0 / 1e-30 = 0. Changes no weight above 1e-22."""

Row = TypeVar("Row", Floats, torch.Tensor)
"""A row in host memory, or on a GPU."""


@dataclass(frozen=True, slots=True)
class Trim(Generic[Row]):
    """Set entries below the limit of their parent and stretch to 0."""

    limits: Sequence[Row]
    """[stretches] for each parent."""


@dataclass(frozen=True, slots=True)
class Drop:
    """Multiply the entries of parent p in stretch s by `tables[p][starts[p, s]:]`."""

    tables: list[Floats]
    starts: Integers
    """[parents, stretches]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blend(Generic[Row]):
    rows: list[Row]
    """Contiguous parents."""
    bounds: Integers
    """[stretches, 2]: begin and end. Numbers between stretches are unchanged."""
    entries: Trim[Row] | Drop
    weights: Floats | None
    """Weights of sum 1 for the election; None adds the parents unweighted."""
    out: Row


class PassRunner(Protocol[Row]):
    """Runs passes. All implementations give the same bits."""

    def limits(self, row: Row, *, bounds: Integers, counts: Integers) -> Row:
        """Return per stretch the smallest of its `counts` largest magnitudes; inf if count is 0."""
        ...

    def blend(self, blend: Blend[Row]) -> None:
        """Fill `out`."""
        ...


class Tensors:
    """A PassRunner in torch, for rows on a GPU or without a compiler. It rounds like the compiled
    one. Its temporary memory is a few rows on a GPU, and a few blocks on the CPU."""

    def limits(self, row: torch.Tensor, *, bounds: Integers, counts: Integers) -> torch.Tensor:
        limits = row.new_full((len(bounds),), torch.inf)
        for i, ((begin, end), k) in enumerate(zip(bounds.tolist(), counts.tolist(), strict=True)):
            if k:
                limits[i] = _kth_magnitude(row[begin:end], k)
        return limits

    def blend(self, blend: Blend[torch.Tensor]) -> None:
        tables = _tables(blend)
        for stretch, (start, stop) in enumerate(blend.bounds.tolist()):
            for begin, end in _pieces(blend.out, start, stop):
                rows = [row[begin:end] for row in blend.rows]
                if isinstance(blend.entries, Trim):
                    votes = [
                        torch.where(row.abs() >= limits[stretch], row, 0.0)
                        for row, limits in zip(rows, blend.entries.limits, strict=True)
                    ]
                else:
                    starts = (blend.entries.starts[:, stretch] + (begin - start)).tolist()
                    votes = [
                        row * table[first : first + end - begin]
                        for row, table, first in zip(rows, tables, starts, strict=True)
                    ]
                blend.out[begin:end] = _count(votes, blend.weights)


def as_tensors(blend: Blend[Floats]) -> Blend[torch.Tensor]:
    entries = blend.entries
    return Blend(
        rows=[torch.from_numpy(row) for row in blend.rows],
        bounds=blend.bounds,
        entries=Trim([torch.from_numpy(limits) for limits in entries.limits])
        if isinstance(entries, Trim)
        else entries,
        weights=blend.weights,
        out=torch.from_numpy(blend.out),
    )


def _kth_magnitude(row: torch.Tensor, k: int) -> torch.Tensor:
    if row.device.type == "cpu":
        return row.abs().kthvalue(len(row) - k + 1).values
    # Sorting needs no synchronisation; a selection would have to wait for counts.
    return row.abs().sort(descending=True).values[k - 1]


def _pieces(out: torch.Tensor, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield ranges to compute at a time: cache-sized blocks on the CPU, everything on a GPU."""
    return blocks(start, stop) if out.device.type == "cpu" else iter([(start, stop)])


def _tables(blend: Blend[torch.Tensor]) -> list[torch.Tensor]:
    if not isinstance(blend.entries, Drop):
        return []
    device = blend.out.device
    return [torch.from_numpy(np.float32(table)).to(device) for table in blend.entries.tables]


def _count(votes: list[torch.Tensor], weights: Floats | None) -> torch.Tensor:
    if weights is None:
        return _added(votes)
    shares = weights.tolist()
    total = _added([vote * share for vote, share in zip(votes, shares, strict=True)])
    if len(votes) == 2:
        return _elect_pair(votes[0], votes[1], total)
    elected = [
        torch.where(vote * total > 0, share, 0.0) for vote, share in zip(votes, shares, strict=True)
    ]
    products = [vote * share for vote, share in zip(votes, elected, strict=True)]
    agreed = _added(products) + 0.0  # -0 becomes 0
    return agreed / (_added(elected) + float(NEXT_TO_NOTHING))


def _elect_pair(first: torch.Tensor, second: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum if both votes have its sign, else the one that does, else 0."""
    has_first, has_second = first * total > 0, second * total > 0
    alone = torch.where(has_second, second, 0.0)
    return torch.where(has_first, torch.where(has_second, total, first), alone)


def _added(parts: list[torch.Tensor]) -> torch.Tensor:
    total, *others = parts
    for part in others:
        total = total + part
    return total


logger = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("entries.c")
_FLAGS = ("-O3", "-shared", "-fPIC", "-ffp-contract=off", "-fno-trapping-math")
"""-ffp-contract=off forbids fused multiply-add, which rounds differently from torch. Without
-fno-trapping-math, comparisons stay scalar."""
_NATIVE = "-march=native"
"""Allows every instruction of this machine; omitted if the compiler refuses the flag."""
_COMPILE_S = 60
_MOST_PARENTS = 8
"""Limit of the C source; passes with more parents run in torch."""
_GROUP = 64
"""Group size of the C source, which counts bytes in groups."""


class _Blend(ctypes.Structure):
    """Mirrors the struct of the C source."""

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
    """A PassRunner in C. A call handles whole rows and releases the GIL."""

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
        limits = np.empty(len(bounds), np.float32)
        longest = int((bounds[:, 1] - bounds[:, 0]).max(initial=0))
        scratch = np.empty(2 * (longest + _GROUP), np.uint16)
        self._limits(
            _address(row),
            _address(bounds),
            _address(counts),
            len(bounds),
            longest,
            _address(scratch),
            _address(limits),
        )
        return limits

    def blend(self, blend: Blend[Floats]) -> None:
        if len(blend.rows) > _MOST_PARENTS:
            Tensors().blend(as_tensors(blend))
            return
        entries = blend.entries
        rows, limits, tables = _addresses(blend.rows), None, None
        struct = _Blend(
            num_parents=len(blend.rows),
            num_stretches=len(blend.bounds),
            bounds=_address(blend.bounds),
            rows=ctypes.addressof(rows),
            weights=None if blend.weights is None else _address(blend.weights),
            out=_address(blend.out),
        )
        if isinstance(entries, Trim):
            limits = np.stack(list(entries.limits))
            struct.limits = _address(limits)
        else:
            tables = _addresses(entries.tables)
            struct.tables, struct.starts = ctypes.addressof(tables), _address(entries.starts)
        self._blend(ctypes.byref(struct))


def _address(array: Floats | Integers | np.ndarray) -> int:
    assert array.flags.c_contiguous
    return array.ctypes.data


def _addresses(arrays: list[Floats]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(arrays))(*[_address(array) for array in arrays])


def compile_passes(compiler: str) -> Compiled:
    """Raise CalledProcessError, TimeoutExpired or OSError if building or loading fails."""
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
def load_compiled() -> Compiled | None:
    """Return the compiled passes; None if there is no compiler or it fails. Cached."""
    compiler = shutil.which("cc")
    if compiler is None:
        logger.info("No C compiler `cc`: TIES and DARE run in torch, slower and to the same bits.")
        return None
    try:
        return compile_passes(compiler)
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("%s did not compile %s (%s); using torch.", compiler, _SOURCE.name, error)
        return None


def open_rows(rows: Rows, out: torch.Tensor) -> tuple[PassRunner[Any], Any, Any]:
    """Return a PassRunner, and the rows [P, M] and the output in the types that it takes."""
    compiled = load_compiled() if rows.data.device.type == "cpu" else None
    if compiled is not None:
        return compiled, rows.data.numpy(), out.numpy()
    return Tensors(), rows.data, out
