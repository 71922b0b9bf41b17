"""What each backend's command lets in, and the refusals before anything runs."""

import asyncio
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rookery.errors import SandboxError
from rookery.sandbox import SandboxConfig, choose_backend
from rookery.sandbox.box import Cgroup, make_cgroup, open_box
from rookery.sandbox.jail import BACKENDS, find_remedy, python_folders
from rookery.sandbox.server import PipeReader, measure


@pytest.fixture
def evaluator(tmp_path: Path) -> Path:
    folder = tmp_path / "evaluator"
    (folder / "data").mkdir(parents=True)
    (folder / ".env").write_text("KEY=sk-secret")
    (folder / "data" / "table.csv").write_text("1,2")
    file = folder / "evaluator.py"
    file.write_text("def evaluate(path): return {}")
    file.chmod(0o600)
    return file


@pytest.fixture
def bwrap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    program = tmp_path / "bin" / "bwrap"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho 'No permissions to create new namespace' >&2; exit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    return str(program)


def words_after(command: list[str], option: str) -> list[str]:
    return [after for word, after in itertools.pairwise(command) if word == option]


def test_the_box_holds_a_copy_without_secrets_and_goes(evaluator: Path) -> None:
    with open_box(evaluator) as box:
        inside = {str(p.relative_to(box.inside)) for p in box.inside.rglob("*") if p.is_file()}
        assert {"evaluator/evaluator.py", "evaluator/data/table.csv"} <= inside
        assert "rookery_inside/server.py" in inside
        assert not any(".env" in name or "__pycache__" in name for name in inside)
        assert (box.inside / box.evaluator).stat().st_mode & 0o777 == 0o644
    assert not box.folder.exists()


def test_a_box_left_by_a_dead_program_is_removed(
    evaluator: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    left = tmp_path / "rookery-sandbox-left"
    (left / "scratch").mkdir(parents=True)
    (left / "lock").touch()
    with open_box(evaluator) as first, open_box(evaluator) as second:
        assert not left.exists() and first.folder.exists() and second.folder.exists()


def test_a_box_that_was_removed_in_part_is_removed(
    evaluator: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lock went first. A box without a lock that is new may be another's in the making, and
    folders of another kind are not ours to remove."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    left, new = tmp_path / "rookery-sandbox-left", tmp_path / "rookery-sandbox-new"
    other = tmp_path / "rookery-policy-other"
    for folder in (left / "scratch", new, other):
        folder.mkdir(parents=True)
    os.utime(left, (0, 0))
    os.utime(other, (0, 0))
    with open_box(evaluator):
        assert not left.exists() and new.exists() and other.exists()


def test_sandlock_is_refused_where_calls_cannot_be(
    evaluator: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    with open_box(evaluator) as box, pytest.raises(SandboxError, match="install bubblewrap"):
        BACKENDS["sandlock"](SandboxConfig(), box)


def test_a_box_with_folders_in_folders_is_removed(
    evaluator: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deeper than Python recurses, and a path longer than the kernel takes."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    left = tmp_path / "rookery-sandbox-left"
    scratch = left / "scratch"
    scratch.mkdir(parents=True)
    (left / "lock").touch()
    (scratch / "1").mkdir()
    (scratch / "link").symlink_to(evaluator.parent)
    place = os.open(scratch, os.O_RDONLY)
    for _ in range(1200):
        os.mkdir("a" * 20, dir_fd=place)
        below = os.open("a" * 20, os.O_RDONLY, dir_fd=place)
        os.mkdir("0", 0, dir_fd=place)
        os.close(place)
        place = below
    os.close(place)
    with open_box(evaluator):
        assert not left.exists() and evaluator.exists()


def test_a_box_of_another_user_is_left_alone(
    evaluator: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    left = tmp_path / "rookery-sandbox-theirs"
    left.mkdir()
    (left / "lock").touch()
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    with open_box(evaluator):
        assert left.exists()


def test_an_evaluator_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="no evaluator file"), open_box(tmp_path / "none.py"):
        pass


def test_bubblewrap_shows_python_and_nothing_of_the_home(bwrap: str, evaluator: Path) -> None:
    with open_box(evaluator) as box:
        command = list(BACKENDS["bubblewrap"](SandboxConfig(), box).command)
    bound = {Path(path) for path in words_after(command, "--ro-bind")}
    home = Path.home()
    assert command[0] == bwrap and "--unshare-net" in command and "--die-with-parent" in command
    assert set(python_folders()) <= bound
    assert "/dev/full /dev/zero" in " ".join(command)
    assert not any(home.is_relative_to(path) for path in bound)
    assert {p for p in bound if p.is_relative_to(home)} <= set(python_folders())
    assert command.index("--remount-ro") > max(
        at for at, word in enumerate(command) if word == "--ro-bind"
    )


def test_bubblewrap_opens_etc_to_the_user_inside(bwrap: str, evaluator: Path) -> None:
    with open_box(evaluator) as box:
        command = list(BACKENDS["bubblewrap"](SandboxConfig(), box).command)
    at = command.index("/etc")
    assert command[at - 3 : at] == ["--perms", "0755", "--dir"]
    assert not any(word.startswith("/etc/") for word in command[:at])


def test_an_evaluator_may_be_a_link(evaluator: Path, tmp_path: Path) -> None:
    """Its folder is the one in which the link lies."""
    link = tmp_path / "problem" / "score.py"
    link.parent.mkdir()
    (link.parent / "helper.py").touch()
    link.symlink_to(evaluator)
    with open_box(link) as box:
        names = {path.name for path in (box.inside / "evaluator").iterdir()}
        assert names == {"score.py", "helper.py"}
        assert (box.inside / box.evaluator).read_text() == evaluator.read_text()


def test_what_the_config_names_is_let_in(
    bwrap: str, evaluator: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NAMED", "yes")
    monkeypatch.setenv("OTHER", "no")
    shown = Path(__file__).parent
    config = SandboxConfig(
        network=True, readable=(shown,), devices=(Path("/dev/null"),), variables=("NAMED",)
    )
    with open_box(evaluator) as box:
        jail = BACKENDS["bubblewrap"](config, box)
    command = list(jail.command)
    assert "--unshare-net" not in command
    assert str(shown) in words_after(command, "--ro-bind")
    assert words_after(command, "--dev-bind") == ["/dev/full", "/dev/null"]
    assert jail.environment["NAMED"] == "yes" and "OTHER" not in jail.environment
    assert not any("yes" in word for word in command), "others can read command lines"


def test_a_folder_that_is_not_there_is_refused(bwrap: str, evaluator: Path) -> None:
    config = SandboxConfig(readable=(Path("/no/such/folder"),))
    with open_box(evaluator) as box, pytest.raises(SandboxError, match="/no/such/folder"):
        BACKENDS["bubblewrap"](config, box)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="there is no /dev/shm")
def test_a_folder_that_every_program_has_of_its_own_is_refused(bwrap: str, evaluator: Path) -> None:
    config = SandboxConfig(readable=(Path("/dev/shm"),))
    with open_box(evaluator) as box, pytest.raises(SandboxError, match="a /dev/shm of its own"):
        BACKENDS["bubblewrap"](config, box)


def test_a_python_that_holds_the_home_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    with pytest.raises(SandboxError, match="holds your home"):
        python_folders()


async def test_no_backend_is_a_refusal_with_the_lines_that_mend_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "sandlock", None)
    with pytest.raises(SandboxError) as refused:
        await choose_backend(SandboxConfig())
    text = str(refused.value)
    assert "apt-get install bubblewrap" in text and "pip install sandlock" in text


async def test_a_backend_that_is_there_but_fails_is_told_by_its_own_words(bwrap: str) -> None:
    with pytest.raises(SandboxError, match="No permissions to create new namespace"):
        await choose_backend(SandboxConfig(backend="bubblewrap"))


def test_what_is_installed_is_not_told_to_be_installed(
    bwrap: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    restriction = tmp_path / "apparmor_restrict_unprivileged_userns"
    assert find_remedy("bubblewrap", restriction=restriction) == ""
    restriction.write_text("1\n")
    told = "sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"
    assert find_remedy("bubblewrap", restriction=restriction) == told
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_remedy("bubblewrap", restriction=restriction) == "apt-get install bubblewrap"


# Control groups of both versions on a folder that looks like theirs.


def test_version_1_has_a_folder_per_controller(tmp_path: Path) -> None:
    group = Cgroup(tmp_path / "memory" / "x", tmp_path / "pids" / "x")
    for folder in group.folders:
        folder.mkdir(parents=True)
    (group.memory / "memory.usage_in_bytes").write_text("100\n")
    (group.memory / "memory.oom_control").write_text("oom_kill_disable 0\noom_kill 3\n")
    (group.pids / "pids.current").write_text("2\n")
    group.limit(memory_bytes=1000, max_processes=10)
    assert (group.memory / "memory.limit_in_bytes").read_text() == "1100"
    assert (group.pids / "pids.max").read_text() == "12"
    assert group.num_oom_kills() == 3


def test_version_2_has_one_folder(tmp_path: Path) -> None:
    group = Cgroup(tmp_path, tmp_path)
    (tmp_path / "memory.current").write_text("100\n")
    (tmp_path / "memory.events").write_text("low 0\noom 1\noom_kill 2\n")
    (tmp_path / "pids.current").write_text("2\n")
    group.limit(memory_bytes=1000, max_processes=10)
    assert (tmp_path / "memory.max").read_text() == "1100"
    assert (tmp_path / "memory.swap.max").read_text() == "0"
    assert group.folders == (tmp_path,) and group.num_oom_kills() == 2


@pytest.mark.parametrize("text", ["0::/user.slice/app.scope\n", "4:memory:/a\n8:pids:/\n", ""])
def test_where_none_can_be_made_there_is_none(tmp_path: Path, text: str) -> None:
    """A plain folder has none of the kernel's files: what was made in it is removed again."""
    membership = tmp_path / "membership"
    membership.write_text(text)
    for name in ("user.slice/app.scope", "memory/a", "pids"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "user.slice" / "cgroup.subtree_control").write_text("cpu memory pids\n")
    assert make_cgroup(root=tmp_path, membership=membership) is None
    assert not list(tmp_path.rglob("rookery-*"))


def test_a_removed_group_has_killed_nobody(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    assert Cgroup(gone, gone).num_oom_kills() == 0


# What processes use, read from /proc.


NAMED = """
import ctypes
ctypes.CDLL(None).prctl(15, b"\\xff) \\x80", 0, 0, 0)
print("named", flush=True)
input()
"""


def test_a_process_may_have_any_bytes_as_its_name() -> None:
    command = [sys.executable, "-c", NAMED]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == b"named\n"
        usage = measure(process.pid)
        process.stdin.write(b"\n")
    assert usage.num_threads == 1 and usage.rss_bytes > 2**20


# The reader of what a candidate writes.


async def test_a_flood_of_lines_is_kept_but_not_followed() -> None:
    """A call for every line would hold up the event loop for seconds."""
    lines: list[bytes] = []
    text = b"one\ntwo\n" + b"\n" * 60_000
    with PipeReader(max_bytes=2**20, on_excess=lines.clear, on_line=lines.append, max_lines=3) as r:
        os.write(r.writer, text)
        r.close_writer()
        async with asyncio.timeout(10.0):
            await r.ended.wait()
    assert lines == [b"one", b"two", b""] and r.kept == text
