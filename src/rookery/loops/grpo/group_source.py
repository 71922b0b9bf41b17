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

import asyncio
from collections.abc import Mapping, Sequence
from itertools import count

from rookery.loops.grpo.batch import Batch, decode_batch, encode_batch
from rookery.loops.grpo.batch_drawer import BatchDrawer, Policy
from rookery.loops.grpo.config import GrpoConfig
from rookery.ports import GroupDrawer
from rookery.runs import Event, Run
from rookery.types import Task

__all__ = ["BATCH", "BatchStore", "GroupSource"]

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
        digest = await asyncio.to_thread(lambda: self._run.blobs.put_bytes(encode_batch(batch)))
        payload: Mapping[str, object] = {
            "digest": digest,
            "model": batch.model.served_name,
            "model_step": batch.model_step,
            "positions": [group.position for group in batch.groups],
            "next_position": batch.next_position,
            **further,
        }
        await self._run.append(BATCH, payload, key=str(batch.step))

    async def release(self, *, before: int) -> None:
        """Remove the rollouts of steps below `before`."""
        await asyncio.to_thread(self._prune, before)

    def _prune(self, before: int) -> None:
        """A run that goes on may have drawn several steps that it has to train again."""
        kept = []
        for step in count(before):
            event = self.event(step)
            if event is None:
                break
            kept.append(str(event.payload["digest"]))
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
        found = await self._store.read(step)
        if found is not None:
            return found
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
        """The part of the last step's groups that taught something."""
        before = self._store.event(step - 1)
        if before is None or not before.payload["positions"]:
            return 1.0
        num_drawn = int(before.payload["next_position"]) - self._start(step - 1)
        return len(before.payload["positions"]) / num_drawn

    def use(self, policy: Policy) -> None:
        """New weights; every batch names the ones it is drawn with."""

    async def release(self, *, before: int) -> None:
        """Steps below `before` are in a checkpoint: remove their rollouts, unless all are kept."""
        if not self._config.keep_rollouts:
            await self._store.release(before=before)
