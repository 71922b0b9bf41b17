"""The grpo loop end to end on a tiny model: results, counts, what is kept, what stops it."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from loops.training import Inputs, run_training

from rookery.errors import TaskError, TrainError
from rookery.loops.grpo import Step
from rookery.runs import Run
from rookery.slots import SlottedModel
from rookery.testing import FakeObserver
from rookery.types import Completion, SampleRequest
from rookery.ui.live.reading import OpenRun
from rookery.weights import read_adapter


def make_run(folder: Path, name: str = "x") -> Run:
    return Run.create(folder, kind="grpo", config={}, name=name)


async def test_a_run_ends_with_a_report_and_a_trained_adapter(
    grpo_inputs: Inputs, plain_model: SlottedModel, tmp_path: Path
) -> None:
    steps: list[Step] = []
    with make_run(tmp_path) as run:
        report = await run_training(
            run, grpo_inputs, model=plain_model, observer=FakeObserver(steps.append)
        )
        kept = {path.name for path in (run.path / "checkpoints").iterdir()}
        weights = {f"adapter_step_{step}" for step in {5, report.chosen_step} - {0}}
        assert kept == weights | {"trainer_step_5"}
        texts = {event.payload["texts"] for event in run.events("batch")}
        assert len(texts) == 5 and set(run.blobs.digests()) == texts, "all else is removed"
        gaps = [event.payload for event in run.events("gap")]
    shown = [OpenRun(tmp_path / "x", "x").step(number) for number in range(5)]
    assert all(step["is_whole"] and len(step["groups"]) == 2 for step in shown)
    rollouts = [rollout for group in shown[0]["groups"] for rollout in group["rollouts"]]
    examples = {(one.text, one.reward) for one in report.steps[0].examples}
    assert examples <= {(one["text"], one["reward"]) for one in rollouts}
    assert [row.name for row in report.rows] == ["trained", "base model"]
    assert report.trained is not None and report.trained.gain is not None
    assert [one.step for one in report.checkpoints] == [0, 2, 4, 5]
    assert [step.step for step in steps] == [0, 1, 2, 3, 4]
    assert read_adapter(tmp_path / "x" / "trained").factors
    metrics = steps[1].metrics
    assert metrics["grpo/logprob_gap"] < 1e-5 and metrics["grpo/staleness"] == 0
    assert metrics["train/ratio"] == pytest.approx(1.0, abs=1e-5)
    assert {"time/draw_s", "time/train_s", "time/publish_s", "reward/mean"} <= set(metrics)
    assert len(gaps) == 5 and all(step["is_fresh"] for step in gaps)
    tokens = [token for step in gaps for answer in step["answers"] for token in answer]
    assert tokens and all(text for text, _ in tokens)
    assert all(abs(gap) < 1e-4 for _, gap in tokens), "of the same weights"


@pytest.mark.parametrize(
    ("cut", "staleness"),
    [({"top_k": 5, "temperature": 0.7}, 0), ({"min_p": 0.2, "top_p": 0.95}, 1)],
)
async def test_tokens_are_normalised_over_what_they_were_drawn_from(
    grpo_inputs: Inputs,
    plain_model: SlottedModel,
    tmp_path: Path,
    cut: dict[str, float],
    staleness: int,
) -> None:
    drawing = {"max_tokens": 6, **cut}
    with make_run(tmp_path) as run:
        await run_training(
            run, grpo_inputs, model=plain_model, drawing=drawing, staleness=staleness, steps=2
        )
        metrics = [event.payload["metrics"] for event in run.events("step")]
    assert all(step["grpo/logprob_gap"] < 1e-5 for step in metrics)
    assert metrics[0]["train/ratio"] == pytest.approx(1.0, abs=1e-5)


async def test_a_kl_term_holds_the_policy_to_its_start(
    grpo_inputs: Inputs, plain_model: SlottedModel, tmp_path: Path
) -> None:
    drifts = {}
    for name, loss in {
        "free": {"type": "grpo"},
        "held": {"type": "grpo", "kl": {"weight": 10.0, "estimator": "k2"}},
    }.items():
        with make_run(tmp_path, name) as run:
            await run_training(run, grpo_inputs, model=plain_model, loss=loss, steps=4)
            start, last = run.path / "start", run.path / "checkpoints/adapter_step_4"
            drifts[name] = _distance(start, last)
            metrics = [event.payload["metrics"] for event in run.events("step")]
        if name == "held":
            assert metrics[0]["train/kl"] == pytest.approx(0.0, abs=1e-9)
            assert metrics[-1]["train/kl"] > 0
    assert drifts["held"] < drifts["free"]


def _distance(one: Path, other: Path) -> float:
    a, b = read_adapter(one), read_adapter(other)
    return sum(float((a.factors[n].b - b.factors[n].b).norm()) for n in a.factors)


async def test_groups_of_equal_rewards_are_replaced_and_counted(
    grpo_inputs: Inputs, plain_model: SlottedModel, tmp_path: Path
) -> None:
    """The answers to every second draw are made the same."""

    def wrap(part: Any) -> Any:
        return _Repeating(part) if hasattr(part, "sample") else part

    with make_run(tmp_path) as run:
        await run_training(run, grpo_inputs, model=plain_model, wrap=wrap, steps=2)
        batches = [event.payload for event in run.events("batch")]
        metrics = [event.payload["metrics"] for event in run.events("step")]
    assert batches[0]["positions"] == [0, 2] and batches[0]["next_position"] == 3
    assert metrics[0]["grpo/num_equal_groups"] == 1 and metrics[0]["grpo/num_groups"] == 2


class _Repeating:
    """Answers every second request with n times its first answer."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._num = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def sample(self, requests: Sequence[SampleRequest]) -> list[tuple[Completion, ...]]:
        answers = []
        for own in await self._engine.sample(requests):
            answers.append((own[0],) * len(own) if self._num % 2 and len(own) > 1 else own)
            self._num += len(own) > 1
        return answers


async def test_a_reward_that_never_varies_ends_the_run(
    grpo_inputs: Inputs, plain_model: SlottedModel, tmp_path: Path
) -> None:
    tasksets = grpo_inputs.document()["tasksets"]
    tasksets = [{**tasksets[0], "scorer": {"type": "exact"}}]
    with make_run(tmp_path) as run, pytest.raises(TaskError, match="there is nothing to learn"):
        await run_training(run, grpo_inputs, model=plain_model, tasksets=tasksets)


async def test_failed_rollouts_are_counted_and_too_many_end_the_run(
    grpo_inputs: Inputs, plain_model: SlottedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_run(tmp_path) as run:
        await run_training(run, grpo_inputs, model=plain_model, steps=1, group_size=4)
        [batch] = [event.payload for event in run.events("batch")]
        [step] = [event.payload for event in run.events("step")]
        task = step["examples"][0]["task"]
    monkeypatch.setenv("FAILING_TASKS", task)
    options: dict[str, Any] = {"steps": 1, "group_size": 4}
    with make_run(tmp_path, "y") as run, pytest.raises(TaskError, match="4 of 8 rollouts failed"):
        await run_training(run, grpo_inputs, model=plain_model, **options)
    with Run.open(tmp_path / "y") as run:
        assert run.counts().get("batch") is None
        result = await run_training(
            run, grpo_inputs, model=plain_model, max_failed_share=0.6, **options
        )
        [event] = run.events("step")
        assert event.payload["metrics"]["grpo/num_failed_rollouts"] == 4
        assert event.payload["positions"] != batch["positions"]
        assert any("4 of 12 rollouts failed" in warning for warning in result.warnings)


async def test_an_engine_that_answers_with_other_weights_ends_the_run(
    grpo_inputs: Inputs, plain_model: SlottedModel, tmp_path: Path
) -> None:
    """It keeps serving the first version under the names of the later ones."""

    def wrap(part: Any) -> Any:
        return _Stale(part) if hasattr(part, "sample") else part

    with make_run(tmp_path) as run, pytest.raises(TrainError, match="more than max_gap"):
        await run_training(
            run, grpo_inputs, model=plain_model, wrap=wrap, staleness=1, max_gap=1e-4
        )


class _Stale:
    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def sample(self, requests: Sequence[SampleRequest]) -> Any:
        own = [replace(request, model=self._engine.base) for request in requests]
        return await self._engine.sample(own)

    async def score(self, requests: Sequence[Any]) -> Any:
        return await self._engine.score(
            [replace(request, model=self._engine.base) for request in requests]
        )
