"""Attempts: each decided exactly once, whoever comes first, and read back in order."""

import asyncio
from itertools import islice
from pathlib import Path

from rookery.runs import Attempt, AttemptLog, Run, read_attempts


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
