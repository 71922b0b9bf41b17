"""The write-ahead log: what was accepted and what was done, in the journal of a run.

| entry    | written                           | after a crash                                 |
|----------|-----------------------------------|-----------------------------------------------|
| command  | before the client is told of it   | applied again, or queued again                |
| began    | before works are computed         | those that are not done were computed then    |
| ended    | when they are left unfinished     | they were left in order: it does not count    |
| pass     | before its results can be fetched | the same requests are computed together again |
| answer   | before the sample can be fetched  | the sample is given as it was                 |
| snapshot | with the document of the state    | entries before it are in the document         |

An entry is written in the same turn of the event loop as the change in memory that it tells of, so
that the journal has them in the order in which they happened.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rookery.concurrency import run_in_thread
from rookery.errors import RunError
from rookery.runs import Entry, Run
from rookery.service.records import encode
from rookery.service.work import Command

__all__ = ["Restart", "Wal", "read_entry"]

SNAPSHOT = "snapshot"


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """What a restarted service begins with."""

    document: dict[str, Any] | None
    """Of the last snapshot; None when there was none."""
    snapshot_seq: int
    """Entries up to here are in the document."""
    entries: Sequence[Entry]
    """Since the oldest request that was not done then."""


class Wal:
    """The journal and the snapshots of one service."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._journal = run.open_journal()
        self.num_bytes = 0
        """Written since the last snapshot."""
        self._failed = asyncio.Event()
        self._error: RunError | None = None

    async def watch(self) -> None:
        """Ends with the error of the journal, if it has one: nothing can be promised after it."""
        await self._failed.wait()
        self.check()

    def check(self) -> None:
        """Raise what went wrong, if anything did."""
        if self._error is not None:
            raise RunError(str(self._error)) from self._error

    def append(self, header: Mapping[str, Any], body: bytes = b"") -> "asyncio.Future[list[int]]":
        """Its number, when it is durable. It has its place in the journal when this returns, and
        keeps it whoever stops waiting."""
        data = json.dumps(header).encode() + b"\0" + body
        self.num_bytes += len(data)
        stored: asyncio.Future[list[int]]
        try:
            stored = asyncio.wrap_future(self._journal.submit([data]))
        except RunError as error:  # an earlier write failed
            stored = asyncio.get_running_loop().create_future()
            stored.set_exception(error)
        stored.add_done_callback(self._note)
        return stored

    def _note(self, stored: "asyncio.Future[list[int]]") -> None:
        error = None if stored.cancelled() else stored.exception()
        if isinstance(error, RunError) and self._error is None:
            self._error = error
            self._failed.set()

    def append_command(self, command: Command) -> "asyncio.Future[list[int]]":
        return self.append({"entry": "command", **command.header()}, command.body)

    async def begin_snapshot(self) -> int:
        """The entry whose number separates what is in the document from what is not."""
        self.num_bytes = 0
        return (await self.append({"entry": "snapshot"}))[0]

    async def finish_snapshot(
        self, document: Mapping[str, Any], *, seq: int, oldest_pending: int | None
    ) -> None:
        """Make the document, whose ends may be Rows, durable; then drop the entries that nobody
        needs any more."""
        cut = seq if oldest_pending is None else min(seq, oldest_pending - 1)
        blob = await run_in_thread(lambda: self.run.blobs.put_bytes(encode(document)))
        await self.run.append(SNAPSHOT, {"blob": blob, "journal": seq, "cut": cut})
        await self._journal.cut(through=cut)

    def prune(self, *, keep: set[str]) -> int:
        """Delete blobs that are neither named nor the last snapshot. Waits for the disk."""
        last = self.run.last(SNAPSHOT)
        kept = {*keep, *([str(last.payload["blob"])] if last else [])}
        return self.run.blobs.prune(keep=kept & set(self.run.blobs.digests()))

    def read(self) -> Restart:
        """What to begin with. Waits for the disk."""
        last = self.run.last(SNAPSHOT)
        if last is None:
            entries = list(self._journal.entries(after=0))
            return Restart(document=None, snapshot_seq=0, entries=entries)
        payload: Mapping[str, Any] = last.payload
        document = json.loads(self.run.blobs.read_bytes(payload["blob"], verify=True))
        return Restart(
            document=document,
            snapshot_seq=payload["journal"],
            entries=list(self._journal.entries(after=payload["cut"])),
        )


def read_entry(data: bytes) -> tuple[dict[str, Any], bytes]:
    """The header and the body of an entry."""
    header, _, body = data.partition(b"\0")
    return json.loads(header), body
