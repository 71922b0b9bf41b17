"""A search that adapts to its budget: operators compete for attempts, and islands begin new lines.

    budget = SearchBudget(num_attempts=1000)
    database = AdaptiveDatabase(ProgramDatabaseConfig(), seed=7, budget=budget)
    database.tell(first_program)
    plan = database.ask(1)            # Plan(operator="best", ...)
    database.tell(record)             # or tell_failure(FailedRecord(...)), with plan.operator

While the best program improves, most attempts are its children. If it stops improving, draws by
rank, crossovers and new lines get a larger share; the attempts left limit the number of lines.
Parents are drawn from told programs, so that no attempt waits for another. `ask` changes nothing.
State beyond the population is rebuilt by telling the same records again.
"""

import math
from bisect import insort
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from rookery.search.programs.bandit import Arm, OperatorBandit, OperatorRecord
from rookery.search.programs.database import ProgramDatabase, ProgramDatabaseConfig
from rookery.search.programs.population import Plan
from rookery.search.programs.program import FailedRecord, Member, ScoredProgram
from rookery.seeding import stream

__all__ = ["AdaptiveDatabase", "SearchBudget"]

NUM_RANKED = 60
"""Programs within reach of draws by rank."""
RANK_P, MATE_P = 0.3, 0.1
"""Parameters of the geometric draws of a parent and of a mate: probability of the best."""
NUM_IMPROVERS = 4
LINE_ATTEMPTS = 200
"""Attempts left per line beside the main one: a line without time to climb is not begun."""
FRESH_TURNS = 4
NUM_FAILED = 10
"""Failed programs kept for repair."""
NUM_WATCHED, LEAST_RECURRING = 20, 3
"""A failure recurs if this many of the last attempts had it."""
MAX_CHARS = 200
"""Most characters of a failure's message in a prompt."""
NOT_THE_PROGRAM = frozenset({"model", "judge", "evaluation"})
"""Kinds of failures that no program can avoid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchBudget:
    """Limits of a search."""

    num_attempts: int
    max_cost: float | None = None
    """In the unit of `ScoredProgram.cost`."""


class AdaptiveDatabase(ProgramDatabase):
    """Islands are lines: 0 is the main one, the others begin with a child of the first program."""

    def __init__(
        self,
        config: ProgramDatabaseConfig,
        *,
        seed: int,
        budget: SearchBudget,
        arms: Iterable[Arm] = (),
    ) -> None:
        super().__init__(config, seed=seed, arms=arms)
        self._budget = budget
        self._operators = OperatorBandit()
        self._first: Member | None = None
        self._ranked: list[tuple[float, int, Member]] = []
        """Best first, of equal scores the newest, so that the search drifts over plateaus."""
        self._improvers: deque[Member] = deque(maxlen=NUM_IMPROVERS)
        self._lines: dict[int, Member] = {}
        """The best program of each line beside the main one, by island."""
        self._num_lines = 0
        self._failed: deque[tuple[int, FailedRecord]] = deque(maxlen=NUM_FAILED)
        """Failed programs without an attempt at repair, with the number of attempts before each."""
        self._watched: deque[FailedRecord | None] = deque(maxlen=NUM_WATCHED)

    @property
    def operators(self) -> tuple[OperatorRecord, ...]:
        return tuple(self._operators.records.values())

    def tell(self, record: ScoredProgram) -> Member:
        before = self.best
        member = super().tell(record)
        insort(self._ranked, (-member.score, -member.serial, member))
        del self._ranked[NUM_RANKED:]
        if record.attempt == 0 or before is None:
            if self._first is None or member.rank < self._first.rank:
                self._first = member
            return member
        gain = max(0.0, member.score - before.score)
        self._count(record.operator, gain=gain, cost=record.cost, is_accepted=True)
        self._watched.append(None)
        if record.parent_score is not None and member.score > record.parent_score:
            self._improvers.append(member)
        self._follow_line(member)
        self._note_mended(record.mends)
        return member

    def tell_failure(self, failed: FailedRecord) -> None:
        super().tell_failure(failed)
        self._count(failed.operator, gain=0.0, cost=failed.cost, is_accepted=False)
        self._watched.append(failed)
        self._note_mended(failed.mends)
        if failed.can_be_mended and not failed.mends:
            self._failed.append((self._operators.num_told, failed))

    def _note_mended(self, id: str) -> None:
        if known := next((pair for pair in self._failed if pair[1].id == id), None):
            self._failed.remove(known)

    def ask(self, attempt: int) -> Plan:
        if self._first is None:
            raise ValueError("Nothing was told yet: tell the programs to start from first.")
        rng = stream(self._seed, "program", attempt)
        horizon, num_left = self._horizon(attempt)
        num_lines = int(min(self._config.num_islands - 1, num_left // LINE_ATTEMPTS))
        fresh = self._find_fresh(attempt)
        are_due = self._find_due(num_lines=num_lines, is_fresh=fresh is not None)
        shares = self._operators.shares(are_due, horizon=horizon, num_left=num_left)
        operator = _draw(shares, rng)
        if operator == "repair":
            failed = fresh or self._failed[int(rng.integers(len(self._failed)))][1]
            return self._plan(attempt, operator, _as_repair(failed), self._top())
        parent, mates = self._draw_parents(operator, rng)
        island = 0
        if operator == "restart":
            island = 1 + self._num_lines % num_lines
        elif operator == "elite":
            island = parent.record.island
        top = () if island else self._top()
        plan = self._plan(attempt, operator, _as_base(parent), top)
        return replace(plan, island=island, inspirations=mates)

    def _plan(self, attempt: int, operator: str, base: "_Base", top: tuple[str, ...]) -> Plan:
        return Plan(
            attempt=attempt,
            island=0,
            parent=base.parent,
            parent_score=base.score,
            generation=base.generation,
            inspirations=(),
            top=top,
            arm=self._bandit.draw(stream(self._seed, "arm", attempt)),
            operator=operator,
            mends=base.mends,
            failures=self._recurring(),
        )

    def _draw_parents(
        self, operator: str, rng: np.random.Generator
    ) -> tuple[Member, tuple[str, ...]]:
        """Return a parent, and programs to combine it with."""
        assert self._first is not None
        match operator:
            case "improver":
                return self._improvers[int(rng.integers(len(self._improvers)))], ()
            case "top":
                return self._draw_ranked(rng), ()
            case "crossover":
                parent = self._main(rng) if rng.random() < 0.5 else self._draw_ranked(rng)
                others = [one for _, _, one in self._ranked if one.id != parent.id]
                return parent, (others[_geometric(rng, MATE_P, len(others))].id,)
            case "restart":
                return self._first, ()
            case "elite":
                return self._draw_line(rng), ()
        return self._main(rng), ()

    def _main(self, rng: np.random.Generator) -> Member:
        """Return the best program; with objectives, draw from the Pareto front."""
        if len(front := self._population.front):
            return self.members[front.draw(rng, among=self.members)]
        return self._ranked[0][2]

    def _draw_ranked(self, rng: np.random.Generator) -> Member:
        return self._ranked[_geometric(rng, RANK_P, len(self._ranked))][2]

    def _draw_line(self, rng: np.random.Generator) -> Member:
        """Draw the best line in half of the cases, else any line."""
        lines = sorted(self._lines.values(), key=lambda member: member.rank)
        return lines[0 if rng.random() < 0.5 else int(rng.integers(len(lines)))]

    def _find_fresh(self, attempt: int) -> FailedRecord | None:
        """Return a recent failure whose parent is as good as the best. Only one of FRESH_TURNS
        successive attempts gets it, because two in flight should not repair the same program."""
        best, oldest = self._ranked[0][2].score, self._operators.num_told - FRESH_TURNS
        return next(
            (
                failed
                for num_told, failed in reversed(self._failed)
                if num_told > oldest
                and failed.parent_score >= best
                and (attempt + num_told) % FRESH_TURNS == 0
            ),
            None,
        )

    def _find_due(self, *, num_lines: int, is_fresh: bool) -> dict[str, bool]:
        """Return the drawable operators, and whether each is due or drawn by weight only."""
        can_be_drawn = {
            "best": True,
            "improver": bool(self._improvers),
            "top": len(self._ranked) > 2,
            "crossover": len(self._ranked) > 2,
            "repair": bool(self._failed),
            "restart": num_lines > 0,
            "elite": bool(self._lines),
        }
        return {
            name: is_fresh or name != "repair"
            for name, drawable in can_be_drawn.items()
            if drawable
        }

    def _top(self) -> tuple[str, ...]:
        return tuple(one.id for _, _, one in self._ranked[: self._config.sampling.num_top])

    def _horizon(self, attempt: int) -> tuple[float, float]:
        """Return all attempts and the attempts left, by the tighter of the limits."""
        num_left = float(max(0, self._budget.num_attempts - attempt))
        if self._budget.max_cost is not None and self._operators.num_told:
            left = self._budget.max_cost - self._operators.cost
            num_left = min(num_left, max(0.0, left / self._operators.mean_cost))
        return attempt + num_left, num_left

    def _count(self, name: str, *, gain: float, cost: float, is_accepted: bool) -> None:
        horizon, _ = self._horizon(self._operators.num_told + 1)
        self._operators.tell(
            name or "best", gain=gain, cost=cost, is_accepted=is_accepted, horizon=horizon
        )

    def _follow_line(self, member: Member) -> None:
        """Let a restart begin a line on its island, and a better or equal child continue one."""
        island, operator = member.record.island, member.record.operator
        if operator == "restart":
            self._num_lines += 1
            self._lines[island] = member
        elif operator == "elite" and member.score >= self._lines[island].score:
            self._lines[island] = member

    def _recurring(self) -> tuple[str, ...]:
        failed = [one for one in self._watched if one and one.kind not in NOT_THE_PROGRAM]
        counts = Counter(map(_failure_name, failed))
        last = {_failure_name(one): one.message for one in failed}
        return tuple(
            f"{count} of the last {len(self._watched)} answers failed ({name}): "
            f"{' '.join(last[name].split())[:MAX_CHARS]}"
            for name, count in sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
            if count >= LEAST_RECURRING
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Base:
    """Parent, or failed program, that a child is made from."""

    parent: str
    score: float
    generation: int
    """Generation of the child."""
    mends: str = ""


def _as_base(parent: Member) -> _Base:
    generation = parent.record.generation + 1
    return _Base(parent=parent.id, score=parent.score, generation=generation)


def _as_repair(failed: FailedRecord) -> _Base:
    return _Base(
        parent=failed.parent,
        score=failed.parent_score,
        generation=failed.generation,
        mends=failed.id,
    )


def _draw(shares: dict[str, float], rng: np.random.Generator) -> str:
    names, sums = list(shares), np.cumsum(list(shares.values()))
    place = int(np.searchsorted(sums, rng.random() * sums[-1], side="right"))
    return names[min(place, len(names) - 1)]


def _geometric(rng: np.random.Generator, chance: float, count: int) -> int:
    """Draw a place below `count`, geometrically; `chance` is the probability of the first."""
    return min(int(math.log1p(-rng.random()) / math.log1p(-chance)), count - 1)


def _failure_name(failed: FailedRecord) -> str:
    """Return `error NameError`, or the kind alone."""
    name = failed.message.partition(":")[0]
    return (
        f"{failed.kind} {name}" if failed.kind == "error" and name.isidentifier() else failed.kind
    )
