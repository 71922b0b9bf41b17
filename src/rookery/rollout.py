"""Task x Sampler x Scorer -> Group, for many models and tasks together; and what they add up to.

    evaluator = TasksetEvaluator(sampler, template=template, tasksets=[taskset])
    groups = await evaluator.rollout(models, tasks)       # every answer
    evaluations = await evaluator.evaluate(models, tasks)  # a reward per task and model

All models get the same tasks, the same random numbers and the same batch. Answers that a
`RolloutLog` already holds are not asked for again.

| stage    | consumes       | produces             | waits for                          |
|----------|----------------|----------------------|------------------------------------|
| blocks   | tasks x models | requests             | a place among the blocks in flight |
| sampler  | requests       | completions, scores  | the engine or the fleet            |
| scorer   | completions    | rollouts             | a judge, if it is one              |
| log      | rollouts       | durable events       | the disk                           |
"""

import asyncio
import hashlib
import json
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from rookery.errors import EngineError, FleetError, RookeryError, TaskError
from rookery.ports import Sampler, Scorer
from rookery.rollout_log import RolloutLog
from rookery.tasks.scorers import ChoiceConfig, build_scorer
from rookery.tasks.taskset import Taskset
from rookery.tasks.template import Template
from rookery.types import (
    Completion,
    Evaluation,
    Group,
    ModelRef,
    Rollout,
    SampleRequest,
    SamplingParams,
    Score,
    ScoreRequest,
    Task,
    TokenIds,
)

__all__ = ["Progress", "TasksetEvaluator", "mean_by_source", "together"]

Result = TypeVar("Result")
Pair = tuple[ModelRef, Task]
Rollouts = tuple[Rollout, ...]

BLOCK_REQUESTS = 64
"""Requests of one call: what is lost at most when the process is killed, per block in flight."""

NUM_BLOCKS = 16
"""Blocks in flight: enough to keep any engine's batch full while finished ones are scored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What one finished block adds."""

    num_rollouts: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class _Asking:
    """How the tasks of one taskset are put and judged."""

    scorer: Scorer
    params: SamplingParams
    normalize: str
    fingerprint: str


class TasksetEvaluator:
    """An Evaluator over one sampler and the tasksets whose tasks it may be given."""

    def __init__(
        self,
        sampler: Sampler,
        *,
        template: Template,
        tasksets: Sequence[Taskset],
        log: RolloutLog | None = None,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> None:
        self._sampler = sampler
        self._template = template
        self._log = log
        self._on_progress = on_progress
        self.num_rollouts = 0
        """Answers asked for so far: those found in the log are not counted."""
        self.num_tokens = 0
        """Tokens of these answers and their prompts."""
        self._encoded: dict[str, list[tuple[TokenIds, int]]] = {}
        """Prompts with their choices by task id: a search puts them to many models."""
        self._askings: dict[str, _Asking] = {}
        for taskset in tasksets:
            if taskset.name in self._askings:
                raise TaskError(
                    f"Two tasksets are called {taskset.name!r}, and their results could not be "
                    "told apart: give one of them another name: in its config."
                )
            self._askings[taskset.name] = self._asking(taskset)

    def _asking(self, taskset: Taskset) -> _Asking:
        config = taskset.scorer
        text = json.dumps([config.model_dump(mode="json"), asdict(taskset.sampling)])
        return _Asking(
            scorer=build_scorer(config, judge=self._sampler, template=self._template),
            params=taskset.sampling,
            normalize=config.normalize if isinstance(config, ChoiceConfig) else "sum",
            fingerprint=_digest(text),
        )

    async def evaluate(self, models: Sequence[ModelRef], tasks: Sequence[Task]) -> list[Evaluation]:
        """One evaluation per model, in their order; a task's reward is the mean of its group."""
        start = time.monotonic()
        groups = await self.rollout(models, tasks)
        seconds = time.monotonic() - start
        return [
            self._sum_up(model, groups[i * len(tasks) : (i + 1) * len(tasks)], seconds)
            for i, model in enumerate(models)
        ]

    def _sum_up(self, model: ModelRef, groups: Sequence[Group], seconds: float) -> Evaluation:
        rewards: dict[str, float] = {}
        errors: dict[str, str] = {}
        num_tokens = 0
        for group in groups:
            failed = [rollout.error for rollout in group.rollouts if rollout.error]
            if failed:
                errors[group.task.id] = failed[0]
            else:
                earned = [r.reward for r in group.rollouts if r.reward is not None]
                rewards[group.task.id] = sum(earned) / len(earned)
            num_tokens += sum(self._cost(rollout) for rollout in group.rollouts)
        return Evaluation(
            model=model, rewards=rewards, errors=errors, num_tokens=num_tokens, seconds=seconds
        )

    def _cost(self, rollout: Rollout) -> int:
        """Tokens of a prompt and its answer."""
        answer = rollout.completion.tokens if rollout.completion is not None else ()
        return len(self._template.encode(rollout.task)) + len(answer)

    async def rollout(self, models: Sequence[ModelRef], tasks: Sequence[Task]) -> list[Group]:
        """Every task under every model: the groups of the first model, then of the second, ..."""
        each_model = list(dict.fromkeys(models))
        each_task = list({task.id: task for task in tasks}.values())
        block = max(1, BLOCK_REQUESTS // max(1, len(each_model)))
        places = asyncio.Semaphore(NUM_BLOCKS)  # filled and drained by the blocks
        parts = await together(
            self._block(each_model, each_task[first : first + block], places)
            for first in range(0, len(each_task), block)
        )
        groups = {(group.model, group.task.id): group for part in parts for group in part}
        return [groups[model, task.id] for model in models for task in tasks]

    async def _block(
        self, models: Sequence[ModelRef], tasks: Sequence[Task], places: asyncio.Semaphore
    ) -> list[Group]:
        async with places:
            pairs = [(model, task) for task in tasks for model in models]
            found = [self._find(*pair) for pair in pairs]
            missing = [pair for pair, known in zip(pairs, found, strict=True) if known is None]
            asked = await self._ask(missing) if missing else []
            answers = iter(asked)
            groups = [
                Group(task=task, model=model, rollouts=next(answers) if known is None else known)
                for (model, task), known in zip(pairs, found, strict=True)
            ]
            if self._log is not None:
                # In a thread: the next block's requests need not wait for the disk.
                await asyncio.to_thread(self._keep, self._log, missing, asked)
            num_tokens = sum(self._cost(rollout) for rollouts in asked for rollout in rollouts)
            self.num_rollouts += sum(len(rollouts) for rollouts in asked)
            self.num_tokens += num_tokens
            if self._on_progress is not None:
                self._on_progress(Progress(num_rollouts=len(pairs), num_tokens=num_tokens))
            return groups

    def _find(self, model: ModelRef, task: Task) -> Rollouts | None:
        if self._log is None:
            return None
        keys = [self._key(model, task, index) for index in range(self._num_answers(task))]
        found = [self._log.find(key, task, model) for key in keys]
        known = tuple(rollout for rollout in found if rollout is not None)
        return known if len(known) == len(keys) else None

    def _keep(self, log: RolloutLog, pairs: Sequence[Pair], asked: Sequence[Rollouts]) -> None:
        log.add(
            [
                (self._key(model, task, index), model, rollout, self._cost(rollout))
                for (model, task), rollouts in zip(pairs, asked, strict=True)
                for index, rollout in enumerate(rollouts)
            ]
        )

    def _num_answers(self, task: Task) -> int:
        asking = self._askings[task.source]
        return asking.params.n if asking.scorer.answer == "sample" else 1

    def _key(self, model: ModelRef, task: Task, index: int) -> str:
        """Holds what the task says: a row that was corrected under its id is another question."""
        said = _digest(repr((task.prompt, task.reference, task.choices)))
        return f"{model.version}|{task.id}|{said}|{self._askings[task.source].fingerprint}|{index}"

    async def _ask(self, pairs: Sequence[Pair]) -> list[Rollouts]:
        """The rollouts of each pair. When the batch fails, each pair is asked by itself once."""
        try:
            answers = await self._answers(pairs)
        except (EngineError, FleetError) as error:
            if len(pairs) == 1:
                task = pairs[0][1]
                return [(Rollout(task=task, completion=None, reward=None, error=str(error)),)]
            alone = await together(self._ask([pair]) for pair in pairs)
            return [rollouts for [rollouts] in alone]
        judged = iter(
            await together(
                self._judge(task, completion)
                for (_, task), completions in zip(pairs, answers, strict=True)
                for completion in completions
            )
        )
        return [tuple(next(judged) for _ in completions) for completions in answers]

    async def _judge(self, task: Task, completion: Completion) -> Rollout:
        try:
            reward = await self._askings[task.source].scorer.reward(task, completion)
        except (TaskError, EngineError, FleetError) as error:
            return Rollout(task=task, completion=completion, reward=None, error=str(error))
        return Rollout(task=task, completion=completion, reward=reward)

    async def _answers(self, pairs: Sequence[Pair]) -> list[tuple[Completion, ...]]:
        """Sampled pairs and chosen pairs go to the sampler side by side."""
        chosen = [self._askings[task.source].scorer.answer == "choose" for _, task in pairs]
        to_sample = [pair for pair, is_chosen in zip(pairs, chosen, strict=True) if not is_chosen]
        to_choose = [pair for pair, is_chosen in zip(pairs, chosen, strict=True) if is_chosen]
        answers = await together([self._draw(to_sample), self._choose(to_choose)])
        sampled, picked = map(iter, answers)
        return [next(picked) if is_chosen else next(sampled) for is_chosen in chosen]

    async def _draw(self, pairs: Sequence[Pair]) -> list[tuple[Completion, ...]]:
        requests = [self._sample_request(*pair) for pair in pairs]
        return await self._sampler.sample(requests) if requests else []

    def _sample_request(self, model: ModelRef, task: Task) -> SampleRequest:
        """The seed is the task's, not the model's: all models draw the same random numbers."""
        params = self._askings[task.source].params
        digest = hashlib.blake2b(f"{params.seed}|{task.id}".encode(), digest_size=7).digest()
        return SampleRequest(
            model=model,
            prompt=self._template.encode(task),
            params=replace(params, seed=int.from_bytes(digest, "big")),
        )

    async def _choose(self, pairs: Sequence[Pair]) -> list[tuple[Completion, ...]]:
        """Score the choices of each pair; the completion is the likeliest choice."""
        requests = [self._choice_requests(*pair) for pair in pairs]
        flat = [request for group in requests for request in group]
        scores = iter(await self._sampler.score(flat) if flat else [])
        return [
            (self._pick(task, group, [next(scores) for _ in group]),)
            for (_, task), group in zip(pairs, requests, strict=True)
        ]

    def _choice_requests(self, model: ModelRef, task: Task) -> list[ScoreRequest]:
        """One request when every choice is one token, else one per choice."""
        encoded = self._encoded.get(task.id)
        if encoded is None:
            encoded = [self._template.encode_choice(task, choice) for choice in task.choices]
            _require_distinct(task, encoded)
            self._encoded[task.id] = encoded
        start = encoded[0][1]
        if all(len(tokens) == start + 1 for tokens, _ in encoded):
            labels = tuple(tokens[-1] for tokens, _ in encoded)
            prompt = encoded[0][0][:start]
            return [ScoreRequest(model=model, tokens=prompt, start=start, labels=labels)]
        return [ScoreRequest(model=model, tokens=tokens, start=start) for tokens, start in encoded]

    def _pick(
        self, task: Task, requests: Sequence[ScoreRequest], scores: Sequence[Score]
    ) -> Completion:
        logprobs = [score.logprobs for score in scores]
        tokens = [request.tokens[request.start :] for request in requests]
        if requests[0].labels:
            logprobs = [(logprob,) for logprob in scores[0].label_logprobs]
            tokens = [(label,) for label in requests[0].labels]
        totals = [sum(values) for values in logprobs]
        if self._askings[task.source].normalize == "mean":
            totals = [total / len(values) for total, values in zip(totals, logprobs, strict=True)]
        best = max(range(len(totals)), key=totals.__getitem__)
        return Completion(
            model=scores[0].model,
            tokens=tokens[best],
            logprobs=logprobs[best],
            text=task.choices[best],
            finish_reason="stop",
        )


def mean_by_source(rewards: Mapping[str, float], tasks: Iterable[Task]) -> dict[str, float]:
    """The mean reward of each source's tasks; tasks without a reward are left out."""
    sums: dict[str, list[float]] = {}
    for task in tasks:
        if task.id in rewards:
            sums.setdefault(task.source, []).append(rewards[task.id])
    return {source: sum(values) / len(values) for source, values in sums.items()}


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="backslashreplace"), digest_size=6).hexdigest()


async def together(works: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """All results, in order. The first error ends the others, and is raised when they ended."""
    try:
        async with asyncio.TaskGroup() as running:
            tasks = [running.create_task(work) for work in works]
    except ExceptionGroup as group:
        # An error of ours is a sentence, and tells more than what followed from it.
        errors = sorted(group.exceptions, key=lambda error: not isinstance(error, RookeryError))
    else:
        return [task.result() for task in tasks]
    raise errors[0]


def _require_distinct(task: Task, encoded: Sequence[tuple[TokenIds, int]]) -> None:
    if len({tokens for tokens, _ in encoded}) < len(encoded):
        raise TaskError(
            f"Task {task.id}: two of its choices {list(task.choices)} are the same tokens to this "
            "model's tokenizer: write them differently, or take another model."
        )
