"""The training loop: ready requests -> calls of the trainer -> results.

    buffers (order by number) -> fair queue (by tokens) -> stages -> trainer -> journal -> futures

| stage    | consumes            | produces            | waits for                          |
|----------|---------------------|---------------------|------------------------------------|
| `add`    | accepted commands   | ready works         | nothing                            |
| the loop | ready works         | outcomes            | works; the trainer                 |
| commit   | outcomes            | entries, results    | the disk                           |

One loop serves all models. A request that fails has a result that says so, and touches no other.
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
# The SDK sends the chunks of one call side by side, the first of them last.


Item = TypeVar("Item")


class ReorderBuffer(Generic[Item]):
    """The numbers of one model that have not been released yet."""

    def __init__(self, *, next_seq: int) -> None:
        self.next_seq = next_seq
        """The number that is released next."""
        self._waiting: dict[int, Item] = {}

    def add(self, seq: int, item: Item) -> list[Item]:
        """Take an item in; the items that can go now, in order."""
        self._waiting[seq] = item
        return self._release()

    def skip(self, through: int) -> tuple[list[Item], list[Item]]:
        """Wait for no number up to this one any more: the items that waited up to it, and those
        that can go now, in order."""
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
        """The number for an item that came without one: behind all others."""
        return max(self._waiting, default=self.next_seq - 1) + 1

    @property
    def waiting(self) -> list[Item]:
        """The items that wait for an earlier number."""
        return list(self._waiting.values())

    def clear(self) -> list[Item]:
        """Give up what still waits, and return it."""
        waiting, self._waiting = self.waiting, {}
        return waiting


# Which works are computed together: stages of one kind, each model's works in their order.
#
#     ada:  fb fb step        stage 1   forward_backward   ada ada bob
#     bob:  fb step           stage 2   optim_step         ada bob cyd
#     cyd:  step
#
# Gradients of all models come before steps, so that as many models as possible share a call. A work
# that may have ended the service before is alone.


_TOGETHER = ("forward_backward", "forward")
"""All that a model has at its head go into one call."""


def stages(
    works: Sequence[Command], *, is_alone: Callable[[Command], bool] = lambda _: False
) -> Iterator[list[Command]]:
    """Calls in order: each has works of one kind and one base model."""
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
    """Making and loading first, then gradients, steps last."""
    order = {"forward_backward": 1, "forward": 2, "optim_step": 3}
    return order.get(call[0], 0), call[1]


FIRST_PASS_TOKENS = 1024
"""Of the first pass, before it is known how many are computed in a second."""
LEAST_PASS_TOKENS = 64
"""So few take hardly longer together than one request alone, however slow the machine."""
COMPUTED = ("forward_backward", "forward", "optim_step", "refused")
"""What takes as long as its tokens. The others, which make, load and save models, count as a pass
of their own."""
LEAST_JOURNAL_BYTES = 8 << 20
"""The journal may become half as large as the snapshots, and this large in any case."""


class TrainingLoop:
    """Takes works in, and gives each of them a result. Run by one task."""

    def __init__(self, context: ServiceContext) -> None:
        self._context = context
        self._calls = TrainerCalls(context)
        self._buffers: dict[str, ReorderBuffer[Command]] = {}
        # Filled by `add`, drained by `run`; bounded by the limits that are looked at before.
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
        """Of all models, when the last snapshot was taken: there may be many that have ended."""

    def buffer(self, model_id: str) -> ReorderBuffer[Command]:
        buffer = self._buffers.get(model_id)
        if buffer is None:
            model = self._context.state.models.get(model_id)
            buffer = self._buffers[model_id] = ReorderBuffer(
                next_seq=model.next_seq if model else 0
            )
        return buffer

    def add(self, work: Command) -> None:
        """Queue a work, and those that waited for it."""
        self._put(self.buffer(work.owner).add(work.seq, work))

    def _put(self, ready: Sequence[Command]) -> None:
        for work in ready:
            self._queue.put(work.id, tenant=work.tenant, tokens=self._cost(work))
        self._changed.set()

    def give_up_gaps(self, *, before: float) -> None:
        """Have requests fail that came before this time and still wait for an earlier one."""
        for model_id, buffer in self._buffers.items():
            overdue = [work.seq for work in buffer.waiting if work.time < before]
            # What was released is done first: a model's numbers go up.
            if overdue and self._context.state.models[model_id].next_seq == buffer.next_seq:
                lost, ready = buffer.skip(max(overdue))
                self._overdue += lost
                self._put(ready)

    def end_model(self, model: Model) -> list[Command]:
        """Forget a model; the works that wait for numbers that never came are returned."""
        self._removals.append(model)
        self._changed.set()
        buffer = self._buffers.pop(model.id, None)
        given_up = [work for work in self._overdue if work.owner == model.id]
        self._overdue = [work for work in self._overdue if work.owner != model.id]
        return [*given_up, *(buffer.clear() if buffer is not None else [])]

    async def run(self, snapshot: Callable[[], Awaitable[None]]) -> None:
        """Serve until `stop`; `snapshot` is called between passes when it is time."""
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
        """See whether a snapshot is due, also when nothing is trained."""
        self._changed.set()

    def stop(self) -> None:
        """End after the call that is running; what is queued stays pending."""
        self._is_stopping = True
        self._changed.set()

    async def replay(self, record: PassRecord) -> None:
        """Do again what was done in a pass before a restart."""
        works = [self._context.pending[work_id] for work_id in record.ids]
        for work in works:  # those that were given up may still wait
            lost, ready = self.buffer(work.owner).skip(work.seq)
            self._overdue += [one for one in lost if one.id not in record.ids]
            self._put(ready)
        for work in works:
            self._queue.remove(work.id)
        await self._perform(works, record)

    def describe(self, work: Command) -> tuple[str, str]:
        """Its queue state and a sentence."""
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
        """Compute some works in stages."""
        works = self._take()
        self._running = frozenset(work.id for work in works)
        for stage in stages(works, is_alone=self._context.pending.is_suspect):
            if self._is_stopping:
                return
            await self._perform(stage, None)
        self._running = frozenset()

    def _take(self) -> list[Command]:
        """Works in fair order for a pass of `pass_s` seconds; at least one. Who comes now waits for
        no more than that, however much others have queued."""
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
        """That are computed in `pass_s`."""
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
        """One per work, in order. Whatever goes wrong in a call is the result of its works."""
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
            # One that was never made may be of a base model that is not served any more.
            if (backend := self._context.backends.get(model.base_model)) is not None:
                await backend.trainees.remove(model.id)
