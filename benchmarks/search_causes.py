"""Where a finished genome run lost: noise, overfitting, the choice, operators, dropped candidates.

    python benchmarks/search_causes.py runs/demo-0 [RUN ...]

Measures every candidate that saw all search tasks on the report tasks, which the run itself never
does, on the engine of the run's config. Candidates that fail on a report task are left out. Prints
one line of JSON per run:

    num_failed   candidates left out
    oracle       the best of all candidates on the report tasks: the ceiling of any choice
    correlation  of merit on the search tasks with the mean on the report tasks, over candidates
    overfit      the winner's mean reward on the search tasks minus that on the report tasks
    choice       the best finalist on the report tasks minus the winner
    dropped      the share of the search's answers that dropped candidates gave
    operators    per operator: children, and their mean gain over their best parent, by merit on the
                 search tasks and by reward on the report tasks
"""

import argparse
import asyncio
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rookery.engines import model_folder, open_engine
from rookery.errors import TaskError
from rookery.loops.genome import GenomeConfig, rebuild
from rookery.ports import Engine
from rookery.rollout import TasksetEvaluator, mean_by_source
from rookery.runs import Run
from rookery.search.candidate import fitness_of
from rookery.tasks.taskset import Taskset, join_splits, load_tasksets
from rookery.tasks.template import load_template
from rookery.types import Adapter, Task
from rookery.weights import read_adapter

COHORT = 16
"""Adapters loaded at a time."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+")
    for path in parser.parse_args().runs:
        print(json.dumps(asyncio.run(find_causes(path))), flush=True)


async def find_causes(path: Path) -> dict[str, Any]:
    """The fields of the module docstring, and the run's name."""
    with Run.view(path) as run:
        config = GenomeConfig.model_validate(run.config)
        candidates = {e.key: e.payload for e in run.events("candidate")}
        lineage, report = run.read_json("lineage.json"), run.read_json("report.json")
        winner, name = report["winner_id"], run.name
    tasksets = list(join_splits(load_tasksets(config.tasksets)))
    founders = [read_adapter(folder) for folder in sorted((path / "founders").iterdir())]
    num_tasks = max(payload["num_tasks"] for payload in candidates.values())
    complete = [key for key, own in candidates.items() if own["num_tasks"] == num_tasks]
    by_name = {founder.name: founder for founder in founders}
    adapters = [by_name.get(key) or rebuild(lineage, founders, key) for key in complete]
    async with open_engine(config.engine) as engine:
        means = await measure(engine, config, tasksets, adapters)
    found = dict(zip(complete, means, strict=True))
    return {"run": name, **summarise(candidates, found, winner=winner, config=config)}


async def measure(
    engine: Engine,
    config: GenomeConfig,
    tasksets: Sequence[Taskset],
    adapters: Sequence[Adapter],
) -> list[float | None]:
    """Weighted mean reward of each adapter on the report tasks; None if an answer failed."""
    template = load_template(model_folder(config.engine, tokenizer=config.tokenizer))
    evaluator = TasksetEvaluator(engine, template=template, tasksets=tasksets)
    tasks: list[Task] = [task for taskset in tasksets for task in taskset.split("report")]
    weights = {taskset.name: taskset.weight for taskset in tasksets}
    means: list[float | None] = []
    for first in range(0, len(adapters), COHORT):
        refs = [await engine.load(adapter) for adapter in adapters[first : first + COHORT]]
        found = await evaluator.evaluate(refs, tasks)
        means += [weighted_mean(own.rewards, tasks, weights=weights) for own in found]
        for ref in refs:
            await engine.unload(ref)
    return means


def weighted_mean(
    rewards: Mapping[str, float], tasks: Sequence[Task], *, weights: Mapping[str, float]
) -> float | None:
    """Weighted mean of the tasksets' means; None if a task is missing."""
    if any(task.id not in rewards for task in tasks):
        return None
    means = mean_by_source(rewards, tasks)
    return fitness_of(means, weights={source: weights[source] for source in means}).score


def summarise(
    candidates: Mapping[str, Mapping[str, Any]],
    means: Mapping[str, float | None],
    *,
    winner: str,
    config: GenomeConfig,
) -> dict[str, Any]:
    """Causes, from the `means` on the report tasks of all candidates that saw every search task."""
    on_report = {key: mean for key, mean in means.items() if mean is not None}
    if winner not in on_report:
        raise TaskError(f"The winner {winner} failed on a report task: nothing compares with it.")
    merits = {key: candidates[key]["merit"] for key in on_report}
    feasible = [key for key in on_report if not candidates[key]["violation"]]
    ranked = sorted(feasible or on_report, key=lambda key: -merits[key])
    first = {candidates[key]["version"]: key for key in reversed(ranked)}  # best of equal weights
    finalists = [key for key in ranked if key in first.values()][: config.finals.num_finalists]
    num_answers = sum(own["num_tasks"] for own in candidates.values())
    num_dropped = sum(own["num_tasks"] for key, own in candidates.items() if key not in means)
    pairs = np.array([(merits[key], on_report[key]) for key in on_report])
    return {
        "num_candidates": len(candidates),
        "num_complete": len(means),
        "num_failed": len(means) - len(on_report),
        "winner": on_report[winner],
        "oracle": max(on_report.values()),
        "correlation": float(np.corrcoef(pairs.T)[0, 1]),
        "overfit": candidates[winner]["score"] - on_report[winner],
        "choice": max(on_report[key] for key in finalists) - on_report[winner],
        "dropped": num_dropped / num_answers,
        "operators": gains_of(candidates, on_report),
    }


def gains_of(
    candidates: Mapping[str, Mapping[str, Any]], on_report: Mapping[str, float]
) -> dict[str, dict[str, float]]:
    """Children and mean gains by operator. Report gains need the means of child and parents."""
    alive = {key for key, own in candidates.items() if own["merit"] is not None}
    found: dict[str, list[tuple[float, float | None]]] = {}
    for key, own in candidates.items():
        parents = [parent for parent in own["parents"] if parent in alive]
        if not parents or key not in alive:
            continue
        gain = own["merit"] - max(candidates[parent]["merit"] for parent in parents)
        is_known = on_report.keys() >= {key, *parents}
        reported = on_report[key] - max(on_report[p] for p in parents) if is_known else None
        found.setdefault(own["operator"], []).append((gain, reported))
    return {
        operator: {
            "children": len(gains),
            "search": statistics.fmean(gain for gain, _ in gains),
            "report": statistics.fmean([r for _, r in gains if r is not None] or [float("nan")]),
        }
        for operator, gains in found.items()
    }


if __name__ == "__main__":
    main()
