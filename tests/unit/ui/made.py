"""A small report of each loop as it is written, for the tests of summaries, tables and pages."""

from typing import Any

__all__ = [
    "made_evolve",
    "made_grpo",
    "made_icm",
    "made_icm_row",
    "made_program",
    "made_report",
    "made_row",
    "made_step",
]


def made_row(name: str, mean: float, /, **keys: Any) -> dict[str, Any]:
    """A row of the comparison, 0.03 wide on both sides."""
    return {
        "name": name,
        "is_winner": False,
        "mean": mean,
        "low": mean - 0.03,
        "high": mean + 0.03,
        "gain": {"mean": mean - 0.7, "low": mean - 0.75, "high": mean - 0.65},
        "by_source": {"label-kind": mean, "add-two": mean - 0.1},
        "num_failed": 0,
        "note": "",
    } | keys


def made_report(**keys: Any) -> dict[str, Any]:
    """Three generations of three; `keys` replace those of the report."""
    return {
        "kind": "genome",
        "run": "demo",
        "model": "smollm2",
        "seed": 0,
        "tasksets": [_taskset("label-kind", 1.0), _taskset("add-two", 2.0)],
        "rows": [
            made_row("evolved", 0.91, is_winner=True, note="g002-c01"),
            made_row("best founder", 0.7, gain=None, note="founder-b"),
            made_row("uniform average", 0.8),
            made_row("plain sum", 0.66),
            made_row("vote of founders", 0.72),
            made_row("random search", 0.85, num_failed=2),
            made_row("vote of the best", 0.9),
            made_row("base model", 0.33),
        ],
        "generations": [_generation(index) for index in range(3)],
        "lineage": _lineage(),
        "num_candidates": 46,
        "num_rollouts": 12345,
        "num_tokens": 123456,
        "seconds": 120.5,
        "warnings": ["2 tasks of add-two could not be scored."],
    } | keys


def _taskset(name: str, weight: float) -> dict[str, Any]:
    splits = {"num_search": 40, "num_select": 16, "num_report": 60}
    return {"name": name, "weight": weight} | splits


def _generation(index: int) -> dict[str, Any]:
    return {
        "generation": index,
        "best": 0.6 + 0.1 * index,
        "mean": 0.5 + 0.1 * index,
        "worst": 0.4,
        "scores": [0.6 + 0.1 * index, 0.5 + 0.1 * index, 0.4],
        "num_candidates": 3,
        "num_dropped": 1,
        "num_failed": 0,
        "num_tokens": 12345 + index,
        "seconds": 3.2,
    }


def _lineage() -> list[dict[str, Any]]:
    """Two founders; founder-c is only named as a parent; g002-c01 wins, g002-c02 failed."""

    def made(name: str, parents: list[str], score: float | None, *, ancestor: bool = False) -> Any:
        return {
            "id": name,
            "generation": int(name[1:4]) if name.startswith("g") else 0,
            "operator": "linear" if parents else "founder",
            "parents": parents,
            "weights": [0.6, 0.4][: len(parents)],
            "score": score,
            "is_winner": name == "g002-c01",
            "is_ancestor": ancestor,
        }

    return [
        made("founder-a", [], 0.6, ancestor=True),
        made("founder-b", [], 0.5, ancestor=True),
        made("g001-c00", ["founder-a", "founder-b"], 0.7, ancestor=True),
        made("g001-c01", ["founder-b", "founder-c"], 0.4),
        made("g002-c01", ["g001-c00", "founder-a"], 0.8, ancestor=True),
        made("g002-c02", ["g001-c01"], None),
    ]


def made_grpo(**keys: Any) -> dict[str, Any]:
    """Two steps with one checkpoint each; `keys` replace those of the report."""
    gain = {"mean": 0.2, "low": 0.1, "high": 0.3}
    return {
        "kind": "grpo",
        "run": "adding",
        "model": "tiny",
        "loss": "grpo",
        "advantages": "group_relative",
        "tasksets": [{"name": "sums", "num_search": 60, "num_select": 20, "num_report": 20}],
        "rows": [
            {"name": "trained", "is_winner": True, "mean": 0.7, "low": 0.6, "high": 0.8,
             "gain": gain},
            {"name": "base model", "mean": 0.5, "low": 0.4, "high": 0.6},
        ],
        "chosen_step": 2,
        "checkpoints": [{"step": 0, "mean": 0.5}, {"step": 2, "mean": 0.7, "is_chosen": True}],
        "steps": [made_step(0), made_step(1)],
    } | keys  # fmt: skip


def made_step(number: int, **metrics: float) -> dict[str, Any]:
    return {
        "step": number,
        "model_step": number,
        "metrics": {
            "reward/mean": 0.3 + 0.1 * number,
            "train/grad_norm": 1.0 + number,
            "train/ratio": 1.0 + 1e-8 * number,
            "grpo/staleness": 0.0,
            "time/draw_s": 0.5,
        }
        | metrics,
        "examples": [{"task": "12+34", "text": "first line\nsecond line", "reward": 1.0}],
    }


def made_icm_row(name: str, /, **keys: Any) -> dict[str, Any]:
    return {
        "name": name,
        "is_winner": False,
        "note": "",
        "num_labelled": 4,
        "balance": {"True": 2, "False": 2},
        "num_violated": 0,
        "utility": 58.8,
        "agreement": 1.0,
        "accuracy": 0.75,
        "low": 0.3,
        "high": 0.95,
        "chance": 0.5,
    } | keys


def made_icm(**keys: Any) -> dict[str, Any]:
    step = {"utility": 1.0, "best": 1.0, "temperature": 10.0, "counts": [1, 1]}
    chain = {
        "batch": 0,
        "chain": 0,
        "is_best": True,
        "num_iterations": 9,
        "is_settled": True,
        "utility": 58.8,
        "steps": [step | {"iteration": i, "num_labelled": i, "num_frustrated": 1} for i in (1, 4)],
    }
    return {
        "kind": "icm",
        "run": "demo",
        "model": "smollm2",
        "data": "reviews.jsonl",
        "seed": 0,
        "labels": ["True", "False"],
        "num_items": 4,
        "num_labelled": 4,
        "verdict": "coherent",
        "warnings": [],
        "utility": 58.8,
        "balance": {"True": 2, "False": 2},
        "rows": [made_icm_row("icm", is_winner=True), made_icm_row("zero-shot", num_violated=2)],
        "chains": [chain],
        "items": [
            {"id": f"r{i}", "text": f"Review {i}", "label": "True", "margin": float(i)}
            for i in range(4)
        ],
        "tokens": {"naive": 1000, "requested": 300, "computed": 100, "baselines": 50},
        "seconds": 12.0,
    } | keys


def made_program(id: str, /, **keys: Any) -> dict[str, Any]:
    return {
        "id": id,
        "iteration": 7,
        "generation": 2,
        "island": 0,
        "parent": "p0",
        "score": 0.75,
        "metrics": {"combined_score": 0.75, "speed": -2.5},
        "model": "big",
        "changes": "Change 1: tighter loop",
        "diff": "--- a\n+++ b\n@@ -1 +1 @@\n-x = 1\n+x = 2\n unchanged",
    } | keys


def made_evolve(**keys: Any) -> dict[str, Any]:
    first = made_program("p0", iteration=0, parent="", score=0.25, diff="", model="", changes="")
    best = made_program("p7", code="x = 2\n")
    return {
        "kind": "evolve",
        "run": "packing",
        "models": [{"name": "big", "weight": 1.0, "num_plays": 9, "gain": 0.5, "cost": 900.0}],
        "seed": 42,
        "mode": "steady",
        "language": "python",
        "feature_dimensions": ["complexity", "diversity"],
        "bins": [10, 10],
        "num_iterations": 10,
        "num_failed": 3,
        "num_programs": 8,
        "first": first,
        "best": best,
        "winning_line": [first, best],
        "curve": [
            {"iteration": 0, "num_decided": 0, "best": 0.25, "program": "p0"},
            {"iteration": 7, "num_decided": 6, "best": 0.75, "program": "p7"},
        ],
        "cells": [
            {"island": island, "cell": f"{island}-3", "program": f"p{island}", "score": 0.5}
            for island in range(2)
        ],
        "failures": [
            {"kind": "timeout", "count": 3, "first_iteration": 2, "first_message": "Over 10 s."}
        ],
        "staleness": {"0": 4, "3": 6},
        "tokens": {"prompt": 1000, "completion": 234},
        "usd": 0.125,
        "seconds": 12.0,
        "evaluation_seconds": 30.0,
        "num_workers_lost": 1,
        "baselines": [{"name": "best_of_n", "best": 0.5, "num_iterations": 10, "num_failed": 1}],
        "warnings": [],
    } | keys
