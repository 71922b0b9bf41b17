"""Failures of an evolution are data: recorded with a kind and a sentence, never a score of 0."""

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from loops.evolve.toy import (
    FIRST,
    ToyExecutor,
    decided_states,
    evolve_toy,
    propose_new,
    toy_config,
    toy_model,
    toy_outcome,
)

from rookery.errors import (
    ConfigError,
    EngineDownError,
    EngineError,
    ExecutorError,
    FleetSettingsError,
)
from rookery.loops.evolve import proposer
from rookery.loops.evolve.parts import Iteration
from rookery.ports import Observer
from rookery.runtime.retry import Backoff
from rookery.sandbox import EvaluationOutcome, Failure
from rookery.sandbox.outcome import FailureKind
from rookery.types import Job, JobCancelled, JobFailed, JobOutcome, TextReply, TextRequest


def failing(kind: FailureKind) -> Any:
    """An evaluator that scores the first program and nothing else."""

    def outcome(code: str) -> EvaluationOutcome:
        if code == FIRST.code:
            return toy_outcome(code)
        failure = Failure(kind=kind, reason="It went wrong.", type="ValueError")
        return EvaluationOutcome(
            metrics={}, artifacts={}, seconds=0.1, output_tail="", failure=failure
        )

    return outcome


@pytest.mark.parametrize("kind", ["timeout", "memory"])
async def test_a_failed_evaluation_is_a_failure_of_its_kind(tmp_path: Path, kind: Any) -> None:
    result = await evolve_toy(
        tmp_path,
        toy_config(max_iterations=3),
        model=toy_model(propose_new),
        executor=ToyExecutor(failing(kind)),
    )
    [failure] = result.failures
    assert (failure.kind, failure.count) == (kind, 3)
    assert "It went wrong." in failure.first_message
    assert result.num_programs == 1
    assert any("No iteration gave a program" in warning for warning in result.warnings)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ("", "empty_answer"),
        ("Nothing to change.", "no_diff"),
        ("<<<<<<< SEARCH\nx = 77\n=======\nx = 2\n>>>>>>> REPLACE", "search_not_found"),
        ("<<<<<<< SEARCH\nx = 1\n=======\nx = 1\n>>>>>>> REPLACE", "no_change"),
        ("<<<<<<< SEARCH\nx = 1\n=======\nx = 2  # z\n>>>>>>> REPLACE", "repeated"),
    ],
)
async def test_an_answer_without_a_new_program_is_a_failure(
    tmp_path: Path, answer: str, kind: str
) -> None:
    config = toy_config(max_iterations=3, diff_based_evolution=True, database={"num_islands": 1})
    executor = ToyExecutor()
    result = await evolve_toy(
        tmp_path, config, model=toy_model(lambda request: answer), executor=executor
    )
    kinds = {failure.kind: failure.count for failure in result.failures}
    assert kinds.get(kind, 0) >= (2 if kind == "repeated" else 3)
    assert all(failure.first_message for failure in result.failures)
    assert len(executor.jobs) <= 2 + result.num_committed + kinds.get("repeated", 0)


async def test_metrics_without_a_score_are_a_failure(tmp_path: Path) -> None:
    def outcome(code: str) -> EvaluationOutcome:
        metrics = {"note": "fine"} if code != FIRST.code else {"combined_score": 0.1}
        return EvaluationOutcome(metrics=metrics, artifacts={}, seconds=0.1, output_tail="")

    result = await evolve_toy(tmp_path, toy_config(max_iterations=2), executor=ToyExecutor(outcome))
    assert [failure.kind for failure in result.failures] == ["no_score"]


async def test_a_program_that_ends_two_workers_is_poison(tmp_path: Path) -> None:
    executor = ToyExecutor(is_lost=lambda job: job.attempt == 2)
    result = await evolve_toy(tmp_path, toy_config(max_iterations=4), executor=executor)
    [poison] = [failure for failure in result.failures if failure.kind == "poison"]
    assert (poison.count, poison.first_iteration) == (1, 2)
    assert "It was told to be lost." in poison.first_message
    assert len([job for job in executor.jobs if job.attempt == 2]) == 2


async def test_lost_workers_count_over_sessions(tmp_path: Path) -> None:
    """One worker lost before the hub was killed, one after: that is two."""
    config = toy_config(max_iterations=1)

    class LoseThenHang(ToyExecutor):
        async def submit(self, job: Job) -> JobOutcome:
            if job.attempt == 1 and [j for j in self.jobs if j.attempt == 1]:
                second.set()
                await asyncio.Event().wait()
            return await super().submit(job)

    second = asyncio.Event()
    executor = LoseThenHang(is_lost=lambda job: job.attempt == 1)
    task = asyncio.ensure_future(evolve_toy(tmp_path, config, executor=executor))
    await asyncio.wait_for(second.wait(), 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    again = ToyExecutor(is_lost=lambda job: job.attempt == 1)
    result = await evolve_toy(tmp_path, config, executor=again)
    assert len(again.jobs) == 1
    assert [failure.kind for failure in result.failures] == ["poison"]


async def test_an_evaluator_that_raises_is_tried_again_without_cascade(tmp_path: Path) -> None:
    failed: Counter[str] = Counter()

    def outcome(code: str) -> EvaluationOutcome:
        failed[code] += 1
        return toy_outcome(code) if failed[code] > 2 or code == FIRST.code else broken(code)

    broken = failing("error")
    own = {"cascade_evaluation": False, "max_retries": 2}
    executor = ToyExecutor(outcome)
    result = await evolve_toy(
        tmp_path, toy_config(max_iterations=1, evaluator=own), executor=executor
    )
    assert len(executor.jobs) == 4
    assert result.num_committed == 1


async def test_a_task_that_raises_twice_is_a_failure(tmp_path: Path) -> None:
    class Raising(ToyExecutor):
        async def submit(self, job: Job) -> JobOutcome:
            done = await super().submit(job)
            if job.attempt <= 0:
                return done
            return JobFailed(error="The sandbox broke.", seconds=0.0, worker="toy")

    result = await evolve_toy(tmp_path, toy_config(max_iterations=1), executor=Raising())
    [failure] = result.failures
    assert (failure.kind, failure.first_message) == ("evaluation", "The sandbox broke.")


async def test_an_executor_that_closes_ends_the_run_to_be_resumed(tmp_path: Path) -> None:
    class Closing(ToyExecutor):
        async def submit(self, job: Job) -> JobOutcome:
            if job.attempt == 3:
                return JobCancelled(reason="The executor was closed.")
            return await super().submit(job)

    with pytest.raises(ExecutorError, match="closed"):
        await evolve_toy(
            tmp_path,
            toy_config(max_iterations=5),
            model=toy_model(propose_new),
            executor=Closing(),
        )
    result = await evolve_toy(tmp_path, toy_config(max_iterations=5))
    assert result.num_iterations == 5


async def test_a_first_program_that_fails_is_refused_before_any_model_call(tmp_path: Path) -> None:
    model = toy_model()
    executor = ToyExecutor(
        lambda code: EvaluationOutcome(
            metrics={},
            artifacts={},
            seconds=0.1,
            output_tail="",
            failure=Failure(kind="error", reason="No such thing."),
        )
    )
    with pytest.raises(ConfigError, match=r"first program gets no score.*No such thing"):
        await evolve_toy(tmp_path, toy_config(), model=model, executor=executor)
    assert not model.requests


class FlakyModel:
    """Raises what it is told to, then answers."""

    def __init__(self, *errors: Exception) -> None:
        self._errors = list(errors)
        self._model = toy_model()
        self.num_calls = 0

    async def reply(self, request: TextRequest) -> TextReply:
        self.num_calls += 1
        if self._errors:
            raise self._errors.pop(0)
        return await self._model.reply(request)


class Seen(Observer[Iteration]):
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.iterations: list[Iteration] = []
        self.sentences: list[str] = []
        self.shares: list[float] = []

    def on_step(self, step: Iteration) -> None:
        self.iterations.append(step)

    def on_budget(self, share: float) -> None:
        self.shares.append(share)

    def on_phase(self, name: str) -> None:
        self.sentences.append(name)


async def test_a_model_that_fails_is_asked_again_then_the_attempt_fails(tmp_path: Path) -> None:
    model = FlakyModel(EngineError("Too long."), EngineError("Too long."), EngineError("Once."))
    config = toy_config(max_iterations=2, rookery={"in_flight": 1})
    result = await evolve_toy(tmp_path, config, model=model)
    assert model.num_calls == 4
    [failure] = result.failures
    assert (failure.kind, failure.count, failure.first_message) == ("model", 1, "Too long.")


async def test_a_model_that_is_down_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proposer, "WHILE_DOWN", Backoff(first_s=0.01, longest_s=60.0))
    model = FlakyModel(*[EngineDownError("No server answers.")] * 6)
    seen = Seen()
    result = await evolve_toy(tmp_path, toy_config(), model=model, observer=seen)
    assert result.num_iterations == 20
    assert not [failure for failure in result.failures if failure.kind == "model"]
    assert model.num_calls == 26
    assert seen.sentences and "No server answers." in seen.sentences[0]
    assert len(seen.iterations) == 20


async def test_a_model_that_stays_down_ends_the_run_which_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proposer, "WHILE_DOWN", Backoff(first_s=0.01, longest_s=60.0))
    config = toy_config(rookery={"model_down_s": 0.05})
    model = FlakyModel(*[EngineDownError("No server answers.")] * 1000)
    with pytest.raises(EngineDownError, match="model_down_s"):
        await evolve_toy(tmp_path, config, model=model)
    assert all(states == ["planned"] for states in decided_states(tmp_path).values())
    result = await evolve_toy(tmp_path, config)
    assert result.num_iterations == 20


async def test_settings_that_a_model_refuses_end_the_run_at_once_which_resumes(
    tmp_path: Path,
) -> None:
    seen, model = Seen(), FlakyModel(FleetSettingsError("It wants a key."))
    with pytest.raises(ConfigError, match="It wants a key"):
        await evolve_toy(tmp_path, toy_config(), model=model, observer=seen)
    assert not seen.sentences, "it is not waited for"
    assert all(states == ["planned"] for states in decided_states(tmp_path).values())
    result = await evolve_toy(tmp_path, toy_config())
    assert result.num_iterations == 20


@pytest.mark.parametrize("seed", range(2))
async def test_every_attempt_is_decided_once_under_random_faults(tmp_path: Path, seed: int) -> None:
    """Lost workers, late answers, several sessions, in both modes."""
    rng = random.Random(seed)
    mode = "deterministic" if seed % 2 else "steady"
    config = toy_config(max_iterations=30, rookery={"mode": mode, "lag": 5})
    model = toy_model()
    num_cut = 0
    for _ in range(20):
        executor = ToyExecutor(
            is_lost=lambda job: rng.random() < 0.2, delay_s=lambda job: rng.random() * 0.004
        )
        task = asyncio.ensure_future(evolve_toy(tmp_path, config, model=model, executor=executor))
        try:
            await asyncio.wait_for(task, rng.random() * 0.3)
            break
        except TimeoutError:
            num_cut += 1
        except ConfigError:  # the first program lost its worker twice
            num_cut += 1
    else:
        await evolve_toy(tmp_path, config, model=model)
    states = decided_states(tmp_path)
    assert sorted(states) == list(range(1, 31))
    for recorded in states.values():
        assert len(set(recorded)) == len(recorded)
        assert len({"committed", "failed"} & set(recorded)) == 1
    assert len(model.requests) <= 30 + num_cut * config.rookery.in_flight


async def test_what_was_tried_is_told(tmp_path: Path) -> None:
    seen = Seen()
    await evolve_toy(tmp_path, toy_config(), observer=seen)
    assert [one.num_decided for one in seen.iterations] == list(range(1, 21))
    assert {one.number for one in seen.iterations} == set(range(1, 21))
    for one in seen.iterations:
        assert (one.score is None) == bool(one.failure)
        assert bool(one.message) == bool(one.failure)
    assert any(one.is_best for one in seen.iterations)


async def test_the_part_of_the_budget_that_is_spent_is_told(tmp_path: Path) -> None:
    """By the evolution alone: a million iterations that a budget ends have no other end."""
    seen = Seen()
    budget = {"max_hours": 0.05}
    config = toy_config(rookery={"budget": budget, "baselines": ["best_of_n"]})
    await evolve_toy(tmp_path, config, observer=seen)
    own = [one for one in seen.iterations if not one.series]
    assert len(seen.shares) == len(own) < len(seen.iterations)
    assert 0 < seen.shares[0] <= seen.shares[-1] < 1
