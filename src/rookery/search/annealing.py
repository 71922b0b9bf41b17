"""Simulated annealing over labellings, as pure ask and tell.

    state = begin(labels, utility=assess(labels))
    while state.iteration < 1500:
        item = ask(state, groups=groups, config=config, seed=seed)
        options = constraints.repairs(state.labels, item=item, label=argmax_label(logprobs))
        state, decision = tell(state, [(o, assess(o)) for o in options], config=config, seed=seed)

The item and the random number of an iteration depend on (seed, iteration) and on the labels alone,
so that evaluations may be remembered, batched or guessed ahead without changing any decision.
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

# What a race asks next, also while answers are still out: whole blocks, the same for all.
#
# waves = Waves(race, size=64)
# asks = waves.next()          # candidate -> tasks; empty when everything has been asked for


class Waves:
    """The questions of one race. Owned and changed by whoever asks them."""

    def __init__(self, race: Race, *, size: int) -> None:
        """`size` is the number of answers of a wave at least: what fills the engine."""
        self._race = race
        self._size = size
        self._asked = race.num_told

    def next(self) -> dict[str, tuple[str, ...]]:
        """The next tasks of each live candidate; a candidate that came back after a rival failed is
        also asked for what it missed. Empty when all are asked for."""
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
    """The first temperature."""
    floor: float = Field(default=0.01, gt=0)
    """The lowest temperature."""
    beta: float = Field(default=0.99, ge=0)
    """How fast the temperature falls with the iterations."""


class CodeSchedule(Config):
    """T = start / (1 + factor ln(1 + a)), a the number of accepted changes."""

    type: Literal["code"] = "code"
    start: float = Field(default=10.0, gt=0)
    """The first temperature."""
    factor: float = Field(default=2.0, ge=0)
    """How fast the temperature falls with the accepted changes."""


class ExponentialSchedule(Config):
    """T = max(floor, start * decay ^ n), n the iteration, counted from 0."""

    type: Literal["exponential"] = "exponential"
    start: float = Field(default=10.0, gt=0)
    """The first temperature."""
    decay: float = Field(default=0.99, gt=0, lt=1)
    """The temperature is multiplied by this in every iteration."""
    floor: float = Field(default=0.01, gt=0)
    """The lowest temperature."""


Schedule = Annotated[
    CodeSchedule | ExponentialSchedule | PaperSchedule, Field(discriminator="type")
]


class AnnealingConfig(Config):
    """The search over labellings."""

    iterations: int = Field(default=1500, ge=1)
    """At most; it ends earlier when all items are labelled and none is frustrated."""
    num_start: int = Field(default=8, ge=1)
    """Items that begin with random labels, as many of each label as possible."""
    boost: float = Field(default=100.0, ge=1)
    """How much likelier an unlabelled item is drawn when another of its group is labelled."""
    schedule: Schedule = CodeSchedule()
    """How the temperature falls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Annealing:
    """Where the search stands. Best is the most complete labelling, then the highest utility."""

    labels: Labels
    utility: float
    best_labels: Labels
    best_utility: float
    iteration: int = 0
    num_accepted: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What became of the best option of one iteration."""

    iteration: int
    labels: Labels
    utility: float
    temperature: float
    is_accepted: bool


def begin(labels: Labels, *, utility: float) -> Annealing:
    """The state before the first iteration."""
    return Annealing(labels=labels, utility=utility, best_labels=labels, best_utility=utility)


def start_labels(
    constraints: Constraints, *, num_items: int, num_labels: int, config: AnnealingConfig, seed: int
) -> Labels:
    """Random labels of a few random items, balanced, made consistent by chance, not by a model."""
    rng = stream(seed, "start")
    items = shuffled(range(num_items), rng=rng)[: config.num_start]
    drawn = shuffled([i % num_labels for i in range(len(items))], rng=rng)
    labels: Labels = (UNLABELLED,) * num_items
    for item, label in zip(items, drawn, strict=True):
        options = constraints.repairs(labels, item=item, label=label)
        # Where one label is only possible with another, all ways are alike.
        if options:
            labels = options[int(rng.integers(len(options)))]
    return labels


def ask(state: Annealing, *, groups: Sequence[int], config: AnnealingConfig, seed: int) -> int:
    """The item of this iteration; `groups` holds the group of every item."""
    begun = {groups[item] for item in labelled_items(state.labels)}
    weights = [
        config.boost if label == UNLABELLED and group in begun else 1.0
        for label, group in zip(state.labels, groups, strict=True)
    ]
    ends = np.cumsum(weights)
    draw = stream(seed, "item", state.iteration).random() * ends[-1]
    return min(int(np.searchsorted(ends, draw, side="right")), len(weights) - 1)


def argmax_label(logprobs: Sequence[float]) -> int:
    """The most likely label, the first of equals."""
    return max(range(len(logprobs)), key=logprobs.__getitem__)


def skip(state: Annealing) -> Annealing:
    """The iteration proposed nothing new."""
    return replace(state, iteration=state.iteration + 1)


def tell(
    state: Annealing,
    tried: Sequence[tuple[Labels, float]],
    *,
    config: AnnealingConfig,
    seed: int,
) -> tuple[Annealing, Decision]:
    """Take the best option that was tried or keep what is; the first of equals is the best."""
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
    """The temperature of an iteration, the first of which is 0."""
    match schedule:
        case PaperSchedule(start=start, floor=floor, beta=beta):
            return max(floor, start / (1.0 + beta * math.log(iteration + 1)))
        case CodeSchedule(start=start, factor=factor):
            return start / (1.0 + factor * math.log1p(num_accepted))
        case ExponentialSchedule(start=start, decay=decay, floor=floor):
            return max(floor, start * decay**iteration)


def _rank(labels: Labels, utility: float) -> tuple[int, float]:
    return len(labelled_items(labels)), utility
