"""Rookery: one vLLM fleet, every way to make a model better on it.

Importing the package is light: no torch, no network. The records that flow between the parts are
here; everything else is imported from its own module (`rookery.embedded`, `rookery.weights`, ...).
"""

from rookery.errors import RookeryError
from rookery.types import (
    Adapter,
    Completion,
    Datum,
    Group,
    ModelRef,
    Rollout,
    SampleRequest,
    SamplingParams,
    Score,
    ScoreRequest,
    Task,
)

__all__ = [
    "Adapter",
    "Completion",
    "Datum",
    "Group",
    "ModelRef",
    "Rollout",
    "RookeryError",
    "SampleRequest",
    "SamplingParams",
    "Score",
    "ScoreRequest",
    "Task",
]
