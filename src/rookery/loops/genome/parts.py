"""What one genome run is made of, put together once from config, engine and run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rookery.loops.comparison import Samples
from rookery.loops.genome.adapter_builder import AdapterBuilder
from rookery.loops.genome.config import MERGES, MUTATIONS, GenomeConfig
from rookery.loops.genome.final_report import FinalReport
from rookery.loops.genome.generation_log import GenerationLog
from rookery.loops.genome.loading import CandidateLoader
from rookery.loops.genome.search_evaluator import SearchEvaluator
from rookery.ports import Engine, Observer
from rookery.reports import GenerationRecord
from rookery.rollout import TasksetEvaluator
from rookery.runs import Run
from rookery.tasks.taskset import Taskset
from rookery.types import Adapter, Task

__all__ = ["GenomeInputs", "RunParts", "assemble"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenomeInputs:
    """What an evolution is made of."""

    config: GenomeConfig
    founders: Mapping[str, Adapter]
    tasksets: Sequence[Taskset]
    evaluator: TasksetEvaluator
    """Asks the engine, and keeps the answers in the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunParts:
    """The parts of one run; who makes, who measures, who writes down."""

    config: GenomeConfig
    tasksets: Sequence[Taskset]
    engine: Engine
    evaluator: TasksetEvaluator
    builder: AdapterBuilder
    search: SearchEvaluator
    final: FinalReport
    log: GenerationLog
    run: Run

    def split(self, name: Literal["select", "report"]) -> list[Task]:
        return [task for taskset in self.tasksets for task in taskset.split(name)]


def assemble(
    inputs: GenomeInputs, *, engine: Engine, run: Run, observer: Observer[GenerationRecord]
) -> RunParts:
    """Everything a run needs, ready to measure the founders."""
    config, founders, tasksets = inputs.config, inputs.founders, inputs.tasksets
    evaluator = inputs.evaluator
    builder = AdapterBuilder(
        founders,
        merges={**MERGES, **config.merges},
        mutations={**MUTATIONS, **config.mutations},
        rank=config.rank or max(adapter.rank for adapter in founders.values()),
        device=config.merge_device,
    )
    loader = CandidateLoader(engine, run=run)
    weights = {taskset.name: taskset.weight for taskset in tasksets}
    searched = {taskset.name for taskset in tasksets if taskset.split("search")}
    search = SearchEvaluator(
        evaluator,
        loader=loader,
        builder=builder,
        tasks=[task for taskset in tasksets for task in taskset.split("search")],
        weights={name: weight for name, weight in weights.items() if name in searched},
        race=config.race,
        merit=config.merit,
        is_remote=engine.is_remote,
    )
    return RunParts(
        config=config,
        tasksets=tasksets,
        engine=engine,
        evaluator=evaluator,
        builder=builder,
        search=search,
        final=FinalReport(
            evaluator,
            loader=loader,
            base=engine.base,
            builder=builder,
            search=search,
            weights=weights,
            settings=config.finals,
            samples=None if config.report.samples is None else Samples(config.report.samples),
        ),
        log=GenerationLog(run, builder=builder, evaluator=evaluator, observer=observer),
        run=run,
    )
