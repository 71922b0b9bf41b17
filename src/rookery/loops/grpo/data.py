"""Batches -> data: each rollout a row, its advantage on every token it drew."""

from collections.abc import Sequence
from math import fsum

from rookery.loops.grpo.advantages import ADVANTAGES
from rookery.loops.grpo.batch import Batch, DrawnGroup, DrawnRollout
from rookery.loops.grpo.config import GrpoConfig
from rookery.seeding import stream
from rookery.types import Datum

__all__ = ["make_data", "mean_gap"]


def make_data(batch: Batch, config: GrpoConfig) -> tuple[Datum, ...]:
    """The rows of a step. Weights sum to 1, each rollout has the same share of them: the size of a
    batch changes neither the gradient's norm nor its clipping."""
    num_rollouts = sum(len(group.rollouts) for group in batch.groups)
    return tuple(
        _datum(group, rollout, advantage, share=1 / num_rollouts, config=config)
        for group in batch.groups
        for rollout, advantage in zip(group.rollouts, _advantages(group, config), strict=True)
    )


def mean_gap(data: Sequence[Datum], logprobs: Sequence[Sequence[float]]) -> float:
    """The mean of |log p now - log p when drawn| over all tokens that were drawn."""
    gaps = [
        abs(now - then)
        for datum, own in zip(data, logprobs, strict=True)
        for now, then in zip(own, datum.sampled_logprobs, strict=True)
    ]
    return fsum(gaps) / len(gaps)


def _advantages(group: DrawnGroup, config: GrpoConfig) -> tuple[float, ...]:
    rewards = [rollout.reward for rollout in group.rollouts]
    rng = stream(config.seed, "grpo-advantages", group.position)
    return ADVANTAGES[config.advantages](rewards, rng=rng)


def _datum(
    group: DrawnGroup, rollout: DrawnRollout, advantage: float, *, share: float, config: GrpoConfig
) -> Datum:
    num, start = len(rollout.tokens), len(group.prompt) - 1
    return Datum(
        tokens=group.prompt + rollout.tokens[:-1],
        positions=tuple(range(start, start + num)),
        targets=rollout.tokens,
        weights=(share / num,) * num,
        sampled_logprobs=rollout.logprobs,
        advantages=(advantage,) * num,
        temperature=config.drawing.temperature,
    )
