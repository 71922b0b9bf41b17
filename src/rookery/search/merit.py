"""What an answer counts in a search, apart from the reward that is reported of it.

    merits_of({"t1": 1.0, "t2": 0.0}, {"t1": 0.9, "t2": 0.4}, merit="certainty",
              num_choices={"t1": 2, "t2": 2})
        -> {"t1": 0.9, "t2": 0.4}

A reward of 0 or 1 says which choice was the likeliest; the probability of the right one also says
by how much, so that the same answers tell candidates apart with less noise.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

__all__ = ["Merit", "merits_at", "merits_of"]

Array = NDArray[np.float64]

Merit = Literal["certainty", "log_certainty", "mixed", "reward"]
"""What candidates are compared by: the probability of the right choice, its logarithm, the reward
alone, or the mean of these three. A task without choices counts by its reward in each of them."""

MIXED: tuple[Merit, ...] = ("certainty", "log_certainty", "reward")
"""Where certainty says little, such as of founders that are sure of wrong references, the reward
still counts; where it says much, two thirds are made of it."""

SHARPNESS = 3.0
"""How fast a choice becomes right as its log-odds pass its limit: three times as fast as its
probability."""

LOG_SPAN = 4.0
"""Halvings of the probability from 1 down to a log certainty of 0, of up to four choices. Of more
it is twice as many as a guess among them has: below that all candidates would look alike."""


def merits_of(
    rewards: Mapping[str, float],
    certainties: Mapping[str, float],
    *,
    merit: Merit,
    num_choices: Mapping[str, int],
) -> dict[str, float]:
    """By task id; as many as there are rewards. `num_choices` of each task with a certainty."""
    known = {task: certainties[task] for task in rewards if task in certainties}
    parts: dict[Merit, Mapping[str, float]] = {
        "reward": rewards,
        "certainty": known,
        "log_certainty": {t: _log_certainty(value, num_choices[t]) for t, value in known.items()},
    }
    of = MIXED if merit == "mixed" else (merit,)
    return {**rewards, **{t: math.fsum(parts[name][t] for name in of) / len(of) for t in known}}


def merits_at(
    certainties: Array, *, merit: Merit, num_choices: Sequence[int], limits: Array
) -> Array:
    """The merits of answers that are so certain, [..., tasks]; a task without choices is expected
    to earn as much. A choice is right from its limit on, and its reward rises smoothly around it:
    other tasks of the kind have theirs a little above or below."""
    spans = np.array([_log_span(num) for num in num_choices])
    beyond = np.minimum(SHARPNESS * (_log_odds(limits) - _log_odds(certainties)), 700.0)
    parts: dict[Merit, Array] = {
        "reward": 1.0 / (1.0 + np.exp(beyond)),
        "certainty": certainties,
        "log_certainty": np.maximum(0.0, 1.0 + np.log2(np.maximum(certainties, 1e-30)) / spans),
    }
    own = np.mean([parts[name] for name in (MIXED if merit == "mixed" else (merit,))], axis=0)
    found: Array = np.where(np.array(num_choices) > 0, own, certainties)
    return found


def _log_odds(probabilities: Array) -> Array:
    near = np.clip(probabilities, 1e-6, 1 - 1e-6)
    odds: Array = np.log(near / (1 - near))
    return odds


def _log_certainty(probability: float, num_choices: int) -> float:
    """From 1 at certainty down to 0 at 2 ** -span and below."""
    if probability <= 0.0:
        return 0.0
    return max(0.0, 1.0 + math.log2(probability) / _log_span(num_choices))


def _log_span(num_choices: int) -> float:
    return max(LOG_SPAN, 2.0 * math.log2(max(num_choices, 1)))
