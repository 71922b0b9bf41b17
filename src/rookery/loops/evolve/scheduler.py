"""Scheduler of a search: starts attempts, takes them through their stages, tells their results.

    ask -> planned -> [model calls] -> generated -> [evaluations] -> evaluated -> tell

| stage    | waits for                                        | limit                             |
|----------|--------------------------------------------------|-----------------------------------|
| ask      | room: fewer than `in_flight` model calls,        | the end of attempts in flight     |
|          | waiting children within `BacklogLimit`, and      |                                   |
|          | budget for all attempts in flight                |                                   |
| generate | one of `in_flight` credits, then the model       | the model's own limits, retries   |
| compare  | one of `in_flight` credits, then the embedding   | their own limits; a failure is    |
|          | server and a judge, if configured                | counted and the child goes on     |
| evaluate | one of PER_WORKER credits per worker, then the   | `Job.limit_s`; two lost workers   |
|          | executor                                         | fail the child as `poison`        |
| tell     | its turn (deterministic)                         | the end of earlier attempts       |
| announce | the disk, then observer and files                | QUEUE entries, then tells wait    |

Every stage is an event of the run before the next one begins. A tell is applied and submitted to
the event log in one step, so that events are in the order of state changes. Resuming replays these
tells. Nothing generated is asked for again, nothing evaluated is evaluated again.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from rookery.loops.evolve.learning import Learning
from rookery.loops.evolve.order import (
    BacklogLimit,
    Order,
    SearchProgress,
    SteadyOrder,
    find_exhausted,
    share_spent,
    stop_reason,
)
from rookery.loops.evolve.outputs import Due, Outputs
from rookery.loops.evolve.parts import Iteration, SearchParts
from rookery.loops.evolve.program_evaluator import Lease
from rookery.loops.evolve.proposer import UNCOMPARED, Child, Comparison
from rookery.loops.evolve.search_state import SearchState, program_id
from rookery.loops.evolve.stages import (
    AttemptDecision,
    Evaluated,
    Generated,
    Planned,
    Stages,
    read_stages,
    to_data,
)
from rookery.loops.evolve.tuning import TUNE
from rookery.runs import Attempt, AttemptLog, AttemptState, Event
from rookery.runs.budget import find_hours_over
from rookery.runtime.concurrency import task_group
from rookery.search.programs.database import Ask, Tell, Window
from rookery.search.programs.program import Member

__all__ = ["AttemptScheduler"]

logger = logging.getLogger(__name__)

PER_WORKER = 3
"""Evaluations begun per worker: one runs, one waits for its lease and one for its result to reach
the disk, so that no worker is idle. The executor queues the rest."""

DOWN_POLL_S = 1.0
"""After the hours are over, seconds between checks for a model that is down."""
QUEUE = 64
"""Decisions on their way to the disk before the search waits."""


@dataclass(slots=True, kw_only=True)
class _Announcement:
    """A decision that counts and is yet to be announced."""

    stored: "Future[list[Event]] | None" = None
    """Ends when the decision is durable; None for one of an earlier process."""
    iteration: Iteration | None = None
    due: Due | None = None
    is_last_recorded: bool = False


class AttemptScheduler:
    """Runs one search: the evolution, or a baseline in its own series."""

    def __init__(
        self,
        parts: SearchParts,
        state: SearchState,
        *,
        num_attempts: int,
        series: str = "",
        outputs: Outputs | None = None,
        learning: Learning | None = None,
    ) -> None:
        self._parts = parts
        self._state = state
        self._num_attempts = num_attempts
        self._series = series
        self._outputs = outputs
        self._learning = learning
        self._log = AttemptLog(parts.run, series=series)
        # Credits, taken and returned by `_generate` and `_evaluate`.
        self._model_calls = asyncio.Semaphore(parts.config.rookery.in_flight)
        self._evaluations = asyncio.Semaphore(PER_WORKER * parts.config.workers)
        self._backlog = BacklogLimit(num_workers=parts.config.workers)
        self._num_waiting = 0
        self._open: set[int] = set()
        self._running: dict[int, asyncio.Task[None]] = {}
        self._generating: set[int] = set()
        self._tunings: set[int] = set()
        """Open tunings with a time limit. Later attempts wait for their better parents."""
        self._num_begun = 0
        self._recorded: dict[int, Stages] = {}
        self._num_recorded = 0
        """Recorded decisions that are still to be replayed. They come first."""
        self._changed = asyncio.Event()
        # Filled by `_conclude` in order of decision, drained by `_announce`.
        self._announcements: asyncio.Queue[_Announcement | None] = asyncio.Queue(maxsize=QUEUE)
        self._started = time.monotonic()
        self._earlier_s = 0.0
        self.stop_reason = ""

    async def run(self) -> None:
        """Resume the run and continue until all attempts are decided or a rule stops it."""
        self._recorded, decided = await asyncio.to_thread(
            read_stages, self._parts.run, series=self._series
        )
        order = self._order(decided)
        self._num_recorded = len(decided)
        if not decided:
            await self._note_resumed()
        try:
            async with task_group() as group:
                group.create_task(self._announce(), name="announce")
                await self._take_steps(order, group)
        finally:
            if self._learning is not None:
                await self._learning.close()

    async def _take_steps(self, order: Order, group: asyncio.TaskGroup) -> None:
        while True:
            self._stop_if_due(order)
            await self._learn()
            match order.next_step():
                case Ask(attempt=number):
                    self._begin(number, order, group)
                case Tell(attempt=number, result=stages):
                    await self._conclude(number, stages)
                case None:
                    if not self._running:
                        await self._announcements.put(None)
                        return
                    await self._wait_for_change()

    async def _learn(self) -> None:
        if self._learning is not None:
            num_begun = self._state.num_decided + len(self._open)
            await self._learning.advance(
                has_left=not self.stop_reason and num_begun < self._num_attempts,
                limit_s=self._left_s(),
                on_end=self._changed.set,
            )

    @property
    def elapsed_s(self) -> float:
        """Run time over all processes."""
        return self._earlier_s + time.monotonic() - self._started

    def _order(self, decided: list[int]) -> Order:
        self._earlier_s = max(
            (one.decision.elapsed_s for one in self._recorded.values() if one.decision),
            default=self._state.elapsed_s,
        )
        if self._state.lag is not None:
            return Window[Stages](
                width=self._state.lag, num_attempts=self._num_attempts, may_begin=self._may_begin
            )
        return SteadyOrder(
            num_attempts=self._num_attempts,
            has_room=self._has_room,
            may_begin=self._may_begin,
            decided={number: self._recorded.pop(number) for number in decided},
            planned=list(self._recorded),
        )

    def _has_room(self) -> bool:
        config = self._parts.config
        is_backlog_full = self._num_waiting >= self._backlog.max_waiting
        if self._tunings and self._num_begun - min(self._tunings) >= config.rookery.in_flight:
            return False
        return len(self._generating) < config.rookery.in_flight and not is_backlog_full

    def _may_begin(self, number: int) -> bool:
        """Return True if the budget allows it. Attempts of earlier processes are already
        counted."""
        known = self._recorded.get(number)
        if known is not None and known.decision is not None:
            return True
        return not self._find_hours_over() and (known is not None or not self._find_exhausted())

    def _find_exhausted(self) -> str:
        return find_exhausted(
            self._parts.config.rookery.budget,
            self._state.spending,
            num_told=self._state.num_decided,
            num_open=len(self._open),
        )

    def _stop_if_due(self, order: Order) -> None:
        reason = stop_reason(
            SearchProgress(
                num_attempts=self._num_attempts,
                num_decided=self._state.num_decided,
                num_open=len(self._open),
                num_recorded=self._num_recorded,
                elapsed_s=self.elapsed_s,
                goal_reason=self._state.stop_reason,
                budget=self._parts.config.rookery.budget,
                spending=self._state.spending,
            )
        )
        if reason:
            self.stop_reason = self.stop_reason or reason
            order.stop()

    def _find_hours_over(self) -> str:
        return find_hours_over(self._parts.config.rookery.budget, elapsed_s=self.elapsed_s)

    async def _wait_for_change(self) -> None:
        """Wait until an attempt moves on. When the hours are over and a model is down, cancel its
        attempts: they stay planned, and run if the run goes on."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._left_s()):
                await self._changed.wait()
        self._changed.clear()
        if self._find_hours_over() and self._parts.proposer.is_down:
            self.stop_reason = self.stop_reason or self._find_hours_over()
            for number in self._generating or self._running:  # the latter wait for judges
                self._running[number].cancel()

    def _left_s(self) -> float | None:
        """Return the seconds left in the budget, at least one; None without a limit."""
        max_hours = self._parts.config.rookery.budget.max_hours
        return None if max_hours is None else max(max_hours * 3600 - self.elapsed_s, DOWN_POLL_S)

    def _begin(self, number: int, order: Order, group: asyncio.TaskGroup) -> None:
        stages = self._recorded.pop(number, Stages())
        self._open.add(number)
        if stages.decision is not None:
            order.decide(number, stages)
            return
        is_new = stages.planned is None
        if is_new:
            stages = replace(stages, planned=self._plan(number))
        assert stages.planned is not None
        self._state.note_planned(stages.planned.plan)
        self._num_begun = max(self._num_begun, number)
        tune = self._parts.config.rookery.tune
        if tune is not None and tune.seconds and stages.planned.plan.operator == TUNE:
            self._tunings.add(number)
        work = self._attempt(number, stages, is_new=is_new, decide=order.decide)
        task = group.create_task(work, name=f"attempt {number}")
        self._running[number] = task
        if stages.generated is None:
            self._generating.add(number)
        task.add_done_callback(lambda _: self._note_end(number))

    def _note_end(self, number: int) -> None:
        del self._running[number]
        self._generating.discard(number)
        self._changed.set()

    def _plan(self, number: int) -> Planned:
        plan = self._state.database.ask(number)
        if self._parts.config.rookery.tune is not None:
            plan = self._state.plan_tuning(plan)
        return Planned(
            plan=plan,
            best_score=self._state.best.score,
            num_decided=self._state.num_decided,
            num_embedded=self._state.novelty.num_embedded,
        )

    async def _attempt(
        self, number: int, stages: Stages, *, is_new: bool, decide: Callable[[int, Stages], None]
    ) -> None:
        child: Child | None = None
        if stages.generated is None:
            stages, child = await self._generate(number, stages, is_new=is_new)
        if stages.evaluated is None and stages.failure is None:
            stages = await self._evaluate(number, stages, child)
        decide(number, stages)

    async def _generate(
        self, number: int, stages: Stages, *, is_new: bool
    ) -> tuple[Stages, Child | None]:
        planned, epoch = stages.planned, stages.epoch + 1
        assert planned is not None
        begun = [Attempt(number=number, state="planned", data=to_data(planned))] if is_new else []
        begun.append(_lease(number, "generation", epoch, stages.num_lost))
        try:
            async with self._model_calls:
                await self._log.record(begun)
                with self._backlog.model.timed():
                    generated, child = await self._parts.proposer.generate(planned.plan)
                await self._record(number, "generated", generated, epoch=epoch)
        finally:
            self._generating.discard(number)
            self._changed.set()
        return replace(stages, generated=generated, epoch=epoch), child

    async def _evaluate(self, number: int, stages: Stages, child: Child | None) -> Stages:
        planned, generated = stages.planned, stages.generated
        assert planned is not None and generated is not None
        self._num_waiting += 1
        try:
            child = child or await self._parts.proposer.read(planned.plan, generated)
            assert child is not None, "an answer that was a child is one again"
            comparison = await self._compare(planned, child)
            await self._evaluations.acquire()
        finally:
            self._num_waiting -= 1
            self._changed.set()
        try:
            lease = Lease(number, self._note_lease, epoch=stages.epoch, num_lost=stages.num_lost)
            evaluated = await self._measure(planned, child, comparison, lease)
            if evaluated.seconds and planned.plan.operator != TUNE:
                self._backlog.evaluation.add(evaluated.seconds)
            await self._record(number, "evaluated", evaluated, epoch=lease.epoch)
        finally:
            self._evaluations.release()
        return replace(stages, evaluated=evaluated, epoch=lease.epoch, num_lost=lease.num_lost)

    async def _compare(self, planned: Planned, child: Child) -> Comparison:
        """Compare a child with programs that its attempt may know. Takes a model call's credit."""
        novelty, attempt = self._parts.novelty, planned.plan.attempt
        if novelty is None or planned.plan.operator == TUNE:
            return UNCOMPARED
        if self._state.find_repeated(attempt, child.code_hash):
            return UNCOMPARED
        async with self._model_calls:
            return await novelty.compare(
                child, attempt=attempt, find=partial(self._state.find_similar, planned)
            )

    async def _measure(
        self, planned: Planned, child: Child, comparison: Comparison, lease: Lease
    ) -> Evaluated:
        if planned.plan.operator == TUNE:
            best_score = planned.best_score
            return await self._parts.evaluator.tune(child, lease=lease, best_score=best_score)
        repeated = self._state.find_repeated(lease.attempt, child.code_hash) or comparison.failure
        if repeated is not None:
            return comparison.note_in(Evaluated(failure=repeated))
        evaluated = await self._parts.evaluator.evaluate(
            comparison.note_on(child), lease=lease, best_score=planned.best_score
        )
        return comparison.note_in(evaluated)

    async def _conclude(self, number: int, stages: Stages) -> None:
        """Decide and tell. State and event change together: there must be no await in between."""
        self._open.discard(number)
        self._tunings.discard(number)
        decision = stages.decision or self._state.decide(stages, elapsed_s=self.elapsed_s)
        if stages.evaluated is not None and stages.evaluated.program:
            self._parts.store.add(program_id(number), stages.evaluated.program)
        before, is_new = self._state.best, stages.decision is None
        member = self._state.tell(number, stages, decision)
        announcement = _Announcement(is_last_recorded=not is_new and self._num_recorded == 1)
        if is_new:
            state: AttemptState = "failed" if decision.failure else "committed"
            attempt = Attempt(number=number, state=state, data=to_data(decision))
            announcement.stored = self._log.submit([attempt])
            announcement.iteration = self._describe(number, stages, decision, member)
        else:
            self._num_recorded -= 1
        if self._outputs is not None:
            is_best = self._state.best.id != before.id
            announcement.due = self._outputs.find_due(member, is_best=is_best, is_new=is_new)
        await self._announcements.put(announcement)

    async def _announce(self) -> None:
        """Report each decision, once durable, to observer and files, in order. Later attempts do
        not wait: their events follow in the log."""
        while (announcement := await self._announcements.get()) is not None:
            if announcement.stored is not None:
                await asyncio.wrap_future(announcement.stored)
            if announcement.iteration is not None:
                self._parts.observer.on_step(announcement.iteration)
                self._tell_budget()
            if self._outputs is not None and announcement.due is not None:
                await self._outputs.write(announcement.due)
            if announcement.is_last_recorded:
                await self._note_resumed()

    def _tell_budget(self) -> None:
        if self._series:
            return  # a baseline spends what the evolution did
        budget, spending = self._parts.config.rookery.budget, self._state.spending
        share = share_spent(budget, spending, elapsed_s=self.elapsed_s)
        if share is not None:
            self._parts.observer.on_budget(share)

    async def _note_resumed(self) -> None:
        if self._outputs is not None:
            await self._outputs.note_resumed()

    def _describe(
        self, number: int, stages: Stages, decision: AttemptDecision, member: Member | None
    ) -> Iteration:
        generated, evaluated, best = stages.generated, stages.evaluated, self._state.best
        assert generated is not None
        counts = (generated.prompt_tokens, generated.completion_tokens)
        iteration = Iteration(
            series=self._series,
            number=number,
            num_decided=self._state.num_decided,
            num_iterations=self._num_attempts,
            model=generated.model,
            program=member.id if member else "",
            score=member.score if member else None,
            best_score=best.score,
            is_best=member is not None and member.id == best.id,
            failure=decision.failure.kind if decision.failure else "",
            message=decision.failure.message if decision.failure else "",
            tokens=None if None in counts else sum(count or 0 for count in counts),
            evaluation_s=evaluated.seconds if evaluated else None,
        )
        outcome = f"{iteration.failure}: {iteration.message}" if member is None else member.id
        logger.info("Iteration %d: %s, score %s", number, outcome, iteration.score)
        return iteration

    async def _record(
        self,
        number: int,
        state: AttemptState,
        data: Generated | Evaluated,
        *,
        epoch: int = 0,
    ) -> None:
        attempt = Attempt(number=number, state=state, epoch=epoch, data=to_data(data))
        await self._log.record([attempt])

    async def _note_lease(self, lease: Lease) -> None:
        leased = _lease(lease.attempt, "evaluation", lease.epoch, lease.num_lost)
        await self._log.record([leased])


def _lease(number: int, stage: str, epoch: int, num_lost: int) -> Attempt:
    data = {"stage": stage, "num_lost": num_lost}
    return Attempt(number=number, state="leased", epoch=epoch, data=data)
