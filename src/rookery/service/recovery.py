"""Snapshots of a service, and its restart after a kill.

    state = document of the last snapshot + entries of the journal since, in their order

Commands are applied again. Passes are computed again from the same weights and with the same
requests. Drawn samples are answered as they were. Accepted requests that are not done are queued.
"""

import asyncio
from typing import Any, Protocol

from rookery.errors import RunError
from rookery.runtime.concurrency import run_in_thread
from rookery.service.commands import is_immediate
from rookery.service.context import ServiceContext
from rookery.service.futures import Future, Futures
from rookery.service.records import Model
from rookery.service.state import State, read_entry
from rookery.service.trainer_calls import ADAPTER, STATE, PassRecord
from rookery.service.work import Command, Result

__all__ = ["Restarted", "recover", "take_snapshot"]


async def take_snapshot(context: ServiceContext) -> set[str]:
    """Save all changes between passes; return the blobs that a restart may need."""
    for model in list(context.state.models.values()):  # clients create and end models meanwhile
        if _has_weights(model) and model.snapshot_seq != model.next_seq:
            model.snapshot, model.snapshot_bytes = await _save(context, model)
            model.snapshot_seq = model.next_seq
    # A result on the way to the journal has an entry before the snapshot's: it is done.
    pending = [work.id for work in context.pending if not context.futures.is_storing(work.id)]
    blobs = set(context.state.blobs())
    document = {
        "state": context.state.read(),
        "futures": context.futures.read(),
        "pending": pending,
        "attempts": {
            work_id: num for work_id in pending if (num := context.pending.attempts[work_id])
        },
    }
    # In the same turn of the event loop as the document, so that it holds all earlier entries.
    seq = await context.wal.begin_snapshot()
    # A work that is done meanwhile is not queued again: its entry comes after the snapshot's.
    seqs = [number for work_id in pending if (number := context.pending.seq(work_id)) is not None]
    await context.wal.finish_snapshot(document, seq=seq, oldest_pending=min(seqs, default=None))
    context.metrics.snapshots.inc()
    return blobs


class Restarted(Protocol):
    """The service, as seen by a restart."""

    @property
    def context(self) -> ServiceContext: ...

    def apply(self, command: Command) -> object:
        """Apply a request that is done at once."""

    def enqueue(self, command: Command) -> Future:
        """Put a request into its queue."""

    def queue(self, command: Command) -> None:
        """Put a request into its queue if its future exists already."""

    async def replay(self, record: PassRecord) -> None:
        """Compute a pass again."""

    def resume(self) -> None:
        """Start on the accepted requests, once it is known which are done."""


async def recover(service: Restarted) -> None:
    """Restore the service from its journal and snapshot."""
    context = service.context
    restart = await asyncio.to_thread(context.wal.read)
    pending: set[str] = set()
    if restart.document is not None:
        context.state = State.restore(restart.document["state"])
        context.futures = Futures.restore(restart.document["futures"])
        pending = set(restart.document["pending"])
        context.pending.attempts.update(restart.document.get("attempts", {}))
        await _load_models(context)
    for entry in restart.entries:
        header, body = read_entry(entry.data)
        if entry.seq > restart.snapshot_seq:
            context.wal.num_bytes += len(entry.data)
            await _replay(service, header, body, entry.seq)
        elif header["entry"] == "command" and header["id"] in pending:
            service.queue(_command(header, body))
            context.pending.set_durable(header["id"], entry.seq)
        elif header["entry"] == "answer" and header["id"] in pending:
            await _replay(service, header, body, entry.seq)  # it was being stored
    service.resume()


async def _replay(service: Restarted, header: dict[str, Any], body: bytes, seq: int) -> None:
    context = service.context
    match header.pop("entry"):
        case "command":
            command = _command(header, body)
            if is_immediate(command.kind):
                service.apply(command)
                return
            service.enqueue(command).durable.set()
            context.pending.set_durable(command.id, seq)
        case "pass":
            await service.replay(PassRecord.read(header))
        case "answer":
            context.pending.remove(header["id"])
            result = Result(body, form=header["form"], is_failure=header["is_failure"])
            context.futures.finish(header["id"], result)
        case "began":
            context.pending.begin(header["ids"])
        case "ended":
            context.pending.end(header["ids"])
        case "snapshot":
            pass  # the process was killed before the document was durable
        case other:
            raise RunError(f"The journal has an entry of the unknown kind {other!r}.")


def _command(header: dict[str, Any], body: bytes) -> Command:
    fields = {key: value for key, value in header.items() if key != "entry"}
    return Command(body=body, **fields)


async def _load_models(context: ServiceContext) -> None:
    for model in context.state.models.values():
        if not _has_weights(model):
            continue
        backend = context.backend(model.base_model)
        folder = context.wal.run.blobs.path(model.snapshot, verify=True)
        # Loaded weights may have other layers than the model was created with.
        adapter = folder / ADAPTER
        start = adapter if await asyncio.to_thread(adapter.is_dir) else model.lora
        await backend.trainees.create(model.id, start)
        await backend.trainer.load(model.id, folder / STATE)


def _has_weights(model: Model) -> bool:
    return model.is_live and model.next_seq > 0 and not model.failure


async def _save(context: ServiceContext, model: Model) -> tuple[str, int]:
    """Save a model's state; return its digest and size."""
    blobs = context.wal.run.blobs
    with blobs.stage() as folder:
        state = folder / STATE
        backend = context.backend(model.base_model)
        await backend.trainer.save(model.id, state)
        if model.has_loaded:
            await backend.trainees.export(model.id, folder / ADAPTER)
        num_bytes = (await asyncio.to_thread(state.stat)).st_size
        return await run_in_thread(blobs.put_folder, folder), num_bytes
