"""Prompt templates: the shipped ones, and a user's folder of the same file names over them.

    templates = load_templates(config.prompt)
    templates.fill("previous_attempt", attempt_number=3, changes=..., performance=..., outcome=...)
    templates.fragment("code_too_long", threshold=500)

Templates are `*.txt` with `{field}`s, fragments are the texts of `fragments.json`. A field that
nobody fills is found when the templates are loaded, before any model is asked.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Any

from rookery.errors import ConfigError
from rookery.loops.evolve.config import PromptConfig

__all__ = ["Templates", "load_templates"]

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
}
"""The fields of each template. Other templates are texts in which braces mean nothing."""

FRAGMENT_FIELDS: Mapping[str, Mapping[str, Any]] = {
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
"""The fields of fragments, each with a value to try it with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Templates:
    """Texts by name, checked."""

    texts: Mapping[str, str]
    fragments: Mapping[str, str]

    def fill(self, name: str, **values: object) -> str:
        """The template with its fields filled."""
        return self.texts[name].format(**values)

    def fragment(self, name: str, **values: object) -> str:
        """The fragment with its fields filled."""
        return self.fragments[name].format(**values)

    def text_or_template(self, text: str) -> str:
        """A message of the config: the text itself, or the template that it names."""
        return self.texts.get(text, text)


def load_templates(config: PromptConfig) -> Templates:
    """The defaults with the user's folder over them."""
    texts, fragments = _read_folder(DEFAULTS)
    if config.template_dir is not None:
        own_texts, own_fragments = _read_folder(config.template_dir)
        drawn = config.template_variations if config.use_template_stochasticity else {}
        for name, text in own_texts.items():
            _check_template(config.template_dir / f"{name}.txt", text, extra=drawn)
        for name in own_fragments.keys() & fragments.keys():  # others are used nowhere
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
