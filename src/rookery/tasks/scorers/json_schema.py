"""JSON scorer: 1 if the text contains JSON that fits a schema, equals the reference, or both.

    {type: json_schema, json_schema: {type: object, required: [name]}}
    {type: json_schema, match_reference: true}

It takes the first object or array inside ``` fences, or else the first in the text.
"""

import json
import re
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, JsonValue, model_validator

from rookery.errors import TaskError, boundary, install_extra
from rookery.tasks.scorers.text import ScorerOptions, require_judgeable
from rookery.types import Completion, Json, Task

if TYPE_CHECKING:
    from jsonschema.protocols import Validator

__all__ = ["JsonSchemaConfig", "JsonSchemaScorer"]

MAX_STARTS = 1000
"""Opening brackets that are tried: a text of a hundred thousand of them must not take hours."""

_FENCE = re.compile(r"```[^\n`]*\n(.*?)```", re.DOTALL)


class JsonSchemaConfig(ScorerOptions):
    """The JSON must fit `json_schema` and, with `match_reference`, equal the reference."""

    type: Literal["json_schema"] = "json_schema"
    json_schema: dict[str, JsonValue] = Field(default_factory=dict)
    """JSON Schema of the draft that its "$schema" names, or else 2020-12. References to other
    documents are not fetched. {} accepts everything."""
    match_reference: bool = False
    """Also require the JSON to equal the reference, which is JSON or a text with JSON. 1 equals
    1.0, and key order is ignored."""

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if not self.json_schema and not self.match_reference:
            raise ValueError("give json_schema, or match_reference: true, or both")
        return self

    def complaint(self, task: Task) -> str:
        if self.match_reference and _reference_json(task) is None:
            return (
                "json_schema needs a JSON object or array as reference, or a text that holds one, "
                f"got {task.reference!r}"
            )
        return ""


class JsonSchemaScorer:
    answer: Literal["sample"] = "sample"

    def __init__(self, config: JsonSchemaConfig) -> None:
        self._config = config
        self._validator = _validator(config.json_schema)

    def read(self, completion: Completion) -> str | None:
        document = find_json(completion.text)
        return None if document is None else json.dumps(document, sort_keys=True)

    async def reward(self, task: Task, completion: Completion) -> float:
        require_judgeable(self._config, task)
        document = find_json(completion.text)
        if document is None:
            return 0.0
        with boundary(TaskError, f"Task {task.id}: applying the JSON Schema"):
            if not self._validator.is_valid(document):
                return 0.0
        if not self._config.match_reference:
            return 1.0
        return float(_equal(document, _reference_json(task)))


def find_json(text: str) -> dict[str, Json] | list[Json] | None:
    """Return the first JSON object or array in fenced blocks, or else in the text."""
    fenced = (block for match in _FENCE.finditer(text) for block in _documents(match[1]))
    return next(chain(fenced, _documents(text)), None)


def _documents(text: str) -> Iterator[dict[str, Json] | list[Json]]:
    decoder = json.JSONDecoder(parse_constant=_refuse_constant)
    for count, start in enumerate(re.finditer(r"[{\[]", text)):
        if count == MAX_STARTS:
            return
        try:
            document, _ = decoder.raw_decode(text, start.start())
        except (ValueError, RecursionError):
            continue
        yield document


def _refuse_constant(name: str) -> Json:
    raise ValueError(f"{name} is not JSON")


def _reference_json(task: Task) -> Json:
    if isinstance(task.reference, str):
        return find_json(task.reference)
    return task.reference if isinstance(task.reference, dict | list) else None


def _equal(one: Json, other: Json) -> bool:
    """Compare as JSON does: true is not 1."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_equal, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and one == other


def _validator(schema: dict[str, JsonValue]) -> "Validator":
    try:
        from jsonschema import Draft202012Validator, SchemaError
        from jsonschema.validators import validator_for
        from referencing import Registry
    except ImportError as error:
        raise TaskError(
            f"The json_schema scorer needs the package jsonschema: {install_extra('tasks')}."
        ) from error
    kind = validator_for(schema, default=Draft202012Validator)
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        raise TaskError(
            f"The json_schema scorer got an invalid schema: {error.message} "
            f"(at {error.json_path}). Give a JSON Schema such as {{type: object}}."
        ) from error
    # An empty registry: the default one fetches "$ref": "http://..." from the network.
    return kind(schema, registry=Registry())
