"""Keys of a config file that change nothing, each with a sentence that says so.

Two kinds: keys that OpenEvolve does not know either, and keys that it has and we do not obey.
"""

import difflib
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from rookery.config import Config
from rookery.loops.evolve.config.section import Section

__all__ = ["drop_unknown", "warn_not_built", "warn_unknown"]

HINTS = {
    "allow_full_rewrites": "write diff_based_evolution: false for whole programs",
    "checkpoints": "write checkpoint_interval",
    "evaluation": "write evaluator",
    "evolution": "its keys are those of database and of the top level",
    "llm.model": "write llm.primary_model",
    "logging": "write log_level and log_dir",
    "max_program_length": "write max_code_length",
    "novelty": "write database.similarity_threshold and database.embedding_model",
    "parallel_evaluations": "write evaluator.parallel_evaluations",
}
"""Keys that are in many configs and that no version of OpenEvolve reads."""

_OTHER_MODELS = "it belongs to command-line providers, which are not supported"
_KEPT = "the run folder keeps programs and artifacts"

NOT_BUILT = {
    "database.artifact_retention_days": _KEPT,
    "database.artifacts_base_path": _KEPT,
    "database.cleanup_old_artifacts": _KEPT,
    "database.db_path": _KEPT,
    "database.diversity_metric": "diversity is always measured the same way",
    "database.in_memory": _KEPT,
    "database.max_snapshot_artifacts": "every parent's artifacts are shown",
    "evaluator.cpu_limit": "write rookery.sandbox.cpu_s, in seconds",
    "llm.allow_all_tools": _OTHER_MODELS,
    "llm.init_client": "a config file cannot hold a function",
    "llm.max_ai_credits": _OTHER_MODELS,
    "llm.max_budget_usd": f"{_OTHER_MODELS}; write rookery.budget.max_usd",
    "llm.name": "write llm.primary_model",
    "llm.system_message": "prompt.system_message is what models are told",
    "llm.weight": "write llm.primary_model_weight",
    "max_tasks_per_child": "every program is evaluated in a process of its own",
    "prompt.meta_prompt_weight": "there is no meta-prompting",
    "prompt.use_meta_prompting": "there is no meta-prompting",
}
"""OpenEvolve's keys that are read and not obeyed. `llm.x` is also each model's own `x`."""

_MODEL_LISTS = ("models", "evaluator_models")
_OF_A_MODEL = {"name", "weight"}


def drop_unknown(
    model: type[Config], document: Mapping[Any, Any], *, place: str = ""
) -> tuple[dict[str, Any], list[str]]:
    """The document without keys that its model does not have, and their dotted names."""
    known: dict[str, Any] = {}
    unknown: list[str] = []
    for name, value in document.items():
        dotted = f"{place}{name}"
        if name not in model.model_fields:
            unknown.append(dotted)
            continue
        section = _section_of(model.model_fields[name].annotation)
        if section and isinstance(value, Mapping):
            known[name], more = drop_unknown(section, value, place=f"{dotted}.")
            unknown += more
        elif section and isinstance(value, list):
            known[name] = []
            for index, item in enumerate(value):
                kept, more = _drop_in_item(section, item, place=f"{dotted}.{index}.")
                known[name].append(kept)
                unknown += more
        else:
            known[name] = value
    return known, unknown


def warn_unknown(model: type[Config], dotted: str) -> str:
    """Why an unknown key changes nothing, and what to write instead."""
    plain = ".".join(part for part in dotted.split(".") if not part.isdecimal())
    near = difflib.get_close_matches(plain, list(_all_keys(model)), n=1, cutoff=0.8)
    hint = HINTS.get(plain) or (f"did you mean {near[0]}?" if near else "")
    return f"{dotted} is not a key and changes nothing" + (f": {hint}" if hint else "")


def warn_not_built(document: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[str]:
    """The keys of a document that are known, differ from the default, and are not obeyed."""
    warnings = []
    for key, reason in NOT_BUILT.items():
        *sections, name = key.split(".")
        given, default = dict(document), dict(defaults)
        for section in sections:
            given, default = given.get(section) or {}, default[section]
        if name in given and given[name] != default[name]:
            warnings.append(f"{key} changes nothing: {reason}")
        if sections == ["llm"] and name not in _OF_A_MODEL:
            warnings += _in_models(given, name, reason)
    return warnings


def _in_models(llm: Mapping[str, Any], name: str, reason: str) -> Iterator[str]:
    for models in _MODEL_LISTS:
        for index, model in enumerate(llm.get(models) or ()):
            if isinstance(model, Mapping) and model.get(name) is not None:
                yield f"llm.{models}.{index}.{name} changes nothing: {reason}"


def _drop_in_item(section: type[Section], item: Any, *, place: str) -> tuple[Any, list[str]]:
    return drop_unknown(section, item, place=place) if isinstance(item, Mapping) else (item, [])


def _section_of(annotation: Any) -> type[Section] | None:
    """The model that a key holds one or a list of. `rookery` is no Section: it is checked."""
    kinds = [annotation, *get_args(annotation)]
    return next((k for k in kinds if isinstance(k, type) and issubclass(k, Section)), None)


def _all_keys(model: type[Config], place: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield place + name
        if section := _section_of(field.annotation):
            yield from _all_keys(section, f"{place}{name}.")
