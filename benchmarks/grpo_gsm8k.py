"""GSM8K by grpo on one GPU: accuracy on test problems before and after, rank 16 beside rank 1.

    python benchmarks/grpo_gsm8k.py MODEL DATA [--python PYTHON] [--ranks 16 1] [--steps 30]

MODEL is a folder with a chat model (Qwen2.5-Coder-0.5B-Instruct), DATA one with `train.jsonl` and
`test.jsonl` of GSM8K. A vLLM server (`--python` names an interpreter that has vLLM) shares the GPU
with the trainer and serves all trainings. The reward is 1 when the number after `####` is right.
Trained on `train`, 5 % of which choose the checkpoint; `test` is read once, greedy. The gain is
paired by problem, with its 95 % interval. One H200: about 4 minutes for each rank after 2 for the
server.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import rookery
from rookery.fleet import LaunchConfig
from rookery.fleet.servers.launch import open_servers
from rookery.reports import GrpoReport, ReportRow

PROMPT = '{{ question }}\nThink step by step and end with "#### " and the answer.'
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
GPU_SHARE = 0.4
"""Share of the GPU's memory for the server; the trainer has the rest."""
MAX_GAP = 0.1
"""Largest accepted gap in nats: server and trainer compute in bfloat16, in different orders."""


def tasksets(options: argparse.Namespace) -> list[dict[str, Any]]:
    common = {
        "type": "jsonl",
        "scorer": {"type": "numeric"},
        "prompt_template": PROMPT,
        "sampling": {"max_tokens": options.max_tokens},
    }
    train = {"search": 0.95, "select": 0.05, "report": 0.0}
    test = {"search": 0.0, "select": 0.0, "report": 1.0}
    return [
        {**common, "name": "train", "path": str(options.data / "train.jsonl"), "splits": train,
         "limit": options.train_limit},
        {**common, "name": "test", "path": str(options.data / "test.jsonl"), "splits": test,
         "limit": options.test_limit},
    ]  # fmt: skip


def launch(options: argparse.Namespace) -> LaunchConfig:
    is_gpu = torch.cuda.is_available()
    return LaunchConfig(
        model=str(options.model),
        python=options.python,
        replicas=1,
        max_model_len=options.max_tokens + 1024,
        max_num_seqs=256 if is_gpu else None,
        gpu_memory_utilization=GPU_SHARE,
        max_loras=4,
        max_cpu_loras=8,
        max_lora_rank=max(options.ranks),
        lora_targets=TARGETS,
        cuda_graphs="full",
        enforce_eager=not is_gpu,
        cpu_cache_gib=1,
        env={"HF_HUB_OFFLINE": "1"},
    )


def train(options: argparse.Namespace, url: str, rank: int, runs: Path) -> GrpoReport:
    return rookery.run_grpo(
        {
            "engine": {"type": "fleet", "urls": [url], "name": options.model.name},
            "tokenizer": str(options.model),
            "tasksets": tasksets(options),
            "lora": {"rank": rank, "alpha": 2.0 * rank, "targets": TARGETS},
            "steps": options.steps,
            "groups_per_step": options.groups,
            "group_size": options.group_size,
            "drawing": {"max_tokens": options.max_tokens},
            "learning_rate": options.learning_rate,
            "trainer": {"pass_tokens": options.pass_tokens, "trunk_cache_gib": 0},
            "save_every": options.steps if options.steps < 20 else options.steps // 2,
            "max_gap": MAX_GAP,
            "seed": options.seed,
        },
        runs_dir=runs,
        name=f"rank-{rank}",
    ).report


def show(rank: int, report: GrpoReport) -> None:
    def cell(row: ReportRow) -> str:
        return "failed" if row.mean is None else f"{row.mean:.3f} ({row.low:.3f} to {row.high:.3f})"

    trained, base = report.rows
    gain = trained.gain
    gaps = [step.metrics.get("grpo/logprob_gap") or 0.0 for step in report.steps]
    rewards = [step.metrics.get("reward/mean") or 0.0 for step in report.steps]
    print(
        f"rank {rank:<3} test problems: {cell(base)} -> {cell(trained)}, gain "
        + (f"{gain.mean:+.3f} ({gain.low:+.3f} to {gain.high:+.3f})" if gain else "unknown")
        + f", the weights after step {report.chosen_step}"
    )
    print(
        f"         reward of the drawn answers {rewards[0]:.3f} -> {rewards[-1]:.3f}, "
        f"largest gap {max(gaps):.1e}, {report.num_tokens:,} tokens drawn, "
        f"{report.seconds or 0:.0f} s",
        flush=True,
    )


async def measure(options: argparse.Namespace, runs: Path) -> None:
    async with open_servers(launch(options)) as [server]:
        for rank in options.ranks:
            show(rank, await asyncio.to_thread(train, options, server.url, rank, runs))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a folder with a chat model")
    parser.add_argument("data", type=Path, help="a folder with train.jsonl and test.jsonl")
    parser.add_argument("--python", default=sys.executable, help="an interpreter with vLLM")
    parser.add_argument("--runs", type=Path, help="where the runs are kept; else they are removed")
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 1])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=320)
    parser.add_argument("--pass-tokens", type=int, default=16384)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--train-limit", type=int, default=4000)
    parser.add_argument("--test-limit", type=int)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as place:
        asyncio.run(measure(options, options.runs or Path(place)))


if __name__ == "__main__":
    main()
