"""Where groups come from: oldest first, each drawn once, kept until its step is in a checkpoint.

    batch = await source.batch(step, policy=Policy(ref, step=3))
    ... train ...
    await source.release(before=20)      # steps 0 to 19 are trained and saved

| stage   | consumes          | produces            | waits for              |
|---------|-------------------|---------------------|------------------------|
| drawer  | a step, a policy  | a batch             | the engine, the scorer |
| blobs   | a batch           | a digest            | the disk               |
| events  | the digest        | a durable batch     | the disk               |

A batch that an event names is not drawn again. Its draws are functions of (seed, position): one
that was cut off before its event is drawn again with the same random numbers.

Draws the groups of a step: tasks in their order, until enough groups have rewards that differ.

    drawer = BatchDrawer(group_drawer, tasks=tasks, config=config)
    await drawer.check(engine.base)                   # before a run is made
    batch = await drawer.draw(0, start=0, policy=Policy(ref, step=0))

| stage   | consumes          | produces            | waits for              |
|---------|-------------------|---------------------|------------------------|
| order   | a position        | a task and a seed   | nothing                |
| sampler | tasks, a model    | groups              | the engine, the scorer |
| filter  | groups            | groups that teach   | nothing                |
"""

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from rookery.concurrency import task_group
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


_SURE = 1.3
"""Standard deviations of the number of groups that teach by which more are begun at once: nine
times in ten enough of them teach. What is too much costs less than waiting for a second wave."""

_LOOK_BACK = 4
"""Steps by which it is judged what part of the groups teaches."""

_GROWTH = 8
"""By how much a check draws more, while all rewards are equal: a server takes as long for eight
groups as for one."""

# Which task each draw of a run takes: every task once per epoch, each epoch in its own order.


class TaskOrder:
    """The tasks at positions 0, 1, 2, ... without end; a pure function of tasks and seed.

    Only the order of the epoch that was asked for last is held.
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
    """Published weights: what requests name, and after how many steps they are."""

    ref: ModelRef
    step: int


class BatchDrawer:
    """What is drawn is a function of the seed, the position and the policy."""

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
        """Servers draw: groups by themselves. An engine in this process gets all that are missing
        in one call, as it gives the same bits for the same requests together."""

    async def draw(
        self, step: int, *, start: int, policy: Policy, useful_share: float = 1.0
    ) -> Batch:
        """The first groups whose rewards differ, in the order of the tasks, until there are enough.

        A group whose rewards are equal is replaced as soon as that is seen, while others are still
        drawn. `useful_share` is the part of groups that is expected to teach: where it is below 1,
        more groups than are needed are begun at once, and those that turn out to be too many are
        stopped and drawn in the next step. So it changes how long a step takes and not its batch.
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
        """TaskError when the first step would have no group to learn from: rewards never differ, or
        rollouts fail. Draws few groups at first: often a single one shows it."""
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
    """The groups at positions `start`, `start + 1`, ... up to the last one that a step needs."""

    def __init__(
        self, drawer: BatchDrawer, step: int, start: int, model: ModelRef, useful_share: float
    ) -> None:
        self._drawer, self._config = drawer, drawer.config
        self._step, self._start, self._model = step, start, model
        # An engine in this process computes what turns out to be too much at the cost of the rest.
        self._useful_share = useful_share if drawer.is_remote else 1.0
        self._num_begun = 0
        self._groups: dict[int, Group] = {}
        """Those that are drawn, by how far behind `start` they are."""
        self._teaching: dict[int, bool] = {}
        """Whether each of them teaches something."""
        self._num_in_order = 0
        """Groups from `start` on without a gap."""
        self._num_useful = 0
        """Of these."""

    async def draw(self) -> list[Group]:
        pending: set[asyncio.Task[None]] = set()
        async with task_group() as tasks:
            while not self._is_complete:
                num = self._num_missing()
                calls = [1] * num if self._drawer.is_remote else [num] * bool(num)
                pending |= {tasks.create_task(self._draw_next(size)) for size in calls}
                _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                self._look_on()
            for task in pending:
                task.cancel()
        return [self._groups[i] for i in range(self._num_in_order)]

    @property
    def _is_complete(self) -> bool:
        return self._num_useful == self._config.groups_per_step or (
            self._num_in_order == self._config.max_groups
        )

    def _num_missing(self) -> int:
        """How many groups to begin now, so that with those under way enough will teach."""
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

    def _look_on(self) -> None:
        """Count the groups that are in order now, up to the last one that is needed."""
        while self._num_in_order in self._groups and not self._is_complete:
            self._num_useful += self._teaching[self._num_in_order]
            self._num_in_order += 1
            if self._num_in_order >= self._config.groups_per_step:
                in_order = [self._groups[i] for i in range(self._num_in_order)]
                check_failures(
                    self._step, _count(in_order), max_share=self._config.max_failed_share
                )


def num_for(num_useful: int, *, share: float) -> int:
    """How many groups to begin, so that so many will probably teach when that share of all does:
    the least n with n share - _SURE sqrt(n share (1 - share)) >= num_useful."""
    if num_useful <= 0:
        return 0
    spread = _SURE * math.sqrt(share * (1 - share))
    root = (spread + math.sqrt(spread**2 + 4 * share * num_useful)) / (2 * share)
    return math.ceil(root**2 - 1e-9)


def check_failures(step: int, counts: BatchCounts, *, max_share: float) -> None:
    """Stop before the batch is recorded: once the cause is removed, a resumed run draws it."""
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
    """Of each metric, over the rollouts that have it."""
    names = dict.fromkeys(name for rollout in rollouts for name in rollout.metrics)
    return {name: fmean(r.metrics[name] for r in rollouts if name in r.metrics) for name in names}


# The batches of a run on disk: an event for each, which names a blob with its rollouts.


BATCH = "batch"


class BatchStore:
    """A batch that an event names is trained on, and never made again."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def event(self, step: int) -> Event | None:
        return self._run.get(BATCH, str(step))

    async def read(self, step: int) -> Batch | None:
        """The batch of a step, None before it was written."""
        event = self.event(step)
        if event is None:
            return None
        return await asyncio.to_thread(self._decode, str(event.payload["digest"]))

    def _decode(self, digest: str) -> Batch:
        return decode_batch(self._run.blobs.read_bytes(digest, verify=True))

    async def write(self, batch: Batch, **further: object) -> None:
        """Durable when this returns; `further` goes into its event."""
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
        """Remove the rollouts of steps below `before`, all but their texts."""
        await asyncio.to_thread(self._prune, before)

    def _prune(self, before: int) -> None:
        """A run that goes on may have drawn several steps that it has to train again."""
        kept: list[str] = []
        for event in self._run.events(BATCH):
            names = ("texts", "digest") if int(event.key) >= before else ("texts",)
            kept += [str(event.payload[name]) for name in names if name in event.payload]
        self._run.blobs.prune(keep=kept)


class GroupSource:
    """The batches of one run, step by step. Ask for them in order, one at a time."""

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
        """What a step is trained on: found in the run, or drawn with this policy and kept."""
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
        """The position of a step's first group."""
        before = self._store.event(step - 1)
        return 0 if before is None else int(before.payload["next_position"])

    def _useful_share(self, step: int) -> float:
        """The part of the last steps' groups that taught something."""
        first = max(0, step - _LOOK_BACK)
        events = [self._store.event(i) for i in range(first, step)]
        num_useful = sum(len(event.payload["positions"]) for event in events if event)
        return num_useful / (self._start(step) - self._start(first)) if num_useful else 1.0

    def use(self, policy: Policy) -> None:
        """New weights; every batch names the ones it is drawn with."""

    async def release(self, *, before: int) -> None:
        """Steps below `before` are in a checkpoint: remove their rollouts, unless all are kept."""
        if not self._config.keep_rollouts:
            await self._store.release(before=before)
