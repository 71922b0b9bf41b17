"""The proposer learns: from what, when its arm joins, how it is judged, what is counted."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from loops.evolve.test_loop_resume import read_export
from loops.evolve.toy import (
    ToyExecutor,
    evolve_toy,
    number_in,
    parent_of,
    propose,
    propose_new,
    toy_config,
    toy_model,
)

from rookery.errors import ConfigError, TrainError
from rookery.loops.evolve.config import EvolveConfig
from rookery.loops.evolve.learning import Lesson, Trained, choose_answers
from rookery.loops.evolve.report import export_training_data
from rookery.loops.evolve.search_state import Answered
from rookery.ports import TextModel
from rookery.reports import EvolveReport
from rookery.reports.evolve import LearnedRow
from rookery.runs import Run
from rookery.sandbox import EvaluationOutcome
from rookery.testing import FakeTextModel
from rookery.types import TextRequest


@pytest.mark.parametrize(
    ("gains", "weights"),
    [
        ({"a": [0.0, 0.0]}, {}),
        ({"a": [0.2]}, {"a0": 0.5}),
        ({"a": [0.2, 0.0, 0.0]}, {"a0": 0.75}),
        ({"a": [0.2, 0.2, 0.2]}, {"a0": 0.25, "a1": 0.25, "a2": 0.25}),
        ({"a": [0.1, 0.4]}, {"a1": 7 / 12}),
        ({"a": [4.0, 0.0], "b": [0.004, 0.0]}, {"a0": 2 / 3, "b0": 2 / 3}),
    ],
    ids=["nothing gained", "alone", "rare", "easy", "below the mean", "by group"],
)
def test_answers_weigh_by_their_group(
    gains: dict[str, list[float]], weights: dict[str, float]
) -> None:
    answers = [
        Answered(f"{base}{number}", base, gain)
        for base, group in gains.items()
        for number, gain in enumerate(group)
    ]
    chosen = {answered.answer: weight for answered, weight in choose_answers(answers)}
    assert chosen == pytest.approx(weights)


def climb(chance: float) -> Callable[[TextRequest], str]:
    """A model that raises x by 1 with this chance, and else lowers it."""

    def reply(request: TextRequest) -> str:
        seed = request.seed or 0
        is_better = seed * 7919 % 1000 < 1000 * chance
        x = parent_of(request) + 1 if is_better else -(seed + 1)
        return f"```python\nx = {x}\n```"

    return reply


def endless(code: str) -> EvaluationOutcome:
    x = int(code.split("=")[1])
    return EvaluationOutcome(
        metrics={"combined_score": x / 1000}, artifacts={}, seconds=0.0, output_tail=""
    )


class ToyLearner:
    """Its adapters answer by a function."""

    def __init__(self, reply: Callable[[TextRequest], str], *, fails: object = None) -> None:
        self._reply = reply
        self._fails = fails
        self.lessons: list[list[Lesson]] = []
        self.retired: list[str] = []

    async def train(self, lessons: Sequence[Lesson], *, name: str, seed: int) -> Trained:
        self.lessons.append([*lessons])
        if isinstance(self._fails, Exception):
            raise self._fails
        return Trained(
            write=lambda folder: (folder / "adapter").write_text(name) and None,
            num_rows=len(lessons),
            num_tokens=1000,
            num_answer_tokens=100,
            seconds=0.25,
            loss=0.5,
        )

    def open(self, folder: Path, *, name: str) -> TextModel:
        assert (folder / "adapter").read_text() == name
        return FakeTextModel(self._reply, name=name)

    async def retire(self, name: str) -> None:
        self.retired.append(name)


def config(**values: Any) -> EvolveConfig:
    own = {
        "mode": "deterministic",
        "engine": {"model": "not opened"},
        "learn": {"every": 40},
        **values.pop("rookery", {}),
    }
    return toy_config(**{"max_iterations": 120, "database": {}, "rookery": own, **values})


async def learn(
    folder: Path, learner: ToyLearner, settings: EvolveConfig, *, base: float = 0.25
) -> tuple[LearnedRow, ...]:
    model, executor = toy_model(climb(base)), ToyExecutor(endless)
    result = await evolve_toy(folder, settings, model=model, executor=executor, learner=learner)
    return result.learned


@pytest.mark.parametrize(
    ("chance", "least", "most"), [(0.0, 0.02, 0.3), (0.75, 0.6, 0.95)], ids=["useless", "helpful"]
)
async def test_a_helpful_adapter_gets_share_and_a_useless_one_starves(
    tmp_path: Path, chance: float, least: float, most: float
) -> None:
    settings = config(max_iterations=200, rookery={"learn": {"every": 100}})
    [row] = await learn(tmp_path, ToyLearner(climb(chance)), settings)
    assert (row.name, row.iteration, row.num_answers, row.error) == ("learned-1", 100, 100, "")
    assert 4 <= row.num_groups <= row.num_rows < 50
    assert (row.tokens, row.seconds, row.loss) == (1000, 0.25, 0.5)
    given = {model.name: model for model in row.models}
    assert sum(model.num_plays for model in row.models) == 100
    assert least < given["learned-1"].num_plays / 100 < most
    assert (given["learned-1"].gain or 0) > (given["toy"].gain or 0) or not chance


async def test_what_is_learned_is_what_improved(tmp_path: Path) -> None:
    learner = ToyLearner(climb(0.5))
    await learn(tmp_path, learner, config(max_iterations=60))
    [lessons] = learner.lessons
    for lesson in lessons:
        x = int(lesson.answer.split("=")[1].strip("` \n"))
        assert x > 0 and "# Current Program" in lesson.user and lesson.system
        assert 0 < lesson.weight < 1


async def test_arms_appear_at_fixed_iterations_whatever_ends_a_session(tmp_path: Path) -> None:
    settings = config(rookery={"learn": {"every": 40}})
    rows = await learn(tmp_path / "whole", ToyLearner(climb(0.5)), settings)
    assert [row.iteration for row in rows] == [40, 80]
    cut = ToyLearner(climb(0.5), fails=KeyError("The session ends here."))
    with pytest.raises(KeyError):
        await learn(tmp_path / "cut", cut, settings)
    again = ToyLearner(climb(0.5))
    await learn(tmp_path / "cut", again, config(max_iterations=70))
    assert again.lessons == cut.lessons, "repeated from its start with the same answers"
    last = ToyLearner(climb(0.5))
    resumed = await learn(tmp_path / "cut", last, settings)
    assert len(last.lessons) == 1, "what is trained is not trained again"
    assert read_export(tmp_path / "cut") == read_export(tmp_path / "whole")
    assert "learned-1" in read_export(tmp_path / "whole")
    assert resumed == rows
    with Run.view(tmp_path / "cut" / "toy") as view:
        assert [event.key for event in view.events("learned")] == ["1", "2"]


async def test_a_steady_search_goes_on_meanwhile_and_resumes(tmp_path: Path) -> None:
    steady = {"mode": "steady", "learn": {"every": 30}}
    first = await learn(tmp_path, ToyLearner(climb(0.5)), config(max_iterations=90, rookery=steady))
    assert [row.error for row in first] == [""] * 2
    learner = ToyLearner(climb(0.5))
    rows = await learn(tmp_path, learner, config(max_iterations=130, rookery=steady))
    assert len(rows) > len(first)
    assert [row.iteration for row in rows[: len(first)]] == [row.iteration for row in first]
    assert rows[: len(first) - 1] == first[:-1], "the last one goes on"


async def test_of_earlier_adapters_the_best_stays(tmp_path: Path) -> None:
    learner = ToyLearner(climb(0.5))
    rows = await learn(tmp_path, learner, config(rookery={"learn": {"every": 30}}))
    assert [row.name for row in rows] == ["learned-1", "learned-2", "learned-3"]
    assert len(learner.retired) == 1 and learner.retired[0] in {"learned-1", "learned-2"}
    last = {model.name for model in rows[-1].models}
    assert learner.retired[0] not in last or len(last) == 4


async def test_a_training_that_cannot_be_done_is_said_and_the_run_goes_on(tmp_path: Path) -> None:
    [row] = await learn(
        tmp_path / "few", ToyLearner(climb(0.5)), config(max_iterations=60), base=0.0
    )
    assert row.error == "0 answers to learn; a training needs 4." and not row.tokens
    learner = ToyLearner(climb(0.5), fails=TrainError("The GPU is full."))
    [row] = await learn(tmp_path / "full", learner, config(max_iterations=60))
    assert row.error == "The GPU is full."
    assert [model.name for model in row.models] == ["toy"]


async def test_a_model_that_has_the_name_of_a_trained_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"named 'learned-3'.*name it otherwise"):
        await evolve_toy(
            tmp_path, config(), models={"learned-3": toy_model()}, learner=ToyLearner(climb(0.5))
        )


async def test_what_is_trained_on_counts_for_the_budget(tmp_path: Path) -> None:
    settings = config(
        rookery={"budget": {"max_tokens": 100_000}, "baselines": ["best_of_n"]}, max_iterations=60
    )
    model, learner = toy_model(climb(0.25)), ToyLearner(climb(0.5))
    report = await evolve_toy(
        tmp_path, settings, model=model, executor=ToyExecutor(endless), learner=learner
    )
    spent = (report.tokens.prompt or 0) + (report.tokens.completion or 0)
    [baseline] = report.baselines
    used = (baseline.tokens.prompt or 0) + (baseline.tokens.completion or 0)
    assert spent < used <= spent + 1000


async def test_a_budget_of_answer_tokens_leaves_out_the_prompts_of_trainings(
    tmp_path: Path,
) -> None:
    async def run(name: str, **budget: int) -> EvolveReport:
        return await evolve_toy(
            tmp_path / name,
            config(rookery={"budget": budget}, max_iterations=60),
            model=toy_model(climb(0.25)),
            executor=ToyExecutor(endless),
            learner=ToyLearner(climb(0.5)),
        )

    whole = await run("whole")
    assert whole.spent.trained_tokens == 100, "and 900 of prompts"
    enough = await run("enough", max_answer_tokens=whole.spent.tokens + 100)
    assert enough.num_iterations == whole.num_iterations and not enough.stop_reason
    less = await run("less", max_answer_tokens=whole.spent.tokens - 50)
    assert less.num_iterations < whole.num_iterations


# What a run teaches.


def exported(folder: Path) -> list[dict[str, Any]]:
    with Run.view(folder / "toy") as view:
        text = export_training_data(view, features=toy_config().database.feature_dimensions)
    return [json.loads(line) for line in text.splitlines()]


async def test_rows_are_the_answers_that_improved_their_parent(tmp_path: Path) -> None:
    model = toy_model()
    await evolve_toy(tmp_path, toy_config(max_iterations=40), model=model)
    rows = exported(tmp_path)
    assert 0 < len(rows) < 40
    said = {(*(m.content for m in r.messages), propose(r)) for r in model.requests}
    for row in rows:
        assert [message["role"] for message in row["messages"]] == ["system", "user", "assistant"]
        texts = tuple(message["content"] for message in row["messages"])
        assert texts in said
        assert row["score"] == 1 - abs(100 - number_in(texts[-1])) / 100 > row["parent_score"]
        assert row["model"] == "toy"


async def evolve_with(
    folder: Path, models: dict[str, TextModel], *, num_iterations: int
) -> EvolveReport:
    config = toy_config(max_iterations=num_iterations, rookery={"bandit": True})
    return await evolve_toy(
        folder,
        config,
        models=models,
        executor=ToyExecutor(),
    )


async def test_models_join_and_leave_a_run_that_goes_on(tmp_path: Path) -> None:
    def models(*names: str) -> dict[str, TextModel]:
        return {name: FakeTextModel(propose_new, name=name) for name in names}

    await evolve_with(tmp_path, models("base"), num_iterations=20)
    result = await evolve_with(tmp_path, models("base", "tuned"), num_iterations=50)
    plays = {arm.name: arm.num_plays for arm in result.models}
    # How often depends on the order in which answers come.
    assert plays["base"] + plays["tuned"] == 50 and plays["tuned"] >= 1
    result = await evolve_with(tmp_path, models("other"), num_iterations=60)
    after = {arm.name: (arm.weight, arm.num_plays) for arm in result.models}
    assert after == {
        "other": (1.0, 10),
        "base": (0.0, plays["base"]),
        "tuned": (0.0, plays["tuned"]),
    }


async def test_an_attempt_of_a_model_that_left_is_put_to_another(tmp_path: Path) -> None:
    class Broken:
        async def reply(self, request: object) -> Any:
            raise KeyError("The session ends here.")

    with pytest.raises(KeyError):
        await evolve_with(tmp_path, {"gone": Broken()}, num_iterations=6)
    other = FakeTextModel(propose_new, name="other")
    result = await evolve_with(tmp_path, {"other": other}, num_iterations=6)
    assert result.num_iterations == 6 and len(other.requests) == 6
