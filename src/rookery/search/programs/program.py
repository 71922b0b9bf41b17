"""A program under search as the database keeps it: its measurements, never its code.

    record = ScoredProgram(id="p7", attempt=7, island=1, metrics=numeric_metrics(answer),
                           code=summarize(text), parent="p3", parent_score=0.4, generation=2)

A failed attempt is a FailedRecord: it has no score.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from hashlib import blake2b

__all__ = [
    "COMBINED",
    "CodeSummary",
    "FailedRecord",
    "Member",
    "ScoredProgram",
    "mean_of",
    "numeric_metrics",
    "score_of",
    "summarize",
]

COMBINED = "combined_score"
"""Metric that is the score if an evaluator reports it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeSummary:
    """The properties of a program's text that the database needs.

    `summarize("a = 1\\n")` has num_chars 6, num_newlines 1 and characters "\\n 1=a".
    """

    digest: str
    """Hash of the exact text."""
    num_chars: int
    num_newlines: int
    characters: str
    """Every character of the text once, sorted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredProgram:
    """One evaluated program."""

    id: str
    attempt: int
    """The attempt that made it; 0 for a program that the search started from."""
    island: int
    metrics: dict[str, float]
    code: CodeSummary
    parent: str | None = None
    parent_score: float | None = None
    """The parent's score when the child was planned: the parent may have been removed since."""
    generation: int = 0
    arm: str = ""
    """The model or adapter that wrote it; empty for a program that the search started from."""
    cost: float = 0.0
    """Cost of writing it, in the unit that compares arms, such as tokens."""
    operator: str = ""
    """Operator that made it; empty if the database draws none."""
    mends: str = ""
    """The failed program that it repairs."""
    rewards: tuple[float, ...] = ()
    """Rewards by task, if the program is a prompt scored on tasks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRecord:
    """An attempt that gave no program: it failed, or repeated another."""

    id: str = ""
    """Id of the failed program, if there is one."""
    arm: str = ""
    cost: float = 0.0
    operator: str = ""
    mends: str = ""
    kind: str = ""
    message: str = ""
    parent: str = ""
    parent_score: float = 0.0
    generation: int = 0
    """Generation of the failed program."""
    can_be_mended: bool = False
    """Whether it is a program that the evaluator could not score, which `repair` may mend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A record in the database, with values derived by `tell`."""

    record: ScoredProgram
    serial: int
    """Number of programs told before it."""
    score: float
    features: tuple[float, ...]
    """In the order of `feature_dimensions`."""

    @property
    def id(self) -> str:
        return self.record.id

    @property
    def rank(self) -> tuple[float, int]:
        """Sort key, best first; of equal scores the earlier one."""
        return (-self.score, self.serial)


def summarize(code: str) -> CodeSummary:
    """Summarise a program's text; the cost grows with its length."""
    return CodeSummary(
        digest=blake2b(code.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest(),
        num_chars=len(code),
        num_newlines=code.count("\n"),
        characters="".join(sorted(set(code))),
    )


def numeric_metrics(metrics: Mapping[str, object]) -> dict[str, float]:
    """Return the numbers among an evaluator's metrics.

    A bool is a flag and left out, except as the combined score. A number beyond the range of floats
    becomes infinite, which `score_of` refuses.
    """
    return {
        name: _as_float(value)
        for name, value in metrics.items()
        if isinstance(value, int | float) and (name == COMBINED or not isinstance(value, bool))
    }


def score_of(metrics: Mapping[str, float], *, features: Collection[str] = ()) -> float | None:
    """Return the combined score if there is one, else the mean of the non-feature metrics.

    If all metrics are features, it is the mean of all. None without metrics, or if a number that
    counts is NaN or infinite: ignoring it would reward a broken evaluation.
    """
    if COMBINED in metrics:
        return mean_of([metrics[COMBINED]])
    scores = [value for name, value in metrics.items() if name not in features]
    return mean_of(scores or metrics.values())


def mean_of(values: Collection[float]) -> float | None:
    """Return the mean; None without values, or if one of them or their sum is not finite."""
    mean = sum(values) / len(values) if values else math.nan
    return mean if math.isfinite(mean) else None


def _as_float(value: int | float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
