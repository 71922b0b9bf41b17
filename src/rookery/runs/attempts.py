"""The attempts of a run: what was planned, handed out, made, measured and decided, exactly once.

    log = AttemptLog(run)
    await log.record([Attempt(number=7, state="planned", data={"parent": "p3"})])
    await log.record([Attempt(number=7, state="leased", epoch=1, data={"worker": "w2"})])
    await log.record([Attempt(number=7, state="generated", epoch=1, data={"text": digest})])
    await log.record([Attempt(number=7, state="evaluated", epoch=1, data={"score": 0.5})])
    [kept] = await log.record([Attempt(number=7, state="committed", epoch=1, data={})])

Each line is an event of the run, so there is no second file to keep in step with it. An attempt is
generated once, evaluated once, and either committed or failed: the first record of each wins, and a
second one, as from a worker that was thought dead, gets the first back. A lease is counted by its
epoch. Writing costs the same however many attempts there were.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

from rookery.runs.events import Event, NewEvent
from rookery.runs.run import Run
from rookery.runs.run_view import RunView

__all__ = ["Attempt", "AttemptLog", "AttemptState", "read_attempts"]

KIND = "attempt"
AttemptState = Literal["planned", "leased", "generated", "evaluated", "committed", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """An attempt in one state: `Attempt(number=7, state="leased", epoch=2, data={...})`."""

    number: int
    state: AttemptState
    epoch: int = 0
    """Which lease it belongs to; 0 for none. A lease that ran out is followed by the next epoch."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """A JSON object, opaque here. Large texts are blobs, named by their digest."""

    @property
    def key(self) -> str:
        """Equal for records of which only the first may count."""
        if self.state in {"committed", "failed"}:
            return f"{self.number}/decided"
        if self.state == "leased":
            return f"{self.number}/leased/{self.epoch}"
        return f"{self.number}/{self.state}"


class AttemptLog:
    """Writes attempts as events."""

    def __init__(self, run: Run, *, series: str = "") -> None:
        """`series` names a second row of attempts, with numbers of its own."""
        self._run = run
        self._kind = _kind(series)

    async def record(self, attempts: Sequence[Attempt]) -> list[Attempt]:
        """Store all or none; durable when this returns. What is given back is what counts: another
        attempt than the one given was recorded first."""
        return [_attempt(event) for event in await asyncio.wrap_future(self.submit(attempts))]

    def submit(self, attempts: Sequence[Attempt]) -> "Future[list[Event]]":
        """`record` without waiting. What is submitted first is durable first."""
        news = [
            NewEvent(kind=self._kind, key=attempt.key, payload=_payload(attempt), first_wins=True)
            for attempt in attempts
        ]
        return self._run.submit(news)

    def decision(self, number: int) -> Attempt | None:
        """How an attempt was decided; None while it is not."""
        event = self._run.get(self._kind, f"{number}/decided")
        return None if event is None else _attempt(event)


def read_attempts(
    run: RunView, *, after: int = 0, series: str = ""
) -> Iterator[tuple[int, Attempt]]:
    """Every record in order, each with the `seq` of its event, beginning behind seq `after`.

    Read in pages, so that memory does not grow with their number; a loop that keeps a snapshot
    reads only what came after it.
    """
    for event in run.events(_kind(series), after=after):
        yield event.seq, _attempt(event)


def _kind(series: str) -> str:
    return f"{KIND}/{series}" if series else KIND


def _payload(attempt: Attempt) -> dict[str, object]:
    return {
        "number": attempt.number,
        "state": attempt.state,
        "epoch": attempt.epoch,
        "data": dict(attempt.data),
    }


def _attempt(event: Event) -> Attempt:
    return Attempt(**event.payload)
