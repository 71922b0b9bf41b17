"""A full disk: a sentence, nothing half-written, and everything goes on when there is room.

A disk that may only be read: runs can be looked at, and not opened.
"""

import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tiny import tiny_adapter

from rookery.errors import AdapterError, RunError
from rookery.runs import Run, list_runs
from rookery.weights import read_adapter, write_adapter

LIMIT_BYTES = 256 * 1024


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MB, for which the test must be root."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


@contextmanager
def small_files() -> Iterator[None]:
    """Writes beyond LIMIT_BYTES of a file fail, as on a full disk. Python ignores the signal."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
        while True:
            file.write(b"x" * 4096)


def repeat_until_full(write: Callable[[int], object], *, words: str) -> int:
    """How many writes went well before the RunError."""
    with pytest.raises(RunError, match=words):
        for done in range(100_000):
            write(done)
    return done


def test_a_full_disk_loses_nothing(small_disk: Path) -> None:
    full = r"the disk is full: free some space, then resume"
    filler = small_disk / "filler"
    filler.write_bytes(b"x" * (1024 * 1024))
    with Run.create(small_disk, kind="eval", name="poet", config={}) as run:
        digest = run.blobs.put_bytes(b"first" * 1000)
        num_blobs = 1 + repeat_until_full(
            lambda _: run.blobs.put_bytes(os.urandom(60_000)), words=full
        )
        folder = small_disk.parent / "big"
        folder.mkdir()
        (folder / "x").write_bytes(b"x" * 3_000_000)
        with pytest.raises(RunError, match=full):
            run.blobs.put_folder(folder)
        num_events = repeat_until_full(lambda i: tick(run, i), words="the disk is full")
        num_rows = repeat_until_full(lambda i: log(run, i), words=full)
        with pytest.raises(RunError, match=full):
            run.write_text("report.html", "z" * 100_000)
        assert not (run.path / "report.html").exists()
        assert not list((run.path / ".tmp").glob("*"))
        assert len(list(run.events("tick"))) == num_events
        filler.unlink()
        with pytest.raises(RunError, match="An earlier write failed, and nothing is stored after"):
            tick(run, num_events)
    with Run.open(run.path) as run:
        tick(run, num_events)
        log(run, num_rows)
        run.write_text("report.html", "z" * 100_000)
        run.finish()
    with Run.open(run.path) as run:
        assert [e.payload["i"] for e in run.events("tick")] == list(range(num_events + 1))
        assert [row.step for row in run.metrics()] == list(range(num_rows + 1))
        assert len(run.blobs.digests()) == num_blobs
        assert run.blobs.read_bytes(digest, verify=True) == b"first" * 1000
        for stored in run.blobs.digests():
            run.blobs.path(stored, verify=True)


def tick(run: Run, number: int) -> None:
    run.append_blocking("tick", {"i": number, "text": "y" * 500}, key=str(number))


def log(run: Run, step: int) -> None:
    run.log_metrics(step, {f"a/{step % 50}{'b' * 3000}": 1.0})


def test_a_failed_write_never_hides_the_first_error(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        Run.create(small_disk, kind="eval", name="poet", config={}) as run,
    ):
        fill(small_disk / "filler")
        raise ZeroDivisionError
    assert "outcome could not be recorded: " in caplog.text and "Traceback" not in caplog.text
    (small_disk / "filler").unlink()
    assert list_runs(small_disk)[0].status == "interrupted"
    Run.open(run.path).close()


def test_no_room_to_create_is_a_sentence_and_can_be_repeated(small_disk: Path) -> None:
    filler = small_disk / "filler"
    fill(filler)
    with pytest.raises(RunError, match="the disk is full"):
        Run.create(small_disk, kind="eval", name="poet", config={})
    filler.unlink()
    Run.create(small_disk, kind="eval", name="poet", config={}).close()


def test_a_file_size_limit_loses_nothing(tmp_path: Path) -> None:
    with Run.create(tmp_path, kind="eval", name="poet", config={}) as run:
        with small_files():
            with pytest.raises(RunError, match=r"too large.*ulimit"):
                run.blobs.put_bytes(b"x" * (LIMIT_BYTES + 1))
            with pytest.raises(RunError, match=r"too large.*ulimit"):
                run.write_text("report.html", "x" * (LIMIT_BYTES + 1))
            words = r"events\.db: .*check it.*disk I/O error"
            num_events = repeat_until_full(lambda i: tick(run, i), words=words)
            num_rows = repeat_until_full(lambda i: log(run, i), words="too large.*ulimit")
        assert num_events > 10 and num_rows > 20
    with Run.open(run.path) as run:
        tick(run, num_events)
        log(run, num_rows)
        run.finish()
    with Run.open(run.path) as run:
        assert [e.payload["i"] for e in run.events("tick")] == list(range(num_events + 1))
        assert [row.step for row in run.metrics()] == list(range(num_rows + 1))
        assert run.blobs.digests() == []
        assert not (run.path / "report.html").exists()


def test_runs_on_a_read_only_disk_can_be_viewed(small_disk: Path) -> None:
    with Run.create(small_disk, kind="eval", name="closed", config={}) as run:
        run.append_blocking("tick", {})
        shutil.copytree(run.path, small_disk / "killed")
        run.finish()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    found = {s.path.name: (s.status, s.num_events, s.message) for s in list_runs(small_disk)}
    assert found == {"closed": ("finished", 3, ""), "killed": ("interrupted", 2, "")}
    with pytest.raises(RunError, match="read-only"):
        Run.open(run.path)
    assert not (run.path / "events.db-wal").exists()


def test_an_adapter_that_does_not_fit_is_said_and_written_when_it_does(tmp_path: Path) -> None:
    adapter = tiny_adapter("wide", rank=64)
    with Run.create(tmp_path, kind="genome", name="x", config={}) as run:

        def write() -> Path:
            return run.write_folder("winner", lambda folder: write_adapter(adapter, folder / "a"))

        with small_files(), pytest.raises(AdapterError, match=r"writing the adapter.*os error"):
            write()
        assert read_adapter(write() / "a").version == adapter.version
