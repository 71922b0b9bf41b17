"""The training loop: ready requests -> calls of the trainer -> results.

    lanes (order by number) -> fair queue (by tokens) -> stages -> trainer -> journal -> futures

| stage    | consumes            | produces            | waits for                          |
|----------|---------------------|---------------------|------------------------------------|
| `add`    | accepted commands   | ready works         | nothing                            |
| the loop | ready works         | outcomes            | works; the trainer                 |
| commit   | outcomes            | entries, results    | the disk                           |

One loop serves all models. A request that fails has a result that says so, and touches no other.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext

from rookery.errors import RookeryError, ServiceError, boundary
from rookery.service.desk import Desk
from rookery.service.fair_queue import FairQueue
from rookery.service.ordering import Lane
from rookery.service.outcomes import Outcome, PassRecord, finish_pass
from rookery.service.passes import stages
from rookery.service.records import Model
from rookery.service.throughput import Throughput
from rookery.service.trainer_calls import TrainerCalls
from rookery.service.work import Command

__all__ = ["TrainingLoop"]

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

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._calls = TrainerCalls(desk)
        self._lanes: dict[str, Lane[Command]] = {}
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

    def lane(self, model_id: str) -> Lane[Command]:
        lane = self._lanes.get(model_id)
        if lane is None:
            model = self._desk.state.models.get(model_id)
            lane = self._lanes[model_id] = Lane(next_seq=model.next_seq if model else 0)
        return lane

    def add(self, work: Command) -> None:
        """Queue a work, and those that waited for it."""
        self._put(self.lane(work.owner).add(work.seq, work))

    def _put(self, ready: Sequence[Command]) -> None:
        for work in ready:
            self._queue.put(work.id, tenant=work.tenant, tokens=self._cost(work))
        self._changed.set()

    def give_up_gaps(self, *, before: float) -> None:
        """Have requests fail that came before this time and still wait for an earlier one."""
        for model_id, lane in self._lanes.items():
            overdue = [work.seq for work in lane.waiting if work.time < before]
            # What was released is done first: a model's numbers go up.
            if overdue and self._desk.state.models[model_id].next_seq == lane.next_seq:
                lost, ready = lane.skip(max(overdue))
                self._overdue += lost
                self._put(ready)

    def end_model(self, model: Model) -> list[Command]:
        """Forget a model; the works that wait for numbers that never came are returned."""
        self._removals.append(model)
        self._changed.set()
        lane = self._lanes.pop(model.id, None)
        given_up = [work for work in self._overdue if work.owner == model.id]
        self._overdue = [work for work in self._overdue if work.owner != model.id]
        return [*given_up, *(lane.clear() if lane is not None else [])]

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
        config = self._desk.config
        most = max(self._snapshot_bytes // 2, LEAST_JOURNAL_BYTES)
        limit = min(config.journal_mib * 2**20, most)
        return self.trained_s > config.snapshot_s or self._desk.wal.num_bytes > limit

    def _measure_snapshots(self) -> None:
        models = self._desk.state.models.values()
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
        works = [self._desk.pending[work_id] for work_id in record.ids]
        for work in works:  # those that were given up may still wait
            lost, ready = self.lane(work.owner).skip(work.seq)
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
            number = self.lane(work.owner).next_seq
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
        for stage in stages(works, is_alone=self._desk.pending.is_suspect):
            if self._is_stopping:
                return
            await self._perform(stage, None)
        self._running = frozenset()

    def _take(self) -> list[Command]:
        """Works in fair order for a pass of `pass_s` seconds; at least one. Who comes now waits for
        no more than that, however much others have queued."""
        room, works, tokens = self._pass_tokens, list[Command](), 0
        while (work_id := self._queue.head()) is not None:
            work = self._desk.pending[work_id]
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
        config = self._desk.config
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
        await finish_pass(self._desk, outcomes, record)

    async def _outcomes(self, works: Sequence[Command], record: PassRecord | None) -> list[Outcome]:
        """One per work, in order. Whatever goes wrong in a call is the result of its works."""
        doable, outcomes = self._calls.sort_out(works, record)
        if doable:
            is_new = record is None
            try:
                with boundary(ServiceError, f"{doable[0].kind} failed"):
                    async with self._desk.computing(doable) if is_new else nullcontext():
                        outcomes += await self._calls.call(doable, record)
            except RookeryError as error:
                sentence = self._desk.sentence(error)
                outcomes += [Outcome.failure(work, sentence, "server") for work in doable]
        by_id = {outcome.work.id: outcome for outcome in outcomes}
        return [by_id[work.id] for work in works]

    def _count(self, works: Sequence[Command]) -> None:
        metrics, call = self._desk.metrics, works[0].kind
        metrics.passes.labels(call).inc()
        metrics.pass_requests.labels(call).inc(len(works))
        for work in works:
            metrics.tokens.labels("trained", work.tenant).inc(work.tokens)

    async def _fail_overdue(self) -> None:
        lost, self._overdue = self._overdue, []
        if lost:
            sentence = (
                f"An earlier request of this model did not come within {self._desk.config.gap_s:g} "
                "s: send its requests with numbers that follow each other."
            )
            outcomes = [Outcome.failure(work, sentence, "user") for work in lost]
            await finish_pass(self._desk, outcomes, None)

    async def _remove_models(self) -> None:
        while self._removals:
            model = self._removals.pop()
            # One that was never made may be of a base model that is not served any more.
            if (backend := self._desk.backends.get(model.base_model)) is not None:
                await backend.trainees.remove(model.id)
