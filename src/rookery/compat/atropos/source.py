"""Batches that environments elsewhere have played: each is durable before it is trained on.

    source = AtroposSource(feed, config=config, run=run)
    batch = await source.batch(step, policy=policy)

| stage   | consumes       | produces            | waits for                    |
|---------|----------------|---------------------|------------------------------|
| feed    | groups         | a batch             | environments, within batch_s |
| filter  | a batch        | groups that teach   | nothing                      |
| store   | a batch        | a durable batch     | the disk                     |
| ack     | a durable one  | room in the queue   | the disk                     |
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from rookery.compat.atropos.engine_side import Drawn
from rookery.compat.atropos.feed import FedBatch, FedGroup, Feed
from rookery.compat.atropos.scored_group import ScoredGroup, drawn_sequences
from rookery.loops.grpo import GrpoConfig
from rookery.loops.grpo.batch import Batch, BatchCounts, DrawnGroup, DrawnRollout, is_equal
from rookery.loops.grpo.batch_drawer import Policy, check_failures
from rookery.loops.grpo.group_source import BatchStore
from rookery.runs import Run
from rookery.types import TokenSequence

__all__ = ["AtroposSource"]


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
        known = await self._store.read(step)
        if known is not None:
            return known
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
        groups = [_drawn_group(group, self._config) for group in whole]
        # What is not known is taken for older: the engine then scores some of it anew.
        steps = [
            max(step - 1, 0) if drawn is None else drawn.step
            for group in whole
            for drawn in group.draws
        ]
        return Batch(
            step=step,
            model=policy.ref,
            model_step=min([policy.step, *steps]),
            groups=tuple(group for group in groups if _teaches(group)),
            next_position=0,
            counts=_count(fed, groups),
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
    temperature = next((one["temperature"] for one in told if one.get("temperature")), None)
    if temperature is not None:
        return float(temperature)
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
        metrics={
            f"{name}/reward": fmean(scores) for name, scores in by_environment.items() if name
        },
    )
