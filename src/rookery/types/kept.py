"""Which tokens each token of an answer was drawn from, stored in four bytes each."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import overload

from rookery.types.models import TokenIds

__all__ = ["KeptTokens"]


@dataclass(frozen=True, slots=True)
class KeptTokens(Sequence[TokenIds]):
    """One row of token ids for each token that was drawn; an empty row is the whole vocabulary.

    Rows (5, 9), () and (7,): `data` holds 5, 9, 7 as uint32 and `ends` is (2, 2, 3). A nucleus may
    have thousands of tokens, and Python's integers would take nine times as much memory.
    """

    ends: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, rows: Iterable[Sequence[int]]) -> KeptTokens:
        if isinstance(rows, KeptTokens):
            return rows
        rows = list(rows)
        return cls(
            ends=tuple(accumulate(map(len, rows))),
            data=array("I", chain.from_iterable(rows)).tobytes(),
        )

    @property
    def rows(self) -> list[memoryview]:
        """The rows as views of uint32: nothing is copied."""
        flat = memoryview(self.data).cast("I")
        return [flat[start:end] for start, end in pairwise((0, *self.ends))]

    def __len__(self) -> int:
        return len(self.ends)

    def __iter__(self) -> Iterator[TokenIds]:
        return (tuple(row) for row in self.rows)

    @overload
    def __getitem__(self, place: int) -> TokenIds: ...

    @overload
    def __getitem__(self, place: slice) -> KeptTokens: ...

    def __getitem__(self, place: int | slice) -> TokenIds | KeptTokens:
        found = self.rows[place]
        return KeptTokens.of(found) if isinstance(found, list) else tuple(found)
