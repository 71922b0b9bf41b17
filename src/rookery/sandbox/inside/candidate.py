"""The processes of one candidate, from the server's fork to the last line of the result.

    server ── monitor ── init ── evaluator, program   (own namespaces: init is process 1 in them)
    server ── monitor ── evaluator, program           (no namespaces: Landlock shields the server)

Only the evaluator's process holds the result descriptor, and no other process can read its memory.
It calls the program, in a second process, over a socket. Without `isolate` both are one process.

The parent of these two reaps them and reports how they ended. When init ends, the kernel kills
everything in its namespace. The monitor only waits for init; if the monitor is killed, init dies.
"""

import functools
import itertools
import json
import os
import resource
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any, NoReturn

from . import isolation
from .contract import Emit, evaluate, evaluate_variants
from .program import serve_program
from .proxy import PROGRAM_ENDED, ProgramProxy

__all__ = ["Descriptors", "start_candidate"]


# Every process of a candidate starts its random generators from the same seed.
#
# `random`, `numpy.random` and `torch` are seeded now if already imported, otherwise on import. The
# draws of a candidate then depend neither on the worker nor on earlier draws of the server.


Note = Callable[[str, tuple[Any, ...]], None]


def reseed(seed: int) -> None:
    """Seed the known modules again, as at the start of a process."""
    for name in _SEED:
        if name in sys.modules:
            _SEED[name](sys.modules[name], seed)


def seed_generators(seed: int, note: Note | None = None) -> None:
    """Seed the known modules. Every later call of their `seed` calls `note(module, args)`."""
    load = SourceFileLoader.exec_module

    def seed_if_known(module: ModuleType) -> None:
        if module.__name__ in _SEED:
            _SEED[module.__name__](module, seed)
            if note is not None and module.__name__ != "torch":
                vars(module)["seed"] = _noting(module, note)

    def exec_module(loader: SourceFileLoader, module: ModuleType) -> None:
        load(loader, module)
        seed_if_known(module)

    for name in _SEED:
        if name in sys.modules:
            seed_if_known(sys.modules[name])
    vars_of_loader: Any = SourceFileLoader
    vars_of_loader.exec_module = exec_module


def _noting(module: ModuleType, note: Note) -> Callable[..., None]:
    seed = vars(module)["seed"]

    @functools.wraps(seed)
    def noting(*args: Any, **options: Any) -> None:
        seed(*args, **options)
        note(module.__name__, (*args, *options.values()))

    return noting


def _seed_random(module: ModuleType, seed: int) -> None:
    vars(module)["seed"](seed)


def _seed_numpy(module: ModuleType, number: int) -> None:
    """Seed the global generator, and give each unseeded `default_rng()` its own derived seed."""
    vars(module)["seed"](number % 2**32)
    numbers = itertools.count()
    default_rng = vars(module)["default_rng"]

    @functools.wraps(default_rng)
    def seeded(seed: Any = None) -> Any:
        return default_rng((number, next(numbers)) if seed is None else seed)

    vars(module)["default_rng"] = seeded


def _seed_torch(module: ModuleType, seed: int) -> None:
    vars(module)["manual_seed"](seed)


_SEED: dict[str, Callable[[ModuleType, int], None]] = {
    "random": _seed_random,
    "numpy.random": _seed_numpy,
    "torch": _seed_torch,
}


OPEN_FILES = 1024
FORK_S = 5.0
PROGRAM_END_S = 1.0
"""Grace period for the program's process after its evaluator has ended; then it is killed."""
Settings = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Descriptors:
    """Descriptors for a candidate: result, output, exit status as text, and those to close."""

    result: int
    output: int
    status: int
    private: tuple[int, ...]


def start_candidate(module: ModuleType, settings: Settings, to: Descriptors) -> int:
    """Fork a candidate and return its process id; the child never returns."""
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
            _wait_for(_fork(lambda: _be_init(module, settings, to)))
        else:
            _run(module, settings, to)
        os._exit(0)
    finally:
        os._exit(1)


def _be_init(module: ModuleType, settings: Settings, to: Descriptors) -> None:
    isolation.die_with_parent()
    isolation.mount_private(settings["scratch"], settings["scratch_bytes"])
    _run(module, settings, to)


def _run(module: ModuleType, settings: Settings, to: Descriptors) -> None:
    """Start the evaluator's process and the program's, and report how they ended."""
    is_hidden = settings["isolation"] in ("namespaces", "jail")  # elsewhere /proc/PID is not shown
    isolation.hide_memory(is_hidden)
    path = _write_program(Path(settings["scratch"]), settings)
    ours, theirs = socket.socketpair()

    def be_program() -> None:
        ours.close()
        os.close(to.result)
        _confine(settings, to)
        isolation.hide_memory(is_hidden=False)
        seed_generators(settings["seed"])
        serve_program(theirs, reseed)

    def be_evaluator() -> None:
        theirs.close()
        os.set_inheritable(to.result, False)
        _confine(settings, to)
        _evaluate(module, path, settings, to.result, ours)

    program = _fork(be_program) if settings["isolate"] else 0
    evaluator = _fork(be_evaluator)
    for each in (ours, theirs):
        each.close()
    codes: dict[int, int] = {}
    _wait_for(evaluator, codes)
    if program and codes[evaluator] == PROGRAM_ENDED:
        _wait_for(program, codes)
    elif program and settings["isolation"] != "namespaces":
        _wait_for(program, codes, limit_s=PROGRAM_END_S)
    is_program = codes[evaluator] == PROGRAM_ENDED and program in codes
    _report(to.status, codes[program if is_program else evaluator])


def _confine(settings: Settings, to: Descriptors) -> None:
    """Redirect output, enter the scratch folder, and drop rights, in either process."""
    os.close(to.status)
    os.dup2(to.output, 1)
    os.dup2(to.output, 2)
    os.close(to.output)
    if settings["isolation"] != "none":
        # A signal that a process sends to its own group must not reach init and the monitor.
        os.setsid()
        _set_oom_score()
    os.chdir(settings["scratch"])
    _limit(settings)
    if settings["isolation"] == "none":
        return
    isolation.confine_signals()
    isolation.drop_capabilities()
    isolation.refuse_calls(files=settings["isolation"] == "landlock")


def _evaluate(
    module: ModuleType, path: str, settings: Settings, result: int, control: socket.socket
) -> None:
    """Run the evaluator on the program, which lives in the other process if `isolate` is set."""
    names = [] if isinstance(settings["program"], str) else settings["program"]
    proxy = ProgramProxy(
        control,
        scratch=settings["scratch"],
        evaluator=settings["evaluator"],
        names=frozenset(PurePosixPath(name).parts[0].removesuffix(".py") for name in names),
    )
    seed_generators(settings["seed"], proxy.note_seed if settings["isolate"] else None)
    if settings["isolate"]:
        proxy.install()

    def emit(record: dict[str, Any]) -> None:
        view = memoryview(json.dumps(record).encode() + b"\n")
        while view:
            view = view[os.write(result, view) :]

    def run(path: str, emit: Emit) -> None:
        evaluate(
            module,
            path,
            is_cascade=settings["cascade"],
            thresholds=settings["thresholds"],
            emit=emit,
            note=lambda: proxy.unsupported,
        )

    def run_variant(number: int, emit: Emit) -> None:
        variant = Path(path).with_name(f"variant{number}{settings['suffix']}")
        variant.unlink(missing_ok=True)  # an earlier variant may have made it a link
        variant.write_bytes(settings["variants"][number].encode(errors="surrogatepass"))
        reseed(settings["seed"])
        if settings["isolate"]:
            proxy.reseed(settings["seed"])
        run(str(variant), emit)

    if settings["variants"]:
        evaluate_variants(run_variant, len(settings["variants"]), emit=emit)
    else:
        run(path, emit)
    sys.stdout.flush()
    sys.stderr.flush()


def _write_program(scratch: Path, settings: Settings) -> str:
    """Write the program and return its file or folder, the argument of the evaluator."""
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
        # The kernel counts per user namespace. Without one, the user's other processes would count.
        _lower(resource.RLIMIT_NPROC, settings["max_processes"] + isolation.OWN_PROCESSES)


def _lower(which: int, value: int, *, more: int = 0) -> None:
    hard = resource.getrlimit(which)[1]
    top = value + more if hard == resource.RLIM_INFINITY else min(value + more, hard)
    resource.setrlimit(which, (min(value, top), top))


def _set_oom_score() -> None:
    """The kernel ends a candidate before the server when memory runs out."""
    try:
        Path("/proc/self/oom_score_adj").write_text("1000")
    except OSError:
        return  # only a hint, and not every jail allows it


def _fork_when_possible() -> int:
    """Fork, retrying for up to FORK_S: sandlock counts ended processes for a moment longer."""
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


def _wait_for(
    child: int, codes: dict[int, int] | None = None, *, limit_s: float | None = None
) -> None:
    """Reap until `child` has ended or `limit_s` has passed; fill `codes` with exit codes by process
    id, a signal as its negative number."""
    deadline = None if limit_s is None else time.monotonic() + limit_s
    while codes is None or child not in codes:
        ended, status = os.waitpid(-1, os.WNOHANG if deadline else 0)
        if ended and codes is not None:
            codes[ended] = os.waitstatus_to_exitcode(status)
        if ended == child:
            return
        if not ended and deadline is not None:
            if time.monotonic() > deadline:
                return
            time.sleep(0.001)


def _report(status: int, code: int) -> NoReturn:
    os.write(status, str(code).encode())
    os._exit(0)
