"""The protobuf messages of the protocol, built from the tables below; its tensors as arrays.

    message = ForwardBackwardRequest.FromString(body)

They live in a pool of their own: a program that also imports the SDK has its messages beside them.

Samples on the wire: prompts and options -> requests to the engine, its answers -> a body.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from rookery.seeding import stream_seed
from rookery.service.records import SamplingSession
from rookery.service.requests import Sample
from rookery.service.work import Array, Command, Draw, PromptScores, bad
from rookery.types import (
    Completion,
    FinishReason,
    KeptTokens,
    ModelRef,
    SamplingParams,
    TopLogprobs,
)

__all__ = [
    "DTYPES",
    "STOP_REASONS",
    "ForwardBackwardOutput",
    "ForwardBackwardRequest",
    "SampleResponse",
    "encode_samples",
    "json_tensor",
    "proto_tensor",
    "read_completions",
    "read_draw",
    "samples_as_json",
]


PACKAGE = "rookery_tinker"
DTYPES = {"float32": 1, "int64": 2, "int32": 3, "bfloat16": 4}
STOP_REASONS = {"stop": 0, "length": 1}

ENUMS = {
    "StopReason": {"STOP_REASON_STOP": 0, "STOP_REASON_LENGTH": 1},
    "DType": {
        "DTYPE_UNSPECIFIED": 0,
        "DTYPE_FLOAT32": 1,
        "DTYPE_INT64": 2,
        "DTYPE_INT32": 3,
        "DTYPE_BFLOAT16": 4,
    },
}

# Numbers from 1001 are Rookery's own: the SDK skips what it does not know.
# A field is `[repeated|optional|map|oneof NAME] TYPE NAME NUMBER`; maps have text keys.
MESSAGES = {
    "ForwardBackwardRequest": """
        string model_id 1
        int32 seq_id 2
        repeated Datum data 3
        string loss_fn 4
        map double loss_fn_config 5
        bool forward_only 6
        map LossConfigValue loss_fn_config_v2 7""",
    "LossConfigValue": """
        oneof value double number 1
        oneof value string text 2""",
    "Datum": """
        repeated Chunk model_input 1
        map Tensor loss_fn_inputs 2
        repeated ProvenanceSpan model_input_spans 3
        repeated ProvenanceSpan loss_fn_input_spans 4""",
    "Chunk": """
        oneof chunk EncodedTextChunk encoded_text 1
        oneof chunk ImageChunk image 2
        oneof chunk DmelChunk dmel 3""",
    "EncodedTextChunk": "bytes tokens 1",
    "ImageChunk": """
        bytes data 1
        string format 2""",
    "DmelChunk": "bytes dmel 1",
    "Tensor": """
        oneof encoding bytes dense 1
        oneof encoding SparseCsr sparse_csr 2
        DType dtype 3
        repeated int64 shape 4""",
    "SparseCsr": """
        bytes values 1
        bytes crow_indices 2
        bytes col_indices 3""",
    "ProvenanceSpan": """
        oneof span PromptProvenanceSpan prompt_tokens 1
        oneof span SampledProvenanceSpan sampled_tokens 2""",
    "PromptProvenanceSpan": """
        string sequence_id 1
        int64 offset 2
        int64 length 3""",
    "SampledProvenanceSpan": """
        string sequence_id 1
        int64 offset 2
        int64 length 3""",
    "ForwardBackwardOutput": """
        string loss_fn_output_type 1
        repeated ArrayRecord loss_fn_outputs 2
        map double metrics 3""",
    "ArrayRecord": """
        string type_tag 1
        map BatchedTensor fields 2
        int64 num_datums 3""",
    "BatchedTensor": """
        bytes data 1
        bytes offsets 2
        DType dtype 3
        repeated int64 trailing_shape 4""",
    "SampleResponse": """
        repeated SampledSequence sequences 1
        optional bytes prompt_logprobs 2
        optional TopkLogprobs topk_prompt_logprobs 3
        int32 prompt_cache_hit_tokens 4
        optional Tensor target_prompt_logprobs 5
        optional PromptAltTokens prompt_alt_tokens 6""",
    "SampledSequence": """
        StopReason stop_reason 1
        bytes tokens 2
        optional bytes logprobs 3
        optional TopkLogprobs topk_sampled_logprobs 4
        optional string text 1001
        repeated bytes kept 1002""",
    "TopkLogprobs": """
        bytes token_ids 1
        bytes logprobs 2
        uint32 k 3
        uint32 length 4""",
    "PromptAltTokens": """
        Tensor tokens 1
        Tensor logprobs 2""",
}

_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "double": _Field.TYPE_DOUBLE,
    "int64": _Field.TYPE_INT64,
    "int32": _Field.TYPE_INT32,
    "uint32": _Field.TYPE_UINT32,
    "bool": _Field.TYPE_BOOL,
    "string": _Field.TYPE_STRING,
    "bytes": _Field.TYPE_BYTES,
}


def _add_field(message: Any, kind: str, name: str, number: int) -> Any:
    field = message.field.add(name=name, number=number, label=_Field.LABEL_OPTIONAL)
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type = _Field.TYPE_ENUM if kind in ENUMS else _Field.TYPE_MESSAGE
        field.type_name = f".{PACKAGE}.{kind}"
    return field


def _add_map(message: Any, kind: str, name: str, number: int) -> None:
    entry_name = "".join(part.capitalize() for part in name.split("_")) + "Entry"
    entry = message.nested_type.add(name=entry_name)
    entry.options.map_entry = True
    _add_field(entry, "string", "key", 1)
    _add_field(entry, kind, "value", 2)
    field = message.field.add(name=name, number=number, label=_Field.LABEL_REPEATED)
    field.type = _Field.TYPE_MESSAGE
    field.type_name = f".{PACKAGE}.{message.name}.{entry_name}"


def _add_line(message: Any, line: str) -> None:
    *label, kind, name, number = line.split()
    if label == ["map"]:
        _add_map(message, kind, name, int(number))
        return
    field = _add_field(message, kind, name, int(number))
    if label == ["repeated"]:
        field.label = _Field.LABEL_REPEATED
    elif label and label[0] == "oneof":
        oneofs = [oneof.name for oneof in message.oneof_decl]
        if label[1] not in oneofs:
            message.oneof_decl.add(name=label[1])
            oneofs.append(label[1])
        field.oneof_index = oneofs.index(label[1])
    elif label == ["optional"]:
        # Presence of a single field is a oneof with one member.
        field.proto3_optional = True
        field.oneof_index = len(message.oneof_decl)
        message.oneof_decl.add(name=f"_{name}")


def _build() -> Any:
    file = descriptor_pb2.FileDescriptorProto(
        name=f"{PACKAGE}.proto", package=PACKAGE, syntax="proto3"
    )
    for name, values in ENUMS.items():
        enum = file.enum_type.add(name=name)
        for value_name, number in values.items():
            enum.value.add(name=value_name, number=number)
    for name, lines in MESSAGES.items():
        message = file.message_type.add(name=name)
        for line in lines.strip().splitlines():
            _add_line(message, line)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return pool


_pool = _build()


def _message(name: str) -> Any:
    return message_factory.GetMessageClass(_pool.FindMessageTypeByName(f"{PACKAGE}.{name}"))


ForwardBackwardRequest: Any = _message("ForwardBackwardRequest")
ForwardBackwardOutput: Any = _message("ForwardBackwardOutput")
SampleResponse: Any = _message("SampleResponse")


# Tensors of the protocol as arrays: dense or CSR, from protobuf or JSON.
#
# CSR rows of the tokens [[2, 9], [3, 0]]: values 2 9 3, crow 0 2 3, col 0 1 0. What is not stored
# is zero, as the SDK leaves zeros out.


MAX_CELLS = 1 << 26
"""Cells of one tensor: a few bytes of CSR may claim any shape."""

_NAMES = {number: name for name, number in DTYPES.items()}
_NUMPY = {"float32": "<f4", "int64": "<i8", "int32": "<i4", "bfloat16": "<u2"}


def proto_tensor(tensor: Any, *, name: str) -> Array:
    """A Tensor message as float32 or int64."""
    dtype = _NAMES.get(tensor.dtype)
    if dtype is None:
        raise bad(f"{name} has no dtype; give one of {', '.join(DTYPES)}.")
    shape = tuple(tensor.shape)
    if tensor.WhichOneof("encoding") == "sparse_csr":
        csr = tensor.sparse_csr
        crow = _read(csr.crow_indices, "int64", name=name)
        col = _read(csr.col_indices, "int64", name=name)
        return _from_csr(_read(csr.values, dtype, name=name), crow, col, shape, name)
    return _shaped(_read(tensor.dense, dtype, name=name), shape, name)


def json_tensor(document: Any, *, name: str) -> Array:
    """`{"data": [...], "dtype": "int64", "shape": [3]}`, CSR where it has sparse indices."""
    if not isinstance(document, dict) or "data" not in document:
        raise bad(f"{name} is not a tensor: write data, dtype and shape.")
    dtype = document.get("dtype")
    if dtype not in ("float32", "int64", "int32"):
        raise bad(f"{name} has the dtype {dtype!r:.40}; it is float32, int64 or int32.")
    try:
        values = np.asarray(document["data"], dtype=_NUMPY[dtype]).reshape(-1)
        shape = tuple(int(size) for size in document.get("shape") or (len(values),))
        crow, col = document.get("sparse_crow_indices"), document.get("sparse_col_indices")
        if crow is not None and col is not None:
            rows, cols = np.asarray(crow, dtype="<i8"), np.asarray(col, dtype="<i8")
            return _from_csr(_wide(values, dtype), rows, cols, shape, name)
    except (TypeError, ValueError, OverflowError) as error:
        raise bad(f"{name} has values that are not numbers of its dtype {dtype}.") from error
    return _shaped(_wide(values, dtype), shape, name)


def _read(data: bytes, dtype: str, *, name: str) -> Array:
    try:
        return _wide(np.frombuffer(data, dtype=_NUMPY[dtype]), dtype)
    except ValueError as error:
        raise bad(f"{name} has {len(data)} bytes, which is no number of {dtype}.") from error


def _wide(values: Array, dtype: str) -> Array:
    if dtype == "bfloat16":  # the upper half of a float32
        return (values.astype("<u4") << 16).view("<f4")
    return values if dtype == "float32" else values.astype(np.int64)


def _shaped(values: Array, shape: Sequence[int], name: str) -> Array:
    _check_shape(shape or (len(values),), name)
    if math.prod(shape) != len(values) and shape:
        raise bad(f"{name} has {len(values)} values, and its shape {list(shape)} asks for others.")
    return values.reshape(shape or -1)


def _from_csr(values: Array, crow: Array, col: Array, shape: Sequence[int], name: str) -> Array:
    _check_shape(shape, name)
    if len(shape) != 2:
        raise bad(f"{name} is sparse and has the shape {list(shape)}; CSR has two dimensions.")
    counts = np.diff(crow)
    is_fine = (
        len(crow) == shape[0] + 1
        and crow[0] == 0
        and crow[-1] == len(values) == len(col)
        and bool((counts >= 0).all())
        and (len(col) == 0 or 0 <= int(col.min()) <= int(col.max()) < shape[1])
    )
    if not is_fine:
        raise bad(f"{name} has CSR indices that do not fit its shape {list(shape)}.")
    dense = np.zeros(shape, dtype=values.dtype)
    dense[np.repeat(np.arange(shape[0]), counts), col] = values
    return dense


def _check_shape(shape: Sequence[int], name: str) -> None:
    if any(size < 0 for size in shape) or math.prod(shape) > MAX_CELLS:
        raise bad(f"{name} has the shape {list(shape)}; at most {MAX_CELLS:,} values are taken.")


EMPTY_LOGPROB = -99999.0
"""What the SDK reads as an empty cell of a top-k table."""


def read_draw(work: Command, sampler: SamplingSession, *, max_tokens: Callable[..., int]) -> Draw:
    """Without a seed of its own a sample gets one from its id, so that it is drawn alike after a
    restart."""
    request = Sample.model_validate_json(work.body)
    prompt = request.prompt.token_ids()
    options = request.sampling_params
    limit = max_tokens(asked=options.max_tokens, num_prompt=len(prompt))
    has_scores = request.prompt_logprobs or request.topk_prompt_logprobs
    seed = stream_seed(0, work.id) if options.seed is None else options.seed & (2**63 - 1)
    return Draw(
        id=work.id,
        tenant=work.tenant,
        base_model=sampler.base_model,
        blob=sampler.blob,
        prompt=prompt,
        params=_sampling_params(request, seed=seed, max_tokens=limit),
        scored=(request.prompt_logprobs_last_n or len(prompt)) if has_scores else 0,
        top_k=request.topk_prompt_logprobs,
        targets=_target_tokens(request, num_prompt=len(prompt)),
        alternatives=request.prompt_alt_tokens_k,
        has_text=request.return_text,
    )


def _sampling_params(request: Sample, *, seed: int, max_tokens: int) -> SamplingParams:
    """The engine's parameters. An empty list of stops means none, not even the end of text."""
    options = request.sampling_params
    stop = options.stop
    texts, tokens = (), ()  # type: tuple[str, ...], tuple[int, ...]
    if isinstance(stop, str):
        texts = (stop,)
    elif stop:
        texts = tuple(one for one in stop if isinstance(one, str))
        tokens = tuple(one for one in stop if isinstance(one, int))
    if "" in texts:
        raise bad("stop has an empty text; leave it out.")
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=max(options.top_k, 0),
        min_p=options.min_p,
        penalties=options.penalties,
        stop=texts,
        stop_tokens=(*tokens, *options.stop_tokens),
        ignore_eos=options.ignore_eos or (isinstance(stop, list) and not stop),
        seed=seed,
        n=request.num_samples,
        top_logprobs=request.topk_sample_logprobs,
        return_kept=request.return_kept,
    )


def _target_tokens(request: Sample, *, num_prompt: int) -> Array | None:
    """[T - 1, K] token ids to score after each prompt position, -1 for none."""
    if request.target_prompt_logprobs is None:
        return None
    targets = json_tensor(request.target_prompt_logprobs, name="target_prompt_logprobs")
    if targets.ndim != 2 or targets.shape[0] != num_prompt - 1 or targets.dtype.kind != "i":
        raise bad(
            f"target_prompt_logprobs has the shape {list(targets.shape)}; for a prompt of "
            f"{num_prompt} tokens it holds whole numbers, [{num_prompt - 1}, K]."
        )
    return targets


def encode_samples(
    completions: Sequence[Completion],
    scores: PromptScores,
    *,
    top_k: int = 0,
    has_text: bool = False,
) -> bytes:
    """A SampleResponse."""
    message = SampleResponse()
    for completion in completions:
        sequence = message.sequences.add(
            stop_reason=STOP_REASONS[completion.finish_reason],
            tokens=np.asarray(completion.tokens, dtype="<i4").tobytes(),
            logprobs=np.asarray(completion.logprobs, dtype="<f4").tobytes(),
        )
        if top_k:
            _put_top(sequence.topk_sampled_logprobs, completion.top_logprobs, top_k)
        if has_text:
            sequence.text = completion.text
        sequence.kept.extend(np.asarray(row, dtype="<i4").tobytes() for row in completion.kept)
    if scores.logprobs is not None:
        values = [np.nan if value is None else value for value in scores.logprobs]
        message.prompt_logprobs = np.asarray(values, dtype="<f4").tobytes()
    if scores.top is not None:
        _put_top(message.topk_prompt_logprobs, scores.top, scores.top_k)
    if scores.targets is not None:
        _put_tensor(message.target_prompt_logprobs, scores.targets, "float32")
    if scores.alternatives is not None:
        tokens, logprobs = scores.alternatives
        _put_tensor(message.prompt_alt_tokens.tokens, tokens, "int32")
        _put_tensor(message.prompt_alt_tokens.logprobs, logprobs, "float32")
    data: bytes = message.SerializeToString(deterministic=True)
    return data


def read_completions(payload: bytes, *, model: ModelRef) -> tuple[Completion, ...]:
    """What Rookery's own client makes of a SampleResponse with texts."""
    names: dict[int, FinishReason] = {0: "stop", 1: "length"}
    return tuple(
        Completion(
            model=model,
            tokens=tuple(np.frombuffer(sequence.tokens, dtype="<i4").tolist()),
            logprobs=tuple(np.frombuffer(sequence.logprobs, dtype="<f4").tolist()),
            text=sequence.text,
            finish_reason=names[sequence.stop_reason],
            top_logprobs=_read_top(sequence.topk_sampled_logprobs),
            kept=KeptTokens.of([np.frombuffer(row, dtype="<i4").tolist() for row in sequence.kept])
            if sequence.kept
            else (),
        )
        for sequence in SampleResponse.FromString(payload).sequences
    )


def _read_top(table: Any) -> tuple[TopLogprobs, ...]:
    rows = _top_rows(table) if table.length else []
    return tuple(tuple((int(token), lp) for token, lp in row or ()) for row in rows)


def samples_as_json(payload: bytes) -> dict[str, Any]:
    """The same for clients of the JSON time."""
    message = SampleResponse.FromString(payload)
    names = {number: name for name, number in STOP_REASONS.items()}
    document: dict[str, Any] = {
        "type": "sample",
        "sequences": [
            {
                "stop_reason": names[sequence.stop_reason],
                "tokens": np.frombuffer(sequence.tokens, dtype="<i4").tolist(),
                "logprobs": np.frombuffer(sequence.logprobs, dtype="<f4").tolist(),
            }
            for sequence in message.sequences
        ],
        "prompt_logprobs": None,
        "topk_prompt_logprobs": None,
    }
    if message.HasField("prompt_logprobs"):
        values = np.frombuffer(message.prompt_logprobs, dtype="<f4").tolist()
        document["prompt_logprobs"] = [None if value != value else value for value in values]
    if message.HasField("topk_prompt_logprobs"):
        document["topk_prompt_logprobs"] = _top_rows(message.topk_prompt_logprobs)
    return document


def _put_top(table: Any, rows: Sequence[TopLogprobs], k: int) -> None:
    """Row by row; a cell without a token is id 0 with the log-probability of an empty cell."""
    token_ids = np.zeros((len(rows), k), dtype="<i4")
    logprobs = np.full((len(rows), k), EMPTY_LOGPROB, dtype="<f4")
    for place, row in enumerate(rows):
        for column, (token, logprob) in enumerate(row[:k]):
            token_ids[place, column] = token
            logprobs[place, column] = logprob
    table.token_ids, table.logprobs = token_ids.tobytes(), logprobs.tobytes()
    table.k, table.length = k, len(rows)


def _top_rows(table: Any) -> list[list[list[float]] | None]:
    shape = (table.length, table.k)
    token_ids = np.frombuffer(table.token_ids, dtype="<i4").reshape(shape).tolist()
    logprobs = np.frombuffer(table.logprobs, dtype="<f4").reshape(shape).tolist()
    rows = []
    for ids, values in zip(token_ids, logprobs, strict=True):
        row = [[token, lp] for token, lp in zip(ids, values, strict=True) if lp != EMPTY_LOGPROB]
        rows.append(row or None)
    return rows


def _put_tensor(tensor: Any, array: Array, dtype: str) -> None:
    form = {"float32": "<f4", "int32": "<i4"}[dtype]
    tensor.dense = np.ascontiguousarray(array, dtype=form).tobytes()
    tensor.dtype = DTYPES[dtype]
    tensor.shape.extend(array.shape)
