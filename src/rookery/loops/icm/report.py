"""The report of a labelling: the result beside its baselines, what it cost, and its verdict."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rookery.loops.icm.baselines import Baselines, BaselinesConfig
from rookery.loops.icm.batch import Batch
from rookery.loops.icm.chain import ChainResult, Problem
from rookery.loops.icm.exports import LabelRecord
from rookery.loops.icm.objective import LabelLogprobs, predict
from rookery.loops.icm.transfer import transfer
from rookery.loops.icm.verdict import Agreement, Crowd, Evidence, agree, judge
from rookery.search.annealing import AnnealingConfig
from rookery.search.labelling import UNLABELLED, Labels, labelled_items

__all__ = ["label_records", "make_report"]

LISTED_STEPS = 2000
"""Decisions of one chain that the report holds; beyond that every second, third, ... one."""


@dataclass(slots=True)
class _Row:
    """One way to label all items: its labels, batch by batch."""

    name: str
    note: str = ""
    labels: list[Labels] = field(default_factory=list)
    utilities: list[float | None] = field(default_factory=list)
    """None where items have no label: not comparable."""
    num_violated: int = 0
    is_winner: bool = False


async def make_report(
    batches: Sequence[Batch],
    *,
    labels: Sequence[str],
    baselines: BaselinesConfig,
    search: AnnealingConfig,
    gold: Mapping[str, int],
    errors: Mapping[str, str],
) -> dict[str, Any]:
    """Everything the report says of the labels, as values for JSON.

    `errors` holds what the engine could not answer, and is read when all else was asked.
    """
    truth = [_gold_of(batch, gold) for batch in batches]
    rows = await _rows(batches, baselines, search, truth)
    tied = _offset([batch.problem.constraints.components for batch in batches], batches)
    ours = _joined([batch.best.labels for batch in batches])
    whole = _joined_gold(truth, batches)
    gold_row = agree(ours, whole, tied=tied)
    golden = None if not gold else await _gold_summary(batches, truth, gold_row)
    transfers = await _transfers(batches)
    evidence = _evidence(batches, rows, labels, gold_row)
    failed = [errors[key] for key in sorted(errors)]
    verdict, warnings = judge(replace(evidence, transfers=transfers, errors=failed))
    return {
        "labels": list(labels),
        "num_items": sum(len(batch.items) for batch in batches),
        "num_labelled": len(ours),
        "num_groups": len(tied),
        "verdict": verdict,
        "warnings": warnings,
        "utility": _mean([batch.best.assessment.utility for batch in batches]),
        "num_frustrated": sum(len(batch.best.assessment.frustrated) for batch in batches),
        "num_violated": sum(batch.best.assessment.num_violated for batch in batches),
        "mass": _mean([batch.best.assessment.mass for batch in batches]),
        "balance": _balance([batch.best.labels for batch in batches], labels),
        "gold": golden,
        "transfers": [{"batch": batch, **_agreement(own)} for batch, own in transfers.items()],
        "num_unanswered": len(errors),
        "rows": [_row(row, ours, whole, labels, tied) for row in rows],
        "chains": [
            _chain(batch, chain, result, labels)
            for batch in batches
            for chain, result in enumerate(batch.results)
        ],
        "items": _item_rows(label_records(batches), labels),
    }


async def _rows(
    batches: Sequence[Batch],
    config: BaselinesConfig,
    search: AnnealingConfig,
    truth: Sequence[Mapping[int, int]],
) -> list[_Row]:
    rows = {
        "icm": _Row("icm", is_winner=True),
        "zero-shot": _Row("zero-shot"),
        "random few-shot": _Row("random few-shot", note=f"{config.num_shots} random labels"),
        "bootstrap": _Row("bootstrap", note=f"{config.num_rounds} rounds, consistent"),
    }
    if any(truth):
        rows["golden few-shot"] = _Row("golden few-shot", note=f"{config.num_shots} true labels")
    if config.inverted:
        rows["inverted seed"] = _Row("inverted seed", note="searched from the opposite")
    for batch, known in zip(batches, truth, strict=True):
        found = await _label_batch(batch, config, search, known)
        for name, row in rows.items():
            own = found.get(name, (UNLABELLED,) * len(batch.items))
            row.labels.append(own)
            row.num_violated += batch.problem.constraints.num_violated(own)
            row.utilities.append(await _utility(batch.problem, own))
    return list(rows.values())


async def _utility(problem: Problem, labels: Labels) -> float | None:
    if UNLABELLED in labels:
        return None
    [assessment] = await problem.assess([labels])
    return None if assessment is None else assessment.utility


async def _label_batch(
    batch: Batch, config: BaselinesConfig, search: AnnealingConfig, known: Mapping[int, int]
) -> dict[str, Labels]:
    baselines = Baselines(batch.problem, config=config, seed=batch.seed)
    found = {
        "icm": batch.best.labels,
        "zero-shot": await baselines.zero_shot(),
        "random few-shot": await baselines.random_few_shot(),
        "bootstrap": await baselines.bootstrap(),
    }
    if known:
        found["golden few-shot"] = await baselines.golden_few_shot(known)
    if config.inverted:
        result = await baselines.inverted(batch.best, config=search)
        if result is not None:
            found["inverted seed"] = result.labels
    return found


def _evidence(
    batches: Sequence[Batch], rows: Sequence[_Row], names: Sequence[str], gold: Agreement | None
) -> Evidence:
    labels = tuple(label for batch in batches for label in batch.best.labels)
    return Evidence(
        labels=labels,
        crowds=[_crowd(batch) for batch in batches],
        transfers={},
        names=names,
        num_frustrated=sum(len(batch.best.assessment.frustrated) for batch in batches),
        num_violated=sum(batch.best.assessment.num_violated for batch in batches),
        mass=_mean([batch.best.assessment.mass for batch in batches]),
        gold=gold,
        rivals=[rival for b in range(len(batches)) for rival in _rivals(batches[b], rows, b)],
    )


def _crowd(batch: Batch) -> Crowd:
    """The label that most of what could be otherwise is; of one item alone it says nothing."""
    labels, constraints = batch.best.labels, batch.problem.constraints
    num_labelled = len(labelled_items(labels))

    def share(label: int) -> float:
        given = constraints.fewest(labels, label)
        free = num_labelled - given
        return (labels.count(label) - given) / free if num_labelled > 1 and free else 0.0

    label = max(range(batch.problem.num_labels), key=share)
    return Crowd(
        batch=batch.index,
        label=label,
        num_items=labels.count(label),
        num_labelled=num_labelled,
        share=share(label),
    )


async def _transfers(batches: Sequence[Batch]) -> dict[int, Agreement]:
    """By batch, how its labels agree with those that the first batch's predict."""
    found = {}
    for batch in batches[1:]:
        expected = _joined([await transfer(batches[0], batch)])
        agreement = agree(
            _joined([batch.best.labels]), expected, tied=batch.problem.constraints.components
        )
        if agreement is not None:
            found[batch.index] = agreement
    return found


def _rivals(batch: Batch, rows: Sequence[_Row], place: int) -> list[tuple[float, float]]:
    """Complete and consistent labellings that were found otherwise: what they lose and share."""
    best = batch.best
    found = [(result.labels, result.assessment.utility) for result in batch.results]
    for row in rows:
        utility = row.utilities[place]
        if utility is not None and not batch.problem.constraints.num_violated(row.labels[place]):
            found.append((row.labels[place], utility))
    return [
        (best.assessment.utility - utility, _share_equal(labels, best.labels))
        for labels, utility in found
        if UNLABELLED not in labels and UNLABELLED not in best.labels
    ]


async def _gold_summary(
    batches: Sequence[Batch], truth: Sequence[Mapping[int, int]], found: Agreement | None
) -> dict[str, Any]:
    """Agreement of the result, and the utility of the true labels where all are known."""
    utilities = []
    for batch, known in zip(batches, truth, strict=True):
        if len(known) == len(batch.items):
            labels = tuple(known[item] for item in range(len(batch.items)))
            [assessment] = await batch.problem.assess([labels])
            if assessment is not None:
                utilities.append(assessment.utility)
    complete = len(utilities) == len(batches)
    return {**_agreement(found), "utility": _mean(utilities) if complete else None}


def _row(
    row: _Row,
    ours: Mapping[int, int],
    gold: Mapping[int, int],
    labels: Sequence[str],
    tied: Sequence[Sequence[int]],
) -> dict[str, Any]:
    own = _joined(row.labels)
    same = [ours[i] == own[i] for i in own if i in ours]
    return {
        "name": row.name,
        "is_winner": row.is_winner,
        "note": row.note,
        "num_labelled": len(own),
        "balance": _balance(row.labels, labels),
        "num_violated": row.num_violated,
        "utility": None if None in row.utilities else _mean([u or 0.0 for u in row.utilities]),
        "agreement": sum(same) / len(same) if same else None,
        **_agreement(agree(own, gold, tied=tied) if gold else None),
    }


def _agreement(found: Agreement | None) -> dict[str, float | None]:
    if found is None:
        return {"accuracy": None, "low": None, "high": None, "chance": None}
    interval = found.interval
    return {
        "accuracy": interval.estimate,
        "low": interval.low,
        "high": interval.high,
        "chance": found.chance,
    }


def _chain(batch: Batch, chain: int, result: ChainResult, labels: Sequence[str]) -> dict[str, Any]:
    stride = -(-len(result.steps) // LISTED_STEPS) or 1
    kept = [s for i, s in enumerate(result.steps) if i % stride == 0 or s is result.steps[-1]]
    return {
        "batch": batch.index,
        "chain": chain,
        "is_best": chain == batch.chain,
        "num_iterations": result.num_iterations,
        "num_accepted": result.num_accepted,
        "num_labelled": result.assessment.num_labelled,
        "num_frustrated": len(result.assessment.frustrated),
        "is_settled": result.is_settled,
        "utility": result.assessment.utility,
        "steps": [
            {
                "iteration": step.iteration,
                "utility": step.utility,
                "best": step.best_utility,
                "temperature": step.temperature,
                "num_labelled": len(step.labels) - step.labels.count(UNLABELLED),
                "num_frustrated": step.num_frustrated,
                "counts": [step.labels.count(index) for index in range(len(labels))],
            }
            for step in kept
        ],
    }


def label_records(batches: Sequence[Batch]) -> list[LabelRecord]:
    """What became of every item, in item order of the batches."""
    return [_record(batch, place) for batch in batches for place in range(len(batch.items))]


def _record(batch: Batch, place: int) -> LabelRecord:
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


def _item_rows(records: Sequence[LabelRecord], labels: Sequence[str]) -> list[dict[str, Any]]:
    return [
        {
            "id": record.item.id,
            "text": record.item.text,
            "label": None if record.label is None else labels[record.label],
            "margin": record.margin,
        }
        for record in records
    ]


def _gold_of(batch: Batch, gold: Mapping[str, int]) -> dict[int, int]:
    return {i: gold[item.id] for i, item in enumerate(batch.items) if item.id in gold}


def _joined(labels: Sequence[Labels]) -> dict[int, int]:
    """Place among all items -> label, of those that have one."""
    flat = [label for own in labels for label in own]
    return {place: label for place, label in enumerate(flat) if label != UNLABELLED}


def _joined_gold(truth: Sequence[Mapping[int, int]], batches: Sequence[Batch]) -> dict[int, int]:
    found, first = {}, 0
    for known, batch in zip(truth, batches, strict=True):
        found.update({first + place: label for place, label in known.items()})
        first += len(batch.items)
    return found


def _offset(
    components: Sequence[Sequence[Sequence[int]]], batches: Sequence[Batch]
) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    first = 0
    for own, batch in zip(components, batches, strict=True):
        found.extend(tuple(first + place for place in component) for component in own)
        first += len(batch.items)
    return found


def _balance(labels: Sequence[Labels], names: Sequence[str]) -> dict[str, int]:
    held = Counter(label for own in labels for label in own)
    return {name: held[index] for index, name in enumerate(names)}


def _share_equal(one: Labels, other: Labels) -> float:
    return sum(a == b for a, b in zip(one, other, strict=True)) / len(one)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
