"""Samples and prompt scores from an engine, for the SDK, plain HTTP and OpenAI clients."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    nullcontext,
)
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from rookery.errors import EngineDownError, FleetDownError, RookeryError, ServiceError, boundary
from rookery.ports import AdapterFolders, Codec
from rookery.runtime.concurrency import task_group, together
from rookery.seeding import stream_seed
from rookery.service.context import ServiceContext, Throughput
from rookery.service.fair_queue import FairSemaphore
from rookery.service.records import JsonRows, SamplingSession, encode
from rookery.service.trainer_calls import ADAPTER
from rookery.service.wire import ScoreBody, score_document
from rookery.service.work import (
    GIVEN_UP,
    Array,
    Command,
    DrawWork,
    PromptScores,
    Refusal,
    Result,
    bad,
    failed,
)
from rookery.types import (
    Completion,
    ModelRef,
    SampleRequest,
    SamplingParams,
    Score,
    ScoreRequest,
    TokenIds,
)

__all__ = [
    "ANSWER_MIB",
    "BlobResidency",
    "Drawing",
    "Drawn",
    "OpenSamples",
    "encode_prompts",
    "read_draw",
]

# Sampler weights in an engine: loaded on first use, unloaded when idle, and loaded again on their
# next use.
#
#     async with residency.use(digest) as ref: await engine.sample(...)


@dataclass(slots=True)
class _Resident:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held during a load or unload."""
    ref: ModelRef | None = None
    num_users: int = 0


class BlobResidency:
    """Blobs in an engine, least recently used first."""

    def __init__(
        self, folders: AdapterFolders, *, folder_of: Callable[[str], Path], limit: int
    ) -> None:
        self._folders = folders
        self._folder_of = folder_of
        self._limit = limit
        self._residents: dict[str, _Resident] = {}
        self.num_loads = 0

    @asynccontextmanager
    async def use(self, blob: str) -> AsyncIterator[ModelRef]:
        """Yield the model of a blob, which stays loaded inside the block."""
        resident = self._residents.pop(blob, None) or _Resident()
        self._residents[blob] = resident  # at the end: most recently used
        resident.num_users += 1
        try:
            async with resident.lock:
                if resident.ref is None:
                    folder = self._folder_of(blob)
                    resident.ref = await self._folders.load(folder, name=f"sampler-{blob[:16]}")
                    self.num_loads += 1
            await self._unload_idle()
            yield resident.ref
        finally:
            resident.num_users -= 1

    async def _unload_idle(self) -> None:
        """Unload idle blobs down to the limit; blobs in use stay. A caller that needs one meanwhile
        waits for the lock and loads it again. Concurrent calls may pick the same blob."""
        num_over = len(self._residents) - self._limit
        idle = [(blob, one) for blob, one in self._residents.items() if one.num_users == 0]
        for blob, resident in idle[: max(num_over, 0)]:
            async with resident.lock:
                if resident.num_users == 0 and resident.ref is not None:
                    ref, resident.ref = resident.ref, None
                    await self._folders.unload(ref)
            if resident.num_users == 0 and self._residents.get(blob) is resident:
                del self._residents[blob]


Asked = TypeVar("Asked")
Answer = TypeVar("Answer")


Drawn = tuple[tuple[Completion, ...], PromptScores]
STOPPING = "The service stops: send the request again when it has started."


class Drawing:
    """Access to the engines, in fair turns."""

    def __init__(self, context: ServiceContext) -> None:
        self._context = context
        self.turns = FairSemaphore(context.config.samples_in_flight)
        self._residencies: dict[int, BlobResidency] = {}
        """Residencies by the identity of the backend, which several names may share."""
        self.throughput = Throughput()
        """Speed in requested tokens: answers that end early make it higher."""
        self._limits: set[asyncio.Timeout] = set()
        """Timeouts of the draws in progress."""
        self._is_stopped = False

    async def draw(self, draw: DrawWork) -> Drawn:
        """Wait for a turn, then draw. Refused if the service stops: no restart repeats it."""
        if self._is_stopped:
            raise Refusal(503, STOPPING)
        try:
            async with asyncio.timeout(None) as limit:
                self._limits.add(limit)
                try:
                    async with self.drawn(draw) as answer:
                        return answer
                finally:
                    self._limits.remove(limit)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise Refusal(503, STOPPING) from error

    def stop(self) -> None:
        """End every current and later `draw`."""
        self._is_stopped = True
        for limit in self._limits:
            limit.reschedule(0)

    @asynccontextmanager
    async def drawn(self, draw: DrawWork) -> AsyncIterator[Drawn]:
        """Draw, and yield the result to a block that computes further. The turn is free then, but a
        crash still counts against this request."""
        params, work = draw.params, self._context.pending.get(draw.id)
        async with AsyncExitStack() as computing:
            async with self.turns.take(draw.tenant, tokens=draw.tokens, width=params.n, id=draw.id):
                works = [work] if work is not None else []
                await computing.enter_async_context(self._context.computing(works))
                async with self._model(draw.base_model, draw.blob) as model:
                    completions, scores = await self._ask(draw, model)
            num_drawn = sum(len(completion.tokens) for completion in completions)
            tokens = self._context.metrics.tokens
            tokens.labels("sampled", draw.tenant).inc(num_drawn)
            tokens.labels("prompt", draw.tenant).inc(len(draw.prompt))
            yield completions, scores

    async def _ask(self, draw: DrawWork, model: ModelRef) -> Drawn:
        engine = self._context.backend(draw.base_model).engine
        request = SampleRequest(
            model=model,
            prompt=draw.prompt,
            params=draw.params,
            json_schema=draw.json_schema,
            on_delta=draw.on_delta,
        )
        with self.throughput.running(draw.tokens):
            async with task_group() as group:
                sampling = group.create_task(engine.sample([request]))
                scoring = group.create_task(self._scores(draw, model))
        [completions], scores = sampling.result(), scoring.result()
        return completions, scores

    @asynccontextmanager
    async def scored(
        self, work: Command, sampler: SamplingSession, body: ScoreBody
    ) -> AsyncIterator[Score]:
        """Score given tokens in turn, like `drawn`."""
        num_tokens = len(body.tokens)
        async with AsyncExitStack() as computing:
            async with self.turns.take(work.tenant, tokens=num_tokens, width=1, id=work.id):
                await computing.enter_async_context(self._context.computing([work]))
                engine = self._context.backend(sampler.base_model).engine
                async with self._model(sampler.base_model, sampler.blob) as model:
                    with self.throughput.running(num_tokens):
                        [score] = await engine.score([body.request(model)])
            self._context.metrics.tokens.labels("prompt", work.tenant).inc(num_tokens)
            yield score

    def max_tokens(self, base_model: str, *, asked: int | None, num_prompt: int) -> int:
        """Return how many tokens may follow the prompt; refuse a prompt that leaves none."""
        context_tokens = self._context.backend(base_model).engine.context_tokens
        if context_tokens is None:
            if asked is None:
                raise bad("The servers do not tell their context length: give max_tokens.")
            return asked
        if num_prompt >= context_tokens:
            raise bad(
                f"The prompt has {num_prompt} tokens; this model reads at most "
                f"{context_tokens - 1} and answers with at least one."
            )
        return min(asked or context_tokens, context_tokens - num_prompt)

    def _model(self, base_model: str, blob: str) -> AbstractAsyncContextManager[ModelRef]:
        backend = self._context.backend(base_model)
        if not blob:
            return nullcontext(backend.engine.base)
        residency = self._residencies.get(id(backend))
        if residency is None:
            blobs = self._context.wal.run.blobs
            residency = self._residencies[id(backend)] = BlobResidency(
                backend.folders,
                folder_of=lambda blob: blobs.path(blob) / ADAPTER,
                limit=self._context.config.loaded_adapters,
            )
        return residency.use(blob)

    async def _scores(self, draw: DrawWork, model: ModelRef) -> PromptScores:
        logprobs, top = None, None
        if draw.scored:
            score = await self._score(draw, model)
            unscored = len(draw.prompt) - len(score.logprobs)
            logprobs = [*[None] * unscored, *score.logprobs]
            # The engine also returns the row after the prompt.
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

    async def _score(self, draw: DrawWork, model: ModelRef) -> Score:
        start = max(1, len(draw.prompt) - draw.scored)
        request = ScoreRequest(
            model=model, tokens=draw.prompt, start=start, top_logprobs=draw.top_k
        )
        [score] = await self._context.backend(draw.base_model).engine.score([request])
        return score

    async def _targets(self, draw: DrawWork, model: ModelRef) -> list[Array]:
        if draw.targets is None:
            return []
        rows = [tuple(row[row >= 0].tolist()) for row in draw.targets]
        asked_places = [place for place, row in enumerate(rows) if row]
        requests = [
            ScoreRequest(
                model=model, tokens=draw.prompt[: place + 1], start=place + 1, labels=rows[place]
            )
            for place in asked_places
        ]
        engine = self._context.backend(draw.base_model).engine
        scores = await self._in_slices(engine.score, requests, width=1)
        answers: Array = np.full(draw.targets.shape, np.nan, dtype="<f4")
        for place, score in zip(asked_places, scores, strict=True):
            answers[place, draw.targets[place] >= 0] = score.label_logprobs
        return [answers]

    async def _alternatives(self, draw: DrawWork, model: ModelRef) -> list[Array]:
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
        engine = self._context.backend(draw.base_model).engine
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
        """Send a request per position in slices, so that other requests run in between."""
        step = max(1, self._context.config.samples_in_flight // width)
        answers: list[Answer] = []
        for start in range(0, len(requests), step):
            answers += await call(requests[start : start + step])
        return answers


# Accepted samples and scores -> the engine -> results, each in a task that waits its turn.


ANSWER_MIB = 256
"""Limit on one answer: one that the journal cannot take (over 500 MB) ends the service."""


class OpenSamples:
    """Samples that wait or are drawn. The task group ends them with the service."""

    def __init__(self, context: ServiceContext, drawing: Drawing) -> None:
        self._context = context
        self._drawing = drawing
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def add(self, work: Command, group: asyncio.TaskGroup) -> None:
        task = group.create_task(self._answer(work), name=work.id)
        self._tasks[work.id] = task
        task.add_done_callback(lambda _: self._tasks.pop(work.id, None))

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        return list(self._tasks.values())

    async def cancel(self, work: Command) -> None:
        """Cancel a sample: its result says so, unless it has one already."""
        if self._context.futures.is_storing(work.id):
            return
        if (task := self._tasks.get(work.id)) is not None:
            task.cancel()
        await self._finish(work, failed("The sample was cancelled by its client.", "user"))

    def describe(self, work: Command) -> tuple[str, str]:
        """Return a sample's queue state and a sentence about it."""
        place = self._drawing.turns.place(work.id)
        if place is None:
            return "active", "It is being drawn."
        sentence = f"Place {place.ahead + 1} of {self._drawing.turns.num_waiting} for samples"
        if per_s := self._drawing.throughput.per_s:
            sentence += f", about {place.tokens_ahead / per_s:.0f} s"
        return "paused_capacity" if place.ahead else "active", f"{sentence}."

    async def _answer(self, work: Command) -> None:
        try:
            with boundary(ServiceError, "Drawing the sample failed"):
                if self._context.pending.is_given_up(work):
                    raise ServiceError(GIVEN_UP)
                result = await (self._score(work) if work.kind == "score" else self._draw(work))
        except (EngineDownError, FleetDownError) as error:
            result = failed(self._context.sentence(error), "server")
        except RookeryError as error:
            result = failed(self._context.sentence(error), "user")
        if len(result.payload) > ANSWER_MIB * 2**20:
            result = failed(
                f"The answer has {len(result.payload) / 2**20:.0f} MiB, of at most {ANSWER_MIB}: "
                "ask for fewer samples or tokens in one request, or for less about each.",
                "user",
            )
        await self._finish(work, result)

    async def _draw(self, work: Command) -> Result:
        draw = read_draw(self._context, self._drawing, work)
        async with self._drawing.drawn(draw) as (completions, scores):
            write = self._context.format.write_samples
            return await asyncio.to_thread(write, draw, completions, scores)

    async def _score(self, work: Command) -> Result:
        sampler = self._context.state.sampler(work.tenant, work.owner)
        body = ScoreBody.model_validate_json(work.body)
        async with self._drawing.scored(work, sampler, body) as score:
            rows = JsonRows(score.top_logprobs, list)
            document = {**score_document(score), "top_logprobs": rows}
            return Result(await asyncio.to_thread(encode, document))

    async def _finish(self, work: Command, result: Result) -> None:
        """Store the first result of a work; ignore a second one, as from a late cancellation. The
        work is pending until the journal has its result, so that a snapshot has one of the two."""
        futures = self._context.futures
        if futures.is_storing(work.id) or work.id not in self._context.pending:
            return
        if (future := futures.known(work.id)) is not None:
            future.storing = result
        header = {
            "entry": "answer",
            "id": work.id,
            "form": result.form,
            "is_failure": result.is_failure,
        }
        stored = self._context.wal.append(header, result.payload)
        # Also if the waiting caller is cancelled.
        stored.add_done_callback(lambda done: self._stored(work, result, done))
        await asyncio.shield(stored)

    def _stored(self, work: Command, result: Result, done: "asyncio.Future[list[int]]") -> None:
        if not done.cancelled() and done.exception() is None:
            self._context.pending.remove(work.id)
            self._context.futures.finish(work.id, result)


def encode_prompts(codec: Codec, prompts: Sequence[str | TokenIds]) -> list[TokenIds]:
    """Encode texts as tokens. A long text takes seconds: never in the event loop."""
    return [codec.encode(one) if isinstance(one, str) else one for one in prompts]


def read_draw(context: ServiceContext, drawing: Drawing, work: Command) -> DrawWork:
    """Read an accepted sample request; refuse it if it can never be drawn."""
    sampler = context.state.sampler(work.tenant, work.owner)
    max_tokens = partial(drawing.max_tokens, sampler.base_model)
    return context.format.read_draw(work, sampler, max_tokens=max_tokens)
