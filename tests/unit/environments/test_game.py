"""Games as rollouts: rewards, limits, failures, and what is remembered of them."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from environments import games
from transformers import PreTrainedTokenizerFast

from rookery.environments import Game, GameConfig, GameEvaluator, GameSampler
from rookery.errors import EngineDownError, TaskError
from rookery.rollout import RolloutLog
from rookery.runs import Run
from rookery.tasks.scorers import ExactConfig
from rookery.tasks.taskset import Taskset
from rookery.tasks.template import Template
from rookery.testing import BASE, FakeSampler
from rookery.types import Completion, Draw, ModelRef, SampleRequest, SamplingParams, Task

TASK = Task(id="set/1", prompt="p", reference="7", source="set")
OTHER = Task(id="set/2", prompt="q", reference="8", source="set")
PARAMS = SamplingParams(max_tokens=5, n=3)


@pytest.fixture
def template(byte_tokenizer: PreTrainedTokenizerFast) -> Template:
    return Template(byte_tokenizer)


def make_game(name: str, sampler: FakeSampler, template: Template, **limits: float) -> Game:
    config = GameConfig.model_validate({"function": f"{games.__file__}:{name}", **limits})
    return Game(config, sampler=sampler, template=template)


async def test_a_game_of_two_turns_is_one_rollout(template: Template) -> None:
    asked: list[SampleRequest] = []

    def reply(request: SampleRequest, _: int) -> tuple[int, ...]:
        asked.append(request)
        return (50, 51) if len(asked) == 1 else (52,)

    sampler = FakeSampler(reply=reply, decode=template.decode)
    game = make_game("two_words", sampler, template)
    rollout = await game.play(TASK, BASE, params=PARAMS, seed=5)
    assert rollout.error == "" and rollout.completion is not None
    [sequence] = rollout.sequences
    assert sequence.tokens == (*asked[1].prompt, 52)
    assert [sequence.tokens[place] for place in sequence.drawn] == [50, 51, 52]
    assert rollout.completion.tokens == (50, 51, 52)
    first = template.decode((50, 51))
    assert rollout.reward == len(first) + len(template.decode((52,)))
    assert rollout.completion.text.splitlines()[:2] == ["system: s", "user: a"]
    assert f"assistant: {first}" in rollout.completion.text
    assert {request.params.n for request in asked} == {1}
    assert len({request.params.seed for request in asked}) == 2


@pytest.mark.parametrize(
    ("name", "limits", "error"),
    [
        ("endless", {"max_turns": 3}, r"max_turns \(3\)"),
        ("endless", {"max_tokens": 9}, r"max_tokens \(9\)"),
        ("waits", {"limit_s": 0.05}, "took longer than 0.05 s"),
        ("silent", {}, "without a reply"),
        ("at_once", {}, "twice at a time"),
        ("says_nonsense", {}, "role and content"),
        ("returns_text", {}, "return a finite number"),
        ("returns_no_reward", {}, "no reward among them"),
        ("returns_nan", {}, "nan"),
        ("guess", {}, "Task set/1: the game .*guess failed: invalid literal"),
    ],
)
async def test_a_game_that_fails_is_a_rollout_that_says_why(
    template: Template,
    name: str,
    limits: dict[str, float],
    error: str,
) -> None:
    task = Task(id="set/1", prompt="p", reference="seven", source="set")
    game = make_game(name, FakeSampler(), template, **limits)
    rollout = await game.play(task, BASE, params=PARAMS, seed=0)
    assert rollout.reward is None
    assert re.search(error, rollout.error), rollout.error


async def test_the_last_reply_gets_the_tokens_that_are_left(template: Template) -> None:
    asked: list[int] = []

    def reply(request: SampleRequest, _: int) -> tuple[int, ...]:
        asked.append(request.params.max_tokens)
        return (50,) * request.params.max_tokens

    game = make_game("endless", FakeSampler(reply=reply), template, max_tokens=12)
    await game.play(TASK, BASE, params=PARAMS, seed=0)
    assert asked == [5, 5, 2]


def test_a_plain_function_is_refused(template: Template) -> None:
    with pytest.raises(TaskError, match="write async def"):
        make_game("plain", FakeSampler(), template)
    with pytest.raises(TaskError, match="has no missing; its functions are"):
        make_game("missing", FakeSampler(), template)


class Down(FakeSampler):
    async def sample(self, requests: Sequence[SampleRequest]) -> list[tuple[Completion, ...]]:
        raise EngineDownError(f"closed before {len(requests)}")


@pytest.mark.parametrize("name", ["endless", "swallows"])
async def test_an_engine_that_is_down_ends_the_run_whatever_the_game_does(
    template: Template, name: str
) -> None:
    with pytest.raises(EngineDownError):
        await make_game(name, Down(), template).play(TASK, BASE, params=PARAMS, seed=0)


async def test_a_reply_that_cannot_be_had_fails_its_game_alone(template: Template) -> None:
    sampler = FakeSampler()
    broken = ModelRef(name="policy", version="broken")
    sampler.failing.add(broken)
    game = make_game("endless", sampler, template)
    rollout = await game.play(TASK, broken, params=PARAMS, seed=0)
    assert "Turn 1: policy@broken was told to fail" in rollout.error


async def test_the_games_of_a_group_draw_apart_and_are_repeated_exactly(
    template: Template,
) -> None:
    sampler = FakeSampler(decode=template.decode)
    drawer = GameSampler(make_game("two_words", sampler, template), params=PARAMS)
    draws = [Draw(task=TASK, seed=1), Draw(task=OTHER, seed=2)]
    groups = await drawer.draw(BASE, draws)
    assert [group.task for group in groups] == [TASK, OTHER]
    assert all(len(group.rollouts) == 3 for group in groups)
    played = [r.completion.tokens for g in groups for r in g.rollouts if r.completion is not None]
    assert len(set(played)) == 6
    assert await drawer.draw(BASE, draws) == groups


async def test_games_of_an_evaluation_are_played_once_and_remembered(
    template: Template, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = FakeSampler(reply=lambda _request, _index: (50,), decode=lambda _tokens: "w8 ")
    monkeypatch.setenv("FAILING_TASKS", OTHER.id)
    taskset = Taskset(
        name="set",
        tasks=(TASK, OTHER),
        scorer=ExactConfig(),
        sampling=SamplingParams(temperature=0.0, n=2),
    )
    models = [BASE, ModelRef(name="policy", version="1"), ModelRef(name="copy", version="1")]
    game = make_game("guess", sampler, template, max_turns=2)
    with Run.create(tmp_path, kind="grpo", config={}, name="x") as run:
        evaluator = GameEvaluator(game, tasksets=[taskset], log=RolloutLog(run))
        evaluations = await evaluator.evaluate(models, [TASK, OTHER])
        assert sampler.num_samples == 2 * 2 * 2
        assert await evaluator.evaluate(models, [TASK]) != []
        assert sampler.num_samples == 2 * 2 * 2
    for model, evaluation in zip(models, evaluations, strict=True):
        assert evaluation.model == model
        assert evaluation.rewards == {TASK.id: 1.0 - 1 / 92}
        assert "no game today" in evaluation.errors[OTHER.id]
        assert evaluation.num_tokens == 4
