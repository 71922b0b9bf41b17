"""What the labels are said to be worth: agreement, collapsed and opposite batches, rivals."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from marks import long

from rookery.loops.icm.baselines import BaselinesConfig
from rookery.loops.icm.chain import Chain, ItemBatch, Problem
from rookery.loops.icm.config import IcmConfig
from rookery.loops.icm.items import DataConfig, Item
from rookery.loops.icm.label_scorer import Context, LabelScorer, Part, ScoreStore
from rookery.loops.icm.objective import LabelLogprobs, ObjectiveConfig
from rookery.loops.icm.report import make_report
from rookery.loops.icm.verdict import Evidence, MajorityLabel, Support, agree, judge
from rookery.reports import IcmReport
from rookery.search.annealing import AnnealingConfig
from rookery.search.labelling import UNLABELLED, Constraint, Constraints, Exclusive, Labels
from rookery.seeding import stream
from rookery.testing import BASE


def item(name: str) -> Item:
    return Item(id=name, text=f"{name} is", group=name, fields={})


def test_agreement_counts_tied_items_once() -> None:
    labels = dict(enumerate((0, 1) * 4))
    found = agree(labels, labels, clusters=[i // 2 for i in range(8)])
    free = agree(labels, labels, clusters=range(8))
    assert found is not None and free is not None
    assert found.interval.estimate == 1.0 and found.chance == 0.5
    assert 0.5 < found.interval.low < free.interval.low
    assert not found.is_chance and agree({0: 1}, {1: 1}, clusters=range(2)) is None
    opposite = agree(labels, {i: 1 - x for i, x in labels.items()}, clusters=range(8))
    assert opposite is not None and opposite.is_inverse


@pytest.mark.timeout(30)
def test_agreement_of_a_hundred_thousand_items_costs_a_pass() -> None:
    labels = {i: i % 2 for i in range(100_000)}
    found = agree(labels, labels, clusters=[i // 2 for i in range(100_000)])
    assert found is not None and found.interval.num_values == 50_000


def majority(num_items: int, num_labelled: int, *, batch: int = 0, label: int = 0) -> MajorityLabel:
    share = num_items / num_labelled
    return MajorityLabel(
        batch=batch, label=label, num_items=num_items, num_labelled=num_labelled, share=share
    )


def support(gain: float) -> Support:
    typical = tuple(1.0 + place / 199 for place in range(199))
    return Support(gain=gain, strength=gain / 5, random_gains=typical, num_items=26)


def evidence(**changes: Any) -> Evidence:
    fields: dict[str, Any] = {
        "labels": (0, 1) * 4,
        "majorities": [majority(4, 8)],
        "transfers": {},
        "names": ("True", "False"),
        "num_frustrated": 0,
        "num_violated": 0,
        "mass": 0.97,
        "gold": None,
        "rivals": [(0.0, 1.0), (12.0, 0.3)],
        "support": support(4.0),
    }
    return Evidence(**{**fields, **changes})


def test_verdicts() -> None:
    half = agree(
        dict(enumerate((0, 1) * 4)),
        dict(enumerate((0, 0, 1, 1) * 2)),
        clusters=range(8),
    )
    wrong = agree(
        dict(enumerate((0, 1, 0, 1))), dict(enumerate((1, 0, 1, 0))), clusters=(0, 0, 1, 1)
    )
    right = agree(dict(enumerate((0, 1) * 4)), dict(enumerate((0, 1) * 4)), clusters=range(8))
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "coherent"),
        ({"labels": (0, 1, UNLABELLED, 0)}, "partial"),
        ({"labels": (0, 0, 0, 0), "majorities": [majority(4, 4)]}, "collapsed"),
        ({"majorities": [majority(255, 256)]}, "collapsed"),
        ({"majorities": [majority(8, 8), majority(8, 8, batch=1, label=1)]}, "collapsed"),
        ({"transfers": {1: wrong}}, "opposite"),
        ({"num_violated": 1}, "inconsistent"),
        ({"gold": half}, "chance"),
        ({"rivals": [(-0.5, 0.25)]}, "ambiguous"),
        ({"num_frustrated": 3}, "frustrated"),
        ({"support": support(1.9)}, "unsupported"),
        ({"support": None}, "unsupported"),
        ({"support": support(1.9), "gold": right}, "coherent"),
    ]
    for changes, expected in cases:
        verdict, warnings = judge(evidence(**changes))
        assert verdict == expected
        assert bool(warnings) == (expected != "coherent")
    verdict, warnings = judge(evidence(mass=0.01))
    assert verdict == "coherent" and "1%" in warnings[0]


class Scripted:
    """A scorer that knows every read at once."""

    naive_tokens = longest_tokens = num_asked = 0

    def of_chain(self, affinity: Hashable, *, part: Part = "search") -> LabelScorer:
        return self

    async def score(self, contexts: Sequence[Context]) -> list[LabelLogprobs | None]:
        return [self.known(context) for context in contexts]

    async def prefetch(self, contexts: Sequence[Context]) -> None:
        """Nothing is asked for."""

    def known(self, context: Context) -> LabelLogprobs | None:
        raise NotImplementedError


class Habit(Scripted):
    """Reads of a model that tells items apart, and is surer still when all labels are the first."""

    def known(self, context: Context) -> LabelLogprobs | None:
        labels, item = context
        if not any(label == 1 for other, label in enumerate(labels) if other != item):
            return (-0.01, -4.6)
        return (-0.3, -1.4) if item % 2 == 0 else (-1.4, -0.3)


class Content(Scripted):
    """Reads of a model that finds every label as it should be."""

    def __init__(self, wanted: Labels) -> None:
        self._wanted = wanted

    def known(self, context: Context) -> LabelLogprobs | None:
        return (-0.1, -2.4) if self._wanted[context[1]] == 0 else (-2.4, -0.1)


async def made_report(*batches: Labels, tied: Sequence[Constraint] = ()) -> IcmReport:
    """The report of batches that ended with these labels, each of which agrees with itself."""
    made = []
    for index, labels in enumerate(batches):
        problem = Problem(
            num_items=len(labels),
            num_labels=2,
            groups=tuple(range(len(labels))),
            constraints=Constraints(tied, num_items=len(labels), num_labels=2),
            scorer=Content(labels),
            objective=ObjectiveConfig(),
        )
        found = await Chain(problem, config=AnnealingConfig(), seed=0).run(labels)
        assert found.labels == labels
        batch = ItemBatch(
            index=index,
            items=tuple(item(f"{index}-{i}") for i in range(len(labels))),
            problem=problem,
            seed=0,
            provenance={},
            open_scorer=lambda items: Content((0, 1) * len(items)),
            results=[found],
        )
        made.append(batch)
    return await report_on(made, AnnealingConfig())


async def report_on(batches: Sequence[ItemBatch], search: AnnealingConfig) -> IcmReport:
    config = IcmConfig(
        data=DataConfig(path=Path("items.jsonl"), prompt="{{ text }} is"),
        baselines=BaselinesConfig(inverted=False),
        search=search,
    )
    return await make_report(batches, config=config, model=BASE, gold={}, store=ScoreStore())


async def test_a_batch_that_collapsed_is_seen() -> None:
    report = await made_report((0,) * 255 + (1,))
    assert report.verdict == "collapsed" and "255 of 256 labels are True" in report.warnings[0]
    report = await made_report((0,) * 20, (1,) * 20)
    assert report.balance == {"True": 20, "False": 20} and report.verdict == "collapsed"
    words = "All labels of batch 0 are True; All labels of batch 1 are False"
    assert words in report.warnings[0]
    assert (await made_report((0, 1) * 20, (0,) * 20)).verdict == "collapsed"
    # No collapse; but this model answers as it does whatever labels it is shown.
    assert (await made_report((0,) * 15 + (1,) * 5)).verdict == "unsupported"


async def test_what_constraints_ask_for_is_no_collapse() -> None:
    one_of_forty = [Exclusive(members=tuple(range(40)), label=0, is_exact=True)]
    assert (await made_report((0, *[1] * 39), tied=one_of_forty)).verdict == "unsupported"
    at_most_one = [Exclusive(members=(i, i + 1), label=0) for i in range(0, 8, 2)]
    assert (await made_report((1,) * 8, tied=at_most_one)).verdict == "collapsed"
    assert (await made_report((0, 1) * 4, tied=at_most_one)).verdict == "unsupported"


async def test_labels_that_need_no_search_and_are_as_coherent_are_told() -> None:
    problem = Problem(
        num_items=6,
        num_labels=2,
        groups=tuple(range(6)),
        constraints=Constraints([], num_items=6, num_labels=2),
        scorer=Habit(),
        objective=ObjectiveConfig(),
    )
    search = AnnealingConfig(iterations=5)
    found = await Chain(problem, config=search, seed=0).run((0, 1) * 3)
    assert found.labels == (0, 1) * 3 and found.is_settled
    items = tuple(item(str(i)) for i in range(6))
    batch = ItemBatch(
        index=0,
        items=items,
        problem=problem,
        seed=0,
        provenance={},
        open_scorer=lambda items: Habit(),
        results=[found],
    )
    report = await report_on([batch], search)
    assert report.verdict == "ambiguous"
    assert "without a search" in report.warnings[0]


class Coupled(Scripted):
    """Log-odds of an item: its own part, and a part for each label that is shown."""

    def __init__(self, couplings: np.ndarray, own: np.ndarray) -> None:
        self._couplings, self._own = couplings.tolist(), own.tolist()

    def known(self, context: Context) -> LabelLogprobs | None:
        labels, item = context
        odds = self._own[item]
        for other, (label, part) in enumerate(zip(labels, self._couplings[item], strict=True)):
            if other != item and label != UNLABELLED:
                odds += part if label == 0 else -part
        return (-math.log1p(math.exp(-odds)), -math.log1p(math.exp(odds)))


def best_signs(couplings: np.ndarray, own: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The best labels that 20 ascents find: as good as a search's."""
    both = (couplings + couplings.T) / 2
    found = []
    for _ in range(20):
        signs, before = rng.choice([-1.0, 1.0], len(own)), np.zeros(len(own))
        while (signs != before).any():
            before = signs.copy()
            for place in range(len(own)):
                signs[place] = 1.0 if 2 * both[place] @ signs + own[place] > 0 else -1.0
        found.append((float(signs @ both @ signs + signs @ own), signs.tolist()))
    return np.array(max(found)[1])


async def report_of_a_model(kind: str, num_items: int, seed: int, questions: int = 0) -> IcmReport:
    """random: couplings without a concept; `concept`, `weak`: with one; `alone`: with no couplings
    but within a question."""
    rng = stream(seed, num_items)
    truth = rng.choice([-1.0, 1.0], num_items)
    noise = rng.normal(size=(num_items, num_items)) / 4
    if kind == "symmetric":
        noise = (noise + noise.T) / math.sqrt(2)
    concept = {"concept": 0.25, "weak": 0.12}.get(kind, 0.0) * np.outer(truth, truth)
    size = num_items // (questions or num_items)
    groups = np.arange(num_items) // size
    couplings = concept + noise
    if kind == "within":
        couplings = np.outer(truth, truth) * (groups[:, None] == groups) + 0.02 * noise
    np.fill_diagonal(couplings, 0.0)
    own = 0.2 * (truth if concept.any() else rng.normal(size=num_items))
    labels = tuple(int(sign < 0) for sign in best_signs(couplings, own, rng))
    problem = Problem(
        num_items=num_items,
        num_labels=2,
        groups=tuple(groups.tolist()),
        constraints=Constraints([], num_items=num_items, num_labels=2),
        scorer=Coupled(couplings, own),
        objective=ObjectiveConfig(),
    )
    batch = ItemBatch(
        index=0,
        items=tuple(replace(item(f"i{i}"), group=f"q{q}") for i, q in enumerate(groups)),
        problem=problem,
        seed=seed,
        provenance={},
        open_scorer=lambda items: Coupled(couplings, own),
        results=[await Chain(problem, config=AnnealingConfig(iterations=1), seed=0).run(labels)],
    )
    return await report_on([batch], AnnealingConfig())


@pytest.mark.parametrize("num_items", [16, pytest.param(32, marks=long)])
async def test_a_random_model_is_not_coherent_and_a_concept_is(num_items: int) -> None:
    count, strengths = {}, {}
    for kind in ("random", "symmetric", "concept", "weak"):
        reports = [await report_of_a_model(kind, num_items, seed) for seed in range(10)]
        count[kind] = sum(report.verdict == "coherent" for report in reports)
        strengths[kind] = np.median([r.support.strength for r in reports if r.support])
    assert count["random"] <= 1 and count["symmetric"] <= 1 and count["concept"] >= 9
    assert strengths["symmetric"] < 0.4 and strengths["weak"] < 0.55 < 0.65 < strengths["concept"]


async def test_items_that_support_one_another_within_a_question_alone_are_no_concept() -> None:
    reports = [await report_of_a_model("within", 32, seed, questions=8) for seed in range(5)]
    assert sum(report.verdict == "coherent" for report in reports) <= 1
    assert {report.num_groups for report in reports} == {8}
