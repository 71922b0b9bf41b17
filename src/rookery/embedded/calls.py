"""Checks requests and turns them into jobs, and tracks the calls that wait for the jobs' answers.
Every call ends with its answers or with an error.

    callers: await calls.answered(jobs)        driver: added, dropped = calls.take()
                                                       calls.leave(jobs)    # answered or dropped
                                                       calls.fail(jobs, error)

A job is in flight until `leave` or `fail`, even if its caller was cancelled: until then the batcher
may hold memory for it and compute with its adapter.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rookery.embedded.batcher import Job, SampleJob, ScoreJob
from rookery.embedded.prefill import CachedPrompt
from rookery.errors import EngineError, RookeryError
from rookery.slots import ModelShape
from rookery.types import ModelRef, Penalties, SampleRequest, SamplingParams, ScoreRequest, TokenIds

__all__ = ["Calls", "RequestLimits", "sample_job", "score_job"]


MIN_TEMPERATURE = 1e-6
"""Logits divided by a smaller temperature overflow float32; 0 is greedy."""
PENALTIES = "a repetition above 0, presence and frequency from -2 to 2"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """Limits on every request: the model's context and the device's memory."""

    shape: ModelShape
    memory_bytes: int
    token_bytes: int
    """Memory of one cached token."""


def sample_job(request: SampleRequest, *, slot: int | None, limits: RequestLimits) -> SampleJob:
    """Check a request and make its job. `max_tokens` is reduced to fit the model's context."""
    shape = limits.shape
    if request.json_schema:
        raise EngineError(
            "The embedded engine cannot hold answers to a JSON schema (response_format, or a "
            "tool_choice other than auto and none): leave it out, or serve the model with vLLM."
        )
    _check_params(request.params, shape)
    _check_prompt(request.prompt, limits, reserve=1)
    _check_tokens(request.params.stop_tokens, shape)
    return SampleJob(
        request=request,
        prompt=CachedPrompt(tokens=request.prompt, slot=slot),
        max_tokens=min(request.params.max_tokens, shape.context_tokens - len(request.prompt)),
    )


def score_job(request: ScoreRequest, *, slot: int | None, limits: RequestLimits) -> ScoreJob:
    _check_prompt(request.tokens, limits, reserve=0)
    _check_tokens(request.labels, limits.shape)
    _check_counts({"start": request.start, "top_logprobs": request.top_logprobs})
    _check_top(request.top_logprobs, limits.shape)
    if not 1 <= request.start <= len(request.tokens):
        raise EngineError(
            f"A score request starts at {request.start} of {len(request.tokens)} tokens; it may "
            "start at 1 to their number: the first token has nothing to be predicted from."
        )
    return ScoreJob(request=request, prompt=CachedPrompt(tokens=request.tokens, slot=slot))


def _check_prompt(tokens: TokenIds, limits: RequestLimits, *, reserve: int) -> None:
    if len(tokens) == 0:
        raise EngineError("A request has no prompt tokens; give at least one.")
    shape = limits.shape
    limit = shape.context_tokens - reserve
    if len(tokens) > limit:
        raise EngineError(
            f"A prompt has {len(tokens)} tokens; this model reads at most {limit}: "
            f"{shape.beyond_context}."
        )
    needed_bytes = len(tokens) * limits.token_bytes
    if needed_bytes > limits.memory_bytes:
        raise EngineError(
            f"A prompt has {len(tokens)} tokens, whose keys and values take "
            f"{needed_bytes / 2**30:.3g} GiB; this device has "
            f"{limits.memory_bytes / 2**30:.3g} GiB: shorten it, or load the model in bfloat16."
        )
    _check_tokens(tokens, shape)


def _check_tokens(tokens: TokenIds, shape: ModelShape) -> None:
    if type(tokens) is not tuple or not set(map(type, tokens)) <= {int}:
        raise EngineError(
            f"Tokens are a tuple of int, got {tokens!r:.80}: write tuple(tokenizer.encode(text))."
        )
    if tokens and not 0 <= min(tokens) <= max(tokens) < shape.vocab_size:
        wrong = next(t for t in tokens if not 0 <= t < shape.vocab_size)
        raise EngineError(
            f"Token {wrong} is not in the vocabulary 0 to {shape.vocab_size - 1}: was the prompt "
            "made with another tokenizer?"
        )


def _check_counts(counts: Mapping[str, int]) -> None:
    for name, count in counts.items():
        if type(count) is not int:
            raise EngineError(f"{name} is {count!r}; it must be a whole number.")


def _check_top(num_top: int, shape: ModelShape) -> None:
    if not 0 <= num_top <= shape.vocab_size:
        raise EngineError(f"top_logprobs is {num_top!r}; it must be 0 to the vocabulary.")


def _check_params(params: SamplingParams, shape: ModelShape) -> None:
    _check_counts(
        {
            "max_tokens": params.max_tokens,
            "top_k": params.top_k,
            "n": params.n,
            "seed": params.seed,
            "top_logprobs": params.top_logprobs,
        }
    )
    _check_top(params.top_logprobs, shape)
    is_warm = params.temperature == 0 or MIN_TEMPERATURE <= params.temperature < math.inf
    rules = (
        (params.max_tokens >= 1, "max_tokens", params.max_tokens, "1 or more"),
        (is_warm, "temperature", params.temperature, f"0 (greedy) or at least {MIN_TEMPERATURE}"),
        (0 < params.top_p <= 1, "top_p", params.top_p, "above 0, at most 1"),
        (params.top_k >= 0, "top_k", params.top_k, "0 (all) or more"),
        (0 <= params.min_p <= 1, "min_p", params.min_p, "0 to 1"),
        (params.n >= 1, "n", params.n, "1 or more"),
        (_are_penalties(params.penalties), "penalties", params.penalties, PENALTIES),
        (_are_texts(params.stop), "stop", params.stop, "a tuple of non-empty strings"),
    )
    for is_fine, name, value, allowed in rules:
        if not is_fine:
            raise EngineError(f"{name} is {value!r}; it must be {allowed}.")


def _are_penalties(penalties: Penalties | None) -> bool:
    if penalties is None:
        return True
    is_fine = 0 < penalties.repetition < math.inf
    return is_fine and abs(penalties.presence) <= 2 and abs(penalties.frequency) <= 2


def _are_texts(stop: tuple[str, ...]) -> bool:
    return isinstance(stop, tuple) and all(isinstance(text, str) and text for text in stop)


@dataclass(slots=True, eq=False)
class _Call:
    """One `sample` or `score` call: its jobs, and the future that its caller awaits."""

    jobs: Sequence[Job]
    done: asyncio.Future[None]
    num_open: int


class Calls:
    """All open calls of one event loop. Bounded by the callers: each awaits its call."""

    def __init__(self) -> None:
        self.changed = asyncio.Event()
        """Set when the driver has work; the driver clears it."""
        self.idle = asyncio.Event()
        """Set while nothing is in flight."""
        self.idle.set()
        self._by_job: dict[int, _Call] = {}
        self._num_jobs: Counter[ModelRef] = Counter()
        # Filled by callers, drained by the driver's `take`.
        self._added: list[_Call] = []
        self._dropped: list[_Call] = []

    @property
    def num_in_flight(self) -> int:
        return len(self._by_job)

    def uses(self, ref: ModelRef) -> bool:
        return ref in self._num_jobs

    async def answered(self, jobs: Sequence[Job]) -> None:
        """Queue the jobs and wait until all have results."""
        if not jobs:
            return
        call = _Call(jobs, asyncio.get_running_loop().create_future(), len(jobs))
        self._by_job.update({id(job): call for job in jobs})
        self.idle.clear()
        self._num_jobs.update(job.request.model for job in jobs)
        self._added.append(call)
        self.changed.set()
        try:
            await call.done
        except asyncio.CancelledError:
            self._dropped.append(call)
            self.changed.set()
            raise

    def take(self) -> tuple[list[Job], list[Job]]:
        """Return the jobs added, and those whose callers were cancelled, since the last `take`."""
        added = [job for call in self._added for job in call.jobs]
        dropped = [job for call in self._dropped for job in call.jobs]
        self._added.clear()
        self._dropped.clear()
        return added, dropped

    def leave(self, jobs: Iterable[Job]) -> None:
        """Record that the batcher no longer holds these jobs. A call ends with its last job."""
        for job in jobs:
            call = self._by_job.pop(id(job), None)
            if call is None:
                continue
            self._num_jobs[job.request.model] -= 1
            if not self._num_jobs[job.request.model]:
                del self._num_jobs[job.request.model]
            call.num_open -= 1
            if call.num_open == 0 and not call.done.done():
                call.done.set_result(None)
        if not self._by_job:
            self.idle.set()
        self.changed.set()

    def taken(self) -> list[Job]:
        """Return the jobs in flight that the driver has taken."""
        fresh = set(map(id, self._added))
        calls = {id(call): call for call in self._by_job.values() if id(call) not in fresh}
        return [job for call in calls.values() for job in call.jobs if id(job) in self._by_job]

    def drop(self, job: Job, error: RookeryError) -> None:
        """End the call of this job with an error; the next step drops the call's jobs."""
        call = self._by_job.get(id(job))
        if call is not None and not call.done.done():
            call.done.set_exception(error)
            self._dropped.append(call)

    def fail(self, jobs: Iterable[Job], error: EngineError) -> None:
        """End the calls of these jobs with an error. The batcher must no longer hold them."""
        calls = {id(call): call for job in jobs if (call := self._by_job.get(id(job)))}
        for call in calls.values():
            if not call.done.done():
                call.done.set_exception(error)
            self.leave(call.jobs)

    def end(self, error: EngineError) -> None:
        """End every call, including calls that the driver has not taken."""
        self._added.clear()
        self.fail(self.taken(), error)
        self._dropped.clear()
        self.changed.set()
