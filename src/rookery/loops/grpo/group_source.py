"""The groups of each step, in order: each drawn once, kept until its step is in a checkpoint.

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

A batch that an event names is never drawn again. Draws are functions of (seed, position), so a
batch that was interrupted before its event is drawn again with the same random numbers.

`BatchDrawer` draws tasks in their order until enough groups have rewards that differ:

    drawer = BatchDrawer(group_drawer, tasks=tasks, config=config)
    await drawer.check(engine.base)                   # before a run is made
    batch = await drawer.draw(0, start=0, policy=Policy(ref, step=0))
"""

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from rookery.errors import TaskError
from rookery.loops.grpo.batch import (
    Batch,
    BatchCounts,
    DrawnGroup,
    DrawnRollout,
    decode_batch,
    encode_batch,
    encode_texts,
    is_equal,
)
from rookery.loops.grpo.config import GrpoConfig
from rookery.ports import GroupDrawer
from rookery.runs import Event, Run
from rookery.runtime.concurrency import task_group
from rookery.seeding import bulk_stream, stream_seed
from rookery.types import Draw, Group, ModelRef, Rollout, Task

__all__ = [
    "BATCH",
    "BatchDrawer",
    "BatchStore",
    "GroupSource",
    "Policy",
    "TaskOrder",
    "check_failures",
]


_MARGIN = 1.3
"""Safety margin for the number of groups begun at once, in standard deviations of the number that
teach: enough of them teach nine times in ten. Surplus groups cost less than a second wave."""

_LOOK_BACK = 4
"""Number of past steps from which the share of groups that teach is estimated."""

_GROWTH = 8
"""Growth of draws by `check` while rewards are equal: eight groups take a server as long as one."""


class TaskOrder:
    """Tasks without end: every task once per epoch, each epoch in its own order.

    A pure function of tasks and seed. Holds only the order of the epoch used last.
    """

    def __init__(self, tasks: Sequence[Task], *, seed: int) -> None:
        self._tasks = tasks
        self._seed = seed
        self._epoch = -1
        self._order: list[int] = []

    def __getitem__(self, position: int) -> Task:
        epoch, place = divmod(position, len(self._tasks))
        if epoch != self._epoch:
            order = bulk_stream("grpo-tasks", self._seed, epoch).permutation(len(self._tasks))
            self._order, self._epoch = order.tolist(), epoch
        return self._tasks[self._order[place]]


@dataclass(frozen=True, slots=True)
class Policy:
    """Published weights: the ref that requests name, and the number of steps behind them."""

    ref: ModelRef
    step: int


class BatchDrawer:
    """Draws batches. The result is a function of the seed, the position and the policy."""

    def __init__(
        self,
        drawer: GroupDrawer,
        *,
        tasks: Sequence[Task],
        config: GrpoConfig,
        is_remote: bool = False,
    ) -> None:
        self._drawer = drawer
        self._order = TaskOrder(tasks, seed=config.seed)
        self.config = config
        self.is_remote = is_remote
        """True if servers draw: each group is its own call. An engine in this process gets all
        missing groups in one call, since only equal batches of requests give equal bits."""

    async def draw(
        self, step: int, *, start: int, policy: Policy, useful_share: float = 1.0
    ) -> Batch:
        """Draw the first groups whose rewards differ, in task order, until there are enough.

        A group with equal rewards is replaced at once, while others are still being drawn.
        `useful_share` is the share of groups expected to teach. If it is below 1, more groups than
        needed are begun at once; surplus ones are cancelled and drawn in the next step. So it
        changes how long a step takes, not its batch.
        """
        groups = await _FirstUseful(self, step, start, policy.ref, useful_share).draw()
        useful = [
            drawn for i, group in enumerate(groups) if _teaches(drawn := _drawn(start + i, group))
        ]
        counts = _count(groups)
        if step == 0 and not useful:
            raise _nothing_to_learn(len(groups), counts)
        return Batch(
            step=step,
            model=policy.ref,
            model_step=policy.step,
            groups=tuple(useful),
            next_position=start + len(groups),
            counts=counts,
        )

    async def check(self, model: ModelRef) -> None:
        """Raise TaskError if the first step would have nothing to learn from: rewards never differ,
        or rollouts fail. Begins with one group, which often suffices."""
        drawn: list[Group] = []
        while len(drawn) < self.config.max_groups:
            num = min(max(1, _GROWTH * len(drawn)), self.config.max_groups - len(drawn))
            groups = await self.draw_from(len(drawn), num, model)
            if any(_teaches(_drawn(0, group)) for group in groups):
                return
            drawn += groups
        counts = _count(drawn)
        check_failures(0, counts, max_share=self.config.max_failed_share)
        raise _nothing_to_learn(len(drawn), counts)

    async def draw_from(self, position: int, num: int, model: ModelRef) -> list[Group]:
        return await self._drawer.draw(model, [self._draw_at(position + i) for i in range(num)])

    def _draw_at(self, position: int) -> Draw:
        seed = stream_seed(self.config.seed, "grpo-draw", position)
        return Draw(task=self._order[position], seed=seed)


class _FirstUseful:
    """Draws the groups of one step, from position `start` to the last one needed."""

    def __init__(
        self, drawer: BatchDrawer, step: int, start: int, model: ModelRef, useful_share: float
    ) -> None:
        self._drawer, self._config = drawer, drawer.config
        self._step, self._start, self._model = step, start, model
        # An engine in this process computes surplus groups at full cost.
        self._useful_share = useful_share if drawer.is_remote else 1.0
        self._num_begun = 0
        self._groups: dict[int, Group] = {}
        """Drawn groups by offset from `start`."""
        self._teaching: dict[int, bool] = {}
        """True for each drawn group that teaches, by offset."""
        self._num_in_order = 0
        """Number of consecutive groups from `start` on."""
        self._num_useful = 0
        """How many of the consecutive groups teach."""

    async def draw(self) -> list[Group]:
        pending: set[asyncio.Task[None]] = set()
        async with task_group() as tasks:
            while not self._is_complete:
                num = self._num_missing()
                calls = [1] * num if self._drawer.is_remote else [num] * bool(num)
                pending |= {tasks.create_task(self._draw_next(size)) for size in calls}
                _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                self._count_consecutive()
            for task in pending:
                task.cancel()
        return [self._groups[i] for i in range(self._num_in_order)]

    @property
    def _is_complete(self) -> bool:
        return self._num_useful == self._config.groups_per_step or (
            self._num_in_order == self._config.max_groups
        )

    def _num_missing(self) -> int:
        """Return how many groups to begin now so that, with those under way, enough will teach."""
        num_useful = sum(self._teaching.values())
        wanted = num_for(self._config.groups_per_step - num_useful, share=self._useful_share)
        num_pending = self._num_begun - len(self._groups)
        room = self._config.max_groups - self._num_begun
        return max(0, min(wanted - num_pending, room))

    async def _draw_next(self, num: int) -> None:
        first, self._num_begun = self._num_begun, self._num_begun + num
        groups = await self._drawer.draw_from(self._start + first, num, self._model)
        self._groups |= dict(enumerate(groups, first))
        self._teaching |= {
            i: _teaches(_drawn(i, self._groups[i])) for i in range(first, first + num)
        }

    def _count_consecutive(self) -> None:
        """Count the consecutive groups, up to the last one that is needed."""
        while self._num_in_order in self._groups and not self._is_complete:
            self._num_useful += self._teaching[self._num_in_order]
            self._num_in_order += 1
            if self._num_in_order >= self._config.groups_per_step:
                in_order = [self._groups[i] for i in range(self._num_in_order)]
                check_failures(
                    self._step, _count(in_order), max_share=self._config.max_failed_share
                )


def num_for(num_useful: int, *, share: float) -> int:
    """Return how many groups to begin so that `num_useful` of them probably teach: the least n with
    n share - _MARGIN sqrt(n share (1 - share)) >= num_useful."""
    if num_useful <= 0:
        return 0
    spread = _MARGIN * math.sqrt(share * (1 - share))
    root = (spread + math.sqrt(spread**2 + 4 * share * num_useful)) / (2 * share)
    return math.ceil(root**2 - 1e-9)


def check_failures(step: int, counts: BatchCounts, *, max_share: float) -> None:
    """Raise before the batch is recorded, so that a resumed run draws it again."""
    if counts.num_failed > max_share * counts.num_rollouts:
        raise TaskError(
            f"Step {step}: {counts.num_failed} of {counts.num_rollouts} rollouts failed, more than "
            f"max_failed_share ({max_share:g}) allows. The first error: {counts.first_error}"
        )


def _drawn(position: int, group: Group) -> DrawnGroup:
    return DrawnGroup(
        position=position,
        task=group.task.id,
        weight=group.task.weight,
        rollouts=tuple(kept for r in group.rollouts if (kept := _drawn_rollout(r)) is not None),
    )


def _teaches(group: DrawnGroup) -> bool:
    return len(group.rollouts) > 1 and not is_equal([r.reward for r in group.rollouts])


def _nothing_to_learn(num_groups: int, counts: BatchCounts) -> TaskError:
    return TaskError(
        f"None of the first {num_groups} tasks had answers of different rewards (the mean reward "
        f"is {counts.mean_reward}), so there is nothing to learn. Look at the scorer, take easier "
        "or harder tasks, or raise group_size."
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
    rewards = [reward for group_rewards in rewards_by_group for reward in group_rewards]
    answers = [rollout.completion for rollout in rollouts if rollout.completion is not None]
    return BatchCounts(
        num_rollouts=len(rollouts),
        num_failed=sum(bool(rollout.error) for rollout in rollouts),
        num_equal=sum(
            len(group_rewards) > 1 and is_equal(group_rewards) for group_rewards in rewards_by_group
        ),
        num_tokens=sum(len(answer.tokens) for answer in answers),
        mean_reward=fmean(rewards) if rewards else None,
        metrics=_mean_metrics(rollouts),
        first_error=next((rollout.error for rollout in rollouts if rollout.error), ""),
    )


def _mean_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Average each metric over the rollouts that have it."""
    names = dict.fromkeys(name for rollout in rollouts for name in rollout.metrics)
    return {name: fmean(r.metrics[name] for r in rollouts if name in r.metrics) for name in names}


BATCH = "batch"


class BatchStore:
    """The batches of a run on disk: one event per step, naming a blob with its rollouts.

    A batch that an event names is trained on and never drawn again.
    """

    def __init__(self, run: Run) -> None:
        self._run = run

    def event(self, step: int) -> Event | None:
        return self._run.get(BATCH, str(step))

    async def read(self, step: int) -> Batch | None:
        """Return the batch of a step, or None if it was not written yet."""
        event = self.event(step)
        if event is None:
            return None
        return await asyncio.to_thread(self._decode, str(event.payload["digest"]))

    def _decode(self, digest: str) -> Batch:
        return decode_batch(self._run.blobs.read_bytes(digest, verify=True))

    async def write(self, batch: Batch, **further: object) -> None:
        """Store a batch durably. `further` is added to its event."""
        digest, texts = await asyncio.to_thread(self._put, batch)
        payload: Mapping[str, object] = {
            "digest": digest,
            "texts": texts,
            "model": batch.model.served_name,
            "model_step": batch.model_step,
            "positions": [group.position for group in batch.groups],
            "next_position": batch.next_position,
            **further,
        }
        await self._run.append(BATCH, payload, key=str(batch.step))

    def _put(self, batch: Batch) -> tuple[str, str]:
        put = self._run.blobs.put_bytes
        return put(encode_batch(batch)), put(encode_texts(batch))

    async def release(self, *, before: int) -> None:
        """Remove the rollouts of steps below `before`, but keep their texts."""
        await asyncio.to_thread(self._prune, before)

    def _prune(self, before: int) -> None:
        """Keep the blobs of all later steps: a resumed run may have several to train again."""
        kept: list[str] = []
        for event in self._run.events(BATCH):
            names = ("texts", "digest") if int(event.key) >= before else ("texts",)
            kept += [str(event.payload[name]) for name in names if name in event.payload]
        self._run.blobs.prune(keep=kept)


class GroupSource:
    """The batches of one run. Ask for them in step order, one at a time."""

    def __init__(
        self,
        drawer: GroupDrawer,
        *,
        tasks: Sequence[Task],
        config: GrpoConfig,
        run: Run,
        is_remote: bool = False,
    ) -> None:
        self._drawer = BatchDrawer(drawer, tasks=tasks, config=config, is_remote=is_remote)
        self._config = config
        self._store = BatchStore(run)

    async def batch(self, step: int, *, policy: Policy) -> Batch:
        """Return the batch of a step: the stored one, or a new one drawn with this policy."""
        stored = await self._store.read(step)
        if stored is not None:
            return stored
        assert policy.step == self._config.drawn_at(step)
        batch = await self._drawer.draw(
            step, start=self._start(step), policy=policy, useful_share=self._useful_share(step)
        )
        await self._store.write(batch)
        return batch

    def _start(self, step: int) -> int:
        """Return the position of a step's first group."""
        before = self._store.event(step - 1)
        return 0 if before is None else int(before.payload["next_position"])

    def _useful_share(self, step: int) -> float:
        """Return the share of groups that taught in the last `_LOOK_BACK` steps."""
        first = max(0, step - _LOOK_BACK)
        events = [self._store.event(i) for i in range(first, step)]
        num_useful = sum(len(event.payload["positions"]) for event in events if event)
        return num_useful / (self._start(step) - self._start(first)) if num_useful else 1.0

    def use(self, policy: Policy) -> None:
        """Ignore new weights: `batch` is given the policy to draw with."""

    async def release(self, *, before: int) -> None:
        """Remove the rollouts of steps below `before`, unless the config keeps them all."""
        if not self._config.keep_rollouts:
            await self._store.release(before=before)
