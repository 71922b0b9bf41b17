"""Starts servers as processes that this one owns, and stops them whatever happens.

    async with open_servers(LaunchConfig(model="Qwen/Qwen2.5-0.5B"), progress=show) as servers:
        servers[0].url                       # "http://127.0.0.1:18000", healthy
        await servers[0].restart()           # after it died

They are stopped when the block ends, by an error or by Ctrl-C, as process groups and by id. When
this process is killed instead, the kernel tells them to stop; the ledger finds what is left.
"""

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from rookery.errors import FleetError, boundary
from rookery.fleet import inside
from rookery.fleet.client import Client, open_session
from rookery.fleet.diagnosis import explain_failure, last_lines
from rookery.fleet.ledger import (
    Ledger,
    ServerRecord,
    find_ledgers,
    process_start,
    signal_group,
    state_folder,
    stop_processes,
)
from rookery.fleet.ports import Reservation, reserve_port
from rookery.fleet.settings import (
    INSIDE_MODULE,
    LaunchConfig,
    command_line,
    environment,
    num_replicas,
)

__all__ = ["LaunchProgress", "LocalServer", "Progress", "open_servers", "reap_orphans"]

logger = logging.getLogger(__name__)
POLL_S = 0.5
STOP_S = 15.0
"""How long a server may take to stop by itself; vLLM needs two seconds."""
LOGS_S = 7 * 24 * 3600.0
_GUARD = (
    "import ctypes,os,sys;"
    "ctypes.CDLL(None).prctl(1,15);"
    "os.getppid()==int(sys.argv[1]) or sys.exit(1);"
    "os.execv(sys.executable,[sys.executable,*sys.argv[2:]])"
)
"""Runs first in the new process, on Linux: asks the kernel for SIGTERM when its parent dies, then
becomes the server. The option outlives exec."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchProgress:
    """One server on its way up: `(index=0, seconds=12.5, line="Loading weights", ...)`."""

    index: int
    num_servers: int
    url: str
    seconds: float
    line: str
    """The last line of its log."""
    is_ready: bool


Progress = Callable[[LaunchProgress], None]


class LocalServer:
    """One server process: started, watched for health, stopped."""

    def __init__(
        self, index: int, *, config: LaunchConfig, ledger: Ledger, client: Client, room: "_Room"
    ) -> None:
        self.index = index
        self.config = config
        self.url = client.url
        self.log = ledger.folder / f"server-{index}.log"
        self.num_restarts = 0
        self._client = client
        self._room = room
        self._process: asyncio.subprocess.Process | None = None

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    @property
    def record(self) -> ServerRecord:
        return ServerRecord(
            pid=self.pid,
            start=process_start(self.pid) if self.pid else "",
            url=self.url,
            model=self.config.model,
            log=str(self.log),
        )

    async def start(self) -> None:
        """Start the process; `wait_ready` waits for it to serve."""
        command = command_line(self.config, port=self._room.ports[self.index].port)
        guard = ["-c", _GUARD, str(os.getpid())] if sys.platform == "linux" else []
        env = environment(
            self.config,
            index=self.index,
            num_servers=len(self._room.ports),
            modules=self._room.modules,
            adapters=self._room.adapters,
        )
        remedy = "Set launch.python to the interpreter that has vLLM."
        with (
            boundary(
                FleetError,
                f"Starting {self.config.python}",
                foreign=(OSError,),
                remedy={OSError: remedy},
            ),
            self.log.open("ab") as log,
        ):
            self._process = await asyncio.create_subprocess_exec(
                self.config.python, *guard, *command,
                stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log,
                env=env, start_new_session=True,
            )  # fmt: skip
        logger.info("server %d: process %d on %s", self.index, self.pid, self.url)

    async def wait_ready(self, report: Callable[[float, str, bool], None]) -> None:
        """Wait for health; FleetError with the log's end when it dies or takes too long."""
        began = time.monotonic()
        while True:
            seconds = time.monotonic() - began
            if not self.is_alive:
                raise self._failure(f"ended with status {self._status} after {seconds:.0f} s")
            if await self._client.is_healthy():
                report(seconds, "ready", True)
                return
            if seconds > self.config.startup_s:
                raise self._failure(
                    f"was not ready after {seconds:.0f} s (launch.startup_s allows "
                    f"{self.config.startup_s:g})"
                )
            line = (last_lines(self.log, num=1) or [""])[0]
            report(seconds, line, False)
            await asyncio.sleep(POLL_S)

    async def restart(self) -> None:
        """Start a dead server again on its port and wait for it; a limited number of times."""
        if self.num_restarts >= self.config.restarts:
            raise self._failure(f"died {self.num_restarts + 1} times")
        self.num_restarts += 1
        logger.warning(
            "server %d ended with status %s: starting it again", self.index, self._status
        )
        await self.stop()
        await self.start()
        self._room.write_ledger()
        await self.wait_ready(lambda _seconds, _line, _is_ready: None)

    async def stop(self) -> None:
        """Ask the whole group to stop, wait, force what is left."""
        process = self._process
        if process is None:
            return
        signal_group(process.pid, signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await process.wait()
        signal_group(process.pid, signal.SIGKILL)
        await process.wait()

    def kill(self) -> None:
        """Force the whole group to end, now."""
        if self._process is not None:
            signal_group(self._process.pid, signal.SIGKILL)

    @property
    def _status(self) -> str:
        code = self._process.returncode if self._process is not None else None
        if code is None:
            return "unknown"
        return signal.Signals(-code).name if code < 0 else str(code)

    def _failure(self, what: str) -> FleetError:
        lines = "\n".join(f"  | {line}" for line in last_lines(self.log))
        remedy = explain_failure(self.log)
        return FleetError(
            f"The server of {self.config.model} on {self.url} {what}."
            + (f" {remedy}" if remedy else "")
            + (f"\nThe end of its log, {self.log}:\n{lines}" if lines else "")
        )


@dataclass(slots=True)
class _Room:
    """What the servers of one pool share."""

    ports: list[Reservation]
    modules: Path
    adapters: Path | None
    ledger: Ledger
    servers: list[LocalServer]

    def write_ledger(self) -> None:
        self.ledger.write([server.record for server in self.servers if server.pid])


@asynccontextmanager
async def open_servers(
    config: LaunchConfig,
    *,
    progress: Progress | None = None,
    adapters: Path | None = None,
    purpose: str = "run",
) -> AsyncIterator[list[LocalServer]]:
    """Start all servers at once, yield them healthy, stop them at the end.

    `adapters` is a folder that the servers search for adapters by name, besides loading them.
    """
    root = state_folder()
    await asyncio.to_thread(reap_orphans, root)
    ledger = Ledger.create(root, purpose=purpose)
    is_fine = False
    async with open_session() as session:
        room = _prepare(config, ledger=ledger, session=session, adapters=adapters)
        try:
            for server in room.servers:
                await server.start()
                room.write_ledger()
            await _wait_all(room.servers, progress)
            yield room.servers
            is_fine = True
        finally:
            await _stop_all(room.servers)
            for port in room.ports:
                port.release()
            died = any(server.num_restarts for server in room.servers)
            ledger.close(keep_logs=died or not is_fine)


def reap_orphans(root: Path) -> int:
    """Stop servers whose owner died without stopping them; how many there were.

    Logs that were kept because something went wrong go after a week.
    """
    num = 0
    _remove_old_logs(root)
    for found in find_ledgers(root):
        if not found.has_owner:
            stopped = stop_processes(found.records)
            if stopped:
                logger.warning("stopped %d servers that process %d left", stopped, found.owner_pid)
            num += stopped
            shutil.rmtree(found.folder, ignore_errors=True)
    return num


def _remove_old_logs(root: Path) -> None:
    for folder in root.iterdir() if root.is_dir() else ():
        with contextlib.suppress(OSError):
            is_old = time.time() - folder.stat().st_mtime > LOGS_S
            if is_old and not (folder / "ledger.json").exists():
                shutil.rmtree(folder, ignore_errors=True)


def _prepare(
    config: LaunchConfig, *, ledger: Ledger, session: aiohttp.ClientSession, adapters: Path | None
) -> _Room:
    modules = ledger.folder / "modules"
    modules.mkdir()
    # Alone in a folder of its own: the servers' Python needs nothing else of Rookery.
    source, ignored = Path(inside.__file__).parent, shutil.ignore_patterns("__pycache__")
    shutil.copytree(source, modules / INSIDE_MODULE, ignore=ignored)
    room = _Room([], modules, adapters, ledger, [])
    for index in range(num_replicas(config)):
        room.ports.append(reserve_port(config.host, first=config.port))
        host = f"[{config.host}]" if ":" in config.host else config.host
        client = Client(f"http://{host}:{room.ports[-1].port}", session=session)
        room.servers.append(
            LocalServer(index, config=config, ledger=ledger, client=client, room=room)
        )
    return room


async def _wait_all(servers: Sequence[LocalServer], progress: Progress | None) -> None:
    """All together; the first failure ends the waiting for the others."""

    def reporter(server: LocalServer) -> Callable[[float, str, bool], None]:
        def report(seconds: float, line: str, is_ready: bool) -> None:
            if progress is not None:
                progress(
                    LaunchProgress(
                        index=server.index,
                        num_servers=len(servers),
                        url=server.url,
                        seconds=seconds,
                        line=line,
                        is_ready=is_ready,
                    )
                )

        return report

    try:
        async with asyncio.TaskGroup() as group:
            for server in servers:
                group.create_task(server.wait_ready(reporter(server)))
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None


async def _stop_all(servers: Sequence[LocalServer]) -> None:
    """Stop every server even when this is cancelled again meanwhile."""
    try:
        await asyncio.gather(*(server.stop() for server in servers))
    except BaseException:  # a second Ctrl-C too: none is left running
        for server in servers:
            server.kill()
        raise
