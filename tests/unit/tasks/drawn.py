"""A task and a completion, of which only what scorers read differs."""

from typing import Any

from rookery.types import Completion, ModelRef, Task


def task(reference: Any, *, choices: tuple[str, ...] = ()) -> Task:
    return Task(id="set/1", prompt="Q", reference=reference, choices=choices, source="set")


def completion(text: str, *, finish_reason: Any = "stop") -> Completion:
    return Completion(
        model=ModelRef(name="base", version="1"),
        tokens=(1,),
        logprobs=(-0.5,),
        text=text,
        finish_reason=finish_reason,
    )
