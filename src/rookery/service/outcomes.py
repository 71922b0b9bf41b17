"""What came of a work: its result, and what it changed; made durable before it can be fetched."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rookery.errors import RunError
from rookery.service.context import ServiceContext
from rookery.service.records import Checkpoint, SamplingSession
from rookery.service.work import Category, Command, Result, failed

__all__ = ["Outcome", "PassRecord", "finish_pass"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRecord:
    """An entry of the journal: the works of one call, in order, and what cannot be repeated."""

    ids: Sequence[str]
    effects: Mapping[str, Mapping[str, Any]]
    failures: Mapping[str, tuple[str, Category]]
    dropped: Sequence[str] = ()
    """Checkpoints that gave way to newer ones: how many are kept may be set anew."""

    @classmethod
    def read(cls, header: Mapping[str, Any]) -> "PassRecord":
        failures = {key: (value[0], value[1]) for key, value in header["failures"].items()}
        return cls(
            ids=header["ids"],
            effects=header["effects"],
            failures=failures,
            dropped=header.get("dropped", ()),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Of one work."""

    work: Command
    result: Result
    effect: Mapping[str, Any] = field(default_factory=dict)
    """What it changed in the state: {"checkpoint": {...}} or {"sampler": {...}}, and the blob that
    was loaded."""
    error: tuple[str, Category] | None = None

    @classmethod
    def failure(cls, work: Command, sentence: str, category: Category) -> "Outcome":
        return cls(work=work, result=failed(sentence, category), error=(sentence, category))


async def finish_pass(
    context: ServiceContext, outcomes: Sequence[Outcome], record: PassRecord | None
) -> None:
    """Change the state, make the pass durable, then let the results be fetched. A pass that has a
    record is durable: it is repeated after a restart."""
    if record is not None:
        _check_repeated(outcomes, record)
    for outcome in outcomes:
        _apply(context, outcome)
        context.pending.remove(outcome.work.id)
    dropped = _outnumbered(context, outcomes) if record is None else record.dropped
    for path in dropped:
        context.state.checkpoints.pop(path, None)
    if record is None:
        header = {
            "entry": "pass",
            "call": outcomes[0].work.kind,
            "ids": [outcome.work.id for outcome in outcomes],
            "effects": {o.work.id: o.effect for o in outcomes if o.effect},
            "failures": {o.work.id: o.error for o in outcomes if o.error is not None},
            "dropped": dropped,
        }
        await context.wal.append(header)
    for outcome in outcomes:
        context.futures.finish(outcome.work.id, outcome.result)


def _check_repeated(outcomes: Sequence[Outcome], record: PassRecord) -> None:
    """What succeeded before a restart must succeed again: without it the weights are others."""
    for outcome in outcomes:
        if outcome.error is not None and outcome.work.id not in record.failures:
            raise RunError(
                f"A {outcome.work.kind} of {outcome.work.owner} that was done before the restart "
                f"cannot be repeated: {outcome.error[0]} Nothing is lost: start the service again "
                "when that is mended, with the settings it had."
            )


def _apply(context: ServiceContext, outcome: Outcome) -> None:
    work, state = outcome.work, context.state
    model = state.models[work.owner]
    model.next_seq = work.seq + 1
    model.last_request = max(model.last_request, work.time)
    if work.kind == "create_model" and outcome.error is not None:
        model.failure = outcome.error[0]
    if (row := outcome.effect.get("checkpoint")) is not None:
        checkpoint = Checkpoint(
            model_id=model.id,
            tenant=model.tenant,
            base_model=model.base_model,
            lora=model.lora,
            created=work.time,
            **row,
        )
        state.checkpoints[checkpoint.path] = checkpoint
    if (row := outcome.effect.get("sampler")) is not None and model.is_live:
        sampler = SamplingSession(
            session_id=model.session_id, tenant=model.tenant, base_model=model.base_model, **row
        )
        state.samplers[sampler.id] = sampler


def _outnumbered(context: ServiceContext, outcomes: Sequence[Outcome]) -> list[str]:
    """Paths of all but the last K of a kind that was saved now, where the config says so. Published
    ones stay."""
    if context.config.keep_last is None:
        return []
    saved = [(o.work.owner, o.effect["checkpoint"]) for o in outcomes if "checkpoint" in o.effect]
    paths: list[str] = []
    for model_id, row in saved:
        same = [
            checkpoint
            for checkpoint in context.state.checkpoints.values()
            if (checkpoint.model_id, checkpoint.kind) == (model_id, row["kind"])
            and not checkpoint.is_public
        ]
        same.sort(key=lambda checkpoint: checkpoint.created)
        paths += [checkpoint.path for checkpoint in same[: -context.config.keep_last]]
    return paths
