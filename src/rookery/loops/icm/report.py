"""The report of a labelling: the result beside its baselines, its cost and its verdict."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from rookery.loops.icm.baselines import (
    INVERTED,
    Baselines,
    BaselinesConfig,
    calibrated,
    most_likely,
    surest,
)
from rookery.loops.icm.chain import ChainResult, ItemBatch, Problem
from rookery.loops.icm.config import IcmConfig
from rookery.loops.icm.exports import LabelRecord
from rookery.loops.icm.label_scorer import ScoreStore
from rookery.loops.icm.objective import LabelLogprobs, normalised, predict
from rookery.loops.icm.verdict import (
    Agreement,
    Evidence,
    MajorityLabel,
    Support,
    agree,
    join_supports,
    judge,
    measure_support,
)
from rookery.reports import (
    AgreementRecord,
    ChainRecord,
    GoldRecord,
    IcmReport,
    IcmRow,
    ItemRecord,
    StepRecord,
    SupportRecord,
    TokensRecord,
    TransferRecord,
)
from rookery.runtime.concurrency import run_in_thread
from rookery.search.labelling import UNLABELLED, Labels, labelled_items
from rookery.tasks.splits import join_keys
from rookery.types import ModelRef

__all__ = [
    "Labelling",
    "label_all_ways",
    "label_records",
    "make_report",
    "transfer",
]


@dataclass(slots=True)
class Labelling:
    """One way to label all items: its labels, batch by batch."""

    name: str
    note: str = ""
    labels: list[Labels] = field(default_factory=list)
    utilities: list[float | None] = field(default_factory=list)
    """Utility per batch; None if items lack labels, as it would not be comparable."""
    num_violated: int = 0
    is_winner: bool = False


async def label_all_ways(
    batches: Sequence[ItemBatch],
    config: BaselinesConfig,
    truth: Sequence[Mapping[int, int]],
) -> list[Labelling]:
    """Label in every way, the search's result first. `truth` has the known labels of each batch."""
    rows = {
        "icm": Labelling("icm", is_winner=True, note=_origins(batches)),
        "zero-shot": Labelling("zero-shot"),
        "random few-shot": Labelling("random few-shot", note=f"{config.num_shots} random labels"),
        "bootstrap": Labelling("bootstrap", note=f"{config.num_rounds} rounds, consistent"),
    }
    if any(truth):
        rows["golden few-shot"] = Labelling(
            "golden few-shot", note=f"{config.num_shots} true labels"
        )
    if config.inverted:
        rows[INVERTED] = Labelling(INVERTED, note="searched from the opposite")
    for batch, known in zip(batches, truth, strict=True):
        labelled = await _label_batch(batch, config, known)
        for name, row in rows.items():
            labels = labelled.get(name, (UNLABELLED,) * len(batch.items))
            row.labels.append(labels)
            row.num_violated += batch.problem.constraints.num_violated(labels)
            row.utilities.append(await _utility(batch.problem, labels))
    return list(rows.values())


def _origins(batches: Sequence[ItemBatch]) -> str:
    """Describe labels that come from no chain, because none found better ones."""
    origins = [
        batch.best.origin
        for batch in batches
        if not batch.best.num_iterations or batch.best is batch.inverted
    ]
    if not origins:
        return ""
    where = "" if len(batches) == 1 else f" in {len(origins)} of {len(batches)} batches"
    return f"labels of {', '.join(dict.fromkeys(origins))}{where}: no chain found better ones"


async def _utility(problem: Problem, labels: Labels) -> float | None:
    if UNLABELLED in labels:
        return None
    [assessment] = await problem.assess([labels])
    return None if assessment is None else assessment.utility


async def _label_batch(
    batch: ItemBatch, config: BaselinesConfig, known: Mapping[int, int]
) -> dict[str, Labels]:
    baselines = Baselines(batch.problem, config=config, seed=batch.seed)
    labels_by_name = {"icm": batch.best.labels, **await baselines.unsearched()}
    if known:
        labels_by_name["golden few-shot"] = await baselines.golden_few_shot(known)
    if batch.inverted is not None:
        labels_by_name[INVERTED] = batch.inverted.labels
    return labels_by_name


# Batches are searched separately, so two may end with opposite labels that are equally coherent.
# `transfer` shows labelled items of one batch before the queries of another to find out.


MAX_SHOWN = 32
"""Maximum number of labels shown. At most half of a batch, so that a query fits after them."""


async def transfer(one: ItemBatch, other: ItemBatch) -> Labels:
    """Return the other batch's most likely consistent labels, given the first one's surest."""
    num_labels = one.problem.num_labels
    number = max(1, min(MAX_SHOWN, len(one.items) // 2) // num_labels)
    shots = surest(one.best.labels, one.best.assessment.margins, num_each=number)
    shown = labelled_items(shots)
    items = [*(one.items[place] for place in shown), *other.items]
    labels = (*(shots[place] for place in shown), *[UNLABELLED] * len(other.items))
    contexts = [(labels, len(shown) + place) for place in range(len(other.items))]
    scorer = await run_in_thread(other.open_scorer, items)
    reads = await scorer.score(contexts)
    known = [None if read is None else normalised(read) for read in reads]
    return most_likely(calibrated(known), other.problem.constraints)


LISTED_STEPS = 2000
"""Decisions per chain in the report. Longer chains list every second, third, ... one."""

Agreeing = TypeVar("Agreeing", bound=AgreementRecord)


async def make_report(
    batches: Sequence[ItemBatch],
    *,
    config: IcmConfig,
    model: ModelRef,
    gold: Mapping[str, int],
    store: ScoreStore,
) -> IcmReport:
    """Label the batches in all other ways and compare. Leaves out the run's name and seconds."""
    naive_tokens = sum(batch.scorer.naive_tokens for batch in batches)
    labels = config.data.labels
    truth = [_gold_of(batch, gold) for batch in batches]
    rows = await label_all_ways(batches, config.baselines, truth)
    questions = _questions(batches)
    ours = _joined([batch.best.labels for batch in batches])
    items = [item for batch in batches for item in batch.items]
    whole = {place: gold[item.id] for place, item in enumerate(items) if item.id in gold}
    gold_row = agree(ours, whole, clusters=questions)
    golden = None if not gold else await _gold_summary(batches, truth, gold_row)
    transfers = await _transfers(batches)
    support = await _support(batches)
    evidence = _evidence(batches, rows, labels, gold_row)
    failed = [store.errors[key] for key in sorted(store.errors)]
    verdict, warnings = judge(
        replace(evidence, transfers=transfers, support=support, errors=failed)
    )
    return IcmReport(
        model=model.version,
        data=config.data.path.name,
        seed=config.seed,
        labels=labels,
        num_items=len(items),
        num_labelled=len(ours),
        num_groups=len(set(questions)),
        verdict=verdict,
        warnings=tuple(warnings),
        support=_support_record(support),
        utility=_mean([batch.best.assessment.utility for batch in batches]),
        num_frustrated=evidence.num_frustrated,
        num_violated=evidence.num_violated,
        mass=evidence.mass,
        balance=_balance([batch.best.labels for batch in batches], labels),
        gold=golden,
        transfers=tuple(
            _with_agreement(TransferRecord(batch=batch), judged)
            for batch, judged in transfers.items()
        ),
        num_unanswered=len(failed),
        rows=tuple(_row(row, ours, whole, labels, questions) for row in rows),
        chains=tuple(
            _chain(batch, chain, result, labels)
            for batch in batches
            for chain, result in enumerate(batch.results)
        ),
        items=tuple(_item(record, labels) for record in label_records(batches)),
        tokens=_count_tokens(store, naive_tokens),
    )


def _count_tokens(store: ScoreStore, naive: int) -> TokensRecord:
    return TokensRecord(
        naive=naive,
        requested=store.tokens["search"],
        computed=store.computed["search"],
        baselines=store.computed["baselines"],
        num_requests=store.requests["search"],
    )


def _evidence(
    batches: Sequence[ItemBatch],
    rows: Sequence[Labelling],
    names: Sequence[str],
    gold: Agreement | None,
) -> Evidence:
    labels = tuple(label for batch in batches for label in batch.best.labels)
    return Evidence(
        labels=labels,
        majorities=[_majority(batch) for batch in batches],
        transfers={},
        names=names,
        num_frustrated=sum(len(batch.best.assessment.frustrated) for batch in batches),
        num_violated=sum(batch.best.assessment.num_violated for batch in batches),
        mass=_mean([batch.best.assessment.mass for batch in batches]),
        gold=gold,
        rivals=[rival for b in range(len(batches)) for rival in _rivals(batches[b], rows, b)],
    )


def _majority(batch: ItemBatch) -> MajorityLabel:
    """Find the label with the largest share of what constraints leave open; 0 for a single item."""
    labels, constraints = batch.best.labels, batch.problem.constraints
    num_labelled = len(labelled_items(labels))

    def share(label: int) -> float:
        fewest = constraints.fewest(labels, label)
        free = num_labelled - fewest
        return (labels.count(label) - fewest) / free if num_labelled > 1 and free else 0.0

    label = max(range(batch.problem.num_labels), key=share)
    return MajorityLabel(
        batch=batch.index,
        label=label,
        num_items=labels.count(label),
        num_labelled=num_labelled,
        share=share(label),
    )


async def _transfers(batches: Sequence[ItemBatch]) -> dict[int, Agreement]:
    """Return each batch's agreement with the labels that the first batch predicts."""
    agreements = {}
    for batch in batches[1:]:
        expected = _joined([await transfer(batches[0], batch)])
        ours = _joined([batch.best.labels])
        agreement = agree(ours, expected, clusters=_questions([batch]))
        if agreement is not None:
            agreements[batch.index] = agreement
    return agreements


def _support_record(support: Support | None) -> SupportRecord | None:
    if support is None:
        return None
    return SupportRecord.model_validate(support, from_attributes=True)


async def _support(batches: Sequence[ItemBatch]) -> Support | None:
    """Join the batches' supports; None if one could not be measured."""
    measured = [await measure_support(batch, questions=_questions([batch])) for batch in batches]
    known = [support for support in measured if support is not None]
    return join_supports(known) if len(known) == len(batches) else None


def _rivals(batch: ItemBatch, rows: Sequence[Labelling], place: int) -> list[tuple[float, float]]:
    """Return utility lost and share of equal labels, for other complete, consistent labellings."""
    best = batch.best
    scored = [(result.labels, result.assessment.utility) for result in batch.results]
    for row in rows:
        utility = row.utilities[place]
        if utility is not None and not batch.problem.constraints.num_violated(row.labels[place]):
            scored.append((row.labels[place], utility))
    return [
        (best.assessment.utility - utility, _share_equal(labels, best.labels))
        for labels, utility in scored
        if UNLABELLED not in labels and UNLABELLED not in best.labels
    ]


async def _gold_summary(
    batches: Sequence[ItemBatch], truth: Sequence[Mapping[int, int]], agreement: Agreement | None
) -> GoldRecord:
    """Summarise the agreement, and the utility of the true labels if all are known."""
    utilities = []
    for batch, known in zip(batches, truth, strict=True):
        if len(known) == len(batch.items):
            labels = tuple(known[item] for item in range(len(batch.items)))
            [assessment] = await batch.problem.assess([labels])
            if assessment is not None:
                utilities.append(assessment.utility)
    complete = len(utilities) == len(batches)
    return _with_agreement(GoldRecord(utility=_mean(utilities) if complete else None), agreement)


def _row(
    row: Labelling,
    ours: Mapping[int, int],
    gold: Mapping[int, int],
    labels: Sequence[str],
    questions: Sequence[str],
) -> IcmRow:
    labels_by_item = _joined(row.labels)
    same = [ours[i] == labels_by_item[i] for i in labels_by_item if i in ours]
    record = IcmRow(
        name=row.name,
        is_winner=row.is_winner,
        note=row.note,
        num_labelled=len(labels_by_item),
        balance=_balance(row.labels, labels),
        num_violated=row.num_violated,
        utility=None if None in row.utilities else _mean([u or 0.0 for u in row.utilities]),
        agreement=sum(same) / len(same) if same else None,
    )
    return _with_agreement(
        record, agree(labels_by_item, gold, clusters=questions) if gold else None
    )


def _with_agreement(record: Agreeing, agreement: Agreement | None) -> Agreeing:
    if agreement is None:
        return record
    interval = agreement.interval
    return record.model_copy(
        update={
            "accuracy": interval.estimate,
            "low": interval.low,
            "high": interval.high,
            "chance": agreement.chance,
        }
    )


def _chain(batch: ItemBatch, chain: int, result: ChainResult, labels: Sequence[str]) -> ChainRecord:
    stride = -(-len(result.steps) // LISTED_STEPS) or 1
    kept = [s for i, s in enumerate(result.steps) if i % stride == 0 or s is result.steps[-1]]
    return ChainRecord(
        batch=batch.index,
        chain=chain,
        is_best=chain == batch.chain,
        origin=result.origin,
        num_iterations=result.num_iterations,
        num_accepted=result.num_accepted,
        num_labelled=result.assessment.num_labelled,
        num_frustrated=len(result.assessment.frustrated),
        is_settled=result.is_settled,
        utility=result.assessment.utility,
        steps=tuple(
            StepRecord(
                iteration=step.iteration,
                utility=step.utility,
                best=step.best_utility,
                temperature=step.temperature,
                num_labelled=len(step.labels) - step.labels.count(UNLABELLED),
                num_frustrated=step.num_frustrated,
                counts=tuple(step.labels.count(index) for index in range(len(labels))),
            )
            for step in kept
        ),
    )


def label_records(batches: Sequence[ItemBatch]) -> list[LabelRecord]:
    """Return the record of every item, in item order of the batches."""
    return [_record(batch, place) for batch in batches for place in range(len(batch.items))]


def _record(batch: ItemBatch, place: int) -> LabelRecord:
    best = batch.best
    label = best.labels[place]
    provenance = {**batch.provenance, "chain": batch.chain, "is_start": best.start[place] == label}
    read: LabelLogprobs | None = batch.scorer.known((best.labels, place))
    if label == UNLABELLED or read is None:
        return LabelRecord(
            item=batch.items[place],
            label=None,
            read=None,
            margin=None,
            iteration=None,
            provenance={**provenance, "is_start": False},
        )
    at = best.labelled_at[place]
    return LabelRecord(
        item=batch.items[place],
        label=label,
        read=predict(read, prior=best.assessment.prior),
        margin=best.assessment.margins[place],
        iteration=None if at < 0 else at,
        provenance=provenance,
    )


def _item(record: LabelRecord, labels: Sequence[str]) -> ItemRecord:
    return ItemRecord(
        id=record.item.id,
        text=record.item.text,
        label=None if record.label is None else labels[record.label],
        margin=record.margin,
    )


def _gold_of(batch: ItemBatch, gold: Mapping[str, int]) -> dict[int, int]:
    return {i: gold[item.id] for i, item in enumerate(batch.items) if item.id in gold}


def _joined(labels: Sequence[Labels]) -> dict[int, int]:
    """Return the label of each labelled item, by its place among all items."""
    flat = [label for batch_labels in labels for label in batch_labels]
    return {place: label for place, label in enumerate(flat) if label != UNLABELLED}


def _questions(batches: Sequence[ItemBatch]) -> list[str]:
    """Return the question of every item: items of one group or text, or tied by constraints."""
    keys = []
    for batch in batches:
        for place, item in enumerate(batch.items):
            first = batch.problem.constraints.component(place)[0]
            group = item.text if item.group == item.id else item.group
            keys.append((f"group {group}", f"tied {batch.index}/{first}"))
    return join_keys(keys)


def _balance(labels: Sequence[Labels], names: Sequence[str]) -> dict[str, int]:
    held = Counter(label for batch_labels in labels for label in batch_labels)
    return {name: held[index] for index, name in enumerate(names)}


def _share_equal(one: Labels, other: Labels) -> float:
    return sum(a == b for a, b in zip(one, other, strict=True)) / len(one)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
