"""Which candidates of a race are proven to score below which rivals.

    rivals = RivalTests(shape=(num_candidates, num_tasks), num_followed=64, span=1.0, alpha=0.001)
    rivals.see(scores, rows=rows, seen=seen, end=32)  # those rows have seen 32 tasks now
    rivals.follow(order, scores=scores, seen=seen)    # who is worth comparing with
    rivals.is_proven                                  # [candidate, rival]: the rival is better

Only pairs with a followed rival are played. A rival that is followed later plays what it missed.
"""

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from rookery.search.sequential import MeanTests

__all__ = ["RivalTests"]


class RivalTests:
    """Sequential tests of pairs of candidates. Owned and changed by a race."""

    def __init__(
        self, shape: tuple[int, int], *, num_followed: int, span: float, alpha: float
    ) -> None:
        """`shape` is candidates x tasks; two scores on one task differ by at most `span`."""
        num_candidates, num_tasks = shape
        width = min(num_candidates, num_followed)
        self._pairs = MeanTests(
            (num_candidates, width), size=num_tasks, null=0.0, limits=(-span, span), alpha=alpha
        )
        self._followed = np.full(width, -1)
        if width == num_candidates:
            self._followed = np.arange(width)
        self._picked_at = 0
        self.is_proven = np.zeros((num_candidates, num_candidates), dtype=bool)
        self.is_certain = np.zeros((num_candidates, num_candidates), dtype=bool)

    def see(
        self,
        scores: NDArray[np.float64],
        *,
        rows: NDArray[np.int64],
        seen: NDArray[np.int64],
        end: int,
    ) -> None:
        """Let `rows` see the tasks up to `end`; `seen` counts every candidate's tasks before that.

        A pair plays a task once both have seen it.
        """
        is_new = np.zeros(len(seen), dtype=bool)
        is_new[rows] = True
        cuts = [*np.unique(seen[seen < end]), end]
        for first, last in pairwise(cuts):
            new = is_new & (seen <= first)
            if new.any():
                old = ~new & (seen > first)
                self._play(scores, new, new | old, first=first, last=last)
                self._play(scores, old, new, first=first, last=last)

    def follow(
        self, order: NDArray[np.int64], *, scores: NDArray[np.float64], seen: NDArray[np.int64]
    ) -> None:
        """Follow the first of `order`, best first, if the number of tasks has doubled since the
        last pick: playing what newcomers missed then costs at most as much as was played."""
        now = int(seen.max())
        if len(self._followed) == len(seen) or now < 2 * self._picked_at:
            return
        self._picked_at = now
        picked = order[: len(self._followed)]
        newcomers = [row for row in picked if row not in set(self._followed.tolist())]
        is_free = ~np.isin(self._followed, picked)
        columns = np.flatnonzero(is_free)[: len(newcomers)]
        self._followed[is_free] = -1
        self._followed[columns] = newcomers
        self._pairs.reset((slice(None), columns))
        cuts = [0, *np.unique(seen[seen > 0])]
        is_newcomer = np.isin(np.arange(len(seen)), newcomers)
        for first, last in pairwise(cuts):
            has = seen > first
            self._play(scores, has, has & is_newcomer, first=first, last=last)

    def _play(
        self,
        scores: NDArray[np.float64],
        candidates: NDArray[np.bool_],
        rivals: NDArray[np.bool_],
        *,
        first: int,
        last: int,
    ) -> None:
        """The tasks from `first` to `last`, each candidate with each followed rival."""
        rows = np.flatnonzero(candidates)
        columns = np.flatnonzero((self._followed >= 0) & rivals[self._followed])
        if not len(rows) or not len(columns):
            return
        theirs = self._followed[columns]
        tasks = slice(first, last)
        lead = scores[theirs, tasks].T[:, None, :] - scores[rows, tasks].T[:, :, None]
        self._pairs.see(lead, first=first, where=np.ix_(rows, columns))
        here, pairs = np.ix_(rows, theirs), np.ix_(rows, columns)
        self.is_proven[here] |= self._pairs.is_proven[pairs]
        self.is_certain[here] |= self._pairs.is_certain[pairs]
