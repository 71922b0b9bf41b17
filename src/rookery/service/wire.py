"""Request bodies: their size and compression, and records of the ports to and from JSON.

    body = train_body("S:train:0", 3, request, forward_only=False)     # at the client
    call = read_record_call(json.loads(body))                          # at the service
    call.request == request

The SDK's messages lack some fields of a Datum (positions, the tokens that a target was drawn from,
columns of the trainer) and the trainer's own losses.
"""

import io
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from json.decoder import JSONArray, JSONDecodeError  # type: ignore[attr-defined]
from json.scanner import py_make_scanner  # type: ignore[attr-defined]
from typing import Annotated, Any, TypeVar

import zstandard
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_core import PydanticSerializationError

from rookery.remote.records import KEY
from rookery.runtime.app_shell import too_large
from rookery.service.work import Refusal, bad
from rookery.types import (
    Datum,
    KeptTokens,
    ModelRef,
    Score,
    ScoreRequest,
    TrainOutput,
    TrainRequest,
)

__all__ = [
    "IN_SLICES",
    "LARGE_BYTES",
    "CheckLoss",
    "RecordCall",
    "ScoreBody",
    "Tokens",
    "accepts_protobuf",
    "as_json",
    "inflate",
    "inflate_head",
    "load_json",
    "output_document",
    "parse_json",
    "read_record_call",
    "refuse_half_characters",
    "score_document",
]


# Large JSON documents, parsed in slices so that other threads can run between them.
#
#     document = await asyncio.to_thread(load_json, body)
#
# `json.loads` of 64 MiB holds the interpreter for seconds in any thread. Here Python reads objects
# and nested lists, and `json.loads` reads lists of numbers, the bulk of large bodies, slice by
# slice.


LARGE_BYTES = 1 << 15
"""Size of a slice in characters. Smaller documents are parsed at once, in about a millisecond."""


def load_json(body: bytes, *, parse_constant: Callable[[str], Any] | None = None) -> Any:
    """Like `json.loads`, for large documents in a thread."""
    if len(body) <= LARGE_BYTES:
        return json.loads(body, parse_constant=parse_constant)
    text = body.decode(json.detect_encoding(body), "surrogatepass")
    return _Decoder(parse_constant=parse_constant).decode(text)


class _Decoder(json.JSONDecoder):
    def __init__(self, *, parse_constant: Callable[[str], Any] | None) -> None:
        super().__init__(parse_constant=parse_constant)
        self._decode_slice = json.JSONDecoder(parse_constant=parse_constant).decode
        self.parse_array = self._array
        self.scan_once = py_make_scanner(self)

    def _array(
        self, start: tuple[str, int], scan_once: Callable[..., Any]
    ) -> tuple[list[Any], int]:
        """Parse the list after a `[`; return it with its end."""
        text, place = start
        end = text.find("]", place)
        if end < 0 or any(text.find(mark, place, end) >= 0 for mark in '[{"'):
            values: tuple[list[Any], int] = JSONArray(start, scan_once)
            return values
        numbers: list[Any] = []
        while end - place > LARGE_BYTES:
            cut = text.rfind(",", place, place + LARGE_BYTES)
            if cut < 0:
                break
            numbers += self._slice(text, place, cut)
            place = cut + 1
        is_whole = place == start[1]
        return numbers + self._slice(text, place, end, may_be_empty=is_whole), end + 1

    def _slice(self, text: str, start: int, end: int, *, may_be_empty: bool = False) -> list[Any]:
        try:
            values: list[Any] = self._decode_slice(f"[{text[start:end]}]")
        except JSONDecodeError as error:
            raise JSONDecodeError(error.msg, text, start + error.pos - 1) from None
        if not values and not may_be_empty:
            raise JSONDecodeError("Expecting value", text, end)
        return values


# Long lists of requests, validated in slices so that other threads can run between them.
#
#     tokens: Annotated[list[int], IN_SLICES] = []
#
# Pydantic holds the interpreter while it validates a list, in any thread, and makes an error for
# every wrong item: half a minute for millions of items.


SLICE = 1024


def _validate(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    """Validate slice by slice; stop at the first slice with an error."""
    if not isinstance(value, list | tuple) or len(value) <= SLICE:
        return handler(value)
    parts = []
    for start in range(0, len(value), SLICE):
        try:
            parts.append(handler(value[start : start + SLICE]))
        except ValidationError as error:
            first = error.errors()[0]
            place, *inner = first["loc"] or (0,)
            where = ".".join(map(str, (start + int(place), *inner)))
            raise ValueError(f"item {where}: {first['msg']}") from error
    return type(parts[0])(chain.from_iterable(parts))


IN_SLICES = WrapValidator(_validate)
"""Annotation of a list or a tuple."""


WINDOW_BYTES = 1 << 27
"""Memory that a zstd frame may request, whatever its size."""


def inflate(body: bytes, *, encoding: str, limit_bytes: int) -> bytes:
    """Decompress a body. Reading stops at the limit, so that a small body that inflates to
    gigabytes costs no more than one at the limit."""
    data = inflate_head(body, encoding=encoding, num_bytes=limit_bytes + 1)
    if len(data) > limit_bytes:
        raise too_large(limit_bytes)
    return data


def inflate_head(body: bytes, *, encoding: str, num_bytes: int) -> bytes:
    """Decompress the first `num_bytes` of a body, or all of it if it is shorter."""
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


def accepts_protobuf(accept: str) -> bool:
    """True if the client reads protobuf, which SDKs since 0.18 declare."""
    return "protobuf" in accept


def parse_json(body: bytes) -> Any:
    """Parse JSON, or refuse it. NaN and Infinity are not JSON."""
    try:
        document = load_json(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise Refusal(422, f"The body is not JSON: {str(error) or 'nested too deeply'}.") from error
    refuse_half_characters(body)
    return document


def refuse_half_characters(body: bytes) -> None:
    """Refuse JSON with half of a surrogate pair: Python parses it, but it can be neither stored,
    hashed nor tokenized. Bodies that are not JSON pass."""
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
    """Yield all keys and values that are texts."""
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
    """Encode a request for the journal; refuse it if it could not be read back."""
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


Floats = Annotated[tuple[float, ...], IN_SLICES]
Valid = TypeVar("Valid", bound=BaseModel)
Token = Annotated[int, Field(ge=0, lt=2**31)]
Tokens = Annotated[tuple[Token, ...], IN_SLICES]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class _DatumBody(_Body):
    tokens: Tokens
    positions: Annotated[tuple[int, ...], IN_SLICES] = ()
    targets: Tokens = ()
    weights: Floats = ()
    sampled_logprobs: Floats = ()
    old_logprobs: Floats = ()
    reference_logprobs: Floats = ()
    advantages: Floats = ()
    temperature: float = 1.0
    kept: Annotated[list[Tokens], IN_SLICES] = []
    inputs: dict[str, Any] = {}

    def datum(self) -> Datum:
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        datum = Datum(**fields)
        return replace(datum, kept=KeptTokens.of(self.kept)) if self.kept else datum


class _RequestBody(_Body):
    data: list[Any] = Field(min_length=1)
    """Each is a `_DatumBody`, validated separately: all at once would hold the interpreter."""
    loss: str = "cross_entropy"
    loss_options: dict[str, Any] = {}


class _CallBody(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, protected_namespaces=())

    model_id: str
    seq_id: int | None = None
    forward_only: bool = False
    train_request: _RequestBody


class CheckLoss(BaseModel):
    """A loss of the trainer, with options to check."""

    loss: str
    options: dict[str, Any] = {}


class ScoreBody(BaseModel):
    """A ScoreRequest to a sampling session."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    sampling_session_id: str = Field(min_length=1, max_length=400)
    seq_id: int | None = Field(default=None, ge=0, lt=2**63)
    tokens: Tokens = Field(min_length=1)
    start: int = Field(default=1, ge=1)
    labels: Tokens = ()
    top_logprobs: int = Field(default=0, ge=0, le=1000)

    def request(self, model: ModelRef) -> ScoreRequest:
        return ScoreRequest(
            model=model,
            tokens=self.tokens,
            start=self.start,
            labels=self.labels,
            top_logprobs=self.top_logprobs,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordCall:
    """A forward_backward or forward request, as the trainer takes it."""

    model_id: str
    seq_id: int | None
    forward_only: bool
    request: TrainRequest

    @property
    def num_tokens(self) -> int:
        return sum(len(datum.tokens) for datum in self.request.data)


def read_record_call(document: Mapping[str, Any]) -> RecordCall:
    """Read a body with a TrainRequest; a refusal says where it is wrong."""
    body = _valid(_CallBody, document, place=())
    train_body = body.train_request
    data = [
        _valid(_DatumBody, datum, place=(KEY, "data", number))
        for number, datum in enumerate(train_body.data)
    ]
    request = TrainRequest(
        trainee=body.model_id,
        data=tuple(datum.datum() for datum in data),
        loss=train_body.loss,
        loss_options=train_body.loss_options,
    )
    return RecordCall(
        model_id=body.model_id,
        seq_id=body.seq_id,
        forward_only=body.forward_only,
        request=request,
    )


def _valid(kind: type[Valid], document: Any, *, place: tuple[str | int, ...]) -> Valid:
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, (*place, *first["loc"])))
        raise Refusal(422, f"{where}: {first['msg']}.") from error


def output_document(output: TrainOutput) -> dict[str, Any]:
    """Return the fields of a TrainOutput without an error."""
    return {"metrics": dict(output.metrics), "logprobs": output.logprobs}


def score_document(score: Score) -> dict[str, Any]:
    """Return all fields but the model."""
    return {
        "logprobs": score.logprobs,
        "label_logprobs": score.label_logprobs,
        "top_logprobs": score.top_logprobs,
    }
