"""GRPO on one GPU beside TRL: start, seconds per step, tokens per second, accuracy by the clock.

    python benchmarks/grpo_peers.py MODEL DATA [--python PYTHON] [--trl-python PYTHON] [--steps 30]

MODEL is a folder with a chat model (Qwen2.5-Coder-1.5B-Instruct), DATA one with `train.jsonl` and
`test.jsonl` of GSM8K. Both sides have the same model, prompts, batch (32 groups of 8), adapter
(rank 16 on all linear layers), learning rate, loss and reward: `right_number` below. Rookery is the
command `rookery grpo run` with default settings for speed; TRL draws with vLLM in its own process
(`vllm_mode="colocate"`). They run one after the other, each in its own process, timed from the
start of its command. The same `rookery eval` then measures the checkpoints of both. Last, the same
vLLM alone in one process draws as many groups as a step of Rookery had.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

PROMPT = '{{ question }}\nThink step by step and end with "#### " and the answer.'
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
STAGES = ("draw", "train", "publish")
NUMBER = re.compile(r"-?\d[\d,]*\.?\d*")


def right_number(text: str, answer: str) -> float:
    """1 if the last number, after the last #### if any, equals the reference's."""
    return float(_last_number(text) == _last_number(answer) is not None)


def _last_number(text: str) -> float | None:
    found = NUMBER.findall(text.rpartition("####")[2])
    return float(found[-1].replace(",", "")) if found else None


def reward(task: Any, completion: Any) -> float:
    """`right_number` for Rookery's `python` scorer."""
    return right_number(completion.text, str(task.reference))


def rookery_config(options: argparse.Namespace) -> dict[str, Any]:
    common = {
        "type": "jsonl",
        "scorer": {"type": "python", "function": f"{Path(__file__).resolve()}:reward"},
        "prompt_template": PROMPT,
        "sampling": {"max_tokens": options.max_tokens},
    }
    launch = {"model": str(options.model), "python": options.python, "env": {"HF_HUB_OFFLINE": "1"}}
    return {
        "engine": {"type": "fleet", "launch": {**launch, **options.launch}},
        "tasksets": [
            {**common, "name": "train", "path": str(options.data / "train.jsonl"),
             "limit": options.train_limit, "splits": {"search": 0.97, "select": 0.03, "report": 0}},
            {**common, "name": "test", "path": str(options.data / "test.jsonl"),
             "limit": options.test_limit, "splits": {"search": 0, "select": 0, "report": 1.0}},
        ],
        "lora": {"rank": 16, "alpha": 32.0, "targets": TARGETS},
        "steps": options.steps,
        "groups_per_step": options.groups,
        "group_size": options.group_size,
        "drawing": {"max_tokens": options.max_tokens},
        "learning_rate": options.learning_rate,
        "save_every": options.save_every,
        "keep": 1000,
        "seed": options.seed,
        **options.grpo,
    }  # fmt: skip


def run_rookery(options: argparse.Namespace, place: Path) -> dict[str, Any]:
    """Run the command as a user does, and read the times from its run."""
    config = place / "rookery.json"
    config.write_text(json.dumps(rookery_config(options)))
    began = time.time()
    with watched_gpu() as gpu, (place / "rookery.log").open("w") as log:
        subprocess.run(
            [sys.executable, "-m", "rookery", "grpo", "run", str(config), "--runs-dir", str(place),
             "--name", "rookery"],
            check=True, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
    from rookery.runs import Run

    with Run.view(place / "rookery") as run:
        steps = [(event.time_s - began, event.payload["metrics"]) for event in run.events("step")]
    rows = [
        {
            "begin": end - sum(metrics.get(f"time/{stage}_s", 0.0) for stage in STAGES),
            "end": end,
            "tokens": metrics["grpo/num_drawn_tokens"],
            "trained": metrics.get("train/num_tokens", 0.0),
            "groups": metrics["grpo/num_groups"] + metrics["grpo/num_equal_groups"],
            **{stage: metrics.get(f"time/{stage}_s", 0.0) for stage in STAGES},
        }
        for end, metrics in steps
    ]
    folders = {
        int(folder.name.rpartition("_")[2]): folder
        for folder in (place / "rookery" / "checkpoints").glob("adapter_step_*")
    }
    return {"steps": rows, "adapters": folders, **gpu}


def run_vllm(options: argparse.Namespace, place: Path, *, num_groups: int) -> float:
    """Tokens per second of vLLM alone in one process, with log-probabilities of its answers."""
    out = place / "vllm.json"
    setup = {
        "model": str(options.model),
        "train": str(options.data / "train.jsonl"),
        "prompt": PROMPT,
        "groups": num_groups,
        "group_size": options.group_size,
        "max_tokens": options.max_tokens,
        "out": str(out),
    }
    with (place / "vllm.log").open("w") as log:
        subprocess.run(
            [options.python, str(Path(__file__).with_name("grpo_peers_vllm.py")),
             json.dumps(setup)],
            check=True, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
    found = json.loads(out.read_text())
    return float(found["tokens"] / found["seconds"])


def run_trl(options: argparse.Namespace, place: Path) -> dict[str, Any]:
    setup = {
        "model": str(options.model),
        "train": str(options.data / "train.jsonl"),
        "limit": options.train_limit,
        "prompt": PROMPT,
        "targets": TARGETS,
        "steps": options.steps,
        "groups": options.groups,
        "group_size": options.group_size,
        "max_tokens": options.max_tokens,
        "learning_rate": options.learning_rate,
        "save_every": options.save_every,
        "micro_batch": options.trl_micro_batch,
        "out": str(place / "trl"),
        "seed": options.seed,
    }
    began = time.time()
    with watched_gpu() as gpu, (place / "trl.log").open("w") as log:
        subprocess.run(
            [options.trl_python, str(Path(__file__).with_name("grpo_peers_trl.py")),
             json.dumps(setup)],
            check=True, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
    lines = (place / "trl" / "steps.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    for row in rows:
        row |= {"begin": row["begin"] - began, "end": row["end"] - began, "trained": row["tokens"]}
    folders = {
        int(folder.name.rpartition("-")[2]): folder
        for folder in (place / "trl").glob("checkpoint-*")
    }
    return {"steps": rows, "adapters": folders, **gpu}


class watched_gpu:
    """Measures the GPU's busy share of the time and its peak memory with `nvidia-smi`."""

    def __enter__(self) -> dict[str, Any]:
        self._result: dict[str, Any] = {"busy": [], "memory_gib": 0.0}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self._result

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        query = [
            "nvidia-smi",
            "--query-gpu=utilization.gpu,memory.used",
            "--format=csv,noheader,nounits",
        ]
        while not self._is_over.wait(0.5):
            try:
                answer = subprocess.run(query, capture_output=True, text=True, check=True).stdout
            except (OSError, subprocess.CalledProcessError):
                return
            busy, used = map(float, answer.splitlines()[0].split(","))
            self._result["busy"].append((time.time(), busy))
            self._result["memory_gib"] = max(self._result["memory_gib"], used / 1024)


def measure(options: argparse.Namespace, results: Mapping[str, Any], place: Path) -> dict[str, Any]:
    """Greedy accuracy of every checkpoint on the test problems, in one evaluation."""
    import rookery

    config = rookery_config(options)
    taskset = place / "test.yaml"
    taskset.write_text(json.dumps(config["tasksets"][1]))
    adapters = {
        f"{side}-{step}": str(folder)
        for side, result in results.items()
        for step, folder in result["adapters"].items()
    }
    launch = {**config["engine"]["launch"], "max_lora_rank": 16, "lora_targets": TARGETS}
    outcome = rookery.evaluate(
        options.model,
        taskset,
        adapters=list(adapters.values()),
        fleet={"launch": launch},
        runs_dir=place,
        name="eval",
    )
    rows = outcome.report.models[1:]
    return {name: (row.mean, row.low, row.high) for name, row in zip(adapters, rows, strict=True)}


def show(side: str, result: Mapping[str, Any]) -> None:
    steps = result["steps"]
    ends = [row["end"] for row in steps]
    spans = [later - earlier for earlier, later in pairwise(ends)]
    mean = {key: fmean(row[key] for row in steps[1:]) for key in steps[0]}
    listed = ", ".join(f"{stage} {mean[stage]:.2f}" for stage in STAGES if stage in mean)
    busy = [share for at, share in result["busy"] if ends[0] < at - result["began"] < ends[-1]]
    rows = {
        "from the command to the first step": f"{steps[0]['begin']:.1f} s",
        "to its end": f"{ends[0]:.1f} s",
        "seconds per step": f"{fmean(spans):.2f} ({listed})",
        "drawn tokens in a step": f"{mean['tokens']:,.0f}",
        "drawn tokens per second of whole steps": f"{mean['tokens'] / fmean(spans):,.0f}",
        "trained tokens per second of whole steps": f"{mean['trained'] / fmean(spans):,.0f}",
        "GPU memory, most": f"{result['memory_gib']:.1f} GiB",
    }
    if "draw" in mean:
        rows["drawn tokens per second while drawing"] = f"{mean['tokens'] / mean['draw']:,.0f}"
    if busy:
        rows["GPU busy between first and last step"] = f"{fmean(busy):.0f} %"
    print(f"\n{side}")
    for label, value in rows.items():
        print(f"  {label:<46}{value}", flush=True)


def show_scores(results: Mapping[str, Any], scores: Mapping[str, Any]) -> None:
    print("\ntest problems, by seconds from the command on")
    for name, (score, low, high) in scores.items():
        side, _, step = name.rpartition("-")
        seconds = results[side]["steps"][int(step) - 1]["end"]
        print(
            f"  {side:<8} step {step:<4} {seconds:6.0f} s   {score:.3f} ({low:.3f} to {high:.3f})"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--python", default=sys.executable, help="an interpreter with vLLM")
    parser.add_argument("--trl-python", default=sys.executable, help="one with TRL and vLLM")
    parser.add_argument("--sides", nargs="+", default=["rookery", "trl", "vllm"])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=320)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--train-limit", type=int, default=4000)
    parser.add_argument("--test-limit", type=int)
    parser.add_argument("--trl-micro-batch", type=int, default=32)
    parser.add_argument("--launch", type=json.loads, default={}, help="keys of engine.launch")
    parser.add_argument("--grpo", type=json.loads, default={}, help="further keys of the config")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--keep", type=Path, help="where the runs are kept; else they are removed")
    parser.add_argument("--no-scores", action="store_true", help="leave out the test problems")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        place = options.keep or Path(temporary)
        place.mkdir(parents=True, exist_ok=True)
        sides = {"rookery": run_rookery, "trl": run_trl}
        results: dict[str, Any] = {}
        for side in [side for side in sides if side in options.sides]:
            began = time.time()
            try:
                results[side] = {**sides[side](options, place), "began": began}
            except subprocess.CalledProcessError as error:
                log = (place / f"{side}.log").read_text(errors="replace")
                print(f"\n{side} ended with {error.returncode}:\n{log[-3000:]}", flush=True)
            else:
                show(side, results[side])
        if "vllm" in options.sides and "rookery" in results:
            num = round(fmean(row["groups"] for row in results["rookery"]["steps"][1:]))
            print(f"\nvLLM alone in one process, {num} groups with log-probabilities")
            print(
                f"  drawn tokens per second        {run_vllm(options, place, num_groups=num):,.0f}"
            )
        if not options.no_scores:
            show_scores(results, measure(options, results, place))


if __name__ == "__main__":
    main()
