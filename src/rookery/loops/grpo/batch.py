"""The rollouts of one step, their advantages, and their encoding as one compact blob.

    digest = run.blobs.put_bytes(encode_batch(batch))
    batch = decode_batch(run.blobs.read_bytes(digest))
    ADVANTAGES["group_relative"]([1.0, 0.0, 0.0, 0.0], rng=rng)    # (1.73, -0.58, -0.58, -0.58)

A blob holds all that training needs, bit for bit, so that a resumed run trains on the same data.
"""

import base64
import json
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, pstdev
from typing import Any, Literal

import numpy as np

from rookery.errors import RunError
from rookery.types import KeptTokens, ModelRef, TokenSequence

__all__ = [
    "ADVANTAGES",
    "AdvantageName",
    "Batch",
    "BatchCounts",
    "DrawnGroup",
    "DrawnRollout",
    "decode_batch",
    "encode_batch",
    "encode_texts",
    "group_relative",
    "is_equal",
    "leave_one_out",
    "no_std",
    "shuffled",
]


AdvantageName = Literal["group_relative", "leave_one_out", "no_std", "shuffled"]
EQUAL = 1e-9
"""Rewards that differ by less are equal: dividing by their deviation would magnify rounding."""


def is_equal(rewards: Sequence[float]) -> bool:
    """Return True if all rewards are equal, so that the group teaches nothing."""
    return max(rewards) - min(rewards) < EQUAL * max(1.0, *map(abs, rewards))


def group_relative(rewards: Sequence[float], *, rng: np.random.Generator) -> tuple[float, ...]:
    """(reward - mean) / standard deviation of the group, as GRPO has it."""
    del rng
    mean, deviation = fmean(rewards), pstdev(rewards)
    return tuple((reward - mean) / deviation for reward in rewards)


def leave_one_out(rewards: Sequence[float], *, rng: np.random.Generator) -> tuple[float, ...]:
    """reward - mean of the others (RLOO): the baseline does not depend on the answer itself."""
    del rng
    total, others = math.fsum(rewards), len(rewards) - 1
    return tuple(reward - (total - reward) / others for reward in rewards)


def no_std(rewards: Sequence[float], *, rng: np.random.Generator) -> tuple[float, ...]:
    """reward - mean (Dr. GRPO): groups of nearly equal rewards count less."""
    del rng
    mean = fmean(rewards)
    return tuple(reward - mean for reward in rewards)


def shuffled(rewards: Sequence[float], *, rng: np.random.Generator) -> tuple[float, ...]:
    """Advantages of `group_relative` in random order, a control: a policy must not improve."""
    advantages = group_relative(rewards, rng=rng)
    return tuple(advantages[int(place)] for place in rng.permutation(len(advantages)))


ADVANTAGES: Mapping[AdvantageName, Callable[..., tuple[float, ...]]] = {
    "group_relative": group_relative,
    "leave_one_out": leave_one_out,
    "no_std": no_std,
    "shuffled": shuffled,
}
"""Each takes the rewards of one group and the group's own random generator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnRollout:
    """One answer, or one game of several turns, with a reward."""

    sequences: tuple[TokenSequence, ...]
    text: str
    reward: float
    advantages: tuple[float, ...] | None = None
    """Advantages of the drawn tokens, if the environment gives them. None: they follow from the
    group's rewards. Like `reference_logprobs`, only for rollouts of one sequence."""
    reference_logprobs: tuple[float, ...] = ()
    """Reference log-probabilities of the drawn tokens, if the environment gives them."""
    temperature: float | None = None
    """Sampling temperature; None: the run's."""

    @property
    def num_drawn(self) -> int:
        """Number of drawn tokens."""
        return sum(len(sequence.drawn) for sequence in self.sequences)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnGroup:
    """The successful answers to one task."""

    position: int
    """Position of the task in the run's order, unique per group."""
    task: str
    rollouts: tuple[DrawnRollout, ...]
    weight: float = 1.0
    """Weight of the task. The group's advantages are multiplied by it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCounts:
    """Counts and means of all that was drawn for a step, including untrained groups."""

    num_rollouts: int
    num_failed: int
    """Rollouts without a reward."""
    num_equal: int
    """Groups whose rewards were all equal."""
    num_tokens: int
    mean_reward: float | None
    """Mean over all rollouts with a reward, equal groups included; None if there are none."""
    first_error: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Mean of each further metric of the rollouts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The training data of one step."""

    step: int
    model: ModelRef
    model_step: int
    """The step whose weights drew the batch."""
    groups: tuple[DrawnGroup, ...]
    """Groups in task order. Fewer than `groups_per_step` if too many had equal rewards."""
    next_position: int
    """Position of the next step's first task."""
    counts: BatchCounts


def encode_batch(batch: Batch) -> bytes:
    """Encode as compressed JSON. Floats survive exactly."""
    document = {
        "step": batch.step,
        "model": asdict(batch.model),
        "model_step": batch.model_step,
        "groups": [_group_document(group) for group in batch.groups],
        "next_position": batch.next_position,
        "counts": asdict(batch.counts),
    }
    return zlib.compress(json.dumps(document, separators=(",", ":")).encode())


def encode_texts(batch: Batch) -> bytes:
    """Encode the answers with their rewards for readers. This remains when the rest is removed."""
    groups = [
        {
            "task": group.task,
            "rollouts": [
                {
                    "text": rollout.text,
                    "reward": rollout.reward,
                    "advantages": [fmean(rollout.advantages)] if rollout.advantages else None,
                }
                for rollout in group.rollouts
            ],
        }
        for group in batch.groups
    ]
    return zlib.compress(json.dumps({"groups": groups}, separators=(",", ":")).encode())


def decode_batch(data: bytes) -> Batch:
    """Decode the output of `encode_batch`."""
    try:
        document: dict[str, Any] = json.loads(zlib.decompress(data))
    except (zlib.error, ValueError) as error:
        raise RunError(f"The rollouts of a step cannot be read: {error}.") from error
    document["model"] = ModelRef(**document["model"])
    document["counts"] = BatchCounts(**document["counts"])
    document["groups"] = tuple(_group(group) for group in document["groups"])
    return Batch(**document)


def _group_document(group: DrawnGroup) -> dict[str, Any]:
    return {
        "position": group.position,
        "task": group.task,
        "weight": group.weight,
        "rollouts": [
            {
                "text": rollout.text,
                "reward": rollout.reward,
                "advantages": rollout.advantages,
                "reference_logprobs": rollout.reference_logprobs,
                "temperature": rollout.temperature,
                "sequences": [_sequence_document(sequence) for sequence in rollout.sequences],
            }
            for rollout in group.rollouts
        ],
    }


def _sequence_document(sequence: TokenSequence) -> dict[str, Any]:
    kept = KeptTokens.of(sequence.kept)
    return {
        "tokens": sequence.tokens,
        "drawn": sequence.drawn,
        "logprobs": sequence.logprobs,
        "kept": [kept.ends, base64.b64encode(kept.data).decode()] if kept else None,
    }


def _group(document: Mapping[str, Any]) -> DrawnGroup:
    return DrawnGroup(
        position=document["position"],
        task=document["task"],
        weight=document.get("weight", 1.0),
        rollouts=tuple(
            DrawnRollout(
                sequences=tuple(_sequence(sequence) for sequence in rollout["sequences"]),
                text=rollout["text"],
                reward=rollout["reward"],
                advantages=_floats(rollout.get("advantages")),
                reference_logprobs=tuple(rollout.get("reference_logprobs", ())),
                temperature=rollout.get("temperature"),
            )
            for rollout in document["rollouts"]
        ),
    )


def _floats(values: list[float] | None) -> tuple[float, ...] | None:
    return None if values is None else tuple(values)


def _sequence(document: Mapping[str, Any]) -> TokenSequence:
    ends, data = document["kept"] or ((), "")
    return TokenSequence(
        tokens=tuple(document["tokens"]),
        drawn=tuple(document["drawn"]),
        logprobs=tuple(document["logprobs"]),
        kept=KeptTokens(ends=tuple(ends), data=base64.b64decode(data)) if ends else (),
    )
