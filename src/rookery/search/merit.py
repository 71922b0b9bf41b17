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

__all__ = ["Merit", "certainties_of", "merits_at", "merits_of"]

Array = NDArray[np.float64]

Merit = Literal["certainty", "log_certainty", "reward"]
"""What candidates are compared by: the probability of the right choice, its logarithm, or the
reward alone. A task without choices counts by its reward in each of them."""

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
    if merit == "reward":
        return dict(rewards)
    known = {task: certainties[task] for task in rewards if task in certainties}
    if merit == "log_certainty":
        known = {task: _log_certainty(value, num_choices[task]) for task, value in known.items()}
    return {**rewards, **known}


def certainties_of(merits: Array, *, merit: Merit, num_choices: Sequence[int]) -> Array:
    """The certainties that answers of these merits had, [..., tasks]; a reward is its own."""
    if merit != "log_certainty":
        return merits
    spans = np.array([_log_span(num) for num in num_choices])
    found: Array = np.where(np.array(num_choices) > 0, 2.0 ** (spans * (merits - 1.0)), merits)
    return found


def merits_at(certainties: Array, *, merit: Merit, num_choices: Sequence[int]) -> Array:
    """The merits of answers that are so certain, [..., tasks]; a reward is expected to be as
    high."""
    if merit != "log_certainty":
        return certainties
    spans = np.array([_log_span(num) for num in num_choices])
    logs = np.maximum(0.0, 1.0 + np.log2(np.maximum(certainties, 1e-30)) / spans)
    found: Array = np.where(np.array(num_choices) > 0, logs, certainties)
    return found


def _log_certainty(probability: float, num_choices: int) -> float:
    """From 1 at certainty down to 0 at 2 ** -span and below."""
    if probability <= 0.0:
        return 0.0
    return max(0.0, 1.0 + math.log2(probability) / _log_span(num_choices))


def _log_span(num_choices: int) -> float:
    return max(LOG_SPAN, 2.0 * math.log2(max(num_choices, 1)))
