"""What is said of an evolution in the terminal while it runs: a line per iteration."""

import logging
from pathlib import Path

from rookery.errors import RunError
from rookery.loops.evolve.watcher import Iteration
from rookery.runs import Run
from rookery.runs.summary import note_elsewhere
from rookery.ui.display import Bar, Display

__all__ = ["IterationLines", "describe"]

RUNS = Path("runs")
"""Where `rookery runs list` looks."""
MAX_CHARS = 100
"""Of the sentence of a failure: a line of a log is read at a glance."""

logger = logging.getLogger(__name__)


class IterationLines:
    """A Watcher. The metrics of the evolution itself go to the run too."""

    def __init__(self, display: Display, bar: Bar, run: Run) -> None:
        self._display = display
        self._bar = bar
        self._run = run
        self._num_tokens = 0
        self._is_listed = False

    def on_iteration(self, iteration: Iteration) -> None:
        self._list_run()
        self._num_tokens += iteration.tokens or 0
        self._display.say(describe(iteration))
        if iteration.series:
            return  # the bar is of the evolution
        self._run.log_metrics(iteration.num_decided, _metrics(iteration))
        self._bar.update(
            name=f"best {iteration.best_score:.4g}",
            done=iteration.num_decided,
            total=iteration.num_iterations,
            tokens=self._num_tokens,
        )

    def _list_run(self) -> None:
        """From its first iteration on: what ends before leaves no run."""
        if not self._is_listed:
            self._is_listed = True
            try:
                note_elsewhere(RUNS, self._run.path)
            except RunError as error:
                logger.warning("`rookery runs list` does not list this run: %s", error)

    def on_waiting(self, sentence: str) -> None:
        logger.info("%s", sentence)  # for the file: a warning would be in the terminal twice
        self._display.note([sentence])


def _metrics(iteration: Iteration) -> dict[str, float]:
    """What is not known of an iteration is left out."""
    values = {
        "evolve/best_score": iteration.best_score,
        "evolve/score": iteration.score,
        "evolve/is_failed": float(bool(iteration.failure)),
        "evolve/num_tokens": iteration.tokens,
        "time/evaluation_s": iteration.evaluation_s,
    }
    return {name: float(value) for name, value in values.items() if value is not None}


def describe(iteration: Iteration) -> str:
    """`   12  0.73  best 0.73 *  big` or `   13  failed (timeout): It took ...  best 0.73`.

    What a program or a model wrote cannot move the cursor or colour the terminal.
    """
    series = f"{iteration.series} " if iteration.series else ""
    head = f"{series}{iteration.number:>5}"
    best = f"best {iteration.best_score:.4g}"
    if iteration.failure:
        words = " ".join(iteration.message.split())[:MAX_CHARS]
        reason = "".join(char for char in words if char.isprintable())
        return f"{head}  failed ({iteration.failure}): {reason}  {best}"
    score = "-" if iteration.score is None else f"{iteration.score:.4g}"
    return f"{head}  {score}  {best}{' *' if iteration.is_best else ''}  {iteration.model}"
