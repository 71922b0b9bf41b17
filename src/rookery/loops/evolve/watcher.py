"""Who is told while an evolution runs: the terminal, a page, a test."""

from dataclasses import dataclass
from typing import Protocol

__all__ = ["UNWATCHED", "Iteration", "Watcher"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """One iteration that was decided: it gave a program, or a failure with its reason."""

    series: str = ""
    """The baseline that it belongs to; empty for the evolution."""
    number: int
    num_decided: int
    """With this one."""
    num_iterations: int
    """All that the run will do unless it ends early."""
    model: str
    program: str = ""
    """The id of the program; empty for a failure."""
    score: float | None = None
    best_score: float
    is_best: bool = False
    failure: str = ""
    """The kind of failure; empty for a program."""
    message: str = ""
    """The sentence of a failure."""
    tokens: int | None = None
    """Of prompt and answer; None when the model does not report them."""
    evaluation_s: float | None = None


class Watcher(Protocol):
    """Told in the event loop: must return at once."""

    def on_iteration(self, iteration: Iteration) -> None: ...

    def on_waiting(self, sentence: str) -> None:
        """The run waits for something outside of it, such as a model that is down."""
        ...


class _Unwatched:
    def on_iteration(self, iteration: Iteration) -> None:
        pass

    def on_waiting(self, sentence: str) -> None:
        pass


UNWATCHED: Watcher = _Unwatched()
