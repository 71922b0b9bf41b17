"""Evolve's default search beside `best_of_n`, `sequential` and OpenEvolve's, with scripted models.

    python benchmarks/evolve_search.py                            # 100 and 1,000 iterations
    python benchmarks/evolve_search.py --iterations 100 --in-flight 16
    python benchmarks/evolve_search.py --openevolve .venv-openevolve/bin/python
    python benchmarks/evolve_search.py --held-out                 # landscapes used for tuning

Six landscapes, three proposers, ten seeds; no model and no GPU. Every search has the same number of
iterations and of calls in flight. `sequential` always changes the best program so far; with one
call in flight, it equals the baseline of a run. The output has the mean best score, the mean rank
with a 95 % interval (bootstrap over runs), and whether the default loses to another by more than
0.02 on any landscape.
"""

import argparse
import json
import random
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from evolve_landscapes import (
    HELD_OUT,
    LANDSCAPES,
    PROPOSERS,
    TUNED_ON,
    Program,
    Request,
    simulate,
)

from rookery.loops.evolve.config import EvolveConfig
from rookery.loops.evolve.search_state import open_state, search_config
from rookery.search.programs.database import BestOfN, ProgramDatabase, Sequential
from rookery.search.programs.population import Plan
from rookery.search.programs.program import FailedRecord, ScoredProgram, summarize

__all__: list[str] = []

DEFAULT = "default"
PEER = "OpenEvolve 0.4"
SHOWN_TOKENS, ANSWER_TOKENS = 150, 300
"""Tokens counted for a program in a prompt, and for an answer."""
MARGIN = 0.02
NUM_BOOTSTRAPS = 2000
Job = tuple[str, str, int, int, int]
"""Landscape, proposer, attempts, in flight, seed."""


def _open(name: str, num_attempts: int, seed: int) -> ProgramDatabase:
    """Open the database of a search as a run does."""
    database: dict[str, object] = {} if name == DEFAULT else {"strategy": "openevolve"}
    if name in BASELINES:
        database["num_islands"] = 1
    config = EvolveConfig.model_validate({"max_iterations": num_attempts, "database": database})
    if name in BASELINES:
        return BASELINES[name](search_config(config), seed=seed)
    return open_state(config, database=None, seed=seed, arms=()).database


BASELINES: dict[str, type[ProgramDatabase]] = {"best_of_n": BestOfN, "sequential": Sequential}
SEARCHES = (DEFAULT, "best_of_n", "sequential", "openevolve")


class DatabaseSearch:
    """A Search over our ProgramDatabase."""

    def __init__(self, database: ProgramDatabase) -> None:
        self._database = database
        self._plans: dict[int, Plan] = {}

    def ask(self, attempt: int) -> Request:
        plan = self._plans[attempt] = self._database.ask(attempt)
        shown = (
            plan.inspirations if plan.operator == "crossover" else (*plan.top, *plan.inspirations)
        )
        return Request(
            base=int(plan.mends or plan.parent),
            shown=[int(id) for id in shown],
            is_repair=bool(plan.mends),
            is_crossover=plan.operator == "crossover",
        )

    def tell(self, program: Program, *, is_repeated: bool) -> None:
        plan = self._plans.pop(program.id, None)
        if plan is None:
            metrics = {"combined_score": program.score or 0.0}
            code = summarize(program.code)
            self._database.tell(
                ScoredProgram(id="0", attempt=0, island=0, metrics=metrics, code=code)
            )
            return
        cost = float(ANSWER_TOKENS + SHOWN_TOKENS * (1 + len(plan.top) + len(plan.inspirations)))
        if program.score is None:
            self._database.tell_failure(
                FailedRecord(
                    id=str(program.id),
                    cost=cost,
                    operator=plan.operator,
                    mends=plan.mends,
                    kind="repeated" if is_repeated else "error",
                    parent=plan.parent,
                    parent_score=plan.parent_score,
                    generation=plan.generation,
                    can_be_mended=not is_repeated,
                )
            )
            return
        self._database.tell(
            ScoredProgram(
                id=str(program.id),
                attempt=program.id,
                island=plan.island,
                metrics={"combined_score": program.score},
                code=summarize(program.code),
                parent=plan.parent,
                parent_score=plan.parent_score,
                generation=plan.generation,
                cost=cost,
                operator=plan.operator,
                mends=plan.mends,
            )
        )


def run_search(name: str, job: Job, *, held_out: bool = False) -> float:
    """Best score of one run."""
    landscape, proposer, num_attempts, in_flight, seed = job
    return simulate(
        DatabaseSearch(_open(name, num_attempts, seed)),
        (HELD_OUT if held_out else LANDSCAPES)[landscape],
        (TUNED_ON if held_out else PROPOSERS)[proposer],
        num_attempts=num_attempts,
        in_flight=in_flight,
        seed=seed,
    )


def _run_held_out(name: str, job: Job) -> float:
    return run_search(name, job, held_out=True)


def run_openevolve(python: str, jobs: Sequence[Job]) -> list[float]:
    """Best scores of the same runs with OpenEvolve's database."""
    script = Path(__file__).with_name("evolve_search_openevolve.py")
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(jobs, file)
        file.flush()
        done = subprocess.run(
            [python, script, file.name], stdout=subprocess.PIPE, text=True, check=True
        )
    scores: list[float] = json.loads(done.stdout)
    return scores


Scores = Mapping[str, Sequence[float]]
"""By search: best score of each run, in the order of the jobs."""


def rank_runs(scores: Scores) -> dict[str, list[float]]:
    """By search: rank in each run. 1 is the best; equal scores share their mean rank."""
    ranks: dict[str, list[float]] = {name: [] for name in scores}
    for run in zip(*scores.values(), strict=True):
        for name, own in zip(scores, run, strict=True):
            num_better = sum(other > own for other in run)
            num_equal = sum(other == own for other in run)
            ranks[name].append(num_better + (num_equal + 1) / 2)
    return ranks


def interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the mean."""
    rng = random.Random(0)
    means = sorted(
        statistics.fmean(rng.choices(values, k=len(values))) for _ in range(NUM_BOOTSTRAPS)
    )
    return means[int(0.025 * NUM_BOOTSTRAPS)], means[int(0.975 * NUM_BOOTSTRAPS) - 1]


def mean_scores(jobs: Sequence[Job], scores: Scores, key: Callable[[Job], object]) -> Scores:
    """By search: mean of each group of runs, in order of first appearance."""
    groups = dict.fromkeys(key(job) for job in jobs)
    return {
        name: [
            statistics.fmean(s for job, s in zip(jobs, own, strict=True) if key(job) == group)
            for group in groups
        ]
        for name, own in scores.items()
    }


def show(jobs: Sequence[Job], scores: Scores) -> None:
    """Print the tables and whether the default passes."""
    names = list(scores)
    landscapes = list(dict.fromkeys((job[0], job[2]) for job in jobs))
    by_landscape = mean_scores(jobs, scores, lambda job: (job[0], job[2]))
    print(f"{'mean best score':28}" + "".join(f"{name:>16}" for name in names))
    for place, (landscape, num) in enumerate(landscapes):
        cells = "".join(f"{by_landscape[name][place]:16.3f}" for name in names)
        print(f"{landscape:20}{num:>7} {cells}")
    proposers = list(dict.fromkeys((job[1], job[2]) for job in jobs))
    by_proposer = mean_scores(jobs, scores, lambda job: (job[1], job[2]))
    for place, (proposer, num) in enumerate(proposers):
        cells = "".join(f"{by_proposer[name][place]:16.3f}" for name in names)
        print(f"{proposer:20}{num:>7} {cells}")
    ranks = rank_runs(scores)
    for name in names:
        low, high = interval(ranks[name])
        print(f"mean rank {name:20} {statistics.fmean(ranks[name]):.3f}  ({low:.3f} to {high:.3f})")
    for name in names[1:]:
        behind = [a - b for a, b in zip(ranks[name], ranks[DEFAULT], strict=True)]
        low, high = interval(behind)
        gaps = zip(by_landscape[name], by_landscape[DEFAULT], landscapes, strict=True)
        gap, where = max((theirs - ours, place) for theirs, ours, place in gaps)
        print(
            f"{DEFAULT} before {name}: {statistics.fmean(behind):+.3f} ranks ({low:+.3f} to "
            f"{high:+.3f}); most behind on {where[0]}, {where[1]}: {gap:+.3f} "
            f"({'met' if low > 0 and gap <= MARGIN else 'NOT MET'})"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--iterations", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--in-flight", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--held-out", action="store_true")
    parser.add_argument("--openevolve", help="a Python with openevolve 0.4.0")
    given = parser.parse_args()
    jobs: list[Job] = [
        (landscape, proposer, num_attempts, given.in_flight, seed)
        for num_attempts in given.iterations
        for landscape in (HELD_OUT if given.held_out else LANDSCAPES)
        for proposer in PROPOSERS
        for seed in range(given.seeds)
    ]
    run = _run_held_out if given.held_out else run_search
    with ProcessPoolExecutor(given.processes) as pool:
        scores = {
            name: list(pool.map(run, [name] * len(jobs), jobs, chunksize=10)) for name in SEARCHES
        }
    if given.openevolve:
        scores[PEER] = run_openevolve(given.openevolve, jobs)
    print(f"{len(jobs)} runs of each search, {given.in_flight} in flight")
    show(jobs, scores)


if __name__ == "__main__":
    main()
