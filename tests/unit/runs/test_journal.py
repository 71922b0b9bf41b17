"""The journal: durable entries, cut behind snapshots, replayed from the last one."""

import asyncio
import os
import sqlite3
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

import rookery
from rookery.errors import RunError
from rookery.runs import Attempt, AttemptLog, Journal, Run, read_attempts


async def test_replay_begins_behind_the_snapshot(tmp_path: Path) -> None:
    with Run.create(tmp_path, kind="tink", name="poet", config={}) as run:
        journal = run.open_journal()
        assert journal is run.open_journal() and journal.last_seq == 0
        seqs = await asyncio.gather(*(journal.append(b"%d" % i) for i in range(20)))
        assert seqs == list(range(1, 21))
        await run.append("snapshot", {"journal": seqs[11]})
    with Run.open(run.path) as run:  # killed before the cut
        last = run.last("snapshot")
        assert last is not None
        after = last.payload["journal"]
        journal = run.open_journal()
        expected = [(i + 1, b"%d" % i) for i in range(12, 20)]
        assert [(e.seq, e.data) for e in journal.entries(after=after)] == expected
        await journal.cut(through=after)
        assert [(e.seq, e.data) for e in journal.entries(after=after)] == expected
        assert await journal.append_many([b"a", b""]) == [21, 22]


async def test_a_cut_journal_never_counts_again_and_tells_what_is_missing(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "journal.db")
    await journal.append_many([b"x"] * 5)
    await journal.cut(through=5)
    journal.close()
    journal = Journal.open(tmp_path / "journal.db")
    assert list(journal.entries(after=5)) == [] and journal.last_seq == 5
    with pytest.raises(RunError, match="was cut through entry 5, and the entries after 3"):
        list(journal.entries(after=3))
    assert await journal.append(b"y") == 6
    with pytest.raises(RunError, match="load a newer snapshot"):
        list(journal.entries(after=4))
    journal.close()


async def test_the_file_shrinks_behind_a_snapshot(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    journal = Journal.open(path)

    def size_bytes() -> int:
        return sum(p.stat().st_size for p in tmp_path.iterdir() if not p.name.endswith("-shm"))

    empty = size_bytes()
    sizes = []
    for _ in range(3):
        last = (await journal.append_many([os.urandom(100_000)] * 100))[-1]
        assert size_bytes() > 10_000_000
        await journal.cut(through=last)
        await journal.append(b"")  # ends what SQLite keeps of the write-ahead log
        sizes.append(size_bytes())
    assert max(sizes) < empty + 1_200_000
    journal.close()


async def test_the_room_of_single_entries_is_given_back(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    journal = Journal.open(path)
    await journal.append_many([b"first", *[os.urandom(100_000)] * 50, b"last"])
    await journal.empty(range(2, 52))
    await journal.empty(range(2, 52))
    journal.close()
    assert path.stat().st_size < 500_000
    journal = Journal.open(path)
    entries = list(journal.entries(after=0))
    assert [entry.seq for entry in entries] == list(range(1, 53)), "numbers stay"
    assert [entry.data for entry in entries] == [b"first", *[b""] * 50, b"last"]
    journal.close()


async def test_appends_are_stored_while_a_journal_is_cut(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "journal.db")
    last = (await journal.append_many([b"x" * 1_000_000] * 40))[-1]
    cut = asyncio.create_task(journal.cut(through=last))
    num_beside = 0
    while not cut.done():
        await journal.append(b"y")
        num_beside += 1
    assert num_beside > 10, "40 MB are 20 slices"
    assert [e.seq for e in journal.entries(after=last)] == [last + 1 + i for i in range(num_beside)]
    journal.close()


async def test_a_cut_waits_for_no_reader(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "journal.db")
    last = (await journal.append_many([b"x" * 1000] * 50))[-1]
    reader = sqlite3.connect(tmp_path / "journal.db", isolation_level=None)
    reader.execute("BEGIN")
    assert reader.execute("SELECT count(*) FROM entries").fetchone() == (50,)
    async with asyncio.timeout(5):  # SQLite would wait 10 s
        await journal.cut(through=last)
    reader.close()
    journal.close()


async def test_a_cut_while_entries_are_read_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rookery.runs.journal.PAGE_BYTES", 1)  # one entry is a page
    journal = Journal.open(tmp_path / "journal.db")
    await journal.append_many([b"x"] * 9)
    for start, through in ((0, 5), (5, 9)):
        entries = journal.entries(after=start)
        assert next(entries).seq == start + 1
        await journal.cut(through=through)
        words = f"was cut through entry {through}, and the entries after {start + 1} are"
        with pytest.raises(RunError, match=words):
            next(entries)
    journal.close()


async def test_numbers_beyond_the_last_entry_are_refused(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "journal.db")
    await journal.append_many([b"x"] * 3)
    with pytest.raises(RunError, match="ends at entry 3, and the entries after 4"):
        next(journal.entries(after=4))
    with pytest.raises(RunError, match="through entry 4: the last is 3"):
        await journal.cut(through=4)
    with pytest.raises(RunError, match="an entry is bytes"):
        await journal.append(["x"])  # type: ignore[arg-type]
    assert await journal.append(b"y") == 4
    journal.close()


async def test_a_lost_journal_is_refused(tmp_path: Path) -> None:
    with Run.create(tmp_path, kind="tink", name="poet", config={}) as run:
        await run.open_journal().append(b"x")
    with Run.open(run.path) as run:
        assert run.open_journal().last_seq == 1
    (run.path / "journal.db").unlink()
    with Run.open(run.path) as run, pytest.raises(RunError, match=r"journal\.db is lost"):
        run.open_journal()
    assert not (run.path / "journal.db").exists()


KILLED = """
import asyncio, os, sys
from pathlib import Path
from rookery.runs import Journal

async def main():
    journal = Journal.open(Path(sys.argv[1]))
    async def add(i):
        seq = await journal.append(b"%d" % i * 500)
        os.write(1, b"%d\\n" % seq)
        if seq % 500 == 0:
            await journal.cut(through=seq - 100)
    while True:  # until it is killed
        await asyncio.gather(*(add(i) for i in range(2000)))

asyncio.run(main())
"""


def test_kill_9_loses_nothing_that_was_told(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    environment = {**os.environ, "PYTHONPATH": str(Path(rookery.__file__).parents[1])}
    command = [sys.executable, "-c", KILLED, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        told = [int(process.stdout.readline()) for _ in range(1500)]
        process.kill()
        told += [int(line) for line in process.stdout.read().split(b"\n")[:-1]]
    journal = Journal.open(path)
    last = journal.last_seq
    assert max(told) <= last
    kept = list(journal.entries(after=last - 100))
    assert [entry.data for entry in kept] == [b"%d" % (e.seq - 1) * 500 for e in kept]
    assert [entry.seq for entry in kept] == list(range(last - 99, last + 1))
    journal.close()


def test_a_torn_tail_is_dropped(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "journal.db")
    sizes = []
    for i in range(10):
        asyncio.run(journal.append(b"%d" % i * 900))
        sizes.append((tmp_path / "journal.db-wal").stat().st_size)
    image = {p.name: p.read_bytes() for p in tmp_path.iterdir() if not p.name.endswith("-shm")}
    journal.close()
    for length, num_whole in ((sizes[6] + 100, 7), (sizes[4] - 1, 4), (sizes[9], 10)):
        folder = tmp_path / str(length)
        folder.mkdir()
        (folder / "journal.db").write_bytes(image["journal.db"])
        (folder / "journal.db-wal").write_bytes(image["journal.db-wal"][:length])
        torn = Journal.open(folder / "journal.db")
        assert [e.seq for e in torn.entries(after=0)] == list(range(1, num_whole + 1))
        assert asyncio.run(torn.append(b"next")) == num_whole + 1
        torn.close()


async def test_use_after_close_and_other_files_are_sentences(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "journal.db")
    journal.close()
    journal.close()
    with pytest.raises(RunError, match="was closed"):
        await journal.append(b"x")
    with Run.create(tmp_path, kind="tink", name="poet", config={}) as run:
        pass
    with pytest.raises(RunError, match="is not a journal"):
        Journal.open(run.path / "events.db")


# Attempts.


def make(root: Path) -> Run:
    return Run.create(root, kind="evolve", name="poet", config={})


async def test_states_are_read_back_in_order(tmp_path: Path) -> None:
    with make(tmp_path) as run:
        log = AttemptLog(run)
        steps = [
            Attempt(number=1, state="planned", data={"parent": "p0"}),
            Attempt(number=2, state="planned"),
            Attempt(number=1, state="leased", epoch=1, data={"worker": "w"}),
            Attempt(number=1, state="leased", epoch=2, data={"worker": "v"}),
            Attempt(number=1, state="generated", epoch=2, data={"text": "abc"}),
            Attempt(number=1, state="evaluated", epoch=2, data={"score": 0.5}),
            Attempt(number=1, state="committed", epoch=2),
            Attempt(number=2, state="failed", data={"reason": "no diff"}),
        ]
        for step in steps:
            assert await log.record([step]) == [step]
        await run.append("other", {})
    with Run.open(run.path) as run:
        found = list(read_attempts(run))
        assert [attempt for _, attempt in found] == steps
        after = found[4][0]
        assert [attempt for _, attempt in read_attempts(run, after=after)] == steps[5:]


async def test_the_first_decision_wins(tmp_path: Path) -> None:
    with make(tmp_path) as run:
        log = AttemptLog(run)
        assert log.decision(7) is None
        offers = [
            Attempt(number=7, state="committed" if i % 2 else "failed", epoch=i, data={"i": i})
            for i in range(20)
        ]
        kept = await asyncio.gather(*(log.record([offer]) for offer in offers))
        assert all(stored == [offers[0]] for stored in kept)
        assert log.decision(7) == offers[0]
        assert len(list(read_attempts(run))) == 1


async def test_a_second_generation_is_not_paid_for(tmp_path: Path) -> None:
    with make(tmp_path) as run:
        log = AttemptLog(run)
        first = Attempt(number=1, state="generated", epoch=1, data={"text": "a"})
        await log.record([first])
        late = Attempt(number=1, state="generated", epoch=2, data={"text": "b"})
        again = Attempt(number=2, state="planned")
        assert await log.record([late, again]) == [first, again]


async def test_reading_streams(tmp_path: Path) -> None:
    with make(tmp_path) as run:
        plans = [Attempt(number=i, state="planned") for i in range(2000)]
        await AttemptLog(run).record(plans)
        reading = read_attempts(run)
        assert [attempt.number for _, attempt in islice(reading, 3)] == [0, 1, 2]
        await AttemptLog(run).record([Attempt(number=2000, state="planned")])
        assert [attempt.number for _, attempt in reading] == list(range(3, 2001))
