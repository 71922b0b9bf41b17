"""Faults beside a restart: other settings, a trainer that fails, a full disk, lost answers."""

import asyncio
import sqlite3
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
from executors.jobs import until
from pydantic import BaseModel
from service.tenants import (
    Client,
    WordCodec,
    crashed_copy,
    fake_backend,
    serve,
    train_body,
)

from rookery.errors import RunError
from rookery.runs import journal
from rookery.service import drawing
from rookery.service.config import Limits, ServiceConfig
from rookery.types import SampleRequest, TokenIds


async def test_a_restart_with_another_keep_last_goes_on(tmp_path: Path) -> None:
    async with serve(tmp_path / "run") as served:
        ada = served.client()
        model = await ada.model(await ada.session())
        paths = [await ada.save(model, seq, name) for seq, name in ((1, "a"), (2, "b"))]
        first = f"/api/v1/training_runs/{model}/checkpoints/weights/a"
        assert (await ada.send("POST", f"{first}/publish")).status_code == 204
        killed = crashed_copy(tmp_path / "run", tmp_path / "killed")
    async with serve(killed, config=ServiceConfig(poll_s=20.0, keep_last=1)) as served:
        assert list(served.service.context.state.checkpoints) == paths


async def test_a_pass_that_cannot_be_repeated_stops_the_restart(tmp_path: Path) -> None:
    async with serve(tmp_path / "run") as served:
        ada = served.client()
        model = await ada.model(await ada.session())
        await ada.outputs(await ada.train(train_body(model, 1)))
        killed = crashed_copy(tmp_path / "run", tmp_path / "killed")
        expected = await ada.result(await ada.step(model, 2))
    backend = fake_backend()
    backend.trainer.failing.add(model)  # type: ignore[attr-defined]
    with pytest.raises(RunError, match="cannot be repeated"):
        async with serve(killed, backend=backend):
            pass
    async with serve(killed) as served:
        ada = served.client()
        assert await ada.result(await ada.step(model, 2)) == expected, "nothing was lost"


@pytest.mark.parametrize("path", ["create_session", "optim_step"])
async def test_a_full_disk_is_no_refusal_and_ends_the_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """Clients send again what gets 503, and a service on a disk with room answers it."""

    def refuse_writes(*_: object, **__: object) -> NoReturn:
        raise sqlite3.OperationalError("database or disk is full")

    with pytest.raises(RunError, match="full"), monkeypatch.context() as disk:
        async with serve(tmp_path / "run") as served:
            ada = served.client()
            model = await ada.model(await ada.session())
            disk.setattr(journal, "transaction", refuse_writes)
            body = {"create_session": {}, "optim_step": {"model_id": model, "seq_id": 1}}[path]
            answer = await ada.send("POST", f"/api/v1/{path}", json=body)
            assert answer.status_code == 503
            assert "full" in answer.json()["error"]
            again = await ada.send("POST", f"/api/v1/{path}", json=body)
            assert again.status_code == 503
            await served.service.context.wal.watch()
    async with serve(tmp_path / "run") as served:
        ada = served.client()
        assert "metrics" in await ada.result(await ada.step(model, 1))


async def test_an_answer_too_large_for_the_journal_is_a_failure_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service would end, and draw it again after every start."""
    monkeypatch.setattr(journal, "ENTRY_BYTES", 3000)
    monkeypatch.setattr(drawing, "ANSWER_MIB", 2000 / 2**20)
    async with serve(tmp_path / "run") as served:
        ada = served.client()
        sampler_id = await ada.sampler()
        sample = {
            "prompt": {"chunks": [{"tokens": [5, 6, 7]}]},
            "sampling_session_id": sampler_id,
            "sampling_params": {"max_tokens": 4},
        }
        large = await ada.post("asample", {**sample, "num_samples": 200})
        failure = await ada.result(large)
        assert failure["category"] == "user"
        assert "ask for fewer samples" in failure["error"]
        assert (await ada.samples(await ada.post("asample", sample))).sequences


async def test_a_request_that_never_comes_is_waited_for_no_longer_than_said(
    tmp_path: Path,
) -> None:
    async with serve(tmp_path / "run") as served:
        ada = served.client()
        model = await ada.model(await ada.session())
        await ada.outputs(await ada.train(train_body(model, 1)))
        late = [await ada.step(model, seq) for seq in (3, 4)]
        served.service.training.give_up_gaps(before=time.time() - 60)
        assert len(served.service.context.pending) == 2
        served.service.training.give_up_gaps(before=time.time() + 60)
        failed = [await ada.result(reply) for reply in late]
        killed = crashed_copy(tmp_path / "run", tmp_path / "killed")
        done = await ada.result(await ada.step(model, 5))
    assert all("did not come within" in one["error"] for one in failed)
    assert done["metrics"]["value:mean"] == 3.0
    async with serve(killed) as served:
        ada = served.client()
        assert [await ada.result(reply) for reply in late] == failed
        assert await ada.result(await ada.step(model, 5)) == done


async def test_weights_saved_at_every_step_do_not_stay(tmp_path: Path) -> None:
    async with serve(tmp_path / "run") as served:
        ada, service = served.client(), served.service
        model = await ada.model(await ada.session())
        names = []
        for seq in range(1, 13):
            save = {"model_id": model, "seq_id": seq, "sampling_session_seq_id": seq}
            reply = await ada.post("save_weights_for_sampler", save)
            names.append((await ada.result(reply))["sampling_session_id"])
        await service.clean_up()
        assert list(service.context.state.samplers) == names, "just saved"
        sample = {
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5]}]},
            "sampling_session_id": names[0],
            "seq_id": 0,
            "sampling_params": {"max_tokens": 1},
        }
        for name in names:
            service.last_seen[name] = time.monotonic() - service.context.config.session_s - 1
        await ada.samples(await ada.post("asample", sample))
        await service.clean_up()
        assert list(service.context.state.samplers) == [names[0], *names[-8:]], "one is drawn from"


async def test_sessions_of_a_tenant_are_bounded(tmp_path: Path) -> None:
    config = ServiceConfig(limits=Limits(sessions=3))
    async with serve(tmp_path / "run", config=config) as served:
        ada = served.client()
        sessions = [await ada.session() for _ in range(3)]
        full = await ada.post("create_session", {}, status=429)
        assert "3 open sessions" in full["error"]
        state = served.service.context.state
        for session in sessions:
            await ada.post(
                f"sessions/{session}/finish", {"reason": {"type": "success"}}, status=204
            )
        assert all(state.sessions[session].is_over for session in sessions)
        await ada.session()


async def test_texts_are_tokenized_beside_the_event_loop(tmp_path: Path) -> None:
    codec, backend = ThreadCodec(), fake_backend()
    async with serve(tmp_path / "run", backend=replace(backend, codec=codec)) as served:
        ada = served.client()
        model = {"model": "fake", "max_tokens": 2}
        await ada.post("sample", {"prompts": ["5 6"], "sampling_params": {"max_tokens": 2}})
        bodies = {
            "/v1/completions": {**model, "prompt": "5 6", "logprobs": 1},
            "/v1/chat/completions": {**model, "messages": [{"role": "user", "content": "5"}]},
            "/tokenize": {"prompt": "5 6"},
            "/detokenize": {"tokens": [5, 6]},
        }
        for path, body in bodies.items():
            assert (await ada.send("POST", path, json=body)).status_code == 200, path
    assert len(codec.threads) >= len(bodies) + 1
    assert threading.main_thread() not in codec.threads


class ThreadCodec(WordCodec):
    """Notes in which threads it works."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []

    def encode(self, text: str) -> TokenIds:
        self.threads.append(threading.current_thread())
        return super().encode(text)

    def decode(self, tokens: TokenIds) -> str:
        self.threads.append(threading.current_thread())
        return super().decode(tokens)


async def test_clients_may_end_what_housekeeping_ends(tmp_path: Path) -> None:
    """Checkpoints are deleted, and a session ends, while it waits for the disk."""
    async with serve(tmp_path / "run") as served:
        ada, service = served.client(), served.service
        session = await ada.session()
        model = await ada.model(session)
        for seq in range(1, 3):
            await ada.save(model, seq, f"c{seq}", ttl_seconds=1)
        for seq in range(3, 14):
            save = {"model_id": model, "seq_id": seq, "sampling_session_seq_id": seq}
            await ada.result(await ada.post("save_weights_for_sampler", save))
        for sampler in service.context.state.samplers:
            service.last_seen[sampler] = time.monotonic() - service.context.config.session_s - 1
        for checkpoint in service.context.state.checkpoints.values():
            checkpoint.expires = time.time() - 1
        ends = iter(
            [
                ada.send("DELETE", f"/api/v1/training_runs/{model}/checkpoints/weights/c2"),
                ada.send("POST", f"/api/v1/sessions/{session}/finish", json={}),
            ]
        )
        change = service.change

        async def change_beside(kind: str, tenant: str, request: BaseModel) -> dict[str, Any]:
            """A client ends the next thing while the journal is written."""
            reply = await change(kind, tenant, request)
            if (end := next(ends, None)) is not None:
                service.change = change  # type: ignore[method-assign]
                assert (await end).status_code == 204
                service.change = change_beside  # type: ignore[method-assign]
            return reply

        service.change = change_beside  # type: ignore[method-assign]
        await service.clean_up()
        assert not service.context.state.checkpoints
        assert not service.context.state.samplers


async def test_a_model_that_ended_behind_a_gap_is_restarted(tmp_path: Path) -> None:
    """Numbers 1 and 3 never come. What came behind them is released, and still queued when the
    model ends: a pass without success, which follows the end in the journal."""
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
        model, other = await ada.model(session), await ada.model(session, 1)
        await ada.post("save_weights", {"model_id": other, "seq_id": 1, "path": "busy"})
        await entered.wait()
        late = [await ada.step(model, seq) for seq in (2, 4)]
        served.service.training.give_up_gaps(before=time.time() + 60)
        late.append(await ada.step(model, 5))
        await ada.post("unload_model", {"model_id": model})
        may_save.set()
        failed = [await ada.result(reply) for reply in late]
        killed = crashed_copy(tmp_path / "run", tmp_path / "killed")
    assert all("ended" in one["error"] for one in failed)
    async with serve(killed) as served:
        ada = served.client()
        assert [await ada.result(reply) for reply in late] == failed
        assert not len(served.service.context.pending)


async def test_an_adapter_without_its_checkpoint_leaves_no_run(tmp_path: Path) -> None:
    upload = {"adapter_id": "poet", "adapter_config": {"r": 4}, "adapter_model": "AAAA"}
    async with serve(tmp_path / "run") as served:
        ada = served.client()
        for _ in range(2):  # under the same name again, then removed
            path = (await ada.post("adapters", upload, status=201))["tinker_path"]
            _, _, run, kind, name = path.split("/")
            item = f"/api/v1/training_runs/{run}/checkpoints/{kind}/{name}"
            assert (await ada.send("DELETE", item)).status_code == 204
        assert (await ada.send("DELETE", "/api/v1/adapters/poet")).status_code == 204
        runs = (await ada.send("GET", "/api/v1/training_runs")).json()
        assert runs["training_runs"] == []


async def test_models_that_ended_and_saved_nothing_do_not_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rookery.service.service.KEPT_RUNS", 2)
    async with serve(tmp_path / "run") as served:
        ada = served.client()
        session = await ada.session()
        models = [await ada.model(session, seq) for seq in range(5)]
        await ada.save(models[0], 1, "ck")
        for model in models[:4]:
            await ada.result(await ada.post("unload_model", {"model_id": model}))
        await served.service.clean_up()
        assert await _runs(ada) == {*models} - {models[1]}
        killed = crashed_copy(tmp_path / "run", tmp_path / "killed")
    backend = fake_backend()
    async with serve(killed, backend=backend) as served:
        ada = served.client()
        assert await _runs(ada) == {*models} - {models[1]}
        await ada.result(await ada.step(models[4], 1))
        assert set(backend.trainer.trainees) == {"unused", models[4]}  # type: ignore[attr-defined]


async def _runs(client: Client) -> set[str]:
    runs = (await client.send("GET", "/api/v1/training_runs")).json()["training_runs"]
    return {run["training_run_id"] for run in runs}


async def test_results_that_come_after_their_session_are_not_kept(tmp_path: Path) -> None:
    """Its client is gone, and would never fetch them."""
    backend, may_draw = fake_backend(), asyncio.Event()
    sample = backend.engine.sample

    async def wait_and_sample(requests: Sequence[SampleRequest]) -> Any:
        await may_draw.wait()
        return await sample(requests)

    backend.engine.sample = wait_and_sample  # type: ignore[method-assign]
    async with serve(tmp_path / "run", backend=backend) as served:
        ada, context = served.client(), served.service.context
        session = await ada.session()
        model = await ada.model(session)
        name = await ada.sampler(session)
        drawing = {
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5]}]},
            "sampling_session_id": name,
            "sampling_params": {"max_tokens": 1},
        }
        for seq in range(3):
            await ada.post("asample", {**drawing, "seq_id": seq})
        await ada.step(model, 2)  # number 1 never comes
        await ada.post(f"sessions/{session}/finish", {}, status=204)
        may_draw.set()
        await until(lambda: not len(context.pending) and not served.service.samples.tasks)
        context.futures.drop_old(fetched_s=0, unfetched_s=60)
        assert not len(context.futures)


async def test_a_model_of_a_base_that_is_not_served_any_more_ends(tmp_path: Path) -> None:
    """It was accepted, and never made: the service was killed, and started with other models."""
    async with serve(tmp_path / "run") as served:
        ada, service = served.client(), served.service
        session = await ada.session()
        model, other = await ada.model(session), await ada.model(await ada.session())
        service.context.state.models[model].base_model = "gone"
        await ada.post(f"sessions/{session}/finish", {}, status=204)
        assert "metrics" in await ada.result(await ada.step(other, 1)), "the loop goes on"


class HeldCodec(WordCodec):
    """Tokenizes when it is let go."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def encode(self, text: str) -> TokenIds:
        self.go.wait(timeout=60)
        return super().encode(text)


async def test_long_texts_of_one_tenant_leave_threads_to_others(tmp_path: Path) -> None:
    codec = HeldCodec()
    backend = replace(fake_backend(), codec=codec)
    async with serve(tmp_path / "run", backend=backend, key_file=tmp_path / "k") as served:
        ada, bob = served.client("ada"), served.client("bob")
        async with asyncio.TaskGroup() as group:
            for _ in range(64):
                group.create_task(ada.send("POST", "/tokenize", json={"prompt": "5"}))
            sample = {
                "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5]}]},
                "sampling_session_id": await bob.sampler(),
                "sampling_params": {"max_tokens": 1},
            }
            try:
                async with asyncio.timeout(10):
                    await bob.samples(await bob.post("asample", sample))
            finally:
                codec.go.set()
