"""The training loop: ready requests -> calls of the trainer -> results.

    buffers (order by number) -> fair queue (by tokens) -> stages -> trainer -> journal -> futures

| stage    | consumes            | produces            | waits for                          |
|----------|---------------------|---------------------|------------------------------------|
| `add`    | accepted commands   | ready works         | nothing                            |
| the loop | ready works         | outcomes            | works; the trainer                 |
| commit   | outcomes            | entries, results    | the disk                           |

One loop serves all models. A failed request has a result that says so, and affects no other.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Generic, TypeVar

from rookery.errors import RookeryError, ServiceError, boundary
from rookery.service.context import ServiceContext, Throughput
from rookery.service.fair_queue import FairQueue
from rookery.service.records import Model
from rookery.service.trainer_calls import PassRecord, TrainerCalls, WorkOutcome, finish_pass
from rookery.service.work import Command

__all__ = [
    "ReorderBuffer",
    "TrainingLoop",
    "stages",
]

# Requests of one model in the order of their numbers, however they arrive.
#
#     buffer = ReorderBuffer(next_seq=1)
#     buffer.add(2, "b")        # -> []          2 waits for 1
#     buffer.add(1, "a")        # -> ["a", "b"]
#
# The SDK sends the chunks of one call concurrently, the first of them last.


Item = TypeVar("Item")


class ReorderBuffer(Generic[Item]):
    """Requests of one model that were not released yet."""

    def __init__(self, *, next_seq: int) -> None:
        self.next_seq = next_seq
        """Number that is released next."""
        self._waiting: dict[int, Item] = {}

    def add(self, seq: int, item: Item) -> list[Item]:
        """Add an item; return the items released by it, in order."""
        self._waiting[seq] = item
        return self._release()

    def skip(self, through: int) -> tuple[list[Item], list[Item]]:
        """Stop waiting for numbers up to `through`; return the items that waited up to it, and the
        items released by it, in order."""
        lost = [self._waiting.pop(seq) for seq in sorted(self._waiting) if seq <= through]
        self.next_seq = max(self.next_seq, through + 1)
        return lost, self._release()

    def _release(self) -> list[Item]:
        released = []
        while self.next_seq in self._waiting:
            released.append(self._waiting.pop(self.next_seq))
            self.next_seq += 1
        return released

    @property
    def free_seq(self) -> int:
        """Number for an item without one: after all others."""
        return max(self._waiting, default=self.next_seq - 1) + 1

    @property
    def waiting(self) -> list[Item]:
        """Items that wait for an earlier number."""
        return list(self._waiting.values())

    def clear(self) -> list[Item]:
        """Drop and return the waiting items."""
        waiting, self._waiting = self.waiting, {}
        return waiting


# Works that are computed together: stages of one kind, with each model's works in order.
#
#     ada:  fb fb step        stage 1   forward_backward   ada ada bob
#     bob:  fb step           stage 2   optim_step         ada bob cyd
#     cyd:  step
#
# Gradients of all models come before steps, so that as many models as possible share a call. A work
# that may have killed the service before runs alone.


_TOGETHER = ("forward_backward", "forward")
"""Kinds of which all leading works of a model go into one call."""


def stages(
    works: Sequence[Command], *, is_alone: Callable[[Command], bool] = lambda _: False
) -> Iterator[list[Command]]:
    """Yield the calls in order, each with works of one kind and one base model."""
    lines: dict[str, deque[Command]] = {}
    for work in works:
        lines.setdefault(work.owner, deque()).append(work)
    while lines:
        kind, base_model = min(
            ((line[0].kind, line[0].base_model) for line in lines.values()), key=_rank
        )
        heads = [line for line in lines.values() if _call(line[0]) == (kind, base_model)]
        heads.sort(key=lambda line: not is_alone(line[0]))
        if kind not in (*_TOGETHER, "optim_step") or is_alone(heads[0][0]):
            heads = heads[:1]
        stage: list[Command] = []
        for line in heads:
            stage.append(line.popleft())
            while (
                kind in _TOGETHER
                and line
                and _call(line[0]) == (kind, base_model)
                and not any(map(is_alone, (stage[0], line[0])))
            ):
                stage.append(line.popleft())
        yield stage
        lines = {owner: line for owner, line in lines.items() if line}


def _call(work: Command) -> tuple[str, str]:
    return work.kind, work.base_model


def _rank(call: tuple[str, str]) -> tuple[int, str]:
    """Rank creation and loading first, then gradients, then steps."""
    order = {"forward_backward": 1, "forward": 2, "optim_step": 3}
    return order.get(call[0], 0), call[1]


FIRST_PASS_TOKENS = 1024
"""Size of the first pass, when the speed is unknown."""
LEAST_PASS_TOKENS = 64
"""So few tokens hardly take longer together than one request alone, on any machine."""
COMPUTED = ("forward_backward", "forward", "optim_step", "refused")
"""Kinds whose time depends on their tokens; making, loading and saving cost a whole pass."""
LEAST_JOURNAL_BYTES = 8 << 20
"""Lower bound on the journal size that triggers a snapshot, in bytes."""


class TrainingLoop:
    """Takes works, and gives each a result. One task runs it."""

    def __init__(self, context: ServiceContext) -> None:
        self._context = context
        self._calls = TrainerCalls(context)
        self._buffers: dict[str, ReorderBuffer[Command]] = {}
        # Filled by `add`, drained by `run`; bounded by limits that are checked before.
        self._queue: FairQueue[str] = FairQueue()
        self._changed = asyncio.Event()
        self._removals: list[Model] = []
        self._overdue: list[Command] = []
        self._running: frozenset[str] = frozenset()
        self._is_stopping = False
        self.throughput = Throughput()
        self.trained_s = 0.0
        """Seconds in the trainer since the last snapshot."""
        self._snapshot_bytes = 0
        """Size of all live models' snapshots at the last one; many models may have ended since."""

    def buffer(self, model_id: str) -> ReorderBuffer[Command]:
        buffer = self._buffers.get(model_id)
        if buffer is None:
            model = self._context.state.models.get(model_id)
            buffer = self._buffers[model_id] = ReorderBuffer(
                next_seq=model.next_seq if model else 0
            )
        return buffer

    def add(self, work: Command) -> None:
        """Queue a work, and the works that waited for it."""
        self._put(self.buffer(work.owner).add(work.seq, work))

    def _put(self, ready: Sequence[Command]) -> None:
        for work in ready:
            self._queue.put(work.id, tenant=work.tenant, tokens=self._cost(work))
        self._changed.set()

    def give_up_gaps(self, *, before: float) -> None:
        """Fail requests from before this time that still wait for an earlier one."""
        for model_id, buffer in self._buffers.items():
            overdue = [work.seq for work in buffer.waiting if work.time < before]
            # Released works come first, as a model's numbers only go up.
            if overdue and self._context.state.models[model_id].next_seq == buffer.next_seq:
                lost, ready = buffer.skip(max(overdue))
                self._overdue += lost
                self._put(ready)

    def end_model(self, model: Model) -> list[Command]:
        """Forget a model; return its works that wait for numbers that never came."""
        self._removals.append(model)
        self._changed.set()
        buffer = self._buffers.pop(model.id, None)
        given_up = [work for work in self._overdue if work.owner == model.id]
        self._overdue = [work for work in self._overdue if work.owner != model.id]
        return [*given_up, *(buffer.clear() if buffer is not None else [])]

    async def run(self, snapshot: Callable[[], Awaitable[None]]) -> None:
        """Serve until `stop`; call `snapshot` between passes when one is due."""
        self._measure_snapshots()
        while not self._is_stopping:
            await self._changed.wait()
            self._changed.clear()
            while not self._is_stopping:
                await self._remove_models()
                await self._fail_overdue()
                await self._cycle()
                if self.is_snapshot_due:
                    await snapshot()
                    self.trained_s = 0.0
                    self._measure_snapshots()
                if self._queue.head() is None:
                    break

    @property
    def is_snapshot_due(self) -> bool:
        config = self._context.config
        most = max(self._snapshot_bytes // 2, LEAST_JOURNAL_BYTES)
        limit = min(config.journal_mib * 2**20, most)
        return self.trained_s > config.snapshot_s or self._context.wal.num_bytes > limit

    def _measure_snapshots(self) -> None:
        models = self._context.state.models.values()
        self._snapshot_bytes = sum(model.snapshot_bytes for model in models if model.is_live)

    def wake(self) -> None:
        """Check whether a snapshot is due, even if nothing is trained."""
        self._changed.set()

    def stop(self) -> None:
        """End after the running call; queued works stay pending."""
        self._is_stopping = True
        self._changed.set()

    async def replay(self, record: PassRecord) -> None:
        """Compute a pass from before a restart again."""
        works = [self._context.pending[work_id] for work_id in record.ids]
        for work in works:  # works that were given up may still wait
            lost, ready = self.buffer(work.owner).skip(work.seq)
            self._overdue += [one for one in lost if one.id not in record.ids]
            self._put(ready)
        for work in works:
            self._queue.remove(work.id)
        await self._perform(works, record)

    def describe(self, work: Command) -> tuple[str, str]:
        """Return a work's queue state and a sentence about it."""
        if work.id in self._running:
            return "active", "It is being computed."
        place = self._queue.place(work.id)
        if place is None:
            number = self.buffer(work.owner).next_seq
            return "active", f"It waits for request {number} of this model, which has not come."
        sentence = f"Place {place.ahead + 1} of {len(self._queue)} in the training queue"
        if self.throughput.per_s:
            sentence += f", about {place.tokens_ahead / self.throughput.per_s:.0f} s"
        return "paused_capacity" if place.ahead else "active", f"{sentence}."

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def tokens_waiting(self) -> int:
        return self._queue.tokens

    async def _cycle(self) -> None:
        works = self._take()
        self._running = frozenset(work.id for work in works)
        for stage in stages(works, is_alone=self._context.pending.is_suspect):
            if self._is_stopping:
                return
            await self._perform(stage, None)
        self._running = frozenset()

    def _take(self) -> list[Command]:
        """Take works in fair order for a pass of `pass_s` seconds, at least one. So new requests
        wait no longer than that, however long the queue is."""
        room, works, tokens = self._pass_tokens, list[Command](), 0
        while (work_id := self._queue.head()) is not None:
            work = self._context.pending[work_id]
            cost = self._cost(work)
            if works and tokens + cost > room:
                break
            self._queue.take()
            works.append(work)
            tokens += cost
        return works

    def _cost(self, work: Command) -> int:
        return work.tokens if work.kind in COMPUTED else self._pass_tokens

    @property
    def _pass_tokens(self) -> int:
        """Tokens that the trainer computes in `pass_s`."""
        config = self._context.config
        per_pass = config.pass_s * self.throughput.per_s or FIRST_PASS_TOKENS
        return int(min(config.pass_tokens, max(per_pass, LEAST_PASS_TOKENS)))

    async def _perform(self, works: Sequence[Command], record: PassRecord | None) -> None:
        started = time.monotonic()
        if works[0].kind == "forward_backward":
            with self.throughput.running(sum(work.tokens for work in works)):
                outcomes = await self._outcomes(works, record)
        else:
            outcomes = await self._outcomes(works, record)
        self.trained_s += time.monotonic() - started
        self._count(works)
        await finish_pass(self._context, outcomes, record)

    async def _outcomes(
        self, works: Sequence[Command], record: PassRecord | None
    ) -> list[WorkOutcome]:
        """Compute the works; return an outcome each, in order. Errors become outcomes."""
        doable, outcomes = self._calls.sort_out(works, record)
        if doable:
            is_new = record is None
            try:
                with boundary(ServiceError, f"{doable[0].kind} failed"):
                    async with self._context.computing(doable) if is_new else nullcontext():
                        outcomes += await self._calls.call(doable, record)
            except RookeryError as error:
                sentence = self._context.sentence(error)
                outcomes += [WorkOutcome.failure(work, sentence, "server") for work in doable]
        by_id = {outcome.work.id: outcome for outcome in outcomes}
        return [by_id[work.id] for work in works]

    def _count(self, works: Sequence[Command]) -> None:
        metrics, call = self._context.metrics, works[0].kind
        metrics.passes.labels(call).inc()
        metrics.pass_requests.labels(call).inc(len(works))
        for work in works:
            metrics.tokens.labels("trained", work.tenant).inc(work.tokens)

    async def _fail_overdue(self) -> None:
        lost, self._overdue = self._overdue, []
        if lost:
            sentence = (
                "An earlier request of this model did not come within "
                f"{self._context.config.gap_s:g} s: send its requests with numbers that follow "
                "each other."
            )
            outcomes = [WorkOutcome.failure(work, sentence, "user") for work in lost]
            await finish_pass(self._context, outcomes, None)

    async def _remove_models(self) -> None:
        while self._removals:
            model = self._removals.pop()
            # A model that was never created may be of a base model that is no longer served.
            if (backend := self._context.backends.get(model.base_model)) is not None:
                await backend.trainees.remove(model.id)
