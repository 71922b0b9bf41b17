"""When to stop early: no improvement for a while, or a target reached.

stopping = Stopping()
stopping = advance(stopping, database.tell(record), config=config)
stopping.reason                                          # a sentence, or empty
"""

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import Field

from rookery.config import Config
from rookery.search.programs.program import COMBINED, Member, mean_of

__all__ = ["Stopping", "StoppingConfig", "advance", "begin_again"]


class StoppingConfig(Config):
    """The rules of `early_stopping_*`, `convergence_threshold` and `target_score`."""

    patience: int | None = None
    """Stop after so many programs in a row without improvement; 0 or below stops when the metric
    equals `threshold`; None never stops."""
    threshold: float = 0.001
    """The least improvement that counts, or the value to reach."""
    metric: str = Field(default=COMBINED, min_length=1)
    """The metric that is watched; the mean of all metrics where a program does not have it."""
    target_score: float | None = None
    """Stop when a program's score is at least this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopping:
    """What was seen so far."""

    best: float | None = None
    num_without_improvement: int = 0
    reason: str = ""
    """Why the search should stop; empty while it should not."""


def advance(stopping: Stopping, member: Member, *, config: StoppingConfig) -> Stopping:
    """The state after one more program; attempts that failed do not count."""
    value = _watched(member.record.metrics, config.metric)
    best, count = stopping.best, stopping.num_without_improvement
    if value is not None:
        is_better = best is None or value - best >= config.threshold
        best, count = (value, 0) if is_better else (best, count + 1)
    reason = stopping.reason or _reason(member.score, value, count, config)
    return Stopping(best=best, num_without_improvement=count, reason=reason)


def begin_again(stopping: Stopping, best: Member, *, config: StoppingConfig) -> Stopping:
    """Of a search that ended and goes on: patience counts anew, a target that was reached holds."""
    is_reached = config.target_score is not None and best.score >= config.target_score
    return Stopping(best=stopping.best, reason=stopping.reason if is_reached else "")


def _reason(score: float, value: float | None, count: int, config: StoppingConfig) -> str:
    if config.target_score is not None and score >= config.target_score:
        return f"The score {score:.6g} reached the target {config.target_score:.6g}."
    if config.patience is None:
        return ""
    if config.patience <= 0:
        is_reached = value == config.threshold
        return f"{config.metric} reached {config.threshold:.6g}." if is_reached else ""
    if count < config.patience:
        return ""
    return f"{config.metric} did not improve by {config.threshold:.6g} in {count} programs."


def _watched(metrics: Mapping[str, float], name: str) -> float | None:
    return mean_of([metrics[name]] if name in metrics else list(metrics.values()))
