"""The icm loop: labels without labels, by internal coherence.

    for each batch of items, several chains at a time:
        anneal the labels until nothing is frustrated          # chain.py
    labels = the best chain of each batch, or of a baseline that is better than all of them
    if iterating: train an adapter on the labels so far, go on with it
    compare with what needs no search                          # baselines.py
    read the true labels, if there are any, for the report     # verdict.py

Everything is a function of (config, seed) and of the answers, and every answer is in the run's
event log before it counts. So resuming is running again: what was answered is not asked twice.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from rookery.concurrency import run_in_thread, together
from rookery.errors import ConfigError, TaskError
from rookery.loops.icm.baselines import BOOTSTRAP, Baselines
from rookery.loops.icm.chain import Batch, Chain, ChainResult, DecisionLog, Problem, Step
from rookery.loops.icm.config import IcmConfig
from rookery.loops.icm.exports import check_exports, write_exports
from rookery.loops.icm.items import Item, batch_items
from rookery.loops.icm.label_scorer import LabelScorer, ScoreStore, SharedLabelScorer
from rookery.loops.icm.objective import build_constraints
from rookery.loops.icm.progress import ChainStep, Progress
from rookery.loops.icm.prompts import Encoder, Prompts
from rookery.loops.icm.report import label_records, make_report
from rookery.ports import UNOBSERVED, Observer, Sampler
from rookery.reports import IcmReport
from rookery.runs import Run
from rookery.search.labelling import UNLABELLED, IdOrder, TreeOrder
from rookery.seeding import stream_seed
from rookery.types import Datum, ModelRef

__all__ = [
    "IcmInputs",
    "Labeller",
    "check_batches",
    "label",
    "open_problem",
]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Labeller:
    """The model that gives the labels: how it is asked, and how it is trained."""

    sampler: Sampler
    model: ModelRef
    encoder: Encoder
    context_tokens: int | None = None
    """The longest prompt of the model, where it is known: checked before anything is asked."""
    is_remote: bool = False
    """Whether servers compute, for the time left."""
    notes: tuple[str, ...] = ()
    """What a reader of the report must know of the model."""
    tune: Callable[[Sequence[Datum]], Awaitable[ModelRef]] | None = None
    """Trains an adapter on the data and makes it servable; needed when the config iterates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IcmInputs:
    """What a labelling is made of."""

    config: IcmConfig
    items: Sequence[Item]
    gold: Callable[[], Mapping[str, int]] = dict
    """Reads the true labels; called when the search is over, so that nothing before can depend on
    them."""


async def label(
    inputs: IcmInputs,
    *,
    engine: Labeller,
    run: Run,
    observer: Observer[ChainStep] = UNOBSERVED,
) -> IcmReport:
    """Run or resume one labelling in `run`, which is left with labels, exports and report."""
    config, labeller = inputs.config, engine
    progress = Progress(run, config, observer, is_remote=engine.is_remote)
    store = progress.store
    batches: list[Batch] = []
    rounds = _rounds(config, inputs.items)
    for number, round_items in enumerate(rounds, start=1):
        if batches:
            labeller = replace(labeller, model=await _tune(config, batches, labeller))
        opened = [
            await run_in_thread(_open_batch, config, index, part, labeller=labeller, store=store)
            for index, part in enumerate(round_items, start=len(batches))
        ]
        progress.begin(opened, num_rounds_left=len(rounds) - number)
        await _search(config, opened, run, progress)
        batches += opened
    truth = dict(inputs.gold())
    summary = await make_report(batches, config=config, model=engine.model, gold=truth, store=store)
    records = label_records(batches)
    await run_in_thread(
        write_exports, run, records, labels=config.data.labels, config=config.exports
    )
    warnings = (*summary.warnings, *engine.notes)
    report = summary.model_copy(
        update={"run": run.name, "seconds": run.worked_s, "warnings": warnings}
    )
    document = report.model_dump(mode="json", exclude_none=True)
    await run_in_thread(run.write_json, "report.json", document)
    return report


def check_batches(config: IcmConfig, items: Sequence[Item], *, labeller: Labeller) -> None:
    """Refuse, before anything is asked, prompts, constraints and exports that cannot be."""
    check_exports(items, labels=config.data.labels, config=config.exports)
    for batch in batch_items(items, size=config.batch_size):
        open_problem(config, batch, labeller=labeller, store=ScoreStore())


def open_problem(
    config: IcmConfig, items: Sequence[Item], *, labeller: Labeller, store: ScoreStore
) -> Problem:
    """One batch as the search sees it: indices, groups, constraints and a scorer."""
    prompts = Prompts(items, encoder=labeller.encoder, data=config.data)
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
        scorer=SharedLabelScorer(
            labeller.sampler, prompts=prompts, order=order, model=labeller.model, store=store
        ),
        objective=config.objective,
    )


def _rounds(config: IcmConfig, items: Sequence[Item]) -> list[list[list[Item]]]:
    """The batches that are labelled by one model, model by model."""
    batches = batch_items(items, size=config.batch_size)
    if config.iterate is None:
        return [batches]
    size = config.iterate.num_batches
    return [batches[first : first + size] for first in range(0, len(batches), size)]


def _open_batch(
    config: IcmConfig, index: int, items: Sequence[Item], *, labeller: Labeller, store: ScoreStore
) -> Batch:
    def open_scorer(others: Sequence[Item]) -> LabelScorer:
        prompts = Prompts(others, encoder=labeller.encoder, data=config.data)
        order = IdOrder(len(others))
        return SharedLabelScorer(
            labeller.sampler, prompts=prompts, order=order, model=labeller.model, store=store
        ).of_chain(None, part="baselines")

    return Batch(
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


async def _tune(config: IcmConfig, batches: Sequence[Batch], labeller: Labeller) -> ModelRef:
    """A model trained on every label so far that is sure enough to be exported."""
    if labeller.tune is None:
        raise ConfigError(
            "iterate needs an engine that adapters can be loaded into: write engine.type embedded "
            "or fleet, or leave iterate out."
        )
    data = await run_in_thread(_training_data, config, batches, labeller)
    model = await labeller.tune(data)
    logger.info("trained %s on %d labels", model.served_name, len(data))
    return model


def _training_data(config: IcmConfig, batches: Sequence[Batch], labeller: Labeller) -> list[Datum]:
    records = label_records(batches)
    sure = [r for r in records if r.margin is not None and r.margin >= config.exports.min_margin]
    if not sure:
        raise TaskError("No label is sure enough to train on: lower exports.min_margin.")
    prompts = Prompts([r.item for r in sure], encoder=labeller.encoder, data=config.data)
    data = []
    for place, record in enumerate(sure):
        query = prompts.context((UNLABELLED,) * len(sure), place, order=())
        answer = prompts.label_tokens[record.label or 0]
        end = len(query) - 1
        data.append(Datum(tokens=query, positions=(end,), targets=(answer,), weights=(1.0,)))
    return data


async def _search(
    config: IcmConfig, batches: Sequence[Batch], run: Run, progress: Progress
) -> None:
    """All chains of all batches, a few at a time; each batch is left with its results."""
    room, last = asyncio.Semaphore(config.parallel), config.num_chains - 1

    async def search(batch: Batch, chain: int) -> ChainResult:
        decisions = DecisionLog(run, batch, chain=chain)

        def stepped(step: Step) -> None:
            decisions.add(step)
            run.log_metrics(step.iteration, _metrics(step, where=f"{batch.index}_{chain}"))
            progress.step(batch, chain, step)

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
            ).run(start)
        await decisions.flush()
        progress.end(batch, chain)
        logger.info("batch %d, chain %d: utility %.2f", batch.index, chain, result.rank[1])
        return result if start is None else replace(result, origin=BOOTSTRAP)

    async def compare(batch: Batch) -> None:
        async with room:
            baselines = _baselines(config, batch, batch.problem)
            batch.results += await baselines.better_than(batch.results)
            if config.baselines.inverted:
                await _search_inverted(config, batch, baselines, run, progress)

    chains = range(config.num_chains)
    results = await together(search(batch, chain) for batch in batches for chain in chains)
    for place, batch in enumerate(batches):
        batch.results = results[place * len(chains) : (place + 1) * len(chains)]
        batch.end_search()
    await together(map(compare, batches))


def _baselines(config: IcmConfig, batch: Batch, problem: Problem) -> Baselines:
    return Baselines(problem, config=config.baselines, seed=batch.seed)


async def _search_inverted(
    config: IcmConfig, batch: Batch, baselines: Baselines, run: Run, progress: Progress
) -> None:
    """The search from the opposite of the best labels; it counts where it finds better ones."""
    decisions = DecisionLog(run, batch, chain=len(batch.results))

    def stepped(step: Step) -> None:
        decisions.add(step)
        progress.step(batch, config.num_chains, step)

    batch.inverted = await baselines.inverted(batch.best, config=config.search, on_step=stepped)
    await decisions.flush()
    if batch.inverted is not None and batch.inverted.rank > batch.best.rank:
        batch.results.append(batch.inverted)
    progress.end(batch, config.num_chains)


def _metrics(step: Step, *, where: str) -> dict[str, float]:
    """By batch and chain, as several search at the same time."""
    values = {
        "utility": step.utility,
        "best_utility": step.best_utility,
        "temperature": step.temperature,
        "num_frustrated": float(step.num_frustrated),
        "num_violated": float(step.num_violated),
        "num_labelled": float(sum(label != UNLABELLED for label in step.labels)),
    }
    return {f"icm/{name}_{where}": value for name, value in values.items()}
