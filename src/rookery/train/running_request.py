"""One request on its way through a trainer: its passes, and its results so far."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from math import gcd, inf
from typing import Generic, TypeVar

import torch

from rookery.errors import RookeryError, TrainError, boundary
from rookery.slots import ModelShape
from rookery.train.lora_trainee import LoraTrainee
from rookery.train.losses import Loss, LossOutput, Targets, make_loss
from rookery.train.packing import COLUMNS, PackedPass, check_data, pack
from rookery.train.processes import Processes
from rookery.train.trainee import Trainee
from rookery.types import TokenIds, TrainOutput, TrainRequest

__all__ = ["MixedRows", "Part", "RunningRequest", "Turn", "join_parts", "mixed_turns"]


# One process's share of a request, and the output that all shares make together.


@dataclass(slots=True)
class Part:
    """Sums over one process's share of the data; if `error` is set, no other field counts."""

    error: str = ""
    num_data: int = 0
    """Data in the whole request, over all processes."""
    logprobs: dict[int, tuple[float, ...]] = field(default_factory=dict)
    """Log-probabilities by the datum's place in the request."""
    sums: Counter[str] = field(default_factory=Counter)
    totals: Counter[str] = field(default_factory=Counter)
    maxima: dict[str, float] = field(default_factory=dict)
    loss_sum: float = 0.0
    weight: float = 0.0
    num_tokens: int = 0
    """Targets with a non-zero weight."""


def join_parts(parts: Sequence[Part]) -> TrainOutput:
    """Return the output over all data, or the first error."""
    error = next((part.error for part in parts if part.error), "")
    if error:
        return TrainOutput(error=error)
    logprobs = {place: row for part in parts for place, row in part.logprobs.items()}
    sums: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    maxima: dict[str, float] = {}
    for part in parts:
        sums.update(part.sums)
        totals.update(part.totals)
        for key, value in part.maxima.items():
            maxima[key] = max(maxima.get(key, -inf), value)
    weight = sum(part.weight for part in parts)
    # If all weights are zero or cancel, there is no mean to report.
    means = {f"train/{key}": value / weight for key, value in sums.items() if weight}
    num_data = parts[0].num_data
    averages = {k: v / num_data if k.endswith(":mean") else v for k, v in totals.items()}
    largest = {f"train/{key}_max": value for key, value in maxima.items()}
    counts = {
        "train/loss_sum": sum(part.loss_sum for part in parts),
        "train/weight_sum": weight,
        "train/num_tokens": float(sum(part.num_tokens for part in parts)),
    }
    return TrainOutput(
        metrics={**means, **largest, **counts, **averages},
        logprobs=tuple(logprobs.get(place, ()) for place in range(num_data)),
    )


Trained = TypeVar("Trained", bound=Trainee)


class RunningRequest(Generic[Trained]):
    """This process's share of one request. An error ends this request alone."""

    def __init__(self, request: TrainRequest, trainee: Trained) -> None:
        self.trainee = trainee
        self.passes: list[PackedPass] = []
        self.part = Part()
        self.gradients: list[torch.Tensor] = []
        """Gradients of the trainee's parameters, summed over passes; empty if gradients are off."""
        self._request = request
        self._loss: Loss
        self._places: Sequence[int] = ()

    @property
    def has_failed(self) -> bool:
        return bool(self.part.error)

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Turn an error inside the block into this request's result; other requests go on."""
        remedy = "If memory is short lower pass_tokens or trunk_cache_gib."
        what = f"Step {self.trainee.num_steps + 1}: the request failed"
        try:
            with boundary(TrainError, what, remedy={RuntimeError: remedy, MemoryError: remedy}):
                yield
        except RookeryError as error:
            self.part = Part(error=str(error))
            self.passes, self.gradients = [], []

    def prepare(
        self, shape: ModelShape, *, pass_tokens: int, shares_prompts: bool, processes: Processes
    ) -> None:
        """Check the request and lay out its passes."""
        request = self._request
        with self.guard():
            self._loss = make_loss(request.loss, request.loss_options)
            check_data(request.data, shape=shape, needs=self._loss.needs)
            self.part.num_data = len(request.data)
            self._places = processes.share(request.data)
            data = [request.data[place] for place in self._places]
            has_gradients = torch.is_grad_enabled()
            learns_from = self._loss.learns_from if has_gradients else lambda _: True
            self.passes = pack(
                data,
                pass_tokens=pass_tokens,
                learns_from=learns_from,
                shares_prompts=shares_prompts,
            )
            weights = [weight for packed in self.passes for weight in packed.weights]
            self.part.weight = sum(weights)
            self.part.num_tokens = sum(weight != 0.0 for weight in weights)
            self.gradients = self.trainee.zeros() if torch.is_grad_enabled() else []

    def loss(self, packed: PackedPass, logprobs: torch.Tensor) -> LossOutput | None:
        """Return the loss of one pass; None if it failed, which fails the request."""
        with self.guard():
            output = self._loss(logprobs, _targets(packed, logprobs.device))
            self.trainee.require_finite("loss", output.loss)
            return output
        return None

    def add(self, packed: PackedPass, logprobs: torch.Tensor, output: LossOutput) -> None:
        part = self.part
        part.loss_sum += output.loss.item()
        part.sums.update({key: value.item() for key, value in output.sums.items()})
        part.totals.update({key: value.item() for key, value in output.totals.items()})
        for key, value in output.maxima.items():
            part.maxima[key] = max(part.maxima.get(key, -inf), value.item())
        counts = Counter(packed.datum)
        values, start = logprobs.tolist(), 0
        for number, place in enumerate(packed.places):
            part.logprobs[self._places[place]] = tuple(values[start : start + counts[number]])
            start += counts[number]


def _targets(packed: PackedPass, device: torch.device) -> Targets:
    def column(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)

    return Targets(
        weights=column(packed.weights),
        datum=torch.tensor(packed.datum, device=device),
        num_rows=packed.num_rows,
        inputs=packed.inputs,
        **{name: column(packed.columns.get(name, [])) for name in COLUMNS},
    )


# Passes of several requests as one: which to combine, and where their rows lie.
#
#     ada: passes of 600 and 500 tokens     bob: 300     cyd: 400     at most 1,024 tokens
#     mixed: ada 600 + bob 300,   ada 500 + cyd 400
#
# Each request keeps the passes it would have alone, because floating-point sums depend on grouping.


CHEAP_ROWS = 4096
"""Rows, padding included, that a GPU computes as fast as a few: launching operations dominates."""
MOST_PADDING = 1.25
"""Above `CHEAP_ROWS`, the most padded rows per unpadded row."""

MOST_BLOCKS = 2
"""Most blocks per pass on average. If a pass has several, each holds a copy of its factors."""

Turn = tuple[RunningRequest[LoraTrainee], PackedPass]
"""One pass of one request."""


def mixed_turns(
    running: Sequence[tuple[RunningRequest[LoraTrainee], int]], *, pass_tokens: int
) -> Iterator[list[Turn]]:
    """Yield the passes to compute together, until all requests are done. Each request comes with
    the first layer it trains. Passes are combined only if they share that layer and all or none of
    them need gradients. A request that fails meanwhile is skipped from then on."""
    done = [0] * len(running)
    while True:
        turns: list[Turn] = []
        kind, room = None, pass_tokens
        for place, (request, first) in enumerate(running):
            if done[place] == len(request.passes) or request.has_failed:
                continue
            packed = request.passes[done[place]]
            request_kind = first, packed.is_learned
            if not turns or (request_kind == kind and packed.num_tokens <= room):
                turns.append((request, packed))
                kind, room = request_kind, room - packed.num_tokens
                done[place] += 1
        if not turns:
            return
        yield turns


class MixedRows:
    """The sequences of several passes, laid end to end by length: attention takes neighbours of
    equal length in one call.

    If `room` has enough rows, sequences keep their order and each is padded at its end to the
    longest, unless that adds too many rows. Attention then takes all in one call, and each pass has
    whole blocks of rows. No row attends to the padding, and the padding has no gradient.

    If prompts are shared, they come first and nothing is padded.
    """

    def __init__(self, passes: Sequence[PackedPass], *, room: int = 0) -> None:
        order = [
            (len(sequence), part, number)
            for part, packed in enumerate(passes)
            for number, sequence in enumerate(packed.sequences)
        ]
        longest = max((length for length, _, _ in order), default=0)
        num_tokens = sum(length for length, _, _ in order)
        room = min(room, max(CHEAP_ROWS, int(MOST_PADDING * num_tokens)))
        has_prompts = any(packed.prompts for packed in passes)
        is_padded = not has_prompts and longest * len(order) <= room
        self._length = longest if is_padded else None
        """Rows per sequence, padding included; None without padding."""
        self.sequences: list[TokenIds] = []
        """Shared prompts included."""
        self.follows: list[int | None] = []
        """Per sequence: the place of the prompt that it continues, if any."""
        self.unpadded: list[list[int]] = [[] for _ in passes]
        """Per pass: the rows of its sequences, in the pass's own order."""
        self.spans: list[list[int]] = [[] for _ in passes]
        """Per pass: all its rows, padding and prompts included."""
        self.num_rows = 0
        places: dict[tuple[int, int], int] = {}
        for part, packed in enumerate(passes):
            for number, prompt in enumerate(packed.prompts):
                places[part, number] = len(self.sequences)
                self._lay(prompt, part, follows=None)
        # A pass's sequences are already sorted by length, unless they share prompts.
        for length, part, number in order if self._length or has_prompts else sorted(order):
            prompt_number = passes[part].after.get(number)
            follows = None if prompt_number is None else places[part, prompt_number]
            self.unpadded[part].extend(range(self.num_rows, self.num_rows + length))
            self._lay(passes[part].sequences[number], part, follows=follows)

    def _lay(self, sequence: TokenIds, part: int, *, follows: int | None) -> None:
        end = self.num_rows + (self._length or len(sequence))
        self.sequences.append(sequence)
        self.follows.append(follows)
        self.spans[part].extend(range(self.num_rows, end))
        self.num_rows = end

    @property
    def lengths(self) -> list[int]:
        """Rows of each sequence, padding included."""
        return [self._length or len(sequence) for sequence in self.sequences]

    @property
    def block(self) -> int | None:
        """Block size that divides every pass's rows; None if unpadded or if blocks are too many."""
        size = gcd(*map(len, self.spans))
        return (
            size if self._length and self.num_rows <= MOST_BLOCKS * len(self.spans) * size else None
        )

    def padded(self, hidden: torch.Tensor) -> torch.Tensor:
        """Pad rows of sequences laid end to end by repeating each sequence's last row."""
        if self._length is None or len(hidden) == self.num_rows:
            return hidden
        ends = accumulate(len(sequence) for sequence in self.sequences)
        rows = [
            end - len(sequence) + min(place, len(sequence) - 1)
            for sequence, end in zip(self.sequences, ends, strict=True)
            for place in range(self._length)
        ]
        return hidden.index_select(0, torch.tensor(rows, device=hidden.device))
