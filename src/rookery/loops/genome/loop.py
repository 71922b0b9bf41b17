"""The genome loop.

    founders = adapters from files, zero or random, and pair merges
    measure(founders)                                    # search split
    for stage in stages: continue the search             # ga, surrogate, ...; search split
    winner = best of the finalists                       # select split
    report(winner, baselines)                            # report split, read once

Everything is a function of (config, seed) and the answers. Every answer, even a failed one, is in
the run's event log before it counts, so a resumed run asks nothing twice.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rookery.errors import TaskError
from rookery.loops.genome.config import check_inputs, check_tasks
from rookery.loops.genome.documents import (
    GenomeInputs,
    GenomeSummary,
    RunParts,
    assemble,
    write_report,
)
from rookery.loops.genome.final_report import Choice, ReportEntry
from rookery.loops.genome.founders import FileInit
from rookery.loops.genome.stages import STAGES, StageContext
from rookery.ports import UNOBSERVED, Engine, Observer
from rookery.reports import GenerationRecord, GenomeReport
from rookery.runs import Run
from rookery.runtime.concurrency import run_in_thread
from rookery.search.population import pair_plans
from rookery.tasks.taskset import join_splits

__all__ = ["evolve"]


async def evolve(
    inputs: GenomeInputs,
    *,
    engine: Engine,
    run: Run,
    observer: Observer[GenerationRecord] = UNOBSERVED,
) -> GenomeReport:
    """Run or resume one evolution. Leaves winner, lineage and report in `run`."""
    inputs = replace(inputs, tasksets=join_splits(inputs.tasksets))
    config, tasksets, limit = inputs.config, inputs.tasksets, engine.context_tokens
    check_inputs(config, founders=inputs.founders, tasksets=tasksets, engine=engine)
    await run_in_thread(check_tasks, inputs.evaluator, tasksets, context_tokens=limit)
    parts = assemble(inputs, engine=engine, run=run, observer=observer)
    holders = await _measure_founders(parts)
    population: Sequence[str] = ()
    for index, stage in enumerate(config.stages):
        population = await STAGES[stage.type](stage, _context(parts, index))
    searched = list(parts.search.measured)
    choice = await _select(parts, holders)
    num_search_tokens = parts.evaluator.num_answer_tokens
    entries = await _list_entries(parts, choice, holders)
    with parts.log.phase("report"):
        rows = await parts.final.report(entries, parts.split("report"), seed=config.seed)
    summary = GenomeSummary(
        searched=searched,
        population=tuple(population),
        choice=choice,
        rows=rows,
        num_search_tokens=num_search_tokens,
    )
    return await run_in_thread(write_report, parts, summary)


async def _measure_founders(parts: RunParts) -> dict[str, str]:
    """Measure the founders on every task. Returns the founders whose means are floors."""
    config, log, founders = parts.config, parts.log, list(parts.builder.founders)
    pairs: list[str] = []
    if isinstance(config.init, FileInit) and config.init.use != "adapters":
        plans = pair_plans(founders, count=config.init.num_pairs, seed=config.seed)
        parts.builder.plan(plans)
        pairs = [plan.id for plan in plans]
    with log.phase("founders") as cost:
        await parts.search.measure(founders, rivals=(), seed=config.seed, keep=len(founders))
        spent = await log.settle("founders", cost())
        log.cost.founders = replace(spent, num_candidates=len(founders))
        await parts.search.measure(pairs, rivals=(), seed=config.seed, keep=len(pairs))
        holders = _set_floors(parts)
        measured = {name: parts.search.measured[name] for name in [*founders, *pairs]}
        await log.record("founders", measured, cost())
    errors = [measured[founder].error for founder in founders]
    if all(errors):
        raise TaskError(f"All {len(errors)} founders failed. The first error: {errors[0]}")
    return holders


def _set_floors(parts: RunParts) -> dict[str, str]:
    """Judge all candidates by the floors, founders included."""
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


async def _select(parts: RunParts, holders: Mapping[str, str]) -> Choice:
    """Rank the finalists on the select split."""
    final, log = parts.final, parts.log
    with log.phase("select") as cost:
        finalists = final.finalists(parts.config.finals.num_finalists)
        choice = await final.choose(finalists, parts.split("select"), floor_holders=holders)
        log.cost.select = await log.settle("select", cost())
    return choice


async def _list_entries(
    parts: RunParts, choice: Choice, holders: Mapping[str, str]
) -> list[ReportEntry]:
    """List the entries of the report: the winner, the best founder, then the other baselines."""
    final, builder, cost = parts.final, parts.builder, parts.log.cost
    settings, founders = parts.config.finals, final.founders()
    num_searched = builder.num_distinct(parts.search.measured)
    # Members of populations saw only some tasks. They count as candidates by number of answers.
    num_equal = num_searched + parts.search.num_member_answers // len(parts.search.tasks)
    searching = replace(
        cost.generations + cost.select, num_candidates=num_searched + parts.search.num_members
    )
    winner, best = choice.ranked[0], founders[0]
    entries = [
        ReportEntry(name="evolved", make=builder.maker(winner), note=winner, cost=searching),
        ReportEntry(name="best founder", make=builder.maker(best), note=best, cost=cost.founders),
        *final.merged(parts.engine.max_rank),
    ]
    if settings.random_search and len(builder.founders) > 1:
        entries += await _search_randomly(parts, holders, count=num_equal)
    entries.append(ReportEntry(name="base model"))
    panels = {
        "vote of founders": (founders[: settings.num_voters], cost.founders),
        "vote of finalists": (choice.ranked[: settings.num_voters], searching),
    }
    entries += [
        ReportEntry(name=name, voters=tuple(panel), note=f"{len(panel)} voters", cost=spent)
        for name, (panel, spent) in panels.items()
    ]
    return entries


async def _search_randomly(
    parts: RunParts, holders: Mapping[str, str], *, count: int
) -> list[ReportEntry]:
    """Return the winner of `count` random merges and founders, chosen as the search's winner is."""
    keep, select = parts.config.finals.num_finalists, parts.split("select")
    with parts.log.phase("random search") as cost:
        drawn = await parts.final.random_search(count, seed=parts.config.seed, keep=keep)
        if not drawn:
            return []
        choice = await parts.final.choose(drawn, select, floor_holders=holders)
        spent = await parts.log.settle("random search", cost())
    return [
        ReportEntry(
            name="random search",
            make=parts.builder.maker(choice.ranked[0]),
            note=f"best of {count}",
            cost=replace(parts.log.cost.founders + spent, num_candidates=count),
        )
    ]
