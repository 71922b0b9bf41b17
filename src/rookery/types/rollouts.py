"""Answers to tasks and what they earned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rookery.types.models import ModelRef, TokenIds
from rookery.types.sampling import Completion
from rookery.types.tasks import Task

__all__ = [
    "Draw",
    "Evaluation",
    "Group",
    "Rollout",
    "TokenSequence",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """One task to be answered several times, with the random numbers of its own seed."""

    task: Task
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSequence:
    """Tokens that a model read from the first to the last, and which of them it drew itself.

    A prompt 5 6, a drawn answer 7 8, a further question 9, a drawn answer 4:

        tokens    (5, 6, 7, 8, 9, 4)
        drawn     (2, 3, 5)
        logprobs  (-0.3, -1.2, -0.1)
    """

    tokens: TokenIds
    drawn: tuple[int, ...]
    """Places in `tokens`, rising."""
    logprobs: tuple[float, ...]
    """Of the drawn tokens, under the distribution they were drawn from."""
    kept: Sequence[TokenIds] = ()
    """What each of them was drawn from, as `Completion.kept`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One answer to one task, and what it earned. A failed one says why and has no reward.

    The completion of several turns has all tokens that were drawn, and the whole exchange as text.
    """

    task: Task
    completion: Completion | None
    reward: float | None
    error: str = ""
    sequences: tuple[TokenSequence, ...] = ()
    """What to train on: filled where rollouts are drawn for training. Several when a chat template
    rewrote what had been said."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What else was measured of it: `certainty`, the probability of the right choice among the
    choices, of a task that has choices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The rollouts of one task under one model."""

    task: Task
    model: ModelRef
    rollouts: tuple[Rollout, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What was measured of one model on one list of tasks: a reward per task id, in task order.

    A task whose rollout failed is in `errors` and not in `rewards`.
    """

    model: ModelRef
    rewards: Mapping[str, float]
    errors: Mapping[str, str]
    num_tokens: int
    seconds: float
    certainties: Mapping[str, float] = field(default_factory=dict)
    """By task id, the probability of the right choice among the choices, of tasks that have
    choices."""
