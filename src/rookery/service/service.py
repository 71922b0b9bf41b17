"""Service: accepts requests, makes them durable, and joins the loops that compute them.

    async with open_service(run, backends, config, format=format) as service:
        reply = await service.change("create_session", tenant, request)
        reply = await service.accept(command)

| part          | does                                                        |
|---------------|-------------------------------------------------------------|
| `change`      | requests that are done when they are accepted               |
| `accept`      | requests that take their turn, once each                    |
| training loop | one task: passes of all models                              |
| samples       | one task each                                               |
| housekeeping  | one task: sessions without heartbeat, expired checkpoints   |
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from pydantic import BaseModel

from rookery.runs import Run
from rookery.runtime.concurrency import run_in_thread, task_group
from rookery.service.commands import CheckpointPath, EndSampler, EndSession, ForgetModels, apply
from rookery.service.config import ServiceConfig
from rookery.service.context import Metrics, ServiceContext
from rookery.service.drawing import Drawing, OpenSamples
from rookery.service.fair_queue import READERS, FairSemaphore
from rookery.service.futures import Future
from rookery.service.records import Model
from rookery.service.recovery import recover, take_snapshot
from rookery.service.requests import CreateModel, Sample, SaveForSampler
from rookery.service.state import Wal
from rookery.service.trainer_calls import PassRecord
from rookery.service.training import TrainingLoop
from rookery.service.wire import as_json
from rookery.service.work import SAMPLING, Backend, Command, Format, Refusal, bad, failed, finished
from rookery.types import LoraShape

__all__ = ["Admission", "Service", "new_id", "open_service"]


MAX_LOSSES = 256
"""Limit per tenant: the graphs stay in memory until their sessions end."""


class Admission:
    """Enforces the configured limits per tenant."""

    def __init__(self, context: ServiceContext) -> None:
        self._context = context
        self._limits = context.config.limits
        self._credit: dict[str, tuple[float, float]] = {}
        """Requests that a tenant may still send, and the time of that count."""

    def check(self, command: Command) -> None:
        """Refuse a request over a limit; 429 if it may be sent again later."""
        num_own = self._context.pending.count(command.tenant)
        if num_own >= self._limits.waiting:
            raise _full(
                f"{num_own} of your requests are waiting; at most {self._limits.waiting} may."
            )
        self._check_bytes(command)
        self.check_results(command.tenant)
        if command.kind == "create_model":
            self._check_model(command)
        if command.kind == "save_weights_for_sampler":
            self._check_save(command)

    def _check_bytes(self, command: Command) -> None:
        """Refuse bodies over the limit, unless the tenant is below its equal share."""
        pending, most = self._context.pending, self._limits.waiting_mib * 2**20
        num_bytes = pending.num_bytes_of(command.tenant) + len(command.body)
        share = most / max(pending.num_tenants, 1)
        if pending.num_bytes + len(command.body) > most and num_bytes > share:
            raise _full(
                f"The requests that wait hold {pending.num_bytes / 2**20:.0f} MiB, of at most "
                f"{self._limits.waiting_mib:g}, and yours more than a tenant's share of it."
            )

    def check_results(self, tenant: str) -> None:
        """Refuse new requests of a tenant that does not fetch its results."""
        futures, most_mib = self._context.futures, self._limits.results_mib
        num_bytes = futures.bytes_unfetched(tenant) + self._context.answers[tenant]
        num, mib = futures.num_unfetched(tenant), num_bytes / 2**20
        if num >= self._limits.results or mib > most_mib:
            raise _full(
                f"{num} results of yours, {mib:.0f} MiB, were not fetched; at most "
                f"{self._limits.results} and {most_mib:g} MiB are kept: fetch them."
            )

    def check_answers(self, tenant: str) -> None:
        """Refuse another answer to a tenant that does not read the earlier ones."""
        mib = self._context.answers[tenant] / 2**20
        if mib > self._limits.results_mib:
            raise _full(
                f"Answers to you of {mib:.0f} MiB are on their way, of at most "
                f"{self._limits.results_mib:g}: read them."
            )

    def check_losses(self, tenant: str) -> None:
        self.check_results(tenant)
        num = sum(loss.tenant == tenant for loss in self._context.state.losses.values())
        if num >= MAX_LOSSES:
            raise bad(f"You have {num} custom losses, the most there may be: end their sessions.")

    def check_rate(self, tenant: str) -> None:
        """Count a request; refuse it if too many came within a second."""
        rate, now = self._limits.requests_per_s, time.monotonic()
        most = max(rate, 1.0)
        credit, then = self._credit.get(tenant, (most, now))
        credit = min(most, credit + (now - then) * rate)
        if credit < 1:
            raise _full(f"You sent more than {rate:g} requests per second.")
        self._credit[tenant] = (credit - 1, now)

    def check_draws(self, num_waiting: int, *, num: int) -> None:
        """Refuse immediate draws beyond the limit, counting those that wait."""
        if num_waiting and num_waiting + num > self._limits.waiting:
            raise _full(
                f"{num_waiting} of your samples are waiting; at most {self._limits.waiting} may."
            )

    def check_sessions(self, tenant: str) -> None:
        sessions = self._context.state.sessions.values()
        num_open = sum(one.tenant == tenant and not one.is_over for one in sessions)
        if num_open >= self._limits.sessions:
            raise _full(
                f"You have {num_open} open sessions; at most {self._limits.sessions} may be."
            )

    def check_samplers(self, tenant: str, sampler_id: str = "") -> None:
        """Refuse a new sampling session over the limit; a known one may be sent again."""
        samplers = self._context.state.samplers
        num = sum(one.tenant == tenant for one in samplers.values())
        if num >= self._limits.samplers and sampler_id not in samplers:
            raise _full(
                f"You have {num} sampling sessions; at most {self._limits.samplers} may be: end "
                "sessions, or delete samplers that you do not need."
            )

    def check_samples(self, num: int) -> None:
        """Refuse too many samples in one request, over all its prompts."""
        if num > self._limits.samples:
            raise bad(f"The request asks for {num} samples; at most {self._limits.samples} may be.")

    def check_checkpoints(self, tenant: str) -> None:
        state = self._context.state
        num = sum(checkpoint.tenant == tenant for checkpoint in state.checkpoints.values())
        num += sum(owner == tenant for owner, _ in state.adapters)
        if num >= self._limits.checkpoints:
            raise bad(f"You have {num} checkpoints and adapters: delete some, or set a ttl.")

    def _check_save(self, command: Command) -> None:
        """Weights saved without a name count as a sampling session."""
        if SaveForSampler.model_validate_json(command.body).path is None:
            self.check_samplers(command.tenant)

    def _check_model(self, command: Command) -> None:
        request = CreateModel.model_validate_json(command.body)
        rank = request.lora_config.rank
        most = min(self._limits.rank, self._context.backend(request.base_model).engine.max_rank)
        if rank > most:
            raise bad(f"rank is {rank}; this service trains ranks 1 to {most}.")
        live = [
            model
            for model in self._context.state.models.values()
            if model.tenant == command.tenant and model.is_live
        ]
        if len(live) >= self._limits.models:
            raise bad(
                f"You have {len(live)} models in training, and at most {self._limits.models} may "
                "be: close the clients of those you do not need."
            )


def _full(sentence: str) -> Refusal:
    return Refusal(429, f"{sentence} Send it again later.")


HOUSEKEEPING_S = 10.0
KEPT_SAMPLERS = 8
"""Sampling sessions of unnamed weights kept per session, however long they are unused."""
KEPT_RUNS = 1000
"""Models kept per tenant that ended without a checkpoint: they are in every snapshot."""
STOP_S = 5.0
"""Wait at the end for a call of the trainer; an unfinished one is repeated at the next start."""
SECRET = "secret"
"""Kind of the event that holds the secret for signing links."""


def new_id(prefix: str) -> str:
    return f"{prefix}-{secrets.token_hex(12)}"


class Service:
    """Operations for the routes. Made by `open_service`."""

    def __init__(
        self, context: ServiceContext, group: asyncio.TaskGroup, *, link_secret: bytes
    ) -> None:
        self.context = context
        self.link_secret = link_secret
        """Secret that signs download links, also after a restart."""
        self.training = TrainingLoop(context)
        self.drawing = Drawing(context)
        self.samples = OpenSamples(context, self.drawing)
        self.admission = Admission(context)
        self.blob_lock = asyncio.Lock()
        """Held while a stored blob is not in the state yet, and while unused blobs are deleted."""
        self.uploads = FairSemaphore(1)
        """Stores adapters one at a time, so that a waiter for the lock waits for at most one."""
        self.reading = FairSemaphore(READERS)
        """Limits the threads that read large bodies or tokenize texts."""
        self._group = group
        self._is_open = False
        """False while events from before a restart are repeated."""
        self._ended: list[Model] = []
        """Models whose end was repeated, but whose last passes were not yet."""
        self.last_seen: dict[str, float] = {}
        """Last use of a session or a sampler, on the monotonic clock."""

    async def change(self, kind: str, tenant: str, request: BaseModel) -> dict[str, Any]:
        """Apply a request that is done at once; return its reply."""
        command = Command(
            kind=kind,
            id=new_id("session" if kind == "create_session" else "change"),
            tenant=tenant,
            time=time.time(),
            body=as_json(request, exclude_none=False),
        )
        reply = self.apply(command)
        await asyncio.shield(self._log(command))
        return reply

    def apply(self, command: Command) -> dict[str, Any]:
        """Change the state, now or after a restart."""
        done = apply(self.context.state, command)
        for owner in done.ended_owners:
            self.last_seen.pop(owner, None)
        self.context.futures.end_owners(done.ended_owners)
        for model in done.ended_models:
            self._end_model(model)
        if done.result_owner:
            return self._finish_at_once(command, done.reply, owner=done.result_owner)
        return done.reply

    async def replay(self, record: PassRecord) -> None:
        await self.training.replay(record)

    def _finish_at_once(
        self, command: Command, reply: dict[str, Any], *, owner: str
    ) -> dict[str, Any]:
        """Store the reply of a change as a result, for clients that fetch one."""
        future = Future(
            id=command.id,
            tenant=command.tenant,
            key="",
            digest="",
            owner=owner,
            reply=reply,
            # A model's end is idempotent, so its result is not dropped with the model's.
            fetched=time.monotonic() if command.kind == "unload_model" else None,
        )
        self.context.futures.add(future)
        self.context.futures.finish(command.id, finished(reply))
        return {"request_id": command.id}

    async def accept(self, command: Command) -> dict[str, Any]:
        """Accept a request that takes its turn, once: a resent request gets the same reply."""
        future = (
            self.context.futures.find(command.key, digest=command.digest) if command.key else None
        )
        if future is None:
            self.admission.check(command)
            self._check_number(command)
            future = self.enqueue(command)
            logged = self._log(command)
            logged.add_done_callback(lambda done: self._logged(command, future, done))
            await asyncio.shield(logged)
        await future.durable.wait()
        self.context.wal.check()
        return future.reply

    def enqueue(self, command: Command) -> Future:
        """Put a request into its queue, now or after a restart."""
        future = Future(
            id=command.id,
            tenant=command.tenant,
            key=command.key,
            digest=command.digest,
            owner=command.owner,
            reply=_reply(command),
            # Nobody fetches the result of a refusal: its client was told at once.
            fetched=time.monotonic() if command.kind == "refused" else None,
        )
        self.context.futures.add(future)
        self.queue(command)
        return future

    def queue(self, command: Command) -> None:
        """Put a request into its queue if its future exists already."""
        if command.kind == "create_model" and command.owner not in self.context.state.models:
            self.context.state.models[command.owner] = _new_model(command)
        self.context.pending.add(command)
        if command.kind in SAMPLING:
            self.last_seen[command.owner] = time.monotonic()
        if command.kind not in SAMPLING:
            self.training.add(command)
        elif self._is_open:
            self.samples.add(command, self._group)

    def resume(self) -> None:
        """Start on the requests accepted before a restart, once it is known which are done."""
        self._is_open = True
        for model in self._ended:
            self._end_model(model)
        for work in self.context.pending:
            if work.kind in SAMPLING:
                self.samples.add(work, self._group)

    def stop(self) -> None:
        """Begin nothing more. Polls end with "not yet"; clients ask the next process."""
        self.training.stop()
        for task in self.samples.tasks:  # they stay pending
            task.cancel()
        self.drawing.stop()
        self.context.futures.release()

    def describe(self, future: Future) -> tuple[str, str]:
        """Return an unfinished request's queue state and a sentence about it."""
        work = self.context.pending.get(future.id)
        if work is None:
            return "active", "It is being stored."
        return (self.samples if work.kind in SAMPLING else self.training).describe(work)

    async def cancel(self, tenant: str, request_id: str) -> None:
        """Cancel a sample; requests of other kinds are computed anyway."""
        future = self.context.futures.get(request_id, tenant=tenant)
        work = self.context.pending.get(future.id)
        if work is not None and work.kind in SAMPLING:
            self.context.futures.set_fetched(future)  # nobody fetches a cancelled result
            await self.samples.cancel(work)

    def check_draws(self, tenant: str, *, num: int) -> None:
        """Refuse unnumbered draws if too many of them would wait."""
        self.admission.check_results(tenant)
        num_waiting = self.drawing.turns.num_waiting_of(tenant)
        self.admission.check_draws(num_waiting, num=num)

    def heartbeat(self, tenant: str, session_id: str) -> None:
        self.context.state.session(tenant, session_id)
        self.last_seen[session_id] = time.monotonic()

    async def snapshot(self) -> None:
        """Take a snapshot. Call it between passes."""
        saved = await take_snapshot(self.context)
        async with self.blob_lock:
            # Blobs of what ended since the snapshot are still in its document.
            keep = {*saved, *self.context.state.blobs()}
            await run_in_thread(self.context.wal.prune, keep=keep)

    async def keep_house(self) -> None:
        """Clean up every `HOUSEKEEPING_S` seconds until cancelled."""
        while True:
            await asyncio.sleep(HOUSEKEEPING_S)
            await self.clean_up()
            self.show_queues()

    async def clean_up(self) -> None:
        """End everything unused or expired. Clients may end the same things meanwhile."""
        await self._end_silent_sessions()
        now, checkpoints = time.time(), self.context.state.checkpoints
        for checkpoint in list(checkpoints.values()):
            is_expired = checkpoint.expires is not None and checkpoint.expires <= now
            if is_expired and checkpoints.get(checkpoint.path) is checkpoint:
                path = CheckpointPath(path=checkpoint.path)
                await self.change("delete_checkpoint", checkpoint.tenant, path)
        await self._end_idle_samplers()
        await self._forget_ended_models()
        config = self.context.config
        self.training.give_up_gaps(before=now - config.gap_s)
        self.context.futures.drop_old(fetched_s=config.result_s, unfetched_s=config.unfetched_s)
        if self.training.is_snapshot_due:
            self.training.wake()

    def show_queues(self) -> None:
        metrics = self.context.metrics
        metrics.waiting.labels("training").set(self.training.num_waiting)
        metrics.waiting.labels("sampling").set(self.drawing.turns.num_waiting)
        metrics.models.set(sum(model.is_live for model in self.context.state.models.values()))

    async def _end_silent_sessions(self) -> None:
        now, limit_s = time.monotonic(), self.context.config.session_s
        for session in list(self.context.state.sessions.values()):
            if not session.is_over and self.last_seen.setdefault(session.id, now) < now - limit_s:
                ended = EndSession(session_id=session.id)
                await self.change("end_session", session.tenant, ended)

    async def _end_idle_samplers(self) -> None:
        """End idle sampling sessions, except the newest."""
        now, busy = time.monotonic(), {work.owner for work in self.context.pending}
        named = self.context.config.limits.samplers // 2
        for sampler in self.context.state.older_samplers(unnamed=KEPT_SAMPLERS, named=named):
            if sampler.id not in self.context.state.samplers or sampler.id in busy:
                continue  # its session may have ended meanwhile
            if self.last_seen.setdefault(sampler.id, now) < now - self.context.config.session_s:
                ended = EndSampler(sampling_session_id=sampler.id)
                await self.change("end_sampler", sampler.tenant, ended)

    async def _forget_ended_models(self) -> None:
        """Forget models without checkpoints and waiting requests, except a tenant's newest."""
        busy = {work.owner for work in self.context.pending}
        for tenant, model_ids in self.context.state.unsaved_runs().items():
            oldest = [model_id for model_id in model_ids[:-KEPT_RUNS] if model_id not in busy]
            if oldest:
                await self.change("forget_models", tenant, ForgetModels(model_ids=oldest))

    def _end_model(self, model: Model) -> None:
        if not self._is_open:
            self._ended.append(model)
            return
        for work in self.training.end_model(model):
            self.context.pending.remove(work.id)
            sentence = "The session ended before an earlier request of this model came."
            self.context.futures.finish(work.id, failed(sentence, "user"))

    def _check_number(self, command: Command) -> None:
        if command.kind in SAMPLING:
            return
        expected = self.training.buffer(command.owner).next_seq
        if command.seq < expected:
            raise bad(
                f"Request {command.seq} of {command.owner} was done before, and its result is not "
                f"kept any more, or came too late: the next one is {expected}."
            )

    def _log(self, command: Command) -> "asyncio.Future[list[int]]":
        return self.context.wal.append_command(command)

    def _logged(self, command: Command, future: Future, done: "asyncio.Future[list[int]]") -> None:
        if not done.cancelled() and done.exception() is None:
            self.context.pending.set_durable(command.id, done.result()[0])
        future.durable.set()


@asynccontextmanager
async def open_service(
    run: Run, backends: Mapping[str, Backend], config: ServiceConfig, *, format: Format
) -> AsyncIterator[Service]:
    """Run the service inside the block, with everything accepted before a restart."""
    wal = await run_in_thread(Wal, run)
    context = ServiceContext(
        config=config, backends=backends, format=format, wal=wal, metrics=Metrics()
    )
    secret = await _link_secret(run)
    async with task_group() as group:
        service = Service(context, group, link_secret=secret)
        await recover(service)
        training = group.create_task(service.training.run(service.snapshot), name="training")
        others = [
            group.create_task(service.keep_house(), name="housekeeping"),
            group.create_task(wal.watch(), name="journal"),
        ]
        try:
            yield service
        finally:
            service.stop()
            # If a call of the trainer ends, its entry must reach the journal.
            _, unfinished = await asyncio.wait([training], timeout=STOP_S)
            for task in (*others, *unfinished):
                task.cancel()
    if not unfinished:  # weights are not saved in the middle of a call
        await take_snapshot(context)


async def _link_secret(run: Run) -> bytes:
    known = run.get(SECRET, "links")
    if known is not None:
        return bytes.fromhex(str(known.payload["hex"]))
    secret = secrets.token_bytes(32)
    await run.append(SECRET, {"hex": secret.hex()}, key="links")
    return secret


def _reply(command: Command) -> dict[str, Any]:
    reply: dict[str, Any] = {"request_id": command.id}
    if command.kind not in SAMPLING:
        return {**reply, "model_id": command.owner}
    if command.kind == "score":
        return reply
    request = Sample.model_validate_json(command.body)
    names = [f"{command.owner}:{command.seq}:{place}" for place in range(request.num_samples)]
    return {**reply, "sample_sequence_ids": names}


def _new_model(command: Command) -> Model:
    request = CreateModel.model_validate_json(command.body)
    shape = request.lora_config.model_dump()
    if shape["seed"] is None:
        shape["seed"] = int(command.digest[:12], 16)
    return Model(
        id=command.owner,
        session_id=request.session_id,
        tenant=command.tenant,
        base_model=request.base_model,
        lora=LoraShape(**shape),
        created=command.time,
        last_request=command.time,
        metadata=request.user_metadata,
    )
