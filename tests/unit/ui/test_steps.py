"""The time left of runs of several runs: leagues and pipelines."""

import json
from pathlib import Path

import pytest

from rookery.runs import Run
from rookery.ui.live.folder import describe_run
from rookery.ui.steps import Steps, steps_left

SECONDS = {"sft": 90.0, "grpo-a": 400.0, "genome-x-founder": 45.0, "es": 250.0}
"""What each way of a league takes, give or take a tenth by seed."""


def test_a_league_tells_its_end_once_each_way_was_taken() -> None:
    """Within a third from there on; before that nobody knows."""
    names = [f"{way}-{seed}" for seed in range(4) for way in SECONDS]
    lasting = {
        name: SECONDS[name.rpartition("-")[0]] * (1 + 0.1 * (k % 3 - 1))
        for k, name in enumerate(names)
    }
    took: dict[str, float | None] = {}
    num_told = 0
    for place, name in enumerate(names):
        for part in (0.0, 0.3, 0.9):
            spent_s, own_s = part * lasting[name], (1 - part) * lasting[name]
            told_s = own_s if part else None  # nothing is told at its beginning
            left_s = steps_left(took, names[place:], spent_s=spent_s, told_s=told_s)
            true_s = own_s + sum(lasting[later] for later in names[place + 1 :])
            if left_s is None:
                assert place < len(SECONDS)
            else:
                num_told += 1
                assert left_s == pytest.approx(true_s, rel=1 / 3)
        took[name] = lasting[name]
    assert num_told >= 3 * (len(names) - len(SECONDS))


def test_steps_that_are_not_alike_foretell_nothing_of_one_another() -> None:
    took = {"labels": 100.0}
    assert steps_left(took, ["student", "search"], spent_s=5.0, told_s=60.0) is None
    assert steps_left(took, ["search"], spent_s=5.0, told_s=60.0) == 60.0
    assert steps_left(took, ["search"], spent_s=5.0, told_s=None) is None
    assert steps_left({"a-0": None}, ["a-1"], spent_s=0.0, told_s=None) is None, "it left no run"


def test_the_whole_tells_its_steps_to_the_page(tmp_path: Path) -> None:
    places = {name: tmp_path / name for name in ("a-0", "b", "a-1")}
    with Run.create(tmp_path, kind="pipeline", name="whole", config={}) as run:
        steps = Steps(places)
        with steps.told(run):
            assert steps.left_s() is None
            with Run.create(tmp_path, kind="sft", name="a-0", config={}) as step:
                step.finish()
            steps.end("a-0")
            steps.end("b")  # left out, without a run
            with Run.create(tmp_path, kind="sft", name="a-1", config={}) as step:
                step.write_json("progress.json", {"left_s": 40.0})
                assert steps.left_s() == 40.0
        progress = describe_run(run.path)["progress"]
    assert (progress["done"], progress["total"], progress["noun"]) == (2, 3, "step")
    assert progress["left_s"] == pytest.approx(40.0, abs=1.0)
    told = json.loads((tmp_path / "whole" / "progress.json").read_text())
    assert told["left_s"] == 40.0
