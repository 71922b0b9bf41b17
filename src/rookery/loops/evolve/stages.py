"""The records that each stage of an attempt leaves in the run.

    planned -> generated -> evaluated -> committed or failed

    log.record([Attempt(number=7, state="planned", data=to_data(planned))])
    from_data(Planned, attempt.data)

Every stage is durable before the next one begins. A failed stage is recorded too, so that a resumed
run neither pays for it again nor decides otherwise.
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
    """Reason why an attempt gives no program: a kind to count, and a sentence."""

    kind: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The plan of an attempt, and the state of the search at that time."""

    plan: Plan
    best_score: float
    """Best score known at planning. A child above it is scored again."""
    num_decided: int
    """Attempts decided at planning."""
    num_embedded: int = 0
    """Programs with an embedding at planning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """The model's answer. A failure has no child, but its tokens are paid.

    Token counts are None if the model does not report them.
    """

    answer: str = ""
    """Digest of prompt and answer; empty without an answer."""
    model: str = ""
    prompt_tokens: int | None = 0
    completion_tokens: int | None = 0
    failure: AttemptFailure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """The measurements of a child."""

    program: str = ""
    """Digest of the program's document; after a failure, only if the program can be repaired."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Numeric metrics; means if the child was scored several times."""
    code: CodeSummary | None = None
    code_hash: str = ""
    untuned_hash: str = ""
    """Hash of the model's answer, if its numbers were tuned before it counted."""
    has_large_artifacts: bool = False
    """True if checkpoints write one of its artifacts to a separate file."""
    scores: tuple[float, ...] = ()
    """Scores of all evaluations; empty if there was one."""
    seconds: float = 0.0
    """Total evaluation time."""
    num_lost: int = 0
    """Workers lost while evaluating it."""
    is_forgeable: bool = False
    """True if it ran in the evaluator's process and so could forge its score."""
    prompt_tokens: int | None = 0
    completion_tokens: int | None = 0
    """Tokens of the models that judge quality and novelty."""
    num_tuning: int = 0
    """Evaluations of variants that differ only in their numbers."""
    rewards: tuple[float, ...] = ()
    """For a prompt: rewards on the search tasks, in task order."""
    num_rollouts: int = 0
    """Answers to tasks that scoring took."""
    embedding: str = ""
    """Embedding as `pack_vector` writes it; empty without one."""
    embedding_error: str = ""
    """Reason why the configured comparison with earlier programs failed."""
    failure: AttemptFailure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptDecision:
    """The end of an attempt. Without a failure, its program joined the population."""

    failure: AttemptFailure | None = None
    elapsed_s: float = 0.0
    """Run time at the decision, in seconds over all processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """All stages that an attempt has completed."""

    planned: Planned | None = None
    generated: Generated | None = None
    evaluated: Evaluated | None = None
    decision: AttemptDecision | None = None
    epoch: int = 0
    """Epoch of the last lease."""
    num_lost: int = 0

    @property
    def failure(self) -> AttemptFailure | None:
        """Failure of the stage that failed, if any."""
        stages = (self.generated, self.evaluated)
        return next((s.failure for s in stages if s is not None and s.failure is not None), None)


Record = TypeVar("Record", Planned, Generated, Evaluated, AttemptDecision)
_ADAPTERS: dict[type, TypeAdapter[Any]] = {
    kind: TypeAdapter(kind) for kind in (Planned, Generated, Evaluated, AttemptDecision)
}


def to_data(record: Planned | Generated | Evaluated | AttemptDecision) -> dict[str, Any]:
    """Convert a record to a JSON object."""
    data: dict[str, Any] = _ADAPTERS[type(record)].dump_python(record, mode="json")
    return data


def from_data(kind: type[Record], data: Mapping[str, Any]) -> Record:
    """Convert the output of `to_data` back to a record."""
    record: Record = _ADAPTERS[kind].validate_python(dict(data))
    return record


def read_stages(run: RunView, *, series: str = "") -> tuple[dict[int, Stages], list[int]]:
    """Return all attempts of a run by number, and the decided ones in order of decision."""
    known: dict[int, dict[str, Any]] = {}
    order: list[int] = []
    for _, attempt in read_attempts(run, series=series):
        fields = known.setdefault(attempt.number, {})
        _update_fields(fields, attempt)
        if attempt.state in {"committed", "failed"}:
            order.append(attempt.number)
    return {number: Stages(**fields) for number, fields in known.items()}, order


def _update_fields(fields: dict[str, Any], attempt: Attempt) -> None:
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
