"""Asks a model the tasks of one taskset: prompts to continue, or choices to score."""

import asyncio
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from rookery.errors import (
    EngineDownError,
    EngineError,
    FleetDownError,
    FleetError,
    ModelError,
    TaskError,
)
from rookery.ports import Sampler
from rookery.runtime.concurrency import together
from rookery.tasks.scorers import ChoiceConfig, build_scorer
from rookery.tasks.scorers.text import correct_choice
from rookery.tasks.taskset import Taskset
from rookery.tasks.template import Template
from rookery.types import (
    Completion,
    Draw,
    Group,
    ModelRef,
    Rollout,
    SampleRequest,
    SamplingParams,
    Score,
    ScoreRequest,
    Task,
    TextReply,
    TextRequest,
    TokenIds,
    TokenSequence,
    TokenUsage,
)

__all__ = ["Answer", "Asking", "EngineTextModel", "GroupSampler"]


MAX_ENCODED = 65_536
"""Encoded prompts with choices to keep."""

# reply = await EngineTextModel(engine, model=engine.base, template=template).reply(request)


class EngineTextModel:
    """A TextModel over one model of a sampler, base or adapter."""

    def __init__(self, sampler: Sampler, *, model: ModelRef, template: Template) -> None:
        if not template.chat:
            raise ModelError(
                f"{model.served_name} has no chat template to put messages in: take the instruct "
                "version of the model."
            )
        self._sampler = sampler
        self._model = model
        self._template = template

    async def reply(self, request: TextRequest) -> TextReply:
        try:
            prompt = await asyncio.to_thread(self._template.encode_chat, request.messages)
        except TaskError as error:
            raise EngineError(str(error)) from error
        params = SamplingParams(
            max_tokens=request.max_tokens,
            temperature=1.0 if request.temperature is None else request.temperature,
            top_p=1.0 if request.top_p is None else request.top_p,
            seed=request.seed or 0,
        )
        asked = SampleRequest(model=self._model, prompt=prompt, params=params)
        [[completion]] = await self._sampler.sample([asked])
        return TextReply(
            text=completion.text,
            finish_reason=completion.finish_reason,
            model=self._model.served_name,
            usage=TokenUsage(prompt_tokens=len(prompt), completion_tokens=len(completion.tokens)),
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """A model's answer to one task."""

    completion: Completion
    certainty: float | None = None
    """Probability of the right choice among the choices; None without choices."""


class Asking:
    """One taskset's requests, keys and scorer."""

    def __init__(self, taskset: Taskset, *, sampler: Sampler, template: Template) -> None:
        config = taskset.scorer
        self.scorer = build_scorer(config, judge=sampler, template=template)
        self._params = taskset.sampling
        self._normalize = config.normalize if isinstance(config, ChoiceConfig) else "sum"
        self._template = template
        asked = [self.is_choice, self._normalize, asdict(taskset.sampling)]
        scored = config.model_dump(mode="json")
        self._fingerprint = f"{_digest(json.dumps(asked))}|{_digest(json.dumps(scored))}"
        self._encoded: dict[tuple[object, ...], list[tuple[TokenIds, int]]] = {}
        """Encoded prompts with choices, kept because a search asks many models."""

    @property
    def is_choice(self) -> bool:
        return self.scorer.answer == "choose"

    @property
    def num_answers(self) -> int:
        """Number of answers of one model to one task."""
        return 1 if self.is_choice else self._params.n

    def key(self, model: ModelRef, task: Task) -> str:
        """Key of the question to these weights. It covers the task's content, so a corrected row
        with the same id is a new question. The scorer comes last, because answers do not depend on
        it."""
        said = _digest(repr((task.prompt, task.reference, task.choices)))
        return f"{model.version}|{task.id}|{said}|{self._fingerprint}"

    def num_needed_tokens(self, task: Task) -> int:
        """Context length that the task needs."""
        if self.is_choice:
            return max(len(tokens) for tokens, _ in self._encode_choices(task))
        return len(self._template.encode(task)) + 1

    def sample_request(self, model: ModelRef, task: Task) -> SampleRequest:
        """Make the request. The seed depends on the task alone: all models use the same random
        numbers."""
        digest = hashlib.blake2b(f"{self._params.seed}|{task.id}".encode(), digest_size=7).digest()
        return SampleRequest(
            model=model,
            prompt=self._template.encode(task),
            params=replace(self._params, seed=int.from_bytes(digest, "big")),
        )

    def choice_requests(self, model: ModelRef, task: Task) -> list[ScoreRequest]:
        """Make one request if every choice is one token, else one per choice."""
        encoded = self._encode_choices(task)
        start = encoded[0][1]
        if all(len(tokens) == start + 1 for tokens, _ in encoded):
            labels = tuple(tokens[-1] for tokens, _ in encoded)
            prompt = encoded[0][0][:start]
            return [ScoreRequest(model=model, tokens=prompt, start=start, labels=labels)]
        return [ScoreRequest(model=model, tokens=tokens, start=start) for tokens, start in encoded]

    def pick(self, task: Task, requests: Sequence[ScoreRequest], scores: Sequence[Score]) -> Answer:
        """Return the likeliest choice as a completion, with the right choice's probability.

        Raises EngineError if every choice has probability 0, or one is NaN.
        """
        logprobs = [score.logprobs for score in scores]
        tokens = [request.tokens[request.start :] for request in requests]
        if requests[0].labels:
            logprobs = [(logprob,) for logprob in scores[0].label_logprobs]
            tokens = [(label,) for label in requests[0].labels]
        totals = [sum(values) for values in logprobs]
        if self._normalize == "mean":
            totals = [total / len(values) for total, values in zip(totals, logprobs, strict=True)]
        if any(math.isnan(total) for total in totals):
            raise EngineError(
                f"Task {task.id}: {scores[0].model.served_name} gives the choices "
                f"{list(task.choices)} the log-probabilities {totals}: its weights overflow."
            )
        best = max(range(len(totals)), key=totals.__getitem__)
        if not math.isfinite(totals[best]):
            raise EngineError(
                f"Task {task.id}: {scores[0].model.served_name} gives none of the choices "
                f"{list(task.choices)} a probability above 0: its weights overflow."
            )
        completion = Completion(
            model=scores[0].model,
            tokens=tokens[best],
            logprobs=logprobs[best],
            text=task.choices[best],
            finish_reason="stop",
        )
        right = correct_choice(task)
        if right is None:
            return Answer(completion)
        parts = [math.exp(total - totals[best]) for total in totals]
        return Answer(completion, parts[task.choices.index(right)] / math.fsum(parts))

    async def judge(
        self, task: Task, completion: Completion, *, certainty: float | None = None
    ) -> Rollout:
        """Score a completion; a failure is recorded as the rollout's error."""
        try:
            reward = await self.scorer.reward(task, completion)
        except (EngineDownError, FleetDownError):
            raise
        except (TaskError, EngineError, FleetError) as error:
            return Rollout(task=task, completion=completion, reward=None, error=str(error))
        metrics = {} if certainty is None else {"certainty": certainty}
        return Rollout(task=task, completion=completion, reward=reward, metrics=metrics)

    def _encode_choices(self, task: Task) -> list[tuple[TokenIds, int]]:
        key = (task.id, task.prompt)  # prompt evolution asks one task with many prompts
        encoded = self._encoded.get(key)
        if encoded is None:
            encoded = [self._template.encode_choice(task, choice) for choice in task.choices]
            _require_distinct(task, encoded)
            if len(self._encoded) >= MAX_ENCODED:
                self._encoded.clear()
            self._encoded[key] = encoded
        return encoded


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="backslashreplace"), digest_size=6).hexdigest()


def _require_distinct(task: Task, encoded: Sequence[tuple[TokenIds, int]]) -> None:
    if len({tokens for tokens, _ in encoded}) < len(encoded):
        raise TaskError(
            f"Task {task.id}: two of its choices {list(task.choices)} are the same tokens to this "
            "model's tokenizer: write them differently, or take another model."
        )


# Groups to train on: several scored answers to each task.
#
# sampler = GroupSampler(engine, template=template, tasksets=tasksets, params=SamplingParams(n=8))
# groups = await sampler.draw(policy, [Draw(task=task, seed=7)])
#
# An evaluation remembers its questions and never asks twice. Here every draw is new, named by its
# seed, and the caller keeps the result.


class GroupSampler:
    """Draws groups from one sampler, with one set of sampling parameters."""

    def __init__(
        self,
        sampler: Sampler,
        *,
        template: Template,
        tasksets: Sequence[Taskset],
        params: SamplingParams,
    ) -> None:
        self._sampler = sampler
        self._template = template
        self._params = params
        self._askings = {
            taskset.name: Asking(taskset, sampler=sampler, template=template)
            for taskset in tasksets
        }
        for taskset in tasksets:
            if self._askings[taskset.name].is_choice:
                raise TaskError(
                    f"{taskset.name} has choices to be scored, and training needs answers that "
                    "are drawn: give it another scorer, exact or numeric for example."
                )

    async def draw(self, model: ModelRef, draws: Sequence[Draw]) -> list[Group]:
        """Return a group per draw, in order. A failed rollout is in its group with its error."""
        answers = await self._answers(model, draws)
        judged = iter(await together(self._judge(draw.task, answer) for draw, answer in answers))
        rollouts = [tuple(next(judged) for _ in range(self._params.n)) for _ in draws]
        return [
            Group(task=draw.task, model=model, rollouts=drawn)
            for draw, drawn in zip(draws, rollouts, strict=True)
        ]

    async def _answers(
        self, model: ModelRef, draws: Sequence[Draw]
    ) -> list[tuple[Draw, Completion | str]]:
        """Return `n` completions per draw, or `n` times the error."""
        try:
            drawn = await self._sampler.sample([self._request(model, draw) for draw in draws])
        except (EngineDownError, FleetDownError):
            raise  # the engine is down: the run ends, to be resumed
        except (EngineError, FleetError) as error:
            if len(draws) == 1:
                return [(draws[0], str(error))] * self._params.n
            alone = await together(self._answers(model, [draw]) for draw in draws)
            return [pair for pairs in alone for pair in pairs]
        pairs = zip(draws, drawn, strict=True)
        return [(draw, completion) for draw, completions in pairs for completion in completions]

    def _request(self, model: ModelRef, draw: Draw) -> SampleRequest:
        return SampleRequest(
            model=model,
            prompt=self._template.encode(draw.task),
            params=replace(self._params, seed=draw.seed),
            affinity=draw.task.id,
        )

    async def _judge(self, task: Task, answer: Completion | str) -> Rollout:
        if isinstance(answer, str):
            return Rollout(task=task, completion=None, reward=None, error=answer)
        rollout = await self._askings[task.source].judge(task, answer)
        return replace(rollout, sequences=(self._sequence(task, answer),))

    def _sequence(self, task: Task, answer: Completion) -> TokenSequence:
        prompt = self._template.encode(task)
        return TokenSequence(
            tokens=prompt + answer.tokens,
            drawn=tuple(range(len(prompt), len(prompt) + len(answer.tokens))),
            logprobs=answer.logprobs,
            kept=answer.kept,
        )
