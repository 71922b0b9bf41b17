"""What is known of the completions that environments got: which policy drew them, and how.

The Atropos API has no field for it, so that a sequence is found again by its tokens; where the same
were drawn in several ways, as for a training and for an evaluation, by its log-probabilities.
"""

from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

from rookery.errors import TaskError
from rookery.types import KeptTokens

__all__ = ["DrawBook", "Drawn"]

MAX_DRAWS = 200_000
"""Completions that are remembered, about 100 MB."""
MAX_WAYS = 8
"""In which the same tokens were drawn: the newest are remembered."""
NUM_LOGPROBS = 8
"""Of the last tokens of a completion, to tell ways apart."""
MAX_KEPT_BYTES = 1 << 30
"""Of what their tokens were drawn from: at top_p 0.95 some hundred bytes of each."""
_NONE = KeptTokens.of(())


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """How a completion was drawn, or a sequence that has several of them."""

    step: int
    """Of the policy when it was asked for, the first of several: its oldest tokens are of that
    one."""
    temperature: float
    is_cut: bool
    """By top_p, top_k or min_p."""
    kept: KeptTokens = _NONE
    """What each drawn token was drawn from, where that was cut; empty: it is not known."""
    is_penalised: bool = False
    """By what was drawn before: the trainer knows the distribution without that."""


@dataclass(frozen=True, slots=True)
class _Way:
    """One of those in which the same tokens were drawn."""

    drawn: Drawn
    logprobs: "array[float]"
    """Of the last tokens."""

    def is_like(self, other: "_Way") -> bool:
        plain, others = (replace(way.drawn, kept=_NONE) for way in (self, other))
        return plain == others and self.logprobs == other.logprobs


class DrawBook:
    """The newest completions by prompt and answer."""

    def __init__(self) -> None:
        self._ways: OrderedDict[bytes, tuple[_Way, ...]] = OrderedDict()
        """Of each, the newest last."""
        self._with_kept: OrderedDict[bytes, int] = OrderedDict()
        """The completions whose `kept` is still there, with its size."""
        self._kept_bytes = 0

    def note(self, tokens: Sequence[int], drawn: Drawn, logprobs: Sequence[float] = ()) -> None:
        """`tokens` are the prompt with the answer, `logprobs` those of the answer."""
        key, way = _key(tokens), _Way(drawn, array("d", logprobs[-NUM_LOGPROBS:]))
        others = [own for own in self._ways.get(key, ()) if not own.is_like(way)]
        self._put(key, (*others, way)[-MAX_WAYS:])
        while self._kept_bytes > MAX_KEPT_BYTES:
            oldest = next(iter(self._with_kept))
            ways = self._ways[oldest]
            self._put(oldest, tuple(replace(w, drawn=replace(w.drawn, kept=_NONE)) for w in ways))
        while len(self._ways) > MAX_DRAWS:
            oldest, _ = self._ways.popitem(last=False)
            self._kept_bytes -= self._with_kept.pop(oldest, 0)

    def _put(self, key: bytes, ways: tuple[_Way, ...]) -> None:
        self._ways[key] = ways
        self._kept_bytes -= self._with_kept.pop(key, 0)
        if num_bytes := sum(len(way.drawn.kept.data) for way in ways):
            self._with_kept[key] = num_bytes
            self._kept_bytes += num_bytes

    def find(
        self, tokens: Sequence[int], *, drawn: Sequence[int], logprobs: Sequence[float] = ()
    ) -> Drawn | None:
        """How a sequence was drawn whose tokens at these places were drawn, with these
        log-probabilities; None: elsewhere.

        `kept` has a row for each place when it is known of every one that was cut, else none. An
        answer before the last that is not known counts as drawn before it.
        """
        told = dict(zip(drawn, logprobs, strict=False))
        *earlier, last = _runs(drawn)
        end = len(tokens)
        newest = self._nearest(tokens, end, told)
        if newest is None:
            end = last[-1] + 1
            newest = self._nearest(tokens, end, told)
        if newest is None:
            return None
        ends = [*(run[-1] + 1 for run in earlier), end]
        found = [*(self._nearest(tokens, own, told) for own in ends[:-1]), newest]
        rows = list(map(_rows, found, (*earlier, last), ends))
        answers = [own for own in found if own is not None]
        is_cut = any(own.is_cut for own in answers)
        return Drawn(
            step=max(0, min(newest.step - 1 if own is None else own.step for own in found)),
            temperature=_temperature(answers),
            is_cut=is_cut,
            kept=_joined(rows) if is_cut else _NONE,
            is_penalised=any(own.is_penalised for own in answers),
        )

    def _nearest(self, tokens: Sequence[int], end: int, told: Mapping[int, float]) -> Drawn | None:
        """How the answer that ends there was drawn; in which way, its log-probabilities tell. They
        do not tell greedy answers from others, which are rarely meant to be trained on."""

        def distance(way: _Way) -> tuple[float, bool]:
            places = range(end - len(way.logprobs), end)
            pairs = zip(places, way.logprobs, strict=True)
            gaps = [abs(told[place] - own) for place, own in pairs if place in told]
            return round(max(gaps, default=0.0), 5), way.drawn.temperature == 0

        ways = self._ways.get(_key(tokens[:end]), ())
        return min(reversed(ways), key=distance).drawn if ways else None


def _runs(places: Sequence[int]) -> list[Sequence[int]]:
    """Places that follow one another: 2 3 6 7 8 are 2 3 and 6 7 8."""
    starts = [i for i, place in enumerate(places) if i == 0 or place != places[i - 1] + 1]
    return [places[i:j] for i, j in zip(starts, [*starts[1:], len(places)], strict=True)]


def _rows(own: Drawn | None, run: Sequence[int], end: int) -> list[Sequence[int]] | None:
    """What the tokens of one answer were drawn from, which ends at `end`; None: it is not known."""
    if own is None or not own.is_cut:
        return [()] * len(run)
    first = end - len(own.kept)
    if run[0] < first:
        return None
    rows = own.kept.rows
    return [rows[place - first] for place in run]


def _joined(rows: Sequence[Sequence[Sequence[int]] | None]) -> KeptTokens:
    """Of all answers; nothing when it is not known of one."""
    known = [own for own in rows if own is not None]
    return KeptTokens.of([row for own in known for row in own] if len(known) == len(rows) else ())


def _temperature(answers: Sequence[Drawn]) -> float:
    """Of all answers; TaskError when they differ, as a sequence is trained on with one."""
    found = {own.temperature for own in answers}
    if len(found) > 1:
        raise TaskError(
            f"The answers of a sequence were drawn with the temperatures {min(found):g} and "
            f"{max(found):g}: draw all that is trained on as one sequence with the same."
        )
    return answers[-1].temperature


def _key(tokens: Sequence[int]) -> bytes:
    return blake2b(array("Q", tokens).tobytes(), digest_size=16).digest()
