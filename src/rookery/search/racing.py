"""Racing: evaluate all candidates on the same tasks block by block, drop those who cannot win.

    race = start(["a", "b", "c"], tasks, config=RaceConfig(), rng=stream(seed, "race", generation))
    while race.asks:
        rewards = evaluate(race.asks)       # for each candidate a reward per task asked for
        race = tell(race, rewards)
    race.leader, race.estimates

**The promise.** The tasks come in random order. A candidate that evaluating everybody on every
task would place among the best `keep` is dropped with probability at most 1 - `confidence`,
however many blocks are looked at.

**The test.** For each pair, the differences d_1, d_2, ... of their rewards are drawn without
replacement from the differences on all T tasks. If their total is not above 0, then after t of
them, with sum S, the next has mean at most m = -S / (T - t). A gambler who stakes the share f of
her wealth on "more than m" multiplies it by 1 + f (d - m) / (range + m) each time; under that
hypothesis her wealth grows to 1 / alpha with probability at most alpha, at any time (Ville).
`STAKES` are played side by side and averaged; alpha = (1 - confidence) / (candidates - 1) covers
all rivals of one candidate. When S exceeds what the remaining tasks can give back the hypothesis
is impossible, not only unlikely: that claim needs no chance at all.

Tasksets with weights race on contributions: reward times the task's weight, scaled so that their
mean is the score, with `high` the largest contribution.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from rookery.config import Config
from rookery.search.streams import shuffled

__all__ = ["STAKES", "Dropped", "Race", "RaceConfig", "start", "tell"]

STAKES = np.array([0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9])
"""Shares of the largest safe stake. The best one for a pair is (wins - losses) / (wins + losses)
of the tasks on which they differ; averaging over ten costs at most a factor 10 of wealth."""

TOLERANCE = 1e-9
"""Relative rounding allowance of sums of rewards: a lead must exceed it to be certain."""


class RaceConfig(Config):
    """When candidates are dropped before they have seen every task."""

    enabled: bool = True
    """False evaluates everybody on every task."""
    confidence: float = Field(default=0.95, gt=0.5, lt=1.0)
    """Probability that a candidate which belongs to the best `keep` is not dropped."""
    keep: int = Field(default=1, ge=1)
    """Drop a candidate only when this many others are better: 1 looks for the winner, the size of
    the population for the survivors."""
    block: int = Field(default=16, ge=1)
    """Tasks between two looks. Looks cost no confidence: small blocks drop earlier, large ones
    fill the engine better."""
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
    """beaten: by the sequential test; impossible: not even all remaining tasks would do; failed:
    its evaluation failed."""
    num_tasks: int
    """Tasks it had rewards for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """The race as a value. Rewards are in the order of `tasks`, which is random."""

    config: RaceConfig
    candidates: tuple[str, ...]
    tasks: tuple[str, ...]
    rewards: Mapping[str, tuple[float, ...]]
    dropped: Mapping[str, Dropped]

    @property
    def live(self) -> tuple[str, ...]:
        """Those still in, in the order of the start."""
        return tuple(id for id in self.candidates if id not in self.dropped)

    @property
    def asks(self) -> dict[str, tuple[str, ...]]:
        """The tasks to evaluate each live candidate on next; empty when the race is over.

        Everybody is asked for the same block, but for a candidate that came back after a rival
        failed: it is also asked for what it missed.
        """
        seen = max((len(self.rewards[id]) for id in self.live), default=0)
        end = seen + self.config.block
        asks = {id: self.tasks[len(self.rewards[id]) : end] for id in self.live}
        return {id: tasks for id, tasks in asks.items() if tasks}

    @property
    def num_evaluations(self) -> int:
        """Rewards used so far; without racing it is candidates times tasks at the end."""
        return sum(len(rewards) for rewards in self.rewards.values())

    @property
    def leader(self) -> str | None:
        """The live candidate with the highest mean, the earlier one on a tie.

        None when all failed.
        """
        return max(self.live, key=lambda id: _mean(self.rewards[id]), default=None)

    @property
    def estimates(self) -> dict[str, float | None]:
        """Each candidate's mean on all tasks asked so far; None for failed ones.

        A dropped one saw a prefix only: its estimate is the leader's mean on everything plus
        their mean difference on that prefix, so that easy or hard tasks at the start cancel out.
        """
        best = self.rewards[self.leader] if self.leader is not None else ()
        return {id: self._estimate(id, best=best) for id in self.candidates}

    def _estimate(self, candidate: str, *, best: tuple[float, ...]) -> float | None:
        own = self.rewards[candidate]
        fate = self.dropped.get(candidate)
        if not own or not best or (fate is not None and fate.reason == "failed"):
            return None
        return _mean(own) if fate is None else _mean(best) + _mean(own) - _mean(best[: len(own)])


def start(
    candidates: Sequence[str],
    tasks: Sequence[str],
    *,
    config: RaceConfig,
    rng: np.random.Generator,
) -> Race:
    """A race of all candidates over the tasks in random order."""
    for what, ids in (("candidates", candidates), ("tasks", tasks)):
        if not ids or len(set(ids)) != len(ids):
            raise ValueError(f"Got {len(ids)} {what}: a race needs at least one and no id twice.")
    return Race(
        config=config,
        candidates=tuple(candidates),
        tasks=shuffled(tasks, rng=rng),
        rewards=dict.fromkeys(candidates, ()),
        dropped={},
    )


def tell(race: Race, block: Mapping[str, Sequence[float] | None]) -> Race:
    """The race after one block: for each candidate asked its rewards in the order asked.

    None in place of the rewards says that the candidate's evaluation failed: it is out, and so
    is what it proved about others. Who was dropped on its account alone comes back.
    """
    _check(race, block)
    rewards = dict(race.rewards)
    dropped = dict(race.dropped)
    for id, told in block.items():
        if told is None:
            dropped[id] = Dropped(reason="failed", num_tasks=len(rewards[id]))
        else:
            rewards[id] += tuple(float(reward) for reward in told)
    after = replace(race, rewards=rewards, dropped=dropped)
    if not race.config.enabled:
        return after
    return _judge(after, is_settled=None not in block.values())


def _judge(race: Race, *, is_settled: bool) -> Race:
    """Drop the hopeless, never the leader; unless `is_settled`, who was dropped may come back."""
    failed = {id: fate for id, fate in race.dropped.items() if fate.reason == "failed"}
    judged = dict(race.dropped if is_settled else failed)
    table = _table(race)
    for row, id in enumerate(race.candidates):
        # Once a candidate has seen every task nothing is left to save, and its mean is complete.
        is_complete = len(race.rewards[id]) == len(race.tasks)
        if id in judged or id == race.leader or is_complete:
            continue
        rivals = [r for r, rival in enumerate(race.candidates) if rival not in {id, *failed}]
        reason = _verdict(race, table[rivals] - table[row])
        if reason is not None:
            judged[id] = race.dropped.get(id) or Dropped(
                reason=reason, num_tasks=len(race.rewards[id])
            )
    # Proofs hold with high probability, not always: they may go round in a circle.
    is_empty = len(judged) == len(race.candidates)
    return replace(race, dropped=failed if is_empty else judged)


def _table(race: Race) -> NDArray[np.float64]:
    """Rewards [candidates, tasks seen], NaN where a candidate has none."""
    longest = max(len(rewards) for rewards in race.rewards.values())
    table = np.full((len(race.candidates), longest), np.nan)
    for row, id in enumerate(race.candidates):
        table[row, : len(race.rewards[id])] = race.rewards[id]
    return table


def _verdict(race: Race, lead: NDArray[np.float64]) -> Literal["beaten", "impossible"] | None:
    """Whether at least `keep` rivals are better, given their lead [rivals, tasks], NaN unseen."""
    span = race.config.high - race.config.low
    is_seen = ~np.isnan(lead)
    lead = np.where(is_seen, lead, 0.0)
    sums = np.cumsum(lead, axis=1)
    left = len(race.tasks) - np.arange(1, lead.shape[1] + 1)
    surplus = np.where(is_seen, sums - span * left, -np.inf)
    is_certain = (surplus > TOLERANCE * span * len(race.tasks)).any(axis=1)
    if np.count_nonzero(is_certain) >= race.config.keep:
        return "impossible"
    alpha = (1.0 - race.config.confidence) / max(1, len(race.candidates) - 1)
    means = -(sums - lead) / (left + 1)
    wealth = _log_wealth(np.where(is_seen, lead - means, 0.0), room=span + means, span=span)
    is_beaten = is_certain | (wealth >= -math.log(alpha)).any(axis=1)
    return "beaten" if np.count_nonzero(is_beaten) >= race.config.keep else None


def _log_wealth(
    surprise: NDArray[np.float64], *, room: NDArray[np.float64], span: float
) -> NDArray[np.float64]:
    """[rivals, tasks]: log of the gambler's wealth after each task, averaged over the stakes."""
    # Where the hypothesis leaves no room to be wrong there is no stake to place.
    has_room = room > TOLERANCE * span
    gains = np.divide(surprise, room, out=np.zeros_like(surprise), where=has_room)
    logs = np.cumsum(np.log1p(STAKES[:, None, None] * gains), axis=2)
    top = logs.max(axis=0)
    mixture: NDArray[np.float64] = top + np.log(np.exp(logs - top).mean(axis=0))
    return mixture


def _mean(rewards: Sequence[float]) -> float:
    return math.fsum(rewards) / len(rewards) if rewards else -math.inf


def _check(race: Race, block: Mapping[str, Sequence[float] | None]) -> None:
    asks = race.asks
    if set(block) != set(asks):
        raise ValueError(f"Got rewards of {sorted(block)}: the race asked for {sorted(asks)}.")
    low, high = race.config.low, race.config.high
    for id, rewards in block.items():
        if rewards is None:
            continue
        if len(rewards) != len(asks[id]):
            raise ValueError(f"Got {len(rewards)} rewards of {id}: {len(asks[id])} were asked.")
        if not all(low <= reward <= high for reward in rewards):
            raise ValueError(
                f"A reward of {id} lies outside {low} to {high}: set low and high of the race to "
                "the smallest and the largest reward the scorer can give."
            )
