"""Starts servers as child processes, and stops them however this process ends.

    async with open_servers(LaunchConfig(model="Qwen/Qwen2.5-0.5B"), progress=show) as servers:
        servers[0].url                       # "http://127.0.0.1:18000", healthy
        await servers[0].restart()           # after it died

They are stopped as process groups when the block ends, also by an error or Ctrl-C. If this process
is killed, the watcher of each server (`runtime/guard.py`) stops it; the registry finds what is
left.
"""

import asyncio
import contextlib
import logging
import os
import shutil
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from rookery.errors import FleetError, boundary, signal_name
from rookery.fleet import vllm_plugin
from rookery.fleet.http.client import Client, ClientConfig, open_session
from rookery.fleet.servers.log_hints import explain_failure, first_error, last_lines
from rookery.fleet.servers.registry import (
    ServerRecord,
    ServerRegistry,
    process_start,
    reap_orphans,
    state_folder,
)
from rookery.fleet.servers.settings import (
    PLUGIN_MODULE,
    LaunchConfig,
    check_launch,
    command_line,
    environment,
    exported_key,
    num_replicas,
)
from rookery.runtime.file_lock import FileLock
from rookery.runtime.guard import STOP_S
from rookery.runtime.process import ChildProcess
from rookery.runtime.retry import Backoff

__all__ = [
    "HANG_S",
    "LaunchProgress",
    "LocalServer",
    "Progress",
    "is_free",
    "keep_alive",
    "open_servers",
    "reserve_port",
]

# Free TCP ports for servers, reserved against other Rookery processes until the server binds.


FIRST_PORT, LAST_PORT = 18_000, 18_999
"""Below the kernel's range for outgoing connections (32768 and up), so that none of those can take
the port before the server binds it."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """A port that is reserved until it is released."""

    port: int
    lock: FileLock

    def release(self) -> None:
        self.lock.close()


def reserve_port(host: str, *, first: int = FIRST_PORT) -> Reservation:
    """Reserve the first port from `first` on without a listener or another reservation."""
    folder = Path(tempfile.gettempdir()) / f"rookery-ports-{os.getuid()}"
    for port in range(first, max(first, LAST_PORT) + 1):
        with boundary(FleetError, f"Reserving a port in {folder}", foreign=(OSError,)):
            folder.mkdir(mode=0o700, exist_ok=True)
            lock = FileLock(folder / str(port))
            is_ours = lock.take()
        if is_ours and is_free(host, port):
            return Reservation(port, lock)
        lock.close()
    raise FleetError(
        f"No port from {first} to {max(first, LAST_PORT)} is free on {host}: stop what listens "
        "there, or set launch.port to the start of a free range."
    )


def is_free(host: str, port: int) -> bool:
    """True if a server could listen there now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


logger = logging.getLogger(__name__)
POLL_S = 0.5
RESTARTS = Backoff(first_s=2.0, longest_s=60.0)
"""Pauses from the second restart on. Most servers die only once; other causes, such as memory that
another program holds or a recovering driver, take seconds to minutes to pass."""
_SERVED_NAME = "--served-model-name"
HEALTH_LIMIT_S = 20.0
"""Longest wait for `/health`: under load vLLM answers seconds late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchProgress:
    """One starting server: `(index=0, seconds=12.5, line="Loading weights", ...)`."""

    index: int
    num_servers: int
    url: str
    seconds: float
    line: str
    """Last line of its log."""
    is_ready: bool


Progress = Callable[[LaunchProgress], None]


class LocalServer:
    """One server process: started, watched for health, stopped."""

    def __init__(
        self,
        index: int,
        *,
        config: LaunchConfig,
        registry: ServerRegistry,
        client: Client,
        context: "LaunchContext",
    ) -> None:
        self.index = index
        self.config = config
        self.url = client.url
        self.log = registry.folder / f"server-{index}.log"
        self.num_restarts = 0
        self._client = client
        self._context = context
        self._process: ChildProcess | None = None
        self._log_begin = 0
        """Offset in the log of the last start, or of the moment it was ready, in bytes."""
        self._was_ready = False
        """True if it was ready since the last start."""
        self._starting = asyncio.Lock()
        """Held while the process is stopped and started."""

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.is_alive

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
            num_restarts=self.num_restarts,
        )

    async def start(self) -> None:
        """Start the process; `wait_ready` waits for it to serve."""
        port = self._context.ports[self.index].port
        if not is_free(self.config.host, port):
            raise FleetError(
                f"Another program listens on port {port} of {self.config.host}: stop it, or set "
                "launch.port to the start of a free range."
            )
        env = environment(
            self.config,
            index=self.index,
            num_servers=len(self._context.ports),
            modules=self._context.modules,
            adapters=self._context.adapters,
        )
        self._log_begin, self._was_ready = self._log_size(), False
        remedy = "Set launch.python to the interpreter that has vLLM."
        with boundary(
            FleetError,
            f"Starting {self.config.python}",
            foreign=(OSError,),
            remedy={OSError: remedy},
        ):
            command = [self.config.python, *command_line(self.config, port=port)]
            self._process = await ChildProcess.start(command, log=self.log, env=env)
        logger.info("server %d: process %d on %s", self.index, self.pid, self.url)

    async def wait_ready(self, report: Callable[[float, str, bool], None]) -> None:
        """Wait for health; FleetError with its first error if it dies or takes too long."""
        began = time.monotonic()
        while True:
            seconds = time.monotonic() - began
            if not self.is_alive:
                raise self._failure(f"ended with status {self._status} after {seconds:.0f} s")
            if await self._client.is_healthy():
                self._log_begin, self._was_ready = self._log_size(), True
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

    async def wait_ended(self) -> None:
        if self._process is not None:
            await self._process.wait()

    async def is_healthy(self) -> bool:
        return await self._client.is_healthy()

    async def restart(self, why: str = "") -> None:
        """Restart a server on its port, dead or alive, and wait until it serves. A start that fails
        counts towards `launch.restarts`, and the next one waits longer; FleetError with the last
        failure when all are used up. `why` says what is wrong with a live server."""
        pid = self.pid
        async with self._starting:
            if self.pid == pid:  # else `serve_model` has started it meanwhile
                await self._restart(why)

    async def serve_model(self, model: str, *, name: str) -> None:
        """Restart on another model under the same name. `launch.restarts` does not count it."""
        args = [word for word in self.config.args if word not in (_SERVED_NAME, name)]
        update = {"model": model, "args": (*args, _SERVED_NAME, name)}
        async with self._starting:
            self.config = self.config.model_copy(update=update)
            await self.stop()
            await self.start()
            self._context.write_registry()
            await self.wait_ready(lambda _seconds, _line, _is_ready: None)

    async def _restart(self, why: str) -> None:
        await self.stop()
        failure = self._failure(why or f"ended with status {self._status}")
        while self.num_restarts < self.config.restarts:
            self.num_restarts += 1
            logger.warning(
                "starting server %d again, %d of %d: %s",
                self.index, self.num_restarts, self.config.restarts, failure,
            )  # fmt: skip
            await asyncio.sleep(RESTARTS.pause_s(self.num_restarts - 1))
            try:
                await self.start()
                self._context.write_registry()
                await self.wait_ready(lambda _seconds, _line, _is_ready: None)
            except FleetError as error:
                failure = error
                await self.stop()
            else:
                return
        raise FleetError(
            f"Given up after {self.num_restarts} restarts (launch.restarts): {failure}"
        )

    async def stop(self) -> None:
        """Stop the server and all that it started."""
        if self._process is not None:
            await self._process.stop(limit_s=STOP_S)

    def kill(self) -> None:
        """Kill the server and all that it started."""
        if self._process is not None:
            self._process.kill()

    @property
    def _status(self) -> str:
        code = self._process.status if self._process is not None else None
        if code is None:
            return "unknown"
        return signal_name(-code) if code < 0 else str(code)

    def _failure(self, what: str) -> FleetError:
        since, was_ready = self._log_begin, self._was_ready
        remedy = explain_failure(self.log, since=since, was_ready=was_ready)
        shown = first_error(self.log, since=since, was_ready=was_ready)
        where = "Its first error, of the log"
        if not shown:
            shown, where = last_lines(self.log), "The end of its log,"
        lines = "\n".join(f"  | {line}" for line in shown)
        return FleetError(
            f"The server of {self.config.model} on {self.url} {what}."
            + (f" {remedy}" if remedy else "")
            + (f"\n{where} {self.log}:\n{lines}" if lines else "")
        )

    def _log_size(self) -> int:
        return self.log.stat().st_size if self.log.exists() else 0


@dataclass(slots=True)
class LaunchContext:
    """State shared by the servers of one pool."""

    ports: list[Reservation]
    modules: Path
    adapters: Path | None
    registry: ServerRegistry
    servers: list[LocalServer]
    is_fine: bool = False
    """True if nothing died or failed: the logs need not be kept."""

    def write_registry(self) -> None:
        self.registry.write([server.record for server in self.servers if server.pid])


@asynccontextmanager
async def open_servers(
    config: LaunchConfig,
    *,
    progress: Progress | None = None,
    adapters: Path | None = None,
    purpose: str = "run",
) -> AsyncIterator[list[LocalServer]]:
    """Start all servers at once, yield them healthy, and stop them at the end.

    `adapters` is a folder that the servers search for adapters by name, besides loading them.
    """
    check_launch(config)
    root = state_folder()
    await asyncio.to_thread(reap_orphans, root)
    known = config.model_copy(update={"api_key": config.api_key or exported_key()})
    async with open_session() as session:
        with _prepared(known, root, session=session, adapters=adapters, purpose=purpose) as context:
            try:
                for server in context.servers:
                    await server.start()
                    context.write_registry()
                await _wait_all(context.servers, progress)
                yield context.servers
                context.is_fine = not any(server.num_restarts for server in context.servers)
            finally:
                await _stop_all(context.servers)


@contextmanager
def _prepared(
    config: LaunchConfig, root: Path, *, session: aiohttp.ClientSession, adapters: Path | None,
    purpose: str,
) -> Iterator[LaunchContext]:  # fmt: skip
    """Yield registry, ports and servers, not started yet; release them at the end."""
    registry = ServerRegistry.create(root, purpose=purpose)
    context = LaunchContext([], registry.folder / "modules", adapters, registry, [])
    try:
        # Copied alone to its own folder: the servers' Python needs nothing else of Rookery.
        source, ignored = Path(vllm_plugin.__file__).parent, shutil.ignore_patterns("__pycache__")
        with boundary(FleetError, f"Writing {context.modules}", foreign=(OSError, shutil.Error)):
            shutil.copytree(source, context.modules / PLUGIN_MODULE, ignore=ignored)
        for index in range(num_replicas(config)):
            context.ports.append(reserve_port(config.host, first=config.port))
            host = f"[{config.host}]" if ":" in config.host else config.host
            url = f"http://{host}:{context.ports[-1].port}"
            limits = ClientConfig(control_s=HEALTH_LIMIT_S)
            client = Client(url, session=session, config=limits, api_key=config.api_key)
            context.servers.append(
                LocalServer(index, config=config, registry=registry, client=client, context=context)
            )
        yield context
    finally:
        for port in context.ports:
            port.release()
        registry.close(keep_logs=not context.is_fine)


async def _wait_all(servers: Sequence[LocalServer], progress: Progress | None) -> None:
    """Wait for all servers; the first failure ends the wait for the others."""

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
    """Stop every server, even if this is cancelled again meanwhile."""
    try:
        await asyncio.gather(*(server.stop() for server in servers))
    except BaseException:  # a second Ctrl-C too: none is left running
        for server in servers:
            server.kill()
        raise


# Restarts servers that died or hang, where no pool sends them requests and would notice.


HEALTH_S = 10.0
"""Seconds between two health checks."""
HANG_S = 180.0
"""A live server that is unhealthy for this long is restarted."""


async def keep_alive(server: LocalServer) -> FleetError:
    """Restart a server whenever it dies or hangs; return the reason when it is given up."""
    while True:
        why = await _wait_failed(server)
        try:
            await server.restart(why)
        except FleetError as error:
            logger.error("%s", error)
            return error


async def _wait_failed(server: LocalServer) -> str:
    """Wait until the server fails; return what is wrong, or "" if its process has ended."""
    healthy_s = time.monotonic()
    while True:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HEALTH_S):
                await server.wait_ended()
                return ""
        if await server.is_healthy():
            healthy_s = time.monotonic()
        elif (late_s := time.monotonic() - healthy_s) >= HANG_S:
            return f"was not healthy for {late_s:.0f} s"
