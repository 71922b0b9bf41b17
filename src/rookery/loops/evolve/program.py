"""A program under search, with all that OpenEvolve's files say of one."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rookery.loops.evolve.source_files import split_files

__all__ = ["Metrics", "ProgramRecord"]

Metrics = Mapping[str, Any]
"""What an evaluator returned: numbers, and whatever else it chose to report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramRecord:
    """One program, evaluated.

    ProgramRecord(id="7f3c", code="x = 2", parent_id="12ab", generation=1, iteration=9,
                  metrics={"combined_score": 0.7}, island=2)
    """

    id: str
    code: str
    """The text; of a folder the joined text of its files (`source_files`)."""
    language: str = "python"
    parent_id: str | None = None
    generation: int = 0
    iteration: int = 0
    """The iteration that found it; 0 for a first program."""
    timestamp: float = 0.0
    """When it was found, in seconds since 1970."""
    metrics: Metrics = field(default_factory=dict)
    island: int | None = None
    changes: str = ""
    """What its parent's prompt led to: a summary of the diff."""
    changes_description: str = ""
    """What the model says of all changes so far (`prompt.programs_as_changes_description`)."""
    parent_metrics: Metrics = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Further entries of OpenEvolve's `metadata`, such as `migrant` and `token_usage`."""
    artifacts: Mapping[str, str | bytes] = field(default_factory=dict)
    prompts: Mapping[str, Any] = field(default_factory=dict)
    """Template name to {system, user, responses}."""
    embedding: tuple[float, ...] | None = None

    @property
    def files(self) -> dict[str, str]:
        """File name to text for a folder; empty for a program of one file."""
        return split_files(self.code)
