"""Folders that travel by their hash."""

import io
import os
import signal
import subprocess
import sys
import tarfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from rookery.errors import ConfigError, ExecutorError
from rookery.executors import folder as folder_module
from rookery.executors.folder import hold_folder, pack_folder


@pytest.fixture
def problem(tmp_path: Path) -> Path:
    folder = tmp_path / "problem"
    (folder / "data").mkdir(parents=True)
    (folder / "evaluator.py").write_text("def evaluate(path): ...")
    (folder / "data" / "points.csv").write_text("1,2")
    (folder / "run.sh").write_text("#!/bin/sh")
    (folder / "run.sh").chmod(0o755)
    (folder / ".git").mkdir()
    (folder / ".git" / "HEAD").write_text("ref")
    return folder


def test_equal_files_make_equal_packages(problem: Path) -> None:
    first = pack_folder(problem)
    os.utime(problem / "evaluator.py", (1, 1))
    (problem / ".git" / "HEAD").write_text("other")
    assert pack_folder(problem) == first
    (problem / "data" / "points.csv").write_text("1,3")
    assert pack_folder(problem).digest != first.digest


def test_one_folder_can_be_left_out_and_others_of_its_name_stay(problem: Path) -> None:
    for place in (problem / "runs", problem / "data" / "runs"):
        place.mkdir()
        (place / "large.bin").write_text("0")
    packed = pack_folder(problem, left_out=problem / "runs")
    with tarfile.open(fileobj=io.BytesIO(packed.content)) as archive:
        names = archive.getnames()
    assert "data/runs/large.bin" in names
    assert "runs/large.bin" not in names


def test_it_is_unpacked_once_and_removed_with_its_last_holder(
    problem: Path, tmp_path: Path
) -> None:
    package, root = pack_folder(problem), tmp_path / "store"
    calls: list[int] = []

    def fetch() -> bytes:
        calls.append(1)
        return package.content

    with hold_folder(package.digest, fetch, root=root) as first:
        with hold_folder(package.digest, fetch, root=root) as second:
            assert first == second and len(calls) == 1
            names = {p.relative_to(first).as_posix() for p in first.rglob("*") if p.is_file()}
            assert names == {"evaluator.py", "data/points.csv", "run.sh"}
            assert os.access(first / "run.sh", os.X_OK)
        assert (first / "evaluator.py").exists()
    assert not list(root.iterdir())


def test_what_a_killed_holder_leaves_is_removed_by_the_next(problem: Path, tmp_path: Path) -> None:
    root = tmp_path / "store"
    code = f"""
        from pathlib import Path
        from rookery.executors.folder import *
        package = pack_folder(Path({str(problem)!r}))
        with hold_folder(package.digest, lambda: package.content, root=Path({str(root)!r})):
            print("held", flush=True)
            input()
    """
    holder = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
    digest = pack_folder(problem).digest
    (problem / "evaluator.py").write_text("other")
    other = pack_folder(problem)
    with hold_folder(other.digest, lambda: other.content, root=root):
        assert (root / digest).is_dir(), "its holder lives"
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
        with hold_folder(other.digest, lambda: other.content, root=root):
            assert not (root / digest).exists()
            assert (root / other.digest / "evaluator.py").read_text() == "other"


def test_content_that_is_not_what_the_hash_says_is_refused(problem: Path, tmp_path: Path) -> None:
    package, root = pack_folder(problem), tmp_path / "store"
    with (
        pytest.raises(ExecutorError, match="does not have the hash"),
        hold_folder("0" * 64, lambda: package.content, root=root),
    ):
        pass
    assert not list(root.iterdir())


@pytest.fixture
def foreign_root(tmp_path: Path) -> Iterator[Path]:
    root = tmp_path / "store"
    root.mkdir()
    root.chmod(0o777)
    yield root


def test_a_folder_that_others_can_write_to_is_not_used(problem: Path, foreign_root: Path) -> None:
    package = pack_folder(problem)
    with (
        pytest.raises(ExecutorError, match="only this user can write to"),
        hold_folder(package.digest, lambda: package.content, root=foreign_root),
    ):
        pass


def test_what_cannot_travel_is_named(
    problem: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="is not a folder"):
        pack_folder(problem / "evaluator.py")
    (problem / "link.csv").symlink_to(problem / "data" / "points.csv")
    pack_folder(problem)
    (problem / "link").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="link is a link to a folder"):
        pack_folder(problem)
    (problem / "link").unlink()
    os.mkfifo(problem / "pipe")
    with pytest.raises(ConfigError, match="pipe is not a regular file"):
        pack_folder(problem)
    (problem / "pipe").unlink()
    monkeypatch.setattr(folder_module, "MAX_FOLDER_BYTES", 1 << 20)
    (problem / "large").write_bytes(bytes(1 << 20))
    with pytest.raises(ConfigError, match="more than 1 MiB"):
        pack_folder(problem)
