"""`kill -9` at random moments: what was acknowledged is there, once, and the run opens again.

A process forks one writer after the other over the same run; each writer opens the run,
writes events, batches, blobs, metrics and documents, and acknowledges every write on a pipe. This
process kills it after a random number of acknowledgements and a random wait, then looks.
"""

import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rookery
from rookery.errors import RunError
from rookery.runs import EventLog, Run, RunView, export_events, list_runs

NUM_KILLS = 20
NUM_CREATIONS = 20
SOURCE = Path(rookery.__file__).parents[1]
FORKER = """
import os, sys
from pathlib import Path
from rookery.runs import NewEvent, Run

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def write(path):
    run = Run.open(path)
    last = run.last("tick")
    number = last.payload["number"] if last else 0
    while True:
        number += 1
        payload = {"number": number, "text": "x" * (number % 700)}
        run.append_blocking("tick", payload, key=str(number))
        say("tick", number)
        run.append_blocking("tick", payload, key=str(number))
        if number % 2 == 0:
            pair = [NewEvent(kind="pair", payload={"of": number}) for _ in range(2)]
            run.append_many_blocking(pair)
            say("pair", number)
        if number % 3 == 0:
            say("blob", run.blobs.put_bytes(b"%d" % number * 2000))
        if number % 5 == 0:
            with run.blobs.stage() as folder:
                (folder / "a").write_bytes(b"%d" % number * 3000)
                (folder / "b").write_bytes(b"b")
                say("blob", run.blobs.put_folder(folder))
        if number % 4 == 0:
            run.log_metrics(number, {"a/number": number})
            say("metric", number)
        if number % 7 == 0:
            run.write_json("state.json", {"number": number, "text": "y" * 5000})
            say("state", number)

for name in map(str.strip, sys.stdin):
    pid = os.fork()
    if pid == 0:
        say("pid", os.getpid())
        root = Path(sys.argv[1])
        if not (root / name).exists():
            Run.create(root, kind="eval", name=name, config={"name": name}).close()
            say("created", name)
        write(root / name)
    os.waitpid(pid, 0)
    say("dead")
"""


@dataclass
class Seen:
    """What was acknowledged, and how far the log was read."""

    acknowledged: dict[str, list[str]] = field(default_factory=dict)
    seq: int = 0
    number: int = 0
    pairs: list[int] = field(default_factory=list)

    def add(self, line: str) -> None:
        word, value = line.split()
        self.acknowledged.setdefault(word, []).append(value)

    def newest(self, word: str) -> int:
        return int(self.acknowledged.get(word, ["0"])[-1])


def test_nothing_acknowledged_is_lost_or_doubled(tmp_path: Path) -> None:
    dice = random.Random(7)
    with Run.create(tmp_path, kind="eval", name="poet", config={"a": 1}) as run:
        path = run.path
    seen = Seen()
    with start_forker(tmp_path) as forker:
        for _ in range(NUM_KILLS):
            num_waited = dice.choice([0, 0, 1, 2, 5, 10, 20])
            kill_one(forker, "poet", seen, num_waited, dice)
            if dice.random() < 0.5:
                with Run.view(path) as view:
                    assert view.status == "interrupted"
                    check(view, seen)
            else:
                with Run.open(path) as run:
                    check(run, seen)
                    assert not (path / ".tmp").exists()
    with Run.open(path) as run:
        check_whole(run, seen)


def test_a_run_killed_while_it_is_created_opens_or_is_created_again(tmp_path: Path) -> None:
    dice = random.Random(8)
    num_again = 0
    with start_forker(tmp_path) as forker:
        for number in range(NUM_CREATIONS):
            seen = Seen()
            name = f"run{number}"
            kill_one(forker, name, seen, dice.choice([0, 0, 0, 1]), dice)
            summaries = [summary for summary in list_runs(tmp_path) if summary.name == name]
            if summaries and summaries[0].status == "interrupted":
                run = Run.open(tmp_path / name)
            else:
                assert "created" not in seen.acknowledged
                run = Run.create(tmp_path, kind="eval", name=name, config={"name": name})
                num_again += 1
            with run:
                assert run.config == {"name": name}
                check(run, seen)
            shutil.rmtree(run.path)
    assert 0 < num_again < NUM_CREATIONS, "the kills came all too early or all too late"


@contextmanager
def start_forker(root: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-S", "-c", FORKER, str(root)]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
    ) as forker:
        yield forker


def kill_one(
    forker: subprocess.Popen[str], name: str, seen: Seen, num_waited: int, dice: random.Random
) -> None:
    """Start a writer, wait for a number of acknowledgements and a little more, and kill it."""
    assert forker.stdin is not None and forker.stdout is not None
    forker.stdin.write(f"{name}\n")
    forker.stdin.flush()
    pid = int(forker.stdout.readline().split()[1])
    for _ in range(num_waited):
        seen.add(forker.stdout.readline())
    until = time.perf_counter() + dice.random() * dice.choice([0.0005, 0.003, 0.015])
    while time.perf_counter() < until:
        pass
    os.kill(pid, signal.SIGKILL)
    while (line := forker.stdout.readline()) != "dead\n":
        seen.add(line)


def check(run: RunView, seen: Seen) -> None:
    """What the events since the last look add: the next numbers, no gap, none twice."""
    for event in run.events(after=seen.seq):
        assert event.seq == seen.seq + 1
        seen.seq = event.seq
        if event.kind == "tick":
            seen.number += 1
            assert (event.payload["number"], event.key) == (seen.number, str(seen.number))
        elif event.kind == "pair":
            seen.pairs.append(event.payload["of"])
    assert seen.number >= seen.newest("tick")
    assert seen.pairs[::2] == seen.pairs[1::2], "half of a batch was stored"
    assert not seen.pairs or seen.pairs[-1] >= seen.newest("pair")
    for digest in seen.acknowledged.get("blob", [])[-20:]:
        run.blobs.path(digest, verify=True)
    if seen.newest("state"):
        assert run.read_json("state.json")["number"] >= seen.newest("state")
    rows = run.metrics()
    assert (rows[-1].step if rows else 0) >= seen.newest("metric")


def check_whole(run: RunView, seen: Seen) -> None:
    acknowledged = seen.acknowledged
    assert len(acknowledged["tick"]) > NUM_KILLS, "the writers hardly wrote: kill them later"
    ticks = [event.key for event in run.events("tick")]
    assert len(ticks) == len(set(ticks))
    assert set(acknowledged["tick"]) <= set(ticks)
    assert {str(event.payload["of"]) for event in run.events("pair")} >= set(acknowledged["pair"])
    assert {str(row.step) for row in run.metrics()} >= set(acknowledged["metric"])
    assert set(run.blobs.digests()) >= set(acknowledged["blob"])
    for digest in run.blobs.digests():
        run.blobs.path(digest, verify=True)


# Crashes that cut files short are repaired on open; damage within a file is told.


NUM_EVENTS = 60


class Image:
    """The files of a log as a crash would leave them, and the size of the WAL after each event."""

    def __init__(self, folder: Path) -> None:
        path = folder / "events.db"
        log = EventLog.open(path, create=True)
        self.sizes: list[int] = []
        for number in range(NUM_EVENTS):
            log.append(
                "tick", {"number": number, "text": "x" * (number * 37 % 900)}, key=str(number)
            )
            self.sizes.append((folder / "events.db-wal").stat().st_size)
        self.db = path.read_bytes()
        self.wal = (folder / "events.db-wal").read_bytes()
        log.close()

    def restore(self, folder: Path, wal: bytes) -> Path:
        (folder / "events.db").write_bytes(self.db)
        (folder / "events.db-wal").write_bytes(wal)
        return folder / "events.db"


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    return Image(tmp_path_factory.mktemp("image"))


def numbers_after_crash(image: Image, wal: bytes) -> list[int]:
    """What is left after opening the image, which must also take appends again."""
    with TemporaryDirectory() as folder:
        path = image.restore(Path(folder), wal)
        log = EventLog.open(path)
        numbers = [event.payload["number"] for event in log.events()]
        assert log.append("tick", {"number": -1}).seq == len(numbers) + 1
        log.close()
        reopened = EventLog.open(path)
        assert len(list(reopened.events())) == len(numbers) + 1
        reopened.close()
        return numbers


@given(fraction=st.floats(0, 1))
def test_a_truncated_log_keeps_exactly_the_whole_events(image: Image, fraction: float) -> None:
    schema_bytes = image.sizes[0]
    length = schema_bytes + round(fraction * (len(image.wal) - schema_bytes))
    kept = sum(size <= length for size in image.sizes)
    assert numbers_after_crash(image, image.wal[:length]) == list(range(kept))


@given(fraction=st.floats(0, 1, exclude_max=True), noise=st.binary(min_size=1, max_size=64))
def test_noise_in_the_log_keeps_the_events_before_it(
    image: Image, fraction: float, noise: bytes
) -> None:
    start = image.sizes[0]
    at = start + int(fraction * (len(image.wal) - start - len(noise)))
    wal = image.wal[:at] + noise + image.wal[at + len(noise) :]
    before = sum(size <= at for size in image.sizes)
    numbers = numbers_after_crash(image, wal)
    assert numbers == list(range(len(numbers)))
    assert len(numbers) >= before
    assert len(numbers) == before or wal[: image.sizes[before]] == image.wal[: image.sizes[before]]


def make_run(root: Path, num_events: int = 400) -> Path:
    with Run.create(root, kind="eval", name="poet", config={}) as run:
        for number in range(num_events):
            run.append_blocking("tick", {"number": number, "text": "x" * 300})
        run.log_metrics(1, {"a/b": 1.0})
        run.finish()
    return run.path


@pytest.mark.parametrize("damage", ["header", "middle", "short", "rows"])
def test_real_damage_is_told_with_what_to_do(tmp_path: Path, damage: str) -> None:
    path = make_run(tmp_path)
    events = path / "events.db"
    data = events.read_bytes()
    if damage == "header":
        events.write_bytes(b"not a database, " * (len(data) // 16))
    elif damage == "middle":
        half = len(data) // 2 // 4096 * 4096
        events.write_bytes(data[:half] + b"\xff" * 8192 + data[half + 8192 :])
    elif damage == "short":
        events.write_bytes(data[: len(data) // 2])
    else:
        other = sqlite3.connect(events)
        with other:
            other.execute("DELETE FROM events WHERE seq BETWEEN 10 AND 12")
        other.close()
    with pytest.raises(RunError, match=r"damaged\. Restore .* from a copy, or start a new run"):
        Run.open(path)
    assert not (path / "run.lock").read_bytes(), "the refused open left the lock"


def test_export_of_a_damaged_log_has_the_events_before_the_damage(tmp_path: Path) -> None:
    path = make_run(tmp_path)
    events = path / "events.db"
    with Run.view(path) as view:
        export_events(view, tmp_path / "whole.jsonl")
    data = events.read_bytes()
    at = data.index(b'"number": 300,') // 4096 * 4096
    events.write_bytes(data[:at] + b"\xff" * 4096 + data[at + 4096 :])
    with (
        Run.view(path) as view,
        pytest.raises(RunError, match=r"has the first \d+ events only.*damaged"),
    ):
        export_events(view, tmp_path / "rescued.jsonl")
    whole, rescued = (
        (tmp_path / "whole.jsonl").read_text(),
        (tmp_path / "rescued.jsonl").read_text(),
    )
    assert whole.startswith(rescued)
    assert 280 <= rescued.count("\n") <= 301


def test_an_emptied_log_is_told_and_not_overwritten(tmp_path: Path) -> None:
    path = make_run(tmp_path, num_events=1)
    (path / "events.db").write_bytes(b"")
    for opening in (Run.open, Run.view):
        with pytest.raises(RunError, match="is empty"):
            opening(path)
    with pytest.raises(RunError, match="already holds a run"):
        Run.create(tmp_path, kind="eval", name="poet", config={})


def test_a_damaged_run_does_not_hide_the_others(tmp_path: Path) -> None:
    path = make_run(tmp_path, num_events=3)
    shutil.copytree(path, tmp_path / "broken")
    (tmp_path / "broken" / "events.db").write_bytes(b"\x00" * 4096)
    good, bad = list_runs(tmp_path)
    assert (good.name, good.status) == ("poet", "finished")
    assert (bad.name, bad.status) == ("broken", "unreadable")
    assert "events.db" in bad.message


@pytest.mark.parametrize("tail", [b'{"step": 2, "ti', b"\x00" * 70_000, b"x" * 200_000])
def test_a_torn_line_of_metrics_is_removed(tmp_path: Path, tail: bytes) -> None:
    path = make_run(tmp_path, num_events=1)
    with (path / "metrics.jsonl").open("ab") as file:
        file.write(tail)
    with Run.view(path) as view:
        assert [row.step for row in view.metrics()] == [1]
    with Run.open(path) as run:
        run.log_metrics(2, {"a/b": 2.0})
        assert [row.values for row in run.metrics()] == [{"a/b": 1.0}, {"a/b": 2.0}]


def test_half_written_files_are_swept(tmp_path: Path) -> None:
    path = make_run(tmp_path, num_events=1)
    (path / ".tmp" / "half").mkdir(parents=True)
    (path / ".tmp" / "half" / "adapter.safetensors").write_bytes(b"x")
    (path / ".tmp" / "report").write_bytes(b"{")
    with Run.open(path) as run:
        assert not (path / ".tmp").exists()
        assert run.blobs.digests() == []


@pytest.mark.parametrize("keep", [["run.lock"], ["run.lock", "events.db", "config.json"]])
def test_a_run_killed_before_it_began_is_created_again(tmp_path: Path, keep: list[str]) -> None:
    path = tmp_path / "poet"
    path.mkdir()
    for name in keep:
        (path / name).write_bytes(b"")
    if "events.db" in keep:
        EventLog.open(path / "events.db", create=True).close()
        with pytest.raises(RunError, match="stopped before it began: create it again"):
            Run.open(path)
    with Run.create(tmp_path, kind="eval", name="poet", config={"a": 1}) as run:
        assert run.config == {"a": 1}
