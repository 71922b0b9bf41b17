"""Results to be fetched: a future per accepted request, held until its result was fetched.

The keys of futures make requests idempotent: `MODEL_ID#7` names the seventh request of a model, and
a resent one gets the same future.
"""

import asyncio
import base64
import time
from collections import Counter
from collections.abc import Collection, Container, Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from rookery.service.records import JsonRows
from rookery.service.work import Result, bad, missing

__all__ = ["Future", "Futures"]

_CURSOR_RANGE = 1 << 32
LOST_S = 60.0
"""Within this time a client that missed an answer asks again; the SDK waits 45 s for one."""


@dataclass(slots=True, kw_only=True)
class Future:
    """One accepted request and its eventual result."""

    id: str
    tenant: str
    key: str
    """Identifies the request to its client; empty if nothing does."""
    digest: str
    """Hash of the request's content: the same key with other content is an error."""
    owner: str
    reply: dict[str, Any]
    """Reply given at acceptance, and again to a resent request."""
    durable: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the journal has the request; no client may hear of it earlier."""
    done: asyncio.Event = field(default_factory=asyncio.Event)
    result: Result | None = None
    finished: float = 0.0
    """Time of its result, by the monotonic clock."""
    storing: Result | None = None
    """Result on its way to the journal: snapshots include it, clients may not fetch it yet."""
    fetched: float | None = None
    """Time of the first fetch, or when fetching became impossible, by the monotonic clock."""


@dataclass(slots=True)
class _Finished:
    """Ids of finished futures in order of finishing, without the oldest ones that were dropped."""

    ids: list[str] = field(default_factory=list)
    num_dropped: int = 0

    @property
    def end(self) -> int:
        return self.num_dropped + len(self.ids)

    def drop_gone(self, known: Container[str]) -> None:
        num = next((i for i, name in enumerate(self.ids) if name in known), len(self.ids))
        del self.ids[:num]
        self.num_dropped += num


class Futures:
    """All futures, by id and by key."""

    def __init__(self) -> None:
        self._futures: dict[str, Future] = {}
        self._keys: dict[str, str] = {}
        self._finished: dict[str, _Finished] = {}
        """Finished futures by owner, for pollers."""
        self._epoch = int(time.time())
        """Part of cursors: cursors from before a restart start from the beginning."""
        self._changed: dict[str, asyncio.Event] = {}
        """Set and replaced when a future of this owner finishes."""
        self._num_unfetched: Counter[str] = Counter()
        self._bytes_unfetched: Counter[str] = Counter()
        """Sizes of unfetched results, by tenant."""

    def __len__(self) -> int:
        return len(self._futures)

    def __iter__(self) -> Iterator[Future]:
        return iter(list(self._futures.values()))

    def add(self, future: Future) -> None:
        self._futures[future.id] = future
        if future.key:
            self._keys[future.key] = future.id

    def find(self, key: str, *, digest: str) -> Future | None:
        """Return the future of a resent request; refuse other content under the same key."""
        future = self._futures.get(self._keys.get(key, ""))
        if future is not None and future.digest != digest:
            owner, _, number = key.rpartition("#")
            raise bad(
                f"The request {number} of {owner} was sent before with another content: every "
                "request has a number of its own."
            )
        return future

    def result_of_key(self, key: str, *, tenant: str) -> Result | None:
        """Return the result of the tenant's request with this key, while it is kept."""
        future = self._futures.get(self._keys.get(key, ""))
        return future.result if future is not None and future.tenant == tenant else None

    def get(self, future_id: str, *, tenant: str) -> Future:
        future = self._futures.get(future_id)
        if future is None or future.tenant != tenant:
            raise missing("request", future_id)
        return future

    def known(self, future_id: str) -> Future | None:
        return self._futures.get(future_id)

    def num_unfetched(self, tenant: str) -> int:
        return self._num_unfetched[tenant]

    def bytes_unfetched(self, tenant: str) -> int:
        return self._bytes_unfetched[tenant]

    def is_storing(self, future_id: str) -> bool:
        """True if its result is on the way to the journal."""
        future = self._futures.get(future_id)
        return future is not None and future.storing is not None

    def finish(self, future_id: str, result: Result) -> None:
        """Set the result and wake the waiters; do nothing if the future was dropped meanwhile."""
        future = self._futures.get(future_id)
        if future is None or future.result is not None:
            return
        future.result, future.storing, future.finished = result, None, time.monotonic()
        future.done.set()
        if future.fetched is None:
            self._num_unfetched[future.tenant] += 1
            self._bytes_unfetched[future.tenant] += len(result.payload)
            self._finished.setdefault(future.owner, _Finished()).ids.append(future_id)
        if (changed := self._changed.pop(future.owner, None)) is not None:
            changed.set()

    async def wait(self, future: Future, *, limit_s: float) -> Result | None:
        """Return the result, or None when the time is up."""
        if future.result is None:
            try:
                async with asyncio.timeout(limit_s):
                    await future.done.wait()
            except TimeoutError:
                return None
        if future.result is not None:
            self.set_fetched(future)
        return future.result

    def set_fetched(self, future: Future) -> None:
        """Mark a result as fetched: only a client that asks again still needs it."""
        if future.fetched is not None:
            return
        future.fetched = time.monotonic()
        if future.result is not None:
            self._num_unfetched[future.tenant] -= 1
            self._bytes_unfetched[future.tenant] -= len(future.result.payload)

    async def finished_since(
        self, owner: str, *, cursor: int, limit_s: float
    ) -> tuple[list[Future], int]:
        """Return an owner's futures that finished after the cursor, and the next cursor."""
        epoch, place = divmod(cursor, _CURSOR_RANGE)
        place = place if epoch == self._epoch else 0
        finished = self._finished.setdefault(owner, _Finished())
        if place >= finished.end:
            changed = self._changed.setdefault(owner, asyncio.Event())
            try:
                async with asyncio.timeout(limit_s):
                    await changed.wait()
            except TimeoutError:
                return [], cursor
        later = finished.ids[max(place - finished.num_dropped, 0) :]
        futures = [self._futures.get(future_id) for future_id in later]
        next_cursor = self._epoch * _CURSOR_RANGE + finished.end
        return [future for future in futures if future is not None], next_cursor

    def release(self) -> None:
        """Wake all waiters, also without a result, as the service ends."""
        for future in self._futures.values():
            future.done.set()
        for changed in self._changed.values():
            changed.set()

    def drop_old(self, *, fetched_s: float, unfetched_s: float) -> int:
        """Forget results fetched this long ago; return their number. Unfetched results count as
        fetched after `unfetched_s`. Unanswered requests stay: their numbers are taken."""
        now = time.monotonic()
        done = [future for future in self._futures.values() if future.result is not None]
        old = [f for f in done if f.fetched is not None and f.fetched < now - fetched_s]
        for future in done:
            if future.finished < now - unfetched_s:
                self.set_fetched(future)
        for future in old:
            self._drop(future)
        for finished in self._finished.values():
            finished.drop_gone(self._futures)
        return len(old)

    def _drop(self, future: Future) -> None:
        del self._futures[future.id]
        if self._keys.get(future.key) == future.id:
            del self._keys[future.key]

    def end_owners(self, owners: Collection[str]) -> None:
        """Treat the owners' results, also later ones, as fetched: nobody may ask for them now."""
        for owner in owners:
            self._finished.pop(owner, None)
            if (changed := self._changed.pop(owner, None)) is not None:
                changed.set()
        for future in self._futures.values():
            if future.owner in owners:
                self.set_fetched(future)

    def read(self) -> JsonRows:
        """Return all futures as rows of a document. Fetched results are left out with their
        futures, unless their answer may have been lost on its way."""
        limit = time.monotonic() - LOST_S
        values = [
            (future.fetched is not None, future.result or future.storing, _read_fields(future))
            for future in self._futures.values()
            if future.fetched is None or future.fetched > limit or future.result is None
        ]
        return JsonRows(values, _describe)

    @classmethod
    def restore(cls, rows: list[dict[str, Any]]) -> "Futures":
        futures = cls()
        for row in rows:
            result = row.pop("result")
            fetched = time.monotonic() if row.pop("is_fetched", False) else None
            future = Future(**row, fetched=fetched)
            future.durable.set()
            futures.add(future)
            if result is not None:
                payload = base64.b64decode(result["payload"])
                futures.finish(
                    future.id,
                    Result(payload, form=result["form"], is_failure=result["is_failure"]),
                )
        return futures


_STORED_FIELDS = ("id", "tenant", "key", "digest", "owner", "reply")
_read_fields = attrgetter(*_STORED_FIELDS)


def _describe(row: tuple[Any, ...]) -> dict[str, Any]:
    is_fetched, result, stored = row
    return {
        **dict(zip(_STORED_FIELDS, stored, strict=True)),
        "is_fetched": is_fetched,
        "result": None
        if result is None
        else {
            "payload": base64.b64encode(result.payload).decode(),
            "form": result.form,
            "is_failure": result.is_failure,
        },
    }
