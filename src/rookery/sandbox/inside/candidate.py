"""One candidate's processes, from the fork of the server to the last line of its result.

    server ── monitor ── init ── candidate      (own namespaces: init is process 1 in them)
    server ── candidate                         (none: Landlock keeps it from the server)

Init reaps, reports how the candidate ended, and ends: the kernel then ends all the others in its
namespace. The monitor only waits for init and takes it along when it is killed.
"""

import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any, NoReturn

from . import isolation
from .contract import evaluate

__all__ = ["Descriptors", "start_candidate"]

OPEN_FILES = 1024
FORK_S = 5.0
Settings = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Descriptors:
    """Where a candidate's result and output go; how it ended, as text; what it must not have."""

    result: int
    output: int
    status: int
    private: tuple[int, ...]


def start_candidate(module: ModuleType, settings: Settings, to: Descriptors) -> int:
    """Fork; the parent gets the process id."""

    def run() -> None:
        os.close(to.status)
        _run(module, settings, to)

    child = _fork_when_possible()
    if child:
        return child
    try:
        os.setsid()
        for descriptor in to.private:
            os.close(descriptor)
        isolation.die_with_parent()
        if settings["isolation"] == "namespaces":
            isolation.enter_namespaces()
            _wait_for(_fork(lambda: _be_init(run, settings, to.status)))
        else:
            _report(to.status, _wait_for(_fork(run)))
        os._exit(0)
    finally:
        os._exit(1)


def _be_init(run: Callable[[], None], settings: Settings, status: int) -> None:
    isolation.die_with_parent()
    isolation.mount_private(settings["scratch"], settings["scratch_bytes"])
    _report(status, _wait_for(_fork(run)))


def _run(module: ModuleType, settings: Settings, to: Descriptors) -> None:
    """The candidate itself: its scratch folder, its limits, then the evaluator's functions."""
    os.dup2(to.output, 1)
    os.dup2(to.output, 2)
    os.close(to.output)
    os.set_inheritable(to.result, False)
    if settings["isolation"] != "none":
        # A signal to its own group must not reach init and the monitor.
        os.setsid()
        _set_oom_score()
    scratch = Path(settings["scratch"])
    os.chdir(scratch)
    program = _write_program(scratch, settings)
    _limit(settings)
    if settings["isolation"] == "landlock":
        isolation.confine_signals()
    if settings["isolation"] != "none":
        isolation.drop_capabilities()

    def emit(record: dict[str, Any]) -> None:
        view = memoryview(json.dumps(record).encode() + b"\n")
        while view:
            view = view[os.write(to.result, view) :]

    evaluate(
        module,
        program,
        is_cascade=settings["cascade"],
        thresholds=settings["thresholds"],
        emit=emit,
    )
    sys.stdout.flush()
    sys.stderr.flush()


def _write_program(scratch: Path, settings: Settings) -> str:
    """The program's file, or its folder; what the evaluator is called with."""
    tempfile.tempdir = None
    os.environ.update(HOME=str(scratch), TMPDIR=str(scratch))
    program = settings["program"]
    if isinstance(program, str):
        path = scratch / f"program{settings['suffix']}"
        path.write_bytes(program.encode(errors="surrogatepass"))
        return str(path)
    for name, text in program.items():
        path = scratch / "program" / PurePosixPath(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode(errors="surrogatepass"))
    return str(scratch / "program")


def _limit(settings: Settings) -> None:
    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_NOFILE, OPEN_FILES)
    _lower(resource.RLIMIT_FSIZE, settings["scratch_bytes"])
    _lower(resource.RLIMIT_DATA, settings["memory_bytes"] + settings["server_bytes"])
    _lower(resource.RLIMIT_CPU, settings["cpu_s"], more=1)
    if settings["isolation"] == "namespaces":
        # Counted per user namespace: elsewhere the user's other processes would count too. The
        # monitor and init are in it.
        _lower(resource.RLIMIT_NPROC, settings["max_processes"] + 2)


def _lower(which: int, value: int, *, more: int = 0) -> None:
    hard = resource.getrlimit(which)[1]
    top = value + more if hard == resource.RLIM_INFINITY else min(value + more, hard)
    resource.setrlimit(which, (min(value, top), top))


def _set_oom_score() -> None:
    """The kernel ends a candidate before the server when memory runs out."""
    try:
        Path("/proc/self/oom_score_adj").write_text("1000")
    except OSError:
        return  # a hint only, and not every jail lets it be given


def _fork_when_possible() -> int:
    """sandlock counts processes that have ended for a moment longer: the fork of a candidate must
    not fail because of the one before."""
    deadline = time.monotonic() + FORK_S
    while True:
        try:
            return os.fork()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _fork(run: Callable[[], None]) -> int:
    child = _fork_when_possible()
    if child:
        return child
    try:
        run()
        os._exit(0)
    finally:
        os._exit(1)


def _wait_for(child: int) -> int:
    """Reap until `child` has ended; its exit code, or minus the signal."""
    while True:
        ended, status = os.waitpid(-1, 0)
        if ended == child:
            return os.waitstatus_to_exitcode(status)


def _report(status: int, code: int) -> NoReturn:
    os.write(status, str(code).encode())
    os._exit(0)
