"""Faults beside a restart: other settings, a trainer that fails, a full disk, lost answers."""

import sqlite3
from pathlib import Path
from typing import Any

import pytest
from service.tenants import crashed_copy, fake_backend, serve, train_body

from rookery.errors import RunError
from rookery.service.config import ServiceConfig


async def test_a_restart_with_another_keep_last_goes_on(tmp_path: Path) -> None:
    async with serve(tmp_path / "run") as served:
        ada = served.client()
        model = await ada.model(await ada.session())
        paths = []
        for seq, name in enumerate(("a", "b"), start=1):
            save = {"model_id": model, "seq_id": seq, "path": name}
            paths.append((await ada.result(await ada.post("save_weights", save)))["path"])
        first = f"/api/v1/training_runs/{model}/checkpoints/weights/a"
        assert (await ada.send("POST", f"{first}/publish")).status_code == 204
        killed = crashed_copy(tmp_path / "run", tmp_path / "killed")
    async with serve(killed, config=ServiceConfig(poll_s=20.0, keep_last=1)) as served:
        assert list(served.service.desk.state.checkpoints) == paths


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


async def test_a_result_whose_answer_was_lost_is_there_after_a_restart(tmp_path: Path) -> None:
    async with serve(tmp_path / "run") as served:
        ada = served.client()
        model = await ada.model(await ada.session())
        reply = await ada.train(train_body(model, 1))
        first = await ada.outputs(reply)
    async with serve(tmp_path / "run") as served:
        assert await served.client().outputs(reply) == first


async def test_a_copy_that_is_sent_again_is_the_same(tmp_path: Path) -> None:
    async with serve(tmp_path / "run") as served:
        ada = served.client()
        session = await ada.session()
        model = await ada.model(session)
        save = {"model_id": model, "seq_id": 1, "path": "a"}
        path = (await ada.result(await ada.post("save_weights", save)))["path"]
        copy = {"source_path": path, "session_id": session, "model_seq_id": 7}
        first = await ada.post("copy_weights", copy)
        assert await ada.post("copy_weights", copy) == first


class FullDisk:
    """A journal that cannot be written any more."""

    def __init__(self, commit: Any) -> None:
        self._commit = commit
        self.is_full = False

    def __call__(self, items: Any) -> Any:
        if self.is_full:
            raise sqlite3.OperationalError("database or disk is full")
        return self._commit(items)


@pytest.mark.parametrize("path", ["create_session", "optim_step"])
async def test_a_full_disk_is_no_refusal_and_ends_the_service(tmp_path: Path, path: str) -> None:
    """Clients send again what gets 503, and a service on a disk with room answers it."""
    with pytest.raises(RunError, match="full"):
        async with serve(tmp_path / "run") as served:
            ada = served.client()
            model = await ada.model(await ada.session())
            group = served.service.desk.wal._journal._group
            group._commit = disk = FullDisk(group._commit)
            disk.is_full = True
            body = {"create_session": {}, "optim_step": {"model_id": model, "seq_id": 1}}[path]
            answer = await ada.send("POST", f"/api/v1/{path}", json=body)
            assert answer.status_code == 503
            assert "full" in answer.json()["error"]
            again = await ada.send("POST", f"/api/v1/{path}", json=body)
            assert again.status_code == 503
            await served.service.desk.wal.watch()
    async with serve(tmp_path / "run") as served:
        ada = served.client()
        assert "metrics" in await ada.result(await ada.step(model, 1))
