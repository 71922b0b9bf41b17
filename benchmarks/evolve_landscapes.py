"""Landscapes and scripted proposers on which searches over programs are compared, without models.

    best = simulate(search, problem, num_attempts=100, in_flight=1, seed=0)

A program is six numbers, an idea (the half of them that it works on) and perhaps a bug, which makes
it fail. A proposer sees the content of a prompt: the program to change, the other programs, and
whether a repair or a combination is requested. The module uses only the standard library, because
OpenEvolve's own database runs on it too (`evolve_search_openevolve.py`).
"""

import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

__all__ = [
    "HELD_OUT",
    "LANDSCAPES",
    "PROPOSERS",
    "TUNED_ON",
    "Program",
    "Request",
    "Search",
    "simulate",
]

NUM_VALUES, BOUND = 6, 5.0
Values = tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Program:
    """One program; `score` is None if it failed."""

    id: int
    values: Values
    idea: int = -1
    """Half of the numbers that its children change: 0, 1, or -1 for none yet."""
    has_bug: bool = False
    score: float | None = None

    @property
    def code(self) -> str:
        return f"x = {list(self.values)}\nidea = {self.idea}\n"


@dataclass(frozen=True, kw_only=True)
class Request:
    """Content of an attempt's prompt, by program id."""

    base: int
    """Program to change: the parent, or a failed program to repair."""
    shown: Sequence[int] = ()
    is_repair: bool = False
    is_crossover: bool = False


class Search(Protocol):
    def ask(self, attempt: int) -> Request: ...

    def tell(self, program: Program, *, is_repeated: bool) -> None:
        """Receive results in the order of attempts; id 0 is the first program."""
        ...


@dataclass(frozen=True, kw_only=True)
class Proposer:
    """Changes about half of the numbers by a normally distributed step."""

    step: float
    failing: float
    """Share of answers with a bug."""
    copying: float = 0.0
    """Share of answers that copy a program of the prompt."""
    has_ideas: bool = False
    """Whether it changes only the half of the parent's idea, and sometimes combines two programs,
    mostly on request."""
    mending: float = 0.8
    """Share of bugs that it repairs when shown the error."""

    def answer(
        self, base: Program, others: Sequence[Program], request: Request, rng: random.Random
    ) -> Program:
        if request.is_repair:
            return replace(base, has_bug=rng.random() > self.mending)
        if rng.random() < self.copying:
            return rng.choice([base, *others])
        has_bug = rng.random() < self.failing
        mates = [other for other in others if other.values != base.values]
        chance = COMBINES_ASKED if request.is_crossover else COMBINES_UNASKED
        if self.has_ideas and mates and rng.random() < chance:
            pair = [base, rng.choice(mates)]
            rng.shuffle(pair)
            half = NUM_VALUES // 2
            values = pair[0].values[:half] + pair[1].values[half:]
            return replace(base, values=values, idea=rng.randrange(2), has_bug=has_bug)
        idea = base.idea
        if self.has_ideas and (idea < 0 or rng.random() < NEW_IDEA):
            idea = rng.randrange(2)
        return replace(base, values=self._step(base.values, idea, rng), idea=idea, has_bug=has_bug)

    def _step(self, values: Values, idea: int, rng: random.Random) -> Values:
        places = [p for p in range(NUM_VALUES) if idea < 0 or p // (NUM_VALUES // 2) == idea]
        drawn = [place for place in places if rng.random() < 0.5] or [rng.choice(places)]
        return tuple(
            max(-BOUND, min(BOUND, value + rng.gauss(0, self.step))) if place in drawn else value
            for place, value in enumerate(values)
        )


COMBINES_ASKED, COMBINES_UNASKED, NEW_IDEA = 0.8, 0.15, 0.05

PROPOSERS = {
    "climber": Proposer(step=0.3, failing=0.4),
    "copier": Proposer(step=0.3, failing=0.05, copying=0.75),
    "two ideas": Proposer(step=0.3, failing=0.1, has_ideas=True),
}
TUNED_ON = {
    "climber": Proposer(step=0.35, failing=0.3),
    "copier": Proposer(step=0.25, failing=0.05, copying=0.6),
    "two ideas": Proposer(step=0.4, failing=0.2, has_ideas=True),
}
"""Proposers used to choose settings, on the landscapes HELD_OUT."""


def _sphere(x: Values) -> float:
    return sum(v * v for v in x) / 10


def _rosenbrock(x: Values) -> float:
    pairs = itertools.pairwise(x)
    return sum(100 * (b - a * a) ** 2 + (1 - a) ** 2 for a, b in pairs) / 2000


def _rastrigin(x: Values) -> float:
    return sum(v * v - 10 * math.cos(2 * math.pi * v) + 10 for v in x) / 20


def _funnel(x: Values) -> float:
    """A cone with ripples across it."""
    radius = math.sqrt(sum(v * v for v in x))
    return radius / 2 + (1 - math.cos(4 * radius)) / 2


def _plateau(x: Values) -> float:
    """A sphere in steps: most changes of a good program change nothing."""
    return math.floor(sum(v * v for v in x) / 2) / 5


def _deceptive(x: Values) -> float:
    """A wide basin with a low peak, and a narrow one with the highest."""
    wide = 0.7 * math.exp(-sum((v + 2) ** 2 for v in x) / 60)
    narrow = math.exp(-sum((v - 2.5) ** 2 for v in x) / 20)
    return 1 / max(wide, narrow) - 1


LANDSCAPES: dict[str, Callable[[Values], float]] = {
    "sphere": _sphere,
    "Rosenbrock": _rosenbrock,
    "Rastrigin": _rastrigin,
    "funnel": _funnel,
    "plateau": _plateau,
    "deceptive": _deceptive,
}
"""Functions to minimise; the score is 1 / (1 + f)."""


def _ackley(x: Values) -> float:
    a = sum(v * v for v in x) / len(x)
    b = sum(math.cos(2 * math.pi * v) for v in x) / len(x)
    return (20 + math.e - 20 * math.exp(-0.2 * math.sqrt(a)) - math.exp(b)) / 5


def _griewank(x: Values) -> float:
    product = math.prod(math.cos(8 * v / math.sqrt(i)) for i, v in enumerate(x, start=1))
    return sum(64 * v * v for v in x) / 400 - product + 1


def _ellipsoid(x: Values) -> float:
    return sum(v * v * 10 ** (2 * i / (len(x) - 1)) for i, v in enumerate(x)) / 40


def _steps(x: Values) -> float:
    return sum(math.floor(abs(v) * 1.25 + 0.5) ** 2 for v in x) / 10


HELD_OUT: dict[str, Callable[[Values], float]] = {
    "Ackley": _ackley,
    "Griewank": _griewank,
    "ellipsoid": _ellipsoid,
    "steps": _steps,
}
"""Landscapes used to choose settings, not part of the result."""


def simulate(
    search: Search,
    landscape: Callable[[Values], float],
    proposer: Proposer,
    *,
    num_attempts: int,
    in_flight: int,
    seed: int,
) -> float:
    """Best score of a search. Attempt k knows the results up to k - in_flight."""
    rng = random.Random(f"{seed} proposer")
    start = random.Random(f"{seed} start")
    values = tuple(start.choice((-1, 1)) * start.uniform(2, 4.5) for _ in range(NUM_VALUES))
    first = Program(id=0, values=values, score=1 / (1 + landscape(values)))
    known, seen = {0: first}, {values}
    best = first.score or 0.0
    search.tell(first, is_repeated=False)
    # Filled by each attempt, drained when more than `in_flight` wait.
    running: deque[tuple[Program, bool]] = deque()
    for attempt in range(1, num_attempts + 1):
        if len(running) >= in_flight:
            program, is_repeated = running.popleft()
            search.tell(program, is_repeated=is_repeated)
        request = search.ask(attempt)
        others = [known[id] for id in request.shown]
        answer = proposer.answer(known[request.base], others, request, rng)
        program = replace(answer, id=attempt, score=None)
        is_repeated = not program.has_bug and program.values in seen
        if not program.has_bug and not is_repeated:
            program = replace(program, score=1 / (1 + landscape(program.values)))
            seen.add(program.values)
            best = max(best, program.score or 0.0)
        known[attempt] = program
        running.append((program, is_repeated))
    return best
