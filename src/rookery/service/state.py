"""State of all tenants in memory, and the write-ahead log that restores it.

One document saves the state. Lookups name the tenant: another tenant's things seem not to exist.
The log records in a run's journal what was accepted and what was done:

| entry    | written                           | after a crash                                 |
|----------|-----------------------------------|-----------------------------------------------|
| command  | before the client is told of it   | applied again, or queued again                |
| began    | before works are computed         | works that are not done died in computation   |
| ended    | when they are left unfinished     | the process did not die: it does not count    |
| pass     | before its results can be fetched | the same requests are computed together again |
| answer   | before the sample can be fetched  | the sample is given as it was                 |
| snapshot | with the document of the state    | entries before it are in the document         |

An entry is written in the same turn of the event loop as the change in memory that it records, so
that the journal has them in order.
"""

import asyncio
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from rookery.errors import RunError
from rookery.runs import Entry, Run
from rookery.runtime.concurrency import run_in_thread
from rookery.service.records import (
    Checkpoint,
    CustomLoss,
    JsonRows,
    Model,
    RegisteredAdapter,
    SamplingSession,
    Session,
    StoredSequence,
    encode,
    read_records,
)
from rookery.service.work import Command, Refusal, bad, missing
from rookery.types import LoraShape

__all__ = ["Restart", "State", "Wal", "read_entry"]


_PATH = re.compile(
    r"tinker://(?P<model>[^/]+)/(?P<kind>weights|sampler_weights|external_weights)/(?P<name>[^/]+)"
)


class State:
    """Sessions, models, sampling sessions, checkpoints and adapters of all tenants."""

    def __init__(self) -> None:
        self.sessions: dict[str, Session] = {}
        self.models: dict[str, Model] = {}
        self.samplers: dict[str, SamplingSession] = {}
        self.checkpoints: dict[str, Checkpoint] = {}
        """Checkpoints by path."""
        self.adapters: dict[tuple[str, str], RegisteredAdapter] = {}
        """Registered adapters by tenant and adapter id."""
        self.losses: dict[str, CustomLoss] = {}
        self.sequences: dict[str, dict[str, StoredSequence]] = {}
        """Stored sequences by tenant and id, oldest first."""

    def session(self, tenant: str, session_id: str) -> Session:
        """Return an open session."""
        session = self.sessions.get(session_id)
        if session is None or session.tenant != tenant:
            raise missing("session", session_id)
        if session.is_over:
            raise Refusal(410, f"The session {session_id} is over: make a new ServiceClient.")
        return session

    def model(self, tenant: str, model_id: str) -> Model:
        """Return a model that can be trained."""
        model = self.run(tenant, model_id)
        if not model.is_live:
            raise bad(
                f"The session of model {model_id} is over, and its training with it: go on from a "
                "checkpoint with create_training_client_from_state."
            )
        return model

    def run(self, tenant: str, model_id: str) -> Model:
        """Return a model, even after its session."""
        model = self.models.get(model_id)
        if model is None or model.tenant != tenant:
            raise missing("model", model_id)
        return model

    def sampler(self, tenant: str, sampler_id: str) -> SamplingSession:
        sampler = self.samplers.get(sampler_id)
        if sampler is None or sampler.tenant != tenant:
            raise missing("sampling session", sampler_id)
        return sampler

    def checkpoint(
        self, tenant: str, path: str, *, now: float, must_own: bool = False
    ) -> Checkpoint:
        """Return the tenant's own checkpoint or, unless `must_own`, a published one."""
        if _PATH.fullmatch(path) is None:
            raise bad(
                f"{path!r:.300} is not a checkpoint: write "
                "tinker://MODEL_ID/weights/NAME or tinker://MODEL_ID/sampler_weights/NAME."
            )
        checkpoint = self.checkpoints.get(path)
        if checkpoint is None or (
            checkpoint.tenant != tenant and (must_own or not checkpoint.is_public)
        ):
            raise missing("checkpoint", path)
        if checkpoint.expires is not None and checkpoint.expires <= now:
            raise missing("checkpoint", path)
        return checkpoint

    def weights(self, tenant: str, path: str, *, now: float) -> Checkpoint:
        """Return a checkpoint to sample from or to train on."""
        checkpoint = self.checkpoint(tenant, path, now=now)
        if checkpoint.kind == "external_weights":
            raise bad(
                f"{path!r:.300} is there to be downloaded, and may be merged or encrypted: sample "
                "from weights or sampler_weights, and load weights."
            )
        return checkpoint

    def adapter(self, tenant: str, adapter_id: str) -> RegisteredAdapter:
        adapter = self.adapters.get((tenant, adapter_id))
        if adapter is None:
            names = ", ".join(name for who, name in self.adapters if who == tenant) or "none"
            raise Refusal(
                404, f"There is no adapter {adapter_id!r:.200}. Your adapters: {names:.300}."
            )
        return adapter

    def loss(self, tenant: str, loss_id: str) -> CustomLoss:
        loss = self.losses.get(loss_id)
        if loss is None or loss.tenant != tenant:
            raise missing("custom loss", loss_id)
        return loss

    def sequence(self, tenant: str, sequence_id: str) -> StoredSequence:
        sequence = self.sequences.get(tenant, {}).get(sequence_id)
        if sequence is None:
            raise missing("sequence", sequence_id)
        return sequence

    def own_checkpoints(self, tenant: str, *, now: float) -> list[Checkpoint]:
        """Return a tenant's unexpired checkpoints, newest first."""
        checkpoints = [
            checkpoint
            for checkpoint in self.checkpoints.values()
            if checkpoint.tenant == tenant
            and (checkpoint.expires is None or checkpoint.expires > now)
        ]
        return sorted(checkpoints, key=lambda checkpoint: checkpoint.created, reverse=True)

    def models_of(self, session_id: str) -> list[Model]:
        return [model for model in self.models.values() if model.session_id == session_id]

    def unsaved_runs(self) -> dict[str, list[str]]:
        """Return models that ended without a checkpoint, by tenant, oldest first."""
        saved = {checkpoint.model_id for checkpoint in self.checkpoints.values()}
        runs: dict[str, list[str]] = {}
        for model in self.models.values():
            if not model.is_live and model.id not in saved:
                runs.setdefault(model.tenant, []).append(model.id)
        return runs

    def older_samplers(self, *, unnamed: int, named: int) -> list[SamplingSession]:
        """Return all sampling sessions but the newest: per session, `unnamed` of weights saved
        without a name; per tenant, `named` of the others."""
        groups: dict[tuple[bool, str], list[SamplingSession]] = {}
        for sampler in self.samplers.values():
            is_named = not sampler.blob or bool(sampler.path)
            owner = sampler.tenant if is_named else sampler.session_id
            groups.setdefault((is_named, owner), []).append(sampler)
        kept = {True: named, False: unnamed}
        return [
            sampler for (is_named, _), row in groups.items() for sampler in row[: -kept[is_named]]
        ]

    def blobs(self) -> Iterator[str]:
        """Yield the digests of blobs in use."""
        for model in self.models.values():
            if model.is_live and model.snapshot:
                yield model.snapshot
        for sampler in self.samplers.values():
            if sampler.blob:
                yield sampler.blob
        for checkpoint in self.checkpoints.values():
            yield checkpoint.blob
        for adapter in self.adapters.values():
            yield adapter.blob

    def read(self) -> dict[str, JsonRows]:
        """Return the whole state as rows of a document."""
        return {
            "sessions": read_records(self.sessions.values()),
            "models": read_records(self.models.values()),
            "samplers": read_records(self.samplers.values()),
            "checkpoints": read_records(self.checkpoints.values()),
            "adapters": read_records(self.adapters.values()),
            "losses": read_records(self.losses.values()),
            "sequences": read_records(
                chain.from_iterable(map(dict.values, self.sequences.values()))
            ),
        }

    @classmethod
    def restore(cls, document: dict[str, Any]) -> "State":
        """Restore the state from a document made by `read`."""
        state = cls()
        for row in document["sessions"]:
            state.sessions[row["id"]] = Session(**row)
        for row in document["models"]:
            state.models[row["id"]] = Model(**{**row, "lora": LoraShape(**row["lora"])})
        for row in document["samplers"]:
            state.samplers[row["id"]] = SamplingSession(**row)
        for row in document["checkpoints"]:
            checkpoint = Checkpoint(**{**row, "lora": LoraShape(**row["lora"])})
            state.checkpoints[checkpoint.path] = checkpoint
        for row in document["adapters"]:
            state.adapters[row["tenant"], row["adapter_id"]] = RegisteredAdapter(**row)
        for row in document.get("losses", ()):
            state.losses[row["id"]] = CustomLoss(**row)
        for row in document.get("sequences", ()):
            state.sequences.setdefault(row["tenant"], {})[row["id"]] = StoredSequence(**row)
        return state


SNAPSHOT = "snapshot"


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """Snapshot and journal entries for a restart."""

    document: dict[str, Any] | None
    """Document of the last snapshot; None if there is none."""
    snapshot_seq: int
    """Number of the last entry that the document includes."""
    entries: Sequence[Entry]
    """Entries since the oldest request that was not done at the snapshot."""


class Wal:
    """Journal and snapshots of one service."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._journal = run.open_journal()
        self.num_bytes = 0
        """Bytes written since the last snapshot."""
        self._failed = asyncio.Event()
        self._error: RunError | None = None

    async def watch(self) -> None:
        """Wait for an error of the journal and raise it: nothing is durable after one."""
        await self._failed.wait()
        self.check()

    def check(self) -> None:
        """Raise the journal's error, if it has one."""
        if self._error is not None:
            raise RunError(str(self._error)) from self._error

    def append(self, header: Mapping[str, Any], body: bytes = b"") -> "asyncio.Future[list[int]]":
        """Append an entry; the future gives its number once it is durable. The entry has its place
        in the journal on return, even if the caller stops waiting."""
        data = json.dumps(header).encode() + b"\0" + body
        self.num_bytes += len(data)
        stored: asyncio.Future[list[int]]
        try:
            stored = asyncio.wrap_future(self._journal.submit([data]))
        except RunError as error:  # an earlier write failed
            stored = asyncio.get_running_loop().create_future()
            stored.set_exception(error)
        stored.add_done_callback(self._note)
        return stored

    def _note(self, stored: "asyncio.Future[list[int]]") -> None:
        error = None if stored.cancelled() else stored.exception()
        if isinstance(error, RunError) and self._error is None:
            self._error = error
            self._failed.set()

    def append_command(self, command: Command) -> "asyncio.Future[list[int]]":
        return self.append({"entry": "command", **command.header()}, command.body)

    async def begin_snapshot(self) -> int:
        """Append the entry that separates what the document includes from later entries."""
        self.num_bytes = 0
        return (await self.append({"entry": "snapshot"}))[0]

    async def finish_snapshot(
        self, document: Mapping[str, Any], *, seq: int, oldest_pending: int | None
    ) -> None:
        """Make the document durable, with JsonRows as leaves; drop the entries it replaces."""
        cut = seq if oldest_pending is None else min(seq, oldest_pending - 1)
        blob = await run_in_thread(lambda: self.run.blobs.put_bytes(encode(document)))
        await self.run.append(SNAPSHOT, {"blob": blob, "journal": seq, "cut": cut})
        await self._journal.cut(through=cut)

    def prune(self, *, keep: set[str]) -> int:
        """Delete blobs except those in `keep` and the last snapshot. Blocks on the disk."""
        last = self.run.last(SNAPSHOT)
        kept = {*keep, *([str(last.payload["blob"])] if last else [])}
        return self.run.blobs.prune(keep=kept & set(self.run.blobs.digests()))

    def read(self) -> Restart:
        """Return what a restart begins with. Blocks on the disk."""
        last = self.run.last(SNAPSHOT)
        if last is None:
            entries = list(self._journal.entries(after=0))
            return Restart(document=None, snapshot_seq=0, entries=entries)
        payload: Mapping[str, Any] = last.payload
        document = json.loads(self.run.blobs.read_bytes(payload["blob"], verify=True))
        return Restart(
            document=document,
            snapshot_seq=payload["journal"],
            entries=list(self._journal.entries(after=payload["cut"])),
        )


def read_entry(data: bytes) -> tuple[dict[str, Any], bytes]:
    header, _, body = data.partition(b"\0")
    return json.loads(header), body
