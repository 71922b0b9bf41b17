"""Problems, and the messages they are put in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rookery.types.models import Json

__all__ = [
    "Message",
    "Task",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn of a chat prompt."""

    role: str
    content: str
    fields: Mapping[str, Json] = field(default_factory=dict, hash=False)
    """What else the chat template reads: `tool_calls`, `tool_call_id`, `name`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One problem. `choices` is filled when the answer is one of a few given texts.

    `Task(id="gsm8k/17", prompt="2+2=", reference="4", source="gsm8k")`
    """

    id: str
    prompt: str | tuple[Message, ...]
    reference: Json
    choices: tuple[str, ...] = ()
    source: str = ""
    """Name of the taskset it came from: results are averaged per source first."""
    group: str = ""
    """Tasks of equal group are one question: in one split, and not independent in an interval.
    Empty: tasks of equal prompt are."""
    weight: float = field(default=1.0, repr=False)
    """How much its answer counts in supervised training."""
