"""Task x Sampler x Scorer -> Group, for many models and tasks together, and their means.

    evaluator = TasksetEvaluator(sampler, template=template, tasksets=[taskset])
    groups = await evaluator.rollout(models, tasks)       # every answer
    evaluations = await evaluator.evaluate(models, tasks)  # a reward per task and model

All models get the same tasks and random numbers, in the same batch. Answers in the `RolloutLog`,
failed ones included, are not drawn again.

| stage    | consumes       | produces             | waits for                          |
|----------|----------------|----------------------|------------------------------------|
| blocks   | tasks x models | requests             | a place among the blocks in flight |
| log      | requests       | known rollouts       | the disk                           |
| sampler  | new requests   | completions, scores  | the engine or the fleet            |
| scorer   | completions    | rollouts             | the judge, if there is one         |
| log      | rollouts       | durable events       | the disk                           |
"""

import asyncio
import hashlib
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from rookery.errors import EngineDownError, EngineError, FleetDownError, FleetError, TaskError
from rookery.ports import Sampler
from rookery.rollout.asking import Answer, Asking
from rookery.runs import FORMER, Event, NewEvent, Run
from rookery.runtime.concurrency import AskOnce, together
from rookery.tasks.taskset import Taskset
from rookery.tasks.template import Template
from rookery.types import (
    Completion,
    Evaluation,
    Group,
    ModelRef,
    Rollout,
    SamplingParams,
    Task,
)

__all__ = ["BlockProgress", "RolloutLog", "TasksetEvaluator", "mean_by_source", "set_scores_aside"]

# The rollouts of a run: nothing is asked twice, and a failed answer stays failed.
#
# log = RolloutLog(run)                    # reads the run's events
# log.find({key: (model, task)})           # {key: rollout}; {} if not asked yet
# await log.add(rollouts)                  # durable before it returns


ROLLOUT = "rollout"


def set_scores_aside(run: Run, *, further: Collection[str], only_failed: bool) -> None:
    """Set rollouts aside (all, or the failed ones) to be scored again from their answers. Events of
    the `further` kinds, which follow from rewards, are set aside too."""

    def keep(event: Event) -> bool:
        return only_failed and event.kind == ROLLOUT and event.payload["reward"] is not None

    def key(event: Event) -> str:
        return _answer_key(event.key) if event.kind == ROLLOUT else event.key

    run.set_aside((ROLLOUT, *further), keep=keep, key=key)


def _answer_key(key: str) -> str:
    """The key without its scorer, by which another scorer finds the answer. A key ends with the
    scorer and the answer's number; see `Asking.key`."""
    rest, _, index = key.rpartition("|")
    return f"{rest.rpartition('|')[0]}|{index}"


class RolloutLog:
    """Rollouts by (weights, task, way of asking), failed ones included.

    With a run, they are events on disk, and memory does not grow with their number.
    """

    def __init__(self, run: Run | None = None) -> None:
        self._run = run
        self._memory: dict[str, Mapping[str, Any]] = {}
        """The rollouts, if there is no run."""
        self.has_answers = run is not None and run.last(f"{FORMER}{ROLLOUT}") is not None
        """Whether rollouts were set aside to be scored again."""

    def __len__(self) -> int:
        return len(self._memory) if self._run is None else self._run.counts().get(ROLLOUT, 0)

    def find(self, asked: "Mapping[str, Pair]") -> dict[str, Rollout]:
        """Return the known rollouts of these keys."""
        return {
            key: Rollout(
                task=asked[key][1],
                completion=_read_completion(payload["completion"], asked[key][0]),
                reward=payload["reward"],
                error=payload["error"],
                metrics=payload.get("metrics", {}),
            )
            for key, payload in self._payloads(ROLLOUT, list(asked)).items()
        }

    def find_answers(self, asked: "Mapping[str, Pair]") -> dict[str, Answer]:
        """Return the answers of rollouts that were set aside."""
        former = {key: _answer_key(key) for key in asked}
        payloads = self._payloads(f"{FORMER}{ROLLOUT}", list(former.values()))
        found: dict[str, Answer] = {}
        for key, (model, _) in asked.items():
            payload = payloads.get(former[key], {})
            completion = _read_completion(payload.get("completion"), model)
            if completion is not None:
                found[key] = Answer(completion, payload.get("metrics", {}).get("certainty"))
        return found

    async def add(self, rollouts: Sequence[tuple[str, ModelRef, Rollout, int]]) -> None:
        """Store a block of rollouts, all or none, so that a resumed run decides by the same
        answers. Returns once they are on disk; blocks added together share one wait for it.

        The first of two answers to one question is kept.
        """
        news = {
            key: {
                "model": model.served_name,
                "task": rollout.task.id,
                "reward": rollout.reward,
                "error": rollout.error,
                "completion": _write_completion(rollout.completion),
                **({"metrics": dict(rollout.metrics)} if rollout.metrics else {}),
                "num_tokens": num_tokens,
            }
            for key, model, rollout, num_tokens in rollouts
        }
        if self._run is None:
            for key, new in news.items():
                self._memory.setdefault(key, new)
        else:
            await self._run.append_many(
                [
                    NewEvent(kind=ROLLOUT, payload=new, key=key, first_wins=True)
                    for key, new in news.items()
                ]
            )

    def _payloads(self, kind: str, keys: Sequence[str]) -> dict[str, Mapping[str, Any]]:
        if self._run is None:
            return {key: self._memory[key] for key in keys if key in self._memory}
        return {key: event.payload for key, event in self._run.find(kind, keys).items()}


def _write_completion(completion: Completion | None) -> dict[str, object] | None:
    if completion is None:
        return None
    return {
        "text": completion.text,
        "tokens": completion.tokens,
        "logprobs": completion.logprobs,
        "finish_reason": completion.finish_reason,
    }


def _read_completion(payload: Mapping[str, Any] | None, model: ModelRef) -> Completion | None:
    if payload is None:
        return None
    return Completion(
        model=model,
        tokens=tuple(payload["tokens"]),
        logprobs=tuple(payload["logprobs"]),
        text=str(payload["text"]),
        finish_reason="stop" if payload["finish_reason"] == "stop" else "length",
    )


Pair = tuple[ModelRef, Task]
Rollouts = tuple[Rollout, ...]
Found = TypeVar("Found")

BLOCK_REQUESTS = 64
"""Requests per call: a kill loses at most these, per block in flight."""

NUM_BLOCKS = 16
"""Blocks in flight: enough to keep any engine's batch full while finished ones are scored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockProgress:
    """Progress by one block: its answers, and the tokens of the new ones."""

    num_rollouts: int
    num_tokens: int


class TasksetEvaluator:
    """Measures models on tasks of the given tasksets, over one sampler."""

    def __init__(
        self,
        sampler: Sampler,
        *,
        template: Template,
        tasksets: Sequence[Taskset],
        log: RolloutLog | None = None,
        on_progress: Callable[[BlockProgress], None] | None = None,
    ) -> None:
        self._sampler = sampler
        self._template = template
        self._tasksets = tasksets
        self._log = log
        self._on_progress = on_progress
        self.num_rollouts = 0
        """Distinct answers used so far, drawn or from the log: a resumed run counts as an
        uninterrupted one."""
        self.num_tokens = 0
        """Tokens of these answers and their prompts."""
        self.num_answer_tokens = 0
        """Tokens of these answers alone."""
        self._counted: set[bytes] = set()
        self._once = AskOnce[Pair, Rollouts]()
        self._askings: dict[str, Asking] = {}
        for taskset in tasksets:
            if taskset.name in self._askings:
                raise TaskError(
                    f"Two tasksets are called {taskset.name!r}, and their results could not be "
                    "told apart: give one of them another name: in its config."
                )
            self._askings[taskset.name] = Asking(taskset, sampler=sampler, template=template)

    def drawing(self, num: int, **params: float) -> "TasksetEvaluator":
        """Return an evaluator over the same log that draws `num` answers per task. `params` are
        sampling parameters; without a temperature, greedy tasksets are drawn at 1. Tasks with
        scored choices are not supported."""
        return TasksetEvaluator(
            self._sampler,
            template=self._template,
            tasksets=[
                replace(taskset, sampling=_drawn_by(taskset.sampling, num, params))
                for taskset in self._tasksets
                if not self._askings[taskset.name].is_choice
            ],
            log=self._log,
        )

    def can_draw(self, task: Task) -> bool:
        """Whether the task's answers are drawn instead of chosen."""
        return task.source in self._askings and not self._askings[task.source].is_choice

    def check_lengths(self, tasks: Iterable[Task], *, context_tokens: int) -> None:
        """Raise TaskError if a task needs a longer context."""
        needed = {task.id: self._askings[task.source].num_needed_tokens(task) for task in tasks}
        too_long = {id: num for id, num in needed.items() if num > context_tokens}
        if too_long:
            worst = max(too_long, key=too_long.__getitem__)
            raise TaskError(
                f"{len(too_long)} of {len(needed)} tasks do not fit the model's context of "
                f"{context_tokens} tokens: {worst} needs {too_long[worst]}. Shorten or remove "
                "them, or take a model with a longer context."
            )

    async def evaluate(self, models: Sequence[ModelRef], tasks: Sequence[Task]) -> list[Evaluation]:
        """Return one evaluation per model, in order. A task's reward is the mean of its group."""
        start = time.monotonic()
        groups = await self.rollout(models, tasks)
        seconds = time.monotonic() - start
        return [
            self._sum_up(model, groups[i * len(tasks) : (i + 1) * len(tasks)], seconds)
            for i, model in enumerate(models)
        ]

    def _sum_up(self, model: ModelRef, groups: Sequence[Group], seconds: float) -> Evaluation:
        rewards: dict[str, float] = {}
        certainties: dict[str, float] = {}
        errors: dict[str, str] = {}
        num_tokens = num_answer_tokens = 0
        for group in groups:
            failed = [rollout.error for rollout in group.rollouts if rollout.error]
            if failed:
                errors[group.task.id] = failed[0]
            else:
                earned = [r.reward for r in group.rollouts if r.reward is not None]
                rewards[group.task.id] = sum(earned) / len(earned)
                if "certainty" in group.rollouts[0].metrics:
                    certainties[group.task.id] = group.rollouts[0].metrics["certainty"]
            num_tokens += sum(self._cost(rollout) for rollout in group.rollouts)
            num_answer_tokens += sum(map(_answer_tokens, group.rollouts))
        return Evaluation(
            model=model,
            rewards=rewards,
            errors=errors,
            num_tokens=num_tokens,
            num_answer_tokens=num_answer_tokens,
            seconds=seconds,
            certainties=certainties,
        )

    def _cost(self, rollout: Rollout) -> int:
        """Number of tokens of the prompt and the answer."""
        return len(self._template.encode(rollout.task)) + _answer_tokens(rollout)

    async def rollout(self, models: Sequence[ModelRef], tasks: Sequence[Task]) -> list[Group]:
        """Return the groups of all tasks under the first model, then under the second, ..."""
        each_model = list(dict.fromkeys(models))
        each_task = {task.id: task for task in tasks}.values()
        # Models of equal weights have equal keys and are asked once.
        questions = {self._key(m, t): (m, t) for t in each_task for m in each_model}
        known = await self._once.know(
            questions,
            self._answer,
            size=max(BLOCK_REQUESTS // max(1, len(each_model)), 1) * len(each_model),
            places=asyncio.Semaphore(NUM_BLOCKS),
        )
        self._count(known)
        return [
            Group(task=task, model=model, rollouts=known[self._key(model, task)])
            for model in models
            for task in tasks
        ]

    async def _answer(self, questions: Mapping[str, Pair]) -> dict[str, Rollouts]:
        """Find or ask the questions of one block."""
        logged = await self._find_all(questions)
        missing = {key: pair for key, pair in questions.items() if key not in logged}
        answered = await self._find_answers(missing)
        judged = self._judge([missing[key] for key in answered], list(answered.values()))
        news = dict(zip(answered, await judged, strict=True))
        unasked = [key for key in missing if key not in answered]
        asked = await self._ask([missing[key] for key in unasked]) if unasked else []
        news |= zip(unasked, asked, strict=True)
        if self._log is not None and news:
            await self._log.add(
                [
                    (f"{key}|{index}", questions[key][0], rollout, self._cost(rollout))
                    for key, rollouts in news.items()
                    for index, rollout in enumerate(rollouts)
                ]
            )
        self._tell_progress(len(questions), news.values())
        return logged | news

    def _tell_progress(self, num_rollouts: int, asked: Iterable[Rollouts]) -> None:
        if self._on_progress is not None:
            num_tokens = sum(self._cost(rollout) for rollouts in asked for rollout in rollouts)
            self._on_progress(BlockProgress(num_rollouts=num_rollouts, num_tokens=num_tokens))

    def _count(self, known: Mapping[str, Rollouts]) -> None:
        for key, rollouts in known.items():
            if self._log is not None:  # without a log, equal questions are asked again
                mark = hashlib.blake2b(key.encode(errors="backslashreplace"), digest_size=12)
                if mark.digest() in self._counted:
                    continue
                self._counted.add(mark.digest())
            self.num_rollouts += len(rollouts)
            self.num_tokens += sum(self._cost(rollout) for rollout in rollouts)
            self.num_answer_tokens += sum(map(_answer_tokens, rollouts))

    def read_answer(self, rollout: Rollout) -> str | None:
        """Return the answer as the scorer reads it; equal texts are equal answers."""
        if rollout.completion is None:
            return None
        return self._askings[rollout.task.source].scorer.read(rollout.completion)

    def _key(self, model: ModelRef, task: Task) -> str:
        return self._askings[task.source].key(model, task)

    async def _find_all(self, questions: Mapping[str, Pair]) -> dict[str, Rollouts]:
        log = self._log
        return {} if log is None else await self._find(questions, log.find)

    async def _find_answers(self, questions: Mapping[str, Pair]) -> dict[str, tuple[Answer, ...]]:
        """Find answers that were set aside to be scored again."""
        log = self._log
        if log is None or not log.has_answers:
            return {}
        return await self._find(questions, log.find_answers)

    async def _find(
        self,
        questions: Mapping[str, Pair],
        find: Callable[[Mapping[str, Pair]], Mapping[str, Found]],
    ) -> dict[str, tuple[Found, ...]]:
        """Find the questions with all answers in the log."""
        numbered = {
            key: [f"{key}|{i}" for i in range(self._askings[task.source].num_answers)]
            for key, (_, task) in questions.items()
        }
        asked = {one: questions[key] for key, ones in numbered.items() for one in ones}
        found = await asyncio.to_thread(find, asked)  # it reads the disk
        return {
            key: tuple(found[one] for one in ones)
            for key, ones in numbered.items()
            if all(one in found for one in ones)
        }

    async def _ask(self, pairs: Sequence[Pair]) -> list[Rollouts]:
        """Ask all pairs in one call; if it fails, each pair once by itself."""
        try:
            answers = await self._answers(pairs)
        except (EngineDownError, FleetDownError):
            raise  # the engine is down: the run ends, to be resumed
        except (EngineError, FleetError) as error:
            if len(pairs) == 1:
                return [self._failed(pairs[0][1], str(error))]
            alone = await together(self._ask([pair]) for pair in pairs)
            return [rollouts for [rollouts] in alone]
        return await self._judge(pairs, answers)

    async def _judge(
        self, pairs: Sequence[Pair], answers: Sequence[tuple[Answer, ...]]
    ) -> list[Rollouts]:
        judged = iter(
            await together(
                self._askings[task.source].judge(
                    task, answer.completion, certainty=answer.certainty
                )
                for (_, task), group in zip(pairs, answers, strict=True)
                for answer in group
            )
        )
        return [tuple(next(judged) for _ in group) for group in answers]

    def _failed(self, task: Task, error: str) -> Rollouts:
        failed = Rollout(task=task, completion=None, reward=None, error=error)
        return (failed,) * self._askings[task.source].num_answers

    async def _answers(self, pairs: Sequence[Pair]) -> list[tuple[Answer, ...]]:
        """Sample and choose concurrently."""
        chosen = [self._askings[task.source].is_choice for _, task in pairs]
        to_sample = [pair for pair, is_chosen in zip(pairs, chosen, strict=True) if not is_chosen]
        to_choose = [pair for pair, is_chosen in zip(pairs, chosen, strict=True) if is_chosen]
        answers = await together([self._draw(to_sample), self._choose(to_choose)])
        sampled, picked = map(iter, answers)
        return [next(picked) if is_chosen else next(sampled) for is_chosen in chosen]

    async def _draw(self, pairs: Sequence[Pair]) -> list[tuple[Answer, ...]]:
        requests = [self._askings[task.source].sample_request(m, task) for m, task in pairs]
        drawn = await self._sampler.sample(requests) if requests else []
        return [tuple(map(Answer, completions)) for completions in drawn]

    async def _choose(self, pairs: Sequence[Pair]) -> list[tuple[Answer, ...]]:
        """Answer each pair by its likeliest choice."""
        requests = [self._askings[task.source].choice_requests(m, task) for m, task in pairs]
        flat = [request for group in requests for request in group]
        scores = iter(await self._sampler.score(flat) if flat else [])
        return [
            (self._askings[task.source].pick(task, group, [next(scores) for _ in group]),)
            for (_, task), group in zip(pairs, requests, strict=True)
        ]


def _answer_tokens(rollout: Rollout) -> int:
    return 0 if rollout.completion is None else len(rollout.completion.tokens)


def _drawn_by(usual: SamplingParams, num: int, params: Mapping[str, float]) -> SamplingParams:
    changes: dict[str, Any] = {"temperature": usual.temperature or 1.0, **params}
    return replace(usual, n=num, **changes)


def mean_by_source(
    rewards: Mapping[str, float], tasks: Iterable[Task], *, by_weight: bool = False
) -> dict[str, float]:
    """Mean reward per source, weighted or unweighted; tasks without a reward are left out."""
    sums: dict[str, list[tuple[float, float]]] = {}
    for task in tasks:
        if task.id in rewards:
            weight = task.weight if by_weight else 1.0
            sums.setdefault(task.source, []).append((weight, weight * rewards[task.id]))
    totals = {source: map(sum, zip(*pairs, strict=True)) for source, pairs in sums.items()}
    return {source: earned / weight for source, (weight, earned) in totals.items()}
