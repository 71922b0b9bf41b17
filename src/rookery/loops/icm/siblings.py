"""What one gets without the search, on the same items and the same model: rows beside its result.

zero-shot         no demonstration at all
random few-shot   demonstrations with random labels: what the format alone elicits
bootstrap         its own surest answers as demonstrations, a few rounds, made consistent
golden few-shot   demonstrations with true labels, where they are given for the report
inverted seed     the search again, from the opposite of the labels it ended with
"""

from collections.abc import Mapping, Sequence

from pydantic import Field

from rookery.config import Config
from rookery.loops.icm.chain import Chain, ChainResult, Problem
from rookery.loops.icm.objective import Read, normalised
from rookery.search.annealing import AnnealingConfig, argmax_label, start_labels
from rookery.search.constraints import Constraints
from rookery.search.labelling import UNLABELLED, Labels, labelled_items, relabel
from rookery.search.streams import shuffled, stream, stream_seed

__all__ = ["Siblings", "SiblingsConfig", "invert"]


class SiblingsConfig(Config):
    """What the search is compared with."""

    num_shots: int = Field(default=8, ge=1)
    """Demonstrations of the few-shot rows."""
    num_rounds: int = Field(default=3, ge=1)
    """Rounds of the bootstrap."""
    inverted: bool = True
    """Search again from the opposite labels: as long as the search itself, and the best sign of
    whether the labels mean more than their start."""


class Siblings:
    """The other ways to label one batch."""

    def __init__(self, problem: Problem, *, config: SiblingsConfig, seed: int) -> None:
        self._problem = problem
        self._config = config
        self._seed = seed
        self._blank: Labels = (UNLABELLED,) * problem.num_items

    async def zero_shot(self) -> Labels:
        """The most likely label of each item by itself."""
        return self._answer(await self._read(self._blank))

    async def random_few_shot(self) -> Labels:
        """The most likely labels behind a few random ones."""
        return self._answer(await self._read(self._random_shots()))

    async def bootstrap(self) -> Labels:
        """The surest answers of each label become the demonstrations of the next round."""
        labels = self._consistent(await self._read(self._random_shots()))
        for _ in range(self._config.num_rounds):
            reads = await self._read(labels[1])
            labels = self._consistent(reads)
        return labels[0]

    async def golden_few_shot(self, gold: Mapping[int, int]) -> Labels:
        """The most likely labels behind a few true ones; an item never sees its own."""
        rng = stream(self._seed, "golden")
        shots = self._blank
        for item in shuffled(sorted(gold), rng=rng)[: self._config.num_shots]:
            shots = relabel(shots, item, gold[item])
        return self._answer(await self._read(shots))

    async def inverted(self, result: ChainResult, *, config: AnnealingConfig) -> ChainResult | None:
        """The search from the opposite of its result; None where constraints forbid that start."""
        start = self._blank
        for item in labelled_items(result.start):
            if result.labels[item] != UNLABELLED:
                start = relabel(start, item, result.labels[item])
        start = invert(start, num_labels=self._problem.num_labels)
        if not labelled_items(start) or self._problem.constraints.num_violated(start):
            return None
        seed = stream_seed(self._seed, "inverted")
        return await Chain(self._problem, config=config, seed=seed).run(start)

    async def _read(self, shots: Labels) -> list[Read]:
        """All items behind the same demonstrations, each without itself."""
        contexts = [(shots, item) for item in range(self._problem.num_items)]
        reads = [normalised(read) for read in await self._problem.reader.read(contexts)]
        if not self._problem.objective.calibrate:
            return reads
        means = [sum(column) / len(reads) for column in zip(*reads, strict=True)]
        return [
            normalised(tuple(v - mean for v, mean in zip(read, means, strict=True)))
            for read in reads
        ]

    def _answer(self, reads: Sequence[Read]) -> Labels:
        return tuple(argmax_label(read) for read in reads)

    def _random_shots(self) -> Labels:
        return start_labels(
            self._problem.constraints,
            num_items=self._problem.num_items,
            num_labels=self._problem.num_labels,
            config=AnnealingConfig(num_start=self._config.num_shots),
            seed=stream_seed(self._seed, "shots"),
        )

    def _consistent(self, reads: Sequence[Read]) -> tuple[Labels, Labels]:
        """The likeliest consistent labels, and the surest of each label as demonstrations."""
        labels = most_likely(reads, self._problem.constraints)
        per_label = -(-self._config.num_shots // self._problem.num_labels)
        shots = self._blank
        for label in range(self._problem.num_labels):
            own = [item for item, found in enumerate(labels) if found == label]
            own.sort(key=lambda item: -reads[item][labels[item]])
            for item in own[:per_label]:
                shots = relabel(shots, item, label)
        return labels, shots


def most_likely(reads: Sequence[Read], constraints: Constraints) -> Labels:
    """Of the items that are tied together, the consistent labels of the highest log-probability."""
    labels: Labels = tuple(argmax_label(read) for read in reads)
    seen: set[int] = set()
    for item in labelled_items(labels):
        if item not in seen:
            tied = constraints.tied(labels, item)
            seen.update(tied)
            options = list(constraints.consistent(labels, item=item))
            if options:
                labels = max(options, key=lambda o: sum(reads[m][o[m]] for m in tied))
    return labels


def invert(labels: Labels, *, num_labels: int) -> Labels:
    """The opposite labels; with more than two, each becomes the next."""
    return tuple(x if x == UNLABELLED else (x + 1) % num_labels for x in labels)
