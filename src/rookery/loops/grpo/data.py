"""Batches -> data: each rollout a row, its advantage on every token it drew."""

from collections.abc import Sequence
from math import fsum

from rookery.loops.grpo.advantages import ADVANTAGES
from rookery.loops.grpo.batch import Batch, DrawnGroup, DrawnRollout
from rookery.loops.grpo.config import GrpoConfig
from rookery.seeding import stream
from rookery.train.averaging import averaged
from rookery.types import Datum

__all__ = ["make_data", "mean_gap"]


def make_data(batch: Batch, config: GrpoConfig) -> tuple[Datum, ...]:
    """The rows of a step, with weights that average over it as the loss has it."""
    data = [
        _datum(group, rollout, advantage, temperature=config.drawing.temperature)
        for group in batch.groups
        for rollout, advantage in zip(group.rollouts, _advantages(group, config), strict=True)
    ]
    [weighted] = averaged([data], config.loss.average, max_tokens=config.drawing.max_tokens)
    return weighted


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
    return ADVANTAGES[config.advantage_name](rewards, rng=rng)


def _datum(
    group: DrawnGroup, rollout: DrawnRollout, advantage: float, *, temperature: float
) -> Datum:
    num, start = len(rollout.tokens), len(group.prompt) - 1
    return Datum(
        tokens=group.prompt + rollout.tokens[:-1],
        positions=tuple(range(start, start + num)),
        targets=rollout.tokens,
        weights=(1.0,) * num,
        sampled_logprobs=rollout.logprobs,
        advantages=(advantage,) * num,
        temperature=temperature,
    )
