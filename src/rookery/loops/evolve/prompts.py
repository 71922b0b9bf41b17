"""The prompt of one attempt, with OpenEvolve's templates and fields.

    prompts = Prompts(config, language="python", seed=42)
    prompts.build(parent, shown=ShownPrograms(top=..., inspirations=...), attempt=17)
    Prompt(system="...", user="...", template="diff_user")

Wording and diverse programs are drawn from (seed, attempt), so an attempt that is asked again after
a crash has the same prompt.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Any

from rookery.errors import ConfigError
from rookery.loops.evolve.config import EvolveConfig, PromptConfig
from rookery.loops.evolve.program import Metrics, ProgramRecord, find_fitness
from rookery.seeding import stream

__all__ = [
    "History",
    "Prompt",
    "Prompts",
    "ShownPrograms",
    "Templates",
    "format_fitness",
    "hide_secrets",
    "load_templates",
    "show_artifacts",
]

# Templates are `*.txt` with `{field}`s, fragments the texts of `fragments.json`. Unknown fields are
# found when the templates are loaded, before any model is asked.

DEFAULTS = Path(__file__).parent / "prompt_templates"

_USER = frozenset(
    {
        "metrics",
        "fitness_score",
        "feature_coords",
        "feature_dimensions",
        "improvement_areas",
        "evolution_history",
        "current_program",
        "language",
        "artifacts",
    }
)
_SHOWN = frozenset({"program_number", "score", "language", "program_snippet"})

FIELDS = {
    "diff_user": _USER,
    "full_rewrite_user": _USER,
    "evaluation": _USER,
    "evolution_history": frozenset({"previous_attempts", "top_programs", "inspirations_section"}),
    "previous_attempt": frozenset({"attempt_number", "changes", "performance", "outcome"}),
    "top_program": _SHOWN | {"key_features"},
    "inspirations_section": frozenset({"inspiration_programs"}),
    "inspiration_program": _SHOWN | {"program_type", "unique_features"},
    "system_message_with_changes_description": frozenset(
        {"system_message", "system_message_changes_description"}
    ),
    "user_message_with_changes_description": frozenset({"user_message", "changes_description"}),
    "reflection_user": frozenset({"current_prompt", "examples", "demands"}),
}
"""Fields of each template. In other templates braces have no meaning."""

FRAGMENT_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "recurring_failure": {"failure": ""},
    "fitness_improved": {"prev": 0.0, "current": 0.0},
    "fitness_declined": {"prev": 0.0, "current": 0.0},
    "fitness_stable": {"current": 0.0},
    "exploring_region": {"features": ""},
    "code_too_long": {"threshold": 0},
    "inspiration_changes_prefix": {"changes": ""},
    "inspiration_metrics_excellent": {"metric_name": "", "value": 0.0},
    "inspiration_metrics_alternative": {"metric_name": ""},
    "inspiration_no_features_postfix": {"program_type": ""},
}
"""Fields of fragments, each with a value to test it with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Templates:
    """Checked texts by name.

    load_templates(config.prompt).fragment("code_too_long", threshold=500)
    """

    texts: Mapping[str, str]
    fragments: Mapping[str, str]

    def fill(self, name: str, **values: object) -> str:
        return self.texts[name].format(**values)

    def fragment(self, name: str, **values: object) -> str:
        return self.fragments[name].format(**values)

    def text_or_template(self, text: str) -> str:
        """Return the template that the text names, or the text itself."""
        return self.texts.get(text, text)


def load_templates(config: PromptConfig) -> Templates:
    """Load the default templates, overridden by the user's folder."""
    texts, fragments = _read_folder(DEFAULTS)
    if config.template_dir is not None:
        own_texts, own_fragments = _read_folder(config.template_dir)
        drawn = config.template_variations if config.use_template_stochasticity else {}
        for name, text in own_texts.items():
            _check_template(config.template_dir / f"{name}.txt", text, extra=drawn)
        for name in own_fragments.keys() & fragments.keys():  # others are unused
            _check_fragment(config.template_dir / "fragments.json", name, own_fragments[name])
        texts |= own_texts
        fragments |= own_fragments
    return Templates(texts=texts, fragments=fragments)


def _read_folder(folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    try:
        texts = {path.stem: path.read_text(encoding="utf-8") for path in folder.glob("*.txt")}
        path = folder / "fragments.json"
        fragments = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"The templates in {folder} cannot be read: {error}") from error
    if not isinstance(fragments, dict) or not all(isinstance(t, str) for t in fragments.values()):
        raise ConfigError(
            f'{folder / "fragments.json"} should be an object of texts: {{"a": "b"}}.'
        )
    return texts, fragments


def _check_template(path: Path, text: str, *, extra: Iterable[str]) -> None:
    allowed = FIELDS.get(path.stem)
    if allowed is None:
        return
    allowed = allowed | set(extra)
    try:
        fields = [field for _, field, _, _ in Formatter().parse(text) if field is not None]
    except ValueError as error:
        raise ConfigError(f"{path}: {error}. Write {{{{ and }}}} for braces.") from None
    unknown = [
        field for field in fields if field.partition(".")[0].partition("[")[0] not in allowed
    ]
    if unknown:
        raise ConfigError(
            f"{path} has the field {{{unknown[0]}}}; allowed are {', '.join(sorted(allowed))}. "
            "Write {{ and }} for braces."
        )


def _check_fragment(path: Path, name: str, text: str) -> None:
    try:
        text.format(**FRAGMENT_FIELDS.get(name, {}))
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        allowed = ", ".join(FRAGMENT_FIELDS.get(name, {})) or "none"
        raise ConfigError(f"{path}: {name} has the field {error}; allowed: {allowed}.") from None


NUM_ATTEMPTS = 3
"""Attempts that a prompt shows, as in OpenEvolve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Renders the programs of a prompt with the templates. Draws nothing itself."""

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
        """Render the section. No program appears twice among top, diverse and inspiring ones."""
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
                performance=_metric_list(program.metrics),
                outcome=self._outcome(program),
            )
            for number, program in reversed(latest)
        )
        return "\n\n".join(texts).strip()

    def _unknown_changes(self) -> str:
        return self.templates.fragment("attempt_unknown_changes")

    def _outcome(self, program: ProgramRecord) -> str:
        """Compare with the parent, over metrics that both have."""
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
        features = [*self._recorded_features(program), *self._code_features(program.code)]
        if not features:
            words = {"program_type": self._type(program)}
            features = [self.templates.fragment("inspiration_no_features_postfix", **words)]
        return ", ".join(features[: self.config.num_top_programs])

    def _recorded_features(self, program: ProgramRecord) -> Iterator[str]:
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
    return "unknown" if fitness is None else f"{fitness:.4f}"


def _metric_list(metrics: Metrics) -> str:
    return ", ".join(f"{name}: {_show(value)}" for name, value in metrics.items())


def _show(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, int | float) else str(value)


def _is_numeric(value: object) -> bool:
    return isinstance(value, int | float)


_ANSI = re.compile(r"\x1B(?:[@-Z\\-_]|\[[0-?]*[ -/]*[@-~])")
_SECRETS = (
    (re.compile(r"sk-[\w-]{20,}"), "<REDACTED_API_KEY>"),
    (re.compile(r"(?i)bearer\s+[\w.~+/=-]{8,}"), "Bearer <REDACTED>"),
    (re.compile(r"[A-Za-z0-9]{32,}"), "<REDACTED_TOKEN>"),
    (re.compile(r"(?i)password[=:]\s*[^\s]+"), "password=<REDACTED>"),
    (re.compile(r"(?i)api[_-]?key[=:]\s*[^\s]+"), "api_key=<REDACTED>"),
    (re.compile(r"(?i)token[=:]\s*[^\s]+"), "token=<REDACTED>"),
)


def hide_secrets(text: str) -> str:
    """Remove terminal colours, keys, passwords, and runs of 32 or more letters and digits."""
    text = _ANSI.sub("", text)
    for regex, replacement in _SECRETS:
        text = regex.sub(replacement, text)
    return text


def show_artifacts(
    artifacts: Mapping[str, str | bytes], *, title: str, max_chars: int, is_filtered: bool
) -> str:
    """Render the artifacts' section; empty without artifacts."""
    sections = []
    for name, value in artifacts.items():
        text = value.decode(errors="replace") if isinstance(value, bytes) else value
        text = hide_secrets(text) if is_filtered else text
        if len(text) > max_chars:
            text = text[:max_chars] + "\n... (truncated)"
        sections.append(f"### {name}\n```\n{text}\n```")
    return "\n\n".join([f"## {title}", *sections]) if sections else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A request to a model."""

    system: str
    user: str
    template: str
    """Name of the user template, under which checkpoints store the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownPrograms:
    """The programs that a prompt shows beside the parent."""

    previous: Sequence[ProgramRecord] = ()
    """Attempts, oldest first. The last three are shown."""
    top: Sequence[ProgramRecord] = ()
    """Programs, best first: `num_top_programs` are shown, and some of the rest as diverse ones."""
    inspirations: Sequence[ProgramRecord] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Requests of a plan besides a child of its parent."""

    operator: str = ""
    failures: Sequence[str] = ()
    """Recurring failures."""


NOTHING_ELSE = Asked()
ASKING = {"crossover": "asks_crossover", "repair": "asks_repair"}
"""Fragments of operators with a request of their own."""


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
        """Number of best programs shown as such."""
        return self._config.num_top_programs

    def build(
        self,
        parent: ProgramRecord,
        *,
        shown: ShownPrograms,
        attempt: int,
        asked: Asked = NOTHING_ELSE,
    ) -> Prompt:
        """Build the prompt for a child of `parent`."""
        user = self._user(parent, shown, attempt, asked)
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
        """Build the prompt for a judge (`evaluator.use_llm_feedback`)."""
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
        template = self._config.system_message_changes_description
        return self.templates.fill(
            "system_message_with_changes_description",
            system_message=system,
            system_message_changes_description=template.strip()
            if template
            else self.templates.texts["system_message_changes_description"],
        )

    def _user(self, parent: ProgramRecord, shown: ShownPrograms, attempt: int, asked: Asked) -> str:
        num_top = self._config.num_top_programs
        history = self._history.render(
            previous=shown.previous,
            top=shown.top[:num_top],
            diverse=self._draw_diverse(shown.top[num_top:], attempt),
            inspirations=shown.inspirations,
        )
        template = self._vary(self.templates.texts[self._template], attempt)
        artifacts = self._artifacts(parent, is_needed=asked.operator == "repair")
        user = template.format(
            metrics=_metric_lines(parent.metrics),
            fitness_score=format_fitness(self._fitness(parent)),
            feature_coords=self._coordinates(parent),
            feature_dimensions=", ".join(self._dimensions) or "None",
            improvement_areas=self._improvement_areas(parent, shown.previous, asked),
            evolution_history=history,
            current_program=parent.code,
            language=self._language,
            artifacts=artifacts,
        )
        # Append requests that a user's template has no field for.
        missing = [] if "{improvement_areas}" in template else list(self._requests(asked))
        if asked.operator == "repair" and "{artifacts}" not in template:
            missing.append(artifacts)
        return "\n\n".join([user, *missing])

    def _requests(self, asked: Asked) -> Iterator[str]:
        if fragment := ASKING.get(asked.operator):
            yield self.templates.fragment(fragment)
        for failure in asked.failures:
            yield self.templates.fragment("recurring_failure", failure=failure)

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

    def _artifacts(self, parent: ProgramRecord, *, is_needed: bool) -> str:
        if not self._with_artifacts and not is_needed:
            return ""
        return show_artifacts(
            parent.artifacts,
            title=self.templates.fragment("artifact_title"),
            max_chars=self._config.max_artifact_bytes,
            is_filtered=self._config.artifact_security_filter,
        )

    def _improvement_areas(
        self, parent: ProgramRecord, previous: Sequence[ProgramRecord], asked: Asked
    ) -> str:
        areas = [*self._requests(asked), *self._fitness_step(parent, previous)]
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
        """Compare the parent with the last of the previous attempts."""
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
        # `value == value` leaves out NaN.
        return ", ".join(f"{name}={_coordinate(value)}" for name, value in pairs if value == value)


def _coordinate(value: object) -> str:
    return f"{float(value):.2f}" if isinstance(value, int | float) else str(value)


def _metric_lines(metrics: Metrics) -> str:
    return "\n".join(
        f"- {name}: {f'{value:.4f}' if isinstance(value, int | float) else value}"
        for name, value in metrics.items()
    )
