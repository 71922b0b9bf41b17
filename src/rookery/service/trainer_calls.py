"""Runs works of one kind as one call of the trainer, and makes their outcomes durable."""

import asyncio
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rookery.errors import RookeryError, RunError, ServiceError, boundary
from rookery.runtime.concurrency import run_in_thread
from rookery.service.config import encrypt_folder
from rookery.service.context import ServiceContext
from rookery.service.records import Checkpoint, Model, SamplingSession
from rookery.service.requests import (
    AdamParams,
    LoadWeights,
    OptimStepRequest,
    SaveExternal,
    SaveForSampler,
    SaveWeights,
)
from rookery.service.work import (
    GIVEN_UP,
    Backend,
    Category,
    Command,
    Known,
    Refusal,
    Result,
    Training,
    failed,
    finished,
)
from rookery.types import OptimStep, TrainOutput

__all__ = [
    "ADAPTER",
    "STATE",
    "PassRecord",
    "TrainerCalls",
    "WorkOutcome",
    "finish_pass",
]

# The outcome of a work: its result and its change of the state, durable before it can be fetched.


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRecord:
    """Journal entry of one call: its works in order, and what a repetition cannot give again."""

    ids: Sequence[str]
    effects: Mapping[str, Mapping[str, Any]]
    failures: Mapping[str, tuple[str, Category]]
    dropped: Sequence[str] = ()
    """Checkpoints removed for newer ones: `keep_last` may differ after a restart."""

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
class WorkOutcome:
    """Result of one work, and what it changes."""

    work: Command
    result: Result
    effect: Mapping[str, Any] = field(default_factory=dict)
    """State change: {"checkpoint": {...}}, {"sampler": {...}} or {"loaded": blob}."""
    error: tuple[str, Category] | None = None

    @classmethod
    def failure(cls, work: Command, sentence: str, category: Category) -> "WorkOutcome":
        return cls(work=work, result=failed(sentence, category), error=(sentence, category))


async def finish_pass(
    context: ServiceContext, outcomes: Sequence[WorkOutcome], record: PassRecord | None
) -> None:
    """Change the state, make the pass durable, then publish the results. A pass with a record is
    durable already: a restart repeats it."""
    if record is not None:
        _check_repeated(outcomes, record)
    for outcome in outcomes:
        _apply(context, outcome)
        context.pending.remove(outcome.work.id)
    dropped = _find_surplus(context, outcomes) if record is None else record.dropped
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


def _check_repeated(outcomes: Sequence[WorkOutcome], record: PassRecord) -> None:
    """RunError if a work fails that succeeded before a restart: the weights would differ."""
    for outcome in outcomes:
        if outcome.error is not None and outcome.work.id not in record.failures:
            raise RunError(
                f"A {outcome.work.kind} of {outcome.work.owner} that was done before the restart "
                f"cannot be repeated: {outcome.error[0]} Nothing is lost: start the service again "
                "when that is mended, with the settings it had."
            )


def _apply(context: ServiceContext, outcome: WorkOutcome) -> None:
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


def _find_surplus(context: ServiceContext, outcomes: Sequence[WorkOutcome]) -> list[str]:
    """Return paths of unpublished checkpoints beyond `keep_last`, of each kind saved now."""
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


Read = TypeVar("Read")
STATE, ADAPTER = "state", "adapter"
"""Parts of a checkpoint: the trainer's state as a file, the weights as a PEFT folder."""

VERSION_DIGITS = 16
"""Length of a content hash that tells weights apart."""
_KINDS = {
    "save_weights": "weights",
    "save_weights_for_sampler": "sampler_weights",
    "save_weights_external": "external_weights",
}


class TrainerCalls:
    """Calls of the trainers, for the training loop."""

    def __init__(self, context: ServiceContext) -> None:
        self._context = context

    def sort_out(
        self, works: Sequence[Command], record: PassRecord | None
    ) -> tuple[list[Command], list[WorkOutcome]]:
        """Return the works to compute, and outcomes of the others: refused on arrival, failed
        before the restart, or of a model that has ended."""
        doable: list[Command] = []
        outcomes: list[WorkOutcome] = []
        for work in works:
            model = self._context.state.models[work.owner]
            if record is not None and work.id in record.failures:
                outcomes.append(WorkOutcome.failure(work, *record.failures[work.id]))
            elif work.kind == "refused":
                outcomes.append(WorkOutcome.failure(work, work.body.decode(), "user"))
            elif record is not None and work.kind in _KINDS:
                outcomes.append(_saved(work, record.effects[work.id]))
            elif record is None and self._context.pending.is_given_up(work):
                outcomes.append(WorkOutcome.failure(work, GIVEN_UP, "user"))
            elif not model.is_live and record is None:
                outcomes.append(
                    WorkOutcome.failure(
                        work, "This model was unloaded, or its session ended.", "user"
                    )
                )
            elif model.failure:
                sentence = f"The model could not be made: {model.failure}"
                outcomes.append(WorkOutcome.failure(work, sentence, "user"))
            else:
                doable.append(work)
        return doable, outcomes

    async def call(self, works: Sequence[Command], record: PassRecord | None) -> list[WorkOutcome]:
        """Compute works of one kind and one base model; return one outcome each."""
        match works[0].kind:
            case "forward_backward" | "forward":
                return await self._train(works)
            case "optim_step":
                return await self._step(works)
            case "create_model":
                return [await self._create(work) for work in works]
            case "load_weights":
                return [await self._load(work, record) for work in works]
            case _:
                return [await self._save(work) for work in works]

    async def _train(self, works: Sequence[Command]) -> list[WorkOutcome]:
        backend = self._context.backend(works[0].base_model)
        context_tokens = backend.engine.context_tokens
        trained, failures = await asyncio.to_thread(
            self._read_each, works, lambda work: self._read(work, context_tokens=context_tokens)
        )
        if not trained:
            return failures
        trainer = backend.trainer
        call = trainer.forward if works[0].kind == "forward" else trainer.forward_backward
        outputs = await call([training.request for _, training in trained])
        return failures + await asyncio.to_thread(
            lambda: [_trained(*one, output) for one, output in zip(trained, outputs, strict=True)]
        )

    def _read(self, work: Command, *, context_tokens: int | None) -> tuple[Command, Training]:
        known = Known(
            context_tokens=context_tokens,
            loss=partial(self._context.state.loss, work.tenant),
            result=partial(self._context.futures.result_of_key, tenant=work.tenant),
        )
        return work, self._context.format.read_training(work, known)

    def _read_each(
        self, works: Sequence[Command], read: Callable[[Command], Read]
    ) -> tuple[list[Read], list[WorkOutcome]]:
        """Read the works; return their requests, and outcomes of unreadable ones. A work that was
        valid on arrival may fail alone, as its loss may be gone."""
        requests: list[Read] = []
        failures: list[WorkOutcome] = []
        for work in works:
            try:
                with boundary(ServiceError, "Reading the request failed"):
                    requests.append(read(work))
            except RookeryError as error:
                failures.append(WorkOutcome.failure(work, self._context.sentence(error), "user"))
        return requests, failures

    async def _step(self, works: Sequence[Command]) -> list[WorkOutcome]:
        steps, outcomes = self._read_each(works, lambda work: (work, _optim_step(work)))
        trainer = self._context.backend(works[0].base_model).trainer
        outputs = await trainer.optim_step([step for _, step in steps])
        for (work, _), output in zip(steps, outputs, strict=True):
            if output.error:
                outcomes.append(WorkOutcome.failure(work, output.error, "user"))
                continue
            metrics = {f"{k.removeprefix('train/')}:mean": v for k, v in output.metrics.items()}
            outcomes.append(WorkOutcome(work=work, result=finished({"metrics": metrics})))
        return outcomes

    async def _create(self, work: Command) -> WorkOutcome:
        model = self._model(work)
        await self._context.backend(model.base_model).trainees.create(model.id, model.lora)
        result = finished({"type": "create_model", "model_id": model.id})
        return WorkOutcome(work=work, result=result)

    async def _save(self, work: Command) -> WorkOutcome:
        model = self._model(work)
        request: Any = _save_request(work)
        is_external = work.kind == "save_weights_external"
        path = f"tinker://{model.id}/{_KINDS[work.kind]}/{request.path}"
        may_replace = work.kind == "save_weights" and request.overwrite
        if request.path is not None and path in self._context.state.checkpoints and not may_replace:
            return WorkOutcome.failure(
                work, f"There is a checkpoint {path} already: save under another name.", "user"
            )
        blob, size_bytes = await self._store(
            model,
            has_state=work.kind == "save_weights",
            recipients=request.age_encryption_recipients or () if is_external else (),
            is_merged=is_external and request.merged,
        )
        return _saved(work, _effect(work, model, request, blob, size_bytes))

    async def _store(
        self, model: Model, *, has_state: bool, recipients: Sequence[str], is_merged: bool
    ) -> tuple[str, int]:
        """Store weights, and the trainer's state if `has_state`; return digest and size."""
        backend, blobs = self._context.backend(model.base_model), self._context.wal.run.blobs
        with blobs.stage() as folder:
            if has_state:
                await backend.trainer.save(model.id, folder / STATE)
            await backend.trainees.export(model.id, folder / ADAPTER)
            if is_merged:
                await run_in_thread(_merge, backend, folder / ADAPTER)
            if recipients:
                await run_in_thread(encrypt_folder, folder / ADAPTER, recipients)
            size_bytes = await asyncio.to_thread(_size, folder)
            return await run_in_thread(blobs.put_folder, folder), size_bytes

    async def _load(self, work: Command, record: PassRecord | None) -> WorkOutcome:
        model = self._model(work)
        request = LoadWeights.model_validate_json(work.body)
        backend = self._context.backend(model.base_model)
        try:
            blob = self._source(work, model, request, record)
        except Refusal as refusal:
            return WorkOutcome.failure(work, str(refusal), "user")
        folder = self._context.wal.run.blobs.path(blob)
        if request.optimizer:
            if not (folder / STATE).exists():
                sentence = f"{request.path} has no optimizer state: load it without the optimizer."
                return WorkOutcome.failure(work, sentence, "user")
            await backend.trainer.load(model.id, folder / STATE)
        else:
            await backend.trainees.create(model.id, folder / ADAPTER)
            model.has_loaded = True
        document = {"type": "load_weights", "path": request.path, "model_id": model.id}
        return WorkOutcome(work=work, result=finished(document), effect={"loaded": blob})

    def _source(
        self, work: Command, model: Model, request: LoadWeights, record: PassRecord | None
    ) -> str:
        if record is not None:
            return str(record.effects[work.id]["loaded"])
        source = self._context.state.checkpoint(work.tenant, request.path, now=work.time)
        if source.lora.rank != model.lora.rank or source.base_model != model.base_model:
            raise Refusal(
                400,
                f"{source.path} is of rank {source.lora.rank} on {source.base_model}, and this "
                f"model of rank {model.lora.rank} on {model.base_model}: create it alike.",
            )
        return source.blob

    def _model(self, work: Command) -> Model:
        return self._context.state.models[work.owner]


def _trained(work: Command, training: Training, output: TrainOutput) -> WorkOutcome:
    if output.error:
        return WorkOutcome.failure(work, output.error, "user")
    return WorkOutcome(work=work, result=training.result(output))


def _optim_step(work: Command) -> OptimStep:
    adam = OptimStepRequest.model_validate_json(work.body).adam_params or AdamParams()
    return OptimStep(
        trainee=work.owner,
        learning_rate=adam.learning_rate,
        beta1=adam.beta1,
        beta2=adam.beta2,
        epsilon=adam.eps,
        weight_decay=adam.weight_decay,
        max_grad_norm=adam.grad_clip_norm,
    )


def _save_request(work: Command) -> SaveWeights | SaveForSampler | SaveExternal:
    if work.kind == "save_weights":
        return SaveWeights.model_validate_json(work.body)
    if work.kind == "save_weights_for_sampler":
        return SaveForSampler.model_validate_json(work.body)
    return SaveExternal.model_validate_json(work.body)


def _effect(
    work: Command, model: Model, request: Any, blob: str, size_bytes: int
) -> dict[str, Any]:
    if request.path is None:
        sampler_id = f"{model.session_id}:sample:{request.sampling_session_seq_id}"
        return {"sampler": {"id": sampler_id, "blob": blob}}
    ttl_s = request.ttl_seconds
    row = {
        "kind": _KINDS[work.kind],
        "name": request.path,
        "blob": blob,
        "size_bytes": size_bytes,
        "expires": None if ttl_s is None else work.time + ttl_s,
        "metadata": None if work.kind == "save_weights_external" else request.user_metadata,
    }
    return {"checkpoint": row}


def _saved(work: Command, effect: Any) -> WorkOutcome:
    """Build the result of a save from its effect."""
    document: dict[str, Any] = {"type": work.kind}
    if (sampler := effect.get("sampler")) is not None:
        document["sampling_session_id"] = sampler["id"]
        document["version"] = sampler["blob"][:VERSION_DIGITS]
    else:
        row = effect["checkpoint"]
        document["path"] = f"tinker://{work.owner}/{row['kind']}/{row['name']}"
        if work.kind == "save_weights_external":
            document["size_bytes"] = row["size_bytes"]
    return WorkOutcome(work=work, result=finished(document), effect=effect)


def _merge(backend: Backend, folder: Path) -> None:
    """Replace an adapter by the base model merged with it."""
    adapter = folder.rename(folder.with_name("unmerged"))
    backend.merge(adapter, folder)
    shutil.rmtree(adapter)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
