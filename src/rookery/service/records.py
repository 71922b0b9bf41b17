"""Records of tenants: sessions, models in training, sampling sessions, checkpoints, adapters.

A tenant's training run is a model in training; both have the same id, `SESSION:train:0`.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from operator import attrgetter
from typing import Any, Literal

from rookery.types import Json, LoraShape

__all__ = [
    "Checkpoint",
    "CheckpointKind",
    "CustomLoss",
    "JsonRows",
    "Model",
    "RegisteredAdapter",
    "SamplingSession",
    "Session",
    "StoredSequence",
    "encode",
    "encode_parts",
    "read_records",
]

# Records of a snapshot: read in one turn of the event loop, written as JSON in a thread.
#
#     document = {"state": {"sessions": read_records(state.sessions.values())}, "pending": [...]}
#     data = encode(document)              # in a thread
#
# With thousands of tenants, `asdict` of all records takes seconds. In a thread it would see changes
# after the snapshot, and one `json.dumps` of everything holds the interpreter until its end in any
# thread. So records are read as tuples and written one by one.


@dataclass(frozen=True, slots=True)
class JsonRows:
    """Values that no longer change, and the function that makes JSON values of each."""

    values: Sequence[Any]
    describe: Callable[[Any], Any]


def read_records(records: Iterable[Any]) -> JsonRows:
    """Read dataclasses of one kind. Their field values must be replaced, never changed in place."""
    kept = list(records)
    names = tuple(field.name for field in fields(kept[0])) if kept else ()
    read = attrgetter(*names) if kept else tuple
    values = [read(record) for record in kept]
    return JsonRows(values, lambda row: {n: _plain(v) for n, v in zip(names, row, strict=True)})


def _plain(value: Any) -> Any:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


SLICE = 1024


def encode(document: Mapping[str, Any]) -> bytes:
    """Encode mappings whose leaves are JsonRows or plain values as JSON."""
    return b"".join(encode_parts(document))


def encode_parts(value: Any) -> Iterator[bytes]:
    """Yield the same JSON row by row, and long lists of plain values slice by slice."""
    if isinstance(value, JsonRows):
        yield b"["
        for number, row in enumerate(value.values):
            yield b"," if number else b""
            yield from encode_parts(value.describe(row))
        yield b"]"
    elif isinstance(value, Mapping) and not all(map(_is_short, value.values())):
        yield b"{"
        for number, (name, item) in enumerate(value.items()):
            yield (b"," if number else b"") + json.dumps(name).encode() + b":"
            yield from encode_parts(item)
        yield b"}"
    elif not _is_short(value):
        yield b"["
        for start in range(0, len(value), SLICE):
            part = json.dumps(value[start : start + SLICE])[1:-1]
            yield f",{part}".encode() if start else part.encode()
        yield b"]"
    else:
        yield json.dumps(value).encode()


def _is_short(value: Any) -> bool:
    """True if the value is encoded in one piece."""
    if isinstance(value, Mapping):
        return all(map(_is_short, value.values()))
    return not isinstance(value, JsonRows) and not (
        isinstance(value, list | tuple) and len(value) > SLICE
    )


CheckpointKind = Literal["weights", "sampler_weights", "external_weights"]


@dataclass(slots=True, kw_only=True)
class Session:
    """One client program."""

    id: str
    tenant: str
    created: float
    tags: list[str] = field(default_factory=list)
    metadata: dict[str, Json] | None = None
    display_name: str | None = None
    is_over: bool = False


@dataclass(slots=True, kw_only=True)
class Model:
    """A model in training. It outlives its session, as its checkpoints are listed under it."""

    id: str
    session_id: str
    tenant: str
    base_model: str
    lora: LoraShape
    created: float
    last_request: float
    metadata: dict[str, Json] | None = None
    next_seq: int = 0
    """Number of the next request; request 0 creates the model."""
    is_live: bool = True
    """False once its session has ended."""
    failure: str = ""
    """Why its creation failed; empty if it did not."""
    snapshot: str = ""
    """Digest of its saved state; empty before the first snapshot."""
    snapshot_bytes: int = 0
    snapshot_seq: int = 0
    """Value of `next_seq` at the snapshot."""
    has_loaded: bool = False
    """True if its weights come from a checkpoint, whose layers and scale may differ."""


@dataclass(slots=True, kw_only=True)
class SamplingSession:
    """Source of samples: a blob of weights, or the base model if `blob` is empty."""

    id: str
    session_id: str
    tenant: str
    base_model: str
    path: str = ""
    blob: str = ""
    num_joined: int = 0


@dataclass(slots=True, kw_only=True)
class Checkpoint:
    """Saved weights: `tinker://MODEL_ID/KIND/NAME`."""

    model_id: str
    kind: CheckpointKind
    name: str
    tenant: str
    base_model: str
    lora: LoraShape
    created: float
    blob: str
    size_bytes: int
    is_public: bool = False
    expires: float | None = None
    metadata: dict[str, Json] | None = None

    @property
    def path(self) -> str:
        return f"tinker://{self.model_id}/{self.kind}/{self.name}"


@dataclass(slots=True, kw_only=True)
class CustomLoss:
    """A client's own loss, for the models of its session."""

    id: str
    session_id: str
    tenant: str
    name: str
    inputs: list[dict[str, Json]]
    """Name and rank of each input; the log-probabilities come first."""
    graph: dict[str, Json]

    @property
    def input_names(self) -> list[str]:
        """Names of the inputs after the log-probabilities."""
        return [str(entry["name"]) for entry in self.inputs[1:]]


@dataclass(slots=True, kw_only=True)
class RegisteredAdapter:
    """A PEFT folder that a tenant registered to sample from or to train on."""

    tenant: str
    adapter_id: str
    base_model: str
    blob: str
    lora_path: str
    created: float
    tinker_path: str = ""
    """Path of its checkpoint."""
    session_id: str = ""
    """Session with which it ends; empty if it stays until removed."""

    def document(self) -> dict[str, str]:
        """Return the adapter as its tenant sees it."""
        return {
            "adapter_id": self.adapter_id,
            "lora_path": self.lora_path,
            "tinker_path": self.tinker_path,
        }


@dataclass(slots=True, kw_only=True)
class StoredSequence:
    """A chat turn that its client asked to keep: the prompt and the drawn tokens."""

    id: str
    tenant: str
    model: str
    created: float
    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]

    def datum(self) -> dict[str, list[float] | list[int]]:
        """Return a training datum: each token predicts the next, drawn ones have weight 1."""
        whole = [*self.prompt, *self.tokens]
        unread = [0.0] * (len(self.prompt) - 1)
        return {
            "tokens": whole[:-1],
            "target_tokens": whole[1:],
            "weights": [*unread, *([1.0] * len(self.tokens))],
            "logprobs": [*unread, *self.logprobs],
        }
