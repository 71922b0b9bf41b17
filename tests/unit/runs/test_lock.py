"""The lock, with real second processes: one owner, named when refused, freed by any death."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

import rookery
from rookery.errors import RunError
from rookery.runs import Run, is_locked, read_owner
from rookery.runs.disk import RunLock

SOURCE = Path(rookery.__file__).parents[1]
HOLD = """
import sys
from pathlib import Path
from rookery.runs import Run
run = Run.open(Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.read()
run.close()
"""
FORK = """
import os, sys
from pathlib import Path
from rookery.errors import RunError
from rookery.runs import Run
run = Run.open(Path(sys.argv[1]))
if os.fork() == 0:
    try:
        run.append_blocking("tick", {})
        print("stored", flush=True)
    except RunError as error:
        print(error, flush=True)
    os.read(0, 1)
    os._exit(0)
os.wait()
"""
INHERIT = """
import subprocess, sys
from pathlib import Path
from rookery.runs import Run
run = Run.open(Path(sys.argv[1]))
descriptor = run._lock.lock.descriptor
child = subprocess.Popen([sys.executable, "-S", "-c", "import sys; sys.stdin.read()"],
                         pass_fds=[descriptor])
print("ready", flush=True)
child.wait()
"""
RACE = """
import sys
from pathlib import Path
from rookery.errors import RunError
from rookery.runs import Run
print("ready", flush=True)
sys.stdin.readline()
try:
    run = Run.open(Path(sys.argv[1]))
    print("owner", flush=True)
except RunError as error:
    print("in use" in str(error) and "refused", flush=True)
sys.stdin.read()
"""


@contextmanager
def process(code: str, path: Path) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(
        [sys.executable, "-S", "-c", code, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        text=True,
    )
    with child:
        try:
            yield child
        finally:
            child.kill()


def line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with Run.create(tmp_path, kind="eval", name="poet", config={}) as run:
        return run.path


def test_a_second_process_is_told_who_owns_the_run(path: Path) -> None:
    with process(HOLD, path) as child:
        assert line(child) == "ready"
        with pytest.raises(RunError) as caught:
            Run.open(path)
        message = str(caught.value)
        assert f"in use by process {child.pid} on {socket.gethostname()}, since 20" in message
        assert re.search(r"since \d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", message)
        with Run.view(path) as view:
            assert view.status == "running"
        child.communicate()
    assert read_owner(path / "run.lock") is None
    with Run.open(path):
        pass


def test_kill_9_frees_the_run_by_itself(path: Path) -> None:
    with process(HOLD, path) as child:
        assert line(child) == "ready"
        child.send_signal(signal.SIGKILL)
        child.wait()
        left = read_owner(path / "run.lock")
        assert left is not None and left.pid == child.pid and left.has_ended
        with Run.view(path) as view:
            assert view.status == "interrupted"
        with Run.open(path) as run:
            assert run.status == "running"
            owner = read_owner(path / "run.lock")
            assert owner is not None and owner.pid == os.getpid()


def test_the_same_process_cannot_own_it_twice(path: Path) -> None:
    with Run.open(path), pytest.raises(RunError, match=f"in use by process {os.getpid()} on"):
        Run.open(path)


def test_a_forked_child_neither_writes_nor_keeps_the_lock(path: Path) -> None:
    with process(FORK, path) as child:
        assert "forked child" in line(child)
        child.send_signal(signal.SIGKILL)
        child.wait()
        with Run.open(path) as run:
            assert run.last("tick") is None


def test_a_lock_kept_by_an_orphan_says_so(path: Path) -> None:
    with process(INHERIT, path) as child:
        assert line(child) == "ready"
        child.send_signal(signal.SIGKILL)
        child.wait()
        with pytest.raises(RunError, match=f"process {child.pid} on .*has ended, but.*fuser"):
            Run.open(path)


def test_of_many_at_once_one_wins(path: Path) -> None:
    with ExitStack() as stack:
        children = [stack.enter_context(process(RACE, path)) for _ in range(2)]
        for child in children:
            assert line(child) == "ready"
        for child in children:
            assert child.stdin is not None
            child.stdin.write("go\n")
            child.stdin.flush()
        assert sorted(line(child) for child in children) == ["owner", "refused"]


def test_an_owner_has_ended_only_when_that_is_certain(path: Path) -> None:
    with Run.open(path):
        owner = read_owner(path / "run.lock")
    assert owner is not None and not owner.has_ended
    assert replace(owner, process_start="1").has_ended, "the pid was given to another process"
    assert replace(owner, pid=2**22 + 1).has_ended
    assert not replace(owner, pid=2**22 + 1, host="elsewhere").has_ended
    assert not replace(owner, pid=2**22 + 1, namespace="pid:[1]").has_ended


def test_readers_that_ask_do_not_get_in_the_way(path: Path) -> None:
    is_done = threading.Event()

    def ask() -> None:
        while not is_done.is_set():
            is_locked(path / "run.lock")

    readers = [threading.Thread(target=ask) for _ in range(2)]
    for reader in readers:
        reader.start()
    try:
        for _ in range(100):
            RunLock.acquire(path / "run.lock").release()
    finally:
        is_done.set()
        for reader in readers:
            reader.join()


@pytest.mark.parametrize("change", ["remove", "replace"])
def test_writes_stop_when_the_lock_file_is_taken_away(path: Path, change: str) -> None:
    with Run.open(path) as run:
        (path / "run.lock").unlink()
        if change == "replace":
            Run.open(path).close()
        for write in (
            lambda: run.append_blocking("tick", {}),
            lambda: run.log_metrics(0, {}),
            lambda: run.blobs.put_bytes(b""),
            lambda: run.write_text("report.html", ""),
            lambda: run.finish(),
        ):
            with pytest.raises(RunError, match="removed or replaced while the run was in use"):
                write()


def test_noise_in_the_lock_file_is_no_obstacle(path: Path) -> None:
    (path / "run.lock").write_bytes(b'{"pid": "\xff')
    with Run.open(path):
        assert is_locked(path / "run.lock")
    assert not is_locked(path / "run.lock")
