"""The genome loop.

    founders = adapters from files, zero or random, and pair merges
    measure(founders)                                    # search split
    for stage in stages: stage searches on               # ga, surrogate, ...; search split
    winner = best of the finalists                       # select split
    report(winner, baselines)                            # report split, read once

Everything is a function of (config, seed) and of the answers, and every answer, failed or not, is
in the run's event log before it counts. So resuming is running again: what was answered is not
asked twice.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rookery.concurrency import run_in_thread
from rookery.errors import TaskError
from rookery.loops.genome.checks import check_inputs, check_tasks
from rookery.loops.genome.config import GenomeConfig
from rookery.loops.genome.documents import Ending, write_report
from rookery.loops.genome.final_report import Choice, ReportEntry
from rookery.loops.genome.founders import FileInit
from rookery.loops.genome.generation_log import UNWATCHED, Watcher
from rookery.loops.genome.parts import RunParts, assemble
from rookery.loops.genome.stages import STAGES, StageContext
from rookery.ports import Engine
from rookery.reports import GenomeReport
from rookery.rollout import TasksetEvaluator
from rookery.runs import Run
from rookery.search.founders import pair_plans
from rookery.tasks.taskset import Taskset, join_splits
from rookery.types import Adapter

__all__ = ["GenomeResult", "evolve"]


@dataclass(frozen=True, slots=True)
class GenomeResult:
    """The winner and the report about it."""

    winner: Adapter
    report: GenomeReport


async def evolve(
    config: GenomeConfig,
    *,
    founders: Mapping[str, Adapter],
    tasksets: Sequence[Taskset],
    engine: Engine,
    evaluator: TasksetEvaluator,
    run: Run,
    watcher: Watcher = UNWATCHED,
) -> GenomeResult:
    """Run or resume one evolution in `run`, which is left with winner, lineage and report."""
    tasksets = join_splits(tasksets)
    check_inputs(config, founders=founders, tasksets=tasksets, engine=engine)
    limit = engine.context_tokens
    await run_in_thread(check_tasks, evaluator, tasksets, context_tokens=limit)
    parts = assemble(
        config,
        founders=founders,
        tasksets=tasksets,
        engine=engine,
        evaluator=evaluator,
        run=run,
        watcher=watcher,
    )
    holders = await _measure_founders(parts)
    population: Sequence[str] = ()
    for index, stage in enumerate(config.stages):
        population = await STAGES[stage.type](stage, _context(parts, index))
    searched = list(parts.search.measured)
    choice, entries = await _enter(parts, holders)
    with parts.log.phase("report"):
        rows = await parts.final.report(entries, parts.split("report"), seed=config.seed)
    ending = Ending(searched=searched, population=tuple(population), choice=choice, rows=rows)
    report = await run_in_thread(write_report, parts, ending)
    return GenomeResult(winner=parts.builder.adapter(choice.ranked[0]), report=report)


async def _measure_founders(parts: RunParts) -> dict[str, str]:
    """Founders see every task: they are the baseline. The founders that hold a floor, by source."""
    config, names = parts.config, list(parts.builder.founders)
    if isinstance(config.init, FileInit) and config.init.use != "adapters":
        plans = pair_plans(names, count=config.init.num_pairs, seed=config.seed)
        parts.builder.plan(plans)
        names = [*names, *(plan.id for plan in plans)]
    with parts.log.phase("founders") as cost:
        await parts.search.measure(names, rivals=(), seed=config.seed, keep=len(names))
        holders = _set_floors(parts)
        measured = {name: parts.search.measured[name] for name in names}
        await parts.log.record("founders", measured, cost())
    errors = [measured[founder].error for founder in parts.builder.founders]
    if all(errors):
        raise TaskError(f"All {len(errors)} founders failed. The first error: {errors[0]}")
    return holders


def _set_floors(parts: RunParts) -> dict[str, str]:
    """All candidates are judged by the floors, founders included."""
    search, floors, holders = parts.search, parts.config.floors, {}
    values = {source: floor for source, floor in floors.items() if floor != "founder"}
    alive = [f for f in parts.builder.founders if not search.measured[f].error]
    for source in floors:
        if source not in values and alive:
            holders[source] = max(alive, key=lambda f: search.means(f)[source])
            values[source] = search.means(holders[source])[source]
    search.set_floors({source: float(value) for source, value in values.items()})
    return holders


def _context(parts: RunParts, index: int) -> StageContext:
    init = parts.config.init
    begins_with_pairs = isinstance(init, FileInit) and init.use == "pairs"
    return StageContext(
        builder=parts.builder,
        search=parts.search,
        log=parts.log,
        seed=parts.config.seed,
        index=index,
        baselines=frozenset(parts.builder.founders if begins_with_pairs else ()),
    )


async def _enter(parts: RunParts, holders: Mapping[str, str]) -> tuple[Choice, list[ReportEntry]]:
    """Choose on `select`; who is compared on `report`: the winner first, then the best founder."""
    final, builder, log = parts.final, parts.builder, parts.log
    settings, select = parts.config.finals, parts.split("select")
    num_searched = builder.num_distinct(parts.search.measured)
    with log.phase("select") as cost:
        finalists = final.finalists(settings.num_finalists)
        choice = await final.choose(finalists, select, floor_holders=holders)
        spent = await log.settle("select", cost())
    spent = replace(log.searched() + spent, num_candidates=num_searched)
    founders = final.founders()
    measuring = log.founders()
    winner, best = choice.ranked[0], founders[0]
    entries = [
        ReportEntry(name="evolved", make=builder.maker(winner), note=winner, cost=spent),
        ReportEntry(name="best founder", make=builder.maker(best), note=best, cost=measuring),
        *final.merged(parts.engine.max_rank),
    ]
    if settings.random_search and len(builder.founders) > 1:
        entries += await _search_randomly(parts, holders, count=num_searched)
    panels = {
        "vote of founders": (founders[: settings.num_voters], measuring),
        "vote of finalists": (choice.ranked[: settings.num_voters], spent),
    }
    entries.append(ReportEntry(name="base model"))
    entries += [
        ReportEntry(name=name, voters=tuple(panel), note=f"{len(panel)} voters", cost=cost)
        for name, (panel, cost) in panels.items()
    ]
    return choice, entries


async def _search_randomly(
    parts: RunParts, holders: Mapping[str, str], *, count: int
) -> list[ReportEntry]:
    """The winner of `count` random merges, chosen as the search's own winner is."""
    keep, select = parts.config.finals.num_finalists, parts.split("select")
    with parts.log.phase("random search") as cost:
        found = await parts.final.random_search(count, seed=parts.config.seed, keep=keep)
        if not found:
            return []
        choice = await parts.final.choose(found, select, floor_holders=holders)
        spent = await parts.log.settle("random search", cost())
    return [
        ReportEntry(
            name="random search",
            make=parts.builder.maker(choice.ranked[0]),
            note=f"best of {count}",
            cost=replace(spent, num_candidates=count),
        )
    ]
