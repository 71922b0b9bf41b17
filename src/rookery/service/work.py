"""One accepted request on its way: what was asked, by whom, what it costs; and its result."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

__all__ = ["GIVEN_UP", "SAMPLING", "Category", "Command", "Form", "Result", "failed", "finished"]

Form = Literal["json", "proto"]
SAMPLING = ("sample", "score")
"""Kinds of requests of sampling sessions, done in any order; the others are of models."""
GIVEN_UP = (
    "The service ended each time that it computed this request, also when it computed nothing "
    "else: it is not computed again. Send less in one request: fewer data or samples, or shorter "
    "ones."
)
Category = Literal["user", "server", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A request that changes something or takes its turn in a queue, as the journal holds it."""

    kind: str
    id: str
    """Of its future, or of the session that it makes."""
    tenant: str
    time: float
    body: bytes
    form: Form = "json"
    owner: str = ""
    """The model it trains, or the sampling session it draws from."""
    base_model: str = ""
    seq: int = 0
    """Its number among the requests of its owner."""
    tokens: int = 1
    """What it costs, for the fair queue."""
    key: str = ""
    digest: str = ""

    def header(self) -> dict[str, Any]:
        """All but the body."""
        return {key: value for key, value in asdict(self).items() if key != "body"}


@dataclass(frozen=True, slots=True)
class Result:
    """What a client gets for a request. Samples and training outputs are protobuf."""

    payload: bytes
    form: Form = "json"
    is_failure: bool = False


def finished(document: Mapping[str, Any]) -> Result:
    return Result(json.dumps(document).encode())


def failed(sentence: str, category: Category) -> Result:
    """The SDK raises RequestFailedError with this sentence."""
    document = {"error": sentence, "category": category}
    return Result(json.dumps(document).encode(), is_failure=True)
