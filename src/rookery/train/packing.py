"""Data -> passes: sequences laid end to end under a token budget, no padding, short ones first.

    for packed in pack(data, pass_tokens=1024): ...

Tokens after the last predicting position are not read:

    tokens (5, 6, 7), positions (1, 2), targets (7, 8)
    tokens (5, 9),    positions (0, 0), targets (9, 4)
    sorted by length: sequences (5,) and (5, 6, 7); the rows are   0: 5   1: 5   2: 6   3: 7
    predicting (0, 2, 3), target_rows (0, 0, 1, 2), targets (9, 4, 7, 8), datum (0, 0, 1, 1)

With `shares_prompts`, a prefix that several data share up to their first prediction is a prompt of
the pass, computed once. Their sequences are the rest.

    tokens (5, 6, 7, 8), positions (2, 3)   tokens (5, 6, 7, 9), positions (2, 3)
    prompts (5, 6); sequences (7, 8) and (7, 9); after 0: 0, 1: 0
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import isfinite
from operator import index

import numpy as np

from rookery.errors import TrainError, boundary
from rookery.slots import ModelShape
from rookery.train.losses import Column
from rookery.types import Datum, Json, KeptTokens, TokenIds

__all__ = ["COLUMNS", "PackedPass", "check_data", "input_tokens", "pack"]

COLUMNS: tuple[Column, ...] = (
    "sampled_logprobs",
    "old_logprobs",
    "reference_logprobs",
    "advantages",
)
_WRONG_TYPE = (TypeError, ValueError, OverflowError)
"""Errors that checks raise if values do not have the types of Datum."""


@dataclass(slots=True, kw_only=True)
class PackedPass:
    """The data of one forward and backward pass."""

    places: list[int] = field(default_factory=list)
    """Place in the request of each datum of the pass."""
    sequences: list[TokenIds] = field(default_factory=list)
    """Tokens that each datum reads, without its shared prompt."""
    prompts: list[TokenIds] = field(default_factory=list)
    """Prefixes that several sequences share."""
    after: dict[int, int] = field(default_factory=dict)
    """Place in `sequences` -> place in `prompts`, for sequences that have one."""
    predicting: list[int] = field(default_factory=list)
    """Predicting rows, each once, in order; rows are numbered over `sequences`."""
    target_rows: list[int] = field(default_factory=list)
    """Place in `predicting` of each target, in order."""
    targets: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    datum: list[int] = field(default_factory=list)
    """Place in `sequences` of each target."""
    columns: dict[Column, list[float]] = field(default_factory=dict)
    """The columns that the data have, each as long as `targets`."""
    temperatures: list[float] = field(default_factory=list)
    """One per row of `predicting`."""
    kept: list[Sequence[int]] = field(default_factory=list)
    """One per target; see Datum."""
    num_rows: list[int] = field(default_factory=list)
    """Per datum: the number of distinct positions of its targets."""
    inputs: list[Mapping[str, Json]] = field(default_factory=list)
    """One per datum; see Datum."""
    num_tokens: int = 0
    """Tokens in sequences and prompts."""
    is_learned: bool = True
    """Whether any datum can have a gradient."""

    @property
    def lengths(self) -> list[int]:
        return [len(sequence) for sequence in self.sequences]


def pack(
    data: Sequence[Datum],
    *,
    pass_tokens: int,
    learns_from: Callable[[Datum], bool] = lambda _: True,
    shares_prompts: bool = False,
) -> list[PackedPass]:
    """Fill passes, shortest data first; a datum over the budget gets its own pass.

    Data of equal length are adjacent, so that attention takes them in one call. Data without
    targets are left out. Data without gradients get passes of their own, at the end.
    """
    passes: list[PackedPass] = []
    prompts = _shared_prompts(data) if shares_prompts else [()] * len(data)
    sized = [
        (not learns_from(datum), prompts[place], len(input_tokens(datum)), place)
        for place, datum in enumerate(data)
    ]
    for is_read_only, prompt, size, place in sorted(sized):
        if size == 0:
            continue
        has_prompt = bool(passes) and prompt in ((), *passes[-1].prompts[-1:])
        added = size - len(prompt) if has_prompt else size
        if (
            not passes
            or passes[-1].num_tokens + added > pass_tokens
            or passes[-1].is_learned == is_read_only
        ):
            passes.append(PackedPass(is_learned=not is_read_only))
        _append(passes[-1], data[place], place, prompt=prompt)
    return passes


def _shared_prompts(data: Sequence[Datum]) -> list[TokenIds]:
    """Return each datum's tokens before its first prediction, () if no other shares them."""
    prompts = [datum.tokens[: datum.positions[0]] if datum.positions else () for datum in data]
    counts = Counter(prompts)
    return [prompt if counts[prompt] > 1 else () for prompt in prompts]


def _append(packed: PackedPass, datum: Datum, place: int, *, prompt: TokenIds) -> None:
    if prompt and prompt not in packed.prompts[-1:]:
        packed.prompts.append(prompt)
        packed.num_tokens += len(prompt)
    number = len(packed.sequences)
    if prompt:
        packed.after[number] = len(packed.prompts) - 1
    start = packed.num_tokens - sum(map(len, packed.prompts)) - len(prompt)
    packed.places.append(place)
    packed.sequences.append(input_tokens(datum)[len(prompt) :])
    packed.num_tokens += len(packed.sequences[-1])
    packed.inputs.append(datum.inputs)
    num_before, last = len(packed.predicting), -1
    for position in datum.positions:
        if position != last:
            packed.predicting.append(start + position)
            packed.temperatures.append(datum.temperature)
            last = position
        packed.target_rows.append(len(packed.predicting) - 1)
    packed.num_rows.append(len(packed.predicting) - num_before)
    packed.targets.extend(datum.targets)
    packed.weights.extend(datum.weights)
    packed.datum.extend([number] * len(datum.targets))
    packed.kept.extend(_kept_rows(datum) or [()] * len(datum.targets))
    for name in COLUMNS:
        column: tuple[float, ...] = getattr(datum, name)
        if column:
            packed.columns.setdefault(name, []).extend(column)


def _kept_rows(datum: Datum) -> Sequence[Sequence[int]]:
    return datum.kept.rows if isinstance(datum.kept, KeptTokens) else datum.kept


def input_tokens(datum: Datum) -> TokenIds:
    """Return the tokens up to the last predicting position; none without targets."""
    return datum.tokens[: datum.positions[-1] + 1] if datum.positions else ()


def check_data(data: Sequence[Datum], *, shape: ModelShape, needs: Iterable[Column] = ()) -> None:
    """Raise TrainError unless model and loss accept every datum."""
    present = {name for name in COLUMNS if any(getattr(datum, name) for datum in data)}
    for place, datum in enumerate(data):
        name = f"Datum {place} of the batch"
        with boundary(TrainError, f"{name} has a value of a wrong type", foreign=_WRONG_TYPE):
            complaint = _complaint(datum, shape, required={*present, *needs})
        if complaint:
            raise TrainError(f"{name} {complaint}.")


def _complaint(datum: Datum, shape: ModelShape, *, required: set[Column]) -> str:
    if not datum.targets and not datum.positions:
        return ""
    return (
        _column_complaint(datum, required=required)
        or _position_complaint(datum, shape)
        or _token_complaint(datum, shape)
    )


def _column_complaint(datum: Datum, *, required: set[Column]) -> str:
    num = len(datum.targets)
    columns: dict[str, Sequence[object]] = {"positions": datum.positions, "weights": datum.weights}
    if datum.kept:
        columns["kept"] = datum.kept
    columns |= {name: getattr(datum, name) for name in COLUMNS if name in required}
    for name, column in columns.items():
        if len(column) != num:
            return f"has {num} targets and {len(column)} {name}; give one per target"
        if name not in {"positions", "kept"} and not all(isfinite(x) for x in column):  # type: ignore[arg-type]
            return f"has {name} that are NaN or infinite; they are finite numbers"
    if not (isfinite(datum.temperature) and datum.temperature > 0):
        return f"has temperature {datum.temperature:g}; it is a number above 0"
    return ""


def _position_complaint(datum: Datum, shape: ModelShape) -> str:
    if any(later < earlier for earlier, later in pairwise(map(index, datum.positions))):
        return "has positions that fall; sort its targets by position"
    if datum.positions[0] < 0 or datum.positions[-1] >= len(datum.tokens):
        return (
            f"has positions {datum.positions[0]} to {datum.positions[-1]}; with "
            f"{len(datum.tokens)} tokens they are 0 to {len(datum.tokens) - 1}"
        )
    if len(input_tokens(datum)) > shape.context_tokens:
        return (
            f"has {len(input_tokens(datum))} tokens to read; this model reads at most "
            f"{shape.context_tokens}: {shape.beyond_context}"
        )
    return ""


def _token_complaint(datum: Datum, shape: ModelShape) -> str:
    kept_rows = () if _is_kept_sound(datum, shape.vocab_size) else _kept_rows(datum)
    for tokens in (datum.tokens, datum.targets, *kept_rows):
        wrong = next((token for token in tokens if not 0 <= index(token) < shape.vocab_size), None)
        if wrong is not None:
            return (
                f"has the token {wrong}, which is not in the vocabulary 0 to "
                f"{shape.vocab_size - 1}: was it made with another tokenizer?"
            )
    for target, kept in zip(datum.targets, kept_rows, strict=False):
        if kept and target not in kept:
            return f"has the target {target}, which is not among the tokens kept for it"
        if len(set(kept)) < len(kept):
            [(twice, _)] = Counter(kept).most_common(1)
            return f"has the token {twice} twice among those kept for the target {target}"
    return ""


def _is_kept_sound(datum: Datum, vocab_size: int) -> bool:
    """Whether stored kept tokens are in the vocabulary, each once, and include their target. A
    nucleus may have thousands of tokens: Python loops over them only to word an error."""
    if not isinstance(datum.kept, KeptTokens):
        return False
    flat = np.frombuffer(datum.kept.data, dtype=np.uint32).astype(np.int64)
    lengths = np.diff([0, *datum.kept.ends])
    rows = np.repeat(np.arange(len(lengths)), lengths)
    is_target = flat == np.asarray(datum.targets)[rows]
    is_found = np.bincount(rows[is_target], minlength=len(lengths)) == 1
    keys = rows * (1 << 32) + flat
    if not (np.diff(keys) > 0).all():  # some engines list them by probability
        keys.sort()
    is_once = (np.diff(keys) > 0).all()
    return bool((flat < vocab_size).all() and (is_found | (lengths == 0)).all() and is_once)
