"""The parts of a genome run, and the files that it leaves."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Literal

from rookery.loops.comparison import (
    Samples,
    describe_taskset,
    warn_of_batches,
    warn_of_failed_tasks,
    warn_of_precision,
    warn_of_small_samples,
)
from rookery.loops.genome.adapter_builder import AdapterBuilder
from rookery.loops.genome.config import MERGES, MUTATIONS, GenomeConfig
from rookery.loops.genome.final_report import Choice, FinalReport
from rookery.loops.genome.generation_log import GenerationLog, GenerationSpending
from rookery.loops.genome.search_evaluator import CandidateLoader, SearchEvaluator
from rookery.ports import Engine, Observer
from rookery.reports import (
    CandidateRecord,
    GenerationRecord,
    GenomeReport,
    LineageRecord,
    ReportRow,
    SpentRecord,
)
from rookery.rollout import TasksetEvaluator
from rookery.runs import Run
from rookery.runs.budget import Budget
from rookery.search.candidate import BY_BLOCK, ChildPlan, Recipe, first_front
from rookery.tasks.taskset import Taskset
from rookery.types import Adapter, Task
from rookery.weights import write_adapter

__all__ = ["GenomeInputs", "GenomeSummary", "RunParts", "assemble", "write_report"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenomeInputs:
    """The inputs of one evolution."""

    config: GenomeConfig
    founders: Mapping[str, Adapter]
    tasksets: Sequence[Taskset]
    evaluator: TasksetEvaluator
    """Asks the engine and keeps the answers in the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunParts:
    """The parts of one run."""

    config: GenomeConfig
    tasksets: Sequence[Taskset]
    engine: Engine
    evaluator: TasksetEvaluator
    builder: AdapterBuilder
    search: SearchEvaluator
    final: FinalReport
    log: GenerationLog
    budget: Budget
    run: Run

    def split(self, name: Literal["select", "report"]) -> list[Task]:
        return [task for taskset in self.tasksets for task in taskset.split(name)]


def assemble(
    inputs: GenomeInputs, *, engine: Engine, run: Run, observer: Observer[GenerationRecord]
) -> RunParts:
    """Build all parts of a run, ready to measure the founders."""
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
    budget = Budget(config.budget, run)
    num_select = sum(len(taskset.split("select")) for taskset in tasksets)
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
        log=GenerationLog(
            run,
            builder=builder,
            evaluator=evaluator,
            observer=observer,
            spending=GenerationSpending(
                budget,
                evaluator=evaluator,
                run=run,
                num_choice_answers=num_select * (config.finals.num_finalists + len(config.floors)),
            ),
        ),
        budget=budget,
        run=run,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GenomeSummary:
    """The outcome of a run, as input of its report."""

    searched: Sequence[str]
    """All candidates of the search, founders first."""
    population: Sequence[str]
    """Candidates of the last stage's final population."""
    choice: Choice
    rows: Sequence[ReportRow]
    num_search_tokens: int = 0
    """Answer tokens spent before the report tasks were read."""


def write_report(parts: RunParts, summary: GenomeSummary) -> GenomeReport:
    """Write adapters, lineage and report into the run directory, and return the report."""
    builder, search, run = parts.builder, parts.search, parts.run
    winner = summary.choice.ranked[0]
    population = list(dict.fromkeys(summary.population or [winner]))
    run.write_folder("winner", lambda path: write_adapter(builder.adapter(winner), path))
    _save_all(run, "founders", builder, builder.founders)
    _save_all(run, "population", builder, population)
    run.write_json("lineage.json", builder.lineage())
    run.append_blocking("winner", {"id": winner, "version": builder.version(winner)}, key="winner")
    report = GenomeReport(
        run=run.name,
        model=parts.engine.base.version,
        seed=parts.config.seed,
        tasksets=tuple(map(describe_taskset, parts.tasksets)),
        rows=tuple(summary.rows),
        generations=tuple(parts.log.generations),
        lineage=_draw_lineage(parts, summary.searched, winner),
        winner_id=winner,
        merit=search.merit if search.num_choices else "reward",
        population=_describe_all(search, population),
        front=_describe_all(search, _find_front(search, summary.searched)),
        floors=dict(search.floors),
        num_candidates=builder.num_distinct(summary.searched) + search.num_members,
        num_rollouts=parts.evaluator.num_rollouts,
        num_tokens=parts.evaluator.num_tokens,
        spent=SpentRecord(drawn_tokens=summary.num_search_tokens),
        stop_reason=parts.budget.stop_reason,
        seconds=run.worked_s,
        warnings=tuple(_make_warnings(parts, summary)),
    )
    run.write_json("report.json", report.model_dump(mode="json", exclude_none=True))
    return report


def _save_all(run: Run, folder: str, builder: AdapterBuilder, names: Iterable[str]) -> None:
    def write(path: Path) -> None:
        for name in names:
            write_adapter(builder.adapter(name), path / name)

    run.write_folder(folder, write)


def _describe_all(search: SearchEvaluator, names: Iterable[str]) -> tuple[CandidateRecord, ...]:
    """Describe candidates with their scores on the search split."""
    return tuple(
        CandidateRecord(
            id=name,
            score=search.measured[name].mean,
            violation=search.measured[name].fitness.violation,
            by_source=dict(search.means(name)),
        )
        for name in names
    )


def _find_front(search: SearchEvaluator, names: Sequence[str]) -> list[str]:
    """Return the Pareto front by reward and taskset, of candidates that saw every task."""
    complete = [name for name in names if search.measured[name].is_complete]
    return [complete[i] for i in first_front([search.plain_fitness(name) for name in complete])]


def _draw_lineage(
    parts: RunParts, searched: Sequence[str], winner: str
) -> tuple[LineageRecord, ...]:
    """List the searched candidates with their parents, in the order in which they were made."""
    builder, measured = parts.builder, parts.search.measured
    ancestors, queue = {winner}, [winner]
    while queue:
        recipe = builder.recipes.get(queue.pop())
        parents = recipe.parents if recipe is not None else ()
        queue.extend(p for p in parents if p not in ancestors)
        ancestors.update(parents)
    graph = []
    for name in searched:
        recipe = builder.recipes.get(name)
        graph.append(
            LineageRecord(
                id=name,
                generation=parts.log.generation_of[name],
                operator=recipe.operator if recipe is not None else "founder",
                parents=tuple(recipe.parents) if recipe is not None else (),
                weights=_parent_weights(recipe) if recipe is not None else (),
                score=measured[name].mean,
                is_winner=name == winner,
                is_ancestor=name in ancestors,
            )
        )
    return tuple(graph)


def _parent_weights(recipe: Recipe) -> tuple[float, ...]:
    """Return a weight per parent. For sums by block, the mean over the blocks."""
    if not isinstance(recipe, ChildPlan) or recipe.merge != BY_BLOCK:
        return recipe.weights
    count = len(recipe.parents)
    return tuple(fmean(recipe.weights[place::count]) for place in range(count))


def _make_warnings(parts: RunParts, summary: GenomeSummary) -> list[str]:
    """Return the warnings, the most serious first."""
    return [
        *_warn_of_better_baselines(summary.rows),
        *_warn_of_winner(parts, summary),
        *_warn_of_failures(parts, summary),
        *_warn_of_splits(parts.tasksets),
        *warn_of_small_samples(summary.rows),
        *warn_of_batches(parts.engine),
        *warn_of_precision(parts.config.engine),
    ]


def _warn_of_better_baselines(rows: Sequence[ReportRow]) -> list[str]:
    better = [
        (
            lead.mean,
            f"The {row.name} is better than the winner by {lead.mean:.3f} "
            f"({lead.low:.3f} to {lead.high:.3f}) on the report tasks.",
        )
        for row in rows
        if (lead := row.lead) and lead.mean is not None and lead.low is not None and lead.low > 0
    ]
    return [sentence for _, sentence in sorted(better, key=lambda pair: -pair[0])]


def _warn_of_winner(parts: RunParts, summary: GenomeSummary) -> list[str]:
    winner, warnings = summary.choice.ranked[0], []
    if winner in parts.builder.founders:
        warnings.append(
            f"The search improved on no founder: the winner is the founder {winner} itself."
        )
    violation = parts.search.measured[winner].fitness.violation
    if violation > 0:
        warnings.append(
            "No candidate that saw every search task keeps every floor: the winner misses them "
            f"by {violation:.3f} in all there."
        )
    for source, floor in parts.search.floors.items():
        mean = summary.rows[0].by_source.get(source)
        if mean is not None and mean < floor:
            is_measured = parts.config.floors[source] == "founder"
            origin = ", the best founder's mean on the search tasks" if is_measured else ""
            warnings.append(
                f"On the report tasks of {source} the winner has {mean:.3f}, below the floor of "
                f"{floor:.3f}{origin}."
            )
    if winner in summary.choice.errors:
        warnings.append(
            "Every finalist failed on the select tasks, so the winner is the best on the search "
            f"tasks. The first error: {summary.choice.errors[winner]}"
        )
    return warnings


def _warn_of_failures(parts: RunParts, summary: GenomeSummary) -> list[str]:
    measured, choice = parts.search.measured, summary.choice
    warnings = warn_of_failed_tasks(summary.rows)
    losers = [name for name in choice.errors if name != choice.ranked[0]]
    if losers:
        warnings.append(
            f"{len(losers)} of {len(choice.ranked)} finalists failed on the select tasks and "
            f"lost. The first error: {choice.errors[losers[0]]}"
        )
    failed = [measured[name].error for name in summary.searched if measured[name].error]
    if failed:
        warnings.append(f"{len(failed)} candidates failed and lost. The first error: {failed[0]}")
    if errors := parts.search.member_errors:
        warnings.append(
            f"{len(errors)} of {parts.search.num_members} members of populations failed and lost. "
            f"The first error: {errors[0]}"
        )
    return [*warnings, *_warn_of_random_search(parts, summary)]


def _warn_of_random_search(parts: RunParts, summary: GenomeSummary) -> list[str]:
    searched = set(summary.searched)
    drawn = [candidate for name, candidate in parts.search.measured.items() if name not in searched]
    errors = [candidate.error for candidate in drawn if candidate.error]
    if not errors:
        return []
    outcome = "there is no random search to compare with" if len(errors) == len(drawn) else "lost"
    return [
        f"{len(errors)} of {len(drawn)} random merges failed and {outcome}. The first error: "
        f"{errors[0]}"
    ]


def _warn_of_splits(tasksets: Sequence[Taskset]) -> list[str]:
    warnings = [note for taskset in tasksets for note in taskset.notes]
    unchosen = [t.name for t in tasksets if t.split("search") and not t.split("select")]
    if unchosen:
        warnings.append(
            f"No select tasks in {_join(unchosen)}: the choice among finalists uses the search "
            "tasks there again."
        )
    return warnings


def _join(names: Sequence[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last
