"""The overhead of a generation on a GPU: 8 children of a 7B model, 256 tasks, 200 tokens each.

    python benchmarks/genome_gpu.py --tokenizer FOLDER [--python PYTHON] [--tasks 256]
    python benchmarks/genome_gpu.py --tokenizer FOLDER --waiting      # no GPU

Needs vLLM (`--python` names its interpreter) and a folder with a tokenizer. The model has the shape
of Qwen2.5-7B and weights that the server makes up; the founders are random, rank 16 of q, k, v, o.
The children are those of the default search: sums, TIES, mutations. Overhead is the share of a
generation's wall time (making, loading, asking, scoring, logging) beyond the time of the same
requests in one call to loaded adapters. With 256 tasks the server, which computes 256 sequences
together, is full to the end of that call. `--merge-device cpu cuda` makes the children on the CPU
and, in another generation, on the GPU. One H200: six minutes. `--waiting` simulates the GPU by
sleeping, so that only the cost of the loop itself remains.
"""

import argparse
import asyncio
import time

import torch
from fleet_gpu import make_random, open_7b, server_parser
from generation import TimedGeneration, Timing, WaitingEngine

from rookery.fleet import Fleet
from rookery.loops.genome.adapter_builder import AdapterBuilder
from rookery.loops.genome.config import MERGES, MUTATIONS
from rookery.loops.genome.stages import GaStage
from rookery.search import population as ga
from rookery.search.candidate import Fitness
from rookery.tasks.scorers import ExactConfig
from rookery.tasks.taskset import Taskset
from rookery.tasks.template import load_template
from rookery.types import SamplingParams, Task

NUM_FOUNDERS = 4
RANK = 16


def make_taskset(num: int, *, num_new: int) -> Taskset:
    """Prompts of about 120 tokens without a common prefix."""
    tasks = tuple(
        Task(
            id=f"sum/{i}",
            source="sum",
            prompt=f"{i} apples. " + " ".join(f"Then come {i + k} more apples." for k in range(14)),
            reference=str(i),
        )
        for i in range(num)
    )
    params = SamplingParams(max_tokens=num_new, temperature=0, ignore_eos=True)
    return Taskset(name="sum", tasks=tasks, scorer=ExactConfig(), sampling=params)


def make_builder(num_children: int, *, device: str = "cpu") -> tuple[AdapterBuilder, list[str]]:
    """Random founders, and the children that the default search makes from them."""
    founders = {
        f"f{i}": make_random(f"f{i}", i, device="cpu", rank=RANK) for i in range(NUM_FOUNDERS)
    }
    builder = AdapterBuilder(founders, merges=MERGES, mutations=MUTATIONS, rank=RANK, device=device)
    default = GaStage().population
    config = default.model_copy(
        update={"children": default.children.model_copy(update={"count": num_children})}
    )
    fitness = {name: Fitness(score=0.1 * i) for i, name in enumerate(founders)}
    plans = ga.ask(ga.make_population(fitness, config=config, seed=0), config=config, seed=0)
    builder.plan(plans)
    print("children: " + ", ".join(plan.operator for plan in plans))
    return builder, [plan.id for plan in plans]


def make_generation(
    engine: Fleet | WaitingEngine, options: argparse.Namespace, *, device: str
) -> TimedGeneration:
    """A generation whose children were already made once on `device`."""
    template = load_template(options.tokenizer)
    taskset = make_taskset(options.tasks, num_new=options.new_tokens)
    builder, names = make_builder(options.candidates, device=device)
    start = time.perf_counter()
    for name in names:
        builder.adapter(name)
    print(f"making the children on {device}, alone: {time.perf_counter() - start:.2f} s")
    return TimedGeneration(engine, template, [taskset], taskset.tasks, builder, names)


async def measure(engine: Fleet | WaitingEngine, options: argparse.Namespace) -> None:
    by_device = {
        device: make_generation(engine, options, device=device) for device in options.merge_device
    }
    first = by_device[options.merge_device[0]]
    alone: list[float] = []
    found: dict[str, list[Timing]] = {}
    # In turns, so that a slow host affects all of them.
    for _ in range(options.rounds):
        alone.append(await first.requests_alone())
        for device, generation in by_device.items():
            found.setdefault(f"on {device}", []).append(await generation.through_the_loop())
        found.setdefault("before", []).append(await first.through_the_loop(is_made=True))
        timings = ", ".join(f"{way} {times[-1].seconds:.2f} s" for way, times in found.items())
        print(f"alone {alone[-1]:.2f} s, {timings}", flush=True)
    num_tokens = len(first.names) * options.tasks * options.new_tokens
    length = len(first.template.encode(first.tasks[0]))
    print(
        f"{len(first.names)} candidates x {options.tasks} tasks x "
        f"({length} in, {options.new_tokens} out); least of {options.rounds} rounds"
    )
    least = min(alone)
    print(f"{'requests alone':32}{least:8.2f} s {num_tokens / least:8,.0f} tok/s")
    for way, timings_ in found.items():
        best = min(timings_, key=lambda timing: timing.seconds)
        print(
            f"{'generation, made ' + way:32}{best.seconds:8.2f} s, {best.num_answers} of "
            f"{first.num_answers} answers, overhead {best.overhead(least, first.num_answers):.3f}"
        )


async def main() -> None:
    parser = server_parser(__doc__)
    parser.add_argument("--candidates", type=int, default=8)
    parser.add_argument("--tasks", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--merge-device", nargs="+", default=["cpu"], choices=("cpu", "cuda"))
    parser.add_argument("--waiting", action="store_true", help="play the GPU by sleeping")
    options = parser.parse_args()
    if options.waiting:
        await measure(WaitingEngine(), options)
        return
    torch.set_num_threads(max(1, torch.get_num_threads() // 4))  # as `rookery genome run` does
    async with open_7b(options, max_loras=16, max_cpu_loras=128, max_lora_rank=RANK) as fleet:
        await measure(fleet, options)


if __name__ == "__main__":
    asyncio.run(main())
