"""Batches from environments, through the gateway in this process or one elsewhere.

Each batch is durable before it is trained on.

    source = AtroposSource(feed, config=config, run=run)
    batch = await source.batch(step, policy=policy)

| stage   | consumes       | produces            | waits for                    |
|---------|----------------|---------------------|------------------------------|
| feed    | groups         | a batch             | environments, within batch_s |
| filter  | a batch        | groups to train on  | nothing                      |
| store   | a batch        | a durable batch     | the disk                     |
| ack     | a durable one  | room in the queue   | the disk                     |
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from http import HTTPStatus
from statistics import fmean
from typing import Any, Protocol

import aiohttp
from pydantic import TypeAdapter, ValidationError

from rookery.compat.atropos.engine_side import Drawn, EngineSide
from rookery.compat.atropos.gateway import Gateway
from rookery.compat.atropos.group_queue import QueuedGroup, TrainerRegistration
from rookery.compat.atropos.programs import Programs
from rookery.compat.atropos.scored_group import ScoredGroup, check_group, drawn_sequences
from rookery.errors import TaskError
from rookery.loops.grpo import GrpoConfig
from rookery.loops.grpo.batch import Batch, BatchCounts, DrawnGroup, DrawnRollout, is_equal
from rookery.loops.grpo.group_source import BatchStore, Policy, check_failures
from rookery.runs import Run
from rookery.runtime.retry import Backoff
from rookery.types import ModelRef, TokenSequence

__all__ = [
    "AtroposSource",
    "ClientFeed",
    "FedBatch",
    "FedGroup",
    "Feed",
    "GatewayClient",
    "GatewayFeed",
    "open_client",
]


# Client of a gateway or a `run-api` elsewhere, for a trainer.
#
#     async with open_client(url) as client:
#         await client.register(registration)
#         number, groups = await client.batch(after=3)
#
# A gateway of Rookery repeats a batch until a later question names it; a `run-api` sends it once.


REQUEST_S = 120.0
RETRY_S = 60.0
"""Seconds to keep asking a gateway that does not answer: it may be restarting."""
_RETRY = Backoff(first_s=0.1, longest_s=5.0)
POLL_S = 0.2
ALIVE_S = 5.0
"""Seconds between signs of life: a gateway refuses a second trainer while it hears of one."""
_LOST = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError)
"""Errors from a gateway killed before or during its answer."""
_GROUPS = TypeAdapter(list[ScoredGroup])


class _Busy(TaskError):
    """Another trainer is active there."""


class GatewayClient:
    """Client of one gateway, by its URL."""

    def __init__(self, url: str, session: aiohttp.ClientSession, *, key: str) -> None:
        self._url = url.rstrip("/")
        self._session = session
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._registration: TrainerRegistration | None = None
        self._number = ""
        """Number of this trainer at the gateway."""

    async def register(self, registration: TrainerRegistration) -> None:
        """Register. TaskError if another trainer is still active after `RETRY_S`: a killed
        predecessor stays registered for a while."""
        self._registration = registration
        document = registration.model_dump(mode="json")
        answer = await _RETRY.persist(
            lambda: self._ask("POST", "/register", document), on=_Busy, limit_s=RETRY_S
        )
        self._number = str(answer.get("uuid", ""))

    async def stay_known(self) -> None:
        """Send signs of life until cancelled. The next question reports errors too."""
        while True:
            await asyncio.sleep(ALIVE_S)
            if self._number:
                with contextlib.suppress(TaskError, aiohttp.ClientError, TimeoutError):
                    await self._once("GET", f"/status?trainer={self._number}", None)

    async def batch(self, *, after: int) -> tuple[int, Sequence[ScoredGroup]]:
        """Wait for the batch after number `after`; return its number and groups."""
        while True:
            answer = await self._next(after)
            if answer.get("status") == "error" and self._registration is not None:
                # It was restarted and lost its trainer.
                await self.register(self._registration)
                answer = await self._next(after)
            if answer.get("status") == "error":
                raise TaskError(f"{self._url} gives no batches: {answer.get('message')}")
            if answer.get("batch"):
                break
            await asyncio.sleep(POLL_S)
        try:
            groups = await asyncio.to_thread(_GROUPS.validate_python, answer["batch"])
        except ValidationError as error:
            raise TaskError(f"Could not parse the batch from {self._url}: {error}") from error
        return int(answer.get("batch_id", after + 1)), groups

    async def _next(self, after: int) -> dict[str, Any]:
        return await self._ask("GET", f"/batch?after={after}&trainer={self._number}", None)

    async def _ask(self, method: str, path: str, document: Any) -> dict[str, Any]:
        return await _RETRY.persist(
            lambda: self._once(method, path, document), on=_LOST, limit_s=RETRY_S
        )

    async def _once(self, method: str, path: str, document: Any) -> dict[str, Any]:
        async with self._session.request(
            method,
            self._url + path,
            json=document,
            headers=self._headers,
            allow_redirects=False,
        ) as response:
            if response.status >= 300:
                said = response.headers.get("Location", "") or (await response.text())[:500]
                kind = _Busy if response.status == HTTPStatus.CONFLICT else TaskError
                raise kind(f"{self._url}{path} refused ({response.status}): {said}")
            answer: dict[str, Any] = await response.json()
            return answer


@asynccontextmanager
async def open_client(url: str, *, key: str = "") -> AsyncIterator[GatewayClient]:
    limits = aiohttp.ClientTimeout(total=REQUEST_S)
    async with aiohttp.ClientSession(timeout=limits) as session:
        client = GatewayClient(url, session, key=key)
        known = asyncio.create_task(client.stay_known())
        try:
            yield client
        except (aiohttp.ClientError, TimeoutError) as error:
            why = str(error) or f"nothing came in {REQUEST_S:g} s"
            raise TaskError(
                f"The gateway at {url} does not answer: {why}. Start it with `rookery grpo "
                "gateway` or `run-api`, or correct environment.url."
            ) from error
        finally:
            known.cancel()
            await asyncio.gather(known, return_exceptions=True)


LOOK_S = 0.5
"""Seconds between checks for other environments after the run's own programs have ended."""
TELL_S = 30.0
"""Seconds between progress messages of a run that waits for a batch."""
MANY = 4
"""Batches' worth of answers without a group that prove that environments send none on purpose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FedGroup:
    """One group, its environment, and how it was drawn if known."""

    number: int
    """Number of the group, unique in the run."""
    environment: str
    group: ScoredGroup
    draws: tuple[Drawn | None, ...]
    error: str = ""
    """Why it cannot be trained on; empty if it can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FedBatch:
    """Groups of one step."""

    number: int
    groups: tuple[FedGroup, ...]


@dataclass(frozen=True, slots=True)
class _Begun:
    """Time and engine counters when a batch was requested."""

    time_s: float
    num_answers: int
    num_tokens: int


class Feed(Protocol):
    """Source of a training's batches."""

    def use(self, ref: ModelRef, *, step: int) -> None:
        """Set the policy that answers from now on, after this many steps."""
        ...

    async def take(self, step: int, *, after: int) -> FedBatch:
        """Return the batch after number `after` for a step; TaskError if none comes."""
        ...

    async def acknowledge(self, batch: FedBatch) -> None:
        """Release a batch that is durable in the run."""
        ...


class GatewayFeed:
    """The gateway in this process."""

    def __init__(
        self,
        gateway: Gateway,
        side: EngineSide,
        *,
        programs: Programs,
        limit_s: float,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`say` receives progress messages while a batch takes long."""
        self._gateway = gateway
        self._side = side
        self._programs = programs
        self._limit_s = limit_s
        self._say = say
        self._taken: dict[int, Sequence[QueuedGroup]] = {}

    def use(self, ref: ModelRef, *, step: int) -> None:
        self._side.use(ref, step=step)
        self._gateway.step = step

    async def take(self, step: int, *, after: int) -> FedBatch:
        gateway = self._gateway
        gateway.is_started, gateway.step = True, step
        trainer = gateway.registry.trainer
        assert trainer is not None, "the run registered itself"
        batch = await self._before_the_end(trainer.batch_size)
        self._taken[after + 1] = batch
        return FedBatch(number=after + 1, groups=tuple(self._fed(queued) for queued in batch))

    def _fed(self, queued: QueuedGroup) -> FedGroup:
        env_id = queued.group.env_id
        name = "" if env_id is None else self._gateway.registry.find(env_id).name
        return FedGroup(number=queued.seq, environment=name, group=queued.group, draws=queued.draws)

    async def _before_the_end(self, num_sequences: int) -> Sequence[QueuedGroup]:
        """Wait for a batch; TaskError if there will be none."""
        taking = asyncio.create_task(self._gateway.queue.take(num_sequences))
        ended = asyncio.create_task(self._wait_all_gone())
        began = _Begun(time.monotonic(), self._side.num_answers, self._side.num_tokens)
        telling = asyncio.create_task(self._tell(began, num_sequences))
        try:
            async with asyncio.timeout(self._limit_s):
                await asyncio.wait({taking, ended}, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            raise TaskError(
                f"No batch of {num_sequences} sequences came together in {self._limit_s:g} s "
                f"(environment.batch_s): {self._state()}; {self._pace(began, num_sequences)}."
            ) from None
        finally:
            for task in (taking, ended, telling):
                task.cancel()
        if taking.done() and not taking.cancelled():
            return taking.result()
        raise TaskError(f"No environment is left: {ended.result()}. {self._state()}.")

    async def _tell(self, began: "_Begun", num_sequences: int) -> None:
        while True:
            await asyncio.sleep(TELL_S)
            self._say(f"waiting for a batch: {self._pace(began, num_sequences)}")

    def _pace(self, began: "_Begun", num_sequences: int) -> str:
        """Say how far the batch is, and what the engine has done meanwhile."""
        took_s = time.monotonic() - began.time_s
        num = sum(group.size for group in self._gateway.queue.groups)
        answers = self._side.num_answers - began.num_answers
        speed = (self._side.num_tokens - began.num_tokens) / max(took_s, 1e-3)
        said = f"{num} of {num_sequences} sequences have come in {took_s:.0f} s, of "
        said += f"{answers} answers of the engine ({speed:.0f} tokens/s)"
        if 0 < num < num_sequences:
            said += f"; the rest takes about {took_s * (num_sequences - num) / num:.0f} s"
        elif not num and answers >= MANY * num_sequences:
            said += "; most environments send no group whose answers are all worth the same"
        return said

    async def _wait_all_gone(self) -> str:
        """Wait until the run's programs have ended and other environments are silent; return the
        last program's message. Foreign environments rarely announce their end."""
        said = await self._programs.ended()
        while self._live:  # noqa: ASYNC110 - nobody tells that an environment is silent
            await asyncio.sleep(LOOK_S)
        return said

    @property
    def _live(self) -> list[str]:
        registry = self._gateway.registry
        return [e.name for e in registry.environments if registry.is_live(e)]

    def _state(self) -> str:
        gateway, live = self._gateway, self._live
        groups, buffered = gateway.queue.groups, gateway.queue.buffered_sizes
        said = (
            f"{len(groups)} groups of {sum(group.size for group in groups)} sequences wait, and "
            f"the environments are {', '.join(live) or 'none'}"
        )
        if buffered:
            said += (
                f"; {len(buffered)} groups of {min(buffered)} to {max(buffered)} sequences do not "
                "make up the group_size that their environment registered"
            )
        if gateway.num_refused:
            said += f"; {gateway.num_refused} times groups were refused, the last time: "
            said += gateway.last_refusal.rstrip(".")
        return said

    async def acknowledge(self, batch: FedBatch) -> None:
        await self._gateway.queue.acknowledge(self._taken.pop(batch.number))


class ClientFeed:
    """A gateway or a `run-api` elsewhere. The next question acknowledges a batch."""

    def __init__(
        self, client: GatewayClient, *, vocab_size: int, max_tokens: int, limit_s: float
    ) -> None:
        """`max_tokens` limits a sequence; a `run-api` passes on longer ones."""
        self._client = client
        self._vocab_size = vocab_size
        self._max_tokens = max_tokens
        self._limit_s = limit_s

    def use(self, ref: ModelRef, *, step: int) -> None:
        """Does nothing: the environments' engine is not known here."""

    async def take(self, step: int, *, after: int) -> FedBatch:
        try:
            async with asyncio.timeout(self._limit_s) as limit:
                number, groups = await self._client.batch(after=after)
        except TimeoutError:
            if not limit.expired():  # the gateway's own: it does not answer
                raise
            raise TaskError(
                f"No batch came in {self._limit_s:g} s (environment.batch_s): look at the "
                "environments of the gateway."
            ) from None
        fed = [self._fed((step << 20) + place, group) for place, group in enumerate(groups)]
        return FedBatch(number=number, groups=tuple(fed))

    def _fed(self, number: int, group: ScoredGroup) -> FedGroup:
        error = ""
        try:
            check_group(group, vocab_size=self._vocab_size, max_tokens=self._max_tokens)
        except TaskError as refused:
            error = str(refused)
        name = "" if group.env_id is None else f"environment_{group.env_id}"
        draws = (None,) * group.size
        return FedGroup(number=number, environment=name, group=group, draws=draws, error=error)

    async def acknowledge(self, batch: FedBatch) -> None:
        """The next question does this."""


class AtroposSource:
    """Batches of one run, step by step. Request them in order, one at a time."""

    def __init__(self, feed: Feed, *, config: GrpoConfig, run: Run) -> None:
        self._feed = feed
        self._config = config
        self._store = BatchStore(run)

    def use(self, policy: Policy) -> None:
        """Have environments get answers from new weights."""
        self._feed.use(policy.ref, step=policy.step)

    async def batch(self, step: int, *, policy: Policy) -> Batch:
        """Return the batch of a step: read from the run, or waited for and stored."""
        known = await self._store.read(step)
        if known is not None:
            return known
        before = self._store.event(step - 1)
        after = 0 if before is None else int(before.payload["batch_id"])
        fed = await self._feed.take(step, after=after)
        batch = self._make_batch(step, fed, policy)
        check_failures(step, batch.counts, max_share=self._config.max_failed_share)
        numbers = [group.number for group in fed.groups]
        await self._store.write(batch, groups=numbers, batch_id=fed.number)
        await self._feed.acknowledge(fed)
        return batch

    async def release(self, *, before: int) -> None:
        """Remove rollouts of steps below `before`, which a checkpoint has, unless all are kept."""
        if not self._config.keep_rollouts:
            await self._store.release(before=before)

    def _make_batch(self, step: int, fed: FedBatch, policy: Policy) -> Batch:
        whole = [group for group in fed.groups if not group.error]
        groups = [_drawn_group(group, self._config) for group in whole]
        # Unknown draws count as older, so that the engine scores some of them anew.
        steps = [
            max(step - 1, 0) if drawn is None else drawn.step
            for group in whole
            for drawn in group.draws
        ]
        return Batch(
            step=step,
            model=policy.ref,
            model_step=min([policy.step, *steps]),
            groups=tuple(group for group in groups if _teaches(group)),
            next_position=0,
            counts=_count(fed, groups),
        )


def _teaches(group: DrawnGroup) -> bool:
    """True if rewards differ, or the environment gives a nonzero advantage."""
    if all(rollout.advantages is not None for rollout in group.rollouts):
        return any(any(rollout.advantages or ()) for rollout in group.rollouts)
    rewards = [rollout.reward for rollout in group.rollouts]
    return len(rewards) > 1 and not is_equal(rewards)


def _drawn_group(fed: FedGroup, config: GrpoConfig) -> DrawnGroup:
    group = fed.group
    sequences = drawn_sequences(group)
    return DrawnGroup(
        position=fed.number,
        task=f"{fed.environment or 'group'} {fed.number}",
        rollouts=tuple(
            DrawnRollout(
                sequences=(_with_kept(sequence, fed.draws[row]),),
                text=_text(group, row),
                reward=group.scores[row],
                advantages=_own_advantages(group, row, sequence.drawn),
                reference_logprobs=_at(group.ref_logprobs, row, sequence.drawn),
                temperature=_temperature(group, row, fed.draws[row]) or config.drawing.temperature,
            )
            for row, sequence in enumerate(sequences)
        ),
    )


def _with_kept(sequence: TokenSequence, drawn: Drawn | None) -> TokenSequence:
    return sequence if drawn is None else replace(sequence, kept=drawn.kept)


def _own_advantages(group: ScoredGroup, row: int, drawn: Sequence[int]) -> tuple[float, ...] | None:
    """Return the environment's own advantages; None if the scores decide."""
    if _override(group, row).get("set_advantage_to_zero"):
        return (0.0,) * len(drawn)
    return _at(group.advantages, row, drawn) or None


def _at(
    rows: Sequence[Sequence[float]] | None, row: int, drawn: Sequence[int]
) -> tuple[float, ...]:
    return () if rows is None else tuple(rows[row][place] for place in drawn)


def _override(group: ScoredGroup, row: int) -> Mapping[str, Any]:
    return group.overrides[row] if group.overrides else {}


def _temperature(group: ScoredGroup, row: int, drawn: Drawn | None) -> float | None:
    """Return the temperature of the answer, from the group or the draw; None if unknown."""
    sources = (_override(group, row), group.generation_params or {}, group.group_overrides or {})
    temperature = next((one["temperature"] for one in sources if one.get("temperature")), None)
    if temperature is not None:
        return float(temperature)
    return drawn.temperature if drawn is not None and drawn.temperature > 0 else None


def _text(group: ScoredGroup, row: int) -> str:
    """Return the last message, if messages were sent."""
    messages = group.messages[row] if group.messages else []
    return str(messages[-1].get("content", "")) if messages else ""


def _count(fed: FedBatch, drawn: Sequence[DrawnGroup]) -> BatchCounts:
    failed = [group for group in fed.groups if group.error]
    rewards = [rollout.reward for group in drawn for rollout in group.rollouts]
    by_environment: dict[str, list[float]] = {}
    for group in fed.groups:
        if not group.error:
            by_environment.setdefault(group.environment, []).extend(group.group.scores)
    return BatchCounts(
        num_rollouts=sum(group.group.size for group in fed.groups),
        num_failed=sum(group.group.size for group in failed),
        num_equal=sum(not _teaches(group) for group in drawn),
        num_tokens=sum(r.num_drawn for group in drawn for r in group.rollouts),
        mean_reward=fmean(rewards) if rewards else None,
        first_error=failed[0].error if failed else "",
        metrics={
            f"{name}/reward": fmean(scores) for name, scores in by_environment.items() if name
        },
    )
