"""How far a labelling is: its reads of contexts so far, and how many there will be."""

from collections.abc import Sequence
from dataclasses import dataclass

from rookery.loops.icm.chain import Batch, Step
from rookery.loops.icm.config import IcmConfig
from rookery.loops.icm.label_scorer import ScoreStore
from rookery.loops.icm.support import NUM_CONTEXTS
from rookery.ports import Observer
from rookery.runs import Run
from rookery.search.labelling import UNLABELLED

__all__ = ["ChainStep", "Progress"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainStep:
    """A decision of one chain, for the observer."""

    batch: int
    chain: int
    num_items: int
    num_tokens: int
    """Prompt tokens computed so far, by all chains."""
    step: Step


BASELINE_READS = 5
"""Of an item, by what the search is compared with: behind no labels, behind random ones, and to
assess three ways to label."""
REPORT_READS = 1 + NUM_CONTEXTS
"""The same for the report."""
REPORT_SPEED = 6
"""Servers compute the reads of the report in one block: six take as long as one of a search."""


class Progress:
    """Foretells the reads of all rounds. A search is as far as its items are labelled or its
    iterations used up. The inverted one is as long as one from random labels, and every round as
    long as the one before."""

    def __init__(
        self, run: Run, config: IcmConfig, observer: Observer[ChainStep], *, is_remote: bool
    ) -> None:
        self.store = ScoreStore(run, on_read=self._tell)
        self._config, self._observer = config, observer
        self._report_reads = REPORT_READS / (REPORT_SPEED if is_remote else 1)
        self._num_random = max(1, config.num_chains - 1)  # the last begins with known labels
        self._inverted = range(config.num_chains, config.num_chains + config.baselines.inverted)
        self._num_items: dict[int, int] = {}
        """By batch of the round."""
        self._parts: dict[tuple[int, int], float] = {}
        """How far each search of the round is, 0 to 1, by batch and chain."""
        self._num_before = self._num_rounds_left = self._num_searched = 0
        self._search_reads = 0.0
        """Of one search from random labels in every batch of the round."""

    def begin(self, batches: Sequence[Batch], *, num_rounds_left: int) -> None:
        """A round begins; so many follow."""
        self._num_before, self._num_rounds_left = self.store.num_reads, num_rounds_left
        self._num_items = {batch.index: len(batch.items) for batch in batches}
        self._parts = {}

    def step(self, batch: Batch, chain: int, step: Step) -> None:
        search, num_items = self._config.search, len(batch.items)
        start = min(search.num_start, num_items - 1)
        num_labelled = sum(label != UNLABELLED for label in step.labels)
        part = max((num_labelled - start) / (num_items - start), step.iteration / search.iterations)
        known = self._parts.get((batch.index, chain), 0.0)
        self._parts[batch.index, chain] = max(known, min(part, 0.95))
        self._observer.on_step(
            ChainStep(
                batch=batch.index,
                chain=chain,
                num_items=num_items,
                num_tokens=sum(self.store.computed.values()),
                step=step,
            )
        )

    def end(self, batch: Batch, chain: int) -> None:
        self._parts[batch.index, chain] = 1.0

    def _tell(self) -> None:
        part = self._part(range(self._num_random))
        if not part:
            return
        num_reads, num_items = self.store.num_reads, sum(self._num_items.values())
        inverted = self._part(self._inverted)
        if part < 1:
            self._search_reads = (num_reads - self._num_before) / part / self._num_random
        left = (1 - part) * self._num_random * self._search_reads
        left += (1 - inverted) * self._search_reads + BASELINE_READS * num_items * (not inverted)
        if part < 1 or inverted < 1:
            self._num_searched = num_reads
        whole_round = num_reads - self._num_before + left
        report = self._report_reads * num_items - (num_reads - self._num_searched)
        left += self._num_rounds_left * whole_round + max(0, report)
        self._observer.on_progress(num_reads, num_reads + left)

    def _part(self, chains: range) -> float:
        """How far these chains are, every batch by its items; 1 where there is none."""
        total = sum(self._num_items.values()) * len(chains)
        done = sum(
            num_items * self._parts.get((batch, chain), 0.0)
            for batch, num_items in self._num_items.items()
            for chain in chains
        )
        return done / total if total else 1.0
