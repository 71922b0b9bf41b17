"""Requests that change the state at once, with one function each.

    done = apply(state, command)

A function refuses before it changes anything, and depends only on the command and the state: after
a restart, the same commands in the same order give the same state. Limits may change at a restart,
so they are checked before.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from rookery.service.records import (
    Checkpoint,
    CustomLoss,
    Model,
    RegisteredAdapter,
    SamplingSession,
    Session,
    StoredSequence,
)
from rookery.service.requests import (
    CopyWeights,
    CreateCustomLoss,
    CreateSamplingSession,
    CreateSession,
    GetInfo,
    JoinSamplingSession,
)
from rookery.service.state import State
from rookery.service.work import Command, bad, missing
from rookery.types import LoraShape

__all__ = [
    "AdapterId",
    "Applied",
    "CheckpointPath",
    "CheckpointTtl",
    "EndSampler",
    "EndSession",
    "ForgetModels",
    "NewAdapter",
    "SequenceId",
    "StoreSequence",
    "apply",
    "is_immediate",
]

Reply = dict[str, Any]
MAX_ENDED = 1000
"""Ended sessions without training that are kept per tenant: they are in every snapshot."""
MAX_SEQUENCES = 1000
"""Stored turns that are kept per tenant: they are in every snapshot."""


class EndSession(BaseModel):
    """Ends a session that its client finished, or that had no heartbeat."""

    session_id: str


class EndSampler(BaseModel):
    """Ends a sampling session that is no longer used."""

    sampling_session_id: str


class ForgetModels(BaseModel):
    """Forgets models that ended long ago without a checkpoint."""

    model_ids: list[str]


class CheckpointPath(BaseModel):
    """Names a checkpoint."""

    path: str


class CheckpointTtl(BaseModel):
    """Sets when a checkpoint expires."""

    path: str
    expires: float | None


class NewAdapter(BaseModel):
    """Registers an adapter whose files are stored."""

    adapter_id: str
    base_model: str
    blob: str
    size_bytes: int
    lora_path: str
    session_id: str = ""
    rank: int
    train_attn: bool
    train_mlp: bool
    train_unembed: bool


class StoreSequence(BaseModel):
    """Stores a turn of a chat."""

    id: str
    model: str
    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]


class SequenceId(BaseModel):
    """Names a stored turn."""

    id: str


class AdapterId(BaseModel):
    """Names a registered adapter."""

    adapter_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """Result of a command."""

    reply: Reply = field(default_factory=dict)
    ended_models: Sequence[Model] = ()
    """Models that are no longer trained."""
    ended_owners: Collection[str] = ()
    """Sessions, sampling sessions and models whose results nobody fetches any more."""
    result_owner: str = ""
    """Owner of the reply as a result, for clients that fetch one; empty for none."""


def apply(state: State, command: Command) -> Applied:
    """Change the state, or raise a Refusal."""
    request, handle = _HANDLERS[command.kind]
    done = handle(state, command, request.model_validate_json(command.body))
    return done if isinstance(done, Applied) else Applied(reply=done)


def is_immediate(kind: str) -> bool:
    """True if a command is done when it is accepted; others take their turn."""
    return kind in _HANDLERS


def _create_session(state: State, command: Command, request: CreateSession) -> Reply:
    state.sessions[command.id] = Session(
        id=command.id,
        tenant=command.tenant,
        created=command.time,
        tags=request.tags,
        metadata=request.user_metadata,
        display_name=request.display_name,
    )
    return {"type": "create_session", "session_id": command.id}


def _end_session(state: State, command: Command, request: EndSession) -> Applied:
    session = state.sessions.get(request.session_id)
    if session is None or session.tenant != command.tenant:
        raise missing("session", request.session_id)
    session.is_over = True
    models = state.models_of(session.id)
    for model in models:
        model.is_live = False
    samplers = [s.id for s in state.samplers.values() if s.session_id == session.id]
    for sampler_id in samplers:
        del state.samplers[sampler_id]
    for loss in [loss for loss in state.losses.values() if loss.session_id == session.id]:
        del state.losses[loss.id]
    for adapter in [one for one in state.adapters.values() if one.session_id == session.id]:
        _forget_adapter(state, command.tenant, adapter.adapter_id)
    _forget_ended(state, command.tenant)
    owners = {session.id, *samplers, *(model.id for model in models)}
    return Applied(ended_models=models, ended_owners=owners)


def _forget_ended(state: State, tenant: str) -> None:
    """Forget the oldest sessions without training beyond `MAX_ENDED`."""
    trained = {model.session_id for model in state.models.values()}
    ended = [
        session.id
        for session in state.sessions.values()
        if session.is_over and session.tenant == tenant and session.id not in trained
    ]
    for session_id in ended[:-MAX_ENDED]:
        del state.sessions[session_id]


def _end_model(state: State, command: Command, request: GetInfo) -> Applied:
    """Idempotent."""
    model = state.run(command.tenant, request.model_id)
    ended, model.is_live = [model] if model.is_live else [], False
    return Applied(
        reply={"type": "unload_model", "model_id": model.id},
        ended_models=ended,
        ended_owners=[model.id for model in ended],
        result_owner=model.id,
    )


def _forget_models(state: State, _: Command, request: ForgetModels) -> Reply:
    """Spares models to which a checkpoint was copied meanwhile."""
    for model_id in set(request.model_ids) - {
        checkpoint.model_id for checkpoint in state.checkpoints.values()
    }:
        state.models.pop(model_id, None)
    return {}


def _end_sampler(state: State, command: Command, request: EndSampler) -> Applied:
    sampler = state.sampler(command.tenant, request.sampling_session_id)
    del state.samplers[sampler.id]
    return Applied(ended_owners=[sampler.id])


def _create_sampler(state: State, command: Command, request: CreateSamplingSession) -> Reply:
    session = state.session(command.tenant, request.session_id)
    sampler_id, path, blob, base_model = request.sampler_id, "", "", request.base_model or ""
    if request.model_path:
        path = request.model_path
        source = state.checkpoint(command.tenant, path, now=command.time)
        base_model, blob = source.base_model, source.blob
    known = state.samplers.get(sampler_id)
    if known is not None and (known.path, known.base_model) != (path, base_model):
        raise bad(f"The sampling session {sampler_id} was made before, of another model.")
    if known is None:
        state.samplers[sampler_id] = SamplingSession(
            id=sampler_id,
            session_id=session.id,
            tenant=command.tenant,
            base_model=base_model,
            path=path,
            blob=blob,
        )
    return {"type": "create_sampling_session", "sampling_session_id": sampler_id}


def _join_sampler(state: State, command: Command, request: JoinSamplingSession) -> Reply:
    sampler = state.sampler(command.tenant, request.sampling_session_id)
    sampler.num_joined += 1
    return {"type": "join_sampling_session", "client_counter": sampler.num_joined}


def _create_loss(state: State, command: Command, request: CreateCustomLoss) -> Applied:
    session = state.session(command.tenant, request.session_id)
    loss = CustomLoss(
        id=f"{session.id}:loss:{request.custom_loss_seq_id}",
        session_id=session.id,
        tenant=command.tenant,
        name=request.name,
        inputs=[entry.model_dump() for entry in request.inputs],
        graph=request.graph,
    )
    if state.losses.setdefault(loss.id, loss) != loss:
        raise bad(f"The custom loss {loss.id} was made before, with another graph.")
    reply = {"type": "create_custom_loss", "loss_id": loss.id}
    return Applied(reply=reply, result_owner=session.id)


def _delete_checkpoint(state: State, command: Command, request: CheckpointPath) -> Reply:
    checkpoint = state.checkpoints.get(request.path)
    if checkpoint is None or checkpoint.tenant != command.tenant:
        raise missing("checkpoint", request.path)
    del state.checkpoints[request.path]
    return {}


def _publish(state: State, command: Command, request: CheckpointPath) -> Reply:
    """Publish or unpublish a checkpoint."""
    checkpoint = state.checkpoint(command.tenant, request.path, now=command.time, must_own=True)
    checkpoint.is_public = command.kind == "publish_checkpoint"
    return {}


def _set_ttl(state: State, command: Command, request: CheckpointTtl) -> Reply:
    checkpoint = state.checkpoint(command.tenant, request.path, now=command.time, must_own=True)
    checkpoint.expires = request.expires
    return {}


def _copy(state: State, command: Command, request: CopyWeights) -> Reply:
    source = state.checkpoint(command.tenant, request.source_path, now=command.time)
    if request.session_id is None or request.model_seq_id is None:
        raise bad("This service has no projects: give session_id and model_seq_id to copy to.")
    session = state.session(command.tenant, request.session_id)
    model_id = f"{session.id}:train:{request.model_seq_id}"
    if model_id not in state.models:
        state.models[model_id] = Model(
            id=model_id,
            session_id=session.id,
            tenant=command.tenant,
            base_model=source.base_model,
            lora=source.lora,
            created=command.time,
            last_request=command.time,
            is_live=False,
        )
    ttl_s = request.ttl_seconds
    copy = Checkpoint(
        model_id=model_id,
        kind=source.kind,
        name=source.name,
        tenant=command.tenant,
        base_model=source.base_model,
        lora=source.lora,
        created=command.time,
        blob=source.blob,
        size_bytes=source.size_bytes,
        expires=None if ttl_s is None else command.time + ttl_s,
        metadata=source.metadata,
    )
    known = state.checkpoints.setdefault(copy.path, copy)
    if known.blob != copy.blob:
        raise bad(f"There is a checkpoint {copy.path} already: copy to another model_seq_id.")
    return {"tinker_path": copy.path}


def _register_adapter(state: State, command: Command, request: NewAdapter) -> Reply:
    """Register it under its name for sampling, and as a checkpoint for training."""
    if request.session_id:
        state.session(command.tenant, request.session_id)  # may have ended meanwhile
    _forget_adapter(state, command.tenant, request.adapter_id)
    model_id = f"adapter-{command.id.removeprefix('change-')}"
    parts = {"rank", "train_attn", "train_mlp", "train_unembed"}
    shape = LoraShape(seed=0, **request.model_dump(include=parts))
    state.models[model_id] = Model(
        id=model_id,
        session_id="",
        tenant=command.tenant,
        base_model=request.base_model,
        lora=shape,
        created=command.time,
        last_request=command.time,
        is_live=False,
    )
    checkpoint = Checkpoint(
        model_id=model_id,
        kind="weights",
        name=request.adapter_id,
        tenant=command.tenant,
        base_model=request.base_model,
        lora=shape,
        created=command.time,
        blob=request.blob,
        size_bytes=request.size_bytes,
    )
    state.checkpoints[checkpoint.path] = checkpoint
    adapter = RegisteredAdapter(
        tenant=command.tenant,
        adapter_id=request.adapter_id,
        base_model=request.base_model,
        blob=request.blob,
        lora_path=request.lora_path,
        session_id=request.session_id,
        created=command.time,
        tinker_path=checkpoint.path,
    )
    state.adapters[command.tenant, request.adapter_id] = adapter
    return adapter.document()


def _remove_adapter(state: State, command: Command, request: AdapterId) -> Reply:
    state.adapter(command.tenant, request.adapter_id)
    _forget_adapter(state, command.tenant, request.adapter_id)
    return {}


def _forget_adapter(state: State, tenant: str, adapter_id: str) -> None:
    """Forget an adapter with its checkpoint, if that is left, and the run that lists it."""
    known = state.adapters.pop((tenant, adapter_id), None)
    if known is not None and known.tinker_path:
        state.checkpoints.pop(known.tinker_path, None)
        state.models.pop(known.tinker_path.split("/")[2], None)


def _store_sequence(state: State, command: Command, request: StoreSequence) -> Reply:
    """Beyond `MAX_SEQUENCES`, the tenant's oldest turn is dropped."""
    sequences = state.sequences.setdefault(command.tenant, {})
    sequences[request.id] = StoredSequence(
        tenant=command.tenant, created=command.time, **request.model_dump()
    )
    if len(sequences) > MAX_SEQUENCES:
        del sequences[next(iter(sequences))]
    return {}


def _remove_sequence(state: State, command: Command, request: SequenceId) -> Reply:
    sequence = state.sequence(command.tenant, request.id)
    del state.sequences[command.tenant][sequence.id]
    return {}


Handler = Callable[[State, Command, Any], Reply | Applied]
_HANDLERS: dict[str, tuple[type[BaseModel], Handler]] = {
    "create_session": (CreateSession, _create_session),
    "end_session": (EndSession, _end_session),
    "unload_model": (GetInfo, _end_model),
    "forget_models": (ForgetModels, _forget_models),
    "end_sampler": (EndSampler, _end_sampler),
    "create_sampling_session": (CreateSamplingSession, _create_sampler),
    "create_custom_loss": (CreateCustomLoss, _create_loss),
    "join_sampling_session": (JoinSamplingSession, _join_sampler),
    "delete_checkpoint": (CheckpointPath, _delete_checkpoint),
    "publish_checkpoint": (CheckpointPath, _publish),
    "unpublish_checkpoint": (CheckpointPath, _publish),
    "set_checkpoint_ttl": (CheckpointTtl, _set_ttl),
    "copy_weights": (CopyWeights, _copy),
    "store_sequence": (StoreSequence, _store_sequence),
    "remove_sequence": (SequenceId, _remove_sequence),
    "register_adapter": (NewAdapter, _register_adapter),
    "remove_adapter": (AdapterId, _remove_adapter),
}
