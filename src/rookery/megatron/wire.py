"""Records as JSON and adapters as safetensors, between client and server.

body = write_json(requests)
requests = read_records(TrainRequest, body)
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from safetensors import SafetensorError
from safetensors.torch import load, save

from rookery.config import Config
from rookery.errors import ServiceError, boundary
from rookery.train import LoraConfig
from rookery.types import (
    Adapter,
    Completion,
    Datum,
    KeptTokens,
    LoraFactors,
    ModelRef,
    SampleRequest,
    SamplingParams,
    Score,
    ScoreRequest,
    TrainRequest,
    VersionSpan,
)
from rookery.weights import make_adapter

__all__ = [
    "INSTANCE_HEADER",
    "LoraStart",
    "ServerInfo",
    "adapter_bytes",
    "read_adapter_bytes",
    "read_json",
    "read_record",
    "read_records",
    "write_json",
]

INSTANCE_HEADER = "X-Rookery-Instance"
"""Header that names the start of the server that a client connected to."""
Record = TypeVar("Record")
_BAD = (TypeError, ValueError, LookupError, AttributeError, SafetensorError)
"""Errors raised by reading unexpected data."""


_LOCAL_FIELDS = frozenset({"affinity", "on_delta"})


class LoraStart(Config):
    """A new adapter."""

    lora: LoraConfig
    base: str
    seed: int


class ServerInfo(Config):
    """Facts about a server that a client needs."""

    instance: str
    """Changes with every start of the server."""
    base: str
    names: tuple[str, ...]
    """Names of the model."""
    linear_layers: dict[str, tuple[int, int]]
    max_rank: int
    context_tokens: int
    ranks: int


def write_json(value: object) -> bytes:
    """Encode a value, which may hold records; NaN and infinity as Python writes them."""
    return json.dumps(value, default=_plain).encode()


def _plain(value: Any) -> Any:
    """Convert types that json does not know. Affinities and callbacks stay in their process."""
    if isinstance(value, KeptTokens):
        return [row.tolist() for row in value.rows]
    if is_dataclass(value):
        names = (field.name for field in fields(value) if field.name not in _LOCAL_FIELDS)
        return {name: getattr(value, name) for name in names}
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} cannot be sent")


def read_json(body: bytes) -> Any:
    with boundary(ServiceError, "The body is not JSON", foreign=_BAD):
        return json.loads(body)


def read_records(kind: type[Record], body: bytes) -> list[Record]:
    with boundary(ServiceError, f"The body is not a list of {kind.__name__}", foreign=_BAD):
        return [read_record(kind, values) for values in json.loads(body)]


def read_record(kind: type[Record], values: Mapping[str, Any]) -> Record:
    """Build a record; ServiceError if the values do not fit."""
    with boundary(ServiceError, f"This is not a {kind.__name__}", foreign=_BAD):
        readers = _READERS.get(kind, {})
        return kind(**{name: readers.get(name, _frozen)(x) for name, x in values.items()})


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _as_it_is(value: Any) -> Any:
    return value


def _one(kind: type[Any]) -> Callable[[Any], Any]:
    return lambda values: read_record(kind, values)


def _all(kind: type[Any]) -> Callable[[Any], Any]:
    return lambda rows: tuple(read_record(kind, values) for values in rows)


_MODEL = {"model": _one(ModelRef)}
_READERS: dict[type[Any], dict[str, Callable[[Any], Any]]] = {
    TrainRequest: {"data": _all(Datum), "loss_options": _as_it_is},
    Datum: {"kept": KeptTokens.of, "inputs": _as_it_is},
    SampleRequest: {**_MODEL, "params": _one(SamplingParams)},
    ScoreRequest: _MODEL,
    Score: _MODEL,
    Completion: {**_MODEL, "kept": KeptTokens.of, "version_spans": _all(VersionSpan)},
}


def adapter_bytes(adapter: Adapter) -> bytes:
    """Encode an adapter as a safetensors file with name, base and scales in its header."""
    tensors = {
        f"{layer}/{letter}": tensor.contiguous()
        for layer, lora in adapter.factors.items()
        for letter, tensor in (("a", lora.a), ("b", lora.b))
    }
    scales = {layer: lora.scale for layer, lora in adapter.factors.items()}
    header = {"name": adapter.name, "base": adapter.base, "scales": scales}
    data: bytes = save(tensors, metadata={"adapter": json.dumps(header)})
    return data


def read_adapter_bytes(data: bytes) -> Adapter:
    """Read an adapter from `adapter_bytes`."""
    with boundary(ServiceError, "This is not an adapter", foreign=_BAD):
        size = int.from_bytes(data[:8], "little")
        header = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["adapter"])
        tensors = load(data)
        factors = {
            layer: LoraFactors(a=tensors[f"{layer}/a"], b=tensors[f"{layer}/b"], scale=scale)
            for layer, scale in header["scales"].items()
        }
        return make_adapter(header["name"], base=header["base"], factors=factors)
