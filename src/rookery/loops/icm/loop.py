"""The icm loop: labels for unlabelled data, by internal coherence.

    for each batch of items, several chains at a time:
        anneal the labels until nothing is frustrated          # chain.py
    labels = the best chain of each batch, or a baseline that beats them all
    if iterating: train an adapter on the labels so far, continue with it
    compare with the baselines                                 # baselines.py
    read the true labels, if there are any, for the report     # verdict.py

Everything is a function of (config, seed) and the answers. Every answer is in the run's event log
before it counts, so a resumed run asks nothing twice.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from rookery.errors import ConfigError, TaskError
from rookery.loops.icm.baselines import BOOTSTRAP, Baselines
from rookery.loops.icm.chain import (
    Chain,
    ChainMove,
    ChainResult,
    DecisionLog,
    HasRoom,
    ItemBatch,
    Problem,
)
from rookery.loops.icm.config import IcmConfig
from rookery.loops.icm.exports import check_exports, write_exports
from rookery.loops.icm.items import Item, batch_items
from rookery.loops.icm.label_scorer import LabelScorer, ScoreStore, SharedLabelScorer
from rookery.loops.icm.objective import build_constraints
from rookery.loops.icm.prompts import BatchPrompts, Encoder
from rookery.loops.icm.report import label_records, make_report
from rookery.loops.icm.verdict import NUM_CONTEXTS
from rookery.ports import UNOBSERVED, Observer, Sampler
from rookery.reports import IcmReport, SpentRecord
from rookery.runs import NewEvent, Run
from rookery.runs.budget import Budget, find_stop_reason
from rookery.runtime.concurrency import run_in_thread, together
from rookery.search.labelling import UNLABELLED, IdOrder, Order, TreeOrder
from rookery.seeding import stream_seed
from rookery.types import Datum, ModelRef

__all__ = [
    "ChainStep",
    "IcmInputs",
    "Labeller",
    "LabellingProgress",
    "check_batches",
    "label",
    "open_problem",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainStep:
    """A decision of one chain, for the observer."""

    batch: int
    chain: int
    num_items: int
    num_tokens: int
    """Prompt tokens computed so far, by all chains."""
    step: ChainMove


UNSEARCHED = (8, 4)
"""Cost of the baselines: reads per item, most given few labels, and the full labellings that take
as long."""
BOOTSTRAPPED = (3, 2)
"""The same if a chain has started from the bootstrap's labels."""
REPORT_READS = 1 + NUM_CONTEXTS
"""Reads per item for the report."""
REPORT_SPEED = 6
"""Speed of report reads on servers, relative to search reads: a block computes them together."""


class LabellingProgress:
    """Predicts the prompt tokens of all rounds, without those that a prefix cache saves.

    The progress of a search is its share of labelled items, used iterations or used reads,
    whichever is largest. Labelling one more item reads all labelled ones, so the cost grows with
    the square of their number. An inverted search is assumed to take as long as one from random
    labels, and each round as long as the previous one. All other reads cover all items, nearly
    always given all labels.
    """

    def __init__(
        self,
        run: Run,
        config: IcmConfig,
        observer: Observer[ChainStep],
        *,
        reads: int | None,
        is_remote: bool,
    ) -> None:
        """`reads` is the budget's limit per search; None: no limit."""
        self.store = ScoreStore(run, on_read=self._report_progress)
        self._run, self._config, self._observer = run, config, observer
        self._most_reads = math.inf if reads is None else reads
        self._report_speed = REPORT_SPEED if is_remote else 1
        self._num_random = max(1, config.num_chains - 1)  # the last starts from known labels
        self._inverted = range(config.num_chains, config.num_chains + config.baselines.inverted)
        self._num_items: dict[int, int] = {}
        """Number of items, by batch of the round."""
        self._parts: dict[tuple[int, int], float] = {}
        """Progress of each search of the round, 0 to 1, by batch and chain."""
        self._asked: dict[tuple[int, int], int] = {}
        """Contexts asked for, by batch and chain."""
        self._num_rounds_left = self._tokens_before = 0
        self._search_tokens = 0.0
        """Tokens of one search from random labels in every batch of the round."""
        self._reads_searched = 0
        """Number of reads when such a search last asked."""
        self._before_report = (0, 0)
        """Reads and tokens when any search last asked."""
        self._num_begun = 0
        """Items of this round and earlier ones."""
        self._round_tokens = 0.0
        """Tokens to read every item of the round given all labels."""
        self._report_begun = self._report_tokens = 0.0
        """Tokens of the report: for the rounds so far, and for all rounds."""

    def begin(self, batches: Sequence[ItemBatch], *, num_rounds_left: int) -> None:
        """Begin a round, with this many to follow."""
        self._num_rounds_left, self._tokens_before = num_rounds_left, self.store.num_computed
        self._num_items = {batch.index: len(batch.items) for batch in batches}
        self._num_begun += sum(self._num_items.values())
        self._parts, self._asked = {}, {}
        self._round_tokens = sum(_labelling_tokens(b, num=len(b.items)) for b in batches)
        # Items of one question are read given the same labels.
        report = NUM_CONTEXTS * sum(
            _labelling_tokens(b, num=len(set(b.problem.groups))) for b in batches
        )
        self._report_begun += report
        self._report_tokens = self._report_begun + num_rounds_left * report

    def step(self, batch: ItemBatch, chain: int, step: ChainMove, *, num_asked: int) -> None:
        """Take a chain's decision, and the number of contexts it has asked for so far."""
        search, num_items = self._config.search, len(batch.items)
        start = min(search.num_start, num_items - 1)
        num_labelled = sum(label != UNLABELLED for label in step.labels)
        labelled = (num_labelled**2 - start**2) / (num_items**2 - start**2)
        asked = num_asked / self._most_reads
        part = max(labelled, step.iteration / search.iterations, asked)
        known = self._parts.get((batch.index, chain), 0.0)
        self._parts[batch.index, chain] = max(known, min(part, 0.95))
        self._asked[batch.index, chain] = num_asked
        self._observer.on_step(
            ChainStep(
                batch=batch.index,
                chain=chain,
                num_items=num_items,
                num_tokens=self.store.num_computed,
                step=step,
            )
        )

    def end(self, batch: ItemBatch, chain: int) -> None:
        self._parts[batch.index, chain] = 1.0

    def _report_progress(self) -> None:
        part, inverted = self._part(range(self._num_random)), self._part(self._inverted)
        if not part:
            return
        num_reads, tokens = self.store.num_reads, self.store.num_computed
        left = 0.0
        if part < 1:
            done = self._search_share() * (tokens - self._tokens_before)
            self._search_tokens = done / part / self._num_random
            left = max(0.0, self._num_random * self._search_tokens - done)
            self._reads_searched = num_reads
        if part < 1 or inverted < 1:
            self._before_report = num_reads, tokens
        left = min(left + (1 - inverted) * self._search_tokens, self._tokens_in_budget())
        left += self._baseline_tokens(num_reads) * (not inverted)
        whole_round = tokens - self._tokens_before + left
        left += self._num_rounds_left * whole_round
        reads_before, tokens_before = self._before_report
        done_tokens = tokens_before + (tokens - tokens_before) / self._report_speed
        left += self._report_tokens_left(num_reads - reads_before) / self._report_speed
        self._observer.on_progress(done_tokens, done_tokens + left)

    def _search_share(self) -> float:
        """Return the share of the searches from random labels in all requests."""
        num_random = sum(n for (_, chain), n in self._asked.items() if chain < self._num_random)
        num_all = sum(self._asked.values())
        return num_random / num_all if num_all else 1.0

    def _baseline_tokens(self, num_reads: int) -> float:
        """Return the tokens left for the baselines."""
        reads, labellings = BOOTSTRAPPED if self._config.num_chains > 1 else UNSEARCHED
        left = 1 - (num_reads - self._reads_searched) / (reads * sum(self._num_items.values()))
        return max(0.0, left) * labellings * self._round_tokens

    def _report_tokens_left(self, num_reads: int) -> float:
        """Return the tokens left after this many reads of the report."""
        return max(0.0, 1 - num_reads / (REPORT_READS * self._num_begun)) * self._report_tokens

    def _tokens_in_budget(self) -> float:
        """Return the tokens that fit into the budget's remaining hours."""
        max_hours = self._config.budget.max_hours
        if max_hours is None:
            return math.inf
        elapsed_s = max(self._run.elapsed_s, 1e-3)
        return self.store.num_computed * max(0.0, 3600 * max_hours / elapsed_s - 1)

    def _part(self, chains: range) -> float:
        """Return the progress of these chains, weighted by items; 1 without chains."""
        total = sum(self._num_items.values()) * len(chains)
        done = sum(
            num_items * self._parts.get((batch, chain), 0.0)
            for batch, num_items in self._num_items.items()
            for chain in chains
        )
        return done / total if total else 1.0


def _labelling_tokens(batch: ItemBatch, *, num: int) -> float:
    """Estimate the tokens to read all items: each level of a tree over `num` leaves shows all."""
    return batch.scorer.longest_tokens * (1 + math.log2(num))


logger = logging.getLogger(__name__)

SPENT = "spent"
"""Event kind: the number of reads before those of the report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Labeller:
    """The model that labels: how to ask it and how to train it."""

    sampler: Sampler
    model: ModelRef
    encoder: Encoder
    context_tokens: int | None = None
    """Maximum prompt length, if known. Checked before any request."""
    is_remote: bool = False
    """True if servers compute. Affects only the predicted time left."""
    notes: tuple[str, ...] = ()
    """Notes on the model for the report."""
    tune: Callable[[Sequence[Datum]], Awaitable[ModelRef]] | None = None
    """Trains an adapter on the data and makes it servable. Required if the config iterates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IcmInputs:
    """The inputs of a labelling."""

    config: IcmConfig
    items: Sequence[Item]
    gold: Callable[[], Mapping[str, int]] = dict
    """Reads the true labels. Called after the search, so that nothing before can depend on them."""


async def label(
    inputs: IcmInputs,
    *,
    engine: Labeller,
    run: Run,
    observer: Observer[ChainStep] = UNOBSERVED,
) -> IcmReport:
    """Run or resume one labelling. Leaves labels, exports and the report in `run`."""
    config, labeller = inputs.config, engine
    rounds = _rounds(config, inputs.items)
    reads = config.reads_of_search(num_items=len(inputs.items), num_batches=sum(map(len, rounds)))
    progress = LabellingProgress(run, config, observer, reads=reads, is_remote=engine.is_remote)
    store = progress.store
    batches: list[ItemBatch] = []
    for number, round_items in enumerate(rounds, start=1):
        if batches:
            labeller = replace(labeller, model=await _tune(config, batches, labeller))
        opened = [
            await run_in_thread(_open_batch, config, index, part, labeller=labeller, store=store)
            for index, part in enumerate(round_items, start=len(batches))
        ]
        progress.begin(opened, num_rounds_left=len(rounds) - number)
        await _search(config, opened, run, progress, reads)
        batches += opened
    spent = await _note_spent(run, progress.store)
    truth = dict(inputs.gold())
    summary = await make_report(batches, config=config, model=engine.model, gold=truth, store=store)
    records = label_records(batches)
    await run_in_thread(
        write_exports, run, records, labels=config.data.labels, config=config.exports
    )
    warnings = (*summary.warnings, *engine.notes)
    report = summary.model_copy(
        update={
            "run": run.name,
            "seconds": run.worked_s,
            "warnings": warnings,
            "spent": spent,
            "stop_reason": find_stop_reason(run),
        }
    )
    document = report.model_dump(mode="json", exclude_none=True)
    await run_in_thread(run.write_json, "report.json", document)
    return report


async def _note_spent(run: Run, store: ScoreStore) -> SpentRecord:
    """Record the reads of labelling once, because a repeated report finds its own reads too."""
    new = NewEvent(kind=SPENT, key=SPENT, payload={"reads": store.num_reads}, first_wins=True)
    [event] = await run.append_many([new])
    return SpentRecord(drawn_tokens=int(event.payload["reads"]))


def check_batches(config: IcmConfig, items: Sequence[Item], *, labeller: Labeller) -> None:
    """Refuse impossible prompts, constraints and exports before any request."""
    check_exports(items, labels=config.data.labels, config=config.exports)
    for batch in batch_items(items, size=config.batch_size):
        open_problem(config, batch, labeller=labeller, store=ScoreStore())


def open_problem(
    config: IcmConfig, items: Sequence[Item], *, labeller: Labeller, store: ScoreStore
) -> Problem:
    """Build the search's view of one batch: indices, groups, constraints and a scorer."""
    prompts = BatchPrompts(items, encoder=labeller.encoder, data=config.data)
    if labeller.context_tokens is not None and prompts.longest_tokens > labeller.context_tokens:
        fits = int(len(items) * labeller.context_tokens / prompts.longest_tokens)
        raise TaskError(
            f"A batch of {len(items)} items makes prompts of {prompts.longest_tokens:,} tokens; "
            f"the model reads {labeller.context_tokens:,}: write batch_size: {fits} or less."
        )
    members: dict[str, list[int]] = {}
    for index, item in enumerate(items):
        members.setdefault(item.group, []).append(index)
    places = {name: place for place, name in enumerate(members)}
    order = TreeOrder(list(members.values()))
    return Problem(
        num_items=len(items),
        num_labels=len(config.data.labels),
        groups=tuple(places[item.group] for item in items),
        constraints=build_constraints(config.constraints, items=items, labels=config.data.labels),
        scorer=_scorer(labeller, prompts=prompts, order=order, store=store),
        objective=config.objective,
    )


def _scorer(
    labeller: Labeller, *, prompts: BatchPrompts, order: Order, store: ScoreStore
) -> SharedLabelScorer:
    return SharedLabelScorer(
        labeller.sampler,
        prompts=prompts,
        order=order,
        model=labeller.model,
        store=store,
        is_remote=labeller.is_remote,
    )


def _rounds(config: IcmConfig, items: Sequence[Item]) -> list[list[list[Item]]]:
    """Return the batches in rounds, one per model."""
    batches = batch_items(items, size=config.batch_size)
    if config.iterate is None:
        return [batches]
    size = config.iterate.num_batches
    return [batches[first : first + size] for first in range(0, len(batches), size)]


def _open_batch(
    config: IcmConfig, index: int, items: Sequence[Item], *, labeller: Labeller, store: ScoreStore
) -> ItemBatch:
    def open_scorer(others: Sequence[Item]) -> LabelScorer:
        prompts = BatchPrompts(others, encoder=labeller.encoder, data=config.data)
        order = IdOrder(len(others))
        scorer = _scorer(labeller, prompts=prompts, order=order, store=store)
        return scorer.of_chain(None, part="baselines")

    return ItemBatch(
        index=index,
        items=tuple(items),
        problem=open_problem(config, items, labeller=labeller, store=store),
        seed=stream_seed(config.seed, "batch", index),
        open_scorer=open_scorer,
        provenance={
            "model": labeller.model.served_name,
            "order": "tree",
            "seed": config.seed,
            "batch": index,
        },
    )


async def _tune(config: IcmConfig, batches: Sequence[ItemBatch], labeller: Labeller) -> ModelRef:
    """Train a model on all labels so far that are certain enough to export."""
    if labeller.tune is None:
        raise ConfigError(
            "iterate needs an engine that adapters can be loaded into: write engine.type embedded "
            "or fleet, or leave iterate out."
        )
    data = await run_in_thread(_training_data, config, batches, labeller)
    model = await labeller.tune(data)
    logger.info("trained %s on %d labels", model.served_name, len(data))
    return model


def _training_data(
    config: IcmConfig, batches: Sequence[ItemBatch], labeller: Labeller
) -> list[Datum]:
    records = label_records(batches)
    sure = [r for r in records if r.margin is not None and r.margin >= config.exports.min_margin]
    if not sure:
        raise TaskError("No label is sure enough to train on: lower exports.min_margin.")
    prompts = BatchPrompts([r.item for r in sure], encoder=labeller.encoder, data=config.data)
    data = []
    for place, record in enumerate(sure):
        query = prompts.context((UNLABELLED,) * len(sure), place, order=())
        answer = prompts.label_tokens[record.label or 0]
        end = len(query) - 1
        data.append(Datum(tokens=query, positions=(end,), targets=(answer,), weights=(1.0,)))
    return data


async def _search(
    config: IcmConfig,
    batches: Sequence[ItemBatch],
    run: Run,
    progress: LabellingProgress,
    reads: int | None,
) -> None:
    """Run all chains of all batches, at most `parallel` at a time, and store their results in the
    batches. `reads` is the budget's limit per chain."""
    room, last = asyncio.Semaphore(config.parallel), config.num_chains - 1

    async def search(batch: ItemBatch, chain: int) -> ChainResult:
        decisions = DecisionLog(run, batch, chain=chain)

        def stepped(step: ChainMove) -> None:
            decisions.add(step)
            run.log_metrics(step.iteration, _metrics(step, where=f"{batch.index}_{chain}"))
            progress.step(batch, chain, step, num_asked=problem.scorer.num_asked)

        problem = replace(batch.problem, scorer=batch.scorer.of_chain((batch.index, chain)))
        async with room:
            begins_known = chain == last and last > 0
            start = await _baselines(config, batch, problem).start() if begins_known else None
            result = await Chain(
                problem,
                config=config.search,
                seed=stream_seed(batch.seed, "chain", chain),
                speculate=config.speculate,
                on_step=stepped,
            ).run(start, has_room=_has_room(config, batch, chain, run, reads))
        await decisions.flush()
        progress.end(batch, chain)
        logger.info("batch %d, chain %d: utility %.2f", batch.index, chain, result.rank[1])
        return result if start is None else replace(result, origin=BOOTSTRAP)

    async def compare(batch: ItemBatch) -> None:
        async with room:
            baselines = _baselines(config, batch, batch.problem)
            batch.results += await baselines.better_than(batch.results)
            if config.baselines.inverted:
                has_room = _has_room(config, batch, config.num_chains, run, reads)
                await _search_inverted(config, batch, baselines, run, progress, has_room)

    chains = range(config.num_chains)
    results = await together(search(batch, chain) for batch in batches for chain in chains)
    for place, batch in enumerate(batches):
        batch.results = results[place * len(chains) : (place + 1) * len(chains)]
        batch.end_search()
    await together(map(compare, batches))


def _baselines(config: IcmConfig, batch: ItemBatch, problem: Problem) -> Baselines:
    return Baselines(problem, config=config.baselines, seed=batch.seed)


def _has_room(
    config: IcmConfig, batch: ItemBatch, chain: int, run: Run, reads: int | None
) -> HasRoom:
    """Open the budget of one chain. Chains are concurrent, so each has its own."""
    budget_config = config.budget.model_copy(update={"max_answer_tokens": reads})
    where = f"{batch.index}/{chain}"
    budget = Budget(budget_config, run, key=where)
    num_done = _count_decided(run, where) if budget_config.max_hours is not None else 0
    return lambda iteration, num_asked: budget.has_room(
        iteration, tokens=num_asked, num_done=num_done
    )


def _count_decided(run: Run, where: str) -> int:
    """Count the iterations of a chain up to its last decision."""
    places = (event.key.rpartition("/") for event in run.events("decision"))
    return max((int(number) + 1 for chain, _, number in places if chain == where), default=0)


async def _search_inverted(
    config: IcmConfig,
    batch: ItemBatch,
    baselines: Baselines,
    run: Run,
    progress: LabellingProgress,
    has_room: HasRoom,
) -> None:
    """Search from the opposite of the best labels. The result counts if it is better."""
    decisions = DecisionLog(run, batch, chain=len(batch.results))

    def stepped(step: ChainMove) -> None:
        decisions.add(step)
        progress.step(batch, config.num_chains, step, num_asked=0)

    batch.inverted = await baselines.inverted(
        batch.best, config=config.search, on_step=stepped, has_room=has_room
    )
    await decisions.flush()
    if batch.inverted is not None and batch.inverted.rank > batch.best.rank:
        batch.results.append(batch.inverted)
    progress.end(batch, config.num_chains)


def _metrics(step: ChainMove, *, where: str) -> dict[str, float]:
    """Name metrics by batch and chain, as several search concurrently."""
    values = {
        "utility": step.utility,
        "best_utility": step.best_utility,
        "temperature": step.temperature,
        "num_frustrated": float(step.num_frustrated),
        "num_violated": float(step.num_violated),
        "num_labelled": float(sum(label != UNLABELLED for label in step.labels)),
    }
    return {f"icm/{name}_{where}": value for name, value in values.items()}
