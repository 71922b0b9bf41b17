"""A service that is killed goes on: its clients notice nothing, the weights are the same."""

import asyncio
import threading
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from executors.jobs import until
from service.tenants import (
    Client,
    HeldTrainer,
    crashed_copy,
    fake_backend,
    serve,
    train_body,
)

from rookery.compat.tinker import format
from rookery.service import service
from rookery.service.config import ServiceConfig
from rookery.service.state import Wal
from rookery.service.work import Result

SAMPLE = {
    "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]},
    "num_samples": 2,
    "sampling_params": {"max_tokens": 4, "seed": 3},
}


async def sampler_of(client: Client, model: str, seq: int) -> str:
    body = {"model_id": model, "seq_id": seq, "sampling_session_seq_id": seq}
    result = await client.result(await client.post("save_weights_for_sampler", body))
    return str(result["sampling_session_id"])


async def test_a_killed_service_goes_on_with_the_same_results(tmp_path: Path) -> None:
    async with serve(tmp_path / "run") as served:
        ada = served.client()
        model = await ada.model(await ada.session())
        await ada.outputs(await ada.train(train_body(model, 1)))
        await ada.result(await ada.step(model, 2))
        sampler = await sampler_of(ada, model, 3)
        sample = await ada.post("asample", {**SAMPLE, "sampling_session_id": sampler, "seq_id": 0})
        drawn = await ada.samples(sample)
        unfetched = await ada.train(train_body(model, 4, weights=[0.0, 5.0, 0.0]))
        waiting = await ada.step(model, 6)
        killed = crashed_copy(tmp_path / "run", tmp_path / "killed")
        first = await ada.outputs(unfetched)
        await ada.train(train_body(model, 5))
        step = await ada.result(waiting)
    async with serve(killed) as served:
        ada = served.client()
        assert await ada.samples(sample) == drawn
        assert await ada.outputs(unfetched) == first
        again = await ada.post("asample", {**SAMPLE, "sampling_session_id": sampler, "seq_id": 0})
        assert again == sample, "a sample that is sent again is the one it was"
        await ada.train(train_body(model, 5))
        assert await ada.result(waiting) == step


async def test_a_snapshot_stands_for_what_was_before_it(tmp_path: Path) -> None:
    async with serve(tmp_path / "run") as served:
        ada = served.client()
        model = await ada.model(await ada.session())
        await ada.outputs(await ada.train(train_body(model, 1)))
        late = await ada.step(model, 3)
        unfetched = await ada.train(train_body(model, 2))
        await ada.result(late)
        await served.service.snapshot()
        path = await ada.save(model, 4, "ck")
        early = await ada.step(model, 6)
        killed = crashed_copy(tmp_path / "run", tmp_path / "killed")
    async with serve(killed) as served:
        ada = served.client()
        assert (await ada.retrieve(unfetched["request_id"])).status_code == 200
        info = await ada.post("weights_info", {"tinker_path": path})
        assert info["lora_rank"] == 4
        await ada.train(train_body(model, 5))
        assert (await ada.result(early))["metrics"]["value:mean"] == 9.0


async def test_a_failure_stays_a_failure(tmp_path: Path) -> None:
    async with serve(tmp_path / "run") as served:
        ada = served.client()
        model = await ada.model(await ada.session())
        trainer = served.service.context.backends["fake"].trainer
        trainer.failing.add(model)  # type: ignore[attr-defined]
        reply = await ada.train(train_body(model, 1))
        failed = await ada.result(reply)
        killed = crashed_copy(tmp_path / "run", tmp_path / "killed")
    async with serve(killed) as served:
        ada = served.client()
        assert await ada.result(reply) == failed
        assert (await ada.result(await ada.step(model, 2)))["metrics"]["value:mean"] == 0.0


async def test_journal_is_cut_behind_snapshots(tmp_path: Path) -> None:
    config = ServiceConfig(poll_s=20.0, journal_mib=0.001)
    async with serve(tmp_path / "run", config=config) as served:
        ada = served.client()
        model = await ada.model(await ada.session())
        for seq in range(1, 41, 2):
            await ada.outputs(await ada.train(train_body(model, seq)))
            await ada.result(await ada.step(model, seq + 1))
        restart = served.service.context.wal.read()
        blobs = served.service.context.wal.run.blobs.digests()
    assert len(restart.entries) < 20
    assert restart.document is not None
    assert len(blobs) <= 3, "blobs of earlier snapshots are deleted"


async def test_models_may_be_made_while_a_snapshot_is_taken(tmp_path: Path) -> None:
    """The snapshot is taken between passes, and clients go on sending meanwhile."""
    backend, entered, may_save = fake_backend(), asyncio.Event(), asyncio.Event()
    save = backend.trainer.save

    async def wait_and_save(trainee: str, path: Path) -> None:
        entered.set()
        await may_save.wait()
        await save(trainee, path)

    backend.trainer.save = wait_and_save  # type: ignore[method-assign]
    async with serve(tmp_path / "run", backend=backend) as served:
        ada = served.client()
        session = await ada.session()
        for seq in range(2):
            await ada.model(session, seq)
        snapshot = asyncio.create_task(served.service.snapshot())
        await entered.wait()
        body = {"session_id": session, "model_seq_id": 2, "base_model": "fake"}
        reply = await ada.post("create_model", body)
        may_save.set()
        await snapshot
        assert (await ada.result(reply))["model_id"] == reply["model_id"]


async def test_a_model_that_ends_beside_a_snapshot_is_loaded_after_a_kill(tmp_path: Path) -> None:
    """The document still has it, so its saved state stays."""
    async with serve(tmp_path / "run") as served:
        ada = served.client()
        session = await ada.session()
        model = await ada.model(session)
        await ada.outputs(await ada.train(train_body(model, 1)))
        wal = served.service.context.wal
        finish_snapshot = wal.finish_snapshot

        async def finish_and_end(*args: Any, **kwargs: Any) -> None:
            await finish_snapshot(*args, **kwargs)
            await ada.send("POST", f"/api/v1/sessions/{session}/finish", json={})

        wal.finish_snapshot = finish_and_end  # type: ignore[method-assign]
        await served.service.snapshot()
        wal.finish_snapshot = finish_snapshot  # type: ignore[method-assign]
        killed = crashed_copy(tmp_path / "run", tmp_path / "killed")
    async with serve(killed) as served:
        assert served.service.context.state.models[model].is_live is False


def hold_answers(wal: Wal) -> tuple[asyncio.Event, asyncio.Event]:
    """Answers are stored, which sets the first event, and told of when the second one is set."""
    append, stored, may_tell = wal.append, asyncio.Event(), asyncio.Event()

    def append_and_wait(header: Mapping[str, Any], body: bytes = b"") -> Any:
        done = append(header, body)

        async def tell() -> list[int]:
            numbers = await done
            stored.set()
            await may_tell.wait()
            return numbers

        return asyncio.ensure_future(tell()) if header["entry"] == "answer" else done

    wal.append = append_and_wait  # type: ignore[method-assign]
    return stored, may_tell


async def test_a_sample_that_is_being_stored_beside_a_snapshot_is_not_lost(tmp_path: Path) -> None:
    """Its answer is in the journal before the snapshot, and nobody was told of it."""
    async with serve(tmp_path / "run") as served:
        ada = served.client()
        sampler = await sampler_of(ada, await ada.model(await ada.session()), 1)
        stored, may_tell = hold_answers(served.service.context.wal)
        sample = await ada.post("asample", {**SAMPLE, "sampling_session_id": sampler, "seq_id": 0})
        await stored.wait()
        assert (await ada.send("POST", "/api/v1/cancel_future", json=sample)).status_code == 204
        await served.service.snapshot()
        killed = crashed_copy(tmp_path / "run", tmp_path / "killed")
        may_tell.set()
        drawn = await ada.samples(sample)
    await _check_drawn_once(killed, sample, drawn)


async def test_a_sample_that_is_stored_within_a_snapshot_is_not_lost(tmp_path: Path) -> None:
    """The journal is cut behind the snapshot, and its answer with it."""
    async with serve(tmp_path / "run") as served:
        ada, wal = served.client(), served.service.context.wal
        sampler = await sampler_of(ada, await ada.model(await ada.session()), 1)
        stored, may_tell = hold_answers(wal)
        begin = wal.begin_snapshot

        async def begin_and_tell() -> int:
            seq = await begin()
            may_tell.set()
            await ada.samples(sample)
            return seq

        wal.begin_snapshot = begin_and_tell  # type: ignore[method-assign]
        sample = await ada.post("asample", {**SAMPLE, "sampling_session_id": sampler, "seq_id": 0})
        await stored.wait()
        await served.service.snapshot()
        killed = crashed_copy(tmp_path / "run", tmp_path / "killed")
        drawn = await ada.samples(sample)
        wal.begin_snapshot = begin  # type: ignore[method-assign]
    await _check_drawn_once(killed, sample, drawn)


async def _check_drawn_once(killed: Path, sample: dict[str, Any], drawn: Any) -> None:
    backend = fake_backend()
    async with serve(killed, backend=backend, config=ServiceConfig(poll_s=2.0)) as served:
        assert await served.client().samples(sample) == drawn
        assert backend.engine.num_samples == 0, "it is not drawn again"  # type: ignore[attr-defined]
        assert not len(served.service.context.pending)


async def killed_while_computing(folder: Path, target: Path) -> list[list[str]]:
    """Start the service on the folder, wait until the trainer computes, and copy what a kill then
    would leave; the calls of the trainer so far."""
    trainer = HeldTrainer(num_free=1)  # what is repeated
    async with serve(folder, backend=fake_backend(trainer)):
        await trainer.entered.wait()
        crashed_copy(folder, target)
        trainer.may_go.set()
    return trainer.calls[:2]


async def test_who_computes_when_the_service_dies_twice_is_set_aside(tmp_path: Path) -> None:
    """Two share a pass when it dies; then each is alone, and only the first is blamed."""
    trainer = HeldTrainer()
    async with serve(tmp_path / "run", backend=fake_backend(trainer)) as served:
        ada = served.client()
        session = await ada.session()
        models = [await ada.model(session, seq) for seq in range(3)]
        await ada.step(models[2], 1)
        await trainer.entered.wait()  # the others wait, and share the next pass
        replies = [await ada.train(train_body(model, 1)) for model in models[:2]]
        trainer.entered.clear()
        trainer.may_go.set()
        trainer.may_go = asyncio.Event()
        await trainer.entered.wait()
        crashed_copy(tmp_path / "run", tmp_path / "once")
        trainer.may_go.set()
    assert trainer.calls == [[models[2]], models[:2]]
    assert await killed_while_computing(tmp_path / "once", tmp_path / "twice") == [
        [models[2]],
        [models[0]],
    ]
    async with serve(tmp_path / "twice") as served:
        ada = served.client()
        assert "not computed again" in (await ada.result(replies[0]))["error"]
        assert (await ada.outputs(replies[1])).metrics["loss:sum"]
        values = [await ada.result(await ada.step(model, 2)) for model in models[:2]]
        assert [value["metrics"]["value:mean"] for value in values] == [0.0, 3.0]
        crashed_copy(tmp_path / "twice", tmp_path / "thrice")
    async with serve(tmp_path / "thrice") as served:
        failed = await served.client().result(replies[0])
        assert "not computed again" in failed["error"], "it stays failed"


async def test_a_pass_that_is_left_at_a_stop_in_order_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "STOP_S", 0.01)
    trainer = HeldTrainer()
    async with serve(tmp_path / "run", backend=fake_backend(trainer)) as served:
        ada = served.client()
        model = await ada.model(await ada.session())
        reply = await ada.train(train_body(model, 1))
        await trainer.entered.wait()
    for _ in range(2):
        async with serve(tmp_path / "run", backend=fake_backend(HeldTrainer())) as served:
            work = served.service.context.pending[reply["request_id"]]
            assert not served.service.context.pending.is_suspect(work)
    async with serve(tmp_path / "run") as served:
        assert (await served.client().outputs(reply)).metrics["loss:sum"]


async def test_a_sample_is_blamed_until_its_answer_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writing takes as much memory as drawing."""
    write, begun, may_end = format.write_samples, threading.Event(), threading.Event()

    def held(*args: Any) -> Result:
        begun.set()
        assert may_end.wait(30)
        return write(*args)

    monkeypatch.setattr(format, "write_samples", held)
    async with serve(tmp_path / "run") as served:
        ada, pending = served.client(), served.service.context.pending
        sampler = await sampler_of(ada, await ada.model(await ada.session()), 1)
        reply = await ada.post("asample", {**SAMPLE, "sampling_session_id": sampler})
        await asyncio.to_thread(begun.wait, 30)
        assert pending.attempts[reply["request_id"]] == 1
        assert served.service.drawing.turns.place(reply["request_id"]) is None
        may_end.set()
        assert len((await ada.samples(reply)).sequences) == 2
        assert not pending.attempts


def has_both(attempts: Counter[str]) -> bool:
    return len(attempts) == 2


async def test_a_sample_that_ends_the_service_each_time_is_set_aside(tmp_path: Path) -> None:
    async with serve(tmp_path / "run") as served:
        ada = served.client()
        sampler = await sampler_of(ada, await ada.model(await ada.session()), 1)
    folder = tmp_path / "run"
    replies: list[dict[str, Any]] = []
    for number in range(3):
        backend, entered = fake_backend(), asyncio.Event()

        async def wait(requests: Any, entered: asyncio.Event = entered) -> Any:
            entered.set()
            await asyncio.Event().wait()

        backend.engine.sample = wait  # type: ignore[method-assign]
        async with serve(folder, backend=backend) as served:
            for seq in range(2 - len(replies)):
                body = {**SAMPLE, "sampling_session_id": sampler, "seq_id": seq}
                replies.append(await served.client().post("asample", body))
            await entered.wait()
            running = served.service.context.pending.attempts
            await until(partial(has_both, running))
            folder = crashed_copy(folder, tmp_path / f"killed{number}")
            assert sorted(running.values()) == [[1, 1], [2, 2], [2, 3]][number]
    async with serve(folder) as served:
        ada = served.client()
        assert "not computed again" in (await ada.result(replies[0]))["error"]
        assert len((await ada.samples(replies[1])).sequences) == 2


async def test_a_closed_service_replays_nothing(tmp_path: Path) -> None:
    async with serve(tmp_path / "run") as served:
        ada = served.client()
        model = await ada.model(await ada.session())
        await ada.outputs(await ada.train(train_body(model, 1)))
    async with serve(tmp_path / "run") as served:
        passes = served.service.context.metrics.text(has_tenants=False).decode()
        assert 'rookery_passes_total{call="forward_backward"}' not in passes
        ada = served.client()
        assert (await ada.result(await ada.step(model, 2)))["metrics"]["value:mean"] == 3.0


async def test_a_journal_that_was_not_cut_counts_after_a_kill(tmp_path: Path) -> None:
    """Kills one after another must not let it grow beyond what a snapshot is taken at."""
    async with serve(tmp_path / "run") as served:
        ada = served.client()
        model = await ada.model(await ada.session())
        await ada.outputs(await ada.train(train_body(model, 1)))
        written = served.service.context.wal.num_bytes
        killed = crashed_copy(tmp_path / "run", tmp_path / "killed")
    async with serve(killed) as served:
        assert served.service.context.wal.num_bytes == written > 0
