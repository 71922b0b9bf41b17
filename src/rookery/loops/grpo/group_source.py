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
from dataclasses import replace
from itertools import count
from statistics import fmean
from typing import Any

from rookery.environments.atropos.engine_side import Drawn
from rookery.environments.atropos.feed import FedBatch, FedGroup, Feed
from rookery.environments.atropos.scored_group import ScoredGroup, drawn_sequences
from rookery.loops.grpo.batch import (
    Batch,
    BatchCounts,
    DrawnGroup,
    DrawnRollout,
    decode_batch,
    encode_batch,
    is_equal,
)
from rookery.loops.grpo.batch_drawer import BatchDrawer, Policy, check_failures
from rookery.loops.grpo.config import GrpoConfig
from rookery.ports import GroupDrawer
from rookery.runs import Event, Run
from rookery.types import Task, TokenSequence

__all__ = [
    "BATCH",
    "AtroposSource",
    "BatchStore",
    "GroupSource",
]

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


# Batches that environments elsewhere have played: each is durable before it is trained on.
#
#     batch = await source.batch(step, policy=policy)
#
# | stage   | consumes       | produces            | waits for                    |
# |---------|----------------|---------------------|------------------------------|
# | feed    | groups         | a batch             | environments, within batch_s |
# | filter  | a batch        | groups that teach   | nothing                      |
# | store   | a batch        | a durable batch     | the disk                     |
# | ack     | a durable one  | room in the queue   | the disk                     |


class AtroposSource:
    """The batches of one run, step by step. Ask for them in order, one at a time."""

    def __init__(self, feed: Feed, *, config: GrpoConfig, run: Run) -> None:
        self._feed = feed
        self._config = config
        self._store = BatchStore(run)

    def use(self, policy: Policy) -> None:
        """New weights: environments get answers from them from now on."""
        self._feed.use(policy.ref, step=policy.step)

    async def batch(self, step: int, *, policy: Policy) -> Batch:
        """What a step is trained on: found in the run, or waited for and kept."""
        found = await self._store.read(step)
        if found is not None:
            return found
        before = self._store.event(step - 1)
        after = 0 if before is None else int(before.payload["batch_id"])
        fed = await self._feed.take(step, after=after)
        batch = self._made(step, fed, policy)
        check_failures(step, batch.counts, max_share=self._config.max_failed_share)
        numbers = [group.number for group in fed.groups]
        await self._store.write(batch, groups=numbers, batch_id=fed.number)
        await self._feed.acknowledge(fed)
        return batch

    async def release(self, *, before: int) -> None:
        """Steps below `before` are in a checkpoint: remove their rollouts, unless all are kept."""
        if not self._config.keep_rollouts:
            await self._store.release(before=before)

    def _made(self, step: int, fed: FedBatch, policy: Policy) -> Batch:
        whole = [group for group in fed.groups if not group.error]
        drawn = [_drawn_group(group, self._config) for group in whole]
        known = [own.step for group in whole for own in group.draws if own is not None]
        unknown = any(own is None for group in whole for own in group.draws)
        # What is not known is taken for older: the engine then scores some of it anew.
        oldest = min([policy.step, *known, *([max(step - 1, 0)] if unknown else [])])
        return Batch(
            step=step,
            model=policy.ref,
            model_step=oldest,
            groups=tuple(group for group in drawn if _teaches(group)),
            next_position=0,
            counts=_count(fed, drawn),
        )


def _teaches(group: DrawnGroup) -> bool:
    """Whether rewards differ, or the environment says itself what each token is worth."""
    if all(rollout.advantages is not None for rollout in group.rollouts):
        return any(any(rollout.advantages or ()) for rollout in group.rollouts)
    rewards = [rollout.reward for rollout in group.rollouts]
    return len(rewards) > 1 and not is_equal(rewards)


def _drawn_group(fed: FedGroup, config: GrpoConfig) -> DrawnGroup:
    group = fed.group
    sequences = drawn_sequences(group)
    return DrawnGroup(
        position=fed.number,
        task=f"{fed.environment or 'group'} {fed.number}",
        rollouts=tuple(
            DrawnRollout(
                sequences=(_with_kept(sequence, fed.draws[row]),),
                text=_text(group, row),
                reward=group.scores[row],
                advantages=_own_advantages(group, row, sequence.drawn),
                reference_logprobs=_at(group.ref_logprobs, row, sequence.drawn),
                temperature=_temperature(group, row, fed.draws[row]) or config.drawing.temperature,
            )
            for row, sequence in enumerate(sequences)
        ),
    )


def _with_kept(sequence: TokenSequence, drawn: Drawn | None) -> TokenSequence:
    return sequence if drawn is None else replace(sequence, kept=drawn.kept)


def _own_advantages(group: ScoredGroup, row: int, drawn: Sequence[int]) -> tuple[float, ...] | None:
    """What the environment says, None where it leaves that to the scores."""
    if _override(group, row).get("set_advantage_to_zero"):
        return (0.0,) * len(drawn)
    return _at(group.advantages, row, drawn) or None


def _at(
    rows: Sequence[Sequence[float]] | None, row: int, drawn: Sequence[int]
) -> tuple[float, ...]:
    return () if rows is None else tuple(rows[row][place] for place in drawn)


def _override(group: ScoredGroup, row: int) -> Mapping[str, Any]:
    return group.overrides[row] if group.overrides else {}


def _temperature(group: ScoredGroup, row: int, drawn: Drawn | None) -> float | None:
    """The one the answer was drawn with, from whoever tells it; None: nobody does."""
    told = (_override(group, row), group.generation_params or {}, group.group_overrides or {})
    found = next((own["temperature"] for own in told if own.get("temperature")), None)
    if found is not None:
        return float(found)
    return drawn.temperature if drawn is not None and drawn.temperature > 0 else None


def _text(group: ScoredGroup, row: int) -> str:
    """The last message, where messages are sent along."""
    messages = group.messages[row] if group.messages else []
    return str(messages[-1].get("content", "")) if messages else ""


def _count(fed: FedBatch, drawn: Sequence[DrawnGroup]) -> BatchCounts:
    failed = [group for group in fed.groups if group.error]
    rewards = [rollout.reward for group in drawn for rollout in group.rollouts]
    by_environment: dict[str, list[float]] = {}
    for group in fed.groups:
        if not group.error:
            by_environment.setdefault(group.environment, []).extend(group.group.scores)
    return BatchCounts(
        num_rollouts=sum(group.group.size for group in fed.groups),
        num_failed=sum(group.group.size for group in failed),
        num_equal=sum(not _teaches(group) for group in drawn),
        num_tokens=sum(r.num_drawn for group in drawn for r in group.rollouts),
        mean_reward=fmean(rewards) if rewards else None,
        first_error=failed[0].error if failed else "",
        metrics={f"{name}/reward": fmean(own) for name, own in by_environment.items() if name},
    )
