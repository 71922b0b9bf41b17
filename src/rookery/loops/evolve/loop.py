"""The evolve loop: programs evolved by a language model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rookery.loops.evolve.config import EvolveConfig
from rookery.loops.evolve.first_program import FirstProgram
from rookery.loops.evolve.program import ProgramRecord
from rookery.loops.evolve.watcher import UNWATCHED, Watcher
from rookery.ports import Executor, TextModel
from rookery.reports import EvolveReport
from rookery.runs import Run

__all__ = ["EvolveResult", "evolve"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvolveResult:
    """What an evolution found."""

    report: EvolveReport
    best: ProgramRecord


async def evolve(
    config: EvolveConfig,
    *,
    programs: Sequence[FirstProgram | ProgramRecord],
    models: Mapping[str, TextModel],
    executor: Executor,
    run: Run,
    watcher: Watcher = UNWATCHED,
) -> EvolveResult:
    """Evolve the programs until the iterations are done, or a target, a budget or patience ends it.

    Call it again with the same run to resume. `models` has the arms by the names that `llm.models`
    gives them, the judges too; a name that is not in the config is an arm of weight 1. A
    ProgramRecord, as from a checkpoint, is taken with the metrics it has; a FirstProgram is scored.
    """
    raise NotImplementedError
