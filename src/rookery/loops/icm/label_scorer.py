"""Reading label log-probabilities: each context once, all that are asked for together.

    scorer = SharedLabelScorer(sampler, prompts=prompts, order=order, model=ref, store=store)
    reads = await scorer.score([(labels, 0), (labels, 1)])

A chain uses `scorer.of_chain(affinity)`: its contexts differ little from one iteration to the next,
so they go to one server if possible.

What the engine cannot answer is an answer too: a context that fails by itself while others are
answered is stored as failed, is read as None, and is not asked for again when a run is resumed.
When nothing is answered the engine is gone: that is an error, and nothing is stored.
"""

import asyncio
import copy
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol
from zlib import crc32

from rookery.concurrency import AskOnce
from rookery.errors import EngineDownError, EngineError, FleetDownError, FleetError
from rookery.loops.icm.objective import LabelLogprobs
from rookery.loops.icm.prompts import BatchPrompts
from rookery.ports import Sampler
from rookery.runs import NewEvent, Run
from rookery.search.labelling import UNLABELLED, Labels, Order, PrefixCache
from rookery.types import ModelRef, Score, ScoreRequest

__all__ = [
    "Context",
    "LabelScorer",
    "ScoreStore",
    "SharedLabelScorer",
]

Context = tuple[Labels, int]
"""All labels and the item that is asked for: its own label is not shown."""

Part = Literal["search", "baselines"]
"""What reads are counted as: those of the search, or of what it is compared with."""

BLOCK_REQUESTS = 32
"""Requests stored together: what a killed process loses at most, per block in flight."""

NUM_BLOCKS = 16
"""Blocks in flight: enough to fill a server's batch."""

NUM_BLOCKS_HERE = 4
"""The same for an engine in this process: it computes them side by side, and until the first ends
nobody knows how far they are."""

PLANNED_BLOCK_TOKENS = 16
"""The block of the planned count: what most servers' prefix caches use."""


NUM_PROBES = 3
"""Short contexts that are asked for to see whether an engine answers anything at all."""

Failure = EngineError | FleetError


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A context that was sent, and what came of it."""

    key: str
    read: LabelLogprobs | None
    error: str
    """Why there is no read; empty where there is one."""
    num_tokens: int
    num_computed: int
    """Of these, what a prefix cache leaves to compute."""


class ScoreStore:
    """Reads found again by content; durable when they have a run."""

    def __init__(
        self, run: Run | None = None, *, on_read: Callable[[], None] = lambda: None
    ) -> None:
        """`on_read` is called when a block of new reads is stored."""
        self._run = run
        self._on_read = on_read
        self._known: dict[str, LabelLogprobs | None] = {}
        self._cache = PrefixCache(block_tokens=PLANNED_BLOCK_TOKENS)
        self.errors: dict[str, str] = {}
        """Of the contexts that the engine could not answer, by key."""
        self.requests: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        """Of the contexts that were sent, each once, by part."""
        self.computed: Counter[str] = Counter()
        """Of these, what a prefix cache leaves to compute; it begins cold when a run is resumed."""
        for event in run.events("score") if run is not None else ():
            self._take(event.key, event.payload)

    def __contains__(self, key: str) -> bool:
        """Whether it was answered, be it by a failure."""
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
        """Count a request that is about to be sent: the tokens left to compute."""
        return self._cache.add(request.tokens, salt=crc32(request.model.served_name.encode()))

    async def add(self, scored: Iterable[Scored], *, part: Part) -> None:
        """Store a block, all or none, counted as reads of this part of the run. Failed contexts
        are stored as good ones are.

        Of two answers to one context the first that was stored is kept.
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
        """Prompt tokens of all reads of the search, had nothing been shared."""
        ...

    @property
    def longest_tokens(self) -> int:
        """The prompt tokens of a read behind all other labels."""
        ...

    @property
    def num_asked(self) -> int:
        """Different contexts that this scorer was asked for, of whoever asked first."""
        ...

    def of_chain(self, affinity: Hashable, *, part: Part = "search") -> "LabelScorer":
        """The same scorer for one chain: what it asks for goes to one server where that is as
        quick. New reads are counted as those of `part`."""
        ...

    async def score(self, contexts: Sequence[Context]) -> list[LabelLogprobs | None]:
        """The reads, in order; None for a context that the engine cannot answer."""
        ...

    async def prefetch(self, contexts: Sequence[Context]) -> None:
        """Make these known, if anything can be."""
        ...

    def known(self, context: Context) -> LabelLogprobs | None:
        """A read that costs nothing any more; None for what is not known, or failed."""
        ...


class SharedLabelScorer:
    """Contexts that are known cost nothing; the others are sent together, in tree order."""

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
        # What follows is shared by the scorers of all chains.
        self._once = AskOnce[Context, LabelLogprobs | None]()
        self._places = asyncio.Semaphore(NUM_BLOCKS if is_remote else NUM_BLOCKS_HERE)
        self._naive: Counter[str] = Counter()
        self._affinity: Hashable = None
        self._part: Part = "search"
        self._asked: set[str] = set()
        """Not shared."""

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
        """Each context's read, in order; none is ever asked for twice."""
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
        """An answer to each. What fails is asked for by itself, twice, of an engine that lives."""
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
        """Raise unless one of the shortest contexts there are is answered: an item by itself."""
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
    """One answer per request: finite numbers for all labels, or why there are none."""
    try:
        scores = await sampler.score(requests)
    except (EngineDownError, FleetDownError):
        raise  # the engine is down: the run ends, to be resumed
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
