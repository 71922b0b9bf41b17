"""The genome loop: its overhead, whole-population batches, and quality beside GENOME's schedule.

    python benchmarks/genome.py [--seeds 3] [--limit 100]
    python benchmarks/genome.py --vllm .venv-vllm/bin/python      # the overhead on a vLLM server

Same engine (SmolLM2, embedded), same founders, same tasks. Overhead is the share of a generation's
wall time beyond the time of the same requests in one call. GENOME's schedule is one
adapter at a time, factor-wise linear merges, tournament of three, mutation of a tenth of the
numbers, with the same number of candidate evaluations.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from generation import TimedGeneration

from rookery.config import load_config
from rookery.embedded import EmbeddedEngine, EngineConfig, open_engine, resolve_model
from rookery.fleet import Fleet, FleetConfig, LaunchConfig, open_fleet
from rookery.loops.genome import GenomeConfig, GenomeInputs, evolve
from rookery.loops.genome.adapter_builder import AdapterBuilder
from rookery.loops.genome.founders import FileInit, read_founders
from rookery.rollout import RolloutLog, TasksetEvaluator
from rookery.runs import Run
from rookery.search.population import random_plans
from rookery.starters import DEMOS
from rookery.tasks.taskset import load_taskset
from rookery.tasks.template import Template, load_template
from rookery.types import Group, ModelRef, Task

DEMO = DEMOS / "genome.yaml"
GENERATIONS = 4


class OneByOne(TasksetEvaluator):
    """Evaluates one adapter at a time, as GENOME's schedule does."""

    async def rollout(self, models: Sequence[ModelRef], tasks: Sequence[Task]) -> list[Group]:
        groups: list[Group] = []
        for model in models:
            groups += await super().rollout([model], tasks)
        return groups


def make_config(limit: int, *, is_genome: bool, seed: int) -> GenomeConfig:
    """Config of the demo on `limit` tasks of each kind, or with GENOME's schedule."""
    demo = load_config(GenomeConfig, DEMO).from_folder(DEMO.parent)
    document = demo.model_dump(mode="json")
    stage = document["stages"][0]
    stage["generations"] = GENERATIONS
    children = stage["population"]["children"]
    children["count"] = 8
    for taskset in document["tasksets"]:
        taskset["limit"] = limit
    document["finals"] |= {"random_search": False}
    if is_genome:
        children |= {
            "operators": [
                {"type": "crossover", "name": "linear", "share": 3, "weights": "fitness"},
                {"type": "mutation", "name": "gaussian", "share": 1},
            ],
            "selection": {"type": "tournament", "size": 3},
            "sigma": {"start": 0.05, "factor": 1.0},
        }
        document |= {
            "rank": None,
            "merges": {"linear": {"type": "linear", "space": "factor"}},
            "mutations": {"gaussian": {"type": "gaussian", "gene_rate": 0.1}},
            "race": {"enabled": False},
        }
        document["finals"] |= {"num_finalists": 1}
    return GenomeConfig.model_validate(document | {"seed": seed})


async def side_by_side(engine: EmbeddedEngine, template: Template, args: Any) -> None:
    """Print quality and seconds of both schedules over seeds."""
    columns = f"{'seed':>5}{'report':>8}{'gain over best founder':>27}{'seconds':>9}{'answers':>9}"
    print(f"{'':<20}{columns}")
    for name, is_genome in (("GENOME's schedule", True), ("rookery", False)):
        means, seconds = [], []
        for seed in range(args.seeds):
            config = make_config(args.limit, is_genome=is_genome, seed=seed)
            tasksets = [load_taskset(taskset) for taskset in config.tasksets]
            kind = OneByOne if is_genome else TasksetEvaluator
            await engine.reset_prefix_cache()
            with (
                tempfile.TemporaryDirectory() as scratch,
                Run.create(Path(scratch), kind="genome", config={}, name="run") as run,
            ):
                evaluator = kind(engine, template=template, tasksets=tasksets, log=RolloutLog(run))
                assert isinstance(config.init, FileInit)
                start = time.perf_counter()
                inputs = GenomeInputs(
                    config=config,
                    founders=read_founders(config.init),
                    tasksets=tasksets,
                    evaluator=evaluator,
                )
                report = await evolve(inputs, engine=engine, run=run)
                seconds.append(time.perf_counter() - start)
            evolved = report.rows[0]
            gain = evolved.gain
            assert gain is not None and evolved.mean is not None
            means.append(evolved.mean)
            between = f"{gain.mean:+.3f} ({gain.low:+.3f} to {gain.high:+.3f})"
            print(
                f"{name:<20}{seed:>5}{evolved.mean:>8.3f}{between:>27}"
                f"{seconds[-1]:>9.1f}{report.num_rollouts:>9}",
                flush=True,
            )
        print(
            f"{name:<20} mean{statistics.mean(means):>8.3f}{'':>27}{statistics.mean(seconds):>9.1f}"
        )


async def overhead(engine: EmbeddedEngine | Fleet, template: Template, args: Any) -> None:
    """Print the overhead of one generation over the same requests in one call."""
    config = make_config(args.limit, is_genome=False, seed=0)
    tasksets = [load_taskset(taskset) for taskset in config.tasksets]
    tasks = [task for taskset in tasksets for task in taskset.split("search")]
    assert isinstance(config.init, FileInit)
    builder = AdapterBuilder(read_founders(config.init), merges={}, mutations={}, rank=24)
    plans = random_plans(builder.founders, count=args.candidates, seed=1)
    builder.plan(plans)
    names = [plan.id for plan in plans]
    timed = TimedGeneration(engine, template, tasksets, tasks, builder, names)
    together, direct, apart = [], [], []
    for _ in range(3):
        together.append(await timed.through_the_loop())
        direct.append(await timed.requests_alone())
        apart.append(await timed.one_by_one())
    engine_s, apart_s = min(direct), min(apart)
    best = min(together, key=lambda timing: timing.seconds)
    print(f"generation of {args.candidates} candidates x {len(tasks)} tasks: {best.seconds:.2f} s")
    print(f"answers asked for: {best.num_answers} of {timed.num_answers}, the race saved the rest")
    print(f"all {timed.num_answers} requests in one call to the engine: {engine_s:.2f} s")
    print(f"overhead: {best.overhead(engine_s, timed.num_answers):.3f}")
    print(f"one candidate after another: {apart_s:.2f} s, {apart_s / engine_s:.2f}x together")


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--limit", type=int, default=100)
    parser.add_argument("--candidates", type=int, default=8, help="of the generation timed")
    parser.add_argument("--vllm", default="", help="the interpreter that has vLLM")
    args = parser.parse_args()
    config = make_config(args.limit, is_genome=False, seed=0)
    assert isinstance(config.engine, EngineConfig)
    folder = resolve_model(config.engine.model).path
    template = load_template(folder)
    if args.vllm:
        launch = LaunchConfig(
            model=str(folder), python=args.vllm, replicas=1, max_loras=8, max_lora_rank=32
        )
        async with open_fleet(FleetConfig(launch=launch, name="smollm2")) as fleet:
            await overhead(fleet, template, args)
        return
    async with open_engine(config.engine) as engine:
        await overhead(engine, template, args)
        await side_by_side(engine, template, args)


if __name__ == "__main__":
    asyncio.run(main())
