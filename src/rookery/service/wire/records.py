"""Records of the ports as JSON, both ways: what Rookery's own client sends, and what it gets.

    body = train_body("S:train:0", 3, request, forward_only=False)     # at the client
    call = read_record_call(json.loads(body))                          # at the service
    call.request == request

The SDK's messages cannot carry all that a Datum has (positions, the tokens that a target was drawn
from, columns of the trainer) nor the trainer's own losses.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rookery.service.wire.body import IN_SLICES
from rookery.service.work import Refusal
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
    "CheckLoss",
    "RecordCall",
    "ScoreBody",
    "Tokens",
    "output_document",
    "read_output",
    "read_record_call",
    "read_score",
    "score_document",
    "train_document",
]

KEY = "train_request"
"""Where a forward_backward has its TrainRequest."""
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
    """Each a `_DatumBody`, validated by itself: all at once would hold the interpreter."""
    loss: str = "cross_entropy"
    loss_options: dict[str, Any] = {}


class _CallBody(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, protected_namespaces=())

    model_id: str
    seq_id: int | None = None
    forward_only: bool = False
    train_request: _RequestBody


class CheckLoss(BaseModel):
    """A loss of the trainer with its options."""

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
    """A forward_backward, or a forward, as the trainer takes it."""

    model_id: str
    seq_id: int | None
    forward_only: bool
    request: TrainRequest

    @property
    def num_tokens(self) -> int:
        return sum(len(datum.tokens) for datum in self.request.data)


def read_record_call(document: Mapping[str, Any]) -> RecordCall:
    """A body that has a TrainRequest, or a refusal that says where it is wrong."""
    body = _valid(_CallBody, document, place=())
    asked = body.train_request
    data = [
        _valid(_DatumBody, datum, place=(KEY, "data", number))
        for number, datum in enumerate(asked.data)
    ]
    request = TrainRequest(
        trainee=body.model_id,
        data=tuple(datum.datum() for datum in data),
        loss=asked.loss,
        loss_options=asked.loss_options,
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


def train_document(
    model_id: str, seq: int, request: TrainRequest, *, forward_only: bool
) -> dict[str, Any]:
    """The body of a forward_backward."""
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


def output_document(output: TrainOutput) -> dict[str, Any]:
    """What a TrainOutput without an error holds."""
    return {"metrics": dict(output.metrics), "logprobs": output.logprobs}


def read_output(document: Mapping[str, Any]) -> TrainOutput:
    """The same, back; a result that is a failure has its sentence."""
    if "error" in document:
        return TrainOutput(error=str(document["error"]))
    rows = tuple(tuple(row) for row in document["logprobs"])
    return TrainOutput(metrics=document["metrics"], logprobs=rows)


def score_document(score: Score) -> dict[str, Any]:
    """All but its model."""
    return {
        "logprobs": score.logprobs,
        "label_logprobs": score.label_logprobs,
        "top_logprobs": score.top_logprobs,
    }


def read_score(document: Mapping[str, Any], *, model: ModelRef) -> Score:
    """The same, back."""
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
    """Columns that are empty are left out."""
    kept = [list(row) for row in datum.kept]
    fields = {**asdict(replace(datum, kept=())), "kept": kept}
    return {name: value for name, value in fields.items() if value not in ((), [], {})}
