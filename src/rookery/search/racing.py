"""Racing: evaluate all candidates on the same tasks block by block, and drop sure losers.

    race = start(["a", "b", "c"], tasks, config=RaceConfig(), rng=stream(seed, "race", generation))
    waves = Waves(race, size=64)            # what to ask next: annealing.py
    while asks := waves.next():
        tell(race, evaluate(asks))          # for each candidate a reward per task asked for
    race.leader, race.estimates

**Guarantee.** Tasks come in random order. A candidate that a full evaluation would rank among the
best `keep` is dropped with probability at most 1 - `confidence`, however many blocks are looked at.
The order is that of `candidate.rank_key`: first the candidates that keep all floors, by score, then
the others, by violation. The score uses `merits` if given, else rewards; floors use rewards.

**Rule.** A rival counts against a candidate if it is proven to end above it:
  - the rival keeps every floor, and the candidate misses one or has the lower score; or
  - the candidate's violation will certainly exceed the rival's, whatever the remaining tasks.
A candidate is dropped if `keep` rivals count against it. Proofs are sequential tests
(`statistics.MeanTests`): of a pair's differences for the score, of a candidate's rewards on a
source for a floor. At most keep - 1 rivals end above a candidate among the best `keep`, so dropping
it takes a false proof. The tests share 1 - confidence: tests of scores get all of it, or half if
there are floors, whose tests get the other half.

**Asking ahead.** The race looks after every `block` tasks, in order, however many answers arrive at
once. Later answers wait for their look; a dropped candidate's answers count only if it comes back.
So decisions depend neither on how much is asked at a time nor on which answers arrive together.

**Cost.** A reward is multiplied once into its candidate's tests against the best
max(`NUM_RIVALS`, 2 * keep) rivals so far. It is read again only when rivals are picked anew, each
time the number of tasks has doubled.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from rookery.config import Config
from rookery.errors import ConfigError
from rookery.search.candidate import score_factors
from rookery.search.merit import FloorTests, violation_of
from rookery.search.statistics import MeanTests, check_rewards, two_sum
from rookery.seeding import shuffled

__all__ = [
    "Dropped",
    "Race",
    "RaceConfig",
    "RivalTests",
    "paired_estimates",
    "start",
    "tell",
]

# Scores of candidates that saw different numbers of the same tasks.
#
#     paired_estimates([[1, 0, 1, 0], [0, 0]], leader=0, is_dropped=[False, True]) == [0.5, 0.0]
#
# The leader has mean 0.5 on all four tasks, and 0.5 on the two tasks of the other, which is 0.5
# below it there.


Scores = Sequence[float] | NDArray[np.float64]


def paired_estimates(
    scores: Sequence[Scores], *, leader: int | None, is_dropped: Sequence[bool]
) -> list[float | None]:
    """Return each candidate's score on all tasks asked so far; None if it saw none.

    A dropped candidate saw only a prefix. Its estimate is the leader's mean over all tasks plus
    their mean difference on that prefix, so that easy or hard tasks at the start cancel out.
    """
    best = [] if leader is None else [float(score) for score in scores[leader]]
    if not best:
        return [None] * len(scores)
    prefix = {count: _mean(best[:count]) for count in {len(row) for row in scores} if count}
    estimates: list[float | None] = []
    for row, is_out in zip(scores, is_dropped, strict=True):
        mean = _mean(row) if len(row) else None
        estimates.append(
            mean if mean is None or not is_out else _mean(best) + mean - prefix[len(row)]
        )
    return estimates


def _mean(scores: Scores) -> float:
    return math.fsum(scores) / len(scores)


# Which candidates of a race are proven to score below which rivals.
#
#     rivals = RivalTests(shape=(num_candidates, num_tasks), num_followed=64, span=1.0, alpha=0.001)
#     rivals.see(scores, rows=rows, seen=seen, end=32)  # those rows have seen 32 tasks now
#     rivals.follow(order, scores=scores, seen=seen)    # the best candidates to compare with
#     rivals.is_proven                                  # [candidate, rival]: the rival is better
#
# Only pairs with a followed rival are tested. A rival that is followed later is tested on earlier
# tasks, too.


class RivalTests:
    """Sequential tests of pairs of candidates. Its race owns and changes it."""

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
        """Test `rows` on the tasks up to `end`; `seen` counts every candidate's earlier tasks. A
        pair is tested on a task once both have seen it."""
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
        """Follow the best of `order` once the number of tasks has doubled since the last pick:
        testing newcomers on earlier tasks then at most doubles the cost."""
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
        """Test candidates against followed rivals on the tasks from `first` to `last`."""
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


Rewards = Sequence[float | None]
"""In the order of the tasks asked; None if a reward could not be measured."""

NUM_RIVALS = 64
"""Least number of followed rivals. Following fewer is always sound and only drops later. One of the
best 64 nearly always proves what any other rival would."""


class RaceConfig(Config):
    """When candidates are dropped before they have seen every task."""

    enabled: bool = True
    """If false, all candidates are evaluated on every task."""
    confidence: float = Field(default=0.95, gt=0.5, lt=1.0)
    """Probability that a candidate of the best `keep` is not dropped."""
    keep: int = Field(default=1, ge=1)
    """Drop a candidate only if this many others are better. 1 searches for the winner, the size of
    the population for the survivors."""
    block: int = Field(default=16, ge=1)
    """Tasks between two looks. Looks cost no confidence, so small blocks drop earlier. If one block
    does not fill the engine, several are asked at once."""
    low: float = 0.0
    """The smallest possible reward."""
    high: float = 1.0
    """The largest possible reward."""

    @model_validator(mode="after")
    def _check_range(self) -> "RaceConfig":
        if not 0 < self.high - self.low < math.inf:
            raise ValueError(
                f"rewards go from {self.low} to {self.high}; low must be below high: "
                "write the smallest and the largest reward a scorer can give."
            )
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """Why and when a candidate left the race."""

    reason: Literal["beaten", "impossible", "failed"]
    """beaten: by a test. impossible: the remaining tasks cannot help. failed: its evaluation
    failed."""
    num_tasks: int
    """Tasks that it had rewards for."""


class Race:
    """One race, made by `start`. Its user owns and changes it. To resume a race, start it again and
    tell it the same answers."""

    def __init__(
        self,
        candidates: Sequence[str],
        tasks: Sequence[str],
        *,
        config: RaceConfig,
        factors: NDArray[np.float64],
    ) -> None:
        """`tasks` are in the order of the race; the score is the mean of reward times factor."""
        self.config = config
        self.candidates = tuple(candidates)
        self.tasks = tuple(tasks)
        self.dropped: dict[str, Dropped] = {}
        self._factors = factors
        self._index = {id: row for row, id in enumerate(self.candidates)}
        count = len(self.candidates)
        self._rewards = np.full((count, len(self.tasks)), np.nan)
        self._scores = np.full((count, len(self.tasks)), np.nan)
        self._has_failed = np.zeros(count, dtype=bool)
        self._num_received = np.zeros(count, dtype=int)
        """Number of answers received; all tasks once the candidate failed."""
        self._seen = np.zeros(count, dtype=int)
        """Number of answers looked at."""
        self._totals = np.zeros((2, count))
        """Sums of the scores looked at, and their rounding errors."""
        self._rivals: RivalTests | None = None
        self._floors: FloorTests | None = None

    @property
    def live(self) -> tuple[str, ...]:
        """Candidates that are not dropped, in their original order."""
        return tuple(id for id in self.candidates if id not in self.dropped)

    @property
    def num_told(self) -> dict[str, int]:
        """Tasks per candidate that need no answer: answered, or beyond its failure."""
        return dict(zip(self.candidates, self._num_received.tolist(), strict=True))

    @property
    def rewards(self) -> dict[str, tuple[float, ...]]:
        """Each candidate's rewards that were looked at, in the order of `tasks`."""
        rows = zip(self.candidates, self._rewards, self._seen, strict=True)
        return {id: tuple(row[:seen].tolist()) for id, row, seen in rows}

    @property
    def num_evaluations(self) -> int:
        """Rewards used so far; without racing it ends at candidates times tasks."""
        return int(self._seen.sum())

    @property
    def leader(self) -> str | None:
        """The best live candidate, the earlier one on a tie; None if all failed."""
        row = self._leader()
        return None if row is None else self.candidates[row]

    @property
    def estimates(self) -> dict[str, float | None]:
        """Each candidate's score on all tasks so far, see `paired_estimates`; None if it failed."""
        return self._estimate(self._scores)

    @property
    def reward_estimates(self) -> dict[str, float | None]:
        """As `estimates`, but of rewards even if the score uses merits."""
        return self._estimate(self._rewards * self._factors)

    def _estimate(self, values_N_T: NDArray[np.float64]) -> dict[str, float | None]:
        failed = {id for id, fate in self.dropped.items() if fate.reason == "failed"}
        values = paired_estimates(
            [row[:seen] for row, seen in zip(values_N_T, self._seen, strict=True)],
            leader=self._leader(),
            is_dropped=[id in self.dropped for id in self.candidates],
        )
        return {
            id: None if id in failed else value
            for id, value in zip(self.candidates, values, strict=True)
        }

    def _live(self) -> NDArray[np.int64]:
        is_live = np.ones(len(self.candidates), dtype=bool)
        is_live[[self._index[id] for id in self.dropped]] = False
        return np.flatnonzero(is_live)

    def _order(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rows best first: by less violation, then by the higher mean."""
        means = np.full(len(rows), -math.inf)
        np.divide(self._totals[0, rows], self._seen[rows], out=means, where=self._seen[rows] > 0)
        if self._floors is None:
            return rows[np.argsort(-means, kind="stable")]
        violation = self._floors.standing(self._seen).so_far[rows]
        return rows[np.lexsort((np.where(violation > 0, 0.0, -means), violation))]

    def _leader(self) -> int | None:
        order = self._order(self._live())
        return int(order[0]) if len(order) else None

    def open_tests(self, sources: Sequence[str], floors: Mapping[str, float]) -> None:
        """Prepare the tests if there are more candidates than `keep`; `sources` is by task."""
        config, count = self.config, len(self.candidates)
        if not config.enabled or config.keep >= count:
            return
        alpha = (1.0 - config.confidence) / (2.0 if floors else 1.0)
        self._rivals = RivalTests(
            self._scores.shape,
            num_followed=max(NUM_RIVALS, 2 * config.keep),
            span=(config.high - config.low) * float(self._factors.max()),
            alpha=alpha / (count - 1),
        )
        if floors:
            self._floors = FloorTests(
                sources,
                floors=floors,
                num_candidates=count,
                limits=(config.low, config.high),
                alpha=alpha / (count * len(floors)),
            )

    def know(
        self,
        id: str,
        rewards: Mapping[str, float],
        *,
        merits: Mapping[str, float] | None,
        violation: float,
    ) -> None:
        """Take the rewards of a candidate known on every task, with its violation of floors."""
        in_order = None if merits is None else [merits[task] for task in self.tasks]
        self.take(id, [rewards[task] for task in self.tasks], merits=in_order)
        if self._floors is not None:
            self._floors.know(self._index[id], violation=violation)

    def take(self, id: str, rewards: Rewards | None, *, merits: Rewards | None = None) -> None:
        """Keep a candidate's next rewards until they are looked at; None is a failure."""
        row = self._index.get(id)
        if row is None:
            raise ValueError(f"Got rewards of {id}: the race is of {sorted(self.candidates)}.")
        if self._has_failed[row]:
            return  # asked before its failure arrived
        num_received = int(self._num_received[row])
        values = np.array([None] if rewards is None else list(rewards), dtype=np.float64)
        if num_received + len(values) > len(self.tasks):
            room = len(self.tasks) - num_received
            raise ValueError(f"Got {len(values)} rewards of {id}: {room} tasks are open.")
        failed = np.flatnonzero(np.isnan(values))
        end = num_received + (int(failed[0]) if len(failed) else len(values))
        values = values[: end - num_received]
        limits = (self.config.low, self.config.high) if self.config.enabled else None
        check_rewards(values, id=id, tasks=self.tasks[num_received:end], limits=limits)
        self._rewards[row, num_received:end] = values
        if merits is not None:
            values = np.array(list(merits)[: end - num_received], dtype=np.float64)
            check_rewards(values, id=id, tasks=self.tasks[num_received:end], limits=limits)
        self._scores[row, num_received:end] = values * self._factors[num_received:end]
        self._has_failed[row] = len(failed) > 0
        self._num_received[row] = len(self.tasks) if len(failed) else end

    def look_on(self) -> None:
        """Look as often as the answers allow."""
        while self.look():
            pass

    def look(self) -> bool:
        """Look at the next block if every live candidate's answers are there; else return False."""
        live = self._live()
        if not len(live):
            return False
        end = min(int(self._seen[live].max()) + self.config.block, len(self.tasks))
        if (self._seen[live] == end).all() or (self._num_received[live] < end).any():
            return False
        first = int(self._seen[live].min())
        is_missing = np.isnan(self._rewards[live, first:end])
        has_failed = (is_missing & (np.arange(first, end) >= self._seen[live, None])).any(axis=1)
        for row in live[has_failed]:
            id = self.candidates[row]
            self.dropped[id] = Dropped(reason="failed", num_tasks=int(self._seen[row]))
        self._see(live[~has_failed], end=end)
        if self._rivals is not None:
            self._judge(self._rivals, is_settled=not has_failed.any())
        return True

    def _see(self, rows: NDArray[np.int64], *, end: int) -> None:
        before = self._seen.copy()
        for first in np.unique(before[rows]):
            group = rows[before[rows] == first]
            for column in self._scores[group, first:end].T:
                self._totals[:, group] = two_sum(self._totals[:, group], column)
            if self._floors is not None:
                self._floors.see(self._rewards[group, first:end], rows=group, first=int(first))
        if self._rivals is not None:
            self._rivals.see(self._scores, rows=rows, seen=before, end=end)
        self._seen[rows] = end

    def _judge(self, rivals: RivalTests, *, is_settled: bool) -> None:
        """Drop losers, but never the leader; unless `is_settled`, dropped ones may come back."""
        order = self._order(self._live())
        rivals.follow(order, scores=self._scores, seen=self._seen)
        failed = {id: fate for id, fate in self.dropped.items() if fate.reason == "failed"}
        judged = dict(self.dropped if is_settled else failed)
        beaten, certain = self._counts(rivals, failed=[self._index[id] for id in failed])
        # A candidate that has seen every task costs nothing more, and its mean is complete.
        is_spared = (beaten < self.config.keep) | (self._seen == len(self.tasks))
        is_spared[order[:1]] = True
        for row in np.flatnonzero(~is_spared):
            id = self.candidates[row]
            is_certain = certain[row] >= self.config.keep
            fate = Dropped(
                reason="impossible" if is_certain else "beaten", num_tasks=int(self._seen[row])
            )
            judged.setdefault(id, self.dropped.get(id, fate))
        # Proofs hold with high probability, not always: they may form a cycle.
        self.dropped = failed if len(judged) == len(self.candidates) else judged

    def _counts(
        self, rivals: RivalTests, *, failed: Sequence[int]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Count the rivals that are proven, and certain, to end above each candidate."""
        is_proven, is_certain = rivals.is_proven, rivals.is_certain
        if self._floors is not None:
            standing = self._floors.standing(self._seen)
            is_worse = standing.least[:, None] > standing.most
            misses = standing.is_infeasible[:, None]
            is_proven = (standing.is_feasible & (is_proven | misses)) | is_worse
            is_certain = ((standing.most == 0.0) & is_certain) | is_worse
        is_rival = np.ones(len(self.candidates), dtype=bool)
        is_rival[list(failed)] = False
        return is_proven[:, is_rival].sum(axis=1), is_certain[:, is_rival].sum(axis=1)


def start(
    candidates: Sequence[str],
    tasks: Sequence[str],
    *,
    config: RaceConfig,
    rng: np.random.Generator,
    sources: Mapping[str, str] | None = None,
    weights: Mapping[str, float] | None = None,
    task_weights: Mapping[str, float] | None = None,
    floors: Mapping[str, float] | None = None,
    known: Mapping[str, Mapping[str, float]] | None = None,
    known_merits: Mapping[str, Mapping[str, float]] | None = None,
) -> Race:
    """Start a race of all candidates over the tasks in random order.

    `sources` is by task. With `weights` the score is the weighted mean of the sources' means, else
    the mean of all rewards; with `task_weights` these are weighted means. `floors` are lower bounds
    of plain means per source. Candidates in `known` have a reward for every task, and merits if the
    score uses them: they take part and need no answers.
    """
    for what, ids in (("candidates", candidates), ("tasks", tasks)):
        if not ids or len(set(ids)) != len(ids):
            raise ValueError(f"Got {len(ids)} {what}: a race needs at least one and no id twice.")
    sources = sources or dict.fromkeys(tasks, "")
    missing = sorted(set(floors or {}) - {sources[task] for task in tasks})
    if missing:
        raise ConfigError(
            f"There is a floor on {missing[0]!r}, and no task of that source is searched on: "
            "remove the floor, or give that taskset tasks of the search split."
        )
    order = shuffled(tasks, rng=rng)
    named = [sources[task] for task in order]
    ordered_weights = None if task_weights is None else [task_weights[task] for task in order]
    factors = score_factors(named, weights=weights, task_weights=ordered_weights)
    race = Race(candidates, order, config=config, factors=factors)
    race.open_tests(named, floors or {})
    for id, rewards in (known or {}).items():
        by_source = [(sources[task], rewards[task]) for task in tasks]
        race.know(
            id,
            rewards,
            merits=(known_merits or {}).get(id),
            violation=violation_of(by_source, floors or {}),
        )
    race.look_on()
    return race


def tell(
    race: Race,
    told: Mapping[str, Rewards | None],
    *,
    merits: Mapping[str, Rewards] | None = None,
) -> Race:
    """Take answers and make every look that they complete. Changes and returns the race.

    `told` has each candidate's next rewards in the order asked, as many as have arrived. None
    instead of a reward, or of all of them, is a failed measurement: the candidate fails when that
    task is looked at. Then its proofs against others are void, and candidates dropped only because
    of it come back. `merits` replace the rewards in the score.
    """
    for id, rewards in told.items():
        race.take(id, rewards, merits=(merits or {}).get(id))
    race.look_on()
    return race
