"""Client of the fork server: starts its jail, sends it one candidate at a time, enforces limits.

    program ──> control socket ──> server in the jail ──> candidate ──> result, output (pipes)

| waits for                  | at most                    | then                                  |
|----------------------------|----------------------------|---------------------------------------|
| the server to be ready     | `startup_s`                | SandboxError                          |
| a stage of the evaluation  | `timeout_s`                | the candidate is killed: `timeout`    |
| a killed candidate to end  | `_GRACE_S`                 | the jail is killed, the next starts   |
| the jail to end            | `_GRACE_S`                 | it is killed                          |
"""

import asyncio
import json
import os
import signal
import socket
import time
from asyncio.subprocess import Process
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from rookery.errors import SandboxError, signal_name
from rookery.sandbox.box import Cgroup, make_cgroup
from rookery.sandbox.inside.isolation import OWN_PROCESSES
from rookery.sandbox.jail import EvaluatorConfig, Jail, SandboxConfig
from rookery.sandbox.outcome import MAX_LINES, EvaluationOutcome, Failure, FailureKind, make_outcome

__all__ = ["ForkServer", "PipeReader", "Program", "Usage", "descendants", "measure"]


_CHUNK = 1 << 16


class PipeReader:
    """One pipe, read on the event loop: pass `writer` to a child, close it here, await `ended`.

    Keeps the first `max_bytes` (`keep_bytes=None`) or the last `keep_bytes`. Calls `on_line` for
    the first `max_lines` complete lines, and `on_excess` once, after more than `max_bytes`.
    """

    def __init__(
        self,
        *,
        max_bytes: int,
        on_excess: Callable[[], None],
        keep_bytes: int | None = None,
        on_line: Callable[[bytes], None] | None = None,
        max_lines: int = 0,
    ) -> None:
        self.ended = asyncio.Event()
        self.kept = bytearray()
        self.writer = -1
        self._reader = -1
        self._num_bytes = 0
        self._max_bytes = max_bytes
        self._keep_bytes = keep_bytes
        self._on_excess = on_excess
        self._on_line = on_line
        self._lines_left = max_lines
        self._line_start = 0

    def __enter__(self) -> Self:
        self._reader, self.writer = os.pipe()
        os.set_blocking(self._reader, False)
        asyncio.get_running_loop().add_reader(self._reader, self._read)
        return self

    def __exit__(self, *_: object) -> None:
        self.close_writer()
        if self._reader >= 0:
            self._close_reader()

    def close_writer(self) -> None:
        if self.writer >= 0:
            os.close(self.writer)
        self.writer = -1

    def _read(self) -> None:
        data = os.read(self._reader, _CHUNK)
        if not data:
            self._close_reader()
            return
        was_within = self._num_bytes <= self._max_bytes
        self._num_bytes += len(data)
        if self._num_bytes > self._max_bytes:
            if was_within:
                self._on_excess()
            if self._keep_bytes is None:
                return
        self.kept += data
        if self._keep_bytes is not None:
            del self.kept[: -self._keep_bytes]
        elif self._on_line is not None:
            self._split(self._on_line)

    def _split(self, on_line: Callable[[bytes], None]) -> None:
        while self._lines_left and (end := self.kept.find(b"\n", self._line_start)) >= 0:
            self._lines_left -= 1
            on_line(bytes(self.kept[self._line_start : end]))
            self._line_start = end + 1

    def _close_reader(self) -> None:
        asyncio.get_running_loop().remove_reader(self._reader)
        os.close(self._reader)
        self._reader = -1
        self.ended.set()


_PROC = Path("/proc")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Usage:
    """Resource usage of a process tree. `rss_bytes` counts shared pages once per process."""

    rss_bytes: int = 0
    num_threads: int = 0
    cpu_s: float = 0.0


def descendants(pid: int) -> list[int]:
    """Return the process, then its descendants. Some that end during the walk may be missing."""
    pids = [pid]
    for each in pids:
        with suppress(OSError):
            for task in (_PROC / str(each) / "task").iterdir():
                pids.extend(int(child) for child in (task / "children").read_text().split())
    return pids


def data_bytes(pid: int) -> int:
    """Return the memory of a process in bytes that counts towards `RLIMIT_DATA`."""
    return int((_PROC / str(pid) / "statm").read_text().split()[5]) * _PAGE


def measure(pid: int) -> Usage:
    """Sum the usage over a process tree. CPU time includes processes that were reaped."""
    rss, threads, ticks = 0, 0, 0
    for each in descendants(pid):
        with suppress(OSError):
            data = (_PROC / str(each) / "stat").read_bytes()
            # The name in parentheses may hold any bytes; the fields follow its last parenthesis.
            fields = data.rpartition(b")")[2].split()
            ticks += sum(int(field) for field in fields[11:15])
            threads += int(fields[17])
            rss += int(fields[21]) * _PAGE
    return Usage(rss, threads, ticks / _TICKS)


def measure_pss(pid: int) -> int:
    """Return the tree's resident bytes, shared pages counted once. Slower than `measure`."""
    total = 0
    for each in descendants(pid):
        with suppress(OSError):
            for line in (_PROC / str(each) / "smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
    return total


Program = str | Mapping[str, str]
"""The text of one file, or file texts by relative path."""
_GRACE_S = 10.0
"""Time for the kernel to end processes on a busy machine."""
_WATCH_S = 0.1
"""Interval of the watchdog. A process can allocate about 200 MB in this time."""
_POLL_S = 0.01
_TAIL_BYTES = 8192
_MAX_STAGES = 3
_MAX_BEGIN_BYTES = 64
_ENTER = 'for f in $0; do echo $$ > "$f/cgroup.procs" || exit 126; done; exec "$@"'
"""Shell script that enters the control groups and then becomes the command."""


class ForkServer:
    """A jail with a running server. `is_isolated`: a candidate cannot affect the next one."""

    def __init__(
        self,
        process: Process,
        control: socket.socket,
        cgroup: Cgroup | None,
        *,
        log: Path,
        aliases: Mapping[str, str],
    ) -> None:
        self._process = process
        self._control = control
        self._cgroup = cgroup
        self._log = log
        self._aliases = aliases
        self._closing: asyncio.Task[None] | None = None
        self._pid: int | None = None
        """Process id of the server, if the jail hides /proc; else None."""
        self.is_isolated = False

    @classmethod
    async def start(cls, jail: Jail, config: SandboxConfig, log: Path) -> "ForkServer":
        """Start the jail and wait until the server has imported the evaluator."""
        cgroup = await asyncio.to_thread(make_cgroup)
        command = list(jail.command)
        if cgroup is not None:
            command = ["/bin/sh", "-c", _ENTER, " ".join(map(str, cgroup.folders)), *command]
        control, theirs = socket.socketpair()
        control.setblocking(False)
        try:
            with theirs, log.open("ab") as errors:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=theirs.fileno(),
                    stdout=errors,
                    stderr=errors,
                    env=jail.environment,
                    cwd="/",
                    start_new_session=True,
                )
        except BaseException as error:
            control.close()
            if cgroup is not None:
                cgroup.remove()
            if isinstance(error, OSError):
                reason = f"{command[0]} cannot be started: {error.strerror}."
                raise SandboxError(reason) from error
            raise
        server = cls(process, control, cgroup, log=log, aliases=jail.aliases)
        try:
            await server._get_ready(config)
        except BaseException:
            server._kill()  # during imports the server does not read its socket
            await server.close()
            raise
        return server

    async def _get_ready(self, config: SandboxConfig) -> None:
        try:
            async with asyncio.timeout(config.startup_s):
                answer = await self._answer()
        except TimeoutError:
            raise SandboxError(
                f"The evaluator was not imported within `startup_s` ({config.startup_s:g} s)."
            ) from None
        if answer is None:
            raise SandboxError(f"The sandbox did not start: {self._log_tail() or 'no message'}")
        if "unusable" in answer:
            raise SandboxError(f"The evaluator cannot be used: {answer['unusable']}")
        self.is_isolated = bool(answer["is_isolated"])
        self._pid = int(str(answer["pid"])) if answer["pid"] is not None else None
        if self._cgroup is not None:
            # OWN_PROCESSES of the candidate's processes are Rookery's.
            await asyncio.to_thread(
                self._cgroup.limit,
                memory_bytes=config.memory_bytes + config.scratch_bytes,
                max_processes=config.max_processes + OWN_PROCESSES,
            )

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None and self._closing is None

    async def evaluate(
        self,
        program: Program,
        config: SandboxConfig,
        evaluator: EvaluatorConfig,
        *,
        seed: int,
        isolate: bool,
        variants: Sequence[str] = (),
    ) -> EvaluationOutcome:
        """Run one candidate. After a cancellation the caller must close the server."""
        started = time.monotonic()
        with ExitStack() as stack:
            run = _Run(self._stop, config, evaluator)
            run.oom_kills = self._num_oom_kills()
            # Measured before every run: each candidate adds its CPU time to the server's.
            run.idle = await asyncio.to_thread(measure, self._process.pid)
            stack.callback(run.disarm)
            result, output = stack.enter_context(run.result), stack.enter_context(run.output)
            run.arm()
            body: dict[str, object] = {
                "program": program if isinstance(program, str) else dict(program),
                "seed": seed,
                "isolate": isolate,
                "variants": list(variants),
            }
            descriptors = [result.writer, output.writer, *self._describe_server(body, stack)]
            body |= evaluator.model_dump(include={"suffix", "cascade", "thresholds"})
            await self._send(body, descriptors)
            result.close_writer()
            output.close_writer()
            answer = await self._watched(run, config)
            run.disarm()
            num_kills = self._num_oom_kills()
            if answer is None or answer["is_worn"]:
                await self.close()
            elif answer["is_stopped"] != (run.stopped is not None):
                # The order to stop came too late; the server would read it as a request.
                await self.close()
            with suppress(TimeoutError):
                async with asyncio.timeout(_GRACE_S):
                    await result.ended.wait()
                    await output.ended.wait()
            seconds = time.monotonic() - started
            tail = _with_aliases(output.kept, self._aliases).decode(errors="replace")
            data = _with_aliases(result.kept, self._aliases)
        stopped = run.stopped or _read_end(answer)
        if num_kills > run.oom_kills:
            stopped = _out_of_memory(config)
        return await asyncio.to_thread(
            make_outcome,
            data,
            stopped=stopped,
            evaluator=evaluator,
            seconds=seconds,
            output_tail=tail,
            is_forgeable=not isolate,
        )

    def _describe_server(self, body: dict[str, object], stack: ExitStack) -> list[int]:
        """Give a server without /proc its data size, and a descriptor that lists its children."""
        if self._pid is None:
            return []
        body["server_bytes"] = data_bytes(self._pid)
        path = Path(f"/proc/{self._pid}/task/{self._pid}/children")
        return [stack.enter_context(path.open("rb")).fileno()]

    async def _watched(self, run: "_Run", config: SandboxConfig) -> dict[str, object] | None:
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(self._watch(run, config))
            answer = await self._answer()
            watch.cancel()
        return answer

    async def _watch(self, run: "_Run", config: SandboxConfig) -> None:
        while run.stopped is None:
            await asyncio.sleep(_WATCH_S)
            failure = await asyncio.to_thread(self._find_excess, config, run)
            if failure is not None:
                run.stop(failure)

    def _find_excess(self, config: SandboxConfig, run: "_Run") -> Failure | None:
        if self._num_oom_kills() > run.oom_kills:
            return _out_of_memory(config)
        usage = measure(self._process.pid)
        threads = usage.num_threads - run.idle.num_threads - OWN_PROCESSES
        if threads > config.max_processes:
            return _over("processes", f"More than {config.max_processes} processes and threads.")
        if config.cpu_s is not None and usage.cpu_s - run.idle.cpu_s > config.cpu_s:
            return _over("cpu", f"More than {config.cpu_s:g} s of CPU time.")
        most = config.memory_bytes + run.idle.rss_bytes
        if usage.rss_bytes > most and measure_pss(self._process.pid) > most:
            return _out_of_memory(config)
        return None

    def _num_oom_kills(self) -> int:
        return self._cgroup.num_oom_kills() if self._cgroup is not None else 0

    def _stop(self) -> asyncio.TimerHandle:
        """Ask the server to end the candidate; end the jail if it does not."""
        with suppress(OSError):
            self._control.send(b"K")
        return asyncio.get_running_loop().call_later(_GRACE_S, self._kill)

    async def _send(self, body: Mapping[str, object], descriptors: Sequence[int]) -> None:
        data = await asyncio.to_thread(lambda: json.dumps(body).encode())
        with suppress(OSError):  # the server is gone; `_answer` reports it
            socket.send_fds(self._control, [len(data).to_bytes(8, "big")], descriptors)
            await asyncio.get_running_loop().sock_sendall(self._control, data)

    async def _answer(self) -> dict[str, object] | None:
        """Return the next message of the server; None if it is gone."""
        line = b""
        while not line.endswith(b"\n"):
            try:
                data = await asyncio.get_running_loop().sock_recv(self._control, 1 << 16)
            except OSError:
                return None
            if not data:
                return None
            line += data
        answer: dict[str, object] = json.loads(line)
        return answer

    def _log_tail(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return " / ".join(lines[-3:])[-500:]

    def _kill(self) -> None:
        """Kill the jail's processes. A namespace dies with its first process."""
        if self._process.returncode is None:
            for pid in descendants(self._process.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    async def close(self) -> None:
        """End the jail and all its processes. Idempotent; continues if the caller is cancelled."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        with suppress(OSError):  # unlike close, this also wakes a pending `_answer`
            self._control.shutdown(socket.SHUT_RDWR)
        pids = await asyncio.to_thread(descendants, self._process.pid)
        try:
            async with asyncio.timeout(_GRACE_S):
                await self._process.wait()
        except TimeoutError:
            self._kill()
            await self._process.wait()
        except asyncio.CancelledError:
            self._kill()
            raise
        finally:
            self._control.close()
        await asyncio.to_thread(_wait_until_empty, pids, self._cgroup)


class _Run:
    """One evaluation: its pipes, its stage timer, and the first reason for stopping it."""

    def __init__(
        self,
        end: Callable[[], asyncio.TimerHandle],
        config: SandboxConfig,
        evaluator: EvaluatorConfig,
    ) -> None:
        self.stopped: Failure | None = None
        self.oom_kills = 0
        self.idle = Usage()
        self._end = end
        self._timeout_s = evaluator.timeout_s
        self._num_stages = 0
        self._timers: list[asyncio.TimerHandle] = []
        too_long = f"A result of more than {config.result_bytes} bytes."
        too_much = f"More than {config.output_bytes} bytes of output."
        self.result = PipeReader(
            max_bytes=config.result_bytes,
            on_excess=lambda: self.stop(_over("output", too_long)),
            on_line=self._follow,
            max_lines=MAX_LINES,
        )
        self.output = PipeReader(
            max_bytes=config.output_bytes,
            on_excess=lambda: self.stop(_over("output", too_much)),
            keep_bytes=_TAIL_BYTES,
        )

    def arm(self) -> None:
        """Restart the timer for a stage."""
        self.disarm()
        failure = _over("timeout", f"Not done within {self._timeout_s:g} s.")
        loop = asyncio.get_running_loop()
        self._timers.append(loop.call_later(self._timeout_s, self.stop, failure))

    def stop(self, failure: Failure) -> None:
        """Stop the candidate. Later reasons are ignored."""
        if self.stopped is None:
            self.disarm()
            self.stopped = failure
            self._timers.append(self._end())

    def disarm(self) -> None:
        while self._timers:
            self._timers.pop().cancel()

    def _follow(self, line: bytes) -> None:
        """Restart the timer when a stage begins. Forged lines gain at most three stages."""
        is_begin = len(line) < _MAX_BEGIN_BYTES and line.startswith(b'{"begin"')
        if is_begin and self._num_stages < _MAX_STAGES and self.stopped is None:
            self._num_stages += 1
            self.arm()


def _over(kind: FailureKind, reason: str) -> Failure:
    return Failure(kind=kind, reason=reason)


def _wait_until_empty(pids: Sequence[int], cgroup: Cgroup | None) -> None:
    """Wait until all processes are gone: the jail's launcher ends just before its last process."""
    deadline = time.monotonic() + _GRACE_S
    while time.monotonic() < deadline:
        are_gone = not any(Path(f"/proc/{pid}").exists() for pid in pids)
        if are_gone and (cgroup is None or cgroup.remove()):
            return
        time.sleep(_POLL_S)


def _with_aliases(text: bytearray, aliases: Mapping[str, str]) -> bytes:
    """Replace host paths in printed text or JSON; JSON escapes only non-ASCII paths."""
    data = bytes(text)
    for path, alias in aliases.items():
        data = data.replace(path.encode(), alias.encode())
    return data


def _out_of_memory(config: SandboxConfig) -> Failure:
    return _over("memory", f"More than {config.memory_bytes} bytes of memory.")


def _read_end(answer: dict[str, object] | None) -> Failure | None:
    """Return why the candidate ended, if not by itself."""
    if answer is None:
        return _over("killed", "The sandbox died during the evaluation.")
    match answer.get("ended"):
        case None:
            return _over("killed", "It was killed together with its sandbox's processes.")
        case int() as code if code == -signal.SIGXCPU:
            return _over("cpu", "The limit on CPU time ended it.")
        case int() as code if code < 0:
            return _over("killed", f"It was ended by {signal_name(-code)}.")
    return None
