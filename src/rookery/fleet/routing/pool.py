"""The running pool: sends calls where the router says and survives the loss of servers.

    callers --calls--> router --(call, load)--> a task per call --choices--> callers
                         ^                          |
                         '---- lost with a server --'     once, elsewhere

| stage     | consumes           | produces             | waits for                              |
|-----------|--------------------|----------------------|----------------------------------------|
| `submit`  | calls              | choices per prompt   | its calls                              |
| `drive`   | waiting calls      | a task per call      | a call, an end, or a tick              |
| `_run`    | one call, one load | choices, or a loss   | the server, within request_s           |
| `watch`   | one replica        | an open or shut load | a loss, or the next regular look       |

A call that an idle replica took over runs twice: the first answer counts, the other is cancelled. A
loss closes the replica until its server is healthy; calls wait for that up to `all_down_timeout_s`.
When the pool ends, by `close` or by an error in `drive` or `watch`, all callers fail at once.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

from rookery.errors import FleetDownError, FleetError, RookeryError, boundary
from rookery.fleet.http.client import ServerLost
from rookery.fleet.http.wire import Choice
from rookery.fleet.residency import ServedAdapters
from rookery.fleet.routing.load import Call, ReplicaLoad
from rookery.fleet.routing.replica import Replica
from rookery.fleet.routing.router import Router
from rookery.fleet.servers.launch import HANG_S, LocalServer
from rookery.runtime.concurrency import together
from rookery.types import Adapter, ModelRef

__all__ = ["Pool"]

logger = logging.getLogger(__name__)
TICK_S = 0.05
"""Seconds between checks for calls that idle servers could take over."""
COSTLY_S = 0.001
"""Dispatches slower than this take at most half of the event loop's time."""
WATCH_S = 2.0
"""Seconds between two reads of a healthy server's metrics."""
MAX_SENDS = 2
"""Retry once: a request that crashes a server must not reach the next."""
MAX_UNSENT = 3
"""A call fails after it has reached no server this often, and for `all_down_timeout_s`. Without the
limit, a healthy server that takes no calls would be tried forever."""
CLOSED = "The fleet is closed: open it again with open_fleet."
CLOSED_MEANWHILE = "The fleet was closed while this request was waiting for its answer."

Choices = list[list[Choice]]


class Pool:
    """Replicas under one router; the pool works inside the `running` block."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        *,
        served: ServedAdapters,
        all_down_timeout_s: float,
        max_calls: int,
    ) -> None:
        self.replicas = list(replicas)
        self.router = Router([replica.load for replica in replicas], max_calls=max_calls)
        self.num_resent = 0
        self.num_stolen = 0
        self._by_name = {replica.load.name: replica for replica in replicas}
        self._served = served
        self._all_down_timeout_s = all_down_timeout_s
        self._down_since_s: dict[bool, float] = {}
        """Time since which no server is up for the base model (True) or for adapters (False)."""
        self._answers: dict[Call, asyncio.Future[Choices]] = {}
        self._tasks: dict[tuple[Call, str], asyncio.Task[None]] = {}
        self._wake = asyncio.Event()
        self._checked = asyncio.Event()
        """Set and replaced after every check of a server: callers that wait for one look again."""
        self._loop = asyncio.get_running_loop()
        self._end_reason = ""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the pool inside the block; a defect of the pool raises at its end."""
        work = asyncio.create_task(self._work(), name="rookery-fleet")
        try:
            yield
        finally:
            self.close(CLOSED)
            work.cancel()
            await asyncio.wait([work])
        if self._end_reason != CLOSED:
            raise FleetDownError(self._end_reason)

    def close(self, reason: str) -> None:
        """Fail all waiting and later calls with `reason`; the first reason stays."""
        if not self._end_reason:
            self._end_reason = reason
        for call in list(self._answers):
            said = CLOSED_MEANWHILE if self._end_reason == CLOSED else self._end_reason
            self.router.drop(call)
            self._settle(call, FleetDownError(said))
        self._announce_check()

    def require_open(self) -> None:
        """FleetDownError if the pool has ended, FleetError on another event loop than its own."""
        if self._end_reason:
            raise FleetDownError(self._end_reason)
        if asyncio.get_running_loop() is not self._loop:
            raise FleetError(
                "This fleet was opened on another event loop and answers there only: open one "
                "inside this asyncio.run, or hand the work to that loop."
            )

    async def submit(self, calls: Sequence[Call]) -> list[Choices]:
        """Return the choices of every call, in order. One failure or a cancellation stops all."""
        self.require_open()
        answers = [self._loop.create_future() for _ in calls]
        for call, answer in zip(calls, answers, strict=True):
            self._answers[call] = answer
            self.router.add(call)
        self._wake.set()
        try:
            return list(await asyncio.gather(*answers))
        finally:
            for call in calls:
                self._abandon(call)

    async def hold(self, ref: ModelRef, adapter: Adapter) -> None:
        """Load an adapter on one server that takes adapters; wait for such a server as calls do."""
        able = [replica for replica in self.replicas if replica.route != "none"]
        await self._ask_one(able, lambda replica: replica.hold(ref, adapter))

    async def reset_prefix_cache(self) -> None:
        """Reset every server's cache; wait for lost servers, leave out those given up."""
        remaining = [
            replica for replica in self.replicas if not replica.is_given_up
        ] or self.replicas
        await together(
            self._ask_one([one], lambda replica: replica.client.reset_prefix_cache())
            for one in remaining
        )

    async def _ask_one(
        self, able: Sequence[Replica], ask: Callable[[Replica], Awaitable[None]]
    ) -> None:
        """Ask the running server that holds the fewest adapters. After a loss, ask the next one, or
        the same one when it is back. FleetDownError if none is up within `all_down_timeout_s`."""
        num_losses = 0
        end_s = time.monotonic() + self._all_down_timeout_s
        while True:
            self.require_open()
            # An excluded server takes no requests, but answers such calls.
            up = [replica for replica in able if not replica.breaker.is_open]
            if not up:
                await self._wait_for_check(able, end_s)
                continue
            replica = min(up, key=lambda r: (not r.load.is_open, len(r.load.resident)))
            try:
                await ask(replica)
            except ServerLost as loss:
                self.suspect(replica, str(loss))
                num_losses += loss.was_sent
                if num_losses >= MAX_SENDS or time.monotonic() >= end_s:
                    raise
            else:
                replica.breaker.record_answer()
                return

    async def _wait_for_check(self, able: Sequence[Replica], end_s: float) -> None:
        """Wait until any server was checked; FleetDownError at `end_s` or if none can return."""
        is_over = all(replica.is_given_up for replica in able)
        left_s = end_s - time.monotonic()
        if is_over or left_s <= 0:
            raise self._down("No server that can do this", able, is_over=is_over)
        try:
            async with asyncio.timeout(left_s):
                await self._checked.wait()
        except TimeoutError:
            pass

    def _announce_check(self) -> None:
        self._checked.set()
        self._checked = asyncio.Event()

    def _down(self, kind: str, able: Sequence[Replica], *, is_over: bool) -> FleetDownError:
        how = "is left" if is_over else f"has been up for {self._all_down_timeout_s:g} s"
        states = "; ".join(replica.last_error or replica.url for replica in able)
        return FleetDownError(f"{kind} {how}. {states}")

    async def _work(self) -> None:
        """Drive and watch until cancelled; however it ends, no caller is left waiting."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.drive(group), name="rookery-drive")
                for replica in self.replicas:
                    group.create_task(self.watch(replica), name=f"rookery-watch-{replica.url}")
        except ExceptionGroup as failed:
            defect = failed.exceptions[0]
            logger.error("the fleet stopped by a defect", exc_info=defect)
            self.close(
                f"The fleet stopped by a defect of its own, {type(defect).__name__}: {defect}. The "
                "log has the traceback; open the fleet again."
            )
        finally:
            self.close(CLOSED)

    async def drive(self, group: asyncio.TaskGroup) -> None:
        """Send calls when they arrive and when replicas free up."""
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
            for call, load in placed:
                task = group.create_task(self._run(call, load))
                self._tasks[call, load.name] = task
                # A task that is cancelled before it starts never reaches its own `_end`.
                task.add_done_callback(partial(self._end, call, load))
            self._fail_if_all_down(now_s)
            took_s = time.monotonic() - now_s
            if took_s > COSTLY_S:
                # With thousands of waiting adapters, let several ends share the next dispatch.
                await asyncio.sleep(took_s)

    async def watch(self, replica: Replica) -> None:
        """Keep one replica's state current: closed while its server is dead, then open again."""
        while True:
            try:
                async with asyncio.timeout(self._pause_s(replica)):
                    await replica.attention.wait()
            except TimeoutError:
                pass
            replica.attention.clear()
            try:
                with boundary(FleetError, f"Looking after {replica.url}"):
                    await self._check(replica)
            except RookeryError as error:
                replica.last_error = str(error)
                replica.breaker.record_failed_probe(now_s=time.monotonic())
                self._evacuate(replica)
            self._wake.set()
            self._announce_check()
            if replica.is_given_up:
                logger.error("%s is given up: %s", replica.url, replica.last_error)
                return

    def suspect(self, replica: Replica, why: str) -> None:
        """Send the server nothing until it was checked, and have it checked now."""
        replica.last_error = why
        if replica.breaker.record_loss(now_s=time.monotonic()):
            logger.warning("%s is lost: %s", replica.url, why)
            replica.load.is_open = False
            replica.attention.set()

    async def _check(self, replica: Replica) -> None:
        local = replica.local
        if local is not None and not local.is_alive:
            await self._restart(replica, local)
        elif not replica.breaker.is_open:
            await replica.measure()
            return
        elif not replica.breaker.should_probe(now_s=time.monotonic()):
            return
        elif not await replica.client.is_healthy():
            open_s = replica.breaker.open_for_s(now_s=time.monotonic())
            if local is None or open_s < HANG_S:
                raise ServerLost(replica.last_error, is_broken=True)
            await self._restart(replica, local, why=f"was not healthy for {open_s:.0f} s")
        await replica.reconnect(self._served)
        logger.info("%s is back", replica.url)

    async def _restart(self, replica: Replica, local: LocalServer, *, why: str = "") -> None:
        replica.load.is_open = False
        try:
            await local.restart(why)
        except FleetError:
            replica.is_given_up = True
            raise

    def _pause_s(self, replica: Replica) -> float:
        if not replica.breaker.is_open:
            return WATCH_S
        return max(0.0, replica.breaker.probe_at_s - time.monotonic())

    async def _run(self, call: Call, load: ReplicaLoad) -> None:
        replica = self._by_name[load.name]
        task = asyncio.current_task()
        outcome: Choices | RookeryError | None = None
        try:
            outcome = await self._ask(call, replica)
        finally:
            is_current = self._end(call, load, task, is_done=isinstance(outcome, list))
        if not is_current or outcome is None:
            return
        if isinstance(outcome, list):
            replica.breaker.record_answer()
        if isinstance(outcome, ServerLost):
            self._lose(call, replica, outcome)
        elif isinstance(outcome, list) or not call.replicas:
            self._settle(call, outcome)

    async def _ask(self, call: Call, replica: Replica) -> Choices | RookeryError:
        adapter = None if call.is_base else self._served.find(call.ref)
        if adapter is None and not call.is_base:
            return FleetError(f"{call.ref.served_name} was unloaded before it was asked.")
        try:
            with boundary(FleetError, f"Could not parse the response of {replica.url}"):
                return await replica.serve(call, adapter)
        except RookeryError as error:
            return error

    def _end(
        self,
        call: Call,
        load: ReplicaLoad,
        task: asyncio.Task[None] | None,
        *,
        is_done: bool = False,
    ) -> bool:
        """Free the place of a call; False if this task no longer runs it."""
        if self._tasks.get((call, load.name)) is not task:
            return False
        del self._tasks[call, load.name]
        self.router.end(call, load, time.monotonic(), is_done=is_done)
        self._wake.set()
        return True

    def _lose(self, call: Call, replica: Replica, loss: ServerLost) -> None:
        """Record a loss; send the call again unless it runs elsewhere or was lost too often."""
        self.suspect(replica, str(loss))
        call.tried.add(replica.load.name)
        call.num_losses += loss.was_sent
        call.num_unsent += not loss.was_sent
        now_s = time.monotonic()
        call.lost_since_s = call.lost_since_s or now_s
        if call not in self._answers or call.replicas:
            return
        lost_s = now_s - call.lost_since_s
        is_untaken = call.num_unsent >= MAX_UNSENT and lost_s >= self._all_down_timeout_s
        if call.num_losses >= MAX_SENDS or is_untaken:
            self._settle(call, loss)
            return
        self.num_resent += 1
        self.router.add(call, is_first=True)

    def _evacuate(self, replica: Replica) -> None:
        """Send the calls of an unreachable server elsewhere."""
        replica.load.is_open = False
        for call in list(replica.load.in_flight):
            task = self._tasks[call, replica.load.name]
            self._end(call, replica.load, task)
            task.cancel()
            self._lose(call, replica, ServerLost(replica.last_error, is_broken=True))

    def _settle(self, call: Call, outcome: Choices | RookeryError) -> None:
        """Answer the caller once, and stop what still runs for the call."""
        call.is_over = True
        answer = self._answers.pop(call, None)
        if answer is not None and not answer.done():
            if isinstance(outcome, RookeryError):
                answer.set_exception(outcome)
            else:
                answer.set_result(outcome)
        self._stop_tasks(call)

    def _abandon(self, call: Call) -> None:
        """Forget a call whose caller is gone, waiting or in flight."""
        if self._answers.pop(call, None) is not None:
            call.is_over = True
            self.router.drop(call)
            self._stop_tasks(call)

    def _stop_tasks(self, call: Call) -> None:
        for load in call.replicas:
            task = self._tasks.get((call, load.name))
            if task is not None:
                task.cancel()

    def _fail_if_all_down(self, now_s: float) -> None:
        """Fail calls that no server could take for `all_down_timeout_s`, or ever can."""
        for is_base, kind in ((True, "No server"), (False, "No server that takes adapters")):
            able = [r for r in self.replicas if is_base or r.load.max_loras > 0]
            if any(replica.load.is_open for replica in able):
                self._down_since_s.pop(is_base, None)
                continue
            down_s = now_s - self._down_since_s.setdefault(is_base, now_s)
            is_over = all(replica.is_given_up for replica in able)
            if is_over or down_s >= self._all_down_timeout_s:
                for call in [c for c in self.router.waiting if c.is_base == is_base]:
                    self.router.drop(call)
                    self._settle(call, self._down(kind, able, is_over=is_over))
