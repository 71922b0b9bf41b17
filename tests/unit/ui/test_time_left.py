"""The time left of a run, against recorded runs and runs of an even pace."""

import json
from pathlib import Path
from typing import Any

import pytest
from rich.progress import Progress as RichProgress

from rookery.compose.genome import RolloutPlan, SearchBar
from rookery.compose.grpo.run import Measurements, TrainBar
from rookery.loops.grpo import GrpoConfig, Step
from rookery.reports import GenerationRecord
from rookery.rollout import Progress
from rookery.ui.display import Bar, Display
from rookery.ui.time_left import TimeLeft

RECORDED = json.loads(Path(__file__).with_name("recorded_progress.json").read_text())
"""What real runs of SmolLM2 and of programs told their bars, with seconds since their start."""
REPORT_S = 3.0
"""What a foretelling may always be off by: making the report is not counted."""


class Clock:
    """Time that the test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


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
                self._loop.answered(Progress(num_rollouts=value, num_tokens=0))
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


@pytest.mark.parametrize("loop", RECORDED)
def test_the_end_is_foretold_within_a_third_after_the_first_fifth(loop: str) -> None:
    """Where the first answers come later, as those of one large batch, soon after these."""
    recorded, clock = RECORDED[loop], Clock()
    end_s, rows = recorded["end_s"], list(recorded["rows"])
    replay, wrong, num_told = Replay(loop, recorded, clock), [], 0
    for part in [n / 40 for n in range(8, 39)]:
        while rows and rows[0][0] <= part * end_s:
            clock.now, what, value = rows.pop(0)
            replay.tell(what, value)
        clock.now = part * end_s
        foretold, left_s = replay.left.seconds(), (1 - part) * end_s
        if foretold is not None:
            num_told += 1
            if abs(foretold - left_s) > max(left_s / 3, REPORT_S):
                wrong.append((part, foretold, left_s))
    assert not wrong and num_told >= (15 if loop == "eval" else 27)


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
