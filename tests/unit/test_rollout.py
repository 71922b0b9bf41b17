"""Rollouts: how tasks are put, what is asked again, who fails alone, what it adds up to."""

import asyncio
import math
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import pytest
from tiny import tiny_adapter

import rookery.rollout.evaluator
from rookery.embedded import EngineConfig, run_engine
from rookery.errors import (
    EngineDownError,
    EngineError,
    FleetDownError,
    ModelError,
    RunError,
    TaskError,
)
from rookery.ports import Sampler
from rookery.rollout import BlockProgress, RolloutLog, TasksetEvaluator, mean_by_source
from rookery.runs import Event, NewEvent, Run
from rookery.slots import SlottedModel
from rookery.tasks.scorers import ChoiceConfig, ExactConfig, JudgeConfig, PythonConfig
from rookery.tasks.taskset import Taskset
from rookery.tasks.template import Template, load_template
from rookery.testing import BASE, FakeSampler
from rookery.types import (
    Completion,
    Message,
    ModelRef,
    SampleRequest,
    SamplingParams,
    Score,
    ScoreRequest,
    Task,
)

POET = ModelRef(name="poet", version="1")
JUDGE = ModelRef(name="judge", version="1")


Answers = TypeVar("Answers")


class Recorder(FakeSampler):
    """Remembers what it was asked, and how many calls were open at once."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.samples: list[SampleRequest] = []
        self.scores: list[ScoreRequest] = []
        self.sizes: list[int] = []
        self.num_open = self.most_open = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.entered = asyncio.Event()

    async def sample(self, requests: Sequence[SampleRequest]) -> list[tuple[Completion, ...]]:
        self.samples += requests
        return await self._through(super().sample(requests), len(requests))

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        self.scores += requests
        return await self._through(super().score(requests), len(requests))

    async def _through(self, answer: Coroutine[Any, Any, Answers], size: int) -> Answers:
        self.sizes.append(size)
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        self.entered.set()
        try:
            await self.gate.wait()
            return await answer
        finally:
            answer.close()
            self.num_open -= 1


@pytest.fixture(scope="module")
def template(tiny_folder: Path) -> Template:
    return load_template(tiny_folder)


def written(num: int = 4, name: str = "written", **params: Any) -> Taskset:
    """Tasks whose right answer is the decoded text of the fake's tokens, which is never right."""
    tasks = tuple(
        Task(id=f"{name}/{i}", prompt=f"w{5 + i} w7", reference="w90", source=name)
        for i in range(num)
    )
    sampling = SamplingParams(**{"max_tokens": 3, **params})
    return Taskset(name=name, tasks=tasks, scorer=ExactConfig(), sampling=sampling)


def chosen(
    *choices: str, num: int = 3, name: str = "chosen", normalize: Literal["sum", "mean"] = "sum"
) -> Taskset:
    tasks = tuple(
        Task(id=f"{name}/{i}", prompt=f"w{5 + i} w8", reference=choices[i % len(choices)],
             choices=choices, source=name)
        for i in range(num)
    )  # fmt: skip
    return Taskset(name=name, tasks=tasks, scorer=ChoiceConfig(normalize=normalize))


def scored_by(taskset: Taskset, folder: Path, body: str) -> Taskset:
    path = folder / "scorer.py"
    path.write_text(f"def reward(task, completion):\n    {body}\n")
    return replace(taskset, scorer=PythonConfig(function=f"{path}:reward"))


def evaluator(
    sampler: Sampler, template: Template, *tasksets: Taskset, **options: Any
) -> TasksetEvaluator:
    return TasksetEvaluator(sampler, template=template, tasksets=tasksets, **options)


async def test_groups_come_model_by_model_in_task_order(template: Template) -> None:
    taskset = written(7, n=2)
    groups = await evaluator(FakeSampler(), template, taskset).rollout(
        [POET, BASE], taskset.tasks[::-1]
    )
    assert [(g.model, g.task) for g in groups] == [
        (model, task) for model in (POET, BASE) for task in taskset.tasks[::-1]
    ]
    for group in groups:
        assert [r.task for r in group.rollouts] == [group.task] * 2
        assert all(r.completion is not None and r.completion.model == group.model
                   for r in group.rollouts)  # fmt: skip
        assert group.rollouts[0].completion != group.rollouts[1].completion


async def test_choices_of_one_token_are_labels_of_one_request(template: Template) -> None:
    sampler = Recorder(logprob=lambda model, prefix, token: -1.0 if token == 91 else -2.0)
    taskset = chosen("w90", "w91", "w92")
    groups = await evaluator(sampler, template, taskset).rollout([BASE], taskset.tasks)
    assert len(sampler.scores) == 3 and not sampler.samples
    for request, task in zip(sampler.scores, taskset.tasks, strict=True):
        assert request.tokens == template.encode(task)
        assert request.start == len(request.tokens) and request.labels == (90, 91, 92)
    completions = [c for g in groups if (c := g.rollouts[0].completion) is not None]
    assert len(completions) == 3
    assert {(c.text, c.tokens, c.logprobs) for c in completions} == {("w91", (91,), (-1.0,))}
    assert [g.rollouts[0].reward for g in groups] == [0.0, 1.0, 0.0]


async def test_the_probability_of_the_right_choice_is_measured_and_resumed(
    template: Template, tmp_path: Path
) -> None:
    """log p: 0 of the likeliest, ln 1/3 of the other: probabilities 3/4 and 1/4."""
    sampler = FakeSampler(
        logprob=lambda model, prefix, token: 0.0 if token == 91 else -math.log(3.0)
    )
    taskset = chosen("w90", "w91", num=2)
    with Run.create(tmp_path, kind="eval", config={}, name="a") as run:
        first = evaluator(sampler, template, taskset, log=RolloutLog(run))
        [asked] = await first.evaluate([BASE], taskset.tasks)
        silent = evaluator(Recorder(), template, taskset, log=RolloutLog(run))
        [found] = await silent.evaluate([BASE], taskset.tasks)
    assert asked.rewards == found.rewards == {"chosen/0": 0.0, "chosen/1": 1.0}
    assert asked.certainties == pytest.approx({"chosen/0": 0.25, "chosen/1": 0.75})
    assert found.certainties == asked.certainties


@pytest.mark.parametrize("second", ["w91", "w91 w92"])
async def test_a_model_that_allows_none_of_the_choices_has_failed(
    template: Template, tmp_path: Path, second: str
) -> None:
    """A logit that overflows leaves -inf for every other token: nothing was chosen."""
    sampler = FakeSampler(
        logprob=lambda model, prefix, token: -math.inf if model == POET else -float(token)
    )
    taskset = chosen("w90", second, num=3)
    with Run.create(tmp_path, kind="eval", config={}, name="a") as run:
        first = evaluator(sampler, template, taskset, log=RolloutLog(run))
        good, bad = await first.evaluate([BASE, POET], taskset.tasks)
        silent = evaluator(Recorder(), template, taskset, log=RolloutLog(run))
        assert [e.rewards for e in await silent.evaluate([BASE, POET], taskset.tasks)] == [
            good.rewards,
            {},
        ]
    assert list(good.rewards.values()) == [1.0, 0.0, 1.0]
    assert list(bad.errors) == [task.id for task in taskset.tasks]
    assert "gives none of the choices" in bad.errors["chosen/0"]


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("second", ["w91", "w91 w92"])
async def test_a_choice_that_is_nan_fails_the_task(
    template: Template, second: str, place: int
) -> None:
    """Neither the first choice nor the last one may be taken because it is the only number."""
    sampler = FakeSampler(
        logprob=lambda model, prefix, token: math.nan if token == 90 + place else -float(token)
    )
    taskset = chosen("w90", second, num=2)
    [found] = await evaluator(sampler, template, taskset).evaluate([BASE], taskset.tasks)
    assert (found.rewards, found.certainties) == ({}, {})
    assert list(found.errors) == [task.id for task in taskset.tasks]
    assert "nan" in found.errors["chosen/0"]


async def test_longer_choices_are_scored_whole(template: Template) -> None:
    sampler = Recorder()
    taskset = chosen("w90", "w91 w92", num=2)
    groups = await evaluator(sampler, template, taskset).rollout([BASE, POET], taskset.tasks)
    assert len(sampler.scores) == 2 * 2 * 2
    assert {request.labels for request in sampler.scores} == {()}
    for group in groups:
        prompt = template.encode(group.task)
        mine = [r for r in sampler.scores if r.model == group.model and r.tokens[:2] == prompt]
        assert [r.tokens[r.start :] for r in mine] == [(90,), (91, 92)]
        totals = [sum(s.logprobs) for s in await FakeSampler().score(mine)]
        best = totals.index(max(totals))
        [rollout] = group.rollouts
        assert rollout.completion is not None
        assert rollout.completion.text == group.task.choices[best]
        assert sum(rollout.completion.logprobs) == totals[best]


@pytest.mark.parametrize(("normalize", "best"), [("sum", "w90"), ("mean", "w91 w92")])
async def test_normalize_decides_between_short_and_long(
    template: Template, normalize: Literal["sum", "mean"], best: str
) -> None:
    """log p: -1.5 of one token, -1 and -1 of two."""
    sampler = FakeSampler(logprob=lambda model, prefix, token: -1.5 if token == 90 else -1.0)
    taskset = chosen("w90", "w91 w92", num=1, normalize=normalize)
    [group] = await evaluator(sampler, template, taskset).rollout([BASE], taskset.tasks)
    assert group.rollouts[0].completion is not None
    assert group.rollouts[0].completion.text == best


async def test_choices_that_the_tokenizer_cannot_tell_apart_are_refused(
    template: Template,
) -> None:
    taskset = chosen("w4 w5", "w4  w5")  # the tiny tokenizer splits at whitespace
    with pytest.raises(TaskError, match=r"chosen/0: two of its choices \['w4 w5', 'w4  w5'\]"):
        await evaluator(FakeSampler(), template, taskset).rollout([BASE], taskset.tasks)


async def test_all_models_draw_the_same_random_numbers(template: Template) -> None:
    sampler = Recorder()
    taskset = written(5, seed=3, n=2, temperature=0.7)
    await evaluator(sampler, template, taskset).rollout([BASE, POET], taskset.tasks)
    seeds = {
        model: {r.prompt: r.params.seed for r in sampler.samples if r.model == model}
        for model in (BASE, POET)
    }
    assert seeds[BASE] == seeds[POET] and len(set(seeds[BASE].values())) == 5
    assert {(r.params.n, r.params.temperature) for r in sampler.samples} == {(2, 0.7)}
    other = Recorder()
    again = replace(taskset, sampling=replace(taskset.sampling, seed=4))
    await evaluator(other, template, again).rollout([BASE], taskset.tasks)
    assert not {r.params.seed for r in other.samples} & set(seeds[BASE].values())


async def test_answers_do_not_depend_on_company_or_order(template: Template) -> None:
    taskset = written(150, n=2)
    whole = await evaluator(FakeSampler(), template, taskset).rollout([BASE], taskset.tasks)
    parts = evaluator(FakeSampler(), template, taskset)
    half = await parts.rollout([POET, BASE], taskset.tasks[75:])
    assert half[75:] == whole[75:]
    assert await parts.rollout([BASE], taskset.tasks[::-1]) == whole[::-1]


async def test_a_failing_model_fails_alone(template: Template) -> None:
    tasksets = [written(6, n=2), chosen("w90", "w91", num=6)]
    tasks = [task for taskset in tasksets for task in taskset.tasks]
    sound = await evaluator(FakeSampler(), template, *tasksets).evaluate([BASE, POET], tasks)
    sampler = Recorder()
    sampler.failing.add(POET)
    judged = evaluator(sampler, template, *tasksets)
    good, bad = await judged.evaluate([BASE, POET], tasks)
    assert good.rewards == sound[0].rewards and good.num_tokens == sound[0].num_tokens
    assert bad.rewards == {} and list(bad.errors) == [t.id for t in tasks]
    assert set(bad.errors.values()) == {"poet@1 was told to fail."}
    assert sampler.most_open > 2, "after the batch failed, the others are asked together again"
    assert sampler.num_open == 0


async def test_a_batch_that_fails_leaves_no_call_behind(template: Template) -> None:
    """Samples and scores are asked side by side: when one fails, the other ends with it."""

    class Stuck(Recorder):
        async def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
            if not self.scores:
                self.gate.clear()
            try:
                return await super().score(requests)
            finally:
                self.gate.set()

        async def sample(self, requests: Sequence[SampleRequest]) -> list[tuple[Completion, ...]]:
            raise EngineError("out of memory")

    sampler = Stuck()
    sampler.failing.add(BASE)
    tasksets = [written(1), chosen("w90", "w91", num=1)]
    tasks = [task for taskset in tasksets for task in taskset.tasks]
    [evaluation] = await evaluator(sampler, template, *tasksets).evaluate([BASE], tasks)
    assert len(evaluation.errors) == 2
    assert asyncio.all_tasks() == {asyncio.current_task()} and sampler.num_open == 0


async def test_a_scorer_that_raises_is_a_failed_rollout(template: Template, tmp_path: Path) -> None:
    body = "return 1 / 0 if task.id.endswith('2') else float(len(completion.tokens))"
    taskset = scored_by(written(4), tmp_path, body)
    judged = evaluator(FakeSampler(), template, taskset)
    groups = await judged.rollout([BASE], taskset.tasks)
    assert [g.rollouts[0].reward for g in groups] == [3.0, 3.0, None, 3.0]
    failed = groups[2].rollouts[0]
    assert failed.completion is not None, "what could not be judged can be looked at"
    assert "written/2" in failed.error and "division by zero" in failed.error
    [evaluation] = await judged.evaluate([BASE], taskset.tasks)
    assert list(evaluation.errors) == ["written/2"] and len(evaluation.rewards) == 3


async def test_one_bad_answer_of_several_fails_its_task_only(
    template: Template, tmp_path: Path
) -> None:
    [group] = await evaluator(FakeSampler(), template, written(1, n=3)).rollout(
        [BASE], written(1).tasks
    )
    assert group.rollouts[1].completion is not None
    bad = group.rollouts[1].completion.tokens
    body = f"return 'x' if completion.tokens == {bad} else 1.0"
    taskset = scored_by(written(2, n=3), tmp_path, body)
    [evaluation] = await evaluator(FakeSampler(), template, taskset).evaluate([BASE], taskset.tasks)
    assert list(evaluation.errors) == ["written/0"] and evaluation.rewards == {"written/1": 1.0}
    assert "returned 'x'" in evaluation.errors["written/0"]


async def test_a_judge_is_asked_about_a_whole_block_together(template: Template) -> None:
    sampler = Recorder(decode=lambda tokens: "Score: 7 .")
    scorer = JudgeConfig(model="judge@1", prompt="w4 {{ completion }}")
    taskset = replace(written(10), scorer=scorer)
    [evaluation] = await evaluator(sampler, template, taskset).evaluate([BASE], taskset.tasks)
    asked = [r for r in sampler.samples if r.model == JUDGE]
    assert len(asked) == 10 and len(evaluation.rewards) == 10
    assert sampler.most_open == 10, "a slow judge is not waited for one answer at a time"


async def test_a_judge_that_fails_fails_the_rollout(template: Template) -> None:
    sampler = FakeSampler(decode=lambda tokens: "Score: 7 .")
    sampler.failing.add(JUDGE)
    taskset = replace(written(2), scorer=JudgeConfig(model="judge@1", prompt="w4 {{ completion }}"))
    [evaluation] = await evaluator(sampler, template, taskset).evaluate([BASE], taskset.tasks)
    assert evaluation.rewards == {} and "judge@1" in evaluation.errors["written/0"]


REFERENCES: list[Any] = [["w90", "x"], 4, 0.5, True]


@pytest.mark.parametrize("reference", REFERENCES, ids=repr)
async def test_references_may_be_any_json(template: Template, reference: Any) -> None:
    taskset = written(2)
    tasks = tuple(replace(task, reference=reference) for task in taskset.tasks)
    log = RolloutLog()
    for _ in range(2):
        judged = evaluator(FakeSampler(), template, replace(taskset, tasks=tasks), log=log)
        [evaluation] = await judged.evaluate([BASE], tasks)
        assert evaluation.rewards == {"written/0": 0.0, "written/1": 0.0}


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with Run.create(tmp_path, kind="eval", name="r", config={}) as run:
        yield run


@pytest.mark.parametrize("n", [1, 3])
async def test_what_the_log_holds_is_not_asked_again(
    template: Template, tmp_path: Path, n: int
) -> None:
    tasksets = [written(5, n=n), chosen("w90", "w91", num=3), chosen("w4 w5", "w6", name="long")]
    tasks = [task for taskset in tasksets for task in taskset.tasks]
    first = FakeSampler()
    with Run.create(tmp_path, kind="eval", name="r", config={}) as run:
        judged = evaluator(first, template, *tasksets, log=RolloutLog(run))
        groups = await judged.rollout([BASE, POET], tasks)
        assert judged.num_rollouts == 2 * (5 * n + 3 + 3) == run.counts()["rollout"]
        assert first.num_samples == 2 * 5 * n
        again = evaluator(FakeSampler(), template, *tasksets, log=RolloutLog(run))
        assert await again.rollout([POET], tasks) == groups[len(tasks) :]
    second = FakeSampler()
    with Run.open(tmp_path / "r") as run:
        seen: list[BlockProgress] = []
        judged = evaluator(
            second, template, *tasksets, log=RolloutLog(run), on_progress=seen.append
        )
        assert await judged.rollout([BASE, POET], tasks) == groups
        assert run.counts()["rollout"] == 2 * (5 * n + 3 + 3)
    assert (second.num_samples, second.num_scores) == (0, 0)
    assert judged.num_rollouts == 2 * (5 * n + 3 + 3), "counted as if it had never stopped"
    assert sum(p.num_rollouts for p in seen) == 2 * len(tasks)
    assert sum(p.num_tokens for p in seen) == 0


Change = Callable[[Taskset], Taskset]
CHANGES: dict[str, Change] = {
    "sampling": lambda t: replace(t, sampling=replace(t.sampling, temperature=0.3)),
    "scorer": lambda t: replace(t, scorer=ExactConfig(ignore_case=True)),
    "prompt": lambda t: replace(t, tasks=tuple(replace(x, prompt="w50") for x in t.tasks)),
    "reference": lambda t: replace(t, tasks=tuple(replace(x, reference="w9") for x in t.tasks)),
}


@pytest.mark.parametrize("change", CHANGES)
async def test_another_way_of_asking_is_another_question(
    template: Template, run: Run, change: str
) -> None:
    """Also when a row was corrected under its old id between two resumes."""
    taskset = written(2)
    await evaluator(FakeSampler(), template, taskset, log=RolloutLog(run)).rollout(
        [BASE], taskset.tasks
    )
    changed = CHANGES[change](taskset)
    judged = evaluator(FakeSampler(), template, changed, log=RolloutLog(run))
    await judged.rollout([BASE], changed.tasks)
    assert judged.num_rollouts == 2 and run.counts()["rollout"] == 4


async def test_other_weights_are_asked_and_equal_ones_under_another_name_are_not(
    template: Template,
) -> None:
    taskset, log = written(2), RolloutLog()
    judged = evaluator(FakeSampler(), template, taskset, log=log)
    await judged.rollout([POET], taskset.tasks)
    await judged.rollout([ModelRef(name="twin", version="1")], taskset.tasks)
    assert judged.num_rollouts == 2 and len(log) == 2
    await judged.rollout([ModelRef(name="poet", version="2")], taskset.tasks)
    assert judged.num_rollouts == 4


async def test_equal_weights_under_two_names_may_be_asked_at_the_same_time(
    template: Template, run: Run
) -> None:
    taskset = written(40)
    sampler = FakeSampler()
    judged = evaluator(sampler, template, taskset, log=RolloutLog(run))
    names = [ModelRef(name=f"twin{i}", version="1") for i in range(8)]
    found = await asyncio.gather(*(judged.rollout([name], taskset.tasks) for name in names))
    assert run.counts()["rollout"] == 40 == sampler.num_samples, "equal questions are asked once"
    assert all(len(groups) == 40 for groups in found)


async def test_failed_answers_are_as_durable_as_good_ones(template: Template, run: Run) -> None:
    taskset = written(3, n=2)
    sampler = FakeSampler()
    sampler.failing.add(POET)
    first = await evaluator(sampler, template, taskset, log=RolloutLog(run)).rollout(
        [BASE, POET], taskset.tasks
    )
    assert run.counts()["rollout"] == 2 * 3 * 2
    sampler.failing.clear()
    judged = evaluator(sampler, template, taskset, log=RolloutLog(run))
    assert await judged.rollout([BASE, POET], taskset.tasks) == first
    assert sampler.num_samples == 3 * 2, "what failed is not asked again"


@pytest.mark.parametrize("error", [EngineDownError, FleetDownError])
async def test_an_engine_that_is_gone_is_no_failure_of_the_answers(
    template: Template, run: Run, error: type[Exception]
) -> None:
    taskset = written(200)

    class Dying(FakeSampler):
        num_calls = 0

        async def sample(self, requests: Sequence[SampleRequest]) -> list[tuple[Completion, ...]]:
            self.num_calls += 1
            if self.num_calls > 1:
                raise error("Every server is down.")
            return await super().sample(requests)

    judged = evaluator(Dying(), template, taskset, log=RolloutLog(run))
    with pytest.raises(error, match="Every server is down"):
        await judged.rollout([BASE], taskset.tasks)
    assert not any(event.payload["error"] for event in run.events("rollout"))
    resumed = evaluator(FakeSampler(), template, taskset, log=RolloutLog(run))
    groups = await resumed.rollout([BASE], taskset.tasks)
    assert len(groups) == 200 and not any(r.error for g in groups for r in g.rollouts)


async def test_who_waits_for_an_answer_asks_when_the_asker_was_cancelled(
    template: Template,
) -> None:
    sampler, taskset = Recorder(), written(2)
    sampler.gate.clear()
    judged = evaluator(sampler, template, taskset)
    asker = asyncio.create_task(judged.rollout([POET], taskset.tasks))
    await sampler.entered.wait()
    waiter = asyncio.create_task(judged.rollout([POET], taskset.tasks))
    await asyncio.sleep(0)
    asker.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asker
    sampler.gate.set()
    assert [g.task for g in await waiter] == list(taskset.tasks)
    assert len(sampler.samples) == 4


async def test_a_task_that_does_not_fit_the_context_is_named(template: Template) -> None:
    tasksets = [written(3), chosen("w90 w4", "w91", num=3)]
    tasks = [task for taskset in tasksets for task in taskset.tasks]
    long = replace(tasks[1], id="written/long", prompt="w5 " * 9)
    judged = evaluator(FakeSampler(), template, *tasksets)
    judged.check_lengths(tasks, context_tokens=4)
    with pytest.raises(TaskError, match=r"1 of 7 tasks .* 9 tokens: written/long needs 10"):
        judged.check_lengths([*tasks, long], context_tokens=9)
    with pytest.raises(TaskError, match=r"3 of 6 tasks .* chosen/0 needs 4"):
        judged.check_lengths(tasks, context_tokens=3)


async def test_an_answer_that_was_not_stored_is_not_known(template: Template, run: Run) -> None:
    taskset, log = written(2), RolloutLog(run)
    run.close()
    with pytest.raises(RunError):
        await evaluator(FakeSampler(), template, taskset, log=log).rollout([BASE], taskset.tasks)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_blocks_wait_for_the_disk_together(
    template: Template, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One wait after another would take longer than a GPU takes for the answers."""
    taskset, together, num_waiting = written(2), asyncio.Event(), 0
    append_many = run.append_many

    async def append_with_others(news: Sequence[NewEvent]) -> list[Event]:
        nonlocal num_waiting
        num_waiting += 1
        if num_waiting == 3:
            together.set()
        async with asyncio.timeout(10):
            await together.wait()
        return await append_many(news)

    monkeypatch.setattr(run, "append_many", append_with_others)
    judged = evaluator(FakeSampler(), template, taskset, log=RolloutLog(run))
    models = [replace(POET, version=str(i)) for i in range(3)]
    await asyncio.gather(*(judged.rollout([model], taskset.tasks) for model in models))
    assert num_waiting == 3 and run.counts()["rollout"] == 6


async def test_models_and_tasks_given_twice_are_asked_once(template: Template, run: Run) -> None:
    taskset, sampler = written(2), FakeSampler()
    judged = evaluator(sampler, template, taskset, log=RolloutLog(run))
    groups = await judged.rollout([BASE, BASE], [*taskset.tasks, taskset.tasks[0]])
    assert len(groups) == 6 and groups[0] == groups[2] == groups[3]
    assert judged.num_rollouts == 2 == sampler.num_samples


async def test_evaluations_sum_up(template: Template, tmp_path: Path) -> None:
    body = "return float(completion.tokens[0])"
    taskset = scored_by(written(3, n=2), tmp_path, body)
    seen: list[BlockProgress] = []
    judged = evaluator(FakeSampler(), template, taskset, on_progress=seen.append)
    groups = await judged.rollout([BASE, POET], taskset.tasks)
    evaluations = await judged.evaluate([BASE, POET], taskset.tasks)
    for i, evaluation in enumerate(evaluations):
        mine = groups[3 * i : 3 * i + 3]
        expected = {
            g.task.id: sum(r.completion.tokens[0] for r in g.rollouts if r.completion) / 2
            for g in mine
        }
        assert evaluation.rewards == expected and list(evaluation.rewards) == list(expected)
        assert evaluation.errors == {} and evaluation.model == (BASE, POET)[i]
        assert evaluation.num_tokens == 3 * 2 * (2 + 3), "prompt and answer, of every answer"
        assert evaluation.seconds >= 0
    assert judged.num_rollouts == 2 * 12 and judged.num_tokens == 2 * 2 * 30
    assert sum(p.num_rollouts for p in seen) == 12 and sum(p.num_tokens for p in seen) == 120


@pytest.mark.parametrize("num_models", [3, 100])
async def test_blocks_are_small_and_few_are_in_flight(
    template: Template, monkeypatch: pytest.MonkeyPatch, num_models: int
) -> None:
    monkeypatch.setattr(rookery.rollout.evaluator, "BLOCK_REQUESTS", 8)
    monkeypatch.setattr(rookery.rollout.evaluator, "NUM_BLOCKS", 3)
    sampler = Recorder()
    taskset = written(40)
    models = [ModelRef(name="m", version=str(i)) for i in range(num_models)]
    groups = await evaluator(sampler, template, taskset).rollout(models, taskset.tasks)
    assert len(groups) == 40 * num_models
    assert sampler.most_open == 3
    assert max(sampler.sizes) == max(8 // num_models * num_models, num_models)


async def test_cancellation_leaves_nothing_hanging(template: Template, run: Run) -> None:
    sampler = Recorder()
    sampler.gate.clear()
    tasksets = [written(200), chosen("w90", "w91", num=200)]
    tasks = [task for taskset in tasksets for task in taskset.tasks]
    judged = evaluator(sampler, template, *tasksets, log=RolloutLog(run))
    work = asyncio.create_task(judged.evaluate([BASE, POET], tasks))
    await sampler.entered.wait()
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert sampler.num_open == 0 and asyncio.all_tasks() == {asyncio.current_task()}
    sampler.gate.set()
    evaluations = await judged.evaluate([BASE, POET], tasks)
    assert all(len(e.rewards) == 400 for e in evaluations), "and it can be asked again"


async def test_errors_of_ours_come_out_as_they_are(template: Template) -> None:
    taskset = written(200)
    chat = replace(taskset.tasks[150], prompt=(Message(role="user", content="w5"),))
    tasks = [*taskset.tasks[:150], chat, *taskset.tasks[151:]]
    sampler = Recorder()
    with pytest.raises(ModelError, match="no chat template"):
        await evaluator(sampler, template, taskset).rollout([BASE], tasks)
    assert sampler.num_open == 0 and asyncio.all_tasks() == {asyncio.current_task()}


def test_means_are_taken_by_source() -> None:
    tasks = [*written(2, "a").tasks, *written(2, "b").tasks, *written(1, "c").tasks]
    rewards = {"a/0": 1.0, "a/1": 0.0, "b/1": 0.25}
    assert mean_by_source(rewards, tasks) == {"a": 0.5, "b": 0.25}
    sure = [replace(task, weight=3.0 if task.id == "a/0" else 1.0) for task in tasks]
    assert mean_by_source(rewards, sure, by_weight=True) == {"a": 0.75, "b": 0.25}
    assert mean_by_source(rewards, sure) == {"a": 0.5, "b": 0.25}


async def test_on_the_embedded_engine(
    template: Template, tiny_folder: Path, tiny_model: SlottedModel
) -> None:
    """Mixed models, both ways of asking, a prompt that is too long: against single requests."""
    tasksets = [
        written(3, n=2, temperature=0.8),
        chosen("w90", "w91", num=3),
        chosen("w90 w4", "w91", num=3, name="long"),
    ]
    huge = replace(tasksets[0].tasks[0], id="written/huge", prompt="w5 " * 200)
    tasks = [huge, *(task for taskset in tasksets for task in taskset.tasks)]
    config = EngineConfig(model=str(tiny_folder))
    async with run_engine(
        tiny_model,
        config=config,
        detokenize=lambda tokens: template.decode(tuple(tokens)),
        name="tiny",
    ) as engine:
        models = [engine.base, await engine.load(tiny_adapter("poet", seed=1))]
        judged = evaluator(engine, template, *tasksets, log=RolloutLog())
        groups = await judged.rollout(models, tasks)
        for model, mine in zip(models, (groups[:10], groups[10:]), strict=True):
            for failed in mine[0].rollouts:
                assert "A prompt has 200 tokens" in failed.error and failed.reward is None
            for group in mine[1:]:
                [alone] = await evaluator(engine, template, *tasksets).rollout(
                    [model], [group.task]
                )
                assert [r.reward for r in alone.rollouts] == [r.reward for r in group.rollouts]
                for one, other in zip(alone.rollouts, group.rollouts, strict=True):
                    assert one.completion is not None and other.completion is not None
                    assert one.completion.tokens == other.completion.tokens
                    assert one.completion.logprobs == pytest.approx(
                        other.completion.logprobs, abs=1e-4
                    )
        with pytest.raises(EngineError):
            await engine.unload(POET)
        await engine.unload(models[1])
    assert judged.num_rollouts == 2 * (4 * 2 + 3 + 3)
