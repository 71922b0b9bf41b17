"""The time left of a run, against recorded runs and runs of an even pace."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.progress import Progress as RichProgress

from rookery.compose.genome import RolloutPlan, SearchBar
from rookery.compose.grpo.run import Measurements, TrainBar
from rookery.loops.grpo import GrpoConfig, Step
from rookery.reports import GenerationRecord
from rookery.rollout import BlockProgress
from rookery.ui import time_left
from rookery.ui.display import Bar, Display
from rookery.ui.time_left import TimeLeft

RECORDED = json.loads(Path(__file__).with_name("recorded_progress.json").read_text())
"""What real runs of SmolLM2 and of programs told their bars, with seconds since their start."""
REPORT_S = 3.0
"""What a foretelling may always be off by: making the report is not counted."""

Foretold = tuple[float, float, float]
"""When, how many seconds were foretold, and how many it took."""


class Clock:
    """Time that the test sets, and how much of it other jobs took."""

    now = 0.0
    delayed = 0.0

    def __call__(self) -> tuple[float, float]:
        return self.now, self.now - self.delayed


class Split:
    """A taskset of which only the sizes are asked."""

    def __init__(self, **sizes: int) -> None:
        self._sizes = sizes

    def split(self, name: str) -> range:
        return range(self._sizes[name])


class Replay:
    """A recorded run on the bar of its loop."""

    def __init__(self, loop: str, recorded: dict[str, Any], clock: Clock) -> None:
        self.left = TimeLeft(clock)
        self.left.expect(recorded.get("total", 0))
        progress = RichProgress(disable=True)
        line = progress.add_task("run", total=recorded.get("total"), tokens=0, left=self.left)
        self._bar = Bar(progress, line, self.left)
        quiet = Display(is_quiet=True)
        self._loop: Any = None
        if loop == "genome":
            self._loop = SearchBar(self._bar, quiet, RolloutPlan(**recorded["plan"]))
        elif loop == "grpo":
            config = GrpoConfig.model_construct(**recorded["config"])
            self.left.expect(config.steps)
            taskset: Any = Split(select=recorded["select"], report=recorded["report"])
            self._loop = TrainBar(self._bar, quiet, Measurements(config, [taskset]))

    def tell(self, what: str, value: Any) -> None:
        match what:
            case "phase":
                self._loop.on_phase(value)
            case "answers" if self._loop is not None:
                self._loop.answered(BlockProgress(num_rollouts=value, num_tokens=0))
            case "answers":
                self._bar.advance(value)
            case "done":
                self._bar.update(done=value)
            case "reads":
                self._bar.update(done=value[0], total=value[1])
            case "step" if isinstance(self._loop, SearchBar):
                self._loop.on_step(GenerationRecord(generation=0, num_candidates=value))
            case "step":
                metrics = {"grpo/num_drawn_tokens": 0.0}
                step = Step(
                    step=value, model_step=value, positions=(), metrics=metrics, examples=()
                )
                self._loop.on_step(step)


def follow(loop: str, busy: Callable[[float], float] = float) -> list[Foretold]:
    """What is foretold from the first fifth of a recorded run on; `busy` says when it
    would have come to a place had the machine had other work too."""
    recorded, clock = RECORDED[loop], Clock()
    end_s, rows = busy(recorded["end_s"]), list(recorded["rows"])
    replay, told = Replay(loop, recorded, clock), []
    for part in [n / 40 for n in range(8, 39)]:
        while rows and busy(rows[0][0]) <= part * end_s:
            at_s, what, value = rows.pop(0)
            clock.now = busy(at_s)
            replay.tell(what, value)
        clock.now = part * end_s
        foretold = replay.left.seconds()
        if foretold is not None:
            told.append((clock.now, foretold, end_s - clock.now))
    return told


def wrong(told: Iterable[Foretold]) -> list[Foretold]:
    return [one for one in told if abs(one[1] - one[2]) > max(one[2] / 3, REPORT_S)]


@pytest.mark.parametrize("loop", RECORDED)
def test_the_end_is_foretold_within_a_third_after_the_first_fifth(loop: str) -> None:
    """Where the first answers come later, as those of one large batch, soon after these."""
    told = follow(loop)
    assert not wrong(told) and len(told) >= (15 if loop == "eval" else 27)


@pytest.mark.parametrize("loop", ["genome", "grpo", "icm", "evolve"])
@pytest.mark.parametrize(("came", "went"), [(0.1, 0.25), (0.3, 0.4)])
def test_a_load_that_has_gone_is_forgotten(loop: str, came: float, went: float) -> None:
    """A machine that is five times slower for a part of a recorded run. One look may fall into the
    slow start of a phase."""
    whole_s: float = RECORDED[loop]["end_s"]

    def busy(at_s: float) -> float:
        return at_s + 4 * min(max(0.0, at_s - came * whole_s), (went - came) * whole_s)

    told = follow(loop, busy)
    later = [one for one in told if one[0] > 1.35 * busy(went * whole_s)]
    assert len(later) >= 4 and len(wrong(later)) <= 1


@pytest.mark.parametrize(
    ("steps", "since"),
    [
        pytest.param([4] * 40 + [20] * 10 + [4] * 50, 65, id="a load comes and goes"),
        pytest.param([4] * 20 + [20] * 20 + [4] * 60, 54, id="a long load goes"),
        pytest.param([4] * 40 + [20] * 60, 48, id="a load stays"),
        pytest.param(([4] * 5 + [20] * 5) * 20, 40, id="loads come and go all the time"),
        pytest.param([4] * 30 + [60] + [4] * 69, 45, id="one step hangs"),
        pytest.param([4 + n / 10 for n in range(100)], 40, id="steps get longer"),
        pytest.param(([4] * 9 + [14]) * 10, 25, id="every tenth step saves"),
    ],
)
def test_the_speed_of_late_counts_and_one_step_does_not(steps: list[float], since: int) -> None:
    """What comes before `since` was another speed: nobody could know how long that would last."""
    clock = Clock()
    left, told = TimeLeft(clock), []
    left.expect(len(steps))
    for number, took in enumerate(steps[:-8], start=1):
        clock.now += took
        left.did(1)
        seconds = left.seconds()
        if number >= since:
            assert seconds is not None
            told.append((clock.now, seconds, sum(steps[number:])))
    assert told and not wrong(told)


@pytest.mark.parametrize("slower", [3, 20])
def test_other_jobs_are_seen_before_a_unit_is_done(slower: int) -> None:
    """What they take is told by the system; units take 12 s without them."""
    clock = Clock()
    left, told = TimeLeft(clock), []
    left.expect(60)
    done_s = 0
    while done_s < 700:
        is_loaded = 200 <= done_s < 400
        clock.now += slower if is_loaded else 1
        clock.delayed += slower - 1 if is_loaded else 0
        done_s += 1
        if done_s % 12 == 0:
            left.did(1)
        seconds = left.seconds()
        if done_s > 460:
            assert seconds is not None
            told.append((clock.now, seconds, float(720 - done_s)))
        if 220 < done_s < 230:
            assert seconds is not None and seconds > 1.4 * (720 - done_s), "a load stays"
    assert not wrong(told), "and a load that has gone is forgotten"


def test_nothing_is_foretold_without_work_and_at_the_end() -> None:
    clock = Clock()
    left = TimeLeft(clock)
    left.expect(2)
    clock.now = 5
    assert left.seconds() is None
    left.did(1)
    assert left.seconds() is None, "more may come together with the first"
    clock.now = 7
    assert left.seconds() == 3, "it goes on counting between two units"
    clock.now = 60
    assert left.seconds() == 2.5, "what is late does not make the rest take no time"
    left.did(1)
    assert left.seconds() is None


def test_a_delay_that_is_seen_late_turns_no_time_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system tells of it every second: what was done meanwhile was done before."""
    system = {"now": 100.0, "waited": 0}
    monkeypatch.setattr(time_left, "time", SimpleNamespace(monotonic=lambda: system["now"]))
    monkeypatch.setattr(time_left, "_threads", lambda: [("1", (0, system["waited"]))])
    left = TimeLeft()
    left.expect(3)
    for system["now"] in (101.5, 103.0, 103.9):
        left.did(1)
    system |= {"now": 104.1, "waited": 2_000_000_000}
    assert left.seconds() is None, "all is done"


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


def test_a_run_that_a_budget_ends_takes_no_longer_than_the_budget() -> None:
    clock = Clock()
    left = TimeLeft(clock)
    left.expect(1e9, "step")
    for number in range(1, 6):
        clock.now += 10
        left.did(1, "step")
        left.limit(number / 20)
        assert (left.seconds() is None) == (number == 1), "nothing is known of one look"
    assert left.seconds() == pytest.approx(150, rel=0.05)
    left.expect(3, "step")
    assert left.seconds() == pytest.approx(30, rel=0.05), "the work ends before the budget"
