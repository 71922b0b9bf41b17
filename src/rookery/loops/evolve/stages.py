"""What each stage of an attempt leaves behind, as the run's attempts keep it.

    planned -> generated -> evaluated -> committed or failed

    log.record([Attempt(number=7, state="planned", data=to_data(planned))])
    from_data(Planned, attempt.data)

Every stage is durable before the next one begins. A stage that failed is recorded as such, so that
a resumed run neither pays for it again nor decides otherwise.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import TypeAdapter

from rookery.runs import Attempt, RunView, read_attempts
from rookery.search.programs.population import Plan
from rookery.search.programs.program import CodeSummary

__all__ = [
    "AttemptDecision",
    "AttemptFailure",
    "Evaluated",
    "Generated",
    "Planned",
    "Stages",
    "from_data",
    "read_stages",
    "to_data",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptFailure:
    """Why an attempt gives no program: a kind that is counted, and a sentence."""

    kind: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What an attempt works with."""

    plan: Plan
    best_score: float
    """Of the programs known when it was planned: a child above it is scored again."""
    num_decided: int
    """Attempts decided when it was planned."""
    num_embedded: int = 0
    """Programs with an embedding then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """What the model answered. With a failure there is no child; its tokens are paid all the same.

    Tokens are None when the model does not report them.
    """

    answer: str = ""
    """The digest of prompt and answer; empty when there is no answer."""
    model: str = ""
    prompt_tokens: int | None = 0
    completion_tokens: int | None = 0
    failure: AttemptFailure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """What was measured of the child."""

    program: str = ""
    """The digest of the program with all that is known of it. With a failure: of a program that
    can be mended, with the end of its error; else empty."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The numbers; means when it was scored more than once."""
    code: CodeSummary | None = None
    code_hash: str = ""
    has_large_artifacts: bool = False
    """Whether checkpoints keep one of its artifacts in a file of its own."""
    scores: tuple[float, ...] = ()
    """Of every time it was scored; empty when that was once."""
    seconds: float = 0.0
    """In the evaluator, summed."""
    num_lost: int = 0
    """Workers that ended while they evaluated it."""
    is_forgeable: bool = False
    """Whether it ran in the evaluator's process, and so could write its own score."""
    prompt_tokens: int | None = 0
    completion_tokens: int | None = 0
    """Of the models that judge programs, and of those that judge whether they are new."""
    num_tuning: int = 0
    """Evaluations of programs that differ from it in their numbers alone."""
    rewards: tuple[float, ...] = ()
    """Of a prompt: on each search task, in their order."""
    num_rollouts: int = 0
    """Answers to tasks that scoring it took."""
    embedding: str = ""
    """As `pack_vector` writes it; empty without one."""
    embedding_error: str = ""
    """Why it could not be compared with earlier programs as asked."""
    failure: AttemptFailure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptDecision:
    """How an attempt ended. Without a failure its program joined the population."""

    failure: AttemptFailure | None = None
    elapsed_s: float = 0.0
    """Seconds that the run had taken by then, over all sessions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """How far an attempt got."""

    planned: Planned | None = None
    generated: Generated | None = None
    evaluated: Evaluated | None = None
    decision: AttemptDecision | None = None
    epoch: int = 0
    """Of its last lease."""
    num_lost: int = 0

    @property
    def failure(self) -> AttemptFailure | None:
        """Of the stage that failed, if one did."""
        stages = (self.generated, self.evaluated)
        return next((s.failure for s in stages if s is not None and s.failure is not None), None)


Record = TypeVar("Record", Planned, Generated, Evaluated, AttemptDecision)
_ADAPTERS: dict[type, TypeAdapter[Any]] = {
    kind: TypeAdapter(kind) for kind in (Planned, Generated, Evaluated, AttemptDecision)
}


def to_data(record: Planned | Generated | Evaluated | AttemptDecision) -> dict[str, Any]:
    """A JSON object."""
    data: dict[str, Any] = _ADAPTERS[type(record)].dump_python(record, mode="json")
    return data


def from_data(kind: type[Record], data: Mapping[str, Any]) -> Record:
    """What `to_data` made."""
    record: Record = _ADAPTERS[kind].validate_python(dict(data))
    return record


def read_stages(run: RunView, *, series: str = "") -> tuple[dict[int, Stages], list[int]]:
    """Every attempt of a run as far as it got, and the decided ones in the order of decisions."""
    known: dict[int, dict[str, Any]] = {}
    order: list[int] = []
    for _, attempt in read_attempts(run, series=series):
        fields = known.setdefault(attempt.number, {})
        _follow(fields, attempt)
        if attempt.state in {"committed", "failed"}:
            order.append(attempt.number)
    return {number: Stages(**fields) for number, fields in known.items()}, order


def _follow(fields: dict[str, Any], attempt: Attempt) -> None:
    match attempt.state:
        case "planned":
            fields["planned"] = from_data(Planned, attempt.data)
        case "leased":
            fields["epoch"] = max(attempt.epoch, fields.get("epoch", 0))
            fields["num_lost"] = max(attempt.data["num_lost"], fields.get("num_lost", 0))
        case "generated":
            fields["generated"] = from_data(Generated, attempt.data)
        case "evaluated":
            fields["evaluated"] = from_data(Evaluated, attempt.data)
        case _:
            fields["decision"] = from_data(AttemptDecision, attempt.data)
