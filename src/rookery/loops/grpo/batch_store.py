"""The batches of a run on disk: an event for each, which names a blob with its rollouts."""

import asyncio
from collections.abc import Mapping
from itertools import count

from rookery.loops.grpo.batch import Batch, decode_batch, encode_batch
from rookery.runs import Event, Run

__all__ = ["BATCH", "BatchStore"]

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
