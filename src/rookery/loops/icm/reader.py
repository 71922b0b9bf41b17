"""Reading label log-probabilities: each context once, all that are asked for together.

    reader = SharedReader(sampler, prompts=prompts, order=order, model=ref, store=ScoreStore(run))
    reads = await reader.read([(labels, 0), (labels, 1)])

`PlainReader` asks for every context again, one at a time. Both give the same numbers, so that a
search takes the same decisions with either.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol
from zlib import crc32

from rookery.errors import EngineError
from rookery.loops.icm.objective import Read
from rookery.loops.icm.prompts import Prompts
from rookery.ports import Sampler
from rookery.runs import NewEvent, Run
from rookery.search.labelling import Labels
from rookery.search.orders import Order
from rookery.search.prefixes import PrefixCache
from rookery.types import ModelRef, Score, ScoreRequest

__all__ = ["Context", "PlainReader", "Reader", "ScoreStore", "SharedReader"]

Context = tuple[Labels, int]
"""All labels and the item that is asked for: its own label is not shown."""

BLOCK_REQUESTS = 32
"""Requests stored together: what a killed process loses at most, per block in flight."""

NUM_BLOCKS = 16
"""Blocks in flight: enough to fill an engine's batch."""

PLANNED_BLOCK_TOKENS = 16
"""The block of the planned count: what most servers' prefix caches use."""


class ScoreStore:
    """Reads found again by content; durable when they have a run."""

    def __init__(self, run: Run | None = None) -> None:
        self._run = run
        self._known: dict[str, Read] = {}
        self._cache = PrefixCache(block_tokens=PLANNED_BLOCK_TOKENS)
        self.part = "search"
        """What new reads are counted as."""
        self.requests: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        """Of the contexts that were sent, each once, by part."""
        self.computed: Counter[str] = Counter()
        """Of these, what a prefix cache leaves to compute."""
        for event in run.events("score") if run is not None else ():
            self._take(event.key, event.payload)

    def find(self, key: str) -> Read | None:
        return self._known.get(key)

    def plan(self, request: ScoreRequest) -> int:
        """Count a request that is about to be sent: the tokens left to compute."""
        return self._cache.add(request.tokens, salt=crc32(request.model.served_name.encode()))

    def add(self, scored: Sequence[tuple[str, Read, int, int]]) -> None:
        """Store (key, read, tokens, tokens to compute) of a block, all or none."""
        events = []
        for key, read, num_tokens, num_computed in scored:
            if key in self._known:
                continue
            payload = {
                "logprobs": list(read),
                "num_tokens": num_tokens,
                "num_computed": num_computed,
                "part": self.part,
            }
            self._take(key, payload)
            events.append(NewEvent(kind="score", payload=payload, key=key))
        if events and self._run is not None:
            self._run.append_many(events)

    def _take(self, key: str, payload: Any) -> None:
        self._known[key] = tuple(payload["logprobs"])
        self.requests[payload["part"]] += 1
        self.tokens[payload["part"]] += payload["num_tokens"]
        self.computed[payload["part"]] += payload["num_computed"]


class Reader(Protocol):
    """Reads contexts of one batch of items under one model."""

    naive_tokens: int

    async def read(self, contexts: Sequence[Context]) -> list[Read]:
        """The reads, in order."""
        ...

    async def prefetch(self, contexts: Sequence[Context]) -> None:
        """Make these known, if anything can be."""
        ...

    def known(self, context: Context) -> Read | None:
        """A read that costs nothing any more."""
        ...


class PlainReader:
    """Every context is sent when it is asked for, one after another, and forgotten."""

    def __init__(
        self, sampler: Sampler, *, prompts: Prompts, order: Order, model: ModelRef
    ) -> None:
        self._sampler = sampler
        self._prompts = prompts
        self._order = order
        self._model = model
        self.naive_tokens = 0

    def known(self, context: Context) -> Read | None:
        del context
        return None

    async def prefetch(self, contexts: Sequence[Context]) -> None:
        del contexts

    async def read(self, contexts: Sequence[Context]) -> list[Read]:
        reads = []
        for labels, target in contexts:
            request = _request(self._prompts, self._order, self._model, (labels, target))
            self.naive_tokens += len(request.tokens)
            scores = await self._sampler.score([request])
            reads.extend(_check(scores, [request]))
        return reads


class SharedReader:
    """Contexts that are known cost nothing; the others are sent together, in tree order."""

    def __init__(
        self,
        sampler: Sampler,
        *,
        prompts: Prompts,
        order: Order,
        model: ModelRef,
        store: ScoreStore,
    ) -> None:
        self._sampler = sampler
        self._prompts = prompts
        self._order = order
        self._model = model
        self._store = store
        self._place = {item: place for place, item in enumerate(order.leaves)}
        # Filled by chains of the same batch, drained by the one whose block is answered.
        self._in_flight: dict[str, asyncio.Future[None]] = {}
        self._room = asyncio.Semaphore(NUM_BLOCKS)
        self.naive_tokens = 0

    def known(self, context: Context) -> Read | None:
        return self._store.find(self._key(context))

    async def prefetch(self, contexts: Sequence[Context]) -> None:
        await self._fetch({self._key(context): context for context in contexts})

    async def read(self, contexts: Sequence[Context]) -> list[Read]:
        """Each context's read, in order; none is ever asked for twice."""
        keys = [self._key(context) for context in contexts]
        for labels, target in contexts:
            self.naive_tokens += self._prompts.num_tokens(
                labels, target, order=self._order.of(target)
            )
        await self._fetch(dict(zip(keys, contexts, strict=True)))
        reads = [self._store.find(key) for key in keys]
        assert all(read is not None for read in reads)
        return [read for read in reads if read is not None]

    async def _fetch(self, contexts: dict[str, Context]) -> None:
        missing = {key: c for key, c in contexts.items() if self._store.find(key) is None}
        waiting = [self._in_flight[key] for key in missing if key in self._in_flight]
        own = [key for key in missing if key not in self._in_flight]
        own.sort(key=lambda key: self._place[missing[key][1]])
        blocks = [
            own[first : first + BLOCK_REQUESTS] for first in range(0, len(own), BLOCK_REQUESTS)
        ]
        try:
            async with asyncio.TaskGroup() as group:
                for block in blocks:
                    done = asyncio.get_running_loop().create_future()
                    self._in_flight.update(dict.fromkeys(block, done))
                    group.create_task(self._send({key: missing[key] for key in block}, done))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        for future in waiting:
            await asyncio.shield(future)

    async def _send(self, block: dict[str, Context], done: asyncio.Future[None]) -> None:
        try:
            async with self._room:
                requests = [
                    _request(self._prompts, self._order, self._model, context)
                    for context in block.values()
                ]
                plans = [self._store.plan(request) for request in requests]
                reads = _check(await self._sampler.score(requests), requests)
            sizes = [len(request.tokens) for request in requests]
            self._store.add(list(zip(block, reads, sizes, plans, strict=True)))
            done.set_result(None)
        except BaseException as error:  # a cancellation too: others wait for the same block
            done.set_exception(error)
            done.exception()  # who waits sees it; where nobody does it is no second error
            raise
        finally:
            for key in block:
                del self._in_flight[key]

    def _key(self, context: Context) -> str:
        labels, target = context
        return self._prompts.digest(
            labels, target, order=self._order.of(target), salt=self._model.served_name
        )


def _request(prompts: Prompts, order: Order, model: ModelRef, context: Context) -> ScoreRequest:
    labels, target = context
    tokens = prompts.context(labels, target, order=order.of(target))
    return ScoreRequest(model=model, tokens=tokens, start=len(tokens), labels=prompts.label_tokens)


def _check(scores: Sequence[Score], requests: Sequence[ScoreRequest]) -> list[Read]:
    """One finite number per label and request, or an error: none is ever made up."""
    if len(scores) != len(requests):
        raise EngineError(f"{len(requests)} contexts were asked for and {len(scores)} answered.")
    for score, request in zip(scores, requests, strict=True):
        found = score.label_logprobs
        if len(found) != len(request.labels) or not all(map(math.isfinite, found)):
            raise EngineError(
                f"{request.model.served_name} gave the label log-probabilities {list(found)} for "
                f"{len(request.labels)} labels: all must be there and finite. A server needs "
                "log-probabilities of given tokens."
            )
    return [score.label_logprobs for score in scores]
