"""The prompt of one attempt, built as OpenEvolve builds it, with the same templates and fields.

    prompts = Prompts(config, language="python", seed=42)
    prompts.build(parent, shown=ShownPrograms(top=..., inspirations=...), attempt=17)
    Prompt(system="...", user="...", template="diff_user")

What is drawn (wording, diverse programs) is drawn for (seed, attempt): an attempt that is asked
again after a crash asks the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rookery.loops.evolve.artifacts import show_artifacts
from rookery.loops.evolve.config import EvolveConfig
from rookery.loops.evolve.fitness import find_fitness
from rookery.loops.evolve.history import History, format_fitness
from rookery.loops.evolve.program import Metrics, ProgramRecord
from rookery.loops.evolve.templates import load_templates
from rookery.seeding import stream

__all__ = ["Prompt", "Prompts", "ShownPrograms"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What a model is asked."""

    system: str
    user: str
    template: str
    """The user template's name, under which checkpoints keep the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownPrograms:
    """The programs that a prompt tells of beside the parent."""

    previous: Sequence[ProgramRecord] = ()
    """Attempts, oldest first; the last three are told."""
    top: Sequence[ProgramRecord] = ()
    """Best first: `num_top_programs` are shown, and of the rest some diverse ones."""
    inspirations: Sequence[ProgramRecord] = ()


class Prompts:
    """Builds the prompts of one run. Loads and checks the templates once."""

    def __init__(self, config: EvolveConfig, *, language: str, seed: int) -> None:
        self.templates = load_templates(config.prompt)
        self._config = config.prompt
        self._template = "diff_user" if config.diff_based_evolution else "full_rewrite_user"
        self._with_artifacts = config.prompt.include_artifacts and config.evaluator.enable_artifacts
        self._dimensions = config.database.feature_dimensions
        self._language = language
        self._seed = seed
        self._history = History(
            config=config.prompt,
            templates=self.templates,
            language=language,
            feature_dimensions=self._dimensions,
        )

    @property
    def num_top_programs(self) -> int:
        """How many of the best programs are shown as such."""
        return self._config.num_top_programs

    def build(self, parent: ProgramRecord, *, shown: ShownPrograms, attempt: int) -> Prompt:
        """The prompt that asks for a child of `parent`."""
        user = self._user(parent, shown, attempt)
        if parent.files:
            user += "\n\n" + self.templates.fragment("several_files")
        if self._config.programs_as_changes_description:
            words = parent.changes_description or self._config.initial_changes_description
            user = self.templates.fill(
                "user_message_with_changes_description",
                user_message=user,
                changes_description=words.rstrip(),
            )
        return Prompt(system=self._system(), user=user, template=self._template)

    def build_feedback(self, code: str) -> Prompt:
        """The prompt that asks a model to judge a program (`evaluator.use_llm_feedback`)."""
        blank = dict.fromkeys(
            ("metrics", "improvement_areas", "evolution_history", "artifacts"), ""
        )
        user = self.templates.fill(
            "evaluation",
            **blank,
            fitness_score=format_fitness(None),
            feature_coords="",
            feature_dimensions=", ".join(self._dimensions) or "None",
            current_program=code,
            language=self._language,
        )
        system = self.templates.text_or_template(self._config.evaluator_system_message)
        return Prompt(system=system, user=user, template="evaluation")

    def _system(self) -> str:
        system = self.templates.text_or_template(self._config.system_message)
        if not self._config.programs_as_changes_description:
            return system
        own = self._config.system_message_changes_description
        return self.templates.fill(
            "system_message_with_changes_description",
            system_message=system,
            system_message_changes_description=own.strip()
            if own
            else self.templates.texts["system_message_changes_description"],
        )

    def _user(self, parent: ProgramRecord, shown: ShownPrograms, attempt: int) -> str:
        num_top = self._config.num_top_programs
        history = self._history.render(
            previous=shown.previous,
            top=shown.top[:num_top],
            diverse=self._draw_diverse(shown.top[num_top:], attempt),
            inspirations=shown.inspirations,
        )
        return self._vary(self.templates.texts[self._template], attempt).format(
            metrics=_list_metrics(parent.metrics),
            fitness_score=format_fitness(self._fitness(parent)),
            feature_coords=self._coordinates(parent),
            feature_dimensions=", ".join(self._dimensions) or "None",
            improvement_areas=self._improvement_areas(parent, shown.previous),
            evolution_history=history,
            current_program=parent.code,
            language=self._language,
            artifacts=self._artifacts(parent),
        )

    def _draw_diverse(self, programs: Sequence[ProgramRecord], attempt: int) -> list[ProgramRecord]:
        num = min(self._config.num_diverse_programs, len(programs))
        rng = stream(self._seed, "prompt", "diverse", attempt)
        return (
            [programs[int(i)] for i in rng.choice(len(programs), num, replace=False)] if num else []
        )

    def _vary(self, template: str, attempt: int) -> str:
        if not self._config.use_template_stochasticity:
            return template
        for key, texts in self._config.template_variations.items():
            if texts and f"{{{key}}}" in template:
                rng = stream(self._seed, "prompt", "variation", key, attempt)
                template = template.replace(f"{{{key}}}", texts[int(rng.integers(len(texts)))])
        return template

    def _artifacts(self, parent: ProgramRecord) -> str:
        if not self._with_artifacts:
            return ""
        return show_artifacts(
            parent.artifacts,
            title=self.templates.fragment("artifact_title"),
            max_chars=self._config.max_artifact_bytes,
            is_filtered=self._config.artifact_security_filter,
        )

    def _improvement_areas(self, parent: ProgramRecord, previous: Sequence[ProgramRecord]) -> str:
        areas = self._fitness_step(parent, previous)
        if self._dimensions:
            features = self._coordinates(parent)
            name = "exploring_region" if features else "no_feature_coordinates"
            areas.append(self.templates.fragment(name, features=features))
        threshold = (
            self._config.suggest_simplification_after_chars or self._config.code_length_threshold
        )
        if threshold and len(parent.code) > threshold:
            areas.append(self.templates.fragment("code_too_long", threshold=threshold))
        areas = areas or [self.templates.fragment("no_specific_guidance")]
        return "\n".join(f"- {area}" for area in areas)

    def _fitness_step(self, parent: ProgramRecord, previous: Sequence[ProgramRecord]) -> list[str]:
        """How the parent stands beside the last of the previous attempts."""
        current = self._fitness(parent)
        before = self._fitness(previous[-1]) if previous else None
        if current is None or before is None:
            return []
        if current == before:
            return [self.templates.fragment("fitness_stable", current=current)]
        name = "fitness_improved" if current > before else "fitness_declined"
        return [self.templates.fragment(name, prev=before, current=current)]

    def _fitness(self, program: ProgramRecord) -> float | None:
        return find_fitness(program.metrics, feature_dimensions=self._dimensions)

    def _coordinates(self, program: ProgramRecord) -> str:
        metrics = program.metrics
        pairs = ((name, metrics[name]) for name in self._dimensions if name in metrics)
        # A coordinate that is NaN is not equal to itself and is left out.
        return ", ".join(f"{name}={_coordinate(value)}" for name, value in pairs if value == value)


def _coordinate(value: object) -> str:
    return f"{float(value):.2f}" if isinstance(value, int | float) else str(value)


def _list_metrics(metrics: Metrics) -> str:
    lines = []
    for name, value in metrics.items():
        text = f"{value:.4f}" if isinstance(value, int | float) else str(value)
        lines.append(f"- {name}: {text}")
    return "\n".join(lines)
