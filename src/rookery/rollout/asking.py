"""How the tasks of one taskset are put to a model: as prompts to continue, or choices to score."""

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
from rookery.tasks.scorers import ChoiceConfig, build_scorer
from rookery.tasks.scorers.choice import correct_choice
from rookery.tasks.taskset import Taskset
from rookery.tasks.template import Template
from rookery.types import (
    Completion,
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
    TokenUsage,
)

__all__ = [
    "Answer",
    "Asking",
    "EngineTextModel",
]

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
    """What a model said to one task."""

    completion: Completion
    certainty: float | None = None
    """The probability of the right choice among the choices; None where there are none."""


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
        self._encoded: dict[str, list[tuple[TokenIds, int]]] = {}
        """Prompts with their choices by task id: a search puts them to many models."""

    @property
    def is_choice(self) -> bool:
        return self.scorer.answer == "choose"

    @property
    def num_answers(self) -> int:
        """Answers of one model to one task."""
        return 1 if self.is_choice else self._params.n

    def key(self, model: ModelRef, task: Task) -> str:
        """Names the question put to these weights. It holds what the task says: a row that was
        corrected under its id is another question. The scorer comes last: it changes no answer."""
        said = _digest(repr((task.prompt, task.reference, task.choices)))
        return f"{model.version}|{task.id}|{said}|{self._fingerprint}"

    def num_needed_tokens(self, task: Task) -> int:
        """The least context in which the task can be answered."""
        if self.is_choice:
            return max(len(tokens) for tokens, _ in self._encode_choices(task))
        return len(self._template.encode(task)) + 1

    def sample_request(self, model: ModelRef, task: Task) -> SampleRequest:
        """The seed is the task's, not the model's: all models draw the same random numbers."""
        digest = hashlib.blake2b(f"{self._params.seed}|{task.id}".encode(), digest_size=7).digest()
        return SampleRequest(
            model=model,
            prompt=self._template.encode(task),
            params=replace(self._params, seed=int.from_bytes(digest, "big")),
        )

    def choice_requests(self, model: ModelRef, task: Task) -> list[ScoreRequest]:
        """One request when every choice is one token, else one per choice."""
        encoded = self._encode_choices(task)
        start = encoded[0][1]
        if all(len(tokens) == start + 1 for tokens, _ in encoded):
            labels = tuple(tokens[-1] for tokens, _ in encoded)
            prompt = encoded[0][0][:start]
            return [ScoreRequest(model=model, tokens=prompt, start=start, labels=labels)]
        return [ScoreRequest(model=model, tokens=tokens, start=start) for tokens, start in encoded]

    def pick(self, task: Task, requests: Sequence[ScoreRequest], scores: Sequence[Score]) -> Answer:
        """The likeliest choice, as a completion, and how likely the right one is among all.

        EngineError where every choice is impossible, or one is NaN: then none was chosen.
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
        """The completion with its reward, or with the reason why it has none."""
        try:
            reward = await self.scorer.reward(task, completion)
        except (EngineDownError, FleetDownError):
            raise
        except (TaskError, EngineError, FleetError) as error:
            return Rollout(task=task, completion=completion, reward=None, error=str(error))
        metrics = {} if certainty is None else {"certainty": certainty}
        return Rollout(task=task, completion=completion, reward=reward, metrics=metrics)

    def _encode_choices(self, task: Task) -> list[tuple[TokenIds, int]]:
        encoded = self._encoded.get(task.id)
        if encoded is None:
            encoded = [self._template.encode_choice(task, choice) for choice in task.choices]
            _require_distinct(task, encoded)
            self._encoded[task.id] = encoded
        return encoded


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="backslashreplace"), digest_size=6).hexdigest()


def _require_distinct(task: Task, encoded: Sequence[tuple[TokenIds, int]]) -> None:
    if len({tokens for tokens, _ in encoded}) < len(encoded):
        raise TaskError(
            f"Task {task.id}: two of its choices {list(task.choices)} are the same tokens to this "
            "model's tokenizer: write them differently, or take another model."
        )
