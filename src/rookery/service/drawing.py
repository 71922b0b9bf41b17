"""Samples and prompt scores from an engine, whoever asks: the SDK, plain HTTP or OpenAI clients."""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from rookery.concurrency import task_group, together
from rookery.seeding import stream_seed
from rookery.service.desk import Desk
from rookery.service.records import SamplingSession
from rookery.service.refusals import bad
from rookery.service.residency import Residency
from rookery.service.throughput import Throughput
from rookery.service.trainer_calls import ADAPTER
from rookery.service.turns import Turns
from rookery.service.wire.records import ScoreBody
from rookery.service.wire.samples import PromptScores
from rookery.service.wire.tensors import Array
from rookery.service.work import Command
from rookery.types import (
    Completion,
    CompletionDelta,
    ModelRef,
    SampleRequest,
    SamplingParams,
    Score,
    ScoreRequest,
    TokenIds,
)

__all__ = ["Draw", "Drawing"]

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """What to draw from which model, and what to tell of the prompt."""

    id: str
    tenant: str
    base_model: str
    blob: str
    """The sampler weights; "" for the base model."""
    prompt: TokenIds
    params: SamplingParams
    scored: int = 0
    """How many of the last prompt tokens get log-probabilities."""
    top_k: int = 0
    """Most likely tokens per scored prompt token."""
    targets: Array | None = None
    """[T - 1, K]: token ids to score after each prompt position, -1 for none."""
    alternatives: int = 0
    """Draws after each prompt position."""
    has_text: bool = False
    """Whether the texts are answered too."""
    json_schema: str = ""
    """What the answers must match, as `SampleRequest.json_schema`."""
    on_delta: Callable[[CompletionDelta], None] | None = None
    """Told what the answers gain, as `SampleRequest.on_delta`."""

    @property
    def tokens(self) -> int:
        num_scored = 0 if self.targets is None else int((self.targets >= 0).sum())
        num_drawn = self.params.n * self.params.max_tokens
        return len(self.prompt) * (1 + self.alternatives) + num_scored + num_drawn


class Drawing:
    """The engines behind fair turns."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self.turns = Turns(desk.config.samples_in_flight)
        self._residencies: dict[int, Residency] = {}
        """By the identity of the backend: names may share one."""
        self.throughput = Throughput()
        """In tokens that were asked for: answers that end early make it higher."""

    async def draw(self, draw: Draw) -> tuple[tuple[Completion, ...], PromptScores]:
        """Wait for a turn, then for the engine."""
        params, work = draw.params, self._desk.pending.get(draw.id)
        async with (
            self.turns.take(draw.tenant, tokens=draw.tokens, width=params.n, id=draw.id),
            self._desk.computing([work] if work is not None else []),
            self._model(draw.base_model, draw.blob) as model,
        ):
            engine = self._desk.backend(draw.base_model).engine
            request = SampleRequest(
                model=model,
                prompt=draw.prompt,
                params=params,
                json_schema=draw.json_schema,
                on_delta=draw.on_delta,
            )
            with self.throughput.running(draw.tokens):
                async with task_group() as group:
                    sampling = group.create_task(engine.sample([request]))
                    scoring = group.create_task(self._scores(draw, model))
        [completions], scores = sampling.result(), scoring.result()
        num_drawn = sum(len(completion.tokens) for completion in completions)
        tokens = self._desk.metrics.tokens
        tokens.labels("sampled", draw.tenant).inc(num_drawn)
        tokens.labels("prompt", draw.tenant).inc(len(draw.prompt))
        return completions, scores

    async def score(self, work: Command, sampler: SamplingSession, body: ScoreBody) -> Score:
        """Log-probabilities of given tokens, in their turn."""
        num_tokens = len(body.tokens)
        async with (
            self.turns.take(work.tenant, tokens=num_tokens, width=1, id=work.id),
            self._desk.computing([work]),
            self._model(sampler.base_model, sampler.blob) as model,
        ):
            engine = self._desk.backend(sampler.base_model).engine
            with self.throughput.running(num_tokens):
                [score] = await engine.score([body.request(model)])
        self._desk.metrics.tokens.labels("prompt", work.tenant).inc(num_tokens)
        return score

    def max_tokens(self, base_model: str, *, asked: int | None, num_prompt: int) -> int:
        """How many tokens may follow the prompt; a refusal when none may."""
        context = self._desk.backend(base_model).engine.context_tokens
        if context is None:
            if asked is None:
                raise bad("The servers do not tell their context length: give max_tokens.")
            return asked
        if num_prompt >= context:
            raise bad(
                f"The prompt has {num_prompt} tokens; this model reads at most {context - 1} and "
                "answers with at least one."
            )
        return min(asked or context, context - num_prompt)

    def _model(self, base_model: str, blob: str) -> AbstractAsyncContextManager[ModelRef]:
        backend = self._desk.backend(base_model)
        if not blob:
            return nullcontext(backend.engine.base)
        residency = self._residencies.get(id(backend))
        if residency is None:
            blobs = self._desk.wal.run.blobs
            residency = self._residencies[id(backend)] = Residency(
                backend.folders,
                folder_of=lambda blob: blobs.path(blob) / ADAPTER,
                limit=self._desk.config.loaded_adapters,
            )
        return residency.use(blob)

    async def _scores(self, draw: Draw, model: ModelRef) -> PromptScores:
        logprobs, top = None, None
        if draw.scored:
            score = await self._score(draw, model)
            unscored = len(draw.prompt) - len(score.logprobs)
            logprobs = [*[None] * unscored, *score.logprobs]
            # The engine also gives the row behind the prompt.
            rows = score.top_logprobs[: len(score.logprobs)]
            top = [*[()] * unscored, *rows] if draw.top_k else None
        targets, alternatives = await together(
            [self._targets(draw, model), self._alternatives(draw, model)]
        )
        return PromptScores(
            logprobs=logprobs,
            top=top,
            top_k=draw.top_k,
            targets=targets[0] if targets else None,
            alternatives=(alternatives[0], alternatives[1]) if alternatives else None,
        )

    async def _score(self, draw: Draw, model: ModelRef) -> Score:
        start = max(1, len(draw.prompt) - draw.scored)
        request = ScoreRequest(
            model=model, tokens=draw.prompt, start=start, top_logprobs=draw.top_k
        )
        [score] = await self._desk.backend(draw.base_model).engine.score([request])
        return score

    async def _targets(self, draw: Draw, model: ModelRef) -> list[Array]:
        if draw.targets is None:
            return []
        rows = [tuple(row[row >= 0].tolist()) for row in draw.targets]
        asked = [place for place, row in enumerate(rows) if row]
        requests = [
            ScoreRequest(
                model=model, tokens=draw.prompt[: place + 1], start=place + 1, labels=rows[place]
            )
            for place in asked
        ]
        engine = self._desk.backend(draw.base_model).engine
        scores = await self._in_slices(engine.score, requests, width=1)
        answers: Array = np.full(draw.targets.shape, np.nan, dtype="<f4")
        for place, score in zip(asked, scores, strict=True):
            answers[place, draw.targets[place] >= 0] = score.label_logprobs
        return [answers]

    async def _alternatives(self, draw: Draw, model: ModelRef) -> list[Array]:
        if not draw.alternatives:
            return []
        requests = [
            SampleRequest(
                model=model,
                prompt=draw.prompt[: place + 1],
                params=SamplingParams(
                    max_tokens=1,
                    n=draw.alternatives,
                    ignore_eos=True,
                    temperature=draw.params.temperature,
                    seed=stream_seed(draw.params.seed, "alternatives", place),
                ),
            )
            for place in range(len(draw.prompt) - 1)
        ]
        engine = self._desk.backend(draw.base_model).engine
        drawn = await self._in_slices(engine.sample, requests, width=draw.alternatives)
        tokens = [[completion.tokens[0] for completion in row] for row in drawn]
        logprobs = [[completion.logprobs[0] for completion in row] for row in drawn]
        return [np.asarray(tokens, dtype="<i4"), np.asarray(logprobs, dtype="<f4")]

    async def _in_slices(
        self,
        call: Callable[[Sequence[Asked]], Awaitable[Sequence[Answer]]],
        requests: Sequence[Asked],
        *,
        width: int,
    ) -> list[Answer]:
        """A request for every position of a prompt, so many at a time that others are served
        beside them."""
        step = max(1, self._desk.config.samples_in_flight // width)
        answers: list[Answer] = []
        for start in range(0, len(requests), step):
            answers += await call(requests[start : start + step])
        return answers
