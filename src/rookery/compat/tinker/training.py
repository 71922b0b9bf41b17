"""forward_backward on the wire: body -> the trainer's data, loss and options; outputs -> body.

Results are kept as protobuf and converted for SDKs that read JSON.

| loss                | arrays                              | options                    |
|---------------------|-------------------------------------|----------------------------|
| cross_entropy       | target_tokens, weights              |                            |
| importance_sampling | target_tokens, logprobs, advantages |                            |
| ppo, cispo, gspo    | the same                            | clip_low_/_high_threshold  |
| dro                 | the same                            | beta                       |
| custom              | target_tokens, and its own inputs   | loss_id                    |

Losses are plain sums over all targets. Thresholds are ratios: 0.8 and 1.2 are the trainer's clips
of 0.2 and 0.2.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from rookery.compat.tinker.schema import json_tensor, proto_tensor
from rookery.remote.messages import DTYPES, ForwardBackwardOutput, ForwardBackwardRequest
from rookery.service.records import CustomLoss
from rookery.service.wire import RecordCall, read_record_call
from rookery.service.work import Array, bad
from rookery.types import Datum, Json, TrainOutput, TrainRequest

__all__ = [
    "LOSSES",
    "DatumArrays",
    "TargetSpan",
    "TrainCall",
    "encode_outputs",
    "output_arrays",
    "output_metrics",
    "outputs_as_json",
    "read_train_json",
    "read_train_proto",
    "train_request",
]


@dataclass(frozen=True, slots=True)
class TargetSpan:
    """Consecutive targets that are tokens of one sample from `offset` on; "" names no sample."""

    sequence_id: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class DatumArrays:
    """One datum as sent: its tokens, and the arrays of the loss by name."""

    tokens: Array
    inputs: Mapping[str, Array]
    target_spans: tuple[TargetSpan, ...] = ()
    """Sources of the targets; empty if the client does not report them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainCall:
    """A forward_backward or forward as sent."""

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
    """Return the call, and its bytes in canonical order, which equal calls share."""
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
    """Read a body of SDKs up to 0.24, with the input under forward_input or forward_backward_input,
    or one of Rookery's own client, with a train_request."""
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
        raise bad(f"{key} needs a list `data`, and its loss_fn_config must be a mapping.")
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
    """Encode a ForwardBackwardOutput with each datum's log-probabilities, shaped as its targets."""
    message = ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    trailing = {array.shape[1:] for array in logprobs}
    # Data with one trailing shape fit into one record; others need one each.
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
    """Convert a ForwardBackwardOutput for SDKs that read JSON."""
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
    """Join the pieces; ValueError if one is not a flat list."""
    return np.concatenate([np.zeros(0, dtype="<i4"), *pieces])


def _not_text(place: int, kind: str) -> str:
    return f"Datum {place} has a chunk of the type {kind!r:.40}; this service takes encoded_text."


_Options = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class _Loss:
    """How the trainer computes a loss of the protocol."""

    is_policy: bool
    options: tuple[str, ...] = ()
    translate: Callable[[_Options], dict[str, Json]] = lambda _: {}


def _clips(options: _Options) -> dict[str, Json]:
    low, high = options.get("clip_low_threshold"), options.get("clip_high_threshold")
    if not (0 <= (low or 0) <= 1 <= (1 if high is None else high) < math.inf):
        raise bad(
            f"clip_low_threshold is {low} and clip_high_threshold {high}: they are ratios, the "
            "first from 0 to 1 and the second at least 1."
        )
    clips: dict[str, Json] = {}
    if low is not None:
        clips["clip_low"] = 1.0 - low
    if high is not None:
        clips["clip_high"] = high - 1.0
    return clips


def _cispo(options: _Options) -> dict[str, Json]:
    low, high = options.get("clip_low_threshold", 0.0), options.get("clip_high_threshold", 4.0)
    if not 0 <= low <= high < math.inf or not high:
        raise bad(
            f"clip_low_threshold is {low} and clip_high_threshold {high}: they are ratios, the "
            "first at least 0 and not above the second."
        )
    return {"min_ratio": low, "max_ratio": high}


def _dro(options: _Options) -> dict[str, Json]:
    if not 0 <= options.get("beta", 0) < math.inf:
        raise bad(f"beta is {options['beta']}; dro takes a number that is at least 0.")
    return {**options}


_THRESHOLDS = ("clip_low_threshold", "clip_high_threshold")
LOSSES = {
    "cross_entropy": _Loss(is_policy=False),
    "importance_sampling": _Loss(is_policy=True),
    "ppo": _Loss(is_policy=True, options=_THRESHOLDS, translate=_clips),
    "cispo": _Loss(is_policy=True, options=_THRESHOLDS, translate=_cispo),
    "gspo": _Loss(is_policy=True, options=_THRESHOLDS, translate=_clips),
    "dro": _Loss(is_policy=True, options=("beta",), translate=_dro),
}


def train_request(
    call: TrainCall | RecordCall,
    *,
    context_tokens: int | None,
    custom: Callable[[str], CustomLoss],
) -> TrainRequest:
    """Build the trainer's request; a refusal names datum and array. `custom` looks up losses."""
    if isinstance(call, RecordCall):
        for place, datum in enumerate(call.request.data):
            _check_length(len(datum.tokens), place=place, context_tokens=context_tokens)
        return call.request
    if not call.data:
        raise bad("The request has no data; give at least one datum.")
    if call.loss == "custom":
        return _custom_request(call, context_tokens=context_tokens, custom=custom)
    loss = LOSSES.get(call.loss)
    if loss is None:
        known = ", ".join((*LOSSES, "custom"))
        raise bad(f"{call.loss!r:.60} is not a loss here. There are: {known}.")
    unknown = sorted(set(call.options) - set(loss.options))
    if unknown:
        allowed = ", ".join(loss.options) or "none"
        raise bad(f"{call.loss} has no option {unknown[0]!r:.60}. Its options: {allowed}.")
    numbers = {key: value for key, value in call.options.items() if isinstance(value, int | float)}
    if len(numbers) < len(call.options):
        raise bad(f"The options of {call.loss} are numbers; got {dict(call.options)!r:.200}.")
    return TrainRequest(
        trainee=call.model_id,
        data=tuple(
            _datum(datum, call.loss, place=place, context_tokens=context_tokens)
            for place, datum in enumerate(call.data)
        ),
        loss=call.loss,
        loss_options=loss.translate(numbers),
    )


def _custom_request(
    call: TrainCall, *, context_tokens: int | None, custom: Callable[[str], CustomLoss]
) -> TrainRequest:
    loss_id = call.options.get("loss_id")
    if not isinstance(loss_id, str) or len(call.options) > 1:
        raise bad("custom takes one option, loss_id: what create_custom_loss answered.")
    loss = custom(loss_id)
    return TrainRequest(
        trainee=call.model_id,
        data=tuple(
            _custom_datum(datum, loss, place=place, context_tokens=context_tokens)
            for place, datum in enumerate(call.data)
        ),
        loss="custom",
        loss_options={"inputs": [*loss.inputs], "graph": loss.graph},
    )


def _custom_datum(
    datum: DatumArrays, loss: CustomLoss, *, place: int, context_tokens: int | None
) -> Datum:
    inputs = dict(datum.inputs)
    targets = _targets(datum, inputs, "custom", place=place, context_tokens=context_tokens)
    read = {name: _take(datum.inputs, name, "custom", place) for name in loss.input_names}
    for array, entry in zip((targets, *read.values()), loss.inputs, strict=True):
        # On the wire, a scalar has no shape, like an array without one.
        if array.ndim != (entry["rank"] or 1) or (not entry["rank"] and array.size != 1):
            raise bad(
                f"Datum {place}: {entry['name']} has the shape {list(array.shape)}, and the loss "
                f"{loss.name!r:.60} reads it with rank {entry['rank']}."
            )
    scalars = [str(entry["name"]) for entry in loss.inputs if not entry["rank"]]
    return Datum(
        tokens=tuple(datum.tokens.tolist()),
        positions=_positions(targets),
        targets=tuple(targets.reshape(-1).tolist()),
        weights=(1.0,) * targets.size,
        inputs={
            name: array.item() if name in scalars else array.tolist()
            for name, array in read.items()
        },
    )


def output_arrays(request: TrainRequest, output: TrainOutput) -> list[Array]:
    """Return the log-probabilities of each datum, in the shape of its targets."""
    arrays = []
    for datum, logprobs in zip(request.data, output.logprobs, strict=True):
        array: Array = np.asarray(logprobs, dtype="<f4")
        num_rows = datum.positions[-1] + 1 if datum.positions else 0
        is_flat = num_rows in (0, len(array))
        arrays.append(array if is_flat else array.reshape(num_rows, -1))
    return arrays


def output_metrics(
    request: TrainRequest, output: TrainOutput, drawn: Sequence[Array] = ()
) -> dict[str, float]:
    """Return metrics as `name:reduction`, which the SDK merges over chunks; always with `loss:sum`.
    Includes the gap between sampler and trainer on drawn tokens. Losses of drawn tokens carry the
    sampler's log-probabilities; for others, `drawn` has them, NaN where unknown."""
    metrics = {"loss:sum": output.metrics["train/loss_sum"]}
    for key, value in output.metrics.items():
        if key.startswith("custom/"):
            metrics[key] = value
            continue
        name = key.removeprefix("train/")
        if name == "loss_sum":
            continue
        if name.endswith("_sum"):
            metrics[f"{name.removesuffix('_sum')}:sum"] = value
        elif name.endswith("_max"):
            metrics[f"{name.removesuffix('_max')}:max"] = value
        else:
            metrics[f"{name}:{'sum' if name.startswith('num_') else 'mean'}"] = value
    return {**metrics, **_drift([*_policy_gaps(request, output), *_drawn_gaps(drawn, output)])}


def _drawn_gaps(drawn: Sequence[Array], output: TrainOutput) -> list[float]:
    gaps: list[float] = []
    for sampled, logprobs in zip(drawn, output.logprobs, strict=False):
        if len(sampled) == len(logprobs):  # one target per position
            gap = sampled - np.asarray(logprobs, dtype="<f4")
            gaps += gap[np.isfinite(gap)].tolist()
    return gaps


def _policy_gaps(request: TrainRequest, output: TrainOutput) -> list[float]:
    return [
        sampled - logprob
        for datum, logprobs in zip(request.data, output.logprobs, strict=True)
        for sampled, logprob, advantage in zip(
            datum.sampled_logprobs, logprobs, datum.advantages, strict=False
        )
        if advantage != 0.0
    ]


def _drift(gaps: Sequence[float]) -> dict[str, float]:
    if not gaps:
        return {}
    values = np.asarray(gaps)
    return {
        "kl_sample_train_v1:mean": float(values.mean()),
        "kl_sample_train_v2:mean": float((values**2).mean() / 2),
    }


def _datum(datum: DatumArrays, loss: str, *, place: int, context_tokens: int | None) -> Datum:
    inputs = dict(datum.inputs)
    targets = _targets(datum, inputs, loss, place=place, context_tokens=context_tokens)
    columns = _columns(inputs, loss, targets, place)
    if inputs:
        raise bad(f"Datum {place}: {loss} takes no {sorted(inputs)[0]!r:.60}: leave it out.")
    return Datum(
        tokens=tuple(datum.tokens.tolist()),
        positions=_positions(targets),
        targets=tuple(targets.reshape(-1).tolist()),
        weights=_flat(columns["weights"]),
        sampled_logprobs=_flat(columns.get("sampled_logprobs")),
        advantages=_flat(columns.get("advantages")),
    )


def _targets(
    datum: DatumArrays,
    inputs: dict[str, Array],
    loss: str,
    *,
    place: int,
    context_tokens: int | None,
) -> Array:
    """Take the targets out of the inputs: [T] or [T, K]."""
    num_tokens = len(datum.tokens)
    _check_length(num_tokens, place=place, context_tokens=context_tokens)
    targets = _take(inputs, "target_tokens", loss, place)
    inputs.pop("target_tokens")
    if targets.shape[:1] != (num_tokens,) or targets.ndim > 2 or targets.dtype.kind != "i":
        raise bad(
            f"Datum {place}: target_tokens has the shape {list(targets.shape)} for {num_tokens} "
            "tokens; it holds whole numbers, one row per token, [T] or [T, K]."
        )
    return targets


def _check_length(num_tokens: int, *, place: int, context_tokens: int | None) -> None:
    if context_tokens is not None and num_tokens > context_tokens:
        raise bad(
            f"Datum {place} has {num_tokens} tokens; this model reads at most {context_tokens}."
        )


def _positions(targets: Array) -> tuple[int, ...]:
    """Return the row of each target."""
    num_rows = len(targets)
    return tuple(np.repeat(np.arange(num_rows), targets.size // max(num_rows, 1)).tolist())


def _flat(column: Array | None) -> tuple[float, ...]:
    return () if column is None else tuple(column.reshape(-1).tolist())


def _columns(inputs: dict[str, Array], loss: str, targets: Array, place: int) -> dict[str, Array]:
    if not LOSSES[loss].is_policy:
        weights = _column(inputs, "weights", loss, targets, place)
        return {"weights": weights}
    sampled = _column(inputs, "logprobs", loss, targets, place)
    advantages = _column(inputs, "advantages", loss, targets, place)
    weights = np.ones(targets.shape, dtype="<f4")
    if loss == "gspo":
        # A sequence's ratio is the mean over its drawn tokens, without the prompt.
        drawn = inputs.pop("sequence_ratio_mask", None)
        weights = (advantages != 0 if drawn is None else drawn != 0).astype("<f4")
    return {"weights": weights, "sampled_logprobs": sampled, "advantages": advantages}


def _column(inputs: dict[str, Array], name: str, loss: str, targets: Array, place: int) -> Array:
    column = _take(inputs, name, loss, place)
    inputs.pop(name)
    if column.shape != targets.shape:
        raise bad(
            f"Datum {place}: {name} has the shape {list(column.shape)} and target_tokens "
            f"{list(targets.shape)}; they are alike."
        )
    if not np.isfinite(column).all():
        raise bad(f"Datum {place}: {name} has values that are NaN or infinite.")
    return column.astype("<f4")


def _take(inputs: Mapping[str, Array], name: str, loss: str, place: int) -> Array:
    if name not in inputs:
        raise bad(f"Datum {place}: {loss} needs {name!r} in loss_fn_inputs.")
    return inputs[name]
