"""How cost grows with size: seconds at four sizes of each part, and the exponent they fit.

    python benchmarks/scale.py            # a minute, no GPU
    python benchmarks/scale.py racing     # rows whose name holds this word

Linear work has exponent 1. A row above `MOST` is marked, and the exit code is 1. Seconds are
CPU time of one thread, the best of `REPEATS`. To add a row, write a function that takes a size,
prepares, and returns the work to time, and name it in `ROWS`. `FLAT` has rows of work that should
not grow: the last size may take `MOST_FLAT` times as long as the first.
"""

import argparse
import asyncio
import itertools
import math
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from rookery.loops.genome.adapter_builder import AdapterBuilder, rebuild
from rookery.loops.icm.verdict import agree
from rookery.rollout.evaluator import RolloutLog
from rookery.runs import Run
from rookery.search import racing
from rookery.search.annealing import Waves
from rookery.search.candidate import ChildPlan, EsStep
from rookery.search.programs.bandit import Arm
from rookery.search.programs.database import ProgramDatabase, ProgramDatabaseConfig
from rookery.search.programs.population import Plan
from rookery.search.programs.program import ScoredProgram, summarize
from rookery.seeding import stream
from rookery.types import Adapter, Completion, LoraFactors, ModelRef, Rollout, Task
from rookery.weights import make_adapter
from rookery.weights.merge import LinearConfig, merge
from rookery.weights.mutate import GaussianConfig

MOST = 1.1
"""Largest exponent that passes; logarithms and caches explain the last tenth."""
MOST_FLAT = 1.2
"""Largest ratio of a step's time at the last size to that at the first."""
REPEATS = 3

Work = Callable[[], object]


class Row(NamedTuple):
    """One row: sizes, and a function that prepares the work of a size."""

    grows: str
    sizes: Sequence[int]
    prepare: Callable[[int], Work]


def race(num_candidates: int, num_tasks: int) -> Work:
    """Race equal candidates, nearly all of which see every task."""
    answers = (stream(0, "scale").random((num_candidates, num_tasks)) < 0.5).astype(float)
    names = [f"c{i}" for i in range(num_candidates)]
    tasks = [f"t{i}" for i in range(num_tasks)]
    config = racing.RaceConfig(confidence=0.999, keep=min(16, num_candidates // 2))

    def work() -> None:
        running = racing.start(names, tasks, config=config, rng=stream(0))
        waves = Waves(running, size=1)
        while asks := waves.next():
            told = {
                name: answers[int(name[1:]), [int(task[1:]) for task in asked]].tolist()
                for name, asked in asks.items()
            }
            racing.tell(running, told)

    return work


def log_rollouts(num_rollouts: int) -> Work:
    """Write rollouts in blocks of 64, then read them again."""
    model = ModelRef(name="base", version="1")
    completion = Completion(
        model=model, tokens=(1,) * 50, logprobs=(-0.1,) * 50, text="x" * 200, finish_reason="stop"
    )
    rollouts = [
        Rollout(
            task=Task(id=f"t{i}", prompt="", reference="", source="s"),
            completion=completion,
            reward=1.0,
            error="",
        )
        for i in range(num_rollouts)
    ]

    blocks = [rollouts[first : first + 64] for first in range(0, num_rollouts, 64)]

    async def work() -> None:
        with (
            tempfile.TemporaryDirectory() as folder,
            Run.create(Path(folder), kind="scale", config={}) as run,
        ):
            log = RolloutLog(run)
            for block in blocks:
                await log.add([(rollout.task.id, model, rollout, 50) for rollout in block])
            again = RolloutLog(run)
            for block in blocks:
                asked = {rollout.task.id: (model, rollout.task) for rollout in block}
                assert len(again.find(asked)) == len(block)

    return lambda: asyncio.run(work())


def make_adapter_of(seed: int, *, size: int = 64, rank: int = 8) -> Adapter:
    rng = torch.Generator().manual_seed(seed)
    a, b = torch.randn(rank, size, generator=rng), torch.randn(size, rank, generator=rng)
    factors = {"model.layers.0.mlp.up_proj": LoraFactors(a=a, b=b, scale=1.0)}
    return make_adapter(f"f{seed}", base="tiny", factors=factors)


def climb(num_steps: int) -> Work:
    """Take steps of an evolution strategy with 16 trials each."""
    start = make_adapter_of(0)

    def work() -> None:
        builder = AdapterBuilder({"start": start}, merges={}, mutations={}, rank=8)
        parent = "start"
        for step in range(num_steps):
            seeds = tuple(range(16 * step, 16 * step + 16))
            is_chained = step > 0
            centre = EsStep(
                id=f"e{step}", generation=step, parent=parent, seeds=seeds if step else (),
                amounts=(0.01,) * 16 if step else (), is_chained=is_chained,
            )  # fmt: skip
            trials = [
                EsStep(
                    id=f"e{step}-{seed}", generation=step, parent=centre.id, seeds=(seed,),
                    amounts=(0.1,), is_chained=True,
                )
                for seed in seeds
            ]  # fmt: skip
            builder.plan([*trials, centre])
            for trial in trials:
                builder.adapter(trial.id)
            builder.keep(["start", centre.id])
            parent = centre.id

    return work


def merge_founders(num_founders: int, *, size: int) -> Work:
    founders = [make_adapter_of(seed, size=size) for seed in range(num_founders)]
    weights = stream(0).random(num_founders).tolist()
    return lambda: merge(founders, weights=weights, method=LinearConfig(), rank=8)


def rebuild_lineage(num_generations: int) -> Work:
    """Rebuild a lineage of one mutation per generation."""
    founder = make_adapter_of(0)
    builder = AdapterBuilder(
        {founder.name: founder}, merges={}, mutations={"gaussian": GaussianConfig()}, rank=8
    )
    parent = founder.name
    for generation in range(num_generations):
        plan = ChildPlan(
            id=f"g{generation}", generation=generation, merge=None, parents=(parent,),
            weights=(1.0,), mutation="gaussian", sigma=0.1, seed_key=generation,
        )  # fmt: skip
        builder.plan([plan])
        builder.adapter(plan.id)
        builder.keep([plan.id])
        parent = plan.id
    lineage = builder.lineage()
    return lambda: rebuild(lineage, [founder], parent)


def agree_on(num_items: int) -> Work:
    """Label items in constrained pairs."""
    labels = dict(enumerate((stream(0).random(num_items) < 0.5).astype(int).tolist()))
    pairs = [item // 2 for item in range(num_items)]
    return lambda: agree(labels, labels, clusters=pairs)


def evolve(num_programs: int) -> Work:
    """400 asks and tells on a database of this size, far below its population limit."""
    rng = stream(0, "programs")
    config = ProgramDatabaseConfig(population_size=1_000_000)
    database = ProgramDatabase(config, seed=0, arms=[Arm(name="small"), Arm(name="large")])
    letters = "".join(map(chr, range(32, 127)))
    attempts = itertools.count(1)

    def record(plan: Plan | None, attempt: int) -> ScoredProgram:
        text = "x\n" * int(rng.integers(100, 4000)) + letters[: int(rng.integers(95))]
        return ScoredProgram(
            id=f"p{attempt}", attempt=attempt, island=plan.island if plan else 0,
            metrics={"combined_score": float(rng.random())}, code=summarize(text),
            parent=plan.parent if plan else None, arm=plan.arm if plan else "", cost=1.0,
        )  # fmt: skip

    database.tell(record(None, 0))
    for attempt in itertools.islice(attempts, num_programs):
        database.tell(record(database.ask(attempt), attempt))
    texts = [record(None, 0) for _ in range(400)]

    def work() -> None:
        # Records are prepared except for their position, because making them is the caller's cost.
        for text, attempt in zip(texts, attempts, strict=False):
            plan = database.ask(attempt)
            database.tell(replace(text, id=f"p{attempt}", island=plan.island, parent=plan.parent))

    return work


ROWS: Mapping[str, Row] = {
    "racing, 32 candidates": Row("tasks", (250, 500, 1000, 2000), lambda n: race(32, n)),
    "racing, 100 tasks": Row("candidates", (125, 250, 500, 1000), lambda n: race(n, 100)),
    "rollout log": Row("rollouts", (1000, 2000, 4000, 8000), log_rollouts),
    "es, 16 trials a step": Row("steps", (10, 20, 40, 80), climb),
    "merge, 1024 x 1024": Row("founders", (8, 16, 32, 64), lambda n: merge_founders(n, size=1024)),
    "merge, 288 x 288": Row("founders", (50, 100, 200, 400), lambda n: merge_founders(n, size=288)),
    "rebuild": Row("generations", (250, 500, 1000, 2000), rebuild_lineage),
    "icm agreement": Row("items", (500, 1000, 2000, 4000), agree_on),
}
FLAT: Mapping[str, Row] = {
    "programs, ask and tell": Row("programs", (100, 1000, 10_000), evolve),
}


def seconds_of(work: Work) -> float:
    best = math.inf
    for _ in range(REPEATS):
        began = time.process_time()
        work()
        best = min(best, time.process_time() - began)
    return best


def exponent(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """Slope of log seconds over log size."""
    return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])


def show_flat(name: str, row: Row) -> bool:
    """Print the row. True if its ratio is within MOST_FLAT."""
    seconds = [seconds_of(row.prepare(size)) for size in row.sizes]
    ratio = seconds[-1] / seconds[0]
    cells = "  ".join(f"{n}: {s:.3f} s" for n, s in zip(row.sizes, seconds, strict=True))
    mark = "" if ratio <= MOST_FLAT else f"  above {MOST_FLAT}"
    print(f"{name:<22} {row.grows:<11} {ratio:4.2f}x   {cells}{mark}", flush=True)
    return ratio <= MOST_FLAT


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("word", nargs="?", default="", help="only rows whose name holds this")
    word = parser.parse_args().word
    torch.set_num_threads(1)
    is_within = True
    for name, row in ROWS.items():
        if word not in name:
            continue
        seconds = [seconds_of(row.prepare(size)) for size in row.sizes]
        slope = exponent(row.sizes, seconds)
        cells = "  ".join(f"{n}: {s:.3f} s" for n, s in zip(row.sizes, seconds, strict=True))
        mark = "" if slope <= MOST else f"  above {MOST}"
        print(f"{name:<22} {row.grows:<11} {slope:5.2f}   {cells}{mark}", flush=True)
        is_within = is_within and slope <= MOST
    for name, row in FLAT.items():
        if word in name:
            is_within = show_flat(name, row) and is_within
    return 0 if is_within else 1


if __name__ == "__main__":
    sys.exit(main())
