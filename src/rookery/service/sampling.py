"""Accepted samples and scores -> the engine -> results, each in a task of its own that waits for
its turn."""

import asyncio

from rookery.errors import EngineDownError, FleetDownError, RookeryError, ServiceError, boundary
from rookery.seeding import stream_seed
from rookery.service.desk import Desk
from rookery.service.drawing import Draw, Drawing
from rookery.service.rows import Rows, encode
from rookery.service.wire.records import ScoreBody, score_document
from rookery.service.wire.requests import Sample
from rookery.service.wire.samples import (
    encode_samples,
    prompt_tokens,
    sampling_params,
    target_tokens,
)
from rookery.service.work import GIVEN_UP, Command, Result, failed

__all__ = ["Samples", "read_draw"]

ANSWER_MIB = 256
"""The most that one answer may have: the journal takes no entry of more than 500 MB, and what it
cannot take ends the service."""


class Samples:
    """The samples that wait or are drawn. The task group ends them with the service."""

    def __init__(self, desk: Desk, drawing: Drawing) -> None:
        self._desk = desk
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
        """Give a sample up: its result says so, unless it has one."""
        if self._desk.futures.is_storing(work.id):
            return
        if (task := self._tasks.get(work.id)) is not None:
            task.cancel()
        await self._finish(work, failed("The sample was cancelled by its client.", "user"))

    def describe(self, work: Command) -> tuple[str, str]:
        """Its queue state and a sentence."""
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
                if self._desk.pending.is_given_up(work):
                    raise ServiceError(GIVEN_UP)
                result = await (self._score(work) if work.kind == "score" else self._draw(work))
        except (EngineDownError, FleetDownError) as error:
            result = failed(self._desk.sentence(error), "server")
        except RookeryError as error:
            result = failed(self._desk.sentence(error), "user")
        if len(result.payload) > ANSWER_MIB * 2**20:
            result = failed(
                f"The answer has {len(result.payload) / 2**20:.0f} MiB, of at most {ANSWER_MIB}: "
                "ask for fewer samples or tokens in one request, or for less about each.",
                "user",
            )
        await self._finish(work, result)

    async def _draw(self, work: Command) -> Result:
        draw = read_draw(self._desk, self._drawing, work)
        completions, scores = await self._drawing.draw(draw)
        payload = await asyncio.to_thread(
            encode_samples,
            completions,
            scores,
            top_k=draw.params.top_logprobs,
            has_text=draw.has_text,
        )
        return Result(payload, form="proto")

    async def _score(self, work: Command) -> Result:
        sampler = self._desk.state.sampler(work.tenant, work.owner)
        body = ScoreBody.model_validate_json(work.body)
        score = await self._drawing.score(work, sampler, body)
        rows = Rows(score.top_logprobs, list)
        document = {**score_document(score), "top_logprobs": rows}
        return Result(await asyncio.to_thread(encode, document))

    async def _finish(self, work: Command, result: Result) -> None:
        """Once: who comes second, the drawing or the cancelling, changes nothing. It is pending
        until the journal has its result: a snapshot has the one or the other."""
        futures = self._desk.futures
        if futures.is_storing(work.id) or work.id not in self._desk.pending:
            return
        if (future := futures.known(work.id)) is not None:
            future.storing = result
        header = {
            "entry": "answer",
            "id": work.id,
            "form": result.form,
            "is_failure": result.is_failure,
        }
        stored = self._desk.wal.append(header, result.payload)
        # Also when whoever waits here is cancelled.
        stored.add_done_callback(lambda done: self._stored(work, result, done))
        await asyncio.shield(stored)

    def _stored(self, work: Command, result: Result, done: "asyncio.Future[list[int]]") -> None:
        if not done.cancelled() and done.exception() is None:
            self._desk.pending.remove(work.id)
            self._desk.futures.finish(work.id, result)


def read_draw(desk: Desk, drawing: Drawing, work: Command) -> Draw:
    """What an accepted sample asks for; a refusal when it can never be drawn.

    Without a seed of its own a sample gets one from its id, so that it is drawn alike after a
    restart.
    """
    request = Sample.model_validate_json(work.body)
    prompt = prompt_tokens(request.prompt)
    sampler = desk.state.sampler(work.tenant, work.owner)
    options = request.sampling_params
    max_tokens = drawing.max_tokens(
        sampler.base_model, asked=options.max_tokens, num_prompt=len(prompt)
    )
    has_scores = request.prompt_logprobs or request.topk_prompt_logprobs
    seed = stream_seed(0, work.id) if options.seed is None else options.seed & (2**63 - 1)
    return Draw(
        id=work.id,
        tenant=work.tenant,
        base_model=sampler.base_model,
        blob=sampler.blob,
        prompt=prompt,
        params=sampling_params(request, seed=seed, max_tokens=max_tokens),
        scored=(request.prompt_logprobs_last_n or len(prompt)) if has_scores else 0,
        top_k=request.topk_prompt_logprobs,
        targets=target_tokens(request, num_prompt=len(prompt)),
        alternatives=request.prompt_alt_tokens_k,
        has_text=request.return_text,
    )
