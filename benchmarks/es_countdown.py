"""Countdown by an evolution strategy over a population, beside grpo at equal drawn tokens.

    python benchmarks/es_countdown.py MODEL [--python PYTHON] [--seeds 0 1 2] [--members 512]

MODEL is a folder with a chat model (Qwen2.5-1.5B-Instruct). A task gives three or four numbers and
a target that they make with + - * /, each used once; a checker computes the answer in fractions.
All tasks differ. The search uses `train`; `held-out` is read once, greedily, at the end. For each
seed, `genome` runs `--steps` steps of `stages: [{type: es, rank: 1}]`, then `grpo` runs until its
next step would draw more tokens than genome did, replaced groups included. Each starts its own vLLM
servers (`--python` names an interpreter with vLLM). The output has the scores on `train` over
seconds and tokens, and held-out accuracy with its 95 % interval.
"""

import argparse
import ast
import json
import operator
import random
import re
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

import rookery
from rookery.reports import Estimate, GenomeReport, GrpoReport
from rookery.runs import Run
from rookery.types import Completion, Task

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
WRITTEN = 0.1
"""Reward of a formula that uses the right numbers and has a wrong result."""
LARGEST = 100
"""Upper bound of numbers and targets, exclusive."""


def prompt_of(numbers: Sequence[int], target: int) -> str:
    listed = ", ".join(map(str, numbers))
    return (
        f"Make {target} from the numbers {listed}. Use each number exactly once, and only + - * / "
        "and brackets. Think first, then write the formula alone inside <answer></answer>, such as "
        "<answer>(3 + 5) * 2</answer>."
    )


def make_rows(count: int, *, seed: int) -> Iterator[dict[str, Any]]:
    """Different tasks, half of them of three numbers; each has a solution."""
    rng, seen = random.Random(seed), set[tuple[int, ...]]()
    while len(seen) < count:
        numbers = [rng.randrange(1, LARGEST) for _ in range(3 + len(seen) % 2)]
        target = _combined(numbers, rng)
        key = (*sorted(numbers), target or 0)
        if target is None or key in seen:
            continue
        seen.add(key)
        answer = {"numbers": numbers, "target": target}
        yield {"prompt": prompt_of(numbers, target), "answer": json.dumps(answer)}


def _combined(numbers: Sequence[int], rng: random.Random) -> int | None:
    """Result of random operations on the numbers; None if it is no valid target."""
    values = [Fraction(number) for number in numbers]
    while len(values) > 1:
        rng.shuffle(values)
        one, other = values.pop(), values.pop()
        kind = rng.choice(list(OPERATIONS))
        if kind is ast.Div and (other == 0 or (one / other).denominator != 1):
            return None
        values.append(OPERATIONS[kind](one, other))
    [value] = values
    return int(value) if value.denominator == 1 and 10 <= value < LARGEST else None


def value_of(formula: str) -> tuple[Fraction, list[int]]:
    """The value of a formula and the numbers in it; ValueError for anything else."""
    used: list[int] = []

    def compute(node: ast.expr) -> Fraction:
        match node:
            case ast.Constant(value=int(number)) if not isinstance(number, bool):
                used.append(number)
                return Fraction(number)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATIONS:
                return Fraction(OPERATIONS[type(op)](compute(left), compute(right)))
        raise ValueError(f"{ast.dump(node)} is no part of a formula")

    if len(formula) > 200:
        raise ValueError("a formula of four numbers is shorter")
    try:
        return compute(ast.parse(formula.strip(), mode="eval").body), used
    except (SyntaxError, ZeroDivisionError, RecursionError, MemoryError) as error:
        raise ValueError(f"{formula!r} is no formula: {error}") from None


def judge(task: Task, completion: Completion) -> tuple[bool, bool]:
    """Whether the answer is a formula of the right numbers, and whether it makes the target."""
    asked = json.loads(str(task.reference))
    found = ANSWER.findall(completion.text or "")
    try:
        value, used = value_of(found[-1] if found else "")
    except ValueError:
        return False, False
    is_formula = sorted(used) == sorted(asked["numbers"])
    return is_formula, is_formula and value == asked["target"]


async def exact(task: Task, completion: Completion) -> float:
    """Reported reward: 1 for the target, else 0."""
    return float(judge(task, completion)[1])


async def shaped(task: Task, completion: Completion) -> float:
    """Search reward: a formula of the right numbers earns WRITTEN."""
    is_formula, is_right = judge(task, completion)
    return 1.0 if is_right else WRITTEN * is_formula


def tasksets(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    rows = list(make_rows(options.train + options.held_out, seed=2024))
    parts = {"train": rows[: options.train], "held-out": rows[options.train :]}
    splits = {
        "train": {"search": 0.9, "select": 0.1, "report": 0.0},
        "held-out": {"search": 0.0, "select": 0.0, "report": 1.0},
    }
    found = []
    for name, part in parts.items():
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in part))
        function = f"{Path(__file__).resolve()}:{'shaped' if name == 'train' else 'exact'}"
        found.append(
            {
                "type": "jsonl", "name": name, "path": str(path), "splits": splits[name],
                "scorer": {"type": "python", "function": function},
                "sampling": {"max_tokens": options.max_tokens, "temperature": 0},
            }
        )  # fmt: skip
    return found


def engine(options: argparse.Namespace, *, slots: int, is_shared: bool) -> dict[str, Any]:
    is_gpu = torch.cuda.is_available()
    launch = {
        "model": str(options.model), "python": options.python, "replicas": 1,
        "max_model_len": options.max_tokens + 512, "max_loras": slots,
        "max_cpu_loras": max(slots, 2 * options.members), "max_lora_rank": options.lora_rank,
        "lora_targets": TARGETS, "enforce_eager": not is_gpu, "cpu_cache_gib": 1,
        "max_num_seqs": options.sequences, "env": {"HF_HUB_OFFLINE": "1"},
    }  # fmt: skip
    if is_gpu:
        launch["gpu_memory_utilization"] = options.gpu_share / (2 if is_shared else 1)
    return {"type": "fleet", "launch": launch}


def search(options: argparse.Namespace, sets: list[dict[str, Any]], seed: int, runs: Path) -> Any:
    stage = {
        "type": "es", "steps": options.steps, "population": options.members, "rank": 1,
        "sigma": options.sigma, "learning_rate": options.es_rate,
        "tasks_per_step": options.tasks_per_step,
    }  # fmt: skip
    return rookery.run_genome(
        {
            "engine": engine(options, slots=options.slots, is_shared=False),
            "init": {"type": "zero", "count": 1, "rank": options.lora_rank,
                     "alpha": options.alpha, "targets": TARGETS},
            "tasksets": sets,
            "stages": [stage],
            "merge_device": "cuda" if torch.cuda.is_available() else "cpu",
            "finals": {"num_finalists": 4, "num_voters": 1, "random_search": False},
            "seed": seed,
        },
        runs_dir=runs,
        name=f"es-{seed}",
    ).report  # fmt: skip


def train(
    options: argparse.Namespace, sets: list[dict[str, Any]], seed: int, runs: Path, *, tokens: int
) -> Any:
    """Train with grpo until the next step would exceed the tokens."""
    return rookery.run_grpo(
        {
            "engine": engine(options, slots=4, is_shared=True),
            "tasksets": sets,
            "lora": {"rank": options.lora_rank, "alpha": 2.0 * options.lora_rank,
                     "targets": TARGETS},
            "steps": 10_000,
            "budget": {"max_answer_tokens": tokens},
            "groups_per_step": options.groups,
            "group_size": options.group_size,
            "drawing": {"max_tokens": options.max_tokens},
            "learning_rate": options.grpo_rate,
            "save_every": options.save_every,
            "max_gap": 0.1,
            "seed": seed,
        },
        runs_dir=runs,
        name=f"grpo-{seed}",
    ).report  # fmt: skip


def drawn_tokens(run: Path) -> int:
    """Tokens that a genome run drew, without the prompts."""
    with Run.view(run) as view:
        completions = (event.payload["completion"] for event in view.events("rollout"))
        return sum(len(completion["tokens"]) for completion in completions if completion)


def show(name: str, seed: int, report: GenomeReport | GrpoReport, num_tokens: int) -> float | None:
    winner = next(row for row in report.rows if row.is_winner)
    base = next((row for row in report.rows if row.name == "base model"), report.rows[-1])

    def cell(row: Estimate) -> str:
        return "failed" if row.mean is None else f"{row.mean:.3f} ({row.low:.3f} to {row.high:.3f})"

    print(
        f"seed {seed}  {name:5} held-out {cell(base)} -> {cell(winner)}, {num_tokens:,} tokens "
        f"drawn, {report.seconds or 0:.0f} s",
        flush=True,
    )
    return winner.mean


def compare(options: argparse.Namespace, runs: Path, folder: Path) -> None:
    sets = tasksets(options, folder)
    held_out: dict[str, list[float]] = {}
    for seed in options.seeds:
        found = search(options, sets, seed, runs)
        num_tokens = drawn_tokens(runs / f"es-{seed}")
        seconds = 0.0
        for step in found.generations:
            seconds += step.seconds or 0.0
            print(f"  es {step.generation}: {seconds:.0f} s, best {step.best}, mean {step.mean}")
        reports = {"es": (found, num_tokens)}
        if options.grpo:
            report = train(options, sets, seed, runs, tokens=num_tokens)
            for point in report.checkpoints:
                print(f"  grpo {point}")
            reports["grpo"] = report, report.num_tokens
        for name, (report, count) in reports.items():
            mean = show(name, seed, report, count)
            held_out.setdefault(name, []).extend([] if mean is None else [mean])
    for name, means in held_out.items():
        spread = f" ± {statistics.stdev(means):.3f}" if len(means) > 1 else ""
        print(f"{name}: held-out {statistics.fmean(means):.3f}{spread} over {len(means)} seeds")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a folder with a chat model")
    parser.add_argument("--python", default=sys.executable, help="an interpreter with vLLM")
    parser.add_argument("--runs", type=Path, help="where the runs are kept; else they are removed")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--no-grpo", dest="grpo", action="store_false")
    parser.add_argument("--train", type=int, default=512, help="tasks to search on")
    parser.add_argument("--held-out", type=int, default=500)
    parser.add_argument("--max-tokens", type=int, default=400)
    parser.add_argument("--lora-rank", type=int, default=1)
    parser.add_argument("--members", type=int, default=512)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--sequences", type=int, default=1024)
    parser.add_argument("--gpu-share", type=float, default=0.8, help="of memory, for a server")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--tasks-per-step", type=int, default=16)
    parser.add_argument("--sigma", type=float, default=0.1)
    parser.add_argument("--es-rate", type=float, default=4.0)
    parser.add_argument("--alpha", type=float, default=4.0)
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--grpo-rate", type=float, default=1e-4)
    parser.add_argument("--save-every", type=int, default=4, help="steps of grpo")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as place:
        compare(options, options.runs or Path(place) / "runs", Path(place))


if __name__ == "__main__":
    main()
