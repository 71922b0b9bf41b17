"""A batch: items that are labelled together, and what their searches found."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rookery.loops.icm.chain import ChainResult, Problem
from rookery.loops.icm.items import Item
from rookery.loops.icm.label_scorer import LabelScorer

__all__ = ["Batch"]


@dataclass(slots=True)
class Batch:
    """One batch of items and what its chains found."""

    index: int
    items: tuple[Item, ...]
    problem: Problem
    seed: int
    provenance: Mapping[str, Any]
    open_scorer: Callable[[Sequence[Item]], LabelScorer]
    """Reads any items, in the order they are given, under the batch's model."""
    results: list[ChainResult] = field(default_factory=list)
    """Of its chains, and what a baseline found where that is better than all before it."""
    inverted: ChainResult | None = None
    """Of the search from the opposite labels, where there was one."""
    naive_tokens: int = 0
    """Prompt tokens that its chains asked for, had nothing been shared."""

    @property
    def scorer(self) -> LabelScorer:
        return self.problem.scorer

    @property
    def chain(self) -> int:
        """The place of the best result, the first of equals."""
        return max(range(len(self.results)), key=lambda c: self.results[c].rank)

    @property
    def best(self) -> ChainResult:
        return self.results[self.chain]
