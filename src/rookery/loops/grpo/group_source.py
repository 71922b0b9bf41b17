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
from collections.abc import Sequence
from itertools import count

from rookery.loops.grpo.batch import Batch, decode_batch, encode_batch
from rookery.loops.grpo.batch_drawer import BatchDrawer, Policy
from rookery.loops.grpo.config import GrpoConfig
from rookery.ports import GroupDrawer
from rookery.runs import Event, Run
from rookery.types import Task

__all__ = ["GroupSource"]

BATCH = "batch"


class GroupSource:
    """The batches of one run, step by step. Ask for them in order, one at a time."""

    def __init__(
        self, drawer: GroupDrawer, *, tasks: Sequence[Task], config: GrpoConfig, run: Run
    ) -> None:
        self._drawer = BatchDrawer(drawer, tasks=tasks, config=config)
        self._config = config
        self._run = run

    async def batch(self, step: int, *, policy: Policy) -> Batch:
        """What a step is trained on: found in the run, or drawn with this policy and kept."""
        event = self._run.get(BATCH, str(step))
        if event is not None:
            return await asyncio.to_thread(self._read, event)
        assert policy.step == self._config.drawn_at(step)
        before = self._run.get(BATCH, str(step - 1))
        start = 0 if before is None else int(before.payload["next_position"])
        batch = await self._drawer.draw(step, start=start, policy=policy)
        digest = await asyncio.to_thread(lambda: self._run.blobs.put_bytes(encode_batch(batch)))
        payload = {
            "digest": digest,
            "model": batch.model.served_name,
            "model_step": batch.model_step,
            "positions": [group.position for group in batch.groups],
            "next_position": batch.next_position,
        }
        await self._run.append(BATCH, payload, key=str(step))
        return batch

    async def release(self, *, before: int) -> None:
        """Steps below `before` are in a checkpoint: remove their rollouts, unless all are kept."""
        if self._config.keep_rollouts:
            return
        await asyncio.to_thread(self._prune, before)

    def _prune(self, before: int) -> None:
        """A run that goes on may have drawn several steps that it has to train again."""
        kept = []
        for step in count(before):
            event = self._run.get(BATCH, str(step))
            if event is None:
                break
            kept.append(str(event.payload["digest"]))
        self._run.blobs.prune(keep=kept)

    def _read(self, event: Event) -> Batch:
        return decode_batch(self._run.blobs.read_bytes(str(event.payload["digest"]), verify=True))
