"""Simulated annealing over labellings, as pure ask and tell.

    state = begin(labels, utility=assess(labels))
    while state.iteration < 1500:
        item = ask(state, groups=groups, config=config, seed=seed)
        options = constraints.repairs(state.labels, item=item, label=argmax_label(logprobs))
        state, decision = tell(state, [(o, assess(o)) for o in options], config=config, seed=seed)

An iteration's item and random number depend only on (seed, iteration) and on the labels, so
evaluations may be cached, batched or speculative without changing any decision.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from rookery.config import Config
from rookery.search.labelling import UNLABELLED, Constraints, Labels, labelled_items
from rookery.search.racing import Race
from rookery.seeding import shuffled, stream

__all__ = [
    "Annealing",
    "AnnealingConfig",
    "CodeSchedule",
    "Decision",
    "ExponentialSchedule",
    "PaperSchedule",
    "Schedule",
    "Waves",
    "argmax_label",
    "ask",
    "begin",
    "skip",
    "start_labels",
    "tell",
    "temperature",
]

# The next questions of a race, even while answers are out: whole blocks, the same for all.
#
#   waves = Waves(race, size=64)
#   asks = waves.next()          # candidate -> tasks; empty once everything was asked


class Waves:
    """The questions of one race. Its user owns and changes it."""

    def __init__(self, race: Race, *, size: int) -> None:
        """`size` is the least number of answers per wave: enough to fill the engine."""
        self._race = race
        self._size = size
        self._asked = race.num_told

    def next(self) -> dict[str, tuple[str, ...]]:
        """Return the next tasks of each live candidate; empty once all were asked. A candidate that
        came back because a rival failed also gets the tasks it missed."""
        tasks, block = self._race.tasks, self._race.config.block
        open_names = [name for name in self._race.live if self._asked[name] < len(tasks)]
        if not open_names:
            return {}
        num_blocks = max(1, math.ceil(self._size / (block * len(open_names))))
        end = max(self._asked[name] for name in open_names) + num_blocks * block
        asks = {name: tasks[self._asked[name] : end] for name in open_names}
        self._asked |= {name: min(end, len(tasks)) for name in open_names}
        return asks


class PaperSchedule(Config):
    """T = max(floor, start / (1 + beta ln n)), n the iteration, counted from 1."""

    type: Literal["paper"] = "paper"
    start: float = Field(default=10.0, gt=0)
    """Temperature at the start."""
    floor: float = Field(default=0.01, gt=0)
    """Lowest temperature."""
    beta: float = Field(default=0.99, ge=0)
    """How fast the temperature falls with the iterations."""


class CodeSchedule(Config):
    """T = start / (1 + factor ln(1 + a)), a the number of accepted changes."""

    type: Literal["code"] = "code"
    start: float = Field(default=10.0, gt=0)
    """Temperature at the start."""
    factor: float = Field(default=2.0, ge=0)
    """How fast the temperature falls with the accepted changes."""


class ExponentialSchedule(Config):
    """T = max(floor, start * decay ^ n), n the iteration, counted from 0."""

    type: Literal["exponential"] = "exponential"
    start: float = Field(default=10.0, gt=0)
    """Temperature at the start."""
    decay: float = Field(default=0.99, gt=0, lt=1)
    """Factor on the temperature per iteration."""
    floor: float = Field(default=0.01, gt=0)
    """Lowest temperature."""


Schedule = Annotated[
    CodeSchedule | ExponentialSchedule | PaperSchedule, Field(discriminator="type")
]


class AnnealingConfig(Config):
    """The search over labellings."""

    iterations: int = Field(default=1500, ge=1)
    """Most iterations; the search ends once all items are labelled and none is frustrated."""
    num_start: int = Field(default=8, ge=1)
    """Items with random labels at the start, as balanced as possible."""
    boost: float = Field(default=100.0, ge=1)
    """How much likelier an unlabelled item is drawn if another of its group is labelled."""
    schedule: Schedule = CodeSchedule()
    """How the temperature falls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Annealing:
    """State of the search. The best labelling is the most complete, then by utility."""

    labels: Labels
    utility: float
    best_labels: Labels
    best_utility: float
    iteration: int = 0
    num_accepted: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The best option of one iteration, and whether it was accepted."""

    iteration: int
    labels: Labels
    utility: float
    temperature: float
    is_accepted: bool


def begin(labels: Labels, *, utility: float) -> Annealing:
    return Annealing(labels=labels, utility=utility, best_labels=labels, best_utility=utility)


def start_labels(
    constraints: Constraints, *, num_items: int, num_labels: int, config: AnnealingConfig, seed: int
) -> Labels:
    """Return random, balanced labels of a few random items, made consistent at random."""
    rng = stream(seed, "start")
    items = shuffled(range(num_items), rng=rng)[: config.num_start]
    drawn = shuffled([i % num_labels for i in range(len(items))], rng=rng)
    labels: Labels = (UNLABELLED,) * num_items
    for item, label in zip(items, drawn, strict=True):
        options = constraints.repairs(labels, item=item, label=label)
        # If a label is only possible together with others, choose uniformly among the ways.
        if options:
            labels = options[int(rng.integers(len(options)))]
    return labels


def ask(state: Annealing, *, groups: Sequence[int], config: AnnealingConfig, seed: int) -> int:
    """Return the item of this iteration; `groups` holds the group of every item."""
    begun = {groups[item] for item in labelled_items(state.labels)}
    weights = [
        config.boost if label == UNLABELLED and group in begun else 1.0
        for label, group in zip(state.labels, groups, strict=True)
    ]
    ends = np.cumsum(weights)
    draw = stream(seed, "item", state.iteration).random() * ends[-1]
    return min(int(np.searchsorted(ends, draw, side="right")), len(weights) - 1)


def argmax_label(logprobs: Sequence[float]) -> int:
    """Return the most likely label, the first of equals."""
    return max(range(len(logprobs)), key=logprobs.__getitem__)


def skip(state: Annealing) -> Annealing:
    """Count an iteration without a new proposal."""
    return replace(state, iteration=state.iteration + 1)


def tell(
    state: Annealing,
    tried: Sequence[tuple[Labels, float]],
    *,
    config: AnnealingConfig,
    seed: int,
) -> tuple[Annealing, Decision]:
    """Accept or reject the best option that was tried; the first of equals is the best."""
    labels, utility = max(tried, key=lambda option: option[1])
    heat = temperature(config.schedule, iteration=state.iteration, num_accepted=state.num_accepted)
    gain = utility - state.utility
    draw = stream(seed, "accept", state.iteration).random()
    is_accepted = gain >= 0 or draw < math.exp(gain / heat)
    decision = Decision(
        iteration=state.iteration,
        labels=labels,
        utility=utility,
        temperature=heat,
        is_accepted=is_accepted,
    )
    state = skip(state)
    if is_accepted:
        state = replace(state, labels=labels, utility=utility, num_accepted=state.num_accepted + 1)
        if _rank(labels, utility) > _rank(state.best_labels, state.best_utility):
            state = replace(state, best_labels=labels, best_utility=utility)
    return state, decision


def temperature(schedule: Schedule, *, iteration: int, num_accepted: int) -> float:
    """Return the temperature of an iteration, counted from 0."""
    match schedule:
        case PaperSchedule(start=start, floor=floor, beta=beta):
            return max(floor, start / (1.0 + beta * math.log(iteration + 1)))
        case CodeSchedule(start=start, factor=factor):
            return start / (1.0 + factor * math.log1p(num_accepted))
        case ExponentialSchedule(start=start, decay=decay, floor=floor):
            return max(floor, start * decay**iteration)


def _rank(labels: Labels, utility: float) -> tuple[int, float]:
    return len(labelled_items(labels)), utility
