"""Workers on a real Ray cluster of several nodes on this machine. About a minute.

Needs Ray (`pip install 'rookery[ray]'`) in this interpreter.
"""

import asyncio
import importlib.util
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rookery.errors import ExecutorError
from rookery.executors import WorkerSpec, open_ray, pack_folder
from rookery.executors.worker_task import read_version
from rookery.ports import Executor
from rookery.types import Job, JobCancelled, JobDone, JobFailed, JobOutcome, WorkerLost

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(180),
]
FAKE = WorkerSpec(task="fake")
NODE_DEATH_S = 15.0
"""A killed node's jobs are reported within this; 2 to 3 s on two cores."""
NODE = {"object_store_memory": 80 << 20}


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A head node with one CPU."""
    from ray.cluster_utils import Cluster

    # The interpreter of the nodes' workers finds the same Rookery.
    head = {"num_cpus": 1, "include_dashboard": False, **NODE}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        yield cluster
    finally:
        cluster.shutdown()


def job(attempt: int, *, epoch: int = 0, **action: object) -> Job:
    return Job(attempt=attempt, epoch=epoch, payload=json.dumps(action).encode(), limit_s=60)


def output(outcome: JobOutcome) -> object:
    assert isinstance(outcome, JobDone), outcome
    return json.loads(outcome.output)


async def until(condition: Any, limit_s: float = 60.0) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.05)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


async def test_a_killed_node_loses_its_jobs_and_nothing_else(cluster: Any, tmp_path: Path) -> None:
    second = cluster.add_node(num_cpus=2, **NODE)
    folder = tmp_path / "problem"
    folder.mkdir()
    (folder / "data.txt").write_text("packed")
    spec = WorkerSpec(task="fake", folder=pack_folder(folder))
    async with open_ray(spec, address=cluster.address) as executor:
        assert isinstance(executor, Executor)
        await until(lambda: executor.capacity == 3)
        assert {w.version for w in executor.workers} == {read_version()}
        outcomes = await asyncio.gather(*(executor.submit(job(i, echo=i)) for i in range(200)))
        assert [output(outcome) for outcome in outcomes] == list(range(200))
        assert output(await executor.submit(job(1, read="data.txt"))) == "packed"
        failed = await executor.submit(job(2, fail="bad program"))
        assert isinstance(failed, JobFailed) and "ValueError: bad program" in failed.error
        for epoch in range(2):
            assert isinstance(await executor.submit(job(3, epoch=epoch, exit=3)), WorkerLost)
        await until(lambda: executor.capacity == 3)

        files = [tmp_path / str(i) for i in range(3)]
        jobs = [
            asyncio.create_task(executor.submit(job(i, wait=str(file))))
            for i, file in enumerate(files)
        ]
        await until(lambda: all(file.exists() for file in files))
        cluster.remove_node(second, allow_graceful=False)
        await until(lambda: sum(task.done() for task in jobs) == 2, NODE_DEATH_S)
        lost = [task.result() for task in jobs if task.done()]
        assert all(isinstance(outcome, WorkerLost) for outcome in lost), lost
        [running] = [i for i, task in enumerate(jobs) if not task.done()]
        assert is_alive(int(files[running].read_text().split()[0])), "the other node's job runs"

        cluster.add_node(num_cpus=1, **NODE)  # a node that joins gets work
        assert output(await executor.submit(job(10, echo="again"))) == "again"
        executor.cancel(running)
        assert isinstance(await jobs[running], JobCancelled)
        pids = [int(word) for file in files for word in file.read_text().split()]
        await until(lambda: not any(map(is_alive, pids)), 10)


async def test_a_node_that_cannot_run_the_task_gets_no_work(cluster: Any, tmp_path: Path) -> None:
    info = tmp_path / "rookery-99.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rookery\nVersion: 99.0\n")
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    cluster.add_node(num_cpus=1, env_vars={"PYTHONPATH": paths}, **NODE)
    cluster.add_node(num_cpus=1, env_vars={"TEST_NO_SANDBOX": "1"}, **NODE)
    settings = {"refuse": "No sandbox works here.", "where": "TEST_NO_SANDBOX"}
    spec = WorkerSpec(task="fake", settings=json.dumps(settings).encode())
    async with open_ray(spec, address=cluster.address) as executor:
        await until(lambda: len(executor.workers) == 3)
        refusals = sorted(worker.refusal for worker in executor.workers if worker.refusal)
        assert refusals == [
            f"It has Rookery 99.0, this is {read_version()}. Install the same there.",
            "No sandbox works here.",
        ]
        [good] = [worker.name for worker in executor.workers if not worker.refusal]
        outcomes = await asyncio.gather(*(executor.submit(job(i, pid=0)) for i in range(20)))
        assert {o.worker for o in outcomes if isinstance(o, JobDone)} == {good}


async def test_a_cluster_is_started_where_none_is_named_and_ends_with_the_hub(
    tmp_path: Path,
) -> None:
    code = f"""
        import asyncio
        from rookery.executors import WorkerSpec, open_ray
        from rookery.types import Job

        async def main():
            async with open_ray(WorkerSpec(task="fake"), num_workers=1) as executor:
                payload = b'{{"wait": "{tmp_path / "a"}"}}'
                await executor.submit(Job(attempt=1, epoch=0, payload=payload, limit_s=60))

        asyncio.run(main())
    """
    hub = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)])
    try:
        await until((tmp_path / "a").exists)
    finally:
        hub.send_signal(signal.SIGKILL)
        hub.wait()
    pids = [int(word) for word in (tmp_path / "a").read_text().split()]
    await until(lambda: not any(map(is_alive, pids)), 30)


async def test_no_cluster_at_the_address_is_a_sentence() -> None:
    with pytest.raises(ExecutorError, match="Connecting to the Ray cluster at auto"):
        async with open_ray(FAKE, address="auto"):
            pass
