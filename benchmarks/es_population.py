"""An evolution strategy over a whole population on one server: speed, overhead, stock loads.

    python benchmarks/es_population.py --model FOLDER [--python PYTHON] [--members 512]

Needs vLLM (`--python` names its interpreter) and a model folder (Qwen2.5-Coder-0.5B). One server
does everything, in one run:

- base: the requests of one step, `--members` x `--tasks` answers of `--new-tokens`, to the base
  model; drawn tokens per second.
- members: the same requests, each to its member, made from seeds in `--slots` adapter slots.
- step: `--steps` steps of `stages: [{type: es, population: ..., rank: 1}]` as `genome` does them,
  with scoring, the run's files and the update. The first two, one without and one with an update,
  warm up. Overhead is the share of a step beyond the time of the same requests in one call to
  loaded members. A step's time before its first request and after its last answer is part of it.
- stock: a member as a PEFT folder, `load_lora_adapter`, its answers, `unload_lora_adapter`; one
  member after another, and `--slots` of them at a time. `--stock-members` are timed.

One H200: about five minutes.
"""

import argparse
import asyncio
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from rookery.fleet import Fleet, FleetConfig, LaunchConfig, open_fleet
from rookery.fleet.http.wire import Fields, encode_body
from rookery.fleet.perturbed import StepPopulation
from rookery.fleet.staging import memory_folder
from rookery.loops.genome import GenomeConfig, GenomeInputs, evolve
from rookery.ports import Observer, Sampler
from rookery.reports import GenerationRecord
from rookery.rollout import RolloutLog, TasksetEvaluator
from rookery.runs import Run
from rookery.tasks.scorers import PythonConfig
from rookery.tasks.splits import SplitsConfig
from rookery.tasks.taskset import Taskset
from rookery.tasks.template import load_template
from rookery.types import (
    Adapter,
    Completion,
    ModelRef,
    SampleRequest,
    SamplingParams,
    Score,
    ScoreRequest,
    Task,
)
from rookery.weights import write_adapter
from rookery.weights.stack import LayerShape, Layout, random_adapter

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SPLITS = SplitsConfig(search=0.8, select=0.1, report=0.1)
SIGMA = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of the strategy."""

    seconds: float
    num_answers: int
    before_s: float
    """Seconds before its first request."""
    after_s: float
    """Seconds after its last answer."""

    def __str__(self) -> str:
        return (
            f"{self.seconds:.2f} s for {self.num_answers} answers, of it {self.before_s:.2f} s "
            f"before and {self.after_s:.2f} s after them"
        )


class Clock(Observer[GenerationRecord]):
    """Records the end of each generation, and of the requests between a sampler and its caller."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._calls: list[tuple[float, float]] = []
        self._ends: list[tuple[float, GenerationRecord]] = []

    def on_step(self, step: GenerationRecord) -> None:
        self._ends.append((time.perf_counter(), step))

    async def sample(self, requests: Sequence[SampleRequest]) -> list[tuple[Completion, ...]]:
        began = time.perf_counter()
        answers = await self._sampler.sample(requests)
        self._calls.append((began, time.perf_counter()))
        return answers

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        return await self._sampler.score(requests)

    @property
    def steps(self) -> list[Step]:
        """Every step of the strategy but the first two, which warm up."""
        found = []
        for (begin, _), (end, record) in zip(self._ends, self._ends[1:], strict=False):
            calls = [call for call in self._calls if begin <= call[0] and call[1] <= end]
            if record.num_candidates > 1 and calls:
                found.append(
                    Step(
                        seconds=end - begin,
                        num_answers=record.num_rollouts,
                        before_s=min(began for began, _ in calls) - begin,
                        after_s=end - max(ended for _, ended in calls),
                    )
                )
        return found[2:] or found[-1:]


async def reward(task: Task, completion: Completion) -> float:
    """Reward that differs between the answers of any model."""
    del task
    return sum(token % 2 == 0 for token in completion.tokens) / len(completion.tokens)


def make_taskset(options: argparse.Namespace) -> Taskset:
    """Prompts of about 60 tokens without a common prefix."""
    tasks = tuple(
        Task(
            id=f"sum/{i}",
            source="sum",
            prompt=f"{i} apples. " + " ".join(f"Then {i + k} more." for k in range(10)),
            reference=str(i),
        )
        for i in range(max(40, 2 * options.tasks))
    )
    params = SamplingParams(max_tokens=options.new_tokens, temperature=0, ignore_eos=True)
    return Taskset(
        name="sum",
        tasks=tasks,
        scorer=PythonConfig(function=f"{Path(__file__).resolve()}:reward"),
        sampling=params,
        splits=SPLITS,
    )


def make_founder(fleet: Fleet, options: argparse.Namespace) -> Adapter:
    layers = fleet.linear_layers
    chosen = sorted(name for name in layers if name.rpartition(".")[2] in TARGETS)
    shapes = tuple(LayerShape(name, *layers[name]) for name in chosen)
    dtype = torch.float32 if options.device == "cpu" else torch.bfloat16
    layout = Layout(base="", layers=shapes, rank=options.lora_rank, scale=1.0, dtype=dtype)
    return random_adapter(layout, name="founder", seed=(0,))


def make_members(founder: Adapter, *, count: int, seed: int) -> list[Adapter]:
    exact = {
        layer: replace(lora, a=lora.a.float(), b=lora.b.float())
        for layer, lora in founder.factors.items()
    }
    population = StepPopulation.around(replace(founder, factors=exact), like=founder, rank=1)
    return [
        population.member(f"m{i}", seed=seed + i // 2, amount=SIGMA * 0.01 * (-1) ** i)
        for i in range(count)
    ]


class Measurement:
    """One server and the requests of one step."""

    def __init__(self, fleet: Fleet, options: argparse.Namespace) -> None:
        self.fleet, self.options = fleet, options
        self.taskset = make_taskset(options)
        self.template = load_template(options.model)
        tasks = self.taskset.split("search")[: options.tasks]
        self.prompts = [self.template.encode(task) for task in tasks]
        self.founder = make_founder(fleet, options)
        self.num_members = int(options.members)
        self.num_answers = self.num_members * len(self.prompts)

    def requests(self, refs: Sequence[ModelRef]) -> list[SampleRequest]:
        """Requests of one step: all tasks of each model, member by member."""
        return [
            SampleRequest(model=ref, prompt=prompt, params=self.taskset.sampling)
            for ref in refs
            for prompt in self.prompts
        ]

    async def draw(self, refs: Sequence[ModelRef]) -> float:
        await self.fleet.reset_prefix_cache()
        began = time.perf_counter()
        drawn = await self.fleet.sample(self.requests(refs))
        seconds = time.perf_counter() - began
        assert all(len(one.tokens) == self.options.new_tokens for [one] in drawn)
        return seconds

    async def base(self) -> float:
        """Seconds of one step's requests to the base model."""
        return await self.draw([self.fleet.base] * self.options.members)

    async def members(self, seed: int) -> float:
        """Seconds of the same requests to loaded members; slots fill while answers are drawn."""
        made = make_members(self.founder, count=self.options.members, seed=seed)
        refs = [await self.fleet.load(member) for member in made]
        seconds = await self.draw(refs)
        await asyncio.gather(*map(self.fleet.unload, refs))
        return seconds

    async def steps(self) -> list[Step]:
        """Steps as `genome` does them."""
        options = self.options
        stage = {
            "type": "es", "steps": options.steps, "population": options.members, "rank": 1,
            "sigma": SIGMA, "tasks_per_step": len(self.prompts),
        }  # fmt: skip
        config = GenomeConfig.model_validate(
            {
                "init": {"type": "zero"},
                "tasksets": [{"type": "generated", "generator": "arithmetic"}],
                "stages": [stage],
                "finals": {"num_finalists": 1, "num_voters": 1, "random_search": False},
                "merge_device": "cuda" if torch.cuda.is_available() else "cpu",
            }
        )
        clock = Clock(self.fleet)
        with (
            tempfile.TemporaryDirectory() as scratch,
            Run.create(Path(scratch), kind="genome", config={}, name="es") as run,
        ):
            evaluator = TasksetEvaluator(
                clock, template=self.template, tasksets=[self.taskset], log=RolloutLog(run)
            )
            inputs = GenomeInputs(
                config=config,
                founders={"founder": self.founder},
                tasksets=[self.taskset],
                evaluator=evaluator,
            )
            await evolve(inputs, engine=self.fleet, run=run, observer=clock)
        return clock.steps

    async def stock(self, *, together: int) -> float:
        """Seconds of a step with `load_lora_adapter`, extrapolated from some members."""
        count = min(int(self.options.stock_members), self.num_members)
        members = make_members(self.founder, count=count, seed=10**9 + together)
        places = asyncio.Semaphore(together)
        [replica] = self.fleet.pool.replicas
        fields = Fields(max_tokens=self.options.new_tokens, temperature=0.0, ignore_eos=True)
        with tempfile.TemporaryDirectory(dir=memory_folder()) as scratch:

            async def ask(member: Adapter) -> None:
                name, folder = f"stock-{together}-{member.name}", Path(scratch) / member.name
                async with places:
                    await asyncio.to_thread(write_adapter, member, folder)
                    await replica.client.load_adapter(name, path=str(folder))
                    await replica.client.complete(encode_body(name, fields, self.prompts))
                    await replica.client.unload_adapter(name)
                    await asyncio.to_thread(shutil.rmtree, folder)

            began = time.perf_counter()
            await asyncio.gather(*map(ask, members))
            return (time.perf_counter() - began) / count * self.num_members


async def measure(fleet: Fleet, options: argparse.Namespace) -> None:
    own = Measurement(fleet, options)
    num_tokens = own.num_answers * options.new_tokens
    await own.members(seed=0)  # warms up the kernels of adapters
    base, members = [], []
    for i in range(options.rounds):  # in turns, so that a slow host affects both
        base.append(await own.base())
        members.append(await own.members(seed=10**6 * (i + 1)))
        print(f"round {i}: base {base[-1]:.2f} s, members {members[-1]:.2f} s", flush=True)
    least, drawn = min(base), min(members)
    print(
        f"{options.members} members x {len(own.prompts)} tasks x {options.new_tokens} tokens, "
        f"rank {options.lora_rank}, {options.slots} slots; least of {options.rounds} rounds"
    )
    print(f"base     {least:8.2f} s {num_tokens / least:10,.0f} tok/s")
    print(
        f"members  {drawn:8.2f} s {num_tokens / drawn:10,.0f} tok/s, "
        f"{least / drawn:.3f} of the base"
    )
    steps = await own.steps()
    per_answer = statistics.median(step.seconds / step.num_answers for step in steps)
    step_s = per_answer * own.num_answers
    print(
        f"step     {step_s:8.2f} s, overhead {1 - drawn / step_s:.3f}, "
        f"{3600 / step_s:,.0f} steps an hour; measured: " + "; ".join(map(str, steps))
    )
    for together in dict.fromkeys((1, options.slots)):
        stock_s = await own.stock(together=together)
        print(
            f"stock    {stock_s:8.2f} s, {together} at a time, {3600 / stock_s:,.0f} steps an "
            f"hour, {stock_s / step_s:.1f} times a step",
            flush=True,
        )


@asynccontextmanager
async def open_server(options: argparse.Namespace) -> AsyncIterator[Fleet]:
    is_on_cpu = options.device == "cpu"
    launch = LaunchConfig(
        model=str(options.model),
        python=options.python,
        replicas=1,
        device=options.device,
        max_model_len=1024 + options.new_tokens,
        max_num_seqs=options.sequences,
        max_loras=options.slots,
        max_cpu_loras=max(options.slots, 2 * options.members),
        max_lora_rank=options.lora_rank,
        lora_targets=TARGETS,
        gpu_memory_utilization=options.gpu_share,
        enforce_eager=is_on_cpu,
        compile=options.compile,
        cpu_cache_gib=1,
        args=tuple(options.args.split()),
        env={"HF_HUB_OFFLINE": "1"},
    )
    async with open_fleet(FleetConfig(launch=launch)) as fleet:
        yield fleet


async def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--members", type=int, default=512)
    parser.add_argument("--slots", type=int, default=128, help="vLLM's max_loras")
    parser.add_argument("--sequences", type=int, default=1024, help="vLLM's max_num_seqs")
    parser.add_argument("--tasks", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--lora-rank", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--stock-members", type=int, default=16)
    parser.add_argument("--gpu-share", type=float, default=0.8)
    parser.add_argument("--no-compile", dest="compile", action="store_false", default=None)
    parser.add_argument("--args", default="", help="further flags of vLLM, in one string")
    options = parser.parse_args()
    async with open_server(options) as fleet:
        await measure(fleet, options)


if __name__ == "__main__":
    asyncio.run(main())
