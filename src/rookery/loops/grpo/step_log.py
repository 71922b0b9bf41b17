"""What a run remembers of each training step, and tells whoever watches."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass

from rookery.loops.grpo.batch import Batch, DrawnGroup
from rookery.reports import TrainStepRecord
from rookery.runs import NewEvent, Run

__all__ = ["UNWATCHED", "Example", "Step", "StepLog", "Watcher"]

STEP = "step"
SHOWN_CHARACTERS = 600
"""Of a completion in a report: enough to see what it does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One completion to read."""

    task: str
    text: str
    reward: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One training step."""

    step: int
    model_step: int
    """The step whose weights drew its answers."""
    positions: tuple[int, ...]
    """The groups that were trained, by their positions in the order of tasks."""
    metrics: Mapping[str, float]
    """`reward/mean`, `train/loss`, `grpo/logprob_gap`, `time/train_s`, ..."""
    examples: tuple[Example, ...]
    """The best and the worst answer of the first group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watcher:
    """Who is told how a run goes on."""

    on_step: Callable[[Step], None] = lambda _: None
    on_phase: Callable[[str], None] = lambda _: None
    """Called with what begins now: "train", "select 20", "report"."""


UNWATCHED = Watcher()


class StepLog:
    """Records steps in the run: an event and a line of metrics each."""

    def __init__(self, run: Run, *, watcher: Watcher) -> None:
        self._run = run
        self.watcher = watcher

    async def record(self, batch: Batch, metrics: Mapping[str, float]) -> None:
        """Note a step that was taken. A resumed run takes steps since the last checkpoint again,
        on the same groups: what was noted first stays."""
        step = Step(
            step=batch.step,
            model_step=batch.model_step,
            positions=tuple(group.position for group in batch.groups),
            metrics={**_batch_metrics(batch), **metrics},
            examples=_examples(batch.groups[0]) if batch.groups else (),
        )
        new = NewEvent(kind=STEP, key=str(step.step), payload=asdict(step), first_wins=True)
        await self._run.append_many([new])
        self._run.log_metrics(step.step, step.metrics)
        self.watcher.on_step(step)

    def read(self) -> Iterator[TrainStepRecord]:
        """Every step of the run, in order."""
        return (TrainStepRecord.model_validate(event.payload) for event in self._run.events(STEP))


def _batch_metrics(batch: Batch) -> dict[str, float]:
    counts = batch.counts
    metrics = {
        "grpo/num_groups": float(len(batch.groups)),
        "grpo/num_equal_groups": float(counts.num_equal),
        "grpo/num_failed_rollouts": float(counts.num_failed),
        "grpo/num_rollouts": float(counts.num_rollouts),
        "grpo/num_drawn_tokens": float(counts.num_tokens),
        "grpo/staleness": float(batch.step - batch.model_step),
    }
    if counts.mean_reward is not None:
        metrics["reward/mean"] = counts.mean_reward
    return metrics | {f"game/{name}": value for name, value in counts.metrics.items()}


def _examples(group: DrawnGroup) -> tuple[Example, ...]:
    ordered = sorted(group.rollouts, key=lambda rollout: rollout.reward)
    return tuple(
        Example(task=group.task, text=rollout.text[:SHOWN_CHARACTERS], reward=rollout.reward)
        for rollout in (ordered[-1], ordered[0])
    )
