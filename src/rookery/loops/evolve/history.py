"""Earlier programs in a prompt: attempts with their outcome, top, diverse and inspiring ones."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rookery.loops.evolve.config import PromptConfig
from rookery.loops.evolve.fitness import find_fitness
from rookery.loops.evolve.program import Metrics, ProgramRecord
from rookery.loops.evolve.templates import Templates

__all__ = ["History", "format_fitness"]

NUM_ATTEMPTS = 3
"""Attempts that a prompt tells of; OpenEvolve's number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Renders programs with the templates; draws nothing itself."""

    config: PromptConfig
    templates: Templates
    language: str
    feature_dimensions: Sequence[str] = ()

    def render(
        self,
        *,
        previous: Sequence[ProgramRecord],
        top: Sequence[ProgramRecord],
        diverse: Sequence[ProgramRecord],
        inspirations: Sequence[ProgramRecord],
    ) -> str:
        """The section of the prompt. No program is shown twice as top, diverse and inspiring."""
        shown = {program.id for program in (*top, *diverse)}
        others = [program for program in inspirations if program.id not in shown]
        return self.templates.fill(
            "evolution_history",
            previous_attempts=self._attempts(previous),
            top_programs=(self._top(top) + self._diverse(diverse)).strip(),
            inspirations_section=self._inspirations(others),
        )

    def _attempts(self, previous: Sequence[ProgramRecord]) -> str:
        latest = list(enumerate(previous, start=1))[-NUM_ATTEMPTS:]
        texts = (
            self.templates.fill(
                "previous_attempt",
                attempt_number=number,
                changes=program.changes_description or program.changes or self._unknown_changes(),
                performance=_list_metrics(program.metrics),
                outcome=self._outcome(program),
            )
            for number, program in reversed(latest)
        )
        return "\n\n".join(texts).strip()

    def _unknown_changes(self) -> str:
        return self.templates.fragment("attempt_unknown_changes")

    def _outcome(self, program: ProgramRecord) -> str:
        """Beside its parent; metrics that only one of them has are not compared."""
        steps = [
            value - program.parent_metrics[name]
            for name, value in program.metrics.items()
            if _is_numeric(value) and _is_numeric(program.parent_metrics.get(name))
        ]
        if steps and all(step > 0 for step in steps):
            return self.templates.fragment("attempt_all_metrics_improved")
        if steps and all(step < 0 for step in steps):
            return self.templates.fragment("attempt_all_metrics_regressed")
        return self.templates.fragment("attempt_mixed_metrics")

    def _top(self, programs: Sequence[ProgramRecord]) -> str:
        prefix = self.templates.fragment("top_program_metrics_prefix")
        texts = []
        for number, program in enumerate(programs, start=1):
            features = [f"{prefix} {n} ({_show(v)})" for n, v in program.metrics.items()]
            texts.append(self._program(str(number), program, ", ".join(features)))
        return "".join(texts)

    def _diverse(self, programs: Sequence[ProgramRecord]) -> str:
        if not programs:
            return ""
        prefix = self.templates.fragment("diverse_program_metrics_prefix")
        texts = [f"\n\n## {self.templates.fragment('diverse_programs_title')}\n\n"]
        for number, program in enumerate(programs, start=1):
            features = [f"{prefix} {name}" for name in list(program.metrics)[:2]]
            texts.append(self._program(f"D{number}", program, ", ".join(features)))
        return "".join(texts)

    def _program(self, number: str, program: ProgramRecord, features: str) -> str:
        text = self.templates.fill(
            "top_program",
            program_number=number,
            score=self._score(program),
            language=self._shown_language(),
            program_snippet=self._snippet(program),
            key_features=features,
        )
        return text + "\n\n"

    def _inspirations(self, programs: Sequence[ProgramRecord]) -> str:
        if not programs:
            return ""
        texts = (
            self.templates.fill(
                "inspiration_program",
                program_number=number,
                score=self._score(program),
                program_type=self._type(program),
                language=self._shown_language(),
                program_snippet=self._snippet(program),
                unique_features=self._features(program),
            )
            for number, program in enumerate(programs, start=1)
        )
        return self.templates.fill(
            "inspirations_section", inspiration_programs="\n\n".join(texts).strip()
        )

    def _type(self, program: ProgramRecord) -> str:
        for flag in ("diverse", "migrant", "random"):
            if program.metadata.get(flag):
                return self.templates.fragment(f"inspiration_type_{flag}")
        score = find_fitness(program.metrics, feature_dimensions=self.feature_dimensions)
        steps = ((0.8, "high_performer"), (0.6, "alternative"), (0.4, "experimental"))
        reached = (name for limit, name in steps if score is not None and score >= limit)
        return self.templates.fragment(f"inspiration_type_score_{next(reached, 'exploratory')}")

    def _features(self, program: ProgramRecord) -> str:
        features = [*self._told_features(program), *self._code_features(program.code)]
        if not features:
            words = {"program_type": self._type(program)}
            features = [self.templates.fragment("inspiration_no_features_postfix", **words)]
        return ", ".join(features[: self.config.num_top_programs])

    def _told_features(self, program: ProgramRecord) -> Iterator[str]:
        limit = self.config.include_changes_under_chars
        if program.changes and limit and len(program.changes) < limit:
            changes = program.changes
            yield self.templates.fragment("inspiration_changes_prefix", changes=changes)
        for name, value in program.metrics.items():
            words = {"metric_name": name, "value": value}
            if _is_numeric(value) and value >= 0.9:
                yield self.templates.fragment("inspiration_metrics_excellent", **words)
            elif _is_numeric(value) and value <= 0.3:
                yield self.templates.fragment("inspiration_metrics_alternative", metric_name=name)

    def _code_features(self, code: str) -> Iterator[str]:
        lower, num_lines = code.lower(), len(code.split("\n"))
        least = self.config.comprehensive_implementation_min_lines
        if "class" in lower and "def __init__" in lower:
            yield self.templates.fragment("inspiration_code_with_class")
        if "numpy" in lower or "np." in lower:
            yield self.templates.fragment("inspiration_code_with_numpy")
        if "for" in lower and "while" in lower:
            yield self.templates.fragment("inspiration_code_with_mixed_iteration")
        if num_lines <= (self.config.concise_implementation_max_lines or 0):
            yield self.templates.fragment("inspiration_code_with_concise_line")
        elif least and num_lines >= least:
            yield self.templates.fragment("inspiration_code_with_comprehensive_line")

    def _score(self, program: ProgramRecord) -> str:
        dimensions = self.feature_dimensions
        return format_fitness(find_fitness(program.metrics, feature_dimensions=dimensions))

    def _shown_language(self) -> str:
        return "text" if self.config.programs_as_changes_description else self.language

    def _snippet(self, program: ProgramRecord) -> str:
        if self.config.programs_as_changes_description:
            return program.changes_description or "<missing changes_description>"
        return program.code


def format_fitness(fitness: float | None) -> str:
    """Four digits, or a word where there is no number."""
    return "unknown" if fitness is None else f"{fitness:.4f}"


def _list_metrics(metrics: Metrics) -> str:
    return ", ".join(f"{name}: {_show(value)}" for name, value in metrics.items())


def _show(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, int | float) else str(value)


def _is_numeric(value: object) -> bool:
    return isinstance(value, int | float)
