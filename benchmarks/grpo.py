"""How much a tiny model learns from a reward, and what shows that it is the reward.

    python benchmarks/grpo.py                # 3 seeds, about 10 minutes on an idle core
    python benchmarks/grpo.py --seeds 0

Two-digit addition, a Llama of 445,000 weights that answers about half of the tasks, 40 steps of 16
groups of 8. Greedy accuracy of the start and of the last weights on 400 tasks that are not trained
on; the mean reward of the answers drawn in the last ten steps; how far the log-probabilities of the
trainer are from those drawn, in the first step and in the last.

    rank 8, rank 1   at least 0.15 better
    shuffled         advantages at random: not better than the start
    publish off      the engine keeps the first weights: the gap grows, the drawn reward stays lower
"""

import argparse
import runpy
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers.utils import logging

import rookery

ROOT = Path(__file__).parents[1]
STEPS = 40
VARIANTS: dict[str, dict[str, Any]] = {
    "rank 8": {},
    "rank 1": {"lora": {"rank": 1, "alpha": 2}},
    "shuffled": {"advantages": "shuffled"},
    "publish off": {"publish_every": STEPS},
}
COLUMNS = ("start", "end", "gain", "reward", "first gap", "last gap", "seconds")


def measure(folder: Path, variant: str, seed: int) -> tuple[float, ...]:
    """One training, in the order of COLUMNS."""
    taskset = {
        "type": "jsonl",
        "path": str(folder / "tasks.jsonl"),
        "scorer": {"type": "exact"},
        "sampling": {"max_tokens": 4},
        "splits": {"search": 0.5, "select": 0.4, "report": 0.1},
    }
    outcome = rookery.run_grpo(
        ROOT / "configs" / "grpo_addition.yaml",
        engine={"model": str(folder / "model")},
        tasksets=[taskset],
        steps=STEPS,
        save_every=STEPS,
        seed=seed,
        runs_dir=folder / "runs",
        name=f"{variant.replace(' ', '-')}-{seed}",
        progress=False,
        **VARIANTS[variant],
    )
    report = outcome.report
    start, end = (checkpoint.mean for checkpoint in report.checkpoints)
    rewards = [step.metrics["reward/mean"] for step in report.steps[-10:]]
    gaps = [step.metrics["grpo/logprob_drift"] for step in (report.steps[0], report.steps[-1])]
    assert start is not None and end is not None and report.seconds is not None
    reward = fmean(reward for reward in rewards if reward is not None)
    return (start, end, end - start, reward, *(gap or 0.0 for gap in gaps), report.seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    make_addition = runpy.run_path(str(ROOT / "examples" / "addition.py"))["make_addition"]
    print(f"{'':<12} seed" + "".join(f"{column:>11}" for column in COLUMNS))
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        make_addition(folder)
        for variant in options.variants:
            for seed in options.seeds:
                cells = measure(folder, variant, seed)
                print(f"{variant:<12} {seed:>4}" + "".join(f"{cell:>11.2g}" for cell in cells))


if __name__ == "__main__":
    main()
