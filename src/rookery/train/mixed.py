"""Passes of several requests as one: which of them, and where their rows lie.

    ada: passes of 600 and 500 tokens     bob: 300     cyd: 400     at most 1,024 tokens
    mixed: ada 600 + bob 300,   ada 500 + cyd 400

Each request keeps the passes that it has alone: sums of floating-point numbers depend on what is
summed together.
"""

from collections.abc import Iterator, Sequence

from rookery.train.lora_trainee import LoraTrainee
from rookery.train.packing import PackedPass
from rookery.train.running_request import RunningRequest
from rookery.types import TokenIds

__all__ = ["MixedRows", "Turn", "mixed_turns"]

Turn = tuple[RunningRequest[LoraTrainee], PackedPass]
"""One pass of one request."""


def mixed_turns(
    running: Sequence[tuple[RunningRequest[LoraTrainee], int]], *, pass_tokens: int
) -> Iterator[list[Turn]]:
    """What to compute together, until all passes of all requests are done. Each comes with the
    first layer that it trains; those of one such layer share passes. A request that fails
    meanwhile is left out from then on."""
    done = [0] * len(running)
    while True:
        turns: list[Turn] = []
        layer, room = None, pass_tokens
        for place, (request, first) in enumerate(running):
            if done[place] == len(request.passes) or request.has_failed:
                continue
            packed = request.passes[done[place]]
            if not turns or (first == layer and packed.num_tokens <= room):
                turns.append((request, packed))
                layer, room = first, room - packed.num_tokens
                done[place] += 1
        if not turns:
            return
        yield turns


class MixedRows:
    """The sequences of several passes, laid end to end by length: neighbours of equal length are
    attended in one call."""

    def __init__(self, passes: Sequence[PackedPass]) -> None:
        self.sequences: list[TokenIds] = []
        self.own: list[list[int]] = [[] for _ in passes]
        """Of each pass: where its rows are, in its own order."""
        self.num_rows = 0
        order = [
            (len(sequence), part, number)
            for part, packed in enumerate(passes)
            for number, sequence in enumerate(packed.sequences)
        ]
        for length, part, number in sorted(order):
            self.sequences.append(passes[part].sequences[number])
            self.own[part].extend(range(self.num_rows, self.num_rows + length))
            self.num_rows += length

    @property
    def lengths(self) -> list[int]:
        return [len(sequence) for sequence in self.sequences]
