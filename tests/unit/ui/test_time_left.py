"""The time left of a run, against recorded runs and runs of an even pace."""

import json
from pathlib import Path

import pytest

from rookery.ui.time_left import TimeLeft

RECORDED = json.loads(Path(__file__).with_name("recorded_progress.json").read_text())
"""When work was done and how much was expected then, in real runs of SmolLM2 and of programs."""


class Clock:
    """Time that the test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("loop", "parts"),
    [
        ("genome", (0.2, 0.4, 0.6, 0.8)),
        ("icm", (0.2, 0.4, 0.6, 0.8)),
        ("evolve", (0.4, 0.6, 0.8)),  # a run of ten seconds, of which the start takes two
    ],
)
def test_the_end_is_foretold_within_a_third(loop: str, parts: tuple[float, ...]) -> None:
    end_s, rows = RECORDED[loop]["end_s"], list(RECORDED[loop]["rows"])
    clock = Clock()
    left = TimeLeft(clock)
    for part in parts:
        while rows[0][0] <= part * end_s:
            clock.now, what, units, kind = rows.pop(0)
            {"did": left.did, "expect": left.expect}[what](units, kind)
        clock.now = part * end_s
        assert left.seconds() == pytest.approx((1 - part) * end_s, rel=1 / 3), part


def test_nothing_is_foretold_without_work_and_at_the_end() -> None:
    clock = Clock()
    left = TimeLeft(clock)
    left.expect(2)
    clock.now = 5
    assert left.seconds() is None
    left.did(1)
    assert left.seconds() == 5
    clock.now = 7
    assert left.seconds() == 3, "it goes on counting between two units"
    clock.now = 60
    assert left.seconds() == 2.5, "what is late does not make the rest take no time"
    left.did(1)
    assert left.seconds() is None


def test_known_work_and_a_slow_start_are_left_out_of_the_pace() -> None:
    clock = Clock()
    left = TimeLeft(clock)
    left.expect(1000)
    clock.now = 1
    left.did(500)  # found in the log of an interrupted run
    for _ in range(20):
        clock.now += 2
        left.did(1)
    assert left.seconds() == pytest.approx(480 * 2)


def test_each_kind_of_work_has_its_pace_and_one_to_come_has_its_worth() -> None:
    clock = Clock()
    left = TimeLeft(clock)
    left.expect(10, "step")
    left.expect(4, "measurement", worth=0.5)
    for _ in range(4):
        clock.now += 6
        left.did(1, "step")
    assert left.seconds() == pytest.approx(6 * 6 + 4 * 3)
    clock.now += 9
    left.did(1, "measurement")
    assert left.seconds() == pytest.approx(6 * 6 + 3 * 9)


def test_a_long_run_keeps_few_marks_and_its_pace() -> None:
    clock = Clock()
    left = TimeLeft(clock)
    left.expect(100_000)
    for _ in range(50_000):
        clock.now += 0.5
        left.did(1)
    assert left.seconds() == pytest.approx(25_000)
