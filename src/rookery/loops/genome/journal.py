"""What a run remembers of its search, and tells whoever watches: one record per generation."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from rookery.loops.genome.nursery import Nursery
from rookery.loops.genome.trials import Measured
from rookery.rollout import TasksetEvaluator
from rookery.runs import Run

__all__ = ["Generation", "Journal"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One generation of one stage, as measured on the search split."""

    generation: int
    """Counted over all stages; 0 are the founders."""
    stage: str
    best: float | None
    """Of all candidates so far."""
    mean: float | None
    worst: float | None
    scores: tuple[float, ...]
    """Of this generation's candidates that did not fail."""
    num_candidates: int
    num_dropped: int
    """Left the race before they saw every task."""
    num_failed: int
    num_rollouts: int
    num_tokens: int


class Journal:
    """Records generations in the run, and calls `on_generation` after each."""

    def __init__(
        self,
        run: Run,
        *,
        nursery: Nursery,
        evaluator: TasksetEvaluator,
        on_generation: Callable[[Generation], None] | None = None,
    ) -> None:
        self.generations: list[Generation] = []
        self._run = run
        self._nursery = nursery
        self._evaluator = evaluator
        self._on_generation = on_generation
        self._best: float | None = None
        self._spent = (0, 0)

    def record(self, stage: str, measured: Mapping[str, Measured]) -> Generation:
        """Note the candidates that were measured together."""
        scores = [m.fitness.score for m in measured.values() if m.fitness.score is not None]
        feasible = [
            m.fitness.score
            for m in measured.values()
            if m.fitness.score is not None and m.fitness.violation == 0 and m.is_complete
        ]
        self._best = max([*feasible, *([] if self._best is None else [self._best])], default=None)
        rollouts, tokens = self._evaluator.num_rollouts, self._evaluator.num_tokens
        generation = Generation(
            generation=len(self.generations),
            stage=stage,
            best=self._best,
            mean=sum(scores) / len(scores) if scores else None,
            worst=min(scores, default=None),
            scores=tuple(scores),
            num_candidates=len(measured),
            num_dropped=sum(not m.is_complete and not m.error for m in measured.values()),
            num_failed=sum(bool(m.error) for m in measured.values()),
            num_rollouts=rollouts - self._spent[0],
            num_tokens=tokens - self._spent[1],
        )
        self._spent = (rollouts, tokens)
        self._write(generation, measured)
        self.generations.append(generation)
        if self._on_generation is not None:
            self._on_generation(generation)
        return generation

    def _write(self, generation: Generation, measured: Mapping[str, Measured]) -> None:
        """Candidates are keyed by id: a resumed run that came out otherwise would be refused."""
        for name, result in measured.items():
            recipe = self._nursery.recipes.get(name)
            self._run.append(
                "candidate",
                {
                    "id": name,
                    "version": self._nursery.adapter(name).version,
                    "operator": recipe.operator if recipe is not None else "founder",
                    "parents": list(recipe.parents) if recipe is not None else [],
                    "score": result.fitness.score,
                    "violation": result.fitness.violation,
                    "num_tasks": len(result.rewards),
                    "error": result.error,
                },
                key=name,
            )
        if self._run.get("generation", str(generation.generation)) is None:
            document = asdict(generation)
            self._run.append("generation", document, key=str(generation.generation))
            values = {"genome/best": generation.best, "genome/mean": generation.mean}
            values["genome/num_tokens"] = float(generation.num_tokens)
            self._run.log_metrics(
                generation.generation, {k: v for k, v in values.items() if v is not None}
            )

    def costs(self) -> dict[str, float]:
        """Answers, their tokens and the seconds of work of the whole run, over all resumes."""
        tokens = [event.payload["num_tokens"] for event in self._run.events("rollout")]
        seconds = started = last = 0.0
        for event in self._run.events():
            if event.kind in {"run/created", "run/opened"}:
                seconds, started = seconds + last - started, event.time_s
            last = event.time_s
        return {
            "num_rollouts": len(tokens),
            "num_tokens": sum(tokens),
            "seconds": seconds + last - started,
        }

    def restore_costs(self) -> list[Generation]:
        """Generations with the costs of when they were really measured, before any resume."""
        first = {event.key: event.payload for event in self._run.events("generation")}
        return [_from(first.get(str(g.generation)), g) for g in self.generations]


def _from(payload: Mapping[str, object] | None, generation: Generation) -> Generation:
    if payload is None:
        return generation
    fields = asdict(generation) | {
        key: payload[key] for key in ("num_rollouts", "num_tokens") if key in payload
    }
    scores: Sequence[float] = fields.pop("scores")
    return Generation(**fields, scores=tuple(scores))
