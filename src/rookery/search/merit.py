"""What an answer counts in a search, apart from the reward that is reported of it.

    merits_of({"t1": 1.0, "t2": 0.0}, {"t1": 0.9, "t2": 0.4}, merit="certainty")
        -> {"t1": 0.9, "t2": 0.4}

A reward of 0 or 1 says which choice was the likeliest; the probability of the right one also says
by how much, so that the same answers tell candidates apart with less noise.
"""

import math
from collections.abc import Mapping
from typing import Literal

import numpy as np
from numpy.typing import NDArray

__all__ = ["Merit", "certainty_of", "merits_at", "merits_of"]

Merit = Literal["certainty", "log_certainty", "reward"]
"""What candidates are compared by: the probability of the right choice, its logarithm, or the
reward alone. A task without choices counts by its reward in each of them."""

LOG_SPAN = 4.0
"""Halvings of the probability from 1 down to a log certainty of 0."""


def merits_of(
    rewards: Mapping[str, float], certainties: Mapping[str, float], *, merit: Merit
) -> dict[str, float]:
    """By task id; as many as there are rewards."""
    if merit == "reward":
        return dict(rewards)
    known = {task: certainties[task] for task in rewards if task in certainties}
    if merit == "log_certainty":
        known = {task: _log_certainty(value) for task, value in known.items()}
    return {**rewards, **known}


def certainty_of(value: float, *, merit: Merit) -> float:
    """The certainty that an answer of this merit had; a reward is its own."""
    return 2.0 ** (LOG_SPAN * (value - 1.0)) if merit == "log_certainty" else value


def merits_at(certainties: NDArray[np.float64], *, merit: Merit) -> NDArray[np.float64]:
    """The merits of answers that are so certain; a reward is expected to be as high."""
    if merit != "log_certainty":
        return certainties
    return np.maximum(0.0, 1.0 + np.log2(certainties) / LOG_SPAN)


def _log_certainty(probability: float) -> float:
    """From 1 at certainty down to 0 at 2 ** -LOG_SPAN and below."""
    return 0.0 if probability <= 0.0 else max(0.0, 1.0 + math.log2(probability) / LOG_SPAN)
