"""What a genome run leaves behind: winner, population, founders, lineage, report, warnings."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rookery.loops.genome.adapter_builder import AdapterBuilder
from rookery.loops.genome.final_report import Choice
from rookery.loops.genome.parts import RunParts
from rookery.loops.genome.search_evaluator import SearchEvaluator
from rookery.runs import Run
from rookery.search.pareto import fronts
from rookery.tasks.taskset import Taskset
from rookery.weights import write_adapter

__all__ = ["Ending", "write_report"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a run came out."""

    searched: Sequence[str]
    """Every candidate of the search, founders first."""
    population: Sequence[str]
    """The candidates that the last stage ended with."""
    choice: Choice
    rows: Sequence[dict[str, Any]]


def write_report(parts: RunParts, ending: Ending) -> dict[str, Any]:
    """Leave everything in the run directory; the report is also the result."""
    builder, search, run = parts.builder, parts.search, parts.run
    winner = ending.choice.ranked[0]
    population = list(dict.fromkeys(ending.population or [winner]))
    run.write_folder("winner", lambda path: write_adapter(builder.adapter(winner), path))
    _save_all(run, "founders", builder, builder.founders)
    _save_all(run, "population", builder, population)
    run.write_json("lineage.json", builder.lineage())
    run.append_blocking("winner", {"id": winner, "version": builder.version(winner)}, key="winner")
    report = {
        "kind": "genome",
        "run": run.name,
        "model": parts.engine.base.version,
        "seed": parts.config.seed,
        "tasksets": [_describe_taskset(taskset) for taskset in parts.tasksets],
        "rows": ending.rows,
        "generations": [asdict(generation) for generation in parts.log.generations],
        "lineage": _draw_lineage(builder, search, ending.searched, winner),
        "winner": winner,
        "population": _describe_all(search, population),
        "front": _describe_all(search, _find_front(search, ending.searched)),
        "floors": dict(search.floors),
        "num_candidates": builder.num_distinct(ending.searched),
        "num_rollouts": parts.evaluator.num_rollouts,
        "num_tokens": parts.evaluator.num_tokens,
        "seconds": run.worked_s,
        "warnings": _make_warnings(parts, ending),
    }
    run.write_json("report.json", report)
    return report


def _save_all(run: Run, folder: str, builder: AdapterBuilder, names: Iterable[str]) -> None:
    def write(path: Path) -> None:
        for name in names:
            write_adapter(builder.adapter(name), path / name)

    run.write_folder(folder, write)


def _describe_taskset(taskset: Taskset) -> dict[str, Any]:
    sizes = {f"num_{s}": len(taskset.split(s)) for s in ("search", "select", "report")}
    return {"name": taskset.name, "weight": taskset.weight, **sizes}


def _describe_all(search: SearchEvaluator, names: Iterable[str]) -> list[dict[str, Any]]:
    """Scores on the search split."""
    return [
        {
            "id": name,
            "score": search.measured[name].fitness.score,
            "violation": search.measured[name].fitness.violation,
            "by_source": search.means(name),
        }
        for name in names
    ]


def _find_front(search: SearchEvaluator, names: Sequence[str]) -> list[str]:
    """Those that no other candidate beats on every taskset, of all that saw every task."""
    complete = [name for name in names if search.measured[name].is_complete]
    first = fronts([search.measured[name].fitness for name in complete])[0]
    return [complete[index] for index in sorted(first)]


def _draw_lineage(
    builder: AdapterBuilder, search: SearchEvaluator, searched: Sequence[str], winner: str
) -> list[dict[str, Any]]:
    """The searched candidates as nodes: founders first, then as they were made."""
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
            {
                "id": name,
                "generation": recipe.generation if recipe is not None else 0,
                "operator": recipe.operator if recipe is not None else "founder",
                "parents": list(recipe.parents) if recipe is not None else [],
                "weights": list(recipe.weights) if recipe is not None else [],
                "score": search.measured[name].fitness.score,
                "is_winner": name == winner,
                "is_ancestor": name in ancestors,
            }
        )
    return graph


def _make_warnings(parts: RunParts, ending: Ending) -> list[str]:
    """What a reader must know before the numbers, the most serious first."""
    return [
        *_warn_of_better_baselines(ending.rows),
        *_warn_of_winner(parts, ending),
        *_warn_of_failures(parts, ending),
        *_warn_of_splits(parts.tasksets),
        *_warn_of_small_samples(ending.rows),
    ]


def _warn_of_better_baselines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    better = [row for row in rows if row["lead"] is not None and row["lead"]["low"] > 0]
    return [
        f"The {row['name']} is better than the winner by {row['lead']['mean']:.3f} "
        f"({row['lead']['low']:.3f} to {row['lead']['high']:.3f}) on the report tasks."
        for row in sorted(better, key=lambda row: -float(row["lead"]["mean"]))
    ]


def _warn_of_winner(parts: RunParts, ending: Ending) -> list[str]:
    winner, warnings = ending.choice.ranked[0], []
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
    reported = ending.rows[0]["by_source"]
    for source, floor in parts.search.floors.items():
        if reported.get(source, floor) < floor:
            warnings.append(
                f"On the report tasks of {source} the winner has {reported[source]:.3f}, below the "
                f"floor of {floor:.3f}."
            )
    if winner in ending.choice.errors:
        warnings.append(
            "Every finalist failed on the select tasks, so the winner is the best on the search "
            f"tasks. The first error: {ending.choice.errors[winner]}"
        )
    return warnings


def _warn_of_failures(parts: RunParts, ending: Ending) -> list[str]:
    measured, choice, warnings = parts.search.measured, ending.choice, []
    for row in ending.rows:
        if row["num_failed"]:
            warnings.append(
                f"The {row['name']} failed on {row['num_failed']} of the report tasks and has no "
                "mean: what is missing is not averaged away."
            )
    losers = [name for name in choice.errors if name != choice.ranked[0]]
    if losers:
        warnings.append(
            f"{len(losers)} of {len(choice.ranked)} finalists failed on the select tasks and "
            f"lost. The first error: {choice.errors[losers[0]]}"
        )
    failed = [measured[name].error for name in ending.searched if measured[name].error]
    if failed:
        warnings.append(f"{len(failed)} candidates failed and lost. The first error: {failed[0]}")
    return warnings


def _warn_of_small_samples(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    reasons = dict.fromkeys(row["small"] for row in rows if row["small"])
    return [
        f"The report is of a small sample ({reason}): its intervals are rough."
        for reason in reasons
    ]


def _warn_of_splits(tasksets: Sequence[Taskset]) -> list[str]:
    warnings: list[str] = []
    for taskset in tasksets:
        warnings += taskset.notes
        if not taskset.split("search"):
            warnings.append(f"{taskset.name} has no search tasks: the search does not see it.")
        elif not taskset.split("select"):
            warnings.append(
                f"{taskset.name} has no select tasks: the choice among finalists sees its search "
                "tasks again."
            )
        if not taskset.split("report"):
            warnings.append(f"{taskset.name} has no report tasks: the report says nothing of it.")
    return warnings
