"""The grpo loop over all weights of a model: what it serves, keeps and goes on from."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from loops.training import Inputs, run_training
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rookery.errors import RunError
from rookery.loops.grpo import Step
from rookery.loops.grpo.policy_trainer import PolicyTrainer
from rookery.runs import Run
from rookery.slots import SlottedModel
from rookery.testing import FakeObserver

FULL: dict[str, Any] = {"full": True, "learning_rate": 1e-3}
SHARED = {**FULL, "share": True}


class StopHereError(Exception):
    """Ends a run on its way."""


def stop(_: object) -> None:
    raise StopHereError


def is_by_rows() -> bool:
    """Whether torch computes a row alike beside any others, on which exactness rests."""
    x, weight = torch.randn(64, 32), torch.randn(48, 32)
    whole = torch.nn.functional.linear(x, weight)
    return all(
        torch.equal(torch.nn.functional.linear(x[:n], weight), whole[:n]) for n in (2, 7, 33)
    )


def make_run(folder: Path, name: str = "x") -> Run:
    return Run.create(folder, kind="grpo", config={}, name=name)


class Replacements:
    """Counts how often the engine was given other weights."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(self, part: Any) -> Any:
        if not hasattr(part, "replace_base"):
            return part
        replace_base = part.replace_base

        async def counted(weights: Any) -> Any:
            self.names.append(weights.name)
            return await replace_base(weights)

        part.replace_base = counted
        return part


async def test_a_run_trains_the_model_itself(
    grpo_inputs: Inputs, plain_model: SlottedModel, tmp_path: Path
) -> None:
    steps: list[Step] = []
    replacements = Replacements()
    with make_run(tmp_path) as run:
        result = await run_training(
            run, grpo_inputs, model=plain_model, wrap=replacements,
            observer=FakeObserver(steps.append), **FULL,
        )  # fmt: skip
        served = [event.payload["model"] for event in run.events("batch")]
        names = {path.name for path in (run.path / "checkpoints").iterdir()}
    best = result.chosen_step  # kept without its state
    assert names == {"trainer_step_5"} | {f"step_{step}" for step in {5, best} - {0}}
    assert [row.name for row in result.rows] == ["trained", "base model"]
    assert result.model == str(grpo_inputs.model)
    assert all(step.metrics["grpo/logprob_gap"] < 1e-5 for step in steps)
    assert len(set(served)) == 5  # a version for each step
    assert replacements.names == ["policy"] * (6 + 1) + ["base"]


async def test_weights_that_the_engine_shares_are_trained_and_kept_for_transformers(
    grpo_inputs: Inputs, plain_model: SlottedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are published with the optimizer step, and what that took is counted as publishing."""
    apply, steps, replacements = PolicyTrainer.apply, list[Step](), Replacements()

    async def apply_slowly(own: PolicyTrainer, step: int) -> dict[str, float]:
        return await apply(own, step) | {"train/publish_s": 1000.0}

    monkeypatch.setattr(PolicyTrainer, "apply", apply_slowly)
    with make_run(tmp_path) as run:
        result = await run_training(
            run, grpo_inputs, model=plain_model, wrap=replacements, keep=9,
            observer=FakeObserver(steps.append), **SHARED,
        )  # fmt: skip
        served = {event.payload["model"] for event in run.events("batch")}
        names = sorted(path.name for path in (run.path / "checkpoints").iterdir())
    assert names == [f"{kind}_{step}" for kind in ("step", "trainer_step") for step in (2, 4, 5)]
    assert result.model == "tiny" and len(served) == 5  # a version for each step
    assert replacements.names == ["policy", "base"], "only what the report compares is handed over"
    gaps = [step.metrics["grpo/logprob_gap"] for step in steps]
    assert gaps == [0.0] * 5 if is_by_rows() else max(gaps) < 1e-5
    assert all(step.metrics["time/publish_s"] > 999 for step in steps) and len(steps) == 5
    assert all(step.metrics["time/train_s"] < 0 for step in steps), "of which so much was counted"
    assert not any("train/publish_s" in step.metrics for step in steps)
    folder = tmp_path / "x/checkpoints/step_5"
    assert [path.name for path in folder.glob("*.safetensors")] == ["model.safetensors"]
    moved = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    start = AutoModelForCausalLM.from_pretrained(grpo_inputs.model).state_dict()
    assert all(not torch.equal(moved[name], start[name]) for name in start)
    assert AutoTokenizer.from_pretrained(tmp_path / "x" / "trained")("w7").input_ids == [7]


async def test_chosen_layers_and_layers_computed_again(
    grpo_inputs: Inputs, plain_model: SlottedModel, tmp_path: Path
) -> None:
    changes = {**SHARED, "full": {"layers": 1}, "trainer": {"checkpoint_layers": True}}
    with make_run(tmp_path) as run:
        await run_training(run, grpo_inputs, model=plain_model, **changes)
    moved = load_file(tmp_path / "x/checkpoints/step_5/model.safetensors")
    start = load_file(grpo_inputs.model / "model.safetensors")
    changed = {name for name in start if not torch.equal(moved[name], start[name])}
    assert changed and all(".layers.3." in name for name in changed)


async def test_a_run_goes_on_from_the_model_it_began_with_only(
    grpo_inputs: Inputs, plain_model: SlottedModel, tmp_path: Path
) -> None:
    """The folder is the user's: other weights there are found before a step is taken."""
    model = tmp_path / "model"
    shutil.copytree(grpo_inputs.model, model)
    inputs = Inputs(model=model, tasks=grpo_inputs.tasks)
    file = model / "model.safetensors"
    with make_run(tmp_path) as run, pytest.raises(StopHereError):
        await run_training(run, inputs, model=plain_model, observer=FakeObserver(stop), **SHARED)
    tensors = load_file(file)
    tensors["model.norm.weight"] += 0.5
    save_file(tensors, file, metadata={"format": "pt"})
    with (
        Run.open(tmp_path / "x") as run,
        pytest.raises(RunError, match="does not hold the weights that the run has recorded"),
    ):
        await run_training(run, inputs, model=plain_model, **SHARED)
