"""One search over the labels of one batch: the paper's algorithm, one call per step.

    label a few items at random, consistently
    repeat: draw an item; ask for its most likely label given all others
            if it differs: try it with every consistent repair of its group, keep the best
            accept by the gain in U and the temperature
    until all items are labelled and none is frustrated, or the iterations are used up

A labelling with an unanswered context has no utility and is never accepted.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from rookery.errors import EngineError
from rookery.loops.icm.items import Item
from rookery.loops.icm.label_scorer import Context, LabelScorer
from rookery.loops.icm.objective import Assessment, LabelLogprobs, ObjectiveConfig, assess, predict
from rookery.runs import Event, NewEvent, Run
from rookery.search.annealing import (
    Annealing,
    AnnealingConfig,
    Decision,
    argmax_label,
    ask,
    begin,
    skip,
    start_labels,
    tell,
)
from rookery.search.labelling import UNLABELLED, Constraints, Labels, labelled_items
from rookery.seeding import shuffled, stream, stream_seed

__all__ = [
    "Chain",
    "ChainMove",
    "ChainResult",
    "DecisionLog",
    "HasRoom",
    "ItemBatch",
    "Problem",
]

NUM_STARTS = 8
"""Random starts to try if the engine cannot answer for an item of one; then as many with half the
items, and so on. At last every item is tried alone."""


HasRoom = Callable[[int, int], Awaitable[bool]]
"""Returns True if this iteration may begin and bring the chain's contexts to this number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One batch of items as the search sees it, without texts and true labels."""

    num_items: int
    num_labels: int
    groups: tuple[int, ...]
    """Group number of each item."""
    constraints: Constraints
    scorer: LabelScorer
    objective: ObjectiveConfig

    async def assess(self, labellings: Sequence[Labels]) -> list[Assessment | None]:
        """Compute U of each labelling, with one call for all missing reads.

        None if the engine could not answer for an item, since missing values are not averaged away,
        or if nothing is labelled.
        """
        contexts = [(labels, item) for labels in labellings for item in labelled_items(labels)]
        reads = iter(await self.scorer.score(contexts))
        return [
            self._judge(labels, {item: next(reads) for item in labelled_items(labels)})
            for labels in labellings
        ]

    def _judge(self, labels: Labels, reads: dict[int, LabelLogprobs | None]) -> Assessment | None:
        answered = {item: read for item, read in reads.items() if read is not None}
        if not reads or len(answered) < len(reads):
            return None
        return assess(
            labels,
            answered,
            config=self.objective,
            num_violated=self.constraints.num_violated(labels),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainMove:
    """One decision and the state after it. Iterations without a new proposal have none."""

    iteration: int
    item: int
    tried: int
    """Number of consistent options evaluated."""
    proposed_utility: float
    is_accepted: bool
    temperature: float
    labels: Labels
    utility: float
    best_utility: float
    num_frustrated: int
    num_violated: int = 0
    """Pairs of labels that break a constraint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainResult:
    """The best labelling of one search."""

    labels: Labels
    assessment: Assessment
    start: Labels
    num_iterations: int
    num_accepted: int
    is_settled: bool
    """True if all items are labelled and none is frustrated, so that the search ended by itself."""
    labelled_at: tuple[int, ...]
    """Iteration in which each item got its label; -1 for start labels and unlabelled items."""
    steps: tuple[ChainMove, ...]
    origin: str = "random labels"
    """Origin of the start labels, or of labels that no search found."""

    @property
    def rank(self) -> tuple[int, float]:
        """Rank by completeness, then by utility."""
        return self.assessment.num_labelled, self.assessment.utility


class Chain:
    """A search with its own random numbers."""

    def __init__(
        self,
        problem: Problem,
        *,
        config: AnnealingConfig,
        seed: int,
        speculate: int = 1,
        on_step: Callable[[ChainMove], None] | None = None,
    ) -> None:
        self._problem = problem
        self._config = config
        self._seed = seed
        self._speculate = speculate
        self._on_step = on_step
        self._steps: list[ChainMove] = []
        self._asked: set[int] = set()
        """Unlabelled items drawn since the last change of a label."""
        self._num_asked = self._dearest = 0
        """Contexts asked before the last iteration, and the maximum of one iteration."""

    async def run(
        self, start: Labels | None = None, *, has_room: HasRoom | None = None
    ) -> ChainResult:
        """Search from random or given start labels, while there is room.

        Raises EngineError if the engine cannot answer for any start.
        """
        problem = self._problem
        start, now = await self._begin(start)
        state = begin(start, utility=now.utility)
        best, labelled_at = now, [UNLABELLED] * problem.num_items
        best_at = tuple(labelled_at)
        while state.iteration < self._config.iterations and not _is_settled(state.labels, now):
            if has_room is not None and not await self._fits(state.iteration, has_room):
                break
            await self._look_ahead(state, now)
            before = state
            state, decision, tried = await self._iterate(state, now)
            if decision is None or not decision.is_accepted:
                continue
            now = tried[decision.labels]
            self._asked.clear()
            for item in _changed(before.labels, state.labels):
                labelled_at[item] = decision.iteration
            if state.best_labels is state.labels:
                best, best_at = now, tuple(labelled_at)
        return ChainResult(
            labels=state.best_labels,
            assessment=best,
            start=start,
            num_iterations=state.iteration,
            num_accepted=state.num_accepted,
            is_settled=_is_settled(state.best_labels, best),
            labelled_at=best_at,
            steps=tuple(self._steps),
        )

    async def _fits(self, iteration: int, has_room: HasRoom) -> bool:
        """Return True if there is room for an iteration as large as the largest so far."""
        num_asked = self._problem.scorer.num_asked
        self._dearest = max(self._dearest, num_asked - self._num_asked)
        self._num_asked = num_asked
        return await has_room(iteration, num_asked + self._dearest)

    async def _begin(self, start: Labels | None) -> tuple[Labels, Assessment]:
        for labels in self._draw_starts() if start is None else [start]:
            [assessment] = await self._problem.assess([labels])
            if assessment is not None:
                return labels, assessment
        raise EngineError(
            "The engine answers, but not for the labels that a search begins with. Its score "
            "events say why: rookery runs export."
        )

    def _draw_starts(self) -> Iterator[Labels]:
        attempts, num_start = count(), self._config.num_start
        while num_start:
            for _ in range(NUM_STARTS):
                yield self._draw_start(num_start, next(attempts))
            num_start = min(num_start, self._problem.num_items) // 2
        blank = (UNLABELLED,) * self._problem.num_items
        for item in shuffled(range(len(blank)), rng=stream(self._seed, "alone")):
            yield from self._problem.constraints.repairs(blank, item=item, label=0)[:1]

    def _draw_start(self, num_start: int, attempt: int) -> Labels:
        return start_labels(
            self._problem.constraints,
            num_items=self._problem.num_items,
            num_labels=self._problem.num_labels,
            config=self._config.model_copy(update={"num_start": num_start}),
            seed=stream_seed(self._seed, "start", attempt) if attempt else self._seed,
        )

    async def _iterate(
        self, state: Annealing, now: Assessment
    ) -> tuple[Annealing, Decision | None, dict[Labels, Assessment]]:
        item = self._draw(state)
        [read] = await self._problem.scorer.score([(state.labels, item)])
        self._asked.add(item)
        options = () if read is None else self._options(state.labels, item, read, now)
        assessed = zip(options, await self._problem.assess(options), strict=True)
        tried = {labels: assessment for labels, assessment in assessed if assessment is not None}
        if not tried:
            return skip(state), None, {}
        utilities = [(labels, assessment.utility) for labels, assessment in tried.items()]
        state, decision = tell(state, utilities, config=self._config, seed=self._seed)
        after = tried[decision.labels] if decision.is_accepted else now
        self._record(item, state, decision, num_tried=len(tried), after=after)
        return state, decision, tried

    def _draw(self, state: Annealing) -> int:
        return ask(state, groups=self._problem.groups, config=self._config, seed=self._seed)

    def _options(
        self, labels: Labels, item: int, read: LabelLogprobs, now: Assessment
    ) -> tuple[Labels, ...]:
        label = argmax_label(predict(read, prior=now.prior))
        if label == labels[item]:
            return ()
        return self._problem.constraints.repairs(labels, item=item, label=label)

    async def _look_ahead(self, state: Annealing, now: Assessment) -> None:
        """Ask in one call for all that the next iterations need if none of them changes a label.

        A wrong guess costs tokens but changes no decision, because reads are found by content. The
        requests depend only on this chain, not on concurrent ones.
        """
        if self._speculate <= 1:
            return
        wanted: list[Context] = []
        for ahead in range(self._speculate):
            item = self._draw(replace(state, iteration=state.iteration + ahead))
            is_asked = state.labels[item] != UNLABELLED or item in self._asked
            read = self._problem.scorer.known((state.labels, item)) if is_asked else None
            if read is None:
                wanted.append((state.labels, item))
                continue
            for option in self._options(state.labels, item, read, now):
                wanted.extend((option, other) for other in labelled_items(option))
        await self._problem.scorer.prefetch(wanted)

    def _record(
        self, item: int, state: Annealing, decision: Decision, *, num_tried: int, after: Assessment
    ) -> None:
        step = ChainMove(
            iteration=decision.iteration,
            item=item,
            tried=num_tried,
            proposed_utility=decision.utility,
            is_accepted=decision.is_accepted,
            temperature=decision.temperature,
            labels=state.labels,
            utility=state.utility,
            best_utility=state.best_utility,
            num_frustrated=len(after.frustrated),
            num_violated=after.num_violated,
        )
        self._steps.append(step)
        if self._on_step is not None:
            self._on_step(step)


def _is_settled(labels: Labels, assessment: Assessment) -> bool:
    return UNLABELLED not in labels and not assessment.frustrated


def _changed(before: Labels, after: Labels) -> list[int]:
    return [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]


@dataclass(slots=True)
class ItemBatch:
    """One batch of items and the results of its chains."""

    index: int
    items: tuple[Item, ...]
    problem: Problem
    seed: int
    provenance: Mapping[str, Any]
    open_scorer: Callable[[Sequence[Item]], LabelScorer]
    """Opens a scorer for any items, in the given order, under the batch's model."""
    results: list[ChainResult] = field(default_factory=list)
    """Results of the chains, then of a baseline or inverted search that beats all before it."""
    inverted: ChainResult | None = None
    """Result of the search from the opposite labels, if there was one."""

    @property
    def scorer(self) -> LabelScorer:
        return self.problem.scorer

    def end_search(self) -> None:
        """Count all further reads for the baselines."""
        scorer = self.scorer.of_chain(None, part="baselines")
        self.problem = replace(self.problem, scorer=scorer)

    @property
    def chain(self) -> int:
        """Index of the best result, the first among equals."""
        return max(range(len(self.results)), key=lambda c: self.results[c].rank)

    @property
    def best(self) -> ChainResult:
        return self.results[self.chain]


BLOCK_DECISIONS = 64
"""Decisions per write. They can be recomputed from the answers, which are written at once."""


class DecisionLog:
    """Decisions as events, written in blocks. A resumed run repeats those that were lost.

    Keys contain the iteration, so that a different decision for it is refused.
    """

    def __init__(self, run: Run, batch: ItemBatch, *, chain: int) -> None:
        self._run = run
        self._batch = batch
        self._chain = chain
        self._waiting: list[NewEvent] = []
        self._blocks: list[Future[list[Event]]] = []

    def add(self, step: ChainMove) -> None:
        """Add a decision without waiting. `flush` waits at the end of the chain."""
        payload = {
            "item": self._batch.items[step.item].id,
            "is_accepted": step.is_accepted,
            "utility": step.utility,
            "proposed_utility": step.proposed_utility,
            "temperature": step.temperature,
            "labels": "".join("-" if x < 0 else chr(ord("0") + x) for x in step.labels),
            "num_frustrated": step.num_frustrated,
        }
        key = f"{self._batch.index}/{self._chain}/{step.iteration}"
        self._waiting.append(NewEvent(kind="decision", payload=payload, key=key))
        if len(self._waiting) >= BLOCK_DECISIONS:
            self._submit()

    async def flush(self) -> None:
        """Wait until all decisions are stored."""
        self._submit()
        for block in self._blocks:
            await asyncio.wrap_future(block)
        self._blocks.clear()

    def _submit(self) -> None:
        self._blocks.append(self._run.submit(self._waiting))
        self._waiting = []
