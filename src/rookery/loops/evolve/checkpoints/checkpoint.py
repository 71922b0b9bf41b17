"""A checkpoint: the whole population at one iteration, as OpenEvolve's `metadata.json` knows it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rookery.loops.evolve.program import ProgramRecord

__all__ = ["Checkpoint", "FeatureRange"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureRange:
    """What was seen of a feature dimension; the grid's bins are cut from it."""

    min: float
    max: float
    values: tuple[float, ...] = ()
    """The latest values; OpenEvolve keeps 100."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Programs, and which of them stand where. Lists over islands have one entry per island."""

    programs: Sequence[ProgramRecord]
    islands: Sequence[Sequence[str]]
    """Ids per island."""
    grids: Sequence[Mapping[str, str]]
    """Per island: cell ("3-7": one bin per feature dimension) to id."""
    archive: Sequence[str] = ()
    best_id: str | None = None
    island_best_ids: Sequence[str | None] = ()
    iteration: int = 0
    """The last iteration that is in it."""
    current_island: int = 0
    island_generations: Sequence[int] = ()
    last_migration_generation: int = 0
    feature_ranges: Mapping[str, FeatureRange] = field(default_factory=dict)

    @property
    def best(self) -> ProgramRecord | None:
        """The best program, where one is named."""
        return next((p for p in self.programs if p.id == self.best_id), None)
