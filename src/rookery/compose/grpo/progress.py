"""The steps of a training or of a sweep on a progress bar, with what is left to be measured."""

from collections.abc import Sequence
from statistics import fmean
from typing import TypeVar

from rookery.loops.grpo import GrpoConfig, Step
from rookery.loops.grpo.sweep import SweptStep
from rookery.ports import Observer
from rookery.tasks.taskset import Taskset
from rookery.ui.display import Bar, Display

__all__ = ["Measurements", "SweepBar", "TrainBar"]

ANSWER, BETWEEN = "answer", "between"
"""Kinds of work beside the steps: measured answers, and what comes before them."""


class Measurements:
    """Answers that a training is measured by: of each checkpoint, and for the report."""

    def __init__(
        self, config: GrpoConfig, tasksets: Sequence[Taskset], *, num_adapters: int = 1
    ) -> None:
        self._config, self._num_adapters = config, num_adapters
        self.select, report = (
            sum(len(taskset.split(name)) for taskset in tasksets) for name in ("select", "report")
        )
        num_policies = num_adapters + (1 if config.init_from is None else 2)
        num_drawn = 0 if config.samples is None else config.samples.num
        self._report = num_policies * report * (1 + num_drawn)
        self.worth = 1 / (config.groups_per_step * config.group_size * num_adapters)
        """Of an answer, in steps."""

    def left(self, *, step: int) -> int:
        """When so many steps are taken and the last is not measured yet."""
        num_checkpoints = -(-(self._config.steps - step + 1) // self._config.save_every)
        return self._report + num_checkpoints * self._num_adapters * self.select


AnyStep = TypeVar("AnyStep", contravariant=True)


class _MeasuredBar(Observer[AnyStep]):
    """Steps on a progress bar; the time left has the measurements too."""

    def __init__(self, bar: Bar, display: Display, measurements: Measurements) -> None:
        self._bar, self._display, self._measurements = bar, display, measurements
        self._expect(step=0)

    def on_phase(self, name: str) -> None:
        if name == "train":  # behind a measurement
            self._bar.left.did(self._measurements.select, ANSWER)
        else:
            self._bar.left.did(0, BETWEEN)
        self._bar.update(name=name)

    def on_budget(self, share: float) -> None:
        self._bar.left.limit(share)

    def _expect(self, *, step: int) -> None:
        num_left, worth = self._measurements.left(step=step), self._measurements.worth
        self._bar.left.expect(num_left, ANSWER, worth=worth)

    def _took(self, step: int, *, num_tokens: int) -> None:
        self._expect(step=step + 1)
        self._bar.advance(0, tokens=num_tokens)
        self._bar.update(done=step + 1)


class SweepBar(_MeasuredBar[SweptStep]):
    """The steps of a sweep on its progress bar, and a line each."""

    def on_step(self, step: SweptStep) -> None:
        self._took(step.step, num_tokens=step.num_tokens)
        if not step.rewards:
            return
        best = max(step.rewards, key=step.rewards.__getitem__)
        low, mean = min(step.rewards.values()), fmean(step.rewards.values())
        self._display.say(
            f"step {step.step:>4}   reward {mean:.3f} ({low:.3f} to {step.rewards[best]:.3f} of "
            f"{len(step.rewards)} adapters)   highest {best}"
        )


class TrainBar(_MeasuredBar[Step]):
    """The steps of a training on its progress bar, and a line each."""

    def on_step(self, step: Step) -> None:
        self._took(step.step, num_tokens=int(step.metrics["grpo/num_drawn_tokens"]))
        self._display.say(_step_line(step))


def _step_line(step: Step) -> str:
    def show(name: str, digits: str) -> str:
        value = step.metrics.get(name)
        return "-" if value is None else format(value, digits)

    return (
        f"step {step.step:>4}   reward {show('reward/mean', '.3f')}   "
        f"gap {show('grpo/logprob_gap', '.1e')}   "
        f"{show('grpo/num_groups', '.0f')} groups, {show('grpo/num_equal_groups', '.0f')} equal"
    )
