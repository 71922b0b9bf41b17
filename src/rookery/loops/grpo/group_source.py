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
"""

from collections.abc import Sequence

from rookery.loops.grpo.batch import Batch
from rookery.loops.grpo.batch_drawer import BatchDrawer, Policy
from rookery.loops.grpo.batch_store import BatchStore
from rookery.loops.grpo.config import GrpoConfig
from rookery.ports import GroupDrawer
from rookery.runs import Run
from rookery.types import Task

__all__ = ["GroupSource"]


class GroupSource:
    """The batches of one run, step by step. Ask for them in order, one at a time."""

    def __init__(
        self, drawer: GroupDrawer, *, tasks: Sequence[Task], config: GrpoConfig, run: Run
    ) -> None:
        self._drawer = BatchDrawer(drawer, tasks=tasks, config=config)
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
        batch = await self._drawer.draw(step, start=start, policy=policy)
        await self._store.write(batch)
        return batch

    def use(self, policy: Policy) -> None:
        """New weights; every batch names the ones it is drawn with."""

    async def release(self, *, before: int) -> None:
        """Steps below `before` are in a checkpoint: remove their rollouts, unless all are kept."""
        if not self._config.keep_rollouts:
            await self._store.release(before=before)
