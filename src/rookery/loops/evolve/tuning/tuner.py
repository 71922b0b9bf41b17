"""Tunes a program: scores variants of it that differ in their numbers, and keeps the best.

    tuned = await tune(Variant(code, 0.3), score=score_all, run=output_of, seed=7, limit=limit)
    tuned.code, tuned.score

First the program's own numbers. Then functions that return nothing but numbers are written out
(`tables.py`), and these numbers are tuned too, with most of the evaluations.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from rookery.loops.evolve.tuning.constants import NumberSearch, lift_constants, write_constants
from rookery.loops.evolve.tuning.tables import (
    add_reports,
    find_functions,
    read_reports,
    write_tables,
)
from rookery.runtime.concurrency import run_in_thread

__all__ = ["TuneLimit", "Variant", "tune"]

NUMBERS_SHARE = 0.25
"""Share of the evaluations and seconds for a program's own numbers, if it has tables as well."""

ScoreAll = Callable[[Sequence[str]], Awaitable[Sequence[float | None]]]
"""Scores programs, each under the same random numbers. None: it failed. The list is shorter if the
limit was reached."""
Run = Callable[[str], Awaitable[str]]
"""Evaluates one program and returns the end of what it printed. Both count in the limit."""


@dataclass(slots=True, kw_only=True)
class TuneLimit:
    """Tuning ends when both its evaluations and its seconds are spent."""

    evaluations: int
    seconds: float = 0.0
    share: float = 1.0
    """Share of both that may be spent for now."""
    num: int = 0
    """Evaluations so far."""
    spent_s: float = 0.0
    """Seconds of these evaluations. Waiting for a worker does not count."""

    def left(self, most: int = 1) -> int:
        """Return how many of the next `most` evaluations may be made."""
        if self.spent_s < self.share * self.seconds:
            return most
        return max(0, min(most, int(self.share * self.evaluations) - self.num))


@dataclass(frozen=True, slots=True)
class Variant:
    """A program and its score, None if it is unknown."""

    code: str
    score: float | None
    source: str = ""
    """The program before functions were written out; empty if none was."""


async def tune(
    first: Variant, *, score: ScoreAll, run: Run, seed: int, limit: TuneLimit
) -> Variant:
    """Return the best variant, or `first` if none is better."""
    has_tables = bool(await _read_tables(first.code, run))
    limit.share = NUMBERS_SHARE if has_tables else 1.0
    best = await _tune_numbers(first, score=score, seed=seed, limit=limit)
    limit.share = 1.0
    if not has_tables or not limit.left():
        return best
    tables = await _read_tables(best.code, run)
    written = await run_in_thread(write_tables, best.code, tables)
    start = await score([written])
    if not start or start[0] is None:
        return best
    variant = Variant(written, start[0], best.code)
    other = await _tune_numbers(variant, score=score, seed=seed, limit=limit)
    return other if _is_better(other.score, best.score) else best


async def _read_tables(code: str, run: Run) -> dict[str, str]:
    names = await run_in_thread(find_functions, code)
    if not names:
        return {}
    printed = await run(await run_in_thread(add_reports, code, names))
    return await run_in_thread(read_reports, printed, code, names)


async def _tune_numbers(first: Variant, *, score: ScoreAll, seed: int, limit: TuneLimit) -> Variant:
    constants = await run_in_thread(lift_constants, first.code)
    if not constants:
        return first
    best, search = first, NumberSearch(constants, seed=seed, score=first.score)
    while num := limit.left(len(asked := search.ask())):
        codes = [write_constants(first.code, constants, values) for values in asked[:num]]
        scores = await score(codes)
        for code, each in zip(codes, scores, strict=False):
            if _is_better(each, best.score):
                best = replace(best, code=code, score=each)
        search.tell(scores)
    return best


def _is_better(one: float | None, other: float | None) -> bool:
    return one is not None and (other is None or one > other)
