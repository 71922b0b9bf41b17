"""Records of the ports as JSON, between this client and a service.

    body = train_document("S:train:0", 3, request, forward_only=False)

`rookery.service.wire` is the other end.
"""

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from rookery.types import Datum, ModelRef, Score, TrainOutput, TrainRequest

__all__ = ["KEY", "PROTOBUF", "read_output", "read_score", "train_document"]

PROTOBUF = "application/x-protobuf"
KEY = "train_request"
"""Key of the request in the body of a forward_backward."""


def train_document(
    model_id: str, seq: int, request: TrainRequest, *, forward_only: bool
) -> dict[str, Any]:
    """Build the body of a forward_backward."""
    return {
        "model_id": model_id,
        "seq_id": seq,
        "forward_only": forward_only,
        KEY: {
            "data": [_datum_document(datum) for datum in request.data],
            "loss": request.loss,
            "loss_options": dict(request.loss_options),
        },
    }


def read_output(document: Mapping[str, Any]) -> TrainOutput:
    """Read the result of a forward_backward; a failure gives its sentence."""
    if "error" in document:
        return TrainOutput(error=str(document["error"]))
    rows = tuple(tuple(row) for row in document["logprobs"])
    return TrainOutput(metrics=document["metrics"], logprobs=rows)


def read_score(document: Mapping[str, Any], *, model: ModelRef) -> Score:
    return Score(
        model=model,
        logprobs=tuple(document["logprobs"]),
        label_logprobs=tuple(document["label_logprobs"]),
        top_logprobs=tuple(
            tuple((int(token), logprob) for token, logprob in row)
            for row in document["top_logprobs"]
        ),
    )


def _datum_document(datum: Datum) -> dict[str, Any]:
    """Build a document of a datum without its empty columns."""
    kept = [list(row) for row in datum.kept]
    fields = {**asdict(replace(datum, kept=())), "kept": kept}
    return {name: value for name, value in fields.items() if value not in ((), [], {})}
