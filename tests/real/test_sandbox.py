"""Hostile programs on every backend that works here; without one they skip, under CI they fail.

All of them run on both backends; what else a backend does is tested on bubblewrap, and on sandlock
with ROOKERY_LONG. One sandbox serves most of the tests: to start one takes longer than a program.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from functools import cache
from pathlib import Path

import hostile_programs
import pytest
import pytest_asyncio
from marks import long

from rookery.errors import SandboxError
from rookery.sandbox import (
    BackendName,
    EvaluationOutcome,
    EvaluatorConfig,
    Probe,
    Sandbox,
    SandboxConfig,
    probe_backend,
)
from rookery.sandbox.jail import BACKENDS, Jail
from rookery.sandbox.server import descendants

EVALUATOR = """
import runpy
from openevolve.evaluation_result import EvaluationResult

def evaluate(path):
    found = runpy.run_path(path)
    return EvaluationResult(metrics=found["metrics"], artifacts=found.get("artifacts", {}))
"""
pytestmark = pytest.mark.asyncio(loop_scope="module")
SMALL = SandboxConfig(memory_bytes=2**28, max_processes=20, scratch_bytes=2**24, output_bytes=2**20)


@cache
def tried(backend: BackendName) -> Probe:
    return asyncio.run(probe_backend(backend))


@pytest.fixture(scope="module", params=["bubblewrap", pytest.param("sandlock", marks=long)])
def config(request: pytest.FixtureRequest) -> SandboxConfig:
    probe = tried(request.param)
    if not probe.works:
        reason = f"{request.param}: {probe.reason}"
        assert "CI" not in os.environ, reason
        pytest.skip(reason)
    return SMALL.model_copy(update={"backend": request.param})


async def until(condition: Callable[[], bool], *, limit_s: float = 60.0) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110 (other processes set no event)
            await asyncio.sleep(0.02)


def write_evaluator(folder: Path, text: str = EVALUATOR, **settings: object) -> EvaluatorConfig:
    (folder / "evaluator").mkdir(exist_ok=True)
    file = folder / "evaluator" / "evaluator.py"
    file.write_text(text)
    return EvaluatorConfig(file=file, **({"timeout_s": 20.0} | settings))  # type: ignore[arg-type]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandbox(
    config: SandboxConfig, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Sandbox]:
    """One for all tests: whatever a candidate does, it is as before."""
    folder = tmp_path_factory.mktemp("shared")
    async with Sandbox(config, write_evaluator(folder)) as opened:
        yield opened


async def healthy(sandbox: Sandbox) -> None:
    """The sandbox still works, and the last candidate has left nothing in it."""
    outcome = await sandbox.evaluate(
        "import os\nmetrics = {'files': len(os.listdir(os.environ['TMPDIR']))}"
    )
    assert outcome.failure is None, outcome
    assert outcome.metrics["files"] == 1, "its own program only"


def kind_of(outcome: EvaluationOutcome) -> str:
    return outcome.failure.kind if outcome.failure else "none"


ONE = {"s": 1.0}
PROGRAMS: dict[str, tuple[set[str], object]] = {
    "import os; os._exit(0)": ({"crash"}, None),
    "import os; os._exit(139)": ({"crash"}, None),
    "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)": ({"killed"}, None),
    "import ctypes; ctypes.string_at(0)": ({"killed"}, None),
    "raise SystemExit(0)": ({"error"}, None),
    "1 / 0": ({"error"}, None),
    "x = bytearray(10 * 2**30)": ({"memory"}, None),
    "x = [bytearray(2**20) for _ in range(10_000)]": ({"memory"}, None),
    "print('x' * 2**30)": ({"output", "memory"}, None),
    "while True: print('x' * 1000)": ({"output"}, None),
    "metrics = {'combined_score': float('nan')}": ({"not_finite"}, None),
    "metrics = {'combined_score': float('-inf'), 'other': 1.0}": ({"not_finite"}, None),
    "metrics = {'s': 10**400}": ({"not_finite"}, None),
    "metrics = [1.0]": ({"not_a_dict"}, None),
    """# Each of the processes stays below the limit; together they are far above it.
import os, time
for _ in range(6):
    if os.fork() == 0:
        block = bytearray(os.urandom(1) * 100_000_000)
        time.sleep(60)
        os._exit(0)
time.sleep(60)
""": ({"memory"}, None),
    """# Processes are counted together.
import os, time
num = 0
try:
    for _ in range(100):
        if os.fork() == 0:
            time.sleep(30)
        num += 1
except OSError:
    pass
metrics = {"is_limited": 10 < num <= 25}
""": ({"processes", "none"}, {"is_limited": True}),
    "import os, signal; os.kill(-1, signal.SIGKILL)": ({"killed", "none", "error"}, None),
    "import os, signal; os.killpg(0, signal.SIGKILL)": ({"killed", "none", "error"}, None),
    """# A daemon does not survive.
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for descriptor in range(256):
            try:
                os.close(descriptor)
            except OSError:
                pass
        time.sleep(600)
    os._exit(0)
os.wait()
metrics = {"s": 1.0}
""": ({"none"}, ONE),
    """# Processes that are left behind, here and below, do not count for what comes later.
import os, time
for _ in range(12):
    if os.fork() == 0:
        time.sleep(1000)
metrics = {"s": 1.0}
""": ({"none"}, ONE),
    """import os, subprocess, time
for _ in range(12):
    if os.fork() == 0:
        time.sleep(1000)
metrics = {"s": float(subprocess.check_output(["echo", "1"]))}
""": ({"none"}, ONE),
    """# It holds the standard descriptors, and two for the evaluator's calls: no way to the result.
import os
num = 0
for descriptor in range(1024):
    try:
        os.fstat(descriptor)
        num += 1
    except OSError:
        pass
metrics = {"num": num}
""": ({"none"}, {"num": 5}),
    """# Locked and odd files are removed.
import os
scratch = os.environ["TMPDIR"]
os.makedirs(scratch + "/locked/inner")
open(scratch + "/locked/file", "w").close()
os.symlink("/usr", scratch + "/link")
os.mkfifo(scratch + "/fifo")
try:
    os.chmod(scratch + "/locked", 0)
except PermissionError:  # sandlock refuses it everywhere
    pass
os.mkdir(scratch + "/unreadable", 0o300)
open(scratch + "/unreadable/file", "w").close()
metrics = {"s": 1.0}
""": ({"none"}, ONE),
    """# More folders in folders than Python recurses, and a path longer than the kernel takes.
import os
for _ in range(2000):
    os.mkdir("folder")
    os.chdir("folder")
metrics = {"s": 1.0}
""": ({"none"}, ONE),
}
"""By the program: the kinds of failure it may have, and its metrics if it has none."""
HUGE = ("metrics = {'s': 1.0}; artifacts = {'a': 'x' * 2**25}", "metrics = {'s': 'x' * 2**25}")


async def test_what_goes_wrong_has_a_kind_and_leaves_nothing(sandbox: Sandbox) -> None:
    for text, (kinds, metrics) in PROGRAMS.items():
        num_before = len(set(descendants(os.getpid())))
        outcome = await sandbox.evaluate(text)
        assert kind_of(outcome) in kinds, (text, outcome)
        assert outcome.failure is None or outcome.failure.reason
        assert "combined_score" not in outcome.metrics
        await healthy(sandbox)
        if metrics is not None and outcome.failure is None:
            assert outcome.metrics == metrics, (text, outcome)
            # By number: a sandbox that was started anew has processes of its own.
            assert len(set(descendants(os.getpid()))) <= num_before, text


@long
async def test_results_have_a_size(sandbox: Sandbox) -> None:
    for text in HUGE:
        assert kind_of(await sandbox.evaluate(text)) == "output"
        await healthy(sandbox)


@long
async def test_cpu_time_of_all_processes_counts(config: SandboxConfig, tmp_path: Path) -> None:
    limited = config.model_copy(update={"cpu_s": 1.0})
    async with Sandbox(limited, write_evaluator(tmp_path)) as sandbox:
        outcome = await sandbox.evaluate("import os\nos.fork()\nwhile True: pass")
        assert kind_of(outcome) == "cpu", outcome
        await healthy(sandbox)


async def test_nothing_outside_is_seen_written_or_deleted(
    sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the home a program sees Python alone."""
    secret, home = tmp_path / "secret", Path.home()
    secret.write_text("secret")
    places = [secret, home / ".ssh", Path("/etc/shadow"), home / ".bashrc"]
    folders = [tmp_path, home, Path("/var/tmp"), Path("/etc"), Path("/usr"), Path("/")]
    folders += [Path(sys.prefix), Path(sys.base_prefix), Path("/dev"), Path("/dev/shm/..")]
    text = f"""
import os, shutil
seen, written, home = [], [], []
for place in {[str(place) for place in places]!r}:
    try:
        os.listdir(place) if os.path.isdir(place) else open(place).read()
        seen.append(place)
    except OSError:
        pass
for folder in {[str(folder) for folder in folders]!r}:
    try:
        open(folder + "/rookery-was-here", "w").close()
        written.append(folder)
    except OSError:
        pass
try:
    home = sorted(os.listdir({str(home)!r}))
except OSError:
    pass
metrics = {{"seen": str(seen), "written": str(written), "home": str(home)}}
"""
    outcome = await sandbox.evaluate(text)
    tops = {
        folder.relative_to(home).parts[0]
        for folder in (Path(sys.prefix), Path(sys.base_prefix))
        if folder.is_relative_to(home)
    }
    assert outcome.metrics.get("home") in ("[]", str(sorted(tops))), outcome
    assert outcome.metrics["seen"] == outcome.metrics["written"] == "[]", outcome
    assert not any((folder / "rookery-was-here").exists() for folder in folders)
    places = [Path("/tmp"), home, tmp_path, Path("/bin")]
    outcome = await sandbox.evaluate(f"""
import os, shutil
for place in (os.environ["TMPDIR"], *{[str(place) for place in places]!r}):
    shutil.rmtree(place, ignore_errors=True)
metrics = {{"s": 1.0}}
""")
    assert kind_of(outcome) in {"none", "error"}
    assert secret.exists() and os.access(sys.executable, os.X_OK)
    await healthy(sandbox)


@pytest.fixture
def data() -> Iterator[Path]:
    """A folder that is not below /dev/shm, which programs have of their own."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "numbers").write_text("42")
        Path(folder).chmod(0o755)
        yield Path(folder)


async def test_what_the_config_names_is_let_in_and_nothing_else(
    config: SandboxConfig,
    sandbox: Sandbox,
    tmp_path: Path,
    data: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Variables, folders, the network; with it /etc, though root's jail goes on as nobody."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    monkeypatch.setenv("PROBLEM_SIZE", "7")
    names = {"variables": ("PROBLEM_SIZE",), "readable": (data,), "network": True}
    with socket.create_server(("127.0.0.1", 0)) as listener:
        text = f"""
import os, socket
metrics = {{"size": os.environ.get("PROBLEM_SIZE", ""), "leaks": "sk-secret" in str(os.environ)}}
for name, attempt in {{
    "number": lambda: float(open({str(data / "numbers")!r}).read()),
    "written": lambda: float(bool(open({str(data / "numbers")!r}, "w"))),
    "hosts": lambda: float(bool(open("/etc/hosts").read())),
    "connected": lambda: socket.create_connection(
        ("127.0.0.1", {listener.getsockname()[1]}), 3
    ).close() or 1.0,
}}.items():
    try:
        metrics[name] = attempt()
    except OSError:
        metrics[name] = 0.0
"""
        closed = await sandbox.evaluate(text)
        named = config.model_copy(update=names)
        async with Sandbox(named, write_evaluator(tmp_path)) as opened:
            outcome = await opened.evaluate(text)
    nothing = {"size": "", "leaks": False, "number": 0, "written": 0, "connected": 0}
    assert nothing.items() <= closed.metrics.items(), closed
    assert outcome.metrics == {
        "size": "7", "leaks": False, "number": 42, "written": 0, "hosts": 1, "connected": 1
    }, outcome  # fmt: skip


@long
async def test_a_folder_of_files_is_a_program(config: SandboxConfig, tmp_path: Path) -> None:
    evaluator = write_evaluator(
        tmp_path,
        """
import sys
from helper import scale

def evaluate(path):
    sys.path.insert(0, path)
    from package.main import answer
    return {"combined_score": scale(answer())}
""",
    )
    (evaluator.file.parent / "helper.py").write_text("def scale(x): return x / 100")
    files = {
        "package/main.py": "from .part import x\ndef answer(): return x",
        "package/part.py": "x = 42",
    }
    async with Sandbox(config, evaluator) as sandbox:
        assert (await sandbox.evaluate(files)).metrics == {"combined_score": 0.42}
        with pytest.raises(SandboxError, match="inside its folder"):
            await sandbox.evaluate({"../outside.py": ""})


@long
async def test_stages_and_a_timeout_in_the_second(config: SandboxConfig, tmp_path: Path) -> None:
    evaluator = write_evaluator(
        tmp_path,
        """
async def evaluate_stage1(path):
    return {"combined_score": float(open(path).read()), "note": "text"}

def evaluate_stage2(path):
    while True:
        pass

def evaluate(path):
    raise RuntimeError("not called")
""",
        timeout_s=1.0,
    )
    async with Sandbox(config, evaluator) as sandbox:
        low = await sandbox.evaluate("0.2")
        assert low.failure is None and low.metrics == {"combined_score": 0.2, "note": "text"}
        high = await sandbox.evaluate("0.8")
    assert kind_of(high) == "timeout" and high.stage == "stage2"
    assert high.metrics == {
        "combined_score": 0.8,
        "note": "text",
        "stage2_passed": 0.0,
        "timeout": True,
    }
    assert high.artifacts == {"failure_stage": "stage2", "stage2_timeout": "True"}


@long
async def test_tools_of_evaluators_work_inside(config: SandboxConfig, tmp_path: Path) -> None:
    evaluator = write_evaluator(
        tmp_path,
        """
import pickle, subprocess, sys, tempfile
import numpy as np

def evaluate(path):
    with tempfile.NamedTemporaryFile(suffix=".pkl") as file:
        code = f"import pickle; pickle.dump({{'x': 21}}, open({file.name!r}, 'wb'))"
        subprocess.run([sys.executable, "-c", code], check=True, timeout=20)
        value = pickle.load(file)["x"]
    return {"combined_score": np.float32(value) * 2, "matrix": float(np.eye(3).sum())}
""",
    )
    async with Sandbox(config, evaluator) as sandbox:
        outcome = await sandbox.evaluate("x")
    assert outcome.metrics == {"combined_score": 42.0, "matrix": 3.0}, outcome


UNUSABLE = {
    "import not_a_module": "No module named 'not_a_module'",
    "x = 1": "has no function `evaluate",
    "import sys; sys.exit(3)": "importing evaluator.py failed",
    "import os; os._exit(3)": "did not start",
}


@long
async def test_an_unusable_evaluator_is_refused(config: SandboxConfig, tmp_path: Path) -> None:
    for text, sentence in UNUSABLE.items():
        with pytest.raises(SandboxError, match=sentence):
            async with Sandbox(config, write_evaluator(tmp_path, text)):
                pass


async def test_cancel_kills_the_candidate(sandbox: Sandbox) -> None:
    before = set(descendants(os.getpid()))
    task = asyncio.ensure_future(sandbox.evaluate("import time; time.sleep(600)"))
    await until(lambda: not set(descendants(os.getpid())) <= before)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert set(descendants(os.getpid())) <= before
    await healthy(sandbox)


@long
async def test_close_leaves_nothing(
    config: SandboxConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before, left = set(descendants(os.getpid())), leftovers()
    evaluator = write_evaluator(tmp_path)
    sandbox = Sandbox(config, evaluator)
    async with sandbox:
        assert (await sandbox.evaluate("metrics = {'s': 1.0}")).failure is None
    assert set(descendants(os.getpid())) <= before
    assert leftovers() == left, "of the sandbox that the other tests share"
    with pytest.raises(SandboxError, match="closed"):
        await sandbox.evaluate("metrics = {}")


async def test_the_death_of_the_parent_ends_everything(
    config: SandboxConfig, tmp_path: Path
) -> None:
    evaluator = write_evaluator(tmp_path)
    mark = f"mark-{os.getpid()}-{time.monotonic_ns()}"
    sleep = ["-c", "import time; time.sleep(600)", mark]
    text = f"import subprocess, sys\nsubprocess.run([sys.executable, *{sleep!r}])"
    code = f"""
import asyncio
from pathlib import Path
from rookery.sandbox import *
async def main():
    config = SandboxConfig.model_validate_json({config.model_dump_json()!r})
    async with Sandbox(config, EvaluatorConfig(file=Path({str(evaluator.file)!r}))) as sandbox:
        await sandbox.evaluate({text!r})
asyncio.run(main())
"""
    parent = start([sys.executable, "-c", code])
    try:
        await until(lambda: _running(mark))
        jail = set(descendants(parent.pid)) - {parent.pid}
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    await until(lambda: not _running(mark))
    await until(lambda: not any(_is_alive(pid) for pid in jail))


def start(command: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command)


def leftovers() -> list[Path]:
    groups = Path("/sys/fs/cgroup").glob(f"**/rookery-{os.getpid()}-*")
    return [*Path(tempfile.gettempdir()).glob("rookery-sandbox-*"), *groups]


def _is_alive(pid: int) -> bool:
    """Whether it runs; what waits for its new parent to reap it does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _running(mark: str) -> bool:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if mark.encode() in words:
            return True
    return False


@long
async def test_without_nested_namespaces_each_candidate_has_its_jail(
    config: SandboxConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some systems let bubblewrap make namespaces but not the programs in it."""
    if config.backend != "bubblewrap":
        pytest.skip("sandlock does not nest")
    bubblewrap = BACKENDS["bubblewrap"]

    def without_nesting(config: SandboxConfig, box: object) -> Jail:
        jail = bubblewrap(config, box)  # type: ignore[arg-type]
        words = [word.replace('"namespaces"', '"jail"') for word in jail.command]
        return Jail(command=words, environment=jail.environment)

    monkeypatch.setitem(BACKENDS, "bubblewrap", without_nesting)
    async with Sandbox(config, write_evaluator(tmp_path)) as sandbox:
        await healthy(sandbox)
        killed = await sandbox.evaluate("import os, signal\nos.kill(os.getppid(), signal.SIGKILL)")
        assert kind_of(killed) in {"killed", "error"}
        await healthy(sandbox)


@pytest_asyncio.fixture(loop_scope="module")
async def scoring(
    config: SandboxConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Sandbox]:
    """Without a control group, which an ordinary user may not make."""
    monkeypatch.setattr("rookery.sandbox.server.make_cgroup", lambda: None)
    folder = tmp_path / "evaluator"
    folder.mkdir()
    (folder / "helper.py").write_text("low = min")
    (folder / "late.py").write_text("FACTOR = 1.0")
    async with Sandbox(config, write_evaluator(tmp_path, hostile_programs.EVALUATOR)) as opened:
        yield opened


@pytest.mark.parametrize("config", ["bubblewrap", "sandlock"], indirect=True)
async def test_no_hostile_program_succeeds(
    scoring: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None forges a score, holds more memory, damages a file or tells a secret; after each of them
    an honest program has its own score."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-SECRET")
    victim = tmp_path / "victim"
    victim.write_text("SECRET")
    victim.chmod(0o600)
    before = victim.stat(), os.stat(os.__file__)
    succeeded = {}
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.socket(socket.AF_UNIX) as abstract,
    ):
        port = str(listener.getsockname()[1])
        abstract.bind(f"\0rookery-victim-{port}")
        abstract.listen()
        for name, text in hostile_programs.PROGRAMS.items():
            text = text.replace("VICTIM", repr(str(victim))).replace("PORT", port)
            outcome = await scoring.evaluate(text)
            honest = await scoring.evaluate(hostile_programs.HONEST)
            forged = outcome.failure is None and outcome.metrics["combined_score"] != 0.5
            told = "SECRET" in repr((outcome.metrics, outcome.artifacts, outcome.output_tail))
            if forged or told or honest.metrics.get("combined_score") != 0.5:
                succeeded[name] = (outcome, honest)
    after = victim.stat(), os.stat(os.__file__)
    assert not succeeded, sorted(succeeded.items())
    assert victim.read_text() == "SECRET" and not os.listxattr(victim)
    assert [(s.st_mode, s.st_mtime_ns, s.st_nlink) for s in before] == [
        (s.st_mode, s.st_mtime_ns, s.st_nlink) for s in after
    ]
