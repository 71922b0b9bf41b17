"""Baselines of the search, on the same items and model: further rows of the report.

zero-shot         no demonstrations
random few-shot   demonstrations with random labels: the effect of the format alone
bootstrap         the model's surest answers as demonstrations, a few rounds, made consistent
golden few-shot   demonstrations with true labels, if the report has them
inverted seed     a second search, from the opposite of the first one's labels
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from pydantic import Field

from rookery.config import Config
from rookery.loops.icm.chain import Chain, ChainMove, ChainResult, HasRoom, Problem
from rookery.loops.icm.objective import LabelLogprobs, normalised
from rookery.search.annealing import AnnealingConfig, argmax_label, start_labels
from rookery.search.labelling import UNLABELLED, Constraints, Labels, labelled_items, relabel
from rookery.seeding import shuffled, stream, stream_seed

__all__ = [
    "BASELINE_READS",
    "BOOTSTRAP",
    "INVERTED",
    "Baselines",
    "BaselinesConfig",
    "calibrated",
    "invert",
    "most_likely",
    "surest",
]


BASELINE_READS = 5
"""Reads per item of the baselines: given no labels, given random ones, and three assessments."""
BOOTSTRAP = "bootstrap"
INVERTED = "inverted seed"


class BaselinesConfig(Config):
    """Baselines that the search is compared with."""

    num_shots: int = Field(default=8, ge=1)
    """Number of demonstrations in the few-shot rows."""
    num_rounds: int = Field(default=3, ge=1)
    """Number of rounds of the bootstrap."""
    inverted: bool = True
    """Search again from the opposite labels. It takes as long as the first search, and is the best
    test of whether the labels depend on more than their start."""


class Baselines:
    """Labels one batch by other ways than the search."""

    def __init__(self, problem: Problem, *, config: BaselinesConfig, seed: int) -> None:
        self._problem = problem
        self._config = config
        self._seed = seed
        self._blank: Labels = (UNLABELLED,) * problem.num_items

    async def unsearched(self) -> dict[str, Labels]:
        """Return the labels of all baselines that need neither search nor true labels, by name."""
        return {
            "zero-shot": await self.zero_shot(),
            "random few-shot": await self.random_few_shot(),
            BOOTSTRAP: await self.bootstrap(),
        }

    async def zero_shot(self) -> Labels:
        """Return the most likely label of each item alone."""
        return self._answer(await self._read(self._blank))

    async def random_few_shot(self) -> Labels:
        """Return the most likely labels given a few random ones."""
        return self._answer(await self._read(self._random_shots()))

    async def bootstrap(self) -> Labels:
        """Label in rounds: the surest answers of each label are the next round's demonstrations."""
        labels = self._consistent(await self._read(self._random_shots()))
        for _ in range(self._config.num_rounds):
            reads = await self._read(labels[1])
            labels = self._consistent(reads)
        return labels[0]

    async def golden_few_shot(self, gold: Mapping[int, int]) -> Labels:
        """Return the most likely labels given a few true ones. No item sees its own."""
        rng = stream(self._seed, "golden")
        shots = self._blank
        for item in shuffled(sorted(gold), rng=rng)[: self._config.num_shots]:
            shots = relabel(shots, item, gold[item])
        return self._answer(await self._read(shots))

    async def start(self) -> Labels | None:
        """Return the bootstrap's labels as a search's start; None if it cannot start from them."""
        labels = await self.bootstrap()
        [assessment] = await self._problem.assess([labels])
        return None if assessment is None or assessment.num_violated else labels

    async def better_than(self, results: Sequence[ChainResult]) -> list[ChainResult]:
        """Return the best consistent baseline, if it beats all results; else an empty list."""
        better: list[ChainResult] = []
        for name, labels in (await self.unsearched()).items():
            [assessment] = await self._problem.assess([labels])
            if assessment is None or assessment.num_violated:
                continue
            result = ChainResult(
                labels=labels,
                assessment=assessment,
                start=labels,
                num_iterations=0,
                num_accepted=0,
                is_settled=UNLABELLED not in labels and not assessment.frustrated,
                labelled_at=(UNLABELLED,) * self._problem.num_items,
                steps=(),
                origin=name,
            )
            if result.rank > max(known.rank for known in [*results, *better]):
                better = [result]
        return better

    async def inverted(
        self,
        result: ChainResult,
        *,
        config: AnnealingConfig,
        on_step: Callable[[ChainMove], None] | None = None,
        has_room: HasRoom | None = None,
    ) -> ChainResult | None:
        """Search again from the start items, with the opposite of their final labels. None if
        constraints forbid that start or the engine cannot score it."""
        start = self._blank
        for item in labelled_items(result.start):
            if result.labels[item] != UNLABELLED:
                start = relabel(start, item, result.labels[item])
        start = invert(start, num_labels=self._problem.num_labels)
        if not labelled_items(start) or self._problem.constraints.num_violated(start):
            return None
        if (await self._problem.assess([start]))[0] is None:
            return None
        seed = stream_seed(self._seed, "inverted")
        scorer = self._problem.scorer.of_chain(None, part="baselines")
        problem = replace(self._problem, scorer=scorer)
        chain = Chain(problem, config=config, seed=seed, on_step=on_step)
        return replace(await chain.run(start, has_room=has_room), origin=INVERTED)

    async def _read(self, shots: Labels) -> list[LabelLogprobs | None]:
        """Read all items given the same demonstrations, never an item's own."""
        contexts = [(shots, item) for item in range(self._problem.num_items)]
        logprobs = await self._problem.scorer.score(contexts)
        reads = [None if read is None else normalised(read) for read in logprobs]
        return calibrated(reads) if self._problem.objective.calibrate else reads

    def _answer(self, reads: Sequence[LabelLogprobs | None]) -> Labels:
        return tuple(UNLABELLED if read is None else argmax_label(read) for read in reads)

    def _random_shots(self) -> Labels:
        return start_labels(
            self._problem.constraints,
            num_items=self._problem.num_items,
            num_labels=self._problem.num_labels,
            config=AnnealingConfig(num_start=self._config.num_shots),
            seed=stream_seed(self._seed, "shots"),
        )

    def _consistent(self, reads: Sequence[LabelLogprobs | None]) -> tuple[Labels, Labels]:
        """Return the most likely consistent labels, and the surest of each as demonstrations."""
        labels = most_likely(reads, self._problem.constraints)
        sure = {i: read[labels[i]] for i, read in enumerate(reads) if read is not None}
        number = -(-self._config.num_shots // self._problem.num_labels)
        return labels, surest(labels, sure, num_each=number)


def surest(labels: Labels, sure: Mapping[int, float], *, num_each: int) -> Labels:
    """Keep for each label the items that are surest of it, and no other labels."""
    shots: Labels = (UNLABELLED,) * len(labels)
    for label in sorted({*labels} - {UNLABELLED}):
        carriers = [item for item in labelled_items(labels) if labels[item] == label]
        for item in sorted(carriers, key=lambda item: -sure[item])[:num_each]:
            shots = relabel(shots, item, label)
    return shots


def calibrated(reads: Sequence[LabelLogprobs | None]) -> list[LabelLogprobs | None]:
    """Remove each label's mean over all reads, and normalise."""
    known = [read for read in reads if read is not None]
    means = [sum(column) / len(known) for column in zip(*known, strict=True)]

    def centred(read: LabelLogprobs) -> LabelLogprobs:
        return normalised(tuple(v - mean for v, mean in zip(read, means, strict=True)))

    return [None if read is None else centred(read) for read in reads]


def most_likely(reads: Sequence[LabelLogprobs | None], constraints: Constraints) -> Labels:
    """Return the most likely labels, consistent within each set of tied items.

    Items without a read stay unlabelled.
    """
    known = {item: read for item, read in enumerate(reads) if read is not None}
    labels = tuple(argmax_label(known[i]) if i in known else UNLABELLED for i in range(len(reads)))
    seen: set[int] = set()
    for item in known:
        if item not in seen:
            tied = constraints.tied(labels, item)
            seen.update(tied)
            options = list(constraints.consistent(labels, item=item))
            if options:
                labels = max(options, key=lambda o: sum(known[m][o[m]] for m in tied))
    return labels


def invert(labels: Labels, *, num_labels: int) -> Labels:
    """Return the opposite labels. With more than two, each becomes the next."""
    return tuple(x if x == UNLABELLED else (x + 1) % num_labels for x in labels)
