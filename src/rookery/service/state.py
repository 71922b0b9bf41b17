"""What the service knows of its tenants, in memory, and the write-ahead log that restores it.

One document saves the state. Lookups name the tenant: what another tenant has looks as if it did
not exist. The log says what was accepted and what was done, in the journal of a run:

| entry    | written                           | after a crash                                 |
|----------|-----------------------------------|-----------------------------------------------|
| command  | before the client is told of it   | applied again, or queued again                |
| began    | before works are computed         | those that are not done were computed then    |
| ended    | when they are left unfinished     | they were left in order: it does not count    |
| pass     | before its results can be fetched | the same requests are computed together again |
| answer   | before the sample can be fetched  | the sample is given as it was                 |
| snapshot | with the document of the state    | entries before it are in the document         |

An entry is written in the same turn of the event loop as the change in memory that it tells of, so
that the journal has them in the order in which they happened.
"""

import asyncio
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from rookery.concurrency import run_in_thread
from rookery.errors import RunError
from rookery.runs import Entry, Run
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
        """By path."""
        self.adapters: dict[tuple[str, str], RegisteredAdapter] = {}
        """By tenant and adapter id."""
        self.losses: dict[str, CustomLoss] = {}
        self.sequences: dict[str, dict[str, StoredSequence]] = {}
        """By tenant and id; each tenant's oldest first."""

    def session(self, tenant: str, session_id: str) -> Session:
        """One that is not over."""
        session = self.sessions.get(session_id)
        if session is None or session.tenant != tenant:
            raise missing("session", session_id)
        if session.is_over:
            raise Refusal(410, f"The session {session_id} is over: make a new ServiceClient.")
        return session

    def model(self, tenant: str, model_id: str) -> Model:
        """One that can be trained."""
        model = self.run(tenant, model_id)
        if not model.is_live:
            raise bad(
                f"The session of model {model_id} is over, and its training with it: go on from a "
                "checkpoint with create_training_client_from_state."
            )
        return model

    def run(self, tenant: str, model_id: str) -> Model:
        """A model, also after its session."""
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
        """The tenant's own or, unless they `must_own` it, a published one."""
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
        """A checkpoint to sample from or to train on."""
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
        """A loss that a client of the tenant made."""
        loss = self.losses.get(loss_id)
        if loss is None or loss.tenant != tenant:
            raise missing("custom loss", loss_id)
        return loss

    def sequence(self, tenant: str, sequence_id: str) -> StoredSequence:
        """A turn that the tenant stored."""
        sequence = self.sequences.get(tenant, {}).get(sequence_id)
        if sequence is None:
            raise missing("sequence", sequence_id)
        return sequence

    def own_checkpoints(self, tenant: str, *, now: float) -> list[Checkpoint]:
        """Those of a tenant that have not expired, newest first."""
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
        """By tenant: models that ended without a checkpoint, the oldest first."""
        saved = {checkpoint.model_id for checkpoint in self.checkpoints.values()}
        runs: dict[str, list[str]] = {}
        for model in self.models.values():
            if not model.is_live and model.id not in saved:
                runs.setdefault(model.tenant, []).append(model.id)
        return runs

    def older_samplers(self, *, unnamed: int, named: int) -> list[SamplingSession]:
        """All but the newest: of weights saved without a name so many of each session, of the
        others of each tenant."""
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
        """The digests that are in use."""
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
        """All of it as it is now, for a document."""
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
        """From the document of what `read` gave."""
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
    """What a restarted service begins with."""

    document: dict[str, Any] | None
    """Of the last snapshot; None when there was none."""
    snapshot_seq: int
    """Entries up to here are in the document."""
    entries: Sequence[Entry]
    """Since the oldest request that was not done then."""


class Wal:
    """The journal and the snapshots of one service."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._journal = run.open_journal()
        self.num_bytes = 0
        """Written since the last snapshot."""
        self._failed = asyncio.Event()
        self._error: RunError | None = None

    async def watch(self) -> None:
        """Ends with the error of the journal, if it has one: nothing can be promised after it."""
        await self._failed.wait()
        self.check()

    def check(self) -> None:
        """Raise what went wrong, if anything did."""
        if self._error is not None:
            raise RunError(str(self._error)) from self._error

    def append(self, header: Mapping[str, Any], body: bytes = b"") -> "asyncio.Future[list[int]]":
        """Its number, when it is durable. It has its place in the journal when this returns, and
        keeps it whoever stops waiting."""
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
        """The entry whose number separates what is in the document from what is not."""
        self.num_bytes = 0
        return (await self.append({"entry": "snapshot"}))[0]

    async def finish_snapshot(
        self, document: Mapping[str, Any], *, seq: int, oldest_pending: int | None
    ) -> None:
        """Make the document, whose ends may be JsonRows, durable; then drop the entries that nobody
        needs any more."""
        cut = seq if oldest_pending is None else min(seq, oldest_pending - 1)
        blob = await run_in_thread(lambda: self.run.blobs.put_bytes(encode(document)))
        await self.run.append(SNAPSHOT, {"blob": blob, "journal": seq, "cut": cut})
        await self._journal.cut(through=cut)

    def prune(self, *, keep: set[str]) -> int:
        """Delete blobs that are neither named nor the last snapshot. Waits for the disk."""
        last = self.run.last(SNAPSHOT)
        kept = {*keep, *([str(last.payload["blob"])] if last else [])}
        return self.run.blobs.prune(keep=kept & set(self.run.blobs.digests()))

    def read(self) -> Restart:
        """What to begin with. Waits for the disk."""
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
    """The header and the body of an entry."""
    header, _, body = data.partition(b"\0")
    return json.loads(header), body
