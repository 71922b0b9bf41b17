"""What every report is made of: frozen records whose missing numbers stay missing.

A run that was interrupted has fewer keys, so every field has an empty default. Keys that are not
known here are left out: an older page can show a newer report.
"""

import json
import math
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, model_validator

from rookery.errors import RunError
from rookery.types import Json, Task

__all__ = [
    "AnswerRecord",
    "Estimate",
    "Measured",
    "Record",
    "TaskRecord",
    "Text",
    "describe_task",
    "parse_record",
]


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _encodable(value: object) -> object:
    """Half of a surrogate pair is legal in JSON and cannot be written as UTF-8."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


Measured = Annotated[float | None, BeforeValidator(_finite)]
"""A number that may be missing. NaN and infinities are missing: no chart can place them."""
Text = Annotated[str, BeforeValidator(_encodable)]


class Record(BaseModel):
    """The parent of the records: frozen; null is the same as a missing key."""

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, document: Any) -> Any:
        if isinstance(document, Mapping):
            return {key: value for key, value in document.items() if value is not None}
        return document


class Estimate(Record):
    """A mean and its 95 % interval."""

    mean: Measured = None
    low: Measured = None
    high: Measured = None


class AnswerRecord(Record):
    """One answer to read."""

    name: Text = ""
    """Of the model that gave it."""
    text: Text = ""
    reward: Measured = None
    error: Text = ""


class TaskRecord(Record):
    """One task with answers to it."""

    task: Text = ""
    """Its id."""
    prompt: Text = ""
    reference: Text = ""
    answers: tuple[AnswerRecord, ...] = ()


def describe_task(task: Task) -> dict[str, str]:
    """The prompt and the reference of a task as texts to read."""
    prompt = task.prompt
    if not isinstance(prompt, str):
        prompt = "\n\n".join(f"{message.role}: {message.content}" for message in prompt)
    reference = task.reference
    if reference is None:
        reference = ""
    elif not isinstance(reference, str):
        reference = json.dumps(reference, ensure_ascii=False)
    return {"prompt": prompt, "reference": reference}


Report = TypeVar("Report", bound=Record)


def parse_record(report: type[Report], document: Mapping[str, Json], *, kind: str) -> Report:
    """Read a report, or raise a RunError that names the first value that does not fit."""
    try:
        return report.model_validate(dict(document))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "it"
        raise RunError(
            f"The report cannot be shown: {where} is {first['input']!r:.80}, and "
            f"{first['msg'].lower()}. Give the report.json of {kind} run as it was written."
        ) from None
