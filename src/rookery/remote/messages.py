"""The protobuf messages of the tinker protocol, built from the tables below.

    message = SampleResponse.FromString(body)

They have their own pool, so that the SDK's messages can be imported in the same program.
"""

from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from rookery.types import Completion, FinishReason, KeptTokens, ModelRef, TopLogprobs

__all__ = [
    "DTYPES",
    "EMPTY_LOGPROB",
    "STOP_REASONS",
    "ForwardBackwardOutput",
    "ForwardBackwardRequest",
    "SampleResponse",
    "read_completions",
    "top_rows",
]

PACKAGE = "rookery_tinker"
DTYPES = {"float32": 1, "int64": 2, "int32": 3, "bfloat16": 4}
EMPTY_LOGPROB = -99999.0
"""Value that the SDK reads as an empty cell of a top-k table."""
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

# Numbers from 1001 are Rookery's own: the SDK skips unknown fields. A field is
# `[repeated|optional|map|oneof NAME] TYPE NAME NUMBER`; maps have text keys.
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
        # protobuf represents an optional field as a oneof with one member.
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


def read_completions(payload: bytes, *, model: ModelRef) -> tuple[Completion, ...]:
    """Read a SampleResponse with texts, for Rookery's own client."""
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
    rows = top_rows(table) if table.length else []
    return tuple(tuple((int(token), lp) for token, lp in row or ()) for row in rows)


def top_rows(table: Any) -> list[list[list[float]] | None]:
    shape = (table.length, table.k)
    token_ids = np.frombuffer(table.token_ids, dtype="<i4").reshape(shape).tolist()
    logprobs = np.frombuffer(table.logprobs, dtype="<f4").reshape(shape).tolist()
    rows = []
    for ids, values in zip(token_ids, logprobs, strict=True):
        row = [[token, lp] for token, lp in zip(ids, values, strict=True) if lp != EMPTY_LOGPROB]
        rows.append(row or None)
    return rows
