"""What is known of the completions that environments got: which policy drew them, and how.

The Atropos API has no field for it, so that a sequence is found again by its tokens.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

from rookery.types import KeptTokens

__all__ = ["DrawBook", "Drawn"]

MAX_DRAWS = 200_000
"""Completions that are remembered, about 40 MB."""
MAX_KEPT_BYTES = 1 << 30
"""Of what their tokens were drawn from: at top_p 0.95 some hundred bytes of each."""
_NONE = KeptTokens.of(())


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """How a completion was drawn, or a sequence that has several of them."""

    step: int
    """Of the policy when it was asked for: its oldest tokens are of that one."""
    temperature: float
    is_cut: bool
    """By top_p, top_k or min_p."""
    kept: KeptTokens = _NONE
    """What each drawn token was drawn from, where that was cut; empty: it is not known."""
    is_penalised: bool = False
    """By what was drawn before: the trainer knows the distribution without that."""


class DrawBook:
    """The newest completions by prompt and answer."""

    def __init__(self) -> None:
        self._draws: OrderedDict[bytes, Drawn] = OrderedDict()
        self._with_kept: OrderedDict[bytes, int] = OrderedDict()
        """The completions whose `kept` is still there, with its size."""
        self._kept_bytes = 0

    def note(self, tokens: Sequence[int], drawn: Drawn) -> None:
        """`tokens` are the prompt with the answer."""
        key = _key(tokens)
        self._forget_kept(key)
        self._draws[key] = drawn
        if drawn.kept:
            self._with_kept[key] = len(drawn.kept.data)
            self._kept_bytes += len(drawn.kept.data)
        while self._kept_bytes > MAX_KEPT_BYTES:
            self._forget_kept(next(iter(self._with_kept)))
        while len(self._draws) > MAX_DRAWS:
            self._forget_kept(next(iter(self._draws)))
            self._draws.popitem(last=False)

    def _forget_kept(self, key: bytes) -> None:
        num_bytes = self._with_kept.pop(key, None)
        if num_bytes is not None:
            self._kept_bytes -= num_bytes
            self._draws[key] = replace(self._draws[key], kept=_NONE)

    def find(self, tokens: Sequence[int], *, drawn: Sequence[int]) -> Drawn | None:
        """How a sequence was drawn whose tokens at these places were drawn; None: elsewhere.

        `kept` has a row for each place when it is known of every one that was cut, else none.
        """
        *earlier, last = _runs(drawn)
        end = len(tokens)
        newest = self._draws.get(_key(tokens))
        if newest is None:
            end = last[-1] + 1
            newest = self._draws.get(_key(tokens[:end]))
        if newest is None:
            return None
        rows: list[Sequence[int]] = []
        is_cut, is_known, is_penalised = False, True, False
        for run in (*earlier, last):
            own = newest if run is last else self._draws.get(_key(tokens[: run[-1] + 1]))
            found = _rows(own, run, end=end if run is last else run[-1] + 1)
            is_cut = is_cut or (own is not None and own.is_cut)
            is_penalised = is_penalised or (own is not None and own.is_penalised)
            is_known = is_known and found is not None
            rows += found or ()
        kept = KeptTokens.of(rows if is_cut and is_known else ())
        return replace(newest, is_cut=is_cut, kept=kept, is_penalised=is_penalised)


def _runs(places: Sequence[int]) -> list[Sequence[int]]:
    """Places that follow one another: 2 3 6 7 8 are 2 3 and 6 7 8."""
    starts = [i for i, place in enumerate(places) if i == 0 or place != places[i - 1] + 1]
    return [places[i:j] for i, j in zip(starts, [*starts[1:], len(places)], strict=True)]


def _rows(own: Drawn | None, run: Sequence[int], *, end: int) -> list[Sequence[int]] | None:
    """What the tokens of one answer were drawn from, which ends at `end`; None: it is not known."""
    if own is None or not own.is_cut:
        return [()] * len(run)
    first = end - len(own.kept)
    if run[0] < first:
        return None
    rows = own.kept.rows
    return [rows[place - first] for place in run]


def _key(tokens: Sequence[int]) -> bytes:
    return blake2b(array("Q", tokens).tobytes(), digest_size=16).digest()
