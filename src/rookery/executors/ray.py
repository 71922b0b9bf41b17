"""Workers as actors on the nodes of a Ray cluster.

    async with open_ray(spec, address="auto", num_workers=64) as executor:
        outcome = await executor.submit(job)

Ray places actors and carries messages. The caller handles lost workers, so Ray retries and restarts
nothing. Each actor is bound to one node, round-robin over the nodes, one CPU each. Nodes that join
are used; a node whose workers are refused gets no work. The folder of the spec is put into Ray's
object store once, and nodes that lack it read it from there: no shared disk is needed.

A dead worker process is detected at once. A dead node is detected by Ray: within seconds if its
connections break, by its health check (`health_check_*` of its system config) if it goes silent.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

from rookery.errors import ConfigError, ExecutorError, RookeryError, boundary, install_extra
from rookery.executors.pool import WorkerPool, check_num_workers, closed_unless_opened, open_pool
from rookery.executors.worker import (
    CLOSE_S,
    JobReply,
    WorkerGone,
    WorkerHost,
    WorkerRefused,
    WorkerSpec,
    check_version,
    count_cores,
    read_version,
)
from rookery.runtime.concurrency import task_group
from rookery.types import Job, WorkerInfo

__all__ = ["RayHost", "connect_ray", "open_ray"]

# The connection to a Ray cluster.
#
#   async with connect_ray("auto", error=FleetError) as ray:
#       ...


REACH_S = 10.0


@asynccontextmanager
async def connect_ray(
    address: str, *, error: type[RookeryError], **options: object
) -> AsyncIterator[Any]:
    """Yield the module `ray`, connected to the cluster at `address`; "local" starts a cluster. An
    existing connection of this process is used and kept. Options are those of `ray.init`."""
    try:
        import ray
    except ImportError as missing:
        raise ConfigError(f"Work on a cluster needs Ray: {install_extra('ray')}.") from missing
    was_connected = ray.is_initialized()
    if not was_connected:
        with boundary(error, f"Connecting to the Ray cluster at {address}"):
            await _check_reachable(address)
            await asyncio.to_thread(ray.init, address, **options)
    try:
        yield ray
    finally:
        if not was_connected:
            # Our own cluster dies with the thread that started it, and must not be found again.
            await asyncio.to_thread(ray.shutdown)


async def _check_reachable(address: str) -> None:
    """Check the address first: Ray itself tries for minutes, in a thread that cannot be ended."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():  # "auto" and "local"
        return
    try:
        async with asyncio.timeout(REACH_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except OSError as cause:  # includes timeouts
        raise ConnectionError(
            f"nothing answers there within {REACH_S:g} s. Start one with `ray start --head`, or "
            "name no address to start one on this machine"
        ) from cause
    writer.close()


NODES_POLL_S = 2.0
"""Seconds between looks for new nodes."""
DOWN_S = 60.0
"""Seconds that jobs wait for a node after the last one is lost."""
HEAD_S = 45.0
"""Most seconds of silence of the head. After 60 s Ray ends this process itself, from outside of
Python; failing earlier lets the caller end in order."""
MAX_REASON_CHARS = 500


class RayHost:
    """The actor. It runs in Ray's event loop."""

    def __init__(self) -> None:
        self._host = WorkerHost()

    async def hello(self) -> tuple[str, int]:
        return read_version(), count_cores()

    async def open(
        self, task: str, settings: bytes, digest: str | None, content: list[Any]
    ) -> tuple[bool, str]:
        """`content` holds a reference, not the folder, which is read only if the node lacks it."""
        import ray

        return await self._host.open(
            task, settings, digest=digest, fetch=lambda: bytes(ray.get(content[0]))
        )

    async def run(self, payload: bytes) -> JobReply:
        return await self._host.run(payload)

    async def stay(self) -> None:
        """Never return: the call fails when the actor ends."""
        await asyncio.Event().wait()

    async def close(self) -> None:
        await self._host.close()


class RayWorker:
    """One actor, as the pool sees it."""

    def __init__(self, name: str, actor: Any, ray: Any) -> None:
        loop = asyncio.get_running_loop()
        self.info = WorkerInfo(name=name)
        self.gone: asyncio.Future[str] = loop.create_future()
        self._actor = actor
        self._ray = ray
        self._killing: asyncio.Future[None] | None = None
        self._staying: asyncio.Future[None] = asyncio.wrap_future(actor.stay.remote().future())
        self._staying.add_done_callback(self._note_end)

    async def open(self, spec: WorkerSpec, content: list[Any]) -> None:
        version, cores = await self._result(self._actor.hello.remote())
        self.info = replace(self.info, version=version, cores=cores)
        check_version(self.info)
        digest = None if spec.folder is None else spec.folder.digest
        opening = self._actor.open.remote(spec.task_name, spec.settings, digest, content)
        is_open, text = await self._result(opening)
        if not is_open:
            raise WorkerRefused(text, info=self.info)
        self.info = replace(self.info, about=text)

    async def run(self, job: Job) -> JobReply:
        answer: JobReply = await self._result(self._actor.run.remote(job.payload))
        return answer

    def kill(self) -> None:
        if self._killing is None:
            loop = asyncio.get_running_loop()
            self._killing = loop.run_in_executor(None, self._ray.kill, self._actor)
            self._note_gone("It was killed.")

    async def close(self) -> None:
        try:
            if not self.gone.done():
                closing = asyncio.wrap_future(self._actor.close.remote().future())
                await asyncio.wait(
                    {closing, self.gone}, timeout=CLOSE_S, return_when=asyncio.FIRST_COMPLETED
                )
                closing.cancel()
        finally:
            self.kill()
            self._staying.cancel()
            await asyncio.wait({self._killing} if self._killing else (), timeout=CLOSE_S)

    async def _result(self, reference: Any) -> Any:
        """Return the result of a call. Ray reports a dead actor late if its node went silent, so
        this does not wait for a worker that is known to be gone."""
        answer = asyncio.wrap_future(reference.future())
        try:
            await asyncio.wait({answer, self.gone}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise WorkerGone(self.gone.result())
            return answer.result()
        except self._ray.exceptions.RayError as error:
            raise WorkerGone(_shorten(error)) from None
        finally:
            answer.cancel()

    def _note_end(self, staying: asyncio.Future[None]) -> None:
        if not staying.cancelled():
            self._note_gone(_shorten(staying.exception()))

    def _note_gone(self, reason: str) -> None:
        if not self.gone.done():
            self.gone.set_result(reason)


def _shorten(error: BaseException | None) -> str:
    """Return Ray's message, cut before most addresses and traces."""
    return " ".join(str(error).split())[:MAX_REASON_CHARS]


@asynccontextmanager
async def open_ray(
    spec: WorkerSpec, *, address: str | None = None, num_workers: int | None = None
) -> AsyncIterator[WorkerPool]:
    """Yield an Executor of at most `num_workers` actors, by default one per CPU of the cluster. At
    least one is ready. Without an address, a cluster is started here and ended with the block."""
    check_num_workers(num_workers)
    options: dict[str, object] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address is None:
        options |= {"num_cpus": num_workers or count_cores(), "include_dashboard": False}
    async with AsyncExitStack() as stack:
        connection = connect_ray(address or "local", error=ExecutorError, **options)
        ray = await stack.enter_async_context(connection)
        content = []
        if spec.folder is not None:
            content = [await asyncio.to_thread(ray.put, spec.folder.content)]

        node_ids: dict[str, str] = {}

        async def start(slot: str) -> RayWorker:
            host = ray.remote(**_placed(node_ids[slot]))(RayHost)
            # It asks the head, and blocks until that answers. An actor without waiters ends with
            # its handle.
            actor = await asyncio.to_thread(host.remote)
            worker = RayWorker(slot, actor, ray)
            async with closed_unless_opened(worker):
                await worker.open(spec, content)
            return worker

        opening = open_pool(start, down_s=DOWN_S, startup_s=spec.startup_s)
        pool = await stack.enter_async_context(opening)
        group = await stack.enter_async_context(task_group())
        watching = group.create_task(_add_nodes(ray, pool, node_ids, num_workers))
        stack.callback(watching.cancel)
        await pool.wait_ready()
        yield pool


def _placed(node_id: str) -> dict[str, Any]:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return {
        "num_cpus": 1,
        "max_restarts": 0,
        "max_task_retries": 0,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False),
    }


async def _add_nodes(
    ray: Any, pool: WorkerPool, node_ids: dict[str, str], num_workers: int | None
) -> None:
    """Give the pool a slot per CPU of every present or new node, up to `num_workers`. A slot that
    ended stays in `node_ids` and is not tried again."""
    while True:
        with boundary(ExecutorError, "Listing the nodes of the Ray cluster"):
            try:
                listed = await asyncio.wait_for(asyncio.to_thread(ray.nodes), HEAD_S)
            except TimeoutError:
                message = f"The head of the Ray cluster did not answer within {HEAD_S:g} s."
                raise ExecutorError(message) from None
            nodes = [node for node in listed if node["Alive"]]
        for slot, node_id in _list_slots(nodes):
            is_full = num_workers is not None and pool.num_slots >= num_workers
            if slot not in node_ids and not is_full:
                node_ids[slot] = node_id
                pool.add_slot(slot)
        await asyncio.sleep(NODES_POLL_S)


def _list_slots(nodes: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return (slot, node id), the first slot of every node before the second of any.

    `("10.0.0.2/1a2b3c4d/0", "1a2b3c4d...")`
    """
    places = [
        (number, f"{node['NodeManagerAddress']}/{node['NodeID'][:8]}/{number}", node["NodeID"])
        for node in nodes
        for number in range(int(node["Resources"].get("CPU", 0)))
    ]
    return [(slot, node_id) for _, slot, node_id in sorted(places)]
