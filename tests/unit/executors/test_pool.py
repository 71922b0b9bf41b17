"""The pool over scripted workers: epochs, late answers, workers that end at a bad moment."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from executors.jobs import job

from rookery.errors import ExecutorError
from rookery.executors import pool as pool_module
from rookery.executors.pool import WorkerPool, open_pool
from rookery.executors.worker import JobReply, WorkerGone, WorkerRefused
from rookery.runtime.retry import Backoff
from rookery.types import Job, JobCancelled, JobDone, WorkerInfo, WorkerLost

pytestmark = pytest.mark.timeout(30)


class ScriptedWorker:
    """Answers when told to. Killed, it is gone when told to: as a node that is slow to die."""

    def __init__(self, name: str) -> None:
        self.info = WorkerInfo(name=name)
        self.gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.jobs: list[Job] = []
        self.answers: asyncio.Queue[JobReply | WorkerGone] = asyncio.Queue()
        self.num_kills = 0
        self.is_closed = False

    async def run(self, job: Job) -> JobReply:
        self.jobs.append(job)
        answer = await self.answers.get()
        if isinstance(answer, WorkerGone):
            raise answer
        return answer

    def kill(self) -> None:
        self.num_kills += 1

    async def close(self) -> None:
        self.is_closed = True

    def answer(self, content: bytes) -> None:
        self.answers.put_nowait(JobReply(is_error=False, content=content, seconds=0.5))

    def die(self, reason: str) -> None:
        self.gone.set_result(reason)
        self.answers.put_nowait(WorkerGone(reason))


class Script:
    """Starts workers, and remembers them."""

    def __init__(self) -> None:
        self.workers: list[ScriptedWorker] = []
        self.errors: list[Exception] = []
        """Raised by the next starts, in order."""

    async def start(self, slot: str) -> ScriptedWorker:
        if self.errors:
            raise self.errors.pop(0)
        self.workers.append(ScriptedWorker(slot))
        return self.workers[-1]


async def turns() -> None:
    """Let every task that can run do so."""
    for _ in range(20):
        await asyncio.sleep(0)


@asynccontextmanager
async def opened(script: Script, *, num_slots: int = 1) -> AsyncIterator[WorkerPool]:
    async with open_pool(script.start, down_s=0.0) as pool:
        for number in range(num_slots):
            pool.add_slot(f"slot/{number}")
        await pool.wait_ready()
        await turns()
        yield pool


async def test_the_same_epoch_twice_is_one_job() -> None:
    script = Script()
    async with opened(script, num_slots=2) as pool:
        both = asyncio.gather(*(pool.submit(job(7, echo=1)) for _ in range(2)))
        await turns()
        [worker] = [worker for worker in script.workers if worker.jobs]
        worker.answer(b"out")
        first, second = await both
        assert first is second and first == JobDone(
            output=b"out", seconds=0.5, worker=worker.info.name
        )
        assert len(worker.jobs) == 1 and pool.num_late == 0


async def test_a_newer_epoch_replaces_the_older_and_its_late_answer_is_dropped() -> None:
    script = Script()
    async with opened(script) as pool:
        old = asyncio.create_task(pool.submit(job(7, echo="old")))
        await turns()
        new = asyncio.create_task(pool.submit(job(7, epoch=1, echo="new")))
        assert await old == JobCancelled(reason="Epoch 1 replaced it.")
        [first] = script.workers
        assert first.num_kills == 1
        first.answer(b"old")
        await turns()
        _, second = script.workers
        assert first.is_closed and [j.epoch for j in first.jobs] == [0]
        second.answer(b"new")
        outcome = await new
        assert isinstance(outcome, JobDone) and outcome.output == b"new" and pool.num_late == 1


async def test_an_older_epoch_is_not_run() -> None:
    script = Script()
    async with opened(script) as pool:
        new = asyncio.create_task(pool.submit(job(7, epoch=3, echo=1)))
        await turns()
        old = await pool.submit(job(7, epoch=2, echo=1))
        assert isinstance(old, JobCancelled) and "Epoch 3" in old.reason and pool.num_late == 1
        with pytest.raises(ExecutorError, match="two payloads"):
            await pool.submit(job(7, epoch=3, echo=2))
        script.workers[0].answer(b"out")
        assert isinstance(await new, JobDone)


async def test_no_job_is_given_to_a_worker_that_is_being_killed() -> None:
    script = Script()
    async with opened(script) as pool:
        late = asyncio.create_task(pool.submit(job(1, limit_s=0.01, echo=1)))
        waiting = asyncio.create_task(pool.submit(job(2, echo=2)))
        assert isinstance(await late, WorkerLost)
        await turns()
        first, second = script.workers
        assert first.num_kills == 1 and not first.gone.done()
        assert [j.attempt for j in first.jobs] == [1] and [j.attempt for j in second.jobs] == [2]
        second.answer(b"out")
        assert isinstance(await waiting, JobDone)


async def test_a_job_cancelled_on_its_way_to_a_worker_does_not_run() -> None:
    script = Script()
    async with opened(script) as pool:
        cancelled = asyncio.create_task(pool.submit(job(1, echo=1)))
        await asyncio.sleep(0)  # the job is given to the idle worker, which has not run since
        pool.cancel(1)
        assert isinstance(await cancelled, JobCancelled)
        second = asyncio.create_task(pool.submit(job(2, echo=2)))
        await turns()
        [worker] = script.workers
        assert [j.attempt for j in worker.jobs] == [2] and worker.num_kills == 0
        worker.answer(b"2")
        assert isinstance(await second, JobDone)


async def test_a_job_that_meets_a_dead_idle_worker_goes_to_the_next() -> None:
    script = Script()
    async with opened(script) as pool:
        done = asyncio.create_task(pool.submit(job(1, echo=1)))
        await turns()
        script.workers[0].answer(b"1")
        await done
        await turns()
        waiting = asyncio.create_task(pool.submit(job(2, echo=2)))
        script.workers[0].gone.set_result("killed")
        await turns()
        script.workers[1].answer(b"2")
        outcome = await waiting
        assert isinstance(outcome, JobDone) and outcome.output == b"2"
        assert [j.attempt for j in script.workers[0].jobs] == [1]


async def test_a_slot_that_cannot_start_is_given_up_and_the_others_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool_module, "RESTARTS", Backoff(first_s=0.0, longest_s=0.0))
    script = Script()
    async with opened(script) as pool:
        script.errors = [WorkerGone("no memory")] * pool_module.START_ATTEMPTS
        pool.add_slot("bad")
        await turns()
        assert pool.capacity == 1
        names = [(worker.name, worker.refusal) for worker in pool.workers]
        assert names == [("slot/0", ""), ("bad", "no memory")]


async def test_when_the_last_worker_is_refused_all_who_wait_are_told() -> None:
    script = Script()
    async with opened(script) as pool:
        running = asyncio.create_task(pool.submit(job(1, echo=1)))
        waiting = asyncio.create_task(pool.submit(job(2, echo=1)))
        await turns()
        info = WorkerInfo(name="slot/0", version="0.0")
        script.errors = [WorkerRefused("No sandbox.", info=info)]
        script.workers[0].die("killed")
        assert isinstance(await running, WorkerLost)
        with pytest.raises(ExecutorError, match=r"No worker can run jobs\. slot/0: No sandbox"):
            await waiting
        with pytest.raises(ExecutorError, match="No sandbox"):
            await pool.submit(job(3, echo=1))


async def test_a_refusal_of_many_lines_is_told_whole_once(caplog: pytest.LogCaptureFixture) -> None:
    refusal = "The import failed:\nTraceback\n  line 1\nModuleNotFoundError: nothing"
    script = Script()
    script.errors = [
        WorkerRefused(refusal, info=WorkerInfo(name=name)) for name in ("slot/0", "slot/1")
    ]
    with pytest.raises(ExecutorError) as told:
        async with opened(script, num_slots=2) as pool:
            await pool.submit(job(1, echo=1))
    assert str(told.value).count("line 1") == 1
    assert "slot/0, slot/1: The import failed" in str(told.value)
    assert not caplog.text, "the error says it"
    script.errors = [WorkerRefused(refusal, info=WorkerInfo(name="slot/0"))]
    async with opened(script, num_slots=2):
        assert "The import failed: ModuleNotFoundError: nothing" in caplog.text
    assert "line 1" not in caplog.text


@pytest.mark.parametrize("startup_s", [0.0, 30.0])
async def test_a_worker_has_the_time_that_its_task_needs(
    startup_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "RESTARTS", Backoff(first_s=0.0, longest_s=0.0))
    monkeypatch.setattr(pool_module, "START_S", 0.01)
    script = Script()

    async def start(slot: str) -> ScriptedWorker:
        await asyncio.sleep(0.1)
        return await script.start(slot)

    async with open_pool(start, down_s=0.0, startup_s=startup_s) as pool:
        pool.add_slot("slow")
        if startup_s:
            await pool.wait_ready()
        else:
            with pytest.raises(ExecutorError, match=r"not ready within .*`startup_s` \(0 s\)"):
                await pool.wait_ready()


async def test_a_bug_in_starting_ends_the_block_loudly() -> None:
    script = Script()
    script.errors = [LookupError("a bug")]
    with pytest.raises(LookupError, match="a bug"):
        async with opened(script):
            pass


async def test_one_of_two_callers_may_leave() -> None:
    script = Script()
    async with opened(script) as pool:
        stays, leaves = (asyncio.create_task(pool.submit(job(7, echo=1))) for _ in range(2))
        await turns()
        leaves.cancel()
        await turns()
        assert script.workers[0].num_kills == 0
        script.workers[0].answer(b"out")
        assert isinstance(await stays, JobDone)
