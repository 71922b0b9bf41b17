"""Answers to tasks and what they earned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rookery.types.models import ModelRef
from rookery.types.sampling import Completion
from rookery.types.tasks import Task

__all__ = [
    "Evaluation",
    "Group",
    "Rollout",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One answer to one task, and what it earned. A failed one says why and has no reward."""

    task: Task
    completion: Completion | None
    reward: float | None
    error: str = ""


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
