"""One group as an Atropos environment sends it: sequences with masks, scores and log-probabilities.

    tokens              [[5, 6, 7, 8], ...]            one list per sequence
    masks               [[-100, -100, 7, 8], ...]      -100 where the model did not draw the token
    inference_logprobs  [[1.0, 1.0, -0.3, -1.2], ...]  1.0 where it did not

A group whose training would not match what was drawn is refused with a sentence.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from rookery.errors import TaskError
from rookery.types import TokenSequence

__all__ = [
    "MASKED",
    "ScoredGroup",
    "check_group",
    "complete_groups",
    "drawn_sequences",
    "pick_batch",
]

MASKED = -100
"""Mask of a token that the model read but did not draw."""
_NOT_DRAWN = 1.0
"""Log-probability that environments write for such a token."""
_LARGEST = 1e12
"""Limit on scores and advantages: the sum of squares of larger ones overflows float32."""
_LEAST_LOGPROB = -80.0
"""Tokens this unlikely are never drawn. Their ratio would overflow float32 and make the loss
infinite, at every repetition of the durable batch."""
_TEMPERATURES = (1e-6, 1e6)


class ScoredGroup(BaseModel):
    """Fields of the Atropos API; others are dropped, as by its own server."""

    # NaN and infinity are written as such rather than as null, so that they are found later.
    model_config = ConfigDict(extra="ignore", frozen=True, ser_json_inf_nan="constants")

    tokens: list[list[int]]
    masks: list[list[int]]
    scores: list[float]
    advantages: list[list[float]] | None = None
    """Advantages of every token, in place of those computed from the scores."""
    ref_logprobs: list[list[float]] | None = None
    """Log-probabilities of every token under the reference model of a KL term."""
    messages: list[list[dict[str, Any]]] | None = None
    generation_params: dict[str, Any] | None = None
    inference_logprobs: list[list[float]] | None = None
    overrides: list[dict[str, Any]] | None = None
    """Options per sequence: `set_advantage_to_zero`, `temperature`."""
    group_overrides: dict[str, Any] | None = None
    images: Any | None = None
    env_id: int | None = None
    distill_token_ids: list[list[list[int]]] | None = None
    distill_logprobs: list[list[list[float]]] | None = None

    @property
    def size(self) -> int:
        """Number of sequences."""
        return len(self.tokens)


def check_group(group: ScoredGroup, *, vocab_size: int, max_tokens: int) -> None:
    """TaskError if it cannot be trained on: what was sent, and what to send instead.

    `max_tokens` limits the length of a sequence; 0: any length.
    """
    if not group.tokens:
        raise TaskError("A group has no sequences: send at least two.")
    _check_rows(group)
    if group.inference_logprobs is None:
        raise TaskError(
            "A group has no inference_logprobs, which the trainer needs: send the log-probability "
            "of every drawn token, as managed_server of atroposlib gives it."
        )
    for row, (tokens, mask) in enumerate(zip(group.tokens, group.masks, strict=True)):
        outside = [token for token in tokens if not 0 <= token < vocab_size]
        if outside:
            raise TaskError(
                f"Sequence {row} has token {outside[0]}, and the model knows 0 to "
                f"{vocab_size - 1}: give the environment the model's own tokenizer."
            )
        if max_tokens and len(tokens) > max_tokens:
            raise TaskError(
                f"Sequence {row} has {len(tokens)} tokens and the trainer takes {max_tokens} at "
                "most: shorten it, or raise max_token_len up to what the model reads."
            )
        _check_drawn(row, mask, group)
    _check_numbers(group)


def _check_numbers(group: ScoredGroup) -> None:
    values = [*group.scores, *_numbers(group.advantages), *_numbers(group.ref_logprobs)]
    if not all(map(math.isfinite, values)):
        raise TaskError("A score, advantage or ref_logprob is NaN or infinite: send numbers.")
    if max(map(abs, values)) > _LARGEST:
        raise TaskError(
            f"A score, advantage or ref_logprob is {max(values, key=abs):g}: send numbers of at "
            f"most {_LARGEST:g}."
        )
    for options in (
        *(group.overrides or ()),
        group.generation_params or {},
        group.group_overrides or {},
    ):
        value = options.get("temperature")
        low, high = _TEMPERATURES
        if value and not (isinstance(value, int | float) and low <= value <= high):
            raise TaskError(
                f"A group was drawn with the temperature {value!r:.40}: send a number from {low:g} "
                f"to {high:g}, or none."
            )


def _check_rows(group: ScoredGroup) -> None:
    """Check that every column has one row per sequence, of the sequence's length."""
    if len(group.scores) != group.size or len(group.masks) != group.size:
        raise TaskError(
            f"A group has {group.size} sequences, {len(group.masks)} masks and "
            f"{len(group.scores)} scores: send one of each per sequence."
        )
    if group.overrides is not None and len(group.overrides) != group.size:
        raise TaskError(
            f"A group has {group.size} sequences and {len(group.overrides)} overrides: send one "
            "per sequence, {} where there is none."
        )
    if group.messages and len(group.messages) != group.size:
        raise TaskError(
            f"A group has {group.size} sequences and {len(group.messages)} lists of messages: send "
            "one per sequence, or none."
        )
    columns = {
        "masks": group.masks,
        "inference_logprobs": group.inference_logprobs,
        "advantages": group.advantages,
        "ref_logprobs": group.ref_logprobs,
    }
    lengths = [len(tokens) for tokens in group.tokens]
    for name, rows in columns.items():
        if rows is not None and [len(row) for row in rows] != lengths:
            raise TaskError(
                f"{name} have the lengths {[len(row) for row in rows]} and the tokens {lengths}: "
                "send a value for every token."
            )


def _check_drawn(row: int, mask: Sequence[int], group: ScoredGroup) -> None:
    drawn = [place for place, masked in enumerate(mask) if masked != MASKED]
    if not drawn or drawn[0] == 0:
        raise TaskError(
            f"Sequence {row} has {'no' if not drawn else 'its first'} token drawn by the model: "
            f"set the mask of what the model drew, after a prompt, and {MASKED} elsewhere."
        )
    columns = {
        "inference_logprobs": group.inference_logprobs,
        "ref_logprobs": group.ref_logprobs,
    }
    for name, rows in columns.items():
        for place in drawn:
            if rows is not None and not _LEAST_LOGPROB <= rows[row][place] <= 0:
                raise TaskError(
                    f"{name} of sequence {row} is {rows[row][place]} at {place}, a token that was "
                    f"drawn: send its log-probability, from {_LEAST_LOGPROB:g} to 0; "
                    f"{_NOT_DRAWN:g} is for tokens whose mask is {MASKED}."
                )


def _numbers(rows: Sequence[Sequence[float]] | None) -> list[float]:
    return [value for row in rows or () for value in row]


def drawn_sequences(group: ScoredGroup) -> list[TokenSequence]:
    """Return the sequences of a checked group for training."""
    assert group.inference_logprobs is not None, "the group was checked"
    sequences = []
    for tokens, mask, logprobs in zip(
        group.tokens, group.masks, group.inference_logprobs, strict=True
    ):
        drawn = tuple(place for place, masked in enumerate(mask) if masked != MASKED)
        sequences.append(
            TokenSequence(
                tokens=tuple(tokens),
                drawn=drawn,
                logprobs=tuple(logprobs[place] for place in drawn),
            )
        )
    return sequences


# The choice of groups for the next batch: exactly so many sequences, in whole groups.
#
# As in `run-api`, groups of one size form packs with as many sequences as the largest group. Whole
# packs fill the batch in order of arrival, and an environment with a `min_batch_allocation` gets at
# least that share. Groups of a size that makes no such pack, which `run-api` never uses, are packs
# by themselves, unless no batch can be made with them.


Sized = tuple[int | None, int]
"""A group: its environment, and its number of sequences."""


def pick_batch(
    queue: Sequence[Sized], *, num_sequences: int, minimums: Mapping[int, float] | None = None
) -> list[int]:
    """Return the places of groups that make a batch; empty if there is none yet. Groups of sizes 4
    2 2 4 and batches of 8: places 0, 1, 2 (a pack of two groups of 2)."""
    if sum(size for _, size in queue) < num_sequences:
        return []
    for has_others in (True, False):
        packed = _packed(queue, by_environment=bool(minimums), has_others=has_others)
        if places := _picked(queue, packed, num_sequences=num_sequences, minimums=minimums):
            return places
    return []


def _picked(
    queue: Sequence[Sized],
    packed: Sequence[int],
    *,
    num_sequences: int,
    minimums: Mapping[int, float] | None,
) -> list[int]:
    if not minimums:
        return _fill([], packed, queue, num_sequences)
    needed = _needed(minimums, num_sequences=num_sequences, queue=queue, packed=packed)
    if needed is None:
        return []
    places: defaultdict[int | None, list[int]] = defaultdict(list)
    for place in packed:
        places[queue[place][0]].append(place)
    first: list[int] = []
    total = 0
    for environment, least in needed.items():
        taken = 0
        for place in places[environment]:
            size = queue[place][1]
            if taken < least and total + size <= num_sequences:
                first.append(place)
                taken += size
                total += size
    return _fill(first, sorted(packed), queue, num_sequences)


def _fill(
    first: Sequence[int], packed: Sequence[int], queue: Sequence[Sized], num_sequences: int
) -> list[int]:
    """Add groups up to the whole batch; empty if no choice makes it exactly."""
    begun = sum(queue[place][1] for place in first)
    taken = set(first)
    others = [place for place in packed if place not in taken]
    chosen, total = list(first), begun
    for place in others:
        if total == num_sequences:
            break
        size = queue[place][1]
        if total + size <= num_sequences:
            chosen.append(place)
            total += size
    if total == num_sequences:
        return chosen
    # Sizes may not divide the batch: try other combinations.
    left = num_sequences - begun
    completing = complete_groups([queue[place][1] for place in others], left)
    return [*first, *(others[place] for place in completing)] if completing else []


def _packed(queue: Sequence[Sized], *, by_environment: bool, has_others: bool) -> list[int]:
    """Return groups in whole packs, pack by pack; with `has_others` also sizes without packs."""
    largest = max((size for _, size in queue), default=0)
    open_packs: defaultdict[tuple[int | None, int], list[int]] = defaultdict(list)
    packed: list[int] = []
    for place, (environment, size) in enumerate(queue):
        if largest % size and not has_others:
            continue
        pack = open_packs[environment if by_environment else None, size]
        pack.append(place)
        if len(pack) * size == largest or largest % size:
            packed += pack
            pack.clear()
    return packed


def _needed(
    minimums: Mapping[int, float],
    *,
    num_sequences: int,
    queue: Sequence[Sized],
    packed: Sequence[int],
) -> dict[int, int] | None:
    """Return the sequences each environment must have; None if one of them has no pack."""
    needed = {env: int(num_sequences * part) for env, part in minimums.items()}
    needed = {env: least for env, least in needed.items() if least > 0}
    available = {queue[place][0] for place in packed}
    if not needed.keys() <= available:
        return None
    total = sum(needed.values())
    if total <= num_sequences:
        return needed
    smallest = {
        env: min(queue[place][1] for place in packed if queue[place][0] == env) for env in needed
    }
    return {
        env: max(smallest[env], int(least * num_sequences / total)) for env, least in needed.items()
    }


def complete_groups(sizes: Sequence[int], target: int) -> list[int]:
    """Return the places of groups with `target` sequences together, preferring the oldest; empty if
    there is no such choice. Sizes 3 2 1 and 4: places 0 and 2."""
    oldest: list[int] = []
    total = 0
    for place, size in enumerate(sizes):
        if total + size <= target:
            oldest.append(place)
            total += size
    if total == target:
        return oldest
    if sum(sizes) < target:
        return []
    # Bit t is set if some of the groups before a place have t sequences together.
    reached, within = [1], (2 << target) - 1
    for size in sizes:
        reached.append((reached[-1] | reached[-1] << size) & within)
        if reached[-1] >> target:
            break
    else:
        return []
    chosen: list[int] = []
    for place in reversed(range(len(reached) - 1)):
        if not reached[place] >> target & 1:
            chosen.append(place)
            target -= sizes[place]
    return chosen[::-1]
