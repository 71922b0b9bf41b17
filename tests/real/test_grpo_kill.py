"""A grpo run that is killed at every point of its way, again and again, ends with the same weights.

Adapters and whole models, drawn before or while training. Some minutes on an idle core:

    ROOKERY_LONG=1 pytest tests/real/test_grpo_kill.py
"""

import json
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import forked
from loops import training
from loops.test_grpo_resume import check_same, final_weights, make_run, trained_positions
from loops.training import Inputs, clockless, run_training
from marks import long
from safetensors.torch import load_file
from tiny import write_tiny_model

from rookery.runs import Run
from rookery.slots import load_model

pytestmark = long

FULL: dict[str, Any] = {"full": True, "learning_rate": 1e-3}
KINDS: dict[str, dict[str, Any]] = {"lora": {}, "full": FULL, "shared": {**FULL, "share": True}}
LONG = {"steps": 24, "save_every": 2}

POINTS = [
    ("after sample", 2),
    ("reward", 9),
    ("before append batch", 2),  # the rollouts are on disk, and no event names them
    ("after append batch", 2),
    ("before forward_backward", 2),
    ("after forward_backward", 2),
    ("before optim_step", 2),
    ("after optim_step", 3),  # the weights have moved, and nobody was told
    ("before publish", 3),
    ("after publish", 3),
    ("after append_many", 4),
    ("after save", 1),  # a checkpoint: the state is written aside,
    ("after replace_folder", 1),  # the state has its place,
    ("after export", 1),  # the weights are written aside,
    ("before replace_folder", 2),
    ("before append checkpoint", 1),  # all is there, and no event names it
    ("after append checkpoint", 1),
    ("before remove_folder", 1),  # the checkpoint before it is still there,
    ("before remove_folder", 2),  # its state is gone, its weights are not,
    ("after remove_folder", 2),
    ("before prune", 2),  # rollouts that the checkpoint holds are still there
    ("after prune", 2),
]
"""Each is passed in the process that goes on after the one before was killed."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    folder = tmp_path_factory.mktemp("grpo")
    rows = [{"prompt": f"w{4 + i} w{5 + (i * 7) % 80}", "reference": "x"} for i in range(24)]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Inputs(model=write_tiny_model(folder / "tiny"), tasks=folder / "tasks.jsonl")


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
async def test_killed_at_every_point(
    inputs: Inputs, tmp_path: Path, kind: str, staleness: int
) -> None:
    changes = {**LONG, **KINDS[kind], "staleness": staleness}
    await check_killed(inputs, tmp_path, changes, POINTS)


@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore")  # torch's compiler and torchao warn of their own code
async def test_killed_with_moments_of_8_bit(inputs: Inputs, tmp_path: Path) -> None:
    pytest.importorskip("torchao.optim", reason="torchao (the extra optim) is not installed")
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128}  # less keeps 32 bit
    wide = replace(inputs, model=write_tiny_model(tmp_path / "wide", **sizes))
    changes = {**LONG, **FULL, "full": {"optimizer": "adamw_8bit"}}
    points = [("after optim_step", 3), ("after save", 1), ("after append checkpoint", 2)]
    await check_killed(wide, tmp_path, changes, points)
    [state] = (tmp_path / "killed").glob("checkpoints/trainer_step_*/trainer.safetensors")
    assert torch.uint8 in {tensor.dtype for tensor in load_file(state).values()}


async def check_killed(
    inputs: Inputs, tmp_path: Path, changes: dict[str, Any], points: Sequence[tuple[str, int]]
) -> None:
    """Killed at one point after another, a run ends as one that was left alone."""
    model = load_model(inputs.model)
    with make_run(tmp_path, "whole") as run:
        result = await run_training(run, inputs, model=model, **changes)
        expected = final_weights(run), trained_positions(run), clockless(result)
    make_run(tmp_path, "killed").close()
    for point, number in points:
        code = run_until(tmp_path, inputs, changes, point, number)
        assert code == -signal.SIGKILL, f"the run ended before it came to {point!r}"
    with Run.open(tmp_path / "killed") as run:
        assert len(trained_positions(run)) < LONG["steps"]  # it was killed on its way
        again = await run_training(run, inputs, model=model, **changes)
        check_same(run, again, expected)


def run_until(
    folder: Path, inputs: Inputs, changes: dict[str, Any], point: str, number: int
) -> int:
    """Go on with the run in a process that is killed at the point; its exit code."""
    options = {
        "inputs": [str(inputs.model), str(inputs.tasks)],
        "changes": changes,
        "kill": [point, number],
    }
    (folder / "inputs.json").write_text(json.dumps(options))
    variables = {"KILL_IN_REWARD": str(number)} if point == "reward" else {}
    with forked(training.main, folder, "killed", variables=variables) as process:
        return process.wait()
