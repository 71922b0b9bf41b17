"""What tenants have: sessions, models in training, sampling sessions, checkpoints, adapters.

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
#     document = {"state": {"sessions": read_records(state.sessions.values())}, "pending":
# ["req-1"]}
#     data = encode(document)              # in a thread
#
# With thousands of tenants, `asdict` of all records takes seconds. In a thread it would see changes
# that came after the snapshot, and one `json.dumps` of everything holds the interpreter until its
# end, wherever it is called. So records are read as tuples, and written one after another.


@dataclass(frozen=True, slots=True)
class JsonRows:
    """Values that do not change any more, and what makes JSON of each."""

    values: Sequence[Any]
    describe: Callable[[Any], Any]


def read_records(records: Iterable[Any]) -> JsonRows:
    """Dataclasses of one kind. What their fields hold is replaced, never changed."""
    kept = list(records)
    names = tuple(field.name for field in fields(kept[0])) if kept else ()
    read = attrgetter(*names) if kept else tuple
    values = [read(record) for record in kept]
    return JsonRows(values, lambda row: {n: _plain(v) for n, v in zip(names, row, strict=True)})


def _plain(value: Any) -> Any:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


SLICE = 1024


def encode(document: Mapping[str, Any]) -> bytes:
    """JSON of mappings whose ends are JsonRows or plain values."""
    return b"".join(encode_parts(document))


def encode_parts(value: Any) -> Iterator[bytes]:
    """The same a row at a time, and long lists of plain values a slice at a time."""
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
    """Whether it is written at once."""
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
    """A model in training, also after its session: its checkpoints are listed under it."""

    id: str
    session_id: str
    tenant: str
    base_model: str
    lora: LoraShape
    created: float
    last_request: float
    metadata: dict[str, Json] | None = None
    next_seq: int = 0
    """The number of the request that is done next; 0 makes the model."""
    is_live: bool = True
    """Until its session ends."""
    failure: str = ""
    """Why it could not be made."""
    snapshot: str = ""
    """Digest of its saved state; "" before the first."""
    snapshot_bytes: int = 0
    snapshot_seq: int = 0
    """`next_seq` when the snapshot was taken."""
    has_loaded: bool = False
    """Whether its weights came from a checkpoint, of layers and a scale of its own."""


@dataclass(slots=True, kw_only=True)
class SamplingSession:
    """What samples are drawn from. Without a blob it is the base model."""

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
    """A loss of a client's own, for the models of its session."""

    id: str
    session_id: str
    tenant: str
    name: str
    inputs: list[dict[str, Json]]
    """Name and rank of each, the log-probabilities first."""
    graph: dict[str, Json]

    @property
    def input_names(self) -> list[str]:
        """What it reads besides log-probabilities."""
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
    """The checkpoint that it is."""
    session_id: str = ""
    """The session that it ends with."""

    def document(self) -> dict[str, str]:
        """As its tenant sees it."""
        return {
            "adapter_id": self.adapter_id,
            "lora_path": self.lora_path,
            "tinker_path": self.tinker_path,
        }


@dataclass(slots=True, kw_only=True)
class StoredSequence:
    """A turn of a chat that its client asked to keep: what was read, and what was drawn."""

    id: str
    tenant: str
    model: str
    created: float
    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]

    def datum(self) -> dict[str, list[float] | list[int]]:
        """As training takes it: each token read predicts the next, the drawn ones count."""
        whole = [*self.prompt, *self.tokens]
        unread = [0.0] * (len(self.prompt) - 1)
        return {
            "tokens": whole[:-1],
            "target_tokens": whole[1:],
            "weights": [*unread, *([1.0] * len(self.tokens))],
            "logprobs": [*unread, *self.logprobs],
        }
