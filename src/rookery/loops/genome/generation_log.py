"""The record of a search, one per generation, for the run and the observer."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from rookery.loops.genome.adapter_builder import AdapterBuilder
from rookery.loops.genome.search_evaluator import Measured, check_repeated
from rookery.ports import Observer
from rookery.reports import GenerationRecord
from rookery.rollout import TasksetEvaluator
from rookery.runs import NewEvent, Run
from rookery.runs.budget import Budget

__all__ = ["Cost", "GenerationLog", "GenerationSpending", "RunCost"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Candidates tried, answers, their tokens, and seconds of work."""

    num_candidates: int = 0
    num_rollouts: int = 0
    num_tokens: int = 0
    seconds: float = 0.0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            num_candidates=self.num_candidates + other.num_candidates,
            num_rollouts=self.num_rollouts + other.num_rollouts,
            num_tokens=self.num_tokens + other.num_tokens,
            seconds=self.seconds + other.seconds,
        )


@dataclass(slots=True)
class RunCost:
    """Cost of each part of a run so far."""

    founders: Cost = field(default_factory=Cost)
    """Measurement of the founders, without pair merges."""
    generations: Cost = field(default_factory=Cost)
    """All generations. The first one measures founders and pair merges."""
    select: Cost = field(default_factory=Cost)
    """Choice among the search's finalists."""


class GenerationSpending:
    """Answer tokens spent so far, and whether the budget has room for another generation."""

    def __init__(
        self, budget: Budget, *, evaluator: TasksetEvaluator, run: Run, num_choice_answers: int
    ) -> None:
        """`num_choice_answers` will be asked for after the search."""
        self.budget = budget
        self._evaluator = evaluator
        self._num_choice_answers = num_choice_answers
        self._num_done = run.counts().get("generation", 0)
        self._noted = 0
        self._answer = 0.0
        """Tokens per answer, the maximum over generations."""
        self._candidate = 0.0
        """Tokens per candidate, the maximum over generations of the search."""

    def note(self, generation: GenerationRecord, *, has_members: bool) -> None:
        """Take a measured generation. The first one is the founders'."""
        spent = self._evaluator.num_answer_tokens - self._noted
        self._noted += spent
        self._answer = max(self._answer, spent / max(1, generation.num_rollouts))
        if generation.generation and not has_members:
            self._candidate = max(self._candidate, spent / max(1, generation.num_candidates))

    async def has_room(
        self, generation: int, *, num_candidates: int, num_tasks: int, num_member_answers: int
    ) -> bool:
        """Return True if the budget has room for a generation as expensive as the most expensive so
        far, and for the final choice. A candidate is assumed to answer all tasks before the
        search's first generation, and always if it is the centre of a population."""
        whole = num_tasks * self._answer
        each = whole if num_member_answers else self._candidate or whole
        needed = num_candidates * each
        needed += (self._num_choice_answers + num_member_answers) * self._answer
        spent = self._evaluator.num_answer_tokens
        return await self.budget.has_room(
            generation, tokens=spent + math.ceil(needed), num_done=self._num_done
        )


class GenerationLog:
    """Records generations and phases in the run, and tells the observer."""

    def __init__(
        self,
        run: Run,
        *,
        builder: AdapterBuilder,
        evaluator: TasksetEvaluator,
        observer: Observer[GenerationRecord],
        spending: "GenerationSpending",
    ) -> None:
        self.cost = RunCost()
        self._spending = spending
        self.generations: list[GenerationRecord] = []
        self.generation_of: dict[str, int] = {}
        """Generation of each candidate, counted over the whole run."""
        self._run = run
        self._builder = builder
        self._evaluator = evaluator
        self._observer = observer
        self._best: float | None = None

    async def has_room(
        self, num_candidates: int, *, num_tasks: int, num_member_answers: int
    ) -> bool:
        """Return True if the budget has room for a generation and for answers of members."""
        has_room = await self._spending.has_room(
            len(self.generations),
            num_candidates=num_candidates,
            num_tasks=num_tasks,
            num_member_answers=num_member_answers,
        )
        self._observer.on_budget(self._spending.budget.share)
        return has_room

    @contextmanager
    def phase(self, name: str) -> Iterator[Callable[[], Cost]]:
        """Announce a phase. Yields a function that returns its cost so far."""
        self._observer.on_phase(name)
        before = self._evaluator.num_rollouts, self._evaluator.num_tokens
        start = time.monotonic()
        yield lambda: Cost(
            num_rollouts=self._evaluator.num_rollouts - before[0],
            num_tokens=self._evaluator.num_tokens - before[1],
            seconds=time.monotonic() - start,
        )

    async def settle(self, phase: str, cost: Cost) -> Cost:
        """Return the cost of a finished phase. A repeated phase reports its first seconds."""
        first = self._run.get("phase", phase)
        if first is None:
            first = await self._run.append("phase", {"seconds": cost.seconds}, key=phase)
        return replace(cost, seconds=first.payload["seconds"])

    async def record(
        self,
        stage: str,
        measured: Mapping[str, Measured],
        cost: Cost,
        *,
        members: Sequence[Measured] = (),
    ) -> GenerationRecord:
        """Record candidates that were measured together, and the members of a population."""
        every = [*members, *measured.values()]
        scores = [m.mean for m in every if m.mean is not None]
        feasible = [
            m.mean
            for m in measured.values()
            if m.mean is not None and m.fitness.violation == 0 and m.is_complete
        ]
        number = len(self.generations)
        first = self._run.get("generation", str(number))
        seconds = cost.seconds if first is None else first.payload["seconds"]
        cost = replace(cost, num_candidates=len(every), seconds=seconds)
        self._best = max([*feasible, *([] if self._best is None else [self._best])], default=None)
        generation = GenerationRecord(
            generation=number,
            stage=stage,
            best=self._best,
            mean=sum(scores) / len(scores) if scores else None,
            worst=min(scores, default=None),
            scores=tuple(scores),
            num_candidates=cost.num_candidates,
            num_dropped=sum(not m.is_complete and not m.error for m in measured.values()),
            num_failed=sum(bool(m.error) for m in every),
            num_rollouts=cost.num_rollouts,
            num_tokens=cost.num_tokens,
            seconds=cost.seconds,
        )
        await self._write(generation, measured)
        self._spending.note(generation, has_members=bool(members))
        self.generations.append(generation)
        self.generation_of |= dict.fromkeys(measured, number)
        self.cost.generations += cost
        self._observer.on_step(generation)
        return generation

    async def _write(self, generation: GenerationRecord, measured: Mapping[str, Measured]) -> None:
        """Write keyed events. A resumed run with a different result is refused."""
        news = [
            NewEvent(kind="candidate", key=name, payload=self._describe(name, result))
            for name, result in measured.items()
        ]
        key = str(generation.generation)
        last = NewEvent(kind="generation", key=key, payload=generation.model_dump(mode="json"))
        for new in (*news, last):
            check_repeated(self._run, new.kind, new.key, new.payload)
        await self._run.append_many([*news, last])
        values = {"genome/best": generation.best, "genome/mean": generation.mean}
        values["genome/num_tokens"] = float(generation.num_tokens)
        self._run.log_metrics(
            generation.generation, {k: v for k, v in values.items() if v is not None}
        )

    def _describe(self, name: str, result: Measured) -> dict[str, object]:
        recipe = self._builder.recipes.get(name)
        return {
            "id": name,
            "version": self._builder.version(name),
            "operator": recipe.operator if recipe is not None else "founder",
            "parents": list(recipe.parents) if recipe is not None else [],
            "score": result.mean,
            "merit": result.fitness.score,
            "violation": result.fitness.violation,
            "num_tasks": len(result.rewards),
            "error": result.error,
        }
