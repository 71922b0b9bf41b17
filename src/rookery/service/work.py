"""One accepted request on its way: what was asked, by whom, what it costs; and its result.

`Format` is what the service asks of its clients' format: bodies as requests to the trainer and the
engine, and what came of them as bodies. The journal has bodies as they came, so that they are read
again after a restart.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from rookery.app_shell import Refusal
from rookery.errors import EngineDownError, FleetDownError, RunError
from rookery.ports import AdapterFolders, Codec, Engine, Trainees, Trainer
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


# What the service asks of the engine and the trainer of one base model; it holds no tensors.


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """One base model: sampling, training, and its tokenizer."""

    engine: Engine
    trainer: Trainer
    trainees: Trainees
    folders: AdapterFolders
    codec: Codec
    tokenizer: str
    """What clients load the tokenizer from: a Hugging Face id or a folder."""
    merge: Callable[[Path, Path], object]
    """(PEFT folder, new folder): writes the base model with the adapter in its weights. Waits for
    the disk."""


# Requests that are refused, with the HTTP status that the clients understand.
#
# | status | when                                       | the `tinker` SDK                   |
# |--------|--------------------------------------------|------------------------------------|
# | 400    | it can never be done as it is written      | raises at once                     |
# | 401    | no key, or an unknown one                  | raises at once                     |
# | 404    | no such thing, or another tenant's         | raises at once                     |
# | 410    | it existed and is over                     | ends its heartbeat                 |
# | 413    | too large                                  | raises at once                     |
# | 422    | a field is missing or of a wrong type      | raises at once                     |
# | 429    | too many now                               | waits and sends it again           |
#
# Never 409 and never 5xx for a wrong request: the SDK repeats those silently for five minutes.


def status_of(error: Exception) -> int:
    """What an error of ours is answered with."""
    if isinstance(error, Refusal):
        return error.status
    return 503 if isinstance(error, EngineDownError | FleetDownError | RunError) else 400


def bad(sentence: str) -> Refusal:
    """It can never be done as it is written."""
    return Refusal(400, sentence)


def missing(what: str, name: str) -> Refusal:
    """There is no such thing, or it belongs to another tenant: both look alike."""
    return Refusal(404, f"There is no {what} {name!r:.200}.")


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


Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawWork:
    """What to draw from which model, and what to tell of the prompt."""

    id: str
    tenant: str
    base_model: str
    blob: str
    """The sampler weights; "" for the base model."""
    prompt: TokenIds
    params: SamplingParams
    scored: int = 0
    """How many of the last prompt tokens get log-probabilities."""
    top_k: int = 0
    """Most likely tokens per scored prompt token."""
    targets: Array | None = None
    """[T - 1, K]: token ids to score after each prompt position, -1 for none."""
    alternatives: int = 0
    """Draws after each prompt position."""
    has_text: bool = False
    """Whether the texts are answered too."""
    json_schema: str = ""
    """What the answers must match, as `SampleRequest.json_schema`."""
    on_delta: Callable[[CompletionDelta], None] | None = None
    """Told what the answers gain, as `SampleRequest.on_delta`."""

    @property
    def tokens(self) -> int:
        num_scored = 0 if self.targets is None else int((self.targets >= 0).sum())
        num_drawn = self.params.n * self.params.max_tokens
        return len(self.prompt) * (1 + self.alternatives) + num_scored + num_drawn


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptScores:
    """What was asked about the prompt; None where it was not."""

    logprobs: Sequence[float | None] | None = None
    top: Sequence[TopLogprobs] | None = None
    top_k: int = 0
    targets: Array | None = None
    """[T - 1, K], NaN where nothing was asked."""
    alternatives: tuple[Array, Array] | None = None
    """Drawn tokens and their log-probabilities, [T - 1, K] each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What a training request may refer to."""

    context_tokens: int | None
    loss: Callable[[str], CustomLoss]
    """A loss that the tenant made, by its id; refuses others."""
    result: Callable[[str], Result | None]
    """Of an earlier request of the tenant, by its key; None when it is not kept."""


class Training(Protocol):
    """A forward_backward, or a forward, that can be computed."""

    @property
    def request(self) -> TrainRequest:
        """For the trainer."""

    def result(self, output: TrainOutput) -> Result:
        """What its client gets for an output without an error."""


class Format(Protocol):
    """Both ways. Each function may take long for a long body: not in the event loop."""

    def read_training(self, work: Command, known: Known) -> Training:
        """Refused with a sentence when it can never be computed."""

    def read_draw(
        self, work: Command, sampler: SamplingSession, *, max_tokens: Callable[..., int]
    ) -> DrawWork:
        """What an accepted sample asks for; a refusal when it can never be drawn. `max_tokens` is
        `Drawing.max_tokens` of the sampler's model."""

    def write_samples(
        self, draw: DrawWork, completions: Sequence[Completion], scores: PromptScores
    ) -> Result:
        """What its client gets."""
