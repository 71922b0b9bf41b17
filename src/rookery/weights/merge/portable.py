"""The passes in numpy, block by block in the cache: for where there is no compiler."""

import numpy as np

from rookery.weights.merge.blend import NEXT_TO_NOTHING, Blend, Floats, Integers, Trim
from rookery.weights.merge.blocks import BLOCK, blocks
from rookery.weights.merge.magnitude import kth_magnitude

__all__ = ["Portable"]


class Portable:
    """An Engine. numpy's calls on a block cost half of torch's and leave other threads running."""

    def limits(self, row: Floats, *, bounds: Integers, counts: Integers) -> Floats:
        return np.array(
            [
                kth_magnitude(row[begin:end], k=k)
                for (begin, end), k in zip(bounds.tolist(), counts.tolist(), strict=True)
            ],
            np.float32,
        )

    def blend(self, blend: Blend[Floats]) -> None:
        ballot = _Ballot(blend)
        for stretch, (start, stop) in enumerate(blend.bounds.tolist()):
            for begin, end in blocks(start, stop):
                ballot.vote(stretch, begin, end)
                if blend.weights is None:
                    ballot.add(blend.out[begin:end])
                elif len(blend.rows) == 2:
                    ballot.elect_pair(blend.out[begin:end])
                else:
                    ballot.elect(blend.out[begin:end])


class _Ballot:
    """The memory of one pass: set the votes of a block, then count them into the result."""

    def __init__(self, blend: Blend[Floats]) -> None:
        self._blend = blend
        self._weights = [] if blend.weights is None else list(blend.weights)
        self._votes = np.empty((len(blend.rows), BLOCK), np.float32)
        self._work = np.empty((3, BLOCK), np.float32)
        self._flags = np.empty((2, BLOCK), np.bool_)

    def vote(self, stretch: int, begin: int, end: int) -> None:
        """The votes are the parents' entries, trimmed or dropped."""
        entries, size = self._blend.entries, end - begin
        for parent, row in enumerate(self._blend.rows):
            source, vote = row[begin:end], self._votes[parent, :size]
            if isinstance(entries, Trim):
                np.abs(source, out=vote)
                np.greater_equal(vote, entries.limits[parent][stretch], out=self._flags[0, :size])
                np.copyto(vote, self._flags[0, :size])
                np.multiply(source, vote, out=vote)
            else:
                start = entries.starts[parent, stretch]
                start += begin - self._blend.bounds[stretch, 0]
                np.multiply(source, entries.tables[parent][start : start + size], out=vote)

    def add(self, out: Floats) -> None:
        np.copyto(out, self._votes[0, : out.size])
        for vote in self._votes[1:, : out.size]:
            np.add(out, vote, out=out)

    def elect_pair(self, out: Floats) -> None:
        """The weighted sum where both votes have its sign, else the one that has it, else 0."""
        (first, second), (total, part, both) = self._votes[:, : out.size], self._work[:, : out.size]
        has_first, has_second = self._flags[:, : out.size]
        self._sum(total, part)
        self._agrees(first, total, flags=has_first, out=part)
        np.multiply(first, part, out=out)
        self._agrees(second, total, flags=has_second, out=part)
        np.multiply(second, part, out=part)
        np.add(out, part, out=out)
        # Bits of the sum where both agree: numpy's selections by a mask take ten times as long.
        np.logical_and(has_first, has_second, out=has_first)
        mask, bits, total_bits = both.view(np.int32), out.view(np.int32), total.view(np.int32)
        np.copyto(mask, has_first)
        np.negative(mask, out=mask)
        np.bitwise_xor(bits, total_bits, out=total_bits)
        np.bitwise_and(total_bits, mask, out=total_bits)
        np.bitwise_xor(bits, total_bits, out=bits)
        np.add(out, 0, out=out)  # -0 becomes 0

    def elect(self, out: Floats) -> None:
        """The weighted mean of the votes that have the sign of the weighted sum of all.

        Where the sum is zero no sign is elected and the result is zero.
        """
        total, part, weight_of = self._work[:, : out.size]
        flags = self._flags[0, : out.size]
        self._sum(total, part)
        out.fill(0)
        weight_of.fill(0)
        for vote, weight in zip(self._votes[:, : out.size], self._weights, strict=True):
            self._agrees(vote, total, flags=flags, out=part)
            np.multiply(part, weight, out=part)
            np.add(weight_of, part, out=weight_of)
            np.multiply(vote, part, out=part)
            np.add(out, part, out=out)
        np.add(weight_of, NEXT_TO_NOTHING, out=weight_of)
        np.divide(out, weight_of, out=out)

    def _sum(self, total: Floats, part: Floats) -> None:
        (first, lead), *others = zip(self._votes[:, : total.size], self._weights, strict=True)
        np.multiply(first, lead, out=total)
        for vote, weight in others:
            np.multiply(vote, weight, out=part)
            np.add(total, part, out=total)

    @staticmethod
    def _agrees(vote: Floats, total: Floats, *, flags: np.ndarray, out: Floats) -> None:
        """1 where the vote has the sign of the total, else 0."""
        np.multiply(vote, total, out=out)
        np.greater(out, 0, out=flags)
        np.copyto(out, flags)
