"""Data -> passes: sequences laid end to end under a token budget, no padding.

    for packed in pack(batch, pass_tokens=1024): ...

A token is predicted by the row of the token before it, so the last weighted token and all that
follow it are never read as input:

    tokens  (5, 6, 7, 8) weights (0, 0, 1, 1)     tokens  (5, 9, 2) weights (0, 2, 0)
    sequences (5, 6, 7) and (5,); the rows are    0: 5   1: 6   2: 7   3: 5
    target_rows (1, 2, 3), target_tokens (7, 8, 9), weights (1, 1, 2), datum (0, 0, 1)
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite

from rookery.errors import TrainError
from rookery.slots import ModelShape
from rookery.types import Datum, TokenIds

__all__ = ["PackedPass", "check_batch", "input_tokens", "pack"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedPass:
    """The data of one forward and backward pass."""

    sequences: tuple[TokenIds, ...]
    """The input of each datum, in the order of the batch."""
    target_rows: tuple[int, ...]
    """The packed rows that predict something."""
    target_tokens: TokenIds
    weights: tuple[float, ...]
    datum: tuple[int, ...]
    """The place in `sequences` that each target belongs to."""
    sampled: tuple[float, ...] | None
    advantages: tuple[float, ...] | None

    @property
    def lengths(self) -> list[int]:
        return [len(sequence) for sequence in self.sequences]


def pack(batch: Sequence[Datum], *, pass_tokens: int) -> list[PackedPass]:
    """Fill passes in the order of the batch; a datum over the budget has a pass of its own.

    Data without any weight are left out: they change no gradient.
    """
    passes: list[list[Datum]] = []
    room = 0
    for datum in batch:
        size = len(input_tokens(datum))
        if size == 0:
            continue
        if size > room:
            passes.append([])
            room = pass_tokens
        passes[-1].append(datum)
        room -= size
    return [_packed(data) for data in passes]


def input_tokens(datum: Datum) -> TokenIds:
    """The tokens before the last weighted one; none when nothing has weight."""
    last = max((i for i, weight in enumerate(datum.weights) if weight != 0.0), default=0)
    return datum.tokens[:last]


def check_batch(batch: Sequence[Datum], *, shape: ModelShape) -> None:
    """Raise TrainError unless the model can take every datum and at least one has weight."""
    if not any(weight != 0.0 for datum in batch for weight in datum.weights):
        raise TrainError(
            f"A batch of {len(batch)} data has no token with a weight: there is nothing to learn. "
            "Give the tokens of the answers a weight of 1."
        )
    for index, datum in enumerate(batch):
        complaint = _complaint(datum, shape) or _column_complaint(datum, batch[0])
        if complaint:
            raise TrainError(f"Datum {index} of the batch {complaint}.")


def _complaint(datum: Datum, shape: ModelShape) -> str:
    if len(datum.weights) != len(datum.tokens):
        return (
            f"has {len(datum.tokens)} tokens and {len(datum.weights)} weights; give one weight per "
            "token, 0 for those of the prompt"
        )
    if not all(isfinite(weight) for weight in datum.weights):
        return "has a weight that is NaN or infinite; weights are finite numbers"
    if datum.weights and datum.weights[0] != 0.0:
        return (
            f"has weight {datum.weights[0]:g} on its first token, which has nothing to be "
            "predicted from: set it to 0, or put a start token before it"
        )
    if len(input_tokens(datum)) > shape.context_tokens:
        return (
            f"has {len(input_tokens(datum))} tokens to read; this model reads at most "
            f"{shape.context_tokens}: {shape.beyond_context}"
        )
    wrong = next((token for token in datum.tokens if not 0 <= token < shape.vocab_size), None)
    if wrong is not None:
        return (
            f"has the token {wrong}, which is not in the vocabulary 0 to {shape.vocab_size - 1}: "
            "was it made with another tokenizer?"
        )
    return ""


def _column_complaint(datum: Datum, first: Datum) -> str:
    """`logprobs` and `advantages` are aligned with the tokens, and all data have them or none."""
    for name, column, other in (
        ("logprobs", datum.logprobs, first.logprobs),
        ("advantages", datum.advantages, first.advantages),
    ):
        if column and len(column) != len(datum.tokens):
            return f"has {len(datum.tokens)} tokens and {len(column)} {name}; give one per token"
        if bool(column) != bool(other):
            return f"{'has' if column else 'lacks'} {name}, unlike the first; give all data or none"
    return ""


def _packed(data: Sequence[Datum]) -> PackedPass:
    sequences = tuple(input_tokens(datum) for datum in data)
    places = list(_places(data))
    return PackedPass(
        sequences=sequences,
        target_rows=tuple(row for row, _, _ in places),
        target_tokens=tuple(data[d].tokens[i] for _, d, i in places),
        weights=tuple(data[d].weights[i] for _, d, i in places),
        datum=tuple(d for _, d, _ in places),
        sampled=tuple(data[d].logprobs[i] for _, d, i in places) if data[0].logprobs else None,
        advantages=(
            tuple(data[d].advantages[i] for _, d, i in places) if data[0].advantages else None
        ),
    )


def _places(data: Sequence[Datum]) -> Iterator[tuple[int, int, int]]:
    """(packed row, datum, token) of every weighted token."""
    start = 0
    for number, datum in enumerate(data):
        for i, weight in enumerate(datum.weights):
            if weight != 0.0:
                yield start + i - 1, number, i
        start += len(input_tokens(datum))
