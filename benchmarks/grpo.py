"""Checks of grpo: learning, controls, and speed beside TRL, as one table.

    ROOKERY_TRL_PYTHON=PYTHON python benchmarks/grpo.py      # about 15 minutes on two idle cores
    python benchmarks/grpo.py --seeds 0 --variants "rank 8"  # without TRL: learning alone

Learning is of two-digit addition: a Llama of 445,000 weights that answers about half of the tasks,
40 steps of 16 groups of 8. `start` and `end` are greedy accuracies on 1,400 tasks that are not
trained on, `drawn` is the mean reward of the answers drawn in the last ten steps, and the gaps are
the differences of the trainer's log-probabilities from the drawn ones in the first and last step.

    rank 8, rank 1, full   at least 0.15 better, rank 1 by 0.7 of what full gains
    shuffled               advantages at random: not better than the start
    publish off            the engine keeps the first weights: the gap grows 1,000 times, and the
                           answers drawn earn 0.05 less than those of rank 8

The gain depends more on the start model than on the training's seed: `--model-seed` makes another
start model with the same number of steps on other sums. For speed see `grpo_speed.py`.
"""

import argparse
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from grpo_speed import Speed, compare
from transformers.utils import logging

import rookery
from rookery.starters import DEMOS
from rookery.starters.addition import make_addition

ROOT = Path(__file__).parents[1]
STEPS = 40
NUM_TASKS = 4000
SPLITS = {"search": 0.6, "select": 0.35, "report": 0.05}
VARIANTS: dict[str, dict[str, Any]] = {
    "rank 8": {},
    "rank 1": {"lora": {"rank": 1, "alpha": 2}},
    "full": {"full": True, "learning_rate": 3e-5},
    "shuffled": {"advantages": "shuffled"},
    "publish off": {"publish_every": STEPS},
}


@dataclass(frozen=True, slots=True)
class Learned:
    """One training."""

    start: float
    end: float
    drawn: float
    first_gap: float
    last_gap: float
    seconds: float

    @property
    def gain(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Bar:
    """One check."""

    name: str
    measured: str
    wanted: str
    is_met: bool


def train(folder: Path, variant: str, seed: int) -> Learned:
    taskset = {
        "type": "jsonl",
        "path": str(folder / "tasks.jsonl"),
        "scorer": {"type": "exact"},
        "sampling": {"max_tokens": 4},
        "splits": SPLITS,
    }
    outcome = rookery.run_grpo(
        DEMOS / "grpo.yaml",
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
    # A step has no gap if all groups have equal rewards, as when a control has collapsed.
    steps = [step for step in report.steps if "grpo/logprob_drift" in step.metrics]
    first, last = (step.metrics["grpo/logprob_drift"] or 0.0 for step in (steps[0], steps[-1]))
    assert start is not None and end is not None and report.seconds is not None
    drawn = fmean(reward for reward in rewards if reward is not None)
    return Learned(start, end, drawn, first, last, report.seconds)


def learn(
    variants: Sequence[str], seeds: Sequence[int], *, model_seed: int
) -> dict[str, list[Learned]]:
    """Train every variant with every seed from one start model, and print a line for each."""
    found: dict[str, list[Learned]] = {}
    columns = ("start", "end", "gain", "drawn", "first gap", "last gap", "seconds")
    print(f"{'':<12} seed" + "".join(f"{column:>10}" for column in columns))
    with tempfile.TemporaryDirectory() as place:
        make_addition(Path(place), num_tasks=NUM_TASKS, seed=model_seed)
        for variant in variants:
            for seed in seeds:
                one = train(Path(place), variant, seed)
                found.setdefault(variant, []).append(one)
                print(
                    f"{variant:<12} {seed:>4}{one.start:>10.3f}{one.end:>10.3f}{one.gain:>+10.3f}"
                    f"{one.drawn:>10.3f}{one.first_gap:>10.1e}{one.last_gap:>10.1e}"
                    f"{one.seconds:>10.1f}",
                    flush=True,
                )
    return found


def learning_bars(found: dict[str, list[Learned]]) -> Iterator[Bar]:
    gains = {name: [one.gain for one in runs] for name, runs in found.items()}
    for name in (name for name in ("rank 8", "rank 1", "full") if name in gains):
        least = min(gains[name])
        yield Bar(f"{name}: least gain", f"{least:+.3f}", "+0.150", least >= 0.15)
    if {"rank 1", "full"} <= gains.keys():
        share = fmean(gains["rank 1"]) / fmean(gains["full"])
        yield Bar("rank 1: gain over that of full", f"{share:.2f}", "0.70", share >= 0.7)
    if "shuffled" in gains:
        most = max(gains["shuffled"])
        yield Bar("shuffled: largest gain", f"{most:+.3f}", "at most 0", most <= 0)
    if {"rank 8", "publish off"} <= gains.keys():
        off = found["publish off"]
        growth = min(one.last_gap / one.first_gap for one in off)
        yield Bar("publish off: growth of the gap", f"{growth:,.0f}x", "1,000x", growth >= 1000)
        lost = fmean(one.drawn for one in found["rank 8"]) - fmean(one.drawn for one in off)
        yield Bar("publish off: drawn reward lost", f"{lost:.3f}", "0.050", lost >= 0.05)


def speed_bars(speed: Speed) -> Iterator[Bar]:
    for name, rates in speed.passes.items():
        shown = f"{rates.ratio:.2f} ({rates.ours:.0f} and {rates.theirs:.0f} tokens/s)"
        yield Bar(f"trainer over TRL, {name}", shown, "1.00", rates.ratio >= 1.0)
    rates = speed.steps
    shown = f"{rates.ratio:.2f} ({rates.ours:.1f} and {rates.theirs:.1f} drawn tokens/s)"
    yield Bar("whole steps over TRL", shown, "1.30", rates.ratio >= 1.3)
    yield Bar("engine/trainer gap, SmolLM2", f"{speed.gap:.1e}", "at most 1e-4", speed.gap <= 1e-4)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--variants", nargs="*", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--model-seed", type=int, default=0)
    options = parser.parse_args()
    logging.disable_progress_bar()
    bars: list[Bar] = []
    python = os.environ.get("ROOKERY_TRL_PYTHON", "")
    if python:
        with tempfile.TemporaryDirectory() as place:
            bars += speed_bars(compare(python, Path(place)))
    torch.set_num_threads(1)  # the start model must be the same everywhere
    bars += learning_bars(learn(options.variants, options.seeds, model_seed=options.model_seed))
    print(f"\n{'':<34}{'measured':<36}wanted")
    for bar in bars:
        print(f"{bar.name:<34}{bar.measured:<36}{bar.wanted:<14}{'' if bar.is_met else 'MISSED'}")


if __name__ == "__main__":
    main()
