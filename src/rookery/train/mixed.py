"""Passes of several requests as one: which of them, and where their rows lie.

    ada: passes of 600 and 500 tokens     bob: 300     cyd: 400     at most 1,024 tokens
    mixed: ada 600 + bob 300,   ada 500 + cyd 400

Each request keeps the passes that it has alone: sums of floating-point numbers depend on what is
summed together.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import gcd

import torch

from rookery.train.lora_trainee import LoraTrainee
from rookery.train.packing import PackedPass
from rookery.train.running_request import RunningRequest
from rookery.types import TokenIds

__all__ = ["MixedRows", "Turn", "mixed_turns"]

CHEAP_ROWS = 4096
"""So many rows, padding too, take a GPU as long as few: it is busy with starting operations."""
MOST_PADDING = 1.25
"""Above, how many times the rows without padding there may be."""

MOST_BLOCKS = 2
"""Blocks per pass: each has a copy of its factors, where a pass has several."""

Turn = tuple[RunningRequest[LoraTrainee], PackedPass]
"""One pass of one request."""


def mixed_turns(
    running: Sequence[tuple[RunningRequest[LoraTrainee], int]], *, pass_tokens: int
) -> Iterator[list[Turn]]:
    """What to compute together, until all passes of all requests are done. Each comes with the
    first layer that it trains; those of one such layer share passes, if all are learned from or
    none is. A request that fails meanwhile is left out from then on."""
    done = [0] * len(running)
    while True:
        turns: list[Turn] = []
        kind, room = None, pass_tokens
        for place, (request, first) in enumerate(running):
            if done[place] == len(request.passes) or request.has_failed:
                continue
            packed = request.passes[done[place]]
            own_kind = first, packed.is_learned
            if not turns or (own_kind == kind and packed.num_tokens <= room):
                turns.append((request, packed))
                kind, room = own_kind, room - packed.num_tokens
                done[place] += 1
        if not turns:
            return
        yield turns


class MixedRows:
    """The sequences of several passes, laid end to end by length: neighbours of equal length are
    attended in one call.

    Where `room` has rows enough they are laid in their order, each padded at its end to the
    longest, unless that makes many more rows: then all are attended in one call, and the rows of a
    pass are whole blocks. Nothing sees the padding, and it has no gradient.
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
        self._length = longest if longest * len(order) <= room else None
        """The rows of each sequence with its padding; None: there is none."""
        self.sequences: list[TokenIds] = []
        self.own: list[list[int]] = [[] for _ in passes]
        """Of each pass: where its rows are, in its own order."""
        self.spans: list[list[int]] = [[] for _ in passes]
        """The same with padding."""
        self.num_rows = 0
        for length, part, number in order if self._length else sorted(order):
            num = self._length or length
            self.sequences.append(passes[part].sequences[number])
            self.own[part].extend(range(self.num_rows, self.num_rows + length))
            self.spans[part].extend(range(self.num_rows, self.num_rows + num))
            self.num_rows += num

    @property
    def lengths(self) -> list[int]:
        """With padding."""
        return [self._length or len(sequence) for sequence in self.sequences]

    @property
    def block(self) -> int | None:
        """Rows that whole blocks of every pass can have; None: they would be many, or uneven."""
        size = gcd(*map(len, self.spans))
        return (
            size if self._length and self.num_rows <= MOST_BLOCKS * len(self.spans) * size else None
        )

    def padded(self, hidden: torch.Tensor) -> torch.Tensor:
        """Rows of the sequences end to end, with padding: the last row of each again."""
        if self._length is None or len(hidden) == self.num_rows:
            return hidden
        ends = accumulate(len(sequence) for sequence in self.sequences)
        rows = [
            end - len(sequence) + min(place, len(sequence) - 1)
            for sequence, end in zip(self.sequences, ends, strict=True)
            for place in range(self._length)
        ]
        return hidden.index_select(0, torch.tensor(rows, device=hidden.device))
