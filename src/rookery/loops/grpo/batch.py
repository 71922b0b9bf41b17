"""The rollouts of one step, and how they are kept: one compact blob that an event names.

    digest = run.blobs.put_bytes(encode_batch(batch))
    batch = decode_batch(run.blobs.read_bytes(digest))

A blob holds all that training needs, bit for bit, so that a resumed run trains on what was drawn.
"""

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rookery.errors import RunError
from rookery.types import ModelRef, TokenIds

__all__ = ["Batch", "BatchCounts", "DrawnGroup", "DrawnRollout", "decode_batch", "encode_batch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnRollout:
    """One answer with a reward."""

    tokens: TokenIds
    logprobs: tuple[float, ...]
    """Under the distribution they were drawn from."""
    text: str
    reward: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnGroup:
    """The answers to one task that did not fail."""

    position: int
    """Of the task in the order of the run; no two groups have the same."""
    task: str
    prompt: TokenIds
    rollouts: tuple[DrawnRollout, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCounts:
    """What was drawn for a step, including what is not trained."""

    num_rollouts: int
    num_failed: int
    """Rollouts without a reward."""
    num_equal: int
    """Groups whose rewards were all equal."""
    num_tokens: int
    mean_reward: float | None
    """Of all rollouts that have one, equal groups included; None when none has."""
    first_error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one step is trained on."""

    step: int
    model: ModelRef
    model_step: int
    """The step whose weights drew it."""
    groups: tuple[DrawnGroup, ...]
    """In the order of the tasks; fewer than asked for when too many had equal rewards."""
    next_position: int
    """The first task of the next step."""
    counts: BatchCounts


def encode_batch(batch: Batch) -> bytes:
    """Compressed JSON: floats are written so that they are read back exactly."""
    return zlib.compress(json.dumps(asdict(batch), separators=(",", ":")).encode())


def decode_batch(data: bytes) -> Batch:
    """What `encode_batch` wrote."""
    try:
        document: dict[str, Any] = json.loads(zlib.decompress(data))
    except (zlib.error, ValueError) as error:
        raise RunError(f"The rollouts of a step cannot be read: {error}.") from error
    document["model"] = ModelRef(**document["model"])
    document["counts"] = BatchCounts(**document["counts"])
    document["groups"] = tuple(_group(group) for group in document["groups"])
    return Batch(**document)


def _group(document: Mapping[str, Any]) -> DrawnGroup:
    return DrawnGroup(
        position=document["position"],
        task=document["task"],
        prompt=tuple(document["prompt"]),
        rollouts=_rollouts(document["rollouts"]),
    )


def _rollouts(documents: Sequence[Mapping[str, Any]]) -> tuple[DrawnRollout, ...]:
    return tuple(
        DrawnRollout(
            tokens=tuple(document["tokens"]),
            logprobs=tuple(document["logprobs"]),
            text=document["text"],
            reward=document["reward"],
        )
        for document in documents
    )
