"""Goes on with any run that was interrupted, by the kind that it is."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rookery.compose.running import OpenRun, Outcome
from rookery.compose.torchrun import is_first_process
from rookery.config import Config, parse_config
from rookery.errors import RunError
from rookery.runs import Run
from rookery.ui.display import Display

__all__ = ["resume"]

Parts = tuple[type[Config], Callable[[Any, OpenRun, Display], Outcome[Any]]]
"""What a run was made from, and what takes it to its end."""


def resume(path: str | Path, *, progress: bool = True) -> Outcome[Any]:
    """Go on with the run in a folder from where its event log ends; nothing is done twice.

    The run is opened when all it needs has been read: one that cannot be resumed stays as it is.
    """
    with Run.view(Path(path)) as run:
        if run.kind not in KINDS:
            raise RunError(
                f"{path} is a run of kind {run.kind!r}, which this version cannot resume."
            )
        model, finish = KINDS[run.kind]()
        place = run.path.absolute()
        config = parse_config(model, run.config, origin=str(run.path / "config.json"))
        if is_first_process():
            run.require_free()
    return finish(config, lambda: Run.open(place), Display(is_quiet=not progress))


def _evaluation() -> Parts:
    from rookery.compose.evaluation import EvaluationConfig, finish_evaluation

    return EvaluationConfig, finish_evaluation


def _genome() -> Parts:
    from rookery.compose.genome import finish_genome
    from rookery.loops.genome import GenomeConfig

    return GenomeConfig, finish_genome


def _grpo() -> Parts:
    from rookery.compose.grpo import finish_grpo
    from rookery.loops.grpo import GrpoConfig

    return GrpoConfig, finish_grpo


def _icm() -> Parts:
    from rookery.compose.icm import finish_icm
    from rookery.loops.icm import IcmConfig

    return IcmConfig, finish_icm


def _evolve() -> Parts:
    from rookery.compose.evolve import finish_evolve
    from rookery.compose.evolve_inputs import EvolveRunConfig

    return EvolveRunConfig, finish_evolve


KINDS: Mapping[str, Callable[[], Parts]] = {
    "eval": _evaluation,
    "evolve": _evolve,
    "genome": _genome,
    "grpo": _grpo,
    "icm": _icm,
}
"""By the kind of the run; each imports its loop when it is needed."""
