"""Raw request bodies: their size, their compression, and which format a client speaks."""

import io
import json
from typing import Any

import zstandard

from rookery.service.refusals import Refusal, bad

__all__ = ["PROTOBUF", "accepts_protobuf", "inflate", "parse_json", "too_large"]

PROTOBUF = "application/x-protobuf"
WINDOW_BYTES = 1 << 27
"""Memory that a zstd frame may ask for, whatever its size."""


def inflate(body: bytes, *, encoding: str, limit_bytes: int) -> bytes:
    """The body without its compression. Stops reading at the limit, so a small body that inflates
    to gigabytes costs no more than one of the limit."""
    if encoding in ("", "identity"):
        if len(body) > limit_bytes:
            raise too_large(limit_bytes)
        return body
    if encoding != "zstd":
        raise bad(f"Content-Encoding is {encoding!r:.40}; write zstd, or send the body plain.")
    reader = zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES).stream_reader(
        io.BytesIO(body)
    )
    try:
        data = reader.read(limit_bytes + 1)
    except zstandard.ZstdError as error:
        raise bad(f"The body is not a zstd frame: {error}.") from error
    if len(data) > limit_bytes:
        raise too_large(limit_bytes)
    return data


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
        return json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise Refusal(422, f"The body is not JSON: {str(error) or 'nested too deeply'}.") from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")
