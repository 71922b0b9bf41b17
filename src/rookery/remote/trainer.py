"""A service's models in training as a Trainer and Trainees."""

import asyncio
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from rookery.errors import TrainError
from rookery.remote.engine import Connection, HttpReply, Samplers, ServiceRefusal, upload
from rookery.remote.records import read_output, train_document
from rookery.runs.disk import write_file
from rookery.runtime.concurrency import together
from rookery.types import (
    Json,
    LoraShape,
    ModelRef,
    OptimStep,
    StepOutput,
    TrainOutput,
    TrainRequest,
)

__all__ = ["ServiceTrainer", "read_states"]

STATE_TTL_S = 30 * 86400
"""Seconds after which the service deletes the state of a run that was never resumed."""


@dataclass(slots=True)
class _Trainee:
    model_id: str
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    """Numbers of its requests, which the service computes in this order."""
    published: ModelRef | None = None
    num_steps: int = 0
    states: list[str] = field(default_factory=list)
    """States of a run: each is kept until the one after the next is saved."""


class ServiceTrainer:
    """Trainees of this session, by name. Requests are numbered in the order of the calls."""

    def __init__(
        self,
        connection: Connection,
        samplers: Samplers,
        *,
        base_model: str,
        has_last_states: bool = False,
    ) -> None:
        """With `has_last_states`, the service keeps a trainee's last two states. A run that is
        killed between saving a state and recording it then finds the previous one."""
        self._has_last_states = has_last_states
        self._connection = connection
        self._samplers = samplers
        self._base_model = base_model
        self._trainees: dict[str, _Trainee] = {}

    async def create(self, trainee: str, start: LoraShape | Path) -> None:
        await self.remove(trainee)
        if isinstance(start, LoraShape):
            self._trainees[trainee] = await self._create(start)
            return
        adapter_id = f"start-{uuid4().hex}"
        path = await upload(self._connection, start, adapter_id, self._base_model)
        try:
            info = await self._connection.post("weights_info", {"tinker_path": path})
            flags = {name: info[name] for name in ("train_attn", "train_mlp", "train_unembed")}
            created = await self._create(LoraShape(rank=info["lora_rank"], seed=0, **flags))
            await self._call(created, "load_weights", {"path": path, "optimizer": False})
        finally:
            await self._connection.delete(f"adapters/{adapter_id}")
        self._trainees[trainee] = created

    async def remove(self, trainee: str) -> None:
        known = self._trainees.pop(trainee, None)
        if known is None:
            return
        await self._connection.submit("unload_model", {"model_id": known.model_id})
        if known.published is not None:
            await self._samplers.drop(known.published)

    async def export(self, trainee: str, folder: Path) -> None:
        state = self._own(trainee)
        name = f"export-{uuid4().hex}"
        await self._call(state, "save_weights_for_sampler", {"path": name})
        item = f"training_runs/{state.model_id}/checkpoints/sampler_weights/{name}"
        try:
            reply = await self._connection.request("GET", f"{item}/external_weights_urls")
            files = {
                file: (await self._connection.request("GET", url)).content
                for file, url in reply.document()["urls"].items()
            }
        finally:
            await self._connection.delete(item)
        await asyncio.to_thread(_write_files, folder, files)

    async def check_loss(self, loss: str, options: Mapping[str, Json]) -> None:
        try:
            await self._connection.post("check_loss", {"loss": loss, "options": dict(options)})
        except ServiceRefusal as refusal:
            raise TrainError(str(refusal)) from refusal

    async def forward_backward(self, requests: Sequence[TrainRequest]) -> list[TrainOutput]:
        return await self._train(requests, forward_only=False)

    async def forward(self, requests: Sequence[TrainRequest]) -> list[TrainOutput]:
        return await self._train(requests, forward_only=True)

    async def optim_step(self, steps: Sequence[OptimStep]) -> list[StepOutput]:
        calls = []
        for step in steps:
            adam = {
                "learning_rate": step.learning_rate,
                "beta1": step.beta1,
                "beta2": step.beta2,
                "eps": step.epsilon,
                "weight_decay": step.weight_decay,
                "grad_clip_norm": step.max_grad_norm,
            }
            calls.append(self._numbered(step.trainee, {"adam_params": adam}))
        outputs = await together(self._step(body) for body in calls)
        for step, output in zip(steps, outputs, strict=True):
            if not output.error:
                self._own(step.trainee).num_steps += 1
        return outputs

    async def save(self, trainee: str, path: Path) -> None:
        """Save the state in the service and its name in the file; delete the one named before."""
        state = self._own(trainee)
        body: dict[str, Any] = {"path": f"state-{uuid4().hex}"}
        if self._has_last_states:
            body["ttl_seconds"] = STATE_TTL_S
        new = str((await self._call(state, "save_weights", body))["path"])
        older = state.states[-1:] if self._has_last_states else []
        document = {"tinker_path": new, "older": older, "num_steps": state.num_steps}
        replaced = await asyncio.to_thread(_replace, path, document)
        for old in {*replaced, *state.states} - {new, *older}:
            await self._delete(old)
        if self._has_last_states:
            state.states = [*older, new]

    async def load(self, trainee: str, path: Path) -> None:
        document = json.loads(await asyncio.to_thread(path.read_text))
        body = {"path": document["tinker_path"], "optimizer": True}
        state = self._own(trainee)
        await self._call(state, "load_weights", body)
        state.num_steps = document["num_steps"]
        if self._has_last_states:
            state.states = [*document["older"], document["tinker_path"]]

    async def forget(self, states: Iterable[str]) -> None:
        """Delete states that no run will resume from. Idempotent."""
        for old in states:
            await self._delete(old)

    def num_steps(self, trainee: str) -> int:
        """Return the number of its steps, including those before a loaded state."""
        return self._own(trainee).num_steps

    async def publish(self, trainee: str) -> ModelRef:
        state = self._own(trainee)
        body = {"sampling_session_seq_id": self._connection.next_number()}
        document = await self._call(state, "save_weights_for_sampler", body)
        ref = ModelRef(name=trainee, version=document["version"])
        await self._samplers.add(ref, document["sampling_session_id"])
        previous, state.published = state.published, ref
        if previous is not None:
            await self._samplers.drop(previous)
        return ref

    async def _create(self, shape: LoraShape) -> _Trainee:
        body = {
            "session_id": self._connection.session_id,
            "model_seq_id": self._connection.next_number(),
            "base_model": self._base_model,
            "lora_config": asdict(shape),
        }
        document = _checked(await self._connection.submit("create_model", body))
        return _Trainee(document["model_id"])

    async def _train(
        self, requests: Sequence[TrainRequest], *, forward_only: bool
    ) -> list[TrainOutput]:
        bodies: list[dict[str, Any] | None] = []
        for request in requests:
            state = self._trainees.get(request.trainee)
            bodies.append(
                None
                if state is None
                else train_document(
                    state.model_id, next(state.numbers), request, forward_only=forward_only
                )
            )
        return await together(
            self._output(request.trainee, body)
            for request, body in zip(requests, bodies, strict=True)
        )

    async def _output(self, trainee: str, body: dict[str, Any] | None) -> TrainOutput:
        if body is None:
            return TrainOutput(error=f"There is no trainee {trainee!r}.")
        try:
            answer = await self._connection.submit("forward_backward", body)
        except ServiceRefusal as refusal:
            return TrainOutput(error=str(refusal))
        return read_output(answer.document())

    async def _step(self, body: dict[str, Any] | str) -> StepOutput:
        if isinstance(body, str):
            return StepOutput(error=body)
        try:
            document = (await self._connection.submit("optim_step", body)).document()
        except ServiceRefusal as refusal:
            return StepOutput(error=str(refusal))
        if "error" in document:
            return StepOutput(error=document["error"])
        metrics = {
            f"train/{name.rpartition(':')[0]}": value for name, value in document["metrics"].items()
        }
        return StepOutput(metrics=metrics)

    def _numbered(self, trainee: str, body: dict[str, Any]) -> dict[str, Any] | str:
        state = self._trainees.get(trainee)
        if state is None:
            return f"There is no trainee {trainee!r}."
        return {"model_id": state.model_id, "seq_id": next(state.numbers), **body}

    async def _call(self, state: _Trainee, path: str, body: dict[str, Any]) -> dict[str, Any]:
        numbered = {"model_id": state.model_id, "seq_id": next(state.numbers), **body}
        return _checked(await self._connection.submit(path, numbered))

    async def _delete(self, path: str) -> None:
        run_id, kind, name = path.removeprefix("tinker://").split("/")
        await self._connection.delete(f"training_runs/{run_id}/checkpoints/{kind}/{name}")

    def _own(self, trainee: str) -> _Trainee:
        state = self._trainees.get(trainee)
        if state is None:
            raise TrainError(f"There is no trainee {trainee!r}: create it first.")
        return state


def _checked(answer: HttpReply) -> dict[str, Any]:
    document = answer.document()
    if "error" in document:
        raise TrainError(str(document["error"]))
    return document


def read_states(path: Path) -> list[str]:
    """Return the states that a file of `save` names; empty without a file."""
    if not path.exists():
        return []
    document = json.loads(path.read_text())
    return [*document["older"], document["tinker_path"]]


def _replace(path: Path, document: Mapping[str, object]) -> list[str]:
    """Replace the file; return the states it named before."""
    old = read_states(path)
    write_file(path, json.dumps(document).encode(), scratch=path.parent)
    return old


def _write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        if Path(name).name != name:
            raise TrainError(f"The service sent the file name {name!r:.100}: it is no plain name.")
        (folder / name).write_bytes(content)
