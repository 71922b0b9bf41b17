"""Every way to label the items, the search's own first: the rows of the report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rookery.loops.icm.baselines import INVERTED, Baselines, BaselinesConfig
from rookery.loops.icm.batch import Batch
from rookery.loops.icm.chain import Problem
from rookery.search.labelling import UNLABELLED, Labels

__all__ = ["Labelling", "label_all_ways"]


@dataclass(slots=True)
class Labelling:
    """One way to label all items: its labels, batch by batch."""

    name: str
    note: str = ""
    labels: list[Labels] = field(default_factory=list)
    utilities: list[float | None] = field(default_factory=list)
    """None where items have no label: not comparable."""
    num_violated: int = 0
    is_winner: bool = False


async def label_all_ways(
    batches: Sequence[Batch],
    config: BaselinesConfig,
    truth: Sequence[Mapping[int, int]],
) -> list[Labelling]:
    """The result of the search first, then what needs none; `truth` by batch, where it is known."""
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
        found = await _label_batch(batch, config, known)
        for name, row in rows.items():
            own = found.get(name, (UNLABELLED,) * len(batch.items))
            row.labels.append(own)
            row.num_violated += batch.problem.constraints.num_violated(own)
            row.utilities.append(await _utility(batch.problem, own))
    return list(rows.values())


def _origins(batches: Sequence[Batch]) -> str:
    """Says which labels are not those of a chain, because no chain found better ones."""
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
    batch: Batch, config: BaselinesConfig, known: Mapping[int, int]
) -> dict[str, Labels]:
    baselines = Baselines(batch.problem, config=config, seed=batch.seed)
    labels_by_name = {"icm": batch.best.labels, **await baselines.unsearched()}
    if known:
        labels_by_name["golden few-shot"] = await baselines.golden_few_shot(known)
    if batch.inverted is not None:
        labels_by_name[INVERTED] = batch.inverted.labels
    return labels_by_name
