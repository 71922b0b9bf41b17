"""An accepted request on its way: its content, tenant and cost; and its result.

`Format` is the port to the format of clients. It converts bodies to requests for the trainer and
the engine, and their outputs to bodies. The journal keeps bodies as they came, and a restart reads
them again.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from rookery.errors import EngineDownError, FleetDownError, RunError
from rookery.ports import AdapterFolders, Codec, Engine, Trainees, Trainer
from rookery.runtime.app_shell import Refusal
from rookery.service.records import CustomLoss, SamplingSession
from rookery.types import (
    Completion,
    CompletionDelta,
    SamplingParams,
    TokenIds,
    TopLogprobs,
    TrainOutput,
    TrainRequest,
)

__all__ = [
    "GIVEN_UP",
    "SAMPLING",
    "Array",
    "Backend",
    "Category",
    "Command",
    "DrawWork",
    "Form",
    "Format",
    "Known",
    "PromptScores",
    "Refusal",
    "Result",
    "Training",
    "bad",
    "failed",
    "finished",
    "missing",
    "status_of",
]


# Engine, trainer and tokenizer of one base model, as the service uses them; it holds no tensors.


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """One base model: sampling, training, and its tokenizer."""

    engine: Engine
    trainer: Trainer
    trainees: Trainees
    folders: AdapterFolders
    codec: Codec
    tokenizer: str
    """Hugging Face id or folder from which clients load the tokenizer."""
    merge: Callable[[Path, Path], object]
    """(PEFT folder, new folder): writes the base model merged with the adapter. Blocks."""


# Refused requests, with the HTTP status that clients understand.
#
# | status | when                                       | the `tinker` SDK                   |
# |--------|--------------------------------------------|------------------------------------|
# | 400    | it can never be done as it is written      | raises at once                     |
# | 401    | no key, or an unknown one                  | raises at once                     |
# | 404    | it does not exist, or is another tenant's  | raises at once                     |
# | 410    | it existed and is over                     | ends its heartbeat                 |
# | 413    | too large                                  | raises at once                     |
# | 422    | a field is missing or of a wrong type      | raises at once                     |
# | 429    | too many now                               | waits and sends it again           |
#
# A wrong request never gets 409 or 5xx: the SDK repeats those silently for five minutes.


def status_of(error: Exception) -> int:
    """Return the HTTP status for an error."""
    if isinstance(error, Refusal):
        return error.status
    return 503 if isinstance(error, EngineDownError | FleetDownError | RunError) else 400


def bad(sentence: str) -> Refusal:
    """Return the refusal of a request that can never be done as written."""
    return Refusal(400, sentence)


def missing(what: str, name: str) -> Refusal:
    """Return the refusal for an unknown name; another tenant's things look unknown too."""
    return Refusal(404, f"There is no {what} {name!r:.200}.")


Form = Literal["json", "proto"]
SAMPLING = ("sample", "score")
"""Kinds of requests of sampling sessions, done in any order; other kinds belong to models."""
GIVEN_UP = (
    "The service ended each time that it computed this request, also when it computed nothing "
    "else: it is not computed again. Send less in one request: fewer data or samples, or shorter "
    "ones."
)
Category = Literal["user", "server", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A request that changes the state or takes its turn in a queue, as the journal keeps it."""

    kind: str
    id: str
    """Id of its future, or of the session that it creates."""
    tenant: str
    time: float
    body: bytes
    form: Form = "json"
    owner: str = ""
    """Model it trains, or sampling session it draws from."""
    base_model: str = ""
    seq: int = 0
    """Number among its owner's requests."""
    tokens: int = 1
    """Cost in the fair queue."""
    key: str = ""
    digest: str = ""

    def header(self) -> dict[str, Any]:
        """Return all fields but the body."""
        return {key: value for key, value in asdict(self).items() if key != "body"}


@dataclass(frozen=True, slots=True)
class Result:
    """Answer to a request. Samples and training outputs are protobuf."""

    payload: bytes
    form: Form = "json"
    is_failure: bool = False


def finished(document: Mapping[str, Any]) -> Result:
    return Result(json.dumps(document).encode())


def failed(sentence: str, category: Category) -> Result:
    """Return a failure, for which the SDK raises RequestFailedError with this sentence."""
    document = {"error": sentence, "category": category}
    return Result(json.dumps(document).encode(), is_failure=True)


Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawWork:
    """One draw: the model, its parameters, and what to report about the prompt."""

    id: str
    tenant: str
    base_model: str
    blob: str
    """Digest of the sampler weights; empty for the base model."""
    prompt: TokenIds
    params: SamplingParams
    scored: int = 0
    """Number of last prompt tokens that get log-probabilities."""
    top_k: int = 0
    """Likeliest tokens to report per scored prompt token."""
    targets: Array | None = None
    """[T - 1, K]: token ids to score after each prompt position, -1 for none."""
    alternatives: int = 0
    """Number of draws after each prompt position."""
    has_text: bool = False
    """True if the answer includes texts."""
    json_schema: str = ""
    """Schema that the answers must match, as `SampleRequest.json_schema`."""
    on_delta: Callable[[CompletionDelta], None] | None = None
    """Called with new tokens of the answers, as `SampleRequest.on_delta`."""

    @property
    def tokens(self) -> int:
        num_scored = 0 if self.targets is None else int((self.targets >= 0).sum())
        num_drawn = self.params.n * self.params.max_tokens
        return len(self.prompt) * (1 + self.alternatives) + num_scored + num_drawn


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptScores:
    """Requested values about the prompt; None if not requested."""

    logprobs: Sequence[float | None] | None = None
    top: Sequence[TopLogprobs] | None = None
    top_k: int = 0
    targets: Array | None = None
    """[T - 1, K], NaN where nothing was requested."""
    alternatives: tuple[Array, Array] | None = None
    """Drawn tokens and their log-probabilities, [T - 1, K] each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """Lookups for what a training request may refer to."""

    context_tokens: int | None
    loss: Callable[[str], CustomLoss]
    """Returns the tenant's custom loss by id; refuses other ids."""
    result: Callable[[str], Result | None]
    """Returns the result of an earlier request of the tenant by its key; None if it is not kept."""


class Training(Protocol):
    """A forward_backward or forward request that can be computed."""

    @property
    def request(self) -> TrainRequest:
        """The request for the trainer."""

    def result(self, output: TrainOutput) -> Result:
        """Return the client's result for an output without an error."""


class Format(Protocol):
    """Conversions in both directions. They may be slow: never call them in the event loop."""

    def read_training(self, work: Command, known: Known) -> Training:
        """Read a training request; refuse it if it can never be computed."""

    def read_draw(
        self, work: Command, sampler: SamplingSession, *, max_tokens: Callable[..., int]
    ) -> DrawWork:
        """Read an accepted sample request; refuse it if it can never be drawn. `max_tokens` is
        `Drawing.max_tokens` for the sampler's model."""

    def write_samples(
        self, draw: DrawWork, completions: Sequence[Completion], scores: PromptScores
    ) -> Result:
        """Return the client's result."""
