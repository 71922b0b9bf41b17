"""forward_backward on the wire: bodies -> TrainCall, outputs -> bodies.

Results are kept as protobuf; clients of the JSON time get them converted.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from rookery.service.wire.records import RecordCall, read_record_call
from rookery.service.wire.schema import (
    DTYPES,
    Array,
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    json_tensor,
    proto_tensor,
)
from rookery.service.work import bad

__all__ = [
    "DatumArrays",
    "TargetSpan",
    "TrainCall",
    "encode_outputs",
    "outputs_as_json",
    "read_train_json",
    "read_train_proto",
]


@dataclass(frozen=True, slots=True)
class TargetSpan:
    """Targets in a row that are tokens of one sample, from `offset` on; "" names no sample."""

    sequence_id: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class DatumArrays:
    """One row as it was sent: the tokens read and the arrays of the loss, by name."""

    tokens: Array
    inputs: Mapping[str, Array]
    target_spans: tuple[TargetSpan, ...] = ()
    """Where the targets come from; empty when the client does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainCall:
    """A forward_backward, or a forward, as it was sent."""

    model_id: str
    seq_id: int | None
    """None from clients that do not number their requests."""
    loss: str
    options: Mapping[str, float | str]
    forward_only: bool
    data: tuple[DatumArrays, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(datum.tokens) for datum in self.data)


def read_train_proto(body: bytes) -> tuple[TrainCall, bytes]:
    """The call, and its bytes in the one order that equal calls share."""
    try:
        message = ForwardBackwardRequest.FromString(body)
    except DecodeError as error:
        raise bad("The body is not a ForwardBackwardRequest message.") from error
    options: dict[str, float | str] = dict(message.loss_fn_config)
    for key, value in message.loss_fn_config_v2.items():
        options[key] = value.text if value.WhichOneof("value") == "text" else value.number
    call = TrainCall(
        model_id=message.model_id,
        seq_id=message.seq_id,
        loss=message.loss_fn,
        options=options,
        forward_only=message.forward_only,
        data=tuple(_proto_datum(datum, place) for place, datum in enumerate(message.data)),
    )
    return call, message.SerializeToString(deterministic=True)


def read_train_json(document: Any) -> TrainCall | RecordCall:
    """A body of SDKs up to 0.24, with the input under forward_input or forward_backward_input; or
    one of Rookery's own client, with a train_request."""
    if isinstance(document, dict) and "train_request" in document:
        return read_record_call(document)
    forward_only = isinstance(document, dict) and "forward_input" in document
    key = "forward_input" if forward_only else "forward_backward_input"
    if not isinstance(document, dict) or not isinstance(document.get(key), dict):
        raise bad("The body has no forward_backward_input: write data, loss_fn and model_id.")
    inner = document[key]
    data, options = inner.get("data"), inner.get("loss_fn_config") or {}
    seq_id = document.get("seq_id")
    if not isinstance(data, list) or not isinstance(options, dict):
        raise bad(f"{key} has no list `data`, or a loss_fn_config that is no mapping.")
    if seq_id is not None and not isinstance(seq_id, int):
        raise bad(f"seq_id is {seq_id!r:.40}; it is a whole number.")
    return TrainCall(
        model_id=str(document.get("model_id", "")),
        seq_id=seq_id,
        loss=str(inner.get("loss_fn", "")),
        options=options,
        forward_only=forward_only,
        data=tuple(_json_datum(datum, place) for place, datum in enumerate(data)),
    )


def encode_outputs(
    logprobs: Sequence[Array], metrics: Mapping[str, float], *, type_tag: str = ""
) -> bytes:
    """A ForwardBackwardOutput with the log-probabilities of each datum, shaped as its targets."""
    message = ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    trailing = {array.shape[1:] for array in logprobs}
    # Data of one trailing shape fit into one record, others need one each.
    records = [logprobs] if len(trailing) <= 1 else [[array] for array in logprobs]
    for arrays in records:
        record = message.loss_fn_outputs.add(type_tag=type_tag, num_datums=len(arrays))
        field = record.fields["logprobs"]
        chunks = [np.ascontiguousarray(array, dtype="<f4").tobytes() for array in arrays]
        field.data = b"".join(chunks)
        field.offsets = np.cumsum([0, *map(len, chunks)], dtype="<i8").tobytes()
        field.dtype = DTYPES["float32"]
        field.trailing_shape.extend(arrays[0].shape[1:] if arrays else ())
    message.metrics.update(metrics)
    data: bytes = message.SerializeToString(deterministic=True)
    return data


def outputs_as_json(payload: bytes) -> dict[str, Any]:
    """The same for clients of the JSON time."""
    message = ForwardBackwardOutput.FromString(payload)
    outputs: list[dict[str, Any]] = []
    for record in message.loss_fn_outputs:
        field = record.fields["logprobs"]
        offsets = np.frombuffer(field.offsets, dtype="<i8")
        for start, stop in itertools.pairwise(offsets):
            values = np.frombuffer(field.data[start:stop], dtype="<f4")
            array = values.reshape(-1, *field.trailing_shape)
            tensor = {"data": values.tolist(), "dtype": "float32", "shape": list(array.shape)}
            outputs.append({"logprobs": tensor})
    return {
        "loss_fn_output_type": message.loss_fn_output_type,
        "loss_fn_outputs": outputs,
        "metrics": dict(message.metrics),
    }


def _proto_datum(datum: Any, place: int) -> DatumArrays:
    pieces = []
    for chunk in datum.model_input:
        if chunk.WhichOneof("chunk") != "encoded_text":
            raise bad(_not_text(place, str(chunk.WhichOneof("chunk"))))
        tokens = chunk.encoded_text.tokens
        if len(tokens) % 4:
            raise bad(f"Datum {place}: its tokens are no int32 values.")
        pieces.append(np.frombuffer(tokens, dtype="<i4"))
    inputs = {
        name: proto_tensor(tensor, name=f"Datum {place}: {name}")
        for name, tensor in datum.loss_fn_inputs.items()
    }
    spans = _target_spans(datum, place) if datum.loss_fn_input_spans else ()
    return DatumArrays(_joined(pieces), inputs, spans)


def _target_spans(datum: Any, place: int) -> tuple[TargetSpan, ...]:
    spans = []
    for span in datum.loss_fn_input_spans:
        is_drawn = span.WhichOneof("span") == "sampled_tokens"
        source = span.sampled_tokens if is_drawn else span.prompt_tokens
        if source.length < 0 or source.offset < 0:
            raise bad(f"Datum {place}: a span of loss_fn_inputs has a negative length or offset.")
        spans.append(
            TargetSpan(source.sequence_id if is_drawn else "", source.offset, source.length)
        )
    num_rows = datum.loss_fn_inputs["target_tokens"].shape[:1]
    if [sum(span.length for span in spans)] != list(num_rows):
        raise bad(f"Datum {place}: the spans of loss_fn_inputs do not cover target_tokens.")
    return tuple(spans)


def _json_datum(datum: Any, place: int) -> DatumArrays:
    try:
        chunks, inputs = datum["model_input"]["chunks"], datum["loss_fn_inputs"]
        kinds = [chunk.get("type", "encoded_text") for chunk in chunks]
        other = next((kind for kind in kinds if kind != "encoded_text"), None)
        if other is not None:
            raise bad(_not_text(place, str(other)))
        tokens = _joined([np.asarray(list(chunk["tokens"]), dtype="<i4") for chunk in chunks])
        arrays = {n: json_tensor(t, name=f"Datum {place}: {n}") for n, t in inputs.items()}
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise bad(
            f"Datum {place} is not a datum: it has model_input.chunks of tokens and loss_fn_inputs."
        ) from error
    return DatumArrays(tokens, arrays)


def _joined(pieces: Sequence[Array]) -> Array:
    """One after another; ValueError when one is not a plain list."""
    return np.concatenate([np.zeros(0, dtype="<i4"), *pieces])


def _not_text(place: int, kind: str) -> str:
    return f"Datum {place} has a chunk of the type {kind!r:.40}; this service takes encoded_text."
