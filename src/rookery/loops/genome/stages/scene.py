"""What every stage is handed: the candidates so far, how to make more, how to measure them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rookery.loops.genome.journal import Journal
from rookery.loops.genome.nursery import Nursery, Recipe
from rookery.loops.genome.trials import Trials
from rookery.search.fitness import Fitness, rank_key
from rookery.search.streams import stream_seed

__all__ = ["Scene"]


@dataclass(frozen=True, slots=True)
class Scene:
    """One stage's view of the run."""

    nursery: Nursery
    trials: Trials
    journal: Journal
    seed: int
    index: int
    """Place of the stage among the stages."""

    @property
    def prefix(self) -> str:
        """Begins the ids of this stage's candidates, so that two stages never share one."""
        return f"s{self.index}-" if self.index else ""

    def fitness(self) -> dict[str, Fitness]:
        """Everything measured so far, in the order of measurement."""
        return {name: m.fitness for name, m in self.trials.measured.items()}

    def best(self) -> str | None:
        """The best candidate that saw every task; None when there is none."""
        complete = [n for n, m in self.trials.measured.items() if m.is_complete]
        return max(complete, key=lambda n: rank_key(self.trials.measured[n].fitness), default=None)

    async def measure(
        self, recipes: Sequence[Recipe], *, rivals: Iterable[str], keep: int, stage: str
    ) -> dict[str, Fitness]:
        """Make the candidates, measure them together and record the generation."""
        self.nursery.plan(recipes)
        names = [recipe.id for recipe in recipes]
        seed = stream_seed(self.seed, "race", self.index, len(self.journal.generations))
        known = [name for name in rivals if name in self.trials.measured]
        measured = await self.trials.measure(names, rivals=known, seed=seed, keep=keep)
        self.journal.record(stage, measured)
        return {name: m.fitness for name, m in measured.items()}
