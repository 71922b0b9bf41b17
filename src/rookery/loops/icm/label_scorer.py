"""Label log-probabilities of contexts: each context is asked for once, missing ones together.

    scorer = SharedLabelScorer(sampler, prompts=prompts, order=order, model=ref, store=store)
    reads = await scorer.score([(labels, 0), (labels, 1)])

A chain uses `scorer.of_chain(affinity)`: its contexts change little between iterations, so they
prefer one server.

A context that fails alone while others are answered is stored as failed and read as None. A resumed
run does not repeat it. If nothing is answered, the engine is gone: this raises an error and stores
nothing.
"""

import asyncio
import copy
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol
from zlib import crc32

from rookery.errors import EngineDownError, EngineError, FleetDownError, FleetError
from rookery.loops.icm.objective import LabelLogprobs
from rookery.loops.icm.prompts import BatchPrompts
from rookery.ports import Sampler
from rookery.runs import NewEvent, Run
from rookery.runtime.concurrency import AskOnce
from rookery.search.labelling import UNLABELLED, Labels, Order, PrefixCache
from rookery.types import ModelRef, Score, ScoreRequest

__all__ = [
    "Context",
    "LabelScorer",
    "ScoreStore",
    "SharedLabelScorer",
]

Context = tuple[Labels, int]
"""All labels, and the item to read. Its own label is not shown."""

Part = Literal["search", "baselines"]
"""Part of the run that reads count for: the search, or its comparisons."""

BLOCK_REQUESTS = 32
"""Requests stored together: the maximum that a killed process loses per block in flight."""

NUM_BLOCKS = 16
"""Blocks in flight on servers: enough to fill a server's batch."""

NUM_BLOCKS_HERE = 4
"""Blocks in flight on an engine here, which shows no progress before the first of them ends."""

PLANNED_BLOCK_TOKENS = 16
"""Block size of the simulated prefix cache, as most servers have it."""


NUM_PROBES = 3
"""Short contexts asked for to test whether an engine answers at all."""

Failure = EngineError | FleetError


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A context that was sent, and its result."""

    key: str
    read: LabelLogprobs | None
    error: str
    """Reason why there is no read; empty if there is one."""
    num_tokens: int
    num_computed: int
    """Tokens that a prefix cache leaves to compute."""


class ScoreStore:
    """Reads by content; durable if the store has a run."""

    def __init__(
        self, run: Run | None = None, *, on_read: Callable[[], None] = lambda: None
    ) -> None:
        """`on_read` is called when a block of new reads is stored."""
        self._run = run
        self._on_read = on_read
        self._known: dict[str, LabelLogprobs | None] = {}
        self._cache = PrefixCache(block_tokens=PLANNED_BLOCK_TOKENS)
        self.errors: dict[str, str] = {}
        """Errors of the contexts that the engine could not answer, by key."""
        self.requests: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        """Tokens of all contexts sent, each counted once, by part."""
        self.computed: Counter[str] = Counter()
        """Tokens that a prefix cache leaves to compute, by part. A resume empties the cache."""
        for event in run.events("score") if run is not None else ():
            self._take(event.key, event.payload)

    def __contains__(self, key: str) -> bool:
        """Return True if the context was answered, even by a failure."""
        return key in self._known

    @property
    def num_reads(self) -> int:
        return self.requests.total()

    @property
    def num_computed(self) -> int:
        """Tokens that a prefix cache left to compute."""
        return self.computed.total()

    def find(self, key: str) -> LabelLogprobs | None:
        return self._known.get(key)

    def plan(self, request: ScoreRequest) -> int:
        """Add a request to the simulated cache. Returns the tokens left to compute."""
        return self._cache.add(request.tokens, salt=crc32(request.model.served_name.encode()))

    async def add(self, scored: Iterable[Scored], *, part: Part) -> None:
        """Store a block of reads and failures, all or none, and count it for `part`.

        If a context has two answers, the first stored one is kept.
        """
        news = {
            one.key: {
                "logprobs": None if one.read is None else list(one.read),
                "error": one.error,
                "num_tokens": one.num_tokens,
                "num_computed": one.num_computed,
                "part": part,
            }
            for one in scored
            if one.key not in self._known
        }
        stored: Mapping[str, Mapping[str, Any]] = news
        if self._run is not None:
            events = await self._run.append_many(
                [
                    NewEvent(kind="score", payload=new, key=key, first_wins=True)
                    for key, new in news.items()
                ]
            )
            stored = {event.key: event.payload for event in events}
        for key, payload in stored.items():
            if key not in self._known:
                self._take(key, payload)
        self._on_read()

    def _take(self, key: str, payload: Mapping[str, Any]) -> None:
        logprobs = payload["logprobs"]
        self._known[key] = None if logprobs is None else tuple(logprobs)
        if logprobs is None:
            self.errors[key] = payload["error"]
        self.requests[payload["part"]] += 1
        self.tokens[payload["part"]] += payload["num_tokens"]
        self.computed[payload["part"]] += payload["num_computed"]


class LabelScorer(Protocol):
    """Reads contexts of one batch of items under one model."""

    @property
    def naive_tokens(self) -> int:
        """Prompt tokens of all search reads, if none were shared."""
        ...

    @property
    def longest_tokens(self) -> int:
        """Prompt tokens of a read given all other labels."""
        ...

    @property
    def num_asked(self) -> int:
        """Number of different contexts this scorer was asked for, known ones included."""
        ...

    def of_chain(self, affinity: Hashable, *, part: Part = "search") -> "LabelScorer":
        """Return a view for one chain, with server affinity. Its new reads count for `part`."""
        ...

    async def score(self, contexts: Sequence[Context]) -> list[LabelLogprobs | None]:
        """Return the reads in order; None for a context that the engine cannot answer."""
        ...

    async def prefetch(self, contexts: Sequence[Context]) -> None:
        """Ask for the unknown contexts among these."""
        ...

    def known(self, context: Context) -> LabelLogprobs | None:
        """Return a stored read. None if it is unknown or failed."""
        ...


class SharedLabelScorer:
    """Sends unknown contexts together, in tree order. Known ones cost nothing."""

    def __init__(
        self,
        sampler: Sampler,
        *,
        prompts: BatchPrompts,
        order: Order,
        model: ModelRef,
        store: ScoreStore,
        is_remote: bool = True,
    ) -> None:
        self._sampler = sampler
        self._prompts = prompts
        self._order = order
        self._model = model
        self._store = store
        self._place = {item: place for place, item in enumerate(order.leaves)}
        # The scorers of all chains share the next three.
        self._once = AskOnce[Context, LabelLogprobs | None]()
        self._places = asyncio.Semaphore(NUM_BLOCKS if is_remote else NUM_BLOCKS_HERE)
        self._naive: Counter[str] = Counter()
        self._affinity: Hashable = None
        self._part: Part = "search"
        self._asked: set[str] = set()
        """Not shared between chains."""

    @property
    def naive_tokens(self) -> int:
        return self._naive["search"]

    @property
    def longest_tokens(self) -> int:
        return self._prompts.longest_tokens

    def of_chain(self, affinity: Hashable, *, part: Part = "search") -> "SharedLabelScorer":
        scorer = copy.copy(self)
        scorer._affinity, scorer._part, scorer._asked = affinity, part, set()
        return scorer

    @property
    def num_asked(self) -> int:
        return len(self._asked)

    def known(self, context: Context) -> LabelLogprobs | None:
        return self._store.find(self._key(context))

    async def score(self, contexts: Sequence[Context]) -> list[LabelLogprobs | None]:
        for labels, target in contexts:
            order = self._order.of(target)
            self._naive[self._part] += self._prompts.num_tokens(labels, target, order=order)
        await self.prefetch(contexts)
        return [self.known(context) for context in contexts]

    async def prefetch(self, contexts: Sequence[Context]) -> None:
        by_key = {self._key(context): context for context in contexts}
        self._asked.update(by_key)
        missing = [key for key in by_key if key not in self._store]
        missing.sort(key=lambda key: self._place[by_key[key][1]])
        asked = {key: by_key[key] for key in missing}
        await self._once.know(asked, self._send, size=BLOCK_REQUESTS, places=self._places)

    async def _send(self, block: Mapping[str, Context]) -> dict[str, LabelLogprobs | None]:
        requests = [
            replace(
                _request(self._prompts, self._order, self._model, context), affinity=self._affinity
            )
            for context in block.values()
        ]
        plans = [self._store.plan(request) for request in requests]
        answers = await self._answer(requests)
        await self._store.add(map(_scored, block, answers, requests, plans), part=self._part)
        return {key: self._store.find(key) for key in block}

    async def _answer(self, requests: Sequence[ScoreRequest]) -> list[LabelLogprobs | Failure]:
        """Return an answer per request. Failed ones are repeated alone, twice."""
        answers = await _ask(self._sampler, requests)
        for _ in range(2):
            failed = [i for i, answer in enumerate(answers) if isinstance(answer, Exception)]
            if not failed:
                return answers
            await self._require_live_engine()
            alone = await asyncio.gather(*(_ask(self._sampler, [requests[i]]) for i in failed))
            for i, [answer] in zip(failed, alone, strict=True):
                answers[i] = answer
        if any(isinstance(answer, Exception) for answer in answers):
            await self._require_live_engine()
        return answers

    async def _require_live_engine(self) -> None:
        """Raise unless the engine answers one of the shortest contexts, an item alone."""
        blank = (UNLABELLED,) * len(self._prompts.items)
        errors: list[Failure] = []
        for item in range(min(NUM_PROBES, len(blank))):
            request = _request(self._prompts, self._order, self._model, (blank, item))
            [answer] = await _ask(self._sampler, [request])
            if not isinstance(answer, Exception):
                return
            errors.append(answer)
        raise errors[-1]

    def _key(self, context: Context) -> str:
        labels, target = context
        return self._prompts.digest(
            labels, target, order=self._order.of(target), salt=self._model.served_name
        )


def _request(
    prompts: BatchPrompts, order: Order, model: ModelRef, context: Context
) -> ScoreRequest:
    labels, target = context
    tokens = prompts.context(labels, target, order=order.of(target))
    return ScoreRequest(model=model, tokens=tokens, start=len(tokens), labels=prompts.label_tokens)


async def _ask(sampler: Sampler, requests: Sequence[ScoreRequest]) -> list[LabelLogprobs | Failure]:
    """Return per request finite log-probabilities of all labels, or an error."""
    try:
        scores = await sampler.score(requests)
    except (EngineDownError, FleetDownError):
        raise  # the run ends and can be resumed
    except (EngineError, FleetError) as error:
        return [error] * len(requests)
    if len(scores) != len(requests):
        sentence = f"{len(requests)} contexts were asked for and {len(scores)} answered."
        return [EngineError(sentence)] * len(requests)
    return [_read(score, request) for score, request in zip(scores, requests, strict=True)]


def _read(score: Score, request: ScoreRequest) -> LabelLogprobs | Failure:
    logprobs = score.label_logprobs
    if len(logprobs) == len(request.labels) and all(map(math.isfinite, logprobs)):
        return logprobs
    return EngineError(
        f"{request.model.served_name} gave the label log-probabilities {list(logprobs)} for "
        f"{len(request.labels)} labels: all must be there and finite. A server needs "
        "log-probabilities of given tokens."
    )


def _scored(
    key: str, answer: LabelLogprobs | Failure, request: ScoreRequest, num_computed: int
) -> Scored:
    is_failure = isinstance(answer, Exception)
    return Scored(
        key=key,
        read=None if isinstance(answer, Exception) else answer,
        error=str(answer) if is_failure else "",
        num_tokens=len(request.tokens),
        num_computed=num_computed,
    )
