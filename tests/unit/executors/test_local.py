"""Local workers: real processes, killed and cancelled in every state."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import pytest
from executors.jobs import is_alive, job, output, read_ids, run_hub, until, until_dead

from rookery.errors import ConfigError, ExecutorError
from rookery.executors import WorkerSpec, open_local, pack_folder
from rookery.executors import pool as pool_module
from rookery.executors.worker import MAX_MESSAGE_BYTES, open_task, read_version
from rookery.ports import Executor
from rookery.runtime.retry import Backoff
from rookery.testing import open_fake_task
from rookery.types import Job, JobCancelled, JobFailed, WorkerLost

pytestmark = pytest.mark.timeout(60)
FAKE = WorkerSpec(task=open_fake_task)


async def test_a_thousand_jobs_give_their_own_results() -> None:
    async with open_local(FAKE, num_workers=3) as executor:
        assert isinstance(executor, Executor)
        outcomes = await asyncio.gather(*(executor.submit(job(i, echo=i)) for i in range(1000)))
        assert [output(outcome) for outcome in outcomes] == list(range(1000))
        assert executor.capacity == 3 and executor.num_late == 0
        assert {w.version for w in executor.workers} == {read_version()}
        assert all(w.cores and w.about == "fake" and not w.refusal for w in executor.workers)


async def test_an_exception_of_the_task_is_not_a_lost_worker() -> None:
    async with open_local(FAKE, num_workers=1) as executor:
        pid = output(await executor.submit(job(1, pid=0)))
        failed = await executor.submit(job(2, fail="bad program"))
        assert isinstance(failed, JobFailed) and "ValueError: bad program" in failed.error
        assert output(await executor.submit(job(3, print="noise"))) == "noise"
        assert output(await executor.submit(job(4, pid=0))) == pid, "the worker lives"


ENDS: list[tuple[dict[str, int], str]] = [
    ({"kill": signal.SIGKILL}, "SIGKILL"),
    ({"kill": 40}, "signal 40"),
    ({"exit": 3}, "code 3"),
    ({"exit": 0}, "code 0"),
]


async def test_a_worker_that_its_job_ends_is_reported_and_replaced() -> None:
    """Also more often than a worker may fail to start."""
    async with open_local(FAKE, num_workers=1) as executor:
        first = output(await executor.submit(job(1, pid=0)))
        for epoch, (action, reason) in enumerate(ENDS):
            lost = await executor.submit(job(2, epoch=epoch, **action))
            assert isinstance(lost, WorkerLost) and reason in lost.reason
        assert output(await executor.submit(job(3, pid=0))) != first


async def test_a_worker_killed_from_outside_ends_all_it_started(tmp_path: Path) -> None:
    async with open_local(FAKE, num_workers=1) as executor:
        running = asyncio.create_task(executor.submit(job(1, wait=str(tmp_path / "a"))))
        await until((tmp_path / "a").exists)
        worker, child = read_ids(tmp_path / "a")
        os.kill(worker, signal.SIGKILL)
        lost = await running
        assert isinstance(lost, WorkerLost) and "SIGKILL" in lost.reason
        await until_dead(worker, child, limit_s=5)


async def test_a_worker_killed_while_idle_costs_no_job() -> None:
    async with open_local(FAKE, num_workers=1) as executor:
        pid = output(await executor.submit(job(1, pid=0)))
        assert isinstance(pid, int)
        os.kill(pid, signal.SIGKILL)
        await until_dead(pid, limit_s=5)
        await until(lambda: executor.capacity == 0)
        assert output(await executor.submit(job(2, echo="x"))) == "x"


async def test_cancel_kills_what_runs_and_skips_what_waits(tmp_path: Path) -> None:
    async with open_local(FAKE, num_workers=1) as executor:
        running = asyncio.create_task(executor.submit(job(1, wait=str(tmp_path / "a"))))
        await until((tmp_path / "a").exists)
        pids = read_ids(tmp_path / "a")
        waiting = asyncio.create_task(executor.submit(job(2, wait=str(tmp_path / "b"))))
        third = asyncio.create_task(executor.submit(job(3, echo="x")))
        await asyncio.sleep(0)
        executor.cancel(2)
        executor.cancel(1)
        executor.cancel(1)
        executor.cancel(99)
        assert isinstance(await running, JobCancelled) and isinstance(await waiting, JobCancelled)
        assert output(await third) == "x"
        await until_dead(*pids, limit_s=5)
        assert not (tmp_path / "b").exists()


async def test_the_limit_of_a_job_kills_its_worker(tmp_path: Path) -> None:
    async with open_local(FAKE, num_workers=1) as executor:
        lost = await executor.submit(job(1, limit_s=0.5, wait=str(tmp_path / "a")))
        assert isinstance(lost, WorkerLost) and "within 0.5 s" in lost.reason
        assert output(await executor.submit(job(2, echo="x"))) == "x"


async def test_closing_ends_running_and_waiting_jobs_and_their_processes(tmp_path: Path) -> None:
    async with open_local(FAKE, num_workers=1) as executor:
        paths = [str(tmp_path / name) for name in "ab"]
        jobs = [
            asyncio.create_task(executor.submit(job(i, wait=path))) for i, path in enumerate(paths)
        ]
        await until((tmp_path / "a").exists)
        pids = read_ids(tmp_path / "a")
        await executor.close()
        for outcome in await asyncio.gather(*jobs):
            assert isinstance(outcome, JobCancelled) and "closed" in outcome.reason
        await until_dead(*pids, limit_s=5)
        with pytest.raises(ExecutorError, match="closed"):
            await executor.submit(job(3, echo="x"))
        await executor.close()


async def test_the_death_of_the_hub_ends_the_workers(tmp_path: Path) -> None:
    opening = "open_local(WorkerSpec(task=open_fake_task), num_workers=1)"
    hub = await run_hub(opening, path=tmp_path / "a")
    try:
        await until((tmp_path / "a").exists)
        pids = read_ids(tmp_path / "a")
        assert all(map(is_alive, pids))
    finally:
        hub.kill()
        await hub.wait()
    await until_dead(*pids, limit_s=10)


async def test_a_fork_of_the_hub_does_not_keep_the_workers(tmp_path: Path) -> None:
    """It holds the other ends of their pipes, which therefore stay open."""
    opening = "open_local(WorkerSpec(task=open_fake_task), num_workers=1)"
    fork = f"""if os.fork() == 0:
                    open({str(tmp_path / "fork")!r}, "w").write(str(os.getpid()))
                    time.sleep(60)"""
    hub = await run_hub(opening, path=tmp_path / "a", before=fork)
    try:
        await until(lambda: all((tmp_path / name).exists() for name in ("a", "fork")))
        pids = read_ids(tmp_path / "a")
    finally:
        hub.kill()
        await hub.wait()
    try:
        await until_dead(*pids, limit_s=10)
    finally:
        [fork_id] = read_ids(tmp_path / "fork")
        os.kill(fork_id, signal.SIGKILL)


async def test_a_task_that_refuses_this_machine_is_told_at_once() -> None:
    refusing = WorkerSpec(task=open_fake_task, settings=b'{"refuse": "No sandbox works here."}')
    with pytest.raises(ExecutorError, match="local/0, local/1: No sandbox works here"):
        async with open_local(refusing, num_workers=2):
            pass


async def test_a_worker_that_cannot_be_spawned_is_tried_again_and_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool_module, "RESTARTS", Backoff(first_s=0.0, longest_s=0.0))
    async with open_local(FAKE, num_workers=1) as executor:
        monkeypatch.setattr(sys, "executable", "/no/such/python")
        assert isinstance(await executor.submit(job(1, exit=1)), WorkerLost)
        with pytest.raises(ExecutorError, match="could not be started: No such file"):
            await executor.submit(job(2, echo=1))


@pytest.mark.parametrize("number", [0, -1])
async def test_an_executor_without_workers_is_refused(number: int) -> None:
    with pytest.raises(ConfigError, match=f"`num_workers` is {number}"):
        async with open_local(FAKE, num_workers=number):
            pass


async def test_a_task_that_kills_every_worker_while_it_opens_ends_with_the_reason() -> None:
    dying = WorkerSpec(task=open_fake_task, settings=b'{"exit": 7}')
    with pytest.raises(ExecutorError, match="ended with code 7"):
        async with open_local(dying, num_workers=1):
            pass


async def test_a_worker_of_another_version_gets_no_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after an upgrade in the middle of a run: the worker that replaces one is newer."""
    info = tmp_path / "rookery-99.0.dist-info"
    async with open_local(FAKE, num_workers=1) as executor:
        assert output(await executor.submit(job(1, echo="x"))) == "x"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rookery\nVersion: 99.0\n")
        paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
        monkeypatch.setenv("PYTHONPATH", paths)
        assert isinstance(await executor.submit(job(2, exit=1)), WorkerLost)
        with pytest.raises(ExecutorError, match=rf"has Rookery 99\.0, this is {read_version()}"):
            await executor.submit(job(3, echo="x"))
        [worker] = executor.workers
        assert worker.version == "99.0" and worker.refusal and executor.capacity == 0


async def test_workers_read_the_folder_as_it_was_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    folder = tmp_path / "problem"
    folder.mkdir()
    (folder / "evaluator.py").write_text("first")
    spec = WorkerSpec(task=open_fake_task, folder=pack_folder(folder))
    (folder / "evaluator.py").write_text("second")
    async with open_local(spec, num_workers=2) as executor:
        assert output(await executor.submit(job(1, read="evaluator.py"))) == "first"
        [store] = [path for path in os.listdir(tmp_path) if path.startswith("rookery-folders")]
        assert len(os.listdir(tmp_path / store)) == 2, "the folder and its lock"
    assert not os.listdir(tmp_path / store)


async def test_payloads_and_outputs_travel_whole_up_to_a_limit() -> None:
    async with open_local(FAKE, num_workers=1) as executor:
        text = "\n\0é" * 1_000_000
        assert output(await executor.submit(job(1, echo=text))) == text
        large = Job(attempt=2, epoch=0, payload=bytes(MAX_MESSAGE_BYTES + 1), limit_s=1)
        with pytest.raises(ExecutorError, match="attempt 2 has"):
            await executor.submit(large)
        assert json.loads(b"1") == output(await executor.submit(job(2, echo=1)))


async def test_a_worker_imports_tasks_of_this_package_alone() -> None:
    with pytest.raises(ConfigError, match="cannot run posix:system: give a function of"):
        WorkerSpec(task=os.system)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="cannot run subprocess:run"):
        await open_task("subprocess:run", b"", None)


async def test_a_cancelled_caller_cancels_its_job(tmp_path: Path) -> None:
    async with open_local(FAKE, num_workers=1) as executor:
        running = asyncio.create_task(executor.submit(job(1, wait=str(tmp_path / "a"))))
        await until((tmp_path / "a").exists)
        pids = read_ids(tmp_path / "a")
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await until_dead(*pids, limit_s=5)
        assert output(await executor.submit(job(1, epoch=1, echo="x"))) == "x"
