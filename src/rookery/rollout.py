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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rookery.errors import EngineError, FleetError, RookeryError, TaskError
from rookery.ports import Sampler, Scorer
from rookery.runs import NewEvent, Run
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

__all__ = ["Progress", "RolloutLog", "TasksetEvaluator", "mean_by_source"]

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


class RolloutLog:
    """Rollouts found again by (weights, task, way of asking); durable when they have a run."""

    def __init__(self, run: Run | None = None) -> None:
        self._run = run
        self._known: dict[str, Any] = {}
        if run is not None:
            self._known = {event.key: event.payload for event in run.events("rollout")}

    def __len__(self) -> int:
        return len(self._known)

    def find(self, key: str, task: Task, model: ModelRef) -> Rollout | None:
        payload = self._known.get(key)
        if payload is None:
            return None
        completion = payload["completion"]
        return Rollout(
            task=task,
            completion=None if completion is None else _read_completion(completion, model),
            reward=payload["reward"],
            error=payload["error"],
        )

    def add(self, rollouts: Sequence[tuple[str, ModelRef, Rollout, int]]) -> None:
        """Store a block of rollouts, all or none. Failed ones are not: they are asked again."""
        events = []
        for key, model, rollout, num_tokens in rollouts:
            if rollout.error or key in self._known:
                continue
            payload = {
                "model": model.served_name,
                "task": rollout.task.id,
                "reward": rollout.reward,
                "error": rollout.error,
                "completion": _write_completion(rollout.completion),
                "num_tokens": num_tokens,
            }
            self._known[key] = payload
            events.append(NewEvent(kind="rollout", payload=payload, key=key))
        if events and self._run is not None:
            self._run.append_many(events)


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
        self._askings = {taskset.name: self._asking(taskset) for taskset in tasksets}

    def _asking(self, taskset: Taskset) -> _Asking:
        config = taskset.scorer
        text = json.dumps([config.model_dump(mode="json"), asdict(taskset.sampling)])
        return _Asking(
            scorer=build_scorer(config, judge=self._sampler, template=self._template),
            params=taskset.sampling,
            normalize=config.normalize if isinstance(config, ChoiceConfig) else "sum",
            fingerprint=hashlib.blake2b(text.encode(), digest_size=6).hexdigest(),
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
            num_tokens += self._num_tokens(group)
        return Evaluation(
            model=model, rewards=rewards, errors=errors, num_tokens=num_tokens, seconds=seconds
        )

    def _num_tokens(self, group: Group) -> int:
        return sum(self._cost(rollout) for rollout in group.rollouts)

    def _cost(self, rollout: Rollout) -> int:
        """Tokens of a prompt and its answer."""
        answer = rollout.completion.tokens if rollout.completion is not None else ()
        return len(self._template.encode(rollout.task)) + len(answer)

    async def rollout(self, models: Sequence[ModelRef], tasks: Sequence[Task]) -> list[Group]:
        """Every task under every model: the groups of the first model, then of the second, ..."""
        block = max(1, BLOCK_REQUESTS // max(1, len(models)))
        places = asyncio.Semaphore(NUM_BLOCKS)  # filled and drained by the blocks below
        groups: dict[tuple[ModelRef, str], Group] = {}
        try:
            async with asyncio.TaskGroup() as running:
                for first in range(0, len(tasks), block):
                    await places.acquire()
                    part = tasks[first : first + block]
                    running.create_task(self._block(models, part, groups, places))
        except ExceptionGroup as failed:
            known = failed.subgroup(RookeryError)
            if known is None:
                raise
            raise known.exceptions[0] from failed
        return [groups[model, task.id] for model in models for task in tasks]

    async def _block(
        self,
        models: Sequence[ModelRef],
        tasks: Sequence[Task],
        groups: dict[tuple[ModelRef, str], Group],
        places: asyncio.Semaphore,
    ) -> None:
        try:
            pairs = [(model, task) for task in tasks for model in models]
            found = {pair: self._find(*pair) for pair in pairs}
            missing = [pair for pair in pairs if found[pair] is None]
            asked = dict(zip(missing, await self._ask(missing), strict=True)) if missing else {}
            for model, task in pairs:
                rollouts = found[model, task] or asked[model, task]
                groups[model, task.id] = Group(task=task, model=model, rollouts=rollouts)
            self._keep(asked)
            num_tokens = sum(self._num_tokens(groups[m, t.id]) for m, t in missing)
            self.num_rollouts += sum(len(rollouts) for rollouts in asked.values())
            self.num_tokens += num_tokens
            if self._on_progress is not None:
                self._on_progress(Progress(num_rollouts=len(pairs), num_tokens=num_tokens))
        finally:
            places.release()

    def _find(self, model: ModelRef, task: Task) -> tuple[Rollout, ...] | None:
        if self._log is None:
            return None
        rollouts = []
        for index in range(self._num_answers(task)):
            rollout = self._log.find(self._key(model, task, index), task, model)
            if rollout is None:
                return None
            rollouts.append(rollout)
        return tuple(rollouts)

    def _keep(self, asked: Mapping[tuple[ModelRef, Task], tuple[Rollout, ...]]) -> None:
        if self._log is not None:
            self._log.add(
                [
                    (self._key(model, task, index), model, rollout, self._cost(rollout))
                    for (model, task), rollouts in asked.items()
                    for index, rollout in enumerate(rollouts)
                ]
            )

    def _num_answers(self, task: Task) -> int:
        asking = self._askings[task.source]
        return asking.params.n if asking.scorer.answer == "sample" else 1

    def _key(self, model: ModelRef, task: Task, index: int) -> str:
        return f"{model.version}|{task.id}|{self._askings[task.source].fingerprint}|{index}"

    async def _ask(self, pairs: Sequence[tuple[ModelRef, Task]]) -> list[tuple[Rollout, ...]]:
        """The rollouts of each pair. When the batch fails, each pair is asked alone once."""
        try:
            answers = await self._answers(pairs)
        except (EngineError, FleetError) as error:
            if len(pairs) == 1:
                task = pairs[0][1]
                return [(Rollout(task=task, completion=None, reward=None, error=str(error)),)]
            return [(await self._ask([pair]))[0] for pair in pairs]
        return [
            tuple([await self._judge(task, completion) for completion in completions])
            for (_, task), completions in zip(pairs, answers, strict=True)
        ]

    async def _judge(self, task: Task, completion: Completion) -> Rollout:
        try:
            reward = await self._askings[task.source].scorer.reward(task, completion)
        except (TaskError, EngineError, FleetError) as error:
            return Rollout(task=task, completion=completion, reward=None, error=str(error))
        return Rollout(task=task, completion=completion, reward=reward)

    async def _answers(
        self, pairs: Sequence[tuple[ModelRef, Task]]
    ) -> list[tuple[Completion, ...]]:
        """Sampled pairs and chosen pairs go to the sampler side by side."""
        chosen = [self._askings[task.source].scorer.answer == "choose" for _, task in pairs]
        to_sample = [pair for pair, is_chosen in zip(pairs, chosen, strict=True) if not is_chosen]
        to_choose = [pair for pair, is_chosen in zip(pairs, chosen, strict=True) if is_chosen]
        sampled, picked = await asyncio.gather(
            self._sampler.sample([self._sample_request(*pair) for pair in to_sample]),
            self._choose(to_choose),
        )
        from_sample, from_choice = iter(sampled), iter(picked)
        return [next(from_choice) if is_chosen else next(from_sample) for is_chosen in chosen]

    def _sample_request(self, model: ModelRef, task: Task) -> SampleRequest:
        """The seed is the task's, not the model's: all models draw the same random numbers."""
        params = self._askings[task.source].params
        digest = hashlib.blake2b(f"{params.seed}|{task.id}".encode(), digest_size=7).digest()
        return SampleRequest(
            model=model,
            prompt=self._template.encode(task),
            params=replace(params, seed=int.from_bytes(digest, "big")),
        )

    async def _choose(self, pairs: Sequence[tuple[ModelRef, Task]]) -> list[tuple[Completion, ...]]:
        """Score the choices of each pair; the completion is the likeliest choice."""
        requests = [self._choice_requests(*pair) for pair in pairs]
        flat = [request for group in requests for request in group]
        scores = iter(await self._sampler.score(flat))
        return [
            (self._pick(task, group, [next(scores) for _ in group]),)
            for (_, task), group in zip(pairs, requests, strict=True)
        ]

    def _choice_requests(self, model: ModelRef, task: Task) -> list[ScoreRequest]:
        """One request when every choice is one token, else one per choice."""
        encoded = self._encoded.get(task.id)
        if encoded is None:
            encoded = [self._template.encode_choice(task, choice) for choice in task.choices]
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


def _write_completion(completion: Completion | None) -> dict[str, object] | None:
    if completion is None:
        return None
    return {
        "text": completion.text,
        "tokens": list(completion.tokens),
        "logprobs": list(completion.logprobs),
        "finish_reason": completion.finish_reason,
    }


def _read_completion(payload: Mapping[str, object], model: ModelRef) -> Completion:
    return Completion(
        model=model,
        tokens=tuple(payload["tokens"]),  # type: ignore[arg-type]
        logprobs=tuple(payload["logprobs"]),  # type: ignore[arg-type]
        text=str(payload["text"]),
        finish_reason="stop" if payload["finish_reason"] == "stop" else "length",
    )
