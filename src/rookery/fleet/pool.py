"""The pool at work: takes calls, sends them where the router says, survives the loss of servers.

    callers --calls--> router --(call, lane)--> a task per call --choices--> callers
                         ^                          |
                         '---- lost with a server --'     once, elsewhere

| stage     | consumes           | produces             | waits for                              |
|-----------|--------------------|----------------------|----------------------------------------|
| `submit`  | calls              | choices per prompt   | its calls                              |
| `drive`   | waiting calls      | a task per call      | a call, an end, or a tick              |
| `_run`    | one call, one lane | choices, or a loss   | the server, within request_s           |
| `watch`   | one replica        | an open or shut lane | a loss, or the next regular look       |

A call that an idle lane took over runs twice: the first answer counts, the other is cancelled.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

from rookery.errors import FleetError, RookeryError, boundary
from rookery.fleet.client import ServerLost
from rookery.fleet.lane import Call, Lane
from rookery.fleet.replica import Replica
from rookery.fleet.router import Router
from rookery.fleet.wire import Choice
from rookery.types import Adapter, ModelRef

__all__ = ["Pool"]

logger = logging.getLogger(__name__)
TICK_S = 0.05
"""How often idle servers look for calls to take over."""
WATCH_S = 2.0
"""How often a healthy server's metrics are read."""
MAX_SENDS = 2
"""A call that died with its server is sent once more: a call that kills servers must not tour."""

Choices = list[list[Choice]]
Lookup = Callable[[ModelRef], Adapter | None]


class Pool:
    """Replicas under one router. `drive` and `watch` run as tasks of whoever owns the pool."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        *,
        find_adapter: Lookup,
        find_ref: Callable[[str], ModelRef | None],
        heal_s: float,
    ) -> None:
        self.replicas = list(replicas)
        self.router = Router([replica.lane for replica in replicas])
        self.num_resent = 0
        self.num_stolen = 0
        self._by_lane = {replica.lane.name: replica for replica in replicas}
        self._find_adapter = find_adapter
        self._find_ref = find_ref
        self._heal_s = heal_s
        self._dark_since_s: float | None = None
        self._answers: dict[Call, asyncio.Future[Choices]] = {}
        self._tasks: dict[tuple[Call, str], asyncio.Task[None]] = {}
        self._wake = asyncio.Event()

    async def submit(self, calls: Sequence[Call]) -> list[Choices]:
        """The choices of every call, in order. One that fails fails all; so does a cancellation."""
        loop = asyncio.get_running_loop()
        answers = [loop.create_future() for _ in calls]
        for call, answer in zip(calls, answers, strict=True):
            self._answers[call] = answer
            self.router.add(call)
        self._wake.set()
        try:
            return list(await asyncio.gather(*answers))
        finally:
            for call in calls:
                self._abandon(call)

    async def drive(self, group: asyncio.TaskGroup) -> None:
        """Send calls as they come and as lanes free up."""
        stole_s = 0.0
        while True:
            try:
                async with asyncio.timeout(TICK_S if self._answers else None):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            now_s = time.monotonic()
            placed = self.router.dispatch(now_s)
            if len(self.replicas) > 1 and now_s - stole_s >= TICK_S:
                stolen = self.router.steal(now_s)
                self.num_stolen += len(stolen)
                placed += stolen
                stole_s = now_s
            for call, lane in placed:
                task = group.create_task(self._run(call, lane))
                self._tasks[call, lane.name] = task
                # One that is cancelled before it began never reaches its own end.
                task.add_done_callback(partial(self._end_unbegun, call, lane))
            self._give_up_in_the_dark(now_s)

    async def watch(self, replica: Replica) -> None:
        """Keep one replica's lane right: shut while it is dead, open again when it is back."""
        while True:
            try:
                async with asyncio.timeout(self._pause_s(replica)):
                    await replica.attention.wait()
            except TimeoutError:
                pass
            replica.attention.clear()
            try:
                with boundary(FleetError, f"Looking after {replica.url}"):
                    await self._look(replica)
            except FleetError as error:
                replica.last_error = str(error)
                replica.breaker.record_failed_probe(now_s=time.monotonic())
                self._evacuate(replica)
            self._wake.set()
            if replica.is_given_up:
                logger.error("%s is given up: %s", replica.url, replica.last_error)
                return

    async def _look(self, replica: Replica) -> None:
        if replica.local is not None and not replica.local.is_alive:
            replica.lane.is_open = False
            replica.is_given_up = True
            await replica.local.restart()
            replica.is_given_up = False
            await replica.reconnect(self._find_ref)
            logger.info("%s is back", replica.url)
        elif replica.breaker.is_open:
            if not replica.breaker.should_probe(now_s=time.monotonic()):
                return
            if not await replica.client.is_healthy():
                raise ServerLost(replica.last_error, is_broken=True)
            await replica.reconnect(self._find_ref)
            logger.info("%s is back", replica.url)
        else:
            await replica.measure()

    def _pause_s(self, replica: Replica) -> float:
        if not replica.breaker.is_open:
            return WATCH_S
        return max(0.0, replica.breaker.probe_at_s - time.monotonic())

    async def _run(self, call: Call, lane: Lane) -> None:
        replica = self._by_lane[lane.name]
        is_done = False
        try:
            adapter = None if call.is_base else self._find_adapter(call.ref)
            with boundary(FleetError, f"{replica.url} answered what cannot be read"):
                choices = await replica.serve(call, adapter)
            is_done = True
            replica.breaker.num_losses = 0
        except ServerLost as loss:
            self._lose(call, replica, loss)
        except RookeryError as error:
            self._settle(call, error)
        else:
            self._settle(call, choices)
        finally:
            self._end(call, lane, is_done=is_done)

    def _end(self, call: Call, lane: Lane, *, is_done: bool) -> None:
        """Free the lane of a call, once."""
        if self._tasks.pop((call, lane.name), None) is not None:
            self.router.end(call, lane, time.monotonic(), is_done=is_done)
            self._wake.set()

    def _end_unbegun(self, call: Call, lane: Lane, _: asyncio.Task[None]) -> None:
        self._end(call, lane, is_done=False)

    def _lose(self, call: Call, replica: Replica, loss: ServerLost) -> None:
        """Shut the lane if the server is gone; send the call elsewhere unless it runs there."""
        replica.last_error = str(loss)
        if replica.breaker.record_loss(now_s=time.monotonic(), is_broken=loss.is_broken):
            logger.warning("%s is lost: %s", replica.url, loss)
            replica.lane.is_open = False
            replica.attention.set()
        call.tried.add(replica.lane.name)
        call.num_losses += loss.was_sent
        answer = self._answers.get(call)
        if answer is None or answer.done() or len(call.lanes) > 1:
            return
        if call.num_losses >= MAX_SENDS:
            self._settle(call, loss)
            return
        self.num_resent += 1
        self.router.add(call, is_first=True)

    def _evacuate(self, replica: Replica) -> None:
        """The server is out of reach: what it was sent is sent elsewhere."""
        replica.lane.is_open = False
        loss = ServerLost(replica.last_error, is_broken=True)
        for call in list(replica.lane.in_flight):
            self._lose(call, replica, loss)
            task = self._tasks.get((call, replica.lane.name))
            if task is not None:
                task.cancel()

    def _settle(self, call: Call, outcome: Choices | RookeryError) -> None:
        """Answer the caller, once; what still runs for this call elsewhere is stopped."""
        call.is_over = True
        answer = self._answers.pop(call, None)
        if answer is not None and not answer.done():
            if isinstance(outcome, RookeryError):
                answer.set_exception(outcome)
            else:
                answer.set_result(outcome)
        self._stop_tasks(call)

    def _abandon(self, call: Call) -> None:
        """Its caller is gone: forget it, waiting or in flight."""
        if self._answers.pop(call, None) is not None:
            call.is_over = True
            self.router.drop(call)
            self._stop_tasks(call)

    def _stop_tasks(self, call: Call) -> None:
        current = asyncio.current_task()
        for lane in call.lanes:
            task = self._tasks.get((call, lane.name))
            if task is not None and task is not current:
                task.cancel()

    def _give_up_in_the_dark(self, now_s: float) -> None:
        """With every server gone for `heal_s`, waiting calls fail: nothing waits for ever."""
        if any(replica.lane.is_open for replica in self.replicas):
            self._dark_since_s = None
            return
        if self._dark_since_s is None:
            self._dark_since_s = now_s
        if now_s - self._dark_since_s >= self._heal_s:
            for call in self.router.waiting:
                self.router.drop(call)
                self._settle(call, self._darkness())

    def _darkness(self) -> ServerLost:
        states = "; ".join(replica.last_error or replica.url for replica in self.replicas)
        return ServerLost(f"No server has been up for {self._heal_s:g} s. {states}", is_broken=True)
