"""What came of a work: its result, and what it changed; made durable before it can be fetched."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from rookery.service.desk import Desk
from rookery.service.records import Checkpoint, CheckpointKind, SamplingSession
from rookery.service.work import Category, Command, Result, failed

__all__ = ["Outcome", "PassRecord", "finish_pass"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRecord:
    """An entry of the journal: the works of one call, in order, and what cannot be repeated."""

    ids: Sequence[str]
    effects: Mapping[str, Mapping[str, Any]]
    failures: Mapping[str, tuple[str, Category]]

    @classmethod
    def read(cls, header: Mapping[str, Any]) -> "PassRecord":
        failures = {key: (value[0], value[1]) for key, value in header["failures"].items()}
        return cls(ids=header["ids"], effects=header["effects"], failures=failures)


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


async def finish_pass(desk: Desk, outcomes: Sequence[Outcome], *, is_replay: bool) -> None:
    """Change the state, make the pass durable, then let the results be fetched."""
    for outcome in outcomes:
        _apply(desk, outcome)
        desk.pending.remove(outcome.work.id)
    if not is_replay:
        header = {
            "entry": "pass",
            "call": outcomes[0].work.kind,
            "ids": [outcome.work.id for outcome in outcomes],
            "effects": {o.work.id: o.effect for o in outcomes if o.effect},
            "failures": {o.work.id: o.error for o in outcomes if o.error is not None},
        }
        await desk.wal.append(header)
    for outcome in outcomes:
        desk.futures.finish(outcome.work.id, outcome.result)


def _apply(desk: Desk, outcome: Outcome) -> None:
    work, state = outcome.work, desk.state
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
        _drop_older(desk, model.id, checkpoint.kind)
    if (row := outcome.effect.get("sampler")) is not None and model.is_live:
        sampler = SamplingSession(
            session_id=model.session_id, tenant=model.tenant, base_model=model.base_model, **row
        )
        state.samplers[sampler.id] = sampler


def _drop_older(desk: Desk, model_id: str, kind: str) -> None:
    """Keep the last K of a kind, where the config says so. Those with a published name stay."""
    if desk.config.keep_last is None:
        return
    same = [
        checkpoint
        for checkpoint in desk.state.checkpoints.values()
        if checkpoint.model_id == model_id
        and checkpoint.kind == cast(CheckpointKind, kind)
        and not checkpoint.is_public
    ]
    same.sort(key=lambda checkpoint: checkpoint.created)
    for checkpoint in same[: -desk.config.keep_last]:
        del desk.state.checkpoints[checkpoint.path]
