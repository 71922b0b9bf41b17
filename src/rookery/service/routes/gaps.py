"""Refused requests keep their number, so that the ones behind them are not held up.

The SDK numbers the requests of a model before it sends them and goes on with the next number after
a refusal: without an entry for the refused one, the service would wait for it for ever.
"""

from contextlib import suppress
from typing import Any

from fastapi import Request
from google.protobuf.message import DecodeError

from rookery.service.refusals import Refusal
from rookery.service.routes.gate import Body, Gate, digest_of, tenant_of
from rookery.service.wire.body import PROTOBUF, inflate, inflate_head
from rookery.service.wire.json_slices import load_json
from rookery.service.wire.schema import ForwardBackwardRequest

__all__ = ["fill_gap"]

HEAD_BYTES = 1024
"""Of a message: its model and its number are in these."""
_PATHS = frozenset(
    f"/api/v1/{name}"
    for name in (
        "forward",
        "forward_backward",
        "load_weights",
        "optim_step",
        "save_weights",
        "save_weights_external",
        "save_weights_for_sampler",
    )
)


async def fill_gap(request: Request, sentence: str) -> None:
    """Give the number of a request that can never be done to its refusal."""
    if request.url.path not in _PATHS:
        return
    gate: Gate = request.app.state.gate
    raw = await request.body()
    with suppress(Refusal):  # of another tenant, done before, or too many wait: nothing to fill
        tenant = tenant_of(request)
        found = await gate.service.reading.in_thread(
            tenant, lambda: _number(raw, request, gate.body_bytes), tokens=len(raw)
        )
        if found is None:
            return
        model_id, seq = found
        gate.state.model(tenant, model_id)
        body = Body(sentence.encode(), digest=digest_of(raw))
        command = gate.work("refused", tenant, body, owner=model_id, seq=seq)
        await gate.service.accept(command)


def _number(raw: bytes, request: Request, limit_bytes: int) -> tuple[str, int] | None:
    """The model and the number that a body names; None when it names none."""
    encoding = request.headers.get("content-encoding", "")
    try:
        if request.headers.get("content-type", "").startswith(PROTOBUF):
            message = _first_fields(inflate_head(raw, encoding=encoding, num_bytes=HEAD_BYTES))
            model_id, seq = message.model_id, message.seq_id
        else:
            document = load_json(inflate(raw, encoding=encoding, limit_bytes=limit_bytes))
            model_id, seq = document["model_id"], document["seq_id"]
    except (Refusal, DecodeError, ValueError, TypeError, LookupError, RecursionError):
        return None
    is_number = isinstance(model_id, str) and isinstance(seq, int) and 0 < seq < 2**63
    return (model_id, seq) if is_number else None


def _first_fields(head: bytes) -> Any:
    """The message without its data, which may be too large or damaged: model and number come
    first."""
    size, place = _varint(head, 1)
    _, end = _varint(head, place + size + 1)
    return ForwardBackwardRequest.FromString(head[:end])


def _varint(data: bytes, place: int) -> tuple[int, int]:
    """A number of protobuf, seven bits in a byte, and where it ends."""
    value, shift = 0, 0
    while data[place] >= 128:
        value |= (data[place] & 127) << shift
        place, shift = place + 1, shift + 7
    return value | data[place] << shift, place + 1
