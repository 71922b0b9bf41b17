"""What an evolution obeys: budgets, targets, confirmation, back-pressure, baselines, judges."""

import asyncio
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest
from loops.evolve.toy import (
    FIRST,
    ToyExecutor,
    decided_states,
    evolve_toy,
    number_in,
    propose,
    propose_new,
    toy_config,
    toy_model,
)

from rookery.compat.openevolve import read_checkpoint
from rookery.errors import EngineDownError
from rookery.loops.evolve import scheduler
from rookery.loops.evolve.config import EvolveBudgetConfig, EvolveConfig
from rookery.loops.evolve.order import BacklogLimit
from rookery.loops.evolve.problem import EvaluationRequest, FirstProgram
from rookery.loops.evolve.program import ProgramRecord
from rookery.loops.evolve.scheduler import PER_WORKER
from rookery.ports import TextModel
from rookery.reports import EvolveReport
from rookery.sandbox import EvaluationOutcome
from rookery.testing import FakeTextModel
from rookery.types import Job, JobOutcome, TextReply, TextRequest, TokenUsage


class CountingModel:
    """Every reply costs 60 prompt and 40 completion tokens; or does not say what it costs."""

    def __init__(self, *, is_reported: bool = True) -> None:
        self._is_reported = is_reported
        self.num_calls = 0

    async def reply(self, request: TextRequest) -> TextReply:
        self.num_calls += 1
        await asyncio.sleep(0)
        usage = TokenUsage(prompt_tokens=60, completion_tokens=40) if self._is_reported else None
        return TextReply(text=propose(request), finish_reason="stop", model="toy", usage=usage)


class EndingModel:
    """Down after so many replies."""

    def __init__(self, *, num_replies: int) -> None:
        self.num_replies = num_replies

    async def reply(self, request: TextRequest) -> TextReply:
        if not self.num_replies:
            raise EngineDownError("No server answers.")
        self.num_replies -= 1
        return TextReply(text=propose(request), finish_reason="stop", model="toy", usage=None)


@pytest.mark.parametrize(
    "budget",
    [
        {"max_tokens": 2000},
        {
            "max_usd": 2.0,
            "usd_per_million_prompt_tokens": 1000.0,
            "usd_per_million_answer_tokens": 1000.0,
        },
    ],
)
async def test_a_budget_ends_the_run_before_it_spends_more(
    tmp_path: Path, budget: dict[str, float]
) -> None:
    model = CountingModel()
    config = toy_config(max_iterations=1000, rookery={"budget": budget})
    report = await evolve_toy(tmp_path, config, model=model)
    assert 14 <= model.num_calls <= 20
    assert "allows no further iteration" in report.stop_reason
    assert report.tokens.prompt == 60 * model.num_calls
    assert report.usd is None or report.usd <= 2.0
    assert sorted(decided_states(tmp_path)) == list(range(1, model.num_calls + 1))


@pytest.mark.parametrize("mode", ["steady", "deterministic"])
async def test_a_small_budget_is_kept_with_many_calls_in_flight(tmp_path: Path, mode: str) -> None:
    model = CountingModel()
    own = {"budget": {"max_tokens": 350}, "in_flight": 16, "mode": mode}
    report = await evolve_toy(tmp_path, toy_config(max_iterations=50, rookery=own), model=model)
    assert (model.num_calls, report.num_iterations) == (3, 3)
    assert "allows no further iteration" in report.stop_reason


@pytest.mark.parametrize("mode", ["steady", "deterministic"])
async def test_hours_do_not_wait_for_a_model_that_is_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """What was decided counts; what was planned is asked for when the run goes on."""
    monkeypatch.setattr(scheduler, "DOWN_POLL_S", 0.01)
    model = EndingModel(num_replies=10)
    own = {"budget": {"max_hours": 1.0 / 3600}, "mode": mode}
    config = toy_config(max_iterations=30, rookery=own)
    async with asyncio.timeout(30):
        report = await evolve_toy(tmp_path, config, model=model)
    assert 0 < report.num_iterations <= 10 and "hours" in report.stop_reason
    model.num_replies = 1000
    longer = toy_config(max_iterations=30, rookery={"mode": mode})
    assert (await evolve_toy(tmp_path, longer, model=model)).num_iterations == 30
    assert decided_states(tmp_path).keys() == set(range(1, 31))


@pytest.mark.parametrize("mode", ["steady", "deterministic"])
async def test_hours_end_the_run(tmp_path: Path, mode: str) -> None:
    own = {"budget": {"max_hours": 0.5 / 3600}, "mode": mode}
    config = toy_config(max_iterations=100_000, rookery=own)
    report = await evolve_toy(tmp_path, config)
    assert 0 < report.num_iterations < 100_000
    assert "hours" in report.stop_reason
    again = await evolve_toy(tmp_path, config)
    assert again.num_iterations >= report.num_iterations, "what was found is told, then it ends"
    assert again.num_iterations < 100_000
    assert again.best is not None and report.best is not None
    assert (again.best.score or 0.0) >= (report.best.score or 0.0)


async def test_a_budget_of_tokens_needs_a_model_that_counts_them(tmp_path: Path) -> None:
    config = toy_config(rookery={"budget": {"max_tokens": 10**9}, "in_flight": 1})
    report = await evolve_toy(tmp_path, config, model=CountingModel(is_reported=False))
    assert "does not report its tokens" in report.stop_reason
    assert report.num_iterations < 20
    assert report.tokens.prompt is None


def test_a_budget_of_money_needs_prices() -> None:
    with pytest.raises(ValueError, match="max_usd needs prices"):
        EvolveBudgetConfig(max_usd=1.0)


async def test_a_target_ends_the_run(tmp_path: Path) -> None:
    config = toy_config(max_iterations=1000, rookery={"target_score": 0.05})
    report = await evolve_toy(tmp_path, config)
    assert "reached the target" in report.stop_reason
    assert report.num_iterations < 1000
    assert report.best is not None and (report.best.score or 0) >= 0.05
    assert sorted(decided_states(tmp_path)) == list(range(1, report.num_iterations + 1))


class NoisyEvaluator:
    """The second program of all has 0.9 the first time and 0.11 after that; others 0.3."""

    def __init__(self) -> None:
        self.times: Counter[str] = Counter()

    def __call__(self, code: str) -> EvaluationOutcome:
        self.times[code] += 1
        score = 0.3
        if code != FIRST.code and code == list(self.times)[1]:
            score = 0.9 if self.times[code] == 1 else 0.11
        metrics = {"combined_score": score}
        return EvaluationOutcome(metrics=metrics, artifacts={}, seconds=1.0, output_tail="")


async def test_a_best_that_does_not_hold_is_demoted(tmp_path: Path) -> None:
    evaluator = NoisyEvaluator()
    executor = ToyExecutor(evaluator)
    config = toy_config(max_iterations=3, rookery={"confirm": 3, "in_flight": 1, "workers": 1})
    result = await evolve_toy(tmp_path, config, model=toy_model(propose_new), executor=executor)
    seeds = [EvaluationRequest.decode(job.payload).seed for job in executor.jobs]
    assert len(set(seeds)) == len(seeds) == 7, "each time with other random numbers"
    noisy = list(evaluator.times)[1]
    assert evaluator.times[noisy] == 4
    assert [times for code, times in evaluator.times.items() if code != noisy] == [1, 1, 1]
    assert result.num_demoted == 0
    assert result.best is not None
    assert result.best.metrics["combined_score"] == pytest.approx((0.9 + 3 * 0.11) / 4)
    config = toy_config(max_iterations=1, rookery={"confirm": 4, "in_flight": 1, "workers": 1})
    result = await evolve_toy(
        tmp_path / "four",
        config,
        model=toy_model(propose_new),
        executor=ToyExecutor(NoisyEvaluator()),
    )
    assert result.num_demoted == 1
    assert result.best is not None
    assert result.best.id == "first1"


async def test_children_wait_in_a_bounded_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evaluations are slower than the model: proposals stop when as many wait as may."""
    monkeypatch.setattr(BacklogLimit, "max_waiting", 4)
    model = toy_model(propose_new)
    most_ahead = 0

    class Slow(ToyExecutor):
        num_done = 0

        async def submit(self, job: Job) -> JobOutcome:
            nonlocal most_ahead
            ended = await super().submit(job)
            self.num_done += 1
            most_ahead = max(most_ahead, len(model.requests) - self.num_done)
            return ended

    executor = Slow(delay_s=lambda job: 0.02)
    config = toy_config(max_iterations=60, rookery={"in_flight": 4, "workers": 2})
    await evolve_toy(tmp_path, config, model=model, executor=executor)
    assert 2 <= executor.most_running <= PER_WORKER * 2
    assert most_ahead <= PER_WORKER * 2 + 4 + 4


async def test_model_calls_in_flight_are_bounded(tmp_path: Path) -> None:
    class Waiting:
        """Answers when five calls are there, and a moment later: a sixth would be seen."""

        def __init__(self) -> None:
            self.num_running = 0
            self.most_running = 0
            self._is_full = asyncio.Event()

        async def reply(self, request: TextRequest) -> TextReply:
            self.num_running += 1
            self.most_running = max(self.most_running, self.num_running)
            if self.num_running == 5:
                self._is_full.set()
            async with asyncio.timeout(60):
                await self._is_full.wait()
            await asyncio.sleep(0.005)
            self.num_running -= 1
            return await toy_model().reply(request)

    for mode in ("steady", "deterministic"):
        model = Waiting()
        config = toy_config(max_iterations=30, rookery={"mode": mode, "lag": 20, "in_flight": 5})
        await evolve_toy(tmp_path / mode, config, model=model)
        assert model.most_running == 5


async def evolve_with(
    folder: Path,
    config: EvolveConfig,
    *,
    programs: list[FirstProgram | ProgramRecord],
    models: Mapping[str, TextModel],
) -> EvolveReport:
    return await evolve_toy(
        folder,
        config,
        programs=programs,
        models=models,
        executor=ToyExecutor(),
    )


async def test_several_first_programs_each_have_an_island(tmp_path: Path) -> None:
    second = FirstProgram(code="x = 40\n", language="python", suffix=".py")
    config = toy_config(max_iterations=10)
    result = await evolve_with(
        tmp_path, config, programs=[FIRST, second], models={"toy": toy_model()}
    )
    assert result.first is not None and result.first.id == "first2"
    cells = {cell.program: cell.island for cell in result.cells}
    assert cells.get("first1", 0) == 0 and cells.get("first2", 1) == 1


async def test_a_checkpoint_is_a_first_population(tmp_path: Path) -> None:
    config = toy_config(max_iterations=20)
    before = await evolve_toy(tmp_path / "old", config)
    checkpoint = read_checkpoint(tmp_path / "old" / "toy" / "checkpoints" / "checkpoint_20")
    failed = ProgramRecord(id="bad", code="x = 987654\n", metrics={"error": 0.0, "timeout": True})
    result = await evolve_with(
        tmp_path / "new",
        config,
        programs=[failed, *checkpoint.programs],
        models={"toy": toy_model()},
    )
    assert result.first is not None and before.best is not None
    assert result.first.score == before.best.score
    new = read_checkpoint(tmp_path / "new" / "toy" / "checkpoints" / "checkpoint_20")
    assert failed.code not in [program.code for program in new.programs if not program.parent_id]
    assert result.num_iterations == 20


async def test_objectives_give_a_front(tmp_path: Path) -> None:
    config = toy_config(rookery={"pareto": ("combined_score", "x")})
    report = await evolve_toy(tmp_path, config)
    assert report.objectives == ("combined_score", "x")
    assert report.front
    assert all({"combined_score", "x"} <= set(row.metrics) for row in report.front)


async def test_all_models_of_the_ensemble_are_asked_by_their_weights(tmp_path: Path) -> None:
    models = {name: FakeTextModel(propose, name=name) for name in ("a", "b", "c")}
    llm = {
        "models": [{"name": "a", "weight": 3.0}, {"name": "b"}, {"name": "c", "weight": 0.0}],
        "temperature": 0.25,
    }
    config = toy_config(max_iterations=40, llm=llm)
    report = await evolve_with(tmp_path, config, programs=[FIRST], models=models)
    num_plays = {arm.name: arm.num_plays for arm in report.models}
    assert num_plays["a"] > num_plays["b"] > num_plays["c"] == 0
    assert sum(num_plays.values()) == 40
    assert {request.temperature for request in models["a"].requests} == {0.25}


async def test_baselines_spend_as_much(tmp_path: Path) -> None:
    model = CountingModel()
    config = toy_config(rookery={"baselines": ("best_of_n", "sequential")})
    report = await evolve_toy(tmp_path, config, model=model)
    assert [row.name for row in report.baselines] == ["best_of_n", "sequential"]
    for row in report.baselines:
        assert row.num_iterations == 20
        assert row.best is not None and row.best >= 0.01
        assert row.tokens.prompt == report.tokens.prompt
    assert model.num_calls == 60
    again = CountingModel()
    repeated = await evolve_toy(tmp_path, config, model=again)
    assert again.num_calls == 0
    assert repeated.baselines == report.baselines
    assert not report.stop_reason
    assert all("2000 tokens allows no further" in row.note for row in report.baselines)


async def test_a_baseline_has_as_many_hours(tmp_path: Path) -> None:
    """Its calls come one after the other and its model never ends: the hours do."""

    class Alone(CountingModel):
        async def reply(self, request: TextRequest) -> TextReply:
            answer = await super().reply(request)
            if self.num_calls > 24:  # the evolution and what it had in flight are over
                await asyncio.sleep(0.3)
            return answer

    own = {"baselines": ("sequential",), "budget": {"max_hours": 3 / 3600}}
    report = await evolve_toy(tmp_path, toy_config(rookery=own), model=Alone())
    [row] = report.baselines
    assert row.num_iterations < 20 and "hours" in row.note


async def test_a_baseline_with_shorter_prompts_tries_more_for_as_many_tokens(
    tmp_path: Path,
) -> None:
    config = toy_config(rookery={"baselines": ("best_of_n", "sequential"), "in_flight": 1})
    report = await evolve_toy(tmp_path, config, model=toy_model(propose_new))
    assert report.tokens.prompt is not None and report.tokens.completion is not None
    spent = report.tokens.prompt + report.tokens.completion
    for row in report.baselines:
        assert row.tokens.prompt is not None and row.tokens.completion is not None
        own = row.tokens.prompt + row.tokens.completion
        assert spent - 3 * own / row.num_iterations < own <= spent
    assert 20 < report.baselines[0].num_iterations < 80


async def test_baselines_without_counted_tokens_try_as_often(tmp_path: Path) -> None:
    config = toy_config(rookery={"baselines": ("best_of_n", "sequential")})
    model = CountingModel(is_reported=False)
    report = await evolve_toy(tmp_path, config, model=model)
    assert [row.num_iterations for row in report.baselines] == [20, 20]
    assert not any(row.note for row in report.baselines)


@pytest.mark.parametrize(
    "database",
    [{"num_islands": 2}, {"num_islands": 1, "feature_bins": 1, "archive_size": 1}],
    ids=["in the population", "replaced by a better child"],
)
async def test_best_of_n_asks_for_children_of_the_first_program_alone(
    tmp_path: Path, database: dict[str, int]
) -> None:
    model = toy_model()
    own = {"baselines": ("best_of_n",)}
    config = toy_config(max_iterations=10, database=database, rookery=own)
    report = await evolve_toy(tmp_path, config, model=model)
    assert report.baselines[0].num_iterations >= 10
    for request in model.requests[10:]:
        user = request.messages[-1].content
        assert "x = 1\n" in user and user.count("x = ") == 1


async def test_judges_change_the_score(tmp_path: Path) -> None:
    judge = FakeTextModel(lambda request: json.dumps({"clarity": 1.0}), name="judge")
    models = {"toy": toy_model(propose_new), "judge": judge}
    config = toy_config(
        max_iterations=3,
        evaluator={"use_llm_feedback": True},
        llm={"models": [{"name": "toy"}], "evaluator_models": [{"name": "judge"}]},
    )
    result = await evolve_with(tmp_path, config, programs=[FIRST], models=models)
    assert len(judge.requests) == 4
    assert result.first is not None
    assert result.first.metrics["combined_score"] == pytest.approx(0.7 * 0.01 + 0.3)
    assert result.first.metrics["llm_clarity"] == pytest.approx(0.1)


async def test_a_judge_that_says_nothing_is_a_failure(tmp_path: Path) -> None:
    answers = iter(['{"clarity": 1.0}'])
    judge = FakeTextModel(lambda request: next(answers, "I cannot say."), name="judge")
    models = {"toy": toy_model(propose_new), "judge": judge}
    config = toy_config(
        max_iterations=2,
        evaluator={"use_llm_feedback": True},
        llm={"models": [{"name": "toy"}], "evaluator_models": [{"name": "judge"}]},
    )
    report = await evolve_with(tmp_path, config, programs=[FIRST], models=models)
    assert [(failure.kind, failure.count) for failure in report.failures] == [("judge", 2)]


async def test_artifacts_are_kept_up_to_their_limit(tmp_path: Path) -> None:
    def outcome(code: str) -> EvaluationOutcome:
        return EvaluationOutcome(
            metrics={"combined_score": 0.001 * (number_in(code) % 1000)},
            artifacts={"small": "fine", "large": "y" * 500},
            seconds=0.0,
            output_tail="",
        )

    config = toy_config(
        max_iterations=1, checkpoint_interval=1, evaluator={"max_artifact_storage": 100}
    )
    result = await evolve_toy(tmp_path, config, executor=ToyExecutor(outcome))
    assert result.best is not None
    [program] = [
        one
        for one in read_checkpoint(tmp_path / "toy" / "checkpoints" / "checkpoint_1").programs
        if one.id == result.best.id
    ]
    assert program.artifacts["small"] == "fine"
    assert "large (500 bytes)" in str(program.artifacts["left_out"])
