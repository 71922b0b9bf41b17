"""Raw request bodies: their size, their compression, and which format a client speaks."""

import io
from collections.abc import Iterator
from typing import Any

import zstandard
from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticSerializationError

from rookery.service.refusals import Refusal, bad
from rookery.service.wire.json_slices import load_json

__all__ = [
    "PROTOBUF",
    "accepts_protobuf",
    "as_json",
    "inflate",
    "inflate_head",
    "parse_json",
    "refuse_half_characters",
    "too_large",
]

PROTOBUF = "application/x-protobuf"
WINDOW_BYTES = 1 << 27
"""Memory that a zstd frame may ask for, whatever its size."""


def inflate(body: bytes, *, encoding: str, limit_bytes: int) -> bytes:
    """The body without its compression. Stops reading at the limit, so a small body that inflates
    to gigabytes costs no more than one of the limit."""
    data = inflate_head(body, encoding=encoding, num_bytes=limit_bytes + 1)
    if len(data) > limit_bytes:
        raise too_large(limit_bytes)
    return data


def inflate_head(body: bytes, *, encoding: str, num_bytes: int) -> bytes:
    """The first bytes of the same, all of them where there are fewer."""
    if encoding in ("", "identity"):
        return body[:num_bytes]
    if encoding != "zstd":
        raise bad(f"Content-Encoding is {encoding!r:.40}; write zstd, or send the body plain.")
    reader = zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES).stream_reader(
        io.BytesIO(body)
    )
    try:
        return reader.read(num_bytes)
    except zstandard.ZstdError as error:
        raise bad(f"The body is not a zstd frame: {error}.") from error


def too_large(limit_bytes: int) -> Refusal:
    """What is answered to a body over the limit."""
    return Refusal(
        413,
        f"The body is larger than {limit_bytes / 2**20:g} MiB: send fewer data in one request, or "
        "raise limits.body_mib of the service.",
    )


def accepts_protobuf(accept: str) -> bool:
    """Whether the client reads protobuf: SDKs since 0.18 say so where they do."""
    return "protobuf" in accept


def parse_json(body: bytes) -> Any:
    """The document, or a refusal. NaN and Infinity are not JSON."""
    try:
        document = load_json(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise Refusal(422, f"The body is not JSON: {str(error) or 'nested too deeply'}.") from error
    refuse_half_characters(body)
    return document


def refuse_half_characters(body: bytes) -> None:
    """Refuse JSON that holds half of a surrogate pair. Python's parser takes it for a string, but
    it can be neither stored nor hashed nor tokenized. Other bodies are left to their readers."""
    if b"\\ud" not in body and b"\\uD" not in body and b"\xed" not in body:
        return  # neither escaped nor as bytes
    try:
        document = load_json(body)
    except (ValueError, RecursionError):
        return
    for text in _texts(document):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = ascii(error.object[error.start : error.end])
            sentence = f"The body holds {half}, half of a character: send UTF-8."
            raise Refusal(422, sentence) from error


def _texts(document: Any) -> Iterator[str]:
    """All keys and values that are texts."""
    rest = [document]
    while rest:
        value = rest.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            yield from value
            rest += value.values()
        elif isinstance(value, list):
            rest += value


def as_json(request: BaseModel, *, exclude_none: bool = True) -> bytes:
    """A request as the journal keeps it; a refusal when it cannot be read back from there."""
    try:
        data = request.model_dump_json(exclude_none=exclude_none).encode()
        type(request).model_validate_json(data)
    except (PydanticSerializationError, ValidationError, UnicodeEncodeError) as error:
        detail = " ".join(str(error).split())
        raise bad(
            f"The body cannot be stored, it may be nested too deeply: {detail:.200}."
        ) from error
    return data


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")
