"""`kill -9` at random moments: what was acknowledged is there, once, and the run opens again.

A process forks one writer after the other over the same run; each writer opens the run,
writes events, batches, blobs, metrics and documents, and acknowledges every write on a pipe. This
process kills it after a random number of acknowledgements and a random wait, then looks.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import rookery
from rookery.runs import Run, RunView, list_runs

NUM_KILLS = 40
NUM_CREATIONS = 40
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
