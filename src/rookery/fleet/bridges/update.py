"""New base weights for all servers of a fleet, each proved by the canary before it takes requests.

    update = BaseUpdate(fleet, canary)
    async with update.lock:
        await update.publish(give, logprobs, ref, again=give)

`give` puts the weights into one server. A server that fails takes no requests. A server that is
lost or restarts later gets the newest weights when it is back, and takes requests after it has
proved that it has them.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from rookery.errors import FleetError, RookeryError
from rookery.fleet.fleet import Fleet
from rookery.fleet.http.capabilities import Capabilities
from rookery.fleet.http.client import ServerLost
from rookery.fleet.http.wire import Fields, read_reading
from rookery.fleet.routing.load import Call
from rookery.fleet.routing.paused import VERSION
from rookery.fleet.routing.replica import Replica
from rookery.runtime.concurrency import run_to_end, together
from rookery.types import Adapter, Datum, ModelRef, TokenIds

__all__ = [
    "PAUSE",
    "PAUSE_ROUTE",
    "SMALLEST_VOCABULARY",
    "BaseUpdate",
    "Canary",
    "CanaryRead",
    "Give",
    "Logprobs",
    "first_wrong",
    "paused",
    "resume",
    "resume_all",
]


# The proof that a server computes with the weights it was given: the log-probabilities after a
# fixed text must agree between trainer and server.
#
#     canary = Canary.of(fleet.capabilities, is_float32=True)
#     expected = await logprobs(canary)                            # computed by the trainer
#     read = await canary.read(replica, ref)                       # one prompt, one token
#     canary.is_far(read, expected), canary.gap(read, expected)    # in nats
#
# The text is longer than two blocks of the prefix cache and always the same, so that a server that
# still has keys and values of older weights is found out.


_NUM_IDS = 9
SMALLEST_VOCABULARY = 1 + _NUM_IDS
"""Smallest vocabulary size that the canary supports."""
_NUM_AFTER = 7
"""Tokens after the two blocks: they are computed anew when the blocks are cached."""
_FLOAT32_NATS = 1e-3
"""Limit between two programs in float32, which differ by 1e-5."""
_HALF_NATS = 0.5
"""Limit between two programs in half precision. One rounded logit of the likeliest token moves all
log-probabilities alike: by up to 0.25 for SmolLM2 in bfloat16."""
_PLAIN_NATS = 8.0
"""Size of a logit that bfloat16 rounds by 0.03."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """A text, the tokens compared after it, and how far their log-probabilities may differ.

    With tokens (1, 3, 8) and ids (1, 2) it compares log p(1 | 1 3 8) and log p(2 | 1 3 8).
    """

    tokens: TokenIds
    ids: TokenIds
    limit_nats: float
    num_spared: int = 0
    """Number of ids that may differ by more. After a text that no model was trained on, two
    programs in half precision differ by a nat at single tokens."""

    @classmethod
    def of(
        cls, capabilities: Capabilities, *, is_float32: bool, vocab_size: int = SMALLEST_VOCABULARY
    ) -> "Canary":
        """Spread text and ids over the vocabulary: in half precision, rounding is ten times larger
        for a text of a few repeated tokens."""
        length = 2 * capabilities.block_tokens + _NUM_AFTER
        if capabilities.max_model_len is not None:
            length = min(length, capabilities.max_model_len - 1)
        num = vocab_size - 1
        return cls(
            tokens=tuple(1 + (i * i * 7919 + i * 104729) % num for i in range(length)),
            ids=tuple(1 + i * num // _NUM_IDS for i in range(_NUM_IDS)),
            limit_nats=_FLOAT32_NATS if is_float32 else _HALF_NATS,
            num_spared=0 if is_float32 else _NUM_IDS // 2,
        )

    @property
    def datum(self) -> Datum:
        """The canary as a datum, for which a trainer returns the log-probabilities."""
        return Datum(
            tokens=self.tokens,
            positions=(len(self.tokens) - 1,) * len(self.ids),
            targets=self.ids,
            weights=(0.0,) * len(self.ids),
        )

    async def read(
        self, replica: Replica, ref: ModelRef, adapter: Adapter | None = None
    ) -> Sequence[float]:
        """Return what one server reads; without an adapter, from its base model."""
        call = Call(
            ref=ref,
            is_base=adapter is None,
            is_any_base=True,
            fields=Fields(ids=self.ids),
            prompts=(self.tokens,),
            arrival_s=0.0,
            prefix=(),
        )
        [[choice]] = await replica.serve(call, adapter)
        row = read_reading(choice).after
        return [row.get(token, float("inf")) for token in self.ids]

    def gap(self, read: Sequence[float], expected: Sequence[float]) -> float:
        """Return the largest difference, in nats."""
        return max(abs(a - b) for a, b in zip(read, expected, strict=True))

    def is_far(self, read: Sequence[float], expected: Sequence[float]) -> bool:
        """True if differences exceed rounding error or are NaN. Logits are rounded in proportion to
        their size, so tokens less likely than e^-8 may differ by proportionally more."""
        num_far = sum(
            not abs(a - b) <= self.limit_nats * max(1.0, abs(b) / _PLAIN_NATS)
            for a, b in zip(read, expected, strict=True)
        )
        return num_far > self.num_spared


Logprobs = Callable[[Canary], Awaitable[Sequence[float]]]
"""Returns the log-probabilities of a canary's ids under the weights being published."""


# Servers that compute nothing while their weights change.
#
#     async with paused(replicas):
#         model.set_weights(weights)                       # memory that the servers compute with


PAUSE_ROUTE = "/pause"
PAUSE = f"{PAUSE_ROUTE}?mode=keep"
"""vLLM then also forgets cached prefixes and restarts requests in flight from their prompts."""


@asynccontextmanager
async def paused(replicas: Sequence[Replica]) -> AsyncIterator[None]:
    """Pause these servers inside the block, with empty caches: requests of other clients may be in
    flight while weights are written."""
    try:
        await together(replica.client.post(PAUSE, b"") for replica in replicas)
        yield
    except BaseException:  # on any failure, waiting requests continue
        await run_to_end(resume_all(replicas))
        raise
    for answer in await run_to_end(resume_all(replicas)):
        if isinstance(answer, BaseException):
            raise answer


async def resume(replica: Replica) -> None:
    await replica.client.post("/resume", b"")


async def resume_all(replicas: Sequence[Replica]) -> list[Any]:
    """Resume all servers, even if some cannot be reached; return an answer or an error of each."""
    return await asyncio.gather(*map(resume, replicas), return_exceptions=True)


logger = logging.getLogger(__name__)

Give = Callable[[Replica], Awaitable[None]]
"""Puts the newest weights into one server."""
Explain = Callable[[Replica], Awaitable[str]]
"""Returns which weight of a server is wrong, as the end of a sentence; empty if none."""


@dataclass(frozen=True, slots=True)
class _Newest:
    again: Give
    expected: Sequence[float]
    ref: ModelRef


@dataclass(frozen=True, slots=True)
class CanaryRead:
    """Answer of a server's process to the canary."""

    process: str
    logprobs: Sequence[float]


@dataclass(frozen=True, slots=True)
class _Asked:
    """A canary that waits at a paused server."""

    process: str
    answer: asyncio.Task[Sequence[float]]


async def _unexplained(_: Replica) -> str:
    return ""


class BaseUpdate:
    """Weights that a fleet's servers should have. One update at a time."""

    def __init__(
        self,
        fleet: Fleet,
        canary: Canary,
        *,
        explain: Explain = _unexplained,
        can_renew: bool = True,
    ) -> None:
        """`can_renew`: the weights are kept for servers that come back after a loss."""
        self._fleet = fleet
        self._can_renew = can_renew
        self._canary = canary
        self._explain = explain
        self._newest: _Newest | None = None
        self._asked: dict[Replica, _Asked] = {}
        self.lock = asyncio.Lock()
        """Held while weights change; a server that comes back meanwhile gets them afterwards."""
        for replica in fleet.pool.replicas:
            replica.renew = self._renew

    async def ask_ahead(self, replica: Replica) -> None:
        """Send the canary to a paused server ahead of time: it is read as soon as the server
        resumes, without a round trip. The caller holds the lock, and publishes or forgets it."""
        process = await replica.proof.running()
        if self._newest is None or replica.proof.is_by(process):
            answer = asyncio.create_task(self._canary.read(replica, replica.base))
            self._asked[replica] = _Asked(process, answer)

    async def forget_asked(self) -> None:
        """Cancel the canaries that were sent ahead."""
        answers = [asked.answer for asked in self._asked.values()]
        self._asked.clear()
        for answer in answers:
            answer.cancel()
        await asyncio.gather(*answers, return_exceptions=True)

    async def publish(
        self, give: Give, logprobs: Logprobs, ref: ModelRef, *, again: Give
    ) -> float | None:
        """Give all servers the weights; return the largest difference seen afterwards, in nats.
        None if all servers are lost: they get the weights before they take requests again.

        `logprobs` computes with the weights meanwhile. `again` is for servers that restarted since
        the last update. Then `fleet.base` is `ref`. FleetError if a server failed that took
        requests before; the others go on with the new weights. The caller holds the lock.
        """
        replicas = self._fleet.pool.replicas
        were_up = [not r.is_given_up and not r.breaker.is_open for r in replicas]
        either = give if self._newest is None else _for_either(give, again)
        computing = asyncio.ensure_future(logprobs(self._canary))
        try:
            read = await asyncio.gather(
                *(self._read(r, give if r in self._asked else either, ref) for r in replicas)
            )
            newest = self._newest = _Newest(again, await computing, ref)
        finally:
            computing.cancel()
            await self.forget_asked()
        outcomes = await asyncio.gather(
            *(self._judge(r, one, newest) for r, one in zip(replicas, read, strict=True))
        )
        proved = [r for r, o in zip(replicas, outcomes, strict=True) if isinstance(o, float)]
        if proved or None in outcomes:
            self._fleet.rename_base(ref)
        for replica in proved:  # Only now: a request names the base model as the fleet does.
            replica.include()
        failed = [
            outcome
            for outcome, was_up in zip(outcomes, were_up, strict=True)
            if isinstance(outcome, RookeryError) and (was_up or not proved)
        ]
        if failed:
            others = "the others go on with them" if proved else "no server takes requests"
            raise FleetError(
                f"{len(failed)} of {len(replicas)} servers did not get the new weights, {others}: "
                f"{failed[0]}"
            )
        return max((outcome for outcome in outcomes if isinstance(outcome, float)), default=None)

    async def name(self, replica: Replica, ref: ModelRef) -> None:
        """Name the weights on a server, so that it can report which weights drew a token."""
        if replica.local is None:
            await replica.mark(ref.version)
        elif VERSION in replica.capabilities.routes:
            await replica.client.post_json(VERSION, {"new_version": ref.version})
        replica.base = ref

    async def _renew(self, replica: Replica) -> None:
        """Give the newest weights to a restarted server, which has its first ones."""
        async with self.lock:
            newest = self._newest
            if newest is None or await replica.proof.is_current():
                return
            read = await self._read(replica, newest.again, newest.ref)
            if isinstance(await self._judge(replica, read, newest), float):
                replica.include()

    async def _read(self, replica: Replica, give: Give, ref: ModelRef) -> CanaryRead | RookeryError:
        """Give one server the weights and read the canary; the server takes no requests."""
        replica.exclude(f"{replica.url} was given new weights, and did not confirm them.")
        try:
            if not replica.is_marked:
                await replica.mark(ref.version)
            await give(replica)
            asked = self._asked.pop(replica, None)
            if asked is not None:
                # A change may outlast a request's time limit: then ask again.
                with contextlib.suppress(ServerLost):
                    return CanaryRead(asked.process, await asked.answer)
            process = await replica.proof.running()
            if replica.base != ref:
                await self.name(replica, ref)
            return CanaryRead(process, await self._canary.read(replica, ref))
        except RookeryError as error:
            return error

    async def _judge(
        self, replica: Replica, read: CanaryRead | RookeryError, newest: _Newest
    ) -> float | RookeryError | None:
        """Return how far one server is off, or why it takes no requests any more. None if it is
        lost, and must prove itself when it is back."""
        try:
            if isinstance(read, RookeryError):
                raise read
            gap = self._canary.gap(read.logprobs, newest.expected)
            if self._canary.is_far(read.logprobs, newest.expected):
                raise FleetError(await self._complaint(replica, gap))
        except RookeryError as error:
            replica.exclude(str(error))
            if await self._is_lost(replica, error):
                replica.proof.withdraw()
                self._fleet.pool.suspect(replica, str(error))
                return None
            logger.warning("%s takes no requests: %s", replica.url, error)
            return error
        replica.proof.note(read.process)
        return gap

    async def _is_lost(self, replica: Replica, error: RookeryError) -> bool:
        """True if the server may come back: it is unreachable or its engine is dead. A healthy
        server that answers with an error would do so again."""
        if not isinstance(error, ServerLost) or replica.is_given_up or not self._can_renew:
            return False
        return error.is_broken or not await replica.client.is_healthy()

    async def _complaint(self, replica: Replica, gap: float) -> str:
        why = await self._explain(replica) or (
            "All its weights are right, so it computes with stale copies: keys and values cached "
            "for older weights, or packed weights. vLLM on the CPU keeps the old output layer of "
            "models with tied embeddings, unless launch.live_weights is true."
        )
        return (
            f"{replica.url} took the new weights but computes with others: log-probabilities are "
            f"off by {gap:.2g} nats, more than {self._canary.limit_nats:g}. {why} Restart it."
        )


def _for_either(give: Give, again: Give) -> Give:
    """Return a `Give` that uses `again` for servers with another process than the proved one."""

    async def choose(replica: Replica) -> None:
        await (again if await replica.proof.is_of_another() else give)(replica)

    return choose


def first_wrong(worker_sums: Sequence[Mapping[str, int]], expected: Mapping[str, int]) -> str:
    """Return a sentence on the first weight whose sum is wrong. Over the workers, a weight's sums
    must add up to the expected one, or each be equal to it."""
    for name, right in expected.items():
        sums = [worker[name] for worker in worker_sums if name in worker]
        if sums and sum(sums) != right and any(total != right for total in sums):
            return f"The first weight that differs is {name}."
    return ""
