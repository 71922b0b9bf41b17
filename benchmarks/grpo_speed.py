"""The trainer and whole grpo steps beside TRL's, on SmolLM2 in float32, by turns.

    ROOKERY_TRL_PYTHON=PYTHON python benchmarks/grpo_speed.py

ROOKERY_TRL_PYTHON names a Python that has TRL 1.16. A pass is the loss with its gradients and one
optimizer step over 640 tokens of equal sequences, the second half of each drawn. A whole step draws
4 groups of 8 answers, judges them, trains on them and hands the weights to the engine; TRL draws
with transformers, as it does without vLLM. Rates are tokens per second, the best of several rounds.
"""

import asyncio
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

import rookery
from rookery.embedded import resolve_model
from rookery.reports import GrpoReport
from rookery.runs import Run
from rookery.slots import load_model
from rookery.train import LoraConfig, LoraTrainer, TrainerConfig, initial_adapter
from rookery.train.losses.loss import averaged
from rookery.types import Completion, Datum, OptimStep, Task, TrainRequest

SHAPES = {"64 x 10": (64, 10), "8 x 80": (8, 80), "1 x 640": (1, 640)}
PROMPTS = (
    "Name a river in Europe.",
    "Write a word that rhymes with sky.",
    "What is the colour of grass?",
    "Say something about the moon.",
)
GROUPS, GROUP_SIZE, MAX_TOKENS, RANK, RATE = 4, 8, 16, 8, 1e-5
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
PASS_ROUNDS, STEP_ROUNDS, STEPS = 3, 2, 2
LIMIT_S = 600.0
"""Limit in seconds on one response of the peer."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens per second, ours and TRL's."""

    ours: float
    theirs: float

    @property
    def ratio(self) -> float:
        return self.ours / self.theirs


@dataclass(frozen=True, slots=True)
class Speed:
    """Results: passes by shape, whole steps, and the gap between engine and trainer."""

    passes: dict[str, Rates]
    steps: Rates
    gap: float


def reward(task: Task, completion: Completion) -> float:
    """The peer's reward: different answers get different rewards."""
    del task
    return float(sum(completion.tokens) % 97)


def compare(python: str, folder: Path) -> Speed:
    """Measure our trainer and TRL in turns, with files in `folder`."""
    model = resolve_model("smollm2").path
    with open_trl(python, model) as trl:
        passes = {name: compare_passes(trl, model, *shape) for name, shape in SHAPES.items()}
        ours, theirs, gaps = [], [], []
        for number in range(STEP_ROUNDS):
            report, path = run_steps(folder, number)
            ours += step_rates(report, path)
            gaps += [step.metrics.get("grpo/logprob_gap") or 0.0 for step in report.steps]
            answer = trl.ask({"do": "steps", "num": STEPS})
            theirs += [tokens / seconds for seconds, tokens in answer["steps"]]
    return Speed(passes, Rates(max(ours), max(theirs)), max(gaps))


@dataclass(frozen=True, slots=True)
class Trl:
    """The peer's process."""

    process: "subprocess.Popen[str]"

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"The process of TRL ended with {self.process.wait(LIMIT_S)}.")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def open_trl(python: str, model: Path) -> Iterator[Trl]:
    setup = {
        "model": str(model), "prompts": PROMPTS, "groups": GROUPS, "group_size": GROUP_SIZE,
        "max_tokens": MAX_TOKENS, "rank": RANK, "targets": TARGETS, "learning_rate": RATE,
        "threads": torch.get_num_threads(),
    }  # fmt: skip
    script = Path(__file__).with_name("grpo_trl.py")
    with subprocess.Popen(
        [python, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        process.stdin.write(json.dumps(setup) + "\n")
        try:
            yield Trl(process)
        finally:
            process.kill()


def compare_passes(trl: Trl, folder: Path, count: int, length: int) -> Rates:
    model = load_model(folder, device="cpu", dtype="float32")
    generator = torch.Generator().manual_seed(0)
    table = torch.randint(model.shape.vocab_size, (count, length), generator=generator).tolist()
    start = initial_adapter(
        model, LoraConfig(rank=RANK, targets=TARGETS), name="p", base="", seed=0
    )
    trainer = LoraTrainer(model, config=TrainerConfig(trunk_cache_gib=0))
    trainer.add("policy", start)
    num_prompt = length // 2
    [data] = averaged([[datum(row, num_prompt, i) for i, row in enumerate(table)]], "sequence")
    request = TrainRequest(trainee="policy", data=data, loss="grpo")
    step = OptimStep(trainee="policy", learning_rate=RATE)

    async def run() -> None:
        [output] = await trainer.forward_backward([request])
        [stepped] = await trainer.optim_step([step])
        assert not output.error and not stepped.error

    ours, theirs = [], []
    question = {"do": "pass", "tokens": table, "num_prompt": num_prompt}
    for _ in range(PASS_ROUNDS + 1):
        began = time.perf_counter()
        asyncio.run(run())
        ours.append(time.perf_counter() - began)
        theirs.append(trl.ask(dict(question))["seconds"])
    # The first round of each side warms up.
    rates = Rates(count * length / min(ours[1:]), count * length / min(theirs[1:]))
    print(f"{count} x {length}: {rates.ours:.0f} and {rates.theirs:.0f} tokens/s", flush=True)
    return rates


def datum(tokens: list[int], num_prompt: int, place: int) -> Datum:
    num = len(tokens) - num_prompt
    return Datum(
        tokens=tuple(tokens[:-1]),
        positions=tuple(range(num_prompt - 1, len(tokens) - 1)),
        targets=tuple(tokens[num_prompt:]),
        weights=(1.0,) * num,
        sampled_logprobs=(-10.0,) * num,
        advantages=((-1.0) ** place,) * num,
    )


def run_steps(folder: Path, number: int) -> tuple[GrpoReport, Path]:
    """Train with the library call, one step more than is timed."""
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": p, "reference": ""}) + "\n" for p in PROMPTS))
    outcome = rookery.run_grpo(
        {
            "engine": {"model": "smollm2", "dtype": "float32"},
            "tasksets": tasksets(path),
            "lora": {"rank": RANK, "alpha": 2.0 * RANK, "targets": TARGETS},
            "steps": STEPS + 1,
            "save_every": STEPS + 1,
            "groups_per_step": GROUPS,
            "group_size": GROUP_SIZE,
            "drawing": {"max_tokens": MAX_TOKENS},
            "learning_rate": RATE,
            "seed": number,
        },
        runs_dir=folder / "runs",
        name=f"steps-{number}",
        progress=False,
    )
    return outcome.report, outcome.path


def tasksets(path: Path) -> list[dict[str, Any]]:
    """Training prompts, and two sums because a run needs select and report tasks."""
    trained = {
        "type": "jsonl",
        "path": str(path),
        "scorer": {"type": "python", "function": f"{__file__}:reward"},
        "splits": {"search": 1.0, "select": 0.0, "report": 0.0},
    }
    measured = {
        "type": "generated",
        "generator": "arithmetic",
        "size": 12,
        "sampling": {"max_tokens": 1},
        "splits": {"search": 0.0, "select": 0.5, "report": 0.5},
    }
    return [trained, measured]


def step_rates(report: GrpoReport, path: Path) -> list[float]:
    """Drawn tokens per second, from the end of each step to the end of the next."""
    with Run.view(path) as run:
        ends = [event.time_s for event in run.events("step")]
    tokens = [step.metrics["grpo/num_drawn_tokens"] or 0.0 for step in report.steps[1:]]
    return [num / (b - a) for num, (a, b) in zip(tokens, pairwise(ends), strict=True)]


def main() -> None:
    python = os.environ.get("ROOKERY_TRL_PYTHON", "")
    if not python:
        raise SystemExit("Set ROOKERY_TRL_PYTHON to a Python that has TRL 1.16.")
    with tempfile.TemporaryDirectory() as folder:
        speed = compare(python, Path(folder))
    print(f"{'':<12}{'rookery':>10}{'TRL':>10}{'ratio':>8}")
    for name, rates in {**speed.passes, "whole steps": speed.steps}.items():
        print(f"{name:<12}{rates.ours:>10.1f}{rates.theirs:>10.1f}{rates.ratio:>8.2f}")
    print(f"mean ratio of passes {fmean(r.ratio for r in speed.passes.values()):.2f}")
    print(f"engine/trainer gap, at most {speed.gap:.1e} nats")


if __name__ == "__main__":
    main()
