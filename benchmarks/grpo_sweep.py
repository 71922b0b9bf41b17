"""Many adapters in one sweep beside one adapter alone: seconds per step, same engine and model.

    python benchmarks/grpo_sweep.py --model FOLDER [--adapters 16] [--steps 8]
    python benchmarks/grpo_sweep.py --model FOLDER --engine fleet --python PYTHON

FOLDER is a model, `smollm2`, or `tiny` for one that is made here. `--engine embedded` draws in this
process, `fleet` with a vLLM server that shares the GPU with the trainer (`--python` names an
interpreter that has vLLM); each training starts one, with the same settings. Tasks are additions of
two numbers; the reward is the share of even tokens, so that groups differ for any model. Seconds
per step are measured from the first to the last recorded step, without the select tasks (one
checkpoint, at the end). The ratio is sweep / alone.

The whole training is timed too, with its start and its report, which covers all adapters.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import rookery
from rookery.embedded import resolve_model
from rookery.runs import Run
from rookery.types import Completion, Task

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
STAGES = ("draw", "train", "publish")


def reward(task: Task, completion: Completion) -> float:
    """Reward that differs between the answers of any model."""
    del task
    return sum(token % 2 == 0 for token in completion.tokens) / len(completion.tokens)


@dataclass(frozen=True, slots=True)
class Timed:
    """One training, or one sweep."""

    step_s: float
    """Seconds of one step of all adapters, without the first step, which warms up."""
    stages: dict[str, float]
    """By stage: seconds per step, averaged over adapters, including waits for the others."""
    whole_s: float
    num_tokens: float
    """Tokens drawn by all adapters in one step."""


def write_tasks(path: Path, *, num: int) -> None:
    rows = [
        {"prompt": f"What is {17 * i % 90 + 10} + {31 * i % 90 + 10}? Think step by step.",
         "reference": str(17 * i % 90 + 31 * i % 90 + 20)}
        for i in range(num)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def document(options: argparse.Namespace, engine: dict[str, Any], tasks: Path) -> dict[str, Any]:
    return {
        "engine": engine,
        "tasksets": [
            {"type": "jsonl", "path": str(tasks), "sampling": {"max_tokens": 8},
             "splits": {"search": 0.9, "select": 0.05, "report": 0.05},
             "scorer": {"type": "python", "function": f"{Path(__file__).resolve()}:reward"}}
        ],
        "lora": {"rank": options.rank, "alpha": 2.0 * options.rank, "targets": list(TARGETS)},
        "steps": options.steps,
        "groups_per_step": options.groups,
        "group_size": options.group_size,
        "drawing": {"max_tokens": options.max_tokens},
        "learning_rate": 1e-5,
        "trainer": {"pass_tokens": options.pass_tokens, "trunk_cache_gib": 0},
        "save_every": options.steps,
        "staleness": options.staleness,
        "max_gap": 0.5,
    }  # fmt: skip


def train(config: dict[str, Any], runs: Path, *, num: int) -> Timed:
    """Train one adapter, or a sweep of several."""
    if num > 1:
        config = {**config, "sweep": {"seeds": num}}
    began = time.perf_counter()
    outcome = rookery.run_grpo(config, runs_dir=runs, name=f"{num}-adapters")
    whole_s = time.perf_counter() - began
    folders = [outcome.path] if num == 1 else sorted((outcome.path / "adapters").iterdir())
    return _timed(folders, whole_s)


def _timed(folders: Sequence[Path], whole_s: float) -> Timed:
    ends: dict[int, list[float]] = {}
    metrics: list[dict[str, float]] = []
    for folder in folders:
        with Run.view(folder) as run:
            for event in run.events("step"):
                ends.setdefault(event.payload["step"], []).append(event.time_s)
                if event.payload["step"] > 0:
                    metrics.append(event.payload["metrics"])
    # A step ends when the last adapter finishes it.
    first, last = max(ends[0]), max(ends[max(ends)])
    num_steps = max(ends)
    return Timed(
        step_s=(last - first) / num_steps,
        stages={
            stage: sum(own.get(f"time/{stage}_s", 0.0) for own in metrics) / len(metrics)
            for stage in STAGES
        },
        whole_s=whole_s,
        num_tokens=sum(own["grpo/num_drawn_tokens"] for own in metrics) / num_steps,
    )


def launch(options: argparse.Namespace) -> dict[str, Any]:
    """Launch settings of the server of both trainings; it holds all adapters of the sweep."""
    is_gpu = torch.cuda.is_available()
    return {
        "model": str(options.model),
        "python": options.python,
        "replicas": 1,
        "max_model_len": options.max_tokens + 256,
        "max_num_seqs": options.max_num_seqs if is_gpu else None,
        "max_lora_rank": max(8, options.rank),
        "lora_targets": list(TARGETS),
        "cuda_graphs": "full" if is_gpu else "auto",
        "enforce_eager": not is_gpu,
        "cpu_cache_gib": 1,
        "env": {"HF_HUB_OFFLINE": "1"},
    }


def measure(options: argparse.Namespace, engine: dict[str, Any], folder: Path) -> list[Timed]:
    tasks = folder / "tasks.jsonl"
    write_tasks(tasks, num=options.tasks)
    config = document(options, engine, tasks)
    return [train(config, folder / "runs", num=num) for num in (1, options.adapters)]


def show(options: argparse.Namespace, alone: Timed, sweep: Timed) -> None:
    for name, one in (("alone", alone), (f"{options.adapters} adapters", sweep)):
        stages = ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in one.stages.items())
        print(
            f"{name:<12} {one.step_s:7.2f} s a step ({stages}), {one.num_tokens:,.0f} tokens drawn "
            f"a step, {one.num_tokens / one.step_s:,.0f} a second; whole run {one.whole_s:.0f} s"
        )
    print(
        f"{options.adapters} adapters in {sweep.step_s / alone.step_s:.2f} times the time of one "
        f"(whole runs {sweep.whole_s / alone.whole_s:.2f})",
        flush=True,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a model folder, smollm2, or tiny")
    parser.add_argument("--engine", choices=("embedded", "fleet"), default="embedded")
    parser.add_argument("--python", default=sys.executable, help="an interpreter with vLLM")
    parser.add_argument("--adapters", type=int, default=16)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--staleness", type=int, choices=(0, 1), default=0)
    many = 16_384 if torch.cuda.is_available() else 1024
    parser.add_argument("--pass-tokens", type=int, default=many)
    parser.add_argument("--max-num-seqs", type=int, default=1024)
    parser.add_argument("--tasks", type=int, default=400)
    parser.add_argument("--runs", type=Path, help="where runs are kept; else they are removed")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="rookery-sweep-") as scratch:
        folder = options.runs or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        options.model = resolve_model(options.model).path
        engine: dict[str, Any] = {"model": str(options.model), "cache_gib": 1}
        if options.engine == "fleet":
            engine = {"type": "fleet", "launch": launch(options)}
        alone, sweep = measure(options, engine, folder)
    show(options, alone, sweep)


if __name__ == "__main__":
    main()
