"""Workers on a real Ray cluster of several nodes on this machine. Ten seconds, and
with ROOKERY_LONG two minutes.

Needs Ray (`pip install 'rookery[ray]'`) in this interpreter.
"""

import asyncio
import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from executors.jobs import is_alive, job, output, read_ids, run_hub, until, until_dead
from marks import long

from rookery.errors import ExecutorError
from rookery.executors import WorkerSpec, open_ray, pack_folder
from rookery.executors.worker import read_version
from rookery.ports import Executor
from rookery.testing import open_fake_task
from rookery.types import JobCancelled, JobDone, JobFailed, WorkerLost

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(180),
]
FAKE = WorkerSpec(task=open_fake_task)
NODE_DEATH_S = 90.0
"""A killed node's jobs are reported within this; 2 to 3 s on two idle cores."""
NODE = {"object_store_memory": 80 << 20}


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A head node with one CPU."""
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 1, "include_dashboard": False, **NODE}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        yield cluster
    finally:
        cluster.shutdown()


@long
async def test_a_killed_node_loses_its_jobs_and_nothing_else(cluster: Any, tmp_path: Path) -> None:
    second = cluster.add_node(num_cpus=2, **NODE)
    folder = tmp_path / "problem"
    folder.mkdir()
    (folder / "data.txt").write_text("packed")
    spec = WorkerSpec(task=open_fake_task, folder=pack_folder(folder))
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
        await until(lambda: sum(task.done() for task in jobs) == 2, limit_s=NODE_DEATH_S)
        lost = [task.result() for task in jobs if task.done()]
        assert all(isinstance(outcome, WorkerLost) for outcome in lost), lost
        [running] = [i for i, task in enumerate(jobs) if not task.done()]
        assert all(map(is_alive, read_ids(files[running]))), "the other node's job runs"

        cluster.add_node(num_cpus=1, **NODE)  # a node that joins gets work
        assert output(await executor.submit(job(10, echo="again"))) == "again"
        executor.cancel(running)
        assert isinstance(await jobs[running], JobCancelled)
        await until_dead(*read_ids(*files), limit_s=60)


@long
async def test_a_node_that_cannot_run_the_task_gets_no_work(cluster: Any, tmp_path: Path) -> None:
    info = tmp_path / "rookery-99.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rookery\nVersion: 99.0\n")
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    cluster.add_node(num_cpus=1, env_vars={"PYTHONPATH": paths}, **NODE)
    cluster.add_node(num_cpus=1, env_vars={"TEST_NO_SANDBOX": "1"}, **NODE)
    settings = {"refuse": "No sandbox works here.", "where": "TEST_NO_SANDBOX"}
    spec = WorkerSpec(task=open_fake_task, settings=json.dumps(settings).encode())
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


@long
async def test_a_cluster_is_started_where_none_is_named_and_ends_with_the_hub(
    tmp_path: Path,
) -> None:
    opening = "open_ray(WorkerSpec(task=open_fake_task), num_workers=1)"
    hub = await run_hub(opening, path=tmp_path / "a")
    try:
        await until((tmp_path / "a").exists, limit_s=120)
    finally:
        hub.kill()
        await hub.wait()
    await until_dead(*read_ids(tmp_path / "a"), limit_s=60)


async def test_no_cluster_at_the_address_is_a_sentence() -> None:
    with pytest.raises(ExecutorError, match=r"at 127\.0\.0\.1:1: nothing answers there"):
        async with asyncio.timeout(30), open_ray(FAKE, address="127.0.0.1:1"):
            pass
