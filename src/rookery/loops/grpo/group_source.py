"""Where groups come from: oldest first, each drawn once, kept until its step is in a checkpoint.

    batch = await source.batch(step, policy=Policy(ref, step=3))
    ... train ...
    await source.release(before=20)      # steps 0 to 19 are trained and saved

| stage   | consumes          | produces            | waits for              |
|---------|-------------------|---------------------|------------------------|
| order   | a position        | a task and a seed   | nothing                |
| sampler | tasks, a model    | groups              | the engine, the scorer |
| filter  | groups            | groups that teach   | nothing                |
| blobs   | a batch           | a digest            | the disk               |
| events  | the digest        | a durable batch     | the disk               |

A batch that an event names is not drawn again. Its draws are functions of (seed, position): one
that was cut off before its event is drawn again with the same random numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from rookery.errors import TaskError
from rookery.loops.grpo.advantages import is_equal
from rookery.loops.grpo.batch import Batch, BatchCounts, DrawnGroup, DrawnRollout
from rookery.loops.grpo.batch_store import BatchStore
from rookery.loops.grpo.config import GrpoConfig
from rookery.loops.grpo.task_order import TaskOrder
from rookery.ports import GroupDrawer
from rookery.runs import Run
from rookery.seeding import stream_seed
from rookery.types import Draw, Group, ModelRef, Rollout, Task

__all__ = ["GroupSource", "Policy"]


@dataclass(frozen=True, slots=True)
class Policy:
    """Published weights: what requests name, and after how many steps they are."""

    ref: ModelRef
    step: int


class GroupSource:
    """The batches of one run, step by step. Ask for them in order, one at a time."""

    def __init__(
        self, drawer: GroupDrawer, *, tasks: Sequence[Task], config: GrpoConfig, run: Run
    ) -> None:
        self._drawer = drawer
        self._order = TaskOrder(tasks, seed=config.seed)
        self._config = config
        self._store = BatchStore(run)

    async def batch(self, step: int, *, policy: Policy) -> Batch:
        """What a step is trained on: found in the run, or drawn with this policy and kept."""
        found = await self._store.read(step)
        if found is not None:
            return found
        assert policy.step == self._config.drawn_at(step)
        before = self._store.event(step - 1)
        start = 0 if before is None else int(before.payload["next_position"])
        batch = await self._draw(step, start=start, policy=policy)
        await self._store.write(batch)
        return batch

    def use(self, policy: Policy) -> None:
        """New weights; every batch names the ones it is drawn with."""

    async def release(self, *, before: int) -> None:
        """Steps below `before` are in a checkpoint: remove their rollouts, unless all are kept."""
        if not self._config.keep_rollouts:
            await self._store.release(before=before)

    async def _draw(self, step: int, *, start: int, policy: Policy) -> Batch:
        """Groups whose rewards differ, in the order of the tasks, until there are enough."""
        position, end = start, start + self._config.max_groups
        drawn: list[Group] = []
        useful: list[DrawnGroup] = []
        while position < end and len(useful) < self._config.groups_per_step:
            num = min(self._config.groups_per_step - len(useful), end - position)
            draws = [self._draw_at(position + i) for i in range(num)]
            groups = await self._drawer.draw(policy.ref, draws)
            for group in groups:
                own = _drawn_group(position, group)
                position += 1
                if len(own.rollouts) > 1 and not is_equal([r.reward for r in own.rollouts]):
                    useful.append(own)
            drawn += groups
            self._check_failures(step, drawn)
        counts = _count(drawn)
        if step == 0 and not useful:
            raise TaskError(
                f"None of the first {len(drawn)} tasks had answers of different rewards (the mean "
                f"reward is {counts.mean_reward}), so there is nothing to learn: look at the "
                "scorer, take easier or harder tasks, or raise group_size."
            )
        return Batch(
            step=step,
            model=policy.ref,
            model_step=policy.step,
            groups=tuple(useful),
            next_position=position,
            counts=counts,
        )

    def _draw_at(self, position: int) -> Draw:
        seed = stream_seed(self._config.seed, "grpo-draw", position)
        return Draw(task=self._order[position], seed=seed)

    def _check_failures(self, step: int, drawn: Sequence[Group]) -> None:
        """Stop before the batch is recorded: once the cause is removed, a resumed run draws it."""
        rollouts = [rollout for group in drawn for rollout in group.rollouts]
        errors = [rollout.error for rollout in rollouts if rollout.error]
        if len(errors) > self._config.max_failed_share * len(rollouts):
            raise TaskError(
                f"Step {step}: {len(errors)} of {len(rollouts)} rollouts failed, more than "
                f"max_failed_share ({self._config.max_failed_share:g}) allows. The first error: "
                f"{errors[0]}"
            )


def _drawn_group(position: int, group: Group) -> DrawnGroup:
    return DrawnGroup(
        position=position,
        task=group.task.id,
        rollouts=tuple(own for r in group.rollouts if (own := _drawn_rollout(r)) is not None),
    )


def _drawn_rollout(rollout: Rollout) -> DrawnRollout | None:
    completion = rollout.completion
    if completion is None or rollout.reward is None or not completion.tokens:
        return None
    return DrawnRollout(sequences=rollout.sequences, text=completion.text, reward=rollout.reward)


def _count(drawn: Sequence[Group]) -> BatchCounts:
    rollouts = [rollout for group in drawn for rollout in group.rollouts]
    rewards_by_group = [
        [r.reward for r in group.rollouts if r.reward is not None] for group in drawn
    ]
    rewards = [reward for own in rewards_by_group for reward in own]
    answers = [rollout.completion for rollout in rollouts if rollout.completion is not None]
    return BatchCounts(
        num_rollouts=len(rollouts),
        num_failed=sum(bool(rollout.error) for rollout in rollouts),
        num_equal=sum(len(own) > 1 and is_equal(own) for own in rewards_by_group),
        num_tokens=sum(len(answer.tokens) for answer in answers),
        mean_reward=fmean(rewards) if rewards else None,
        metrics=_mean_metrics(rollouts),
        first_error=next((rollout.error for rollout in rollouts if rollout.error), ""),
    )


def _mean_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Of each metric, over the rollouts that have it."""
    names = dict.fromkeys(name for rollout in rollouts for name in rollout.metrics)
    return {name: fmean(r.metrics[name] for r in rollouts if name in r.metrics) for name in names}
