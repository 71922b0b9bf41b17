"""The kinds of runs there are, and how one that was interrupted goes on."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rookery.compose.running import OpenRun, Outcome, RunKind
from rookery.compose.torchrun import is_first_process
from rookery.config import parse_config
from rookery.errors import RunError
from rookery.runs import Run
from rookery.ui.display import Display

__all__ = ["KINDS", "resume"]


def resume(path: str | Path, *, rescore: bool = False, progress: bool = True) -> Outcome[Any]:
    """Go on with the run in a folder from where its event log ends; nothing is done twice.

    The run is opened when all it needs has been read: one that cannot be resumed stays as it is.
    With `rescore` its answers are scored again, and what follows from their rewards is made again:
    all answers when a scorer changed, else those without a reward.
    """
    with Run.view(Path(path)) as run:
        if run.kind not in KINDS:
            raise RunError(
                f"{path} is a run of kind {run.kind!r}, which this version cannot resume."
            )
        kind = KINDS[run.kind]()
        if rescore and kind.scored is None:
            raise RunError(
                f"{path} is a run of kind {run.kind!r}, which has no scorer: leave out --rescore."
            )
        place = run.path.absolute()
        config = parse_config(kind.config, run.config, origin=str(run.path / "config.json"))
        if is_first_process():
            run.require_free()
    rescored = kind.scored if rescore else None
    open_run = OpenRun(lambda: Run.open(place), folder=place, rescored=rescored)
    return kind.finish(config, open_run, Display(is_quiet=not progress))


def _evaluation() -> RunKind[Any, Any]:
    from rookery.compose.evaluation import EVALUATION

    return EVALUATION


def _evolve() -> RunKind[Any, Any]:
    from rookery.compose.evolve import EVOLVE

    return EVOLVE


def _genome() -> RunKind[Any, Any]:
    from rookery.compose.genome import GENOME

    return GENOME


def _grpo() -> RunKind[Any, Any]:
    from rookery.compose.grpo import GRPO

    return GRPO


def _icm() -> RunKind[Any, Any]:
    from rookery.compose.icm import ICM

    return ICM


KINDS: Mapping[str, Callable[[], RunKind[Any, Any]]] = {
    "eval": _evaluation,
    "evolve": _evolve,
    "genome": _genome,
    "grpo": _grpo,
    "icm": _icm,
}
"""By the kind of the run; each imports its loop when it is needed."""
