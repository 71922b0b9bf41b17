"""Reads a config file, the environment and flags as one EvolveConfig, and warns of unused keys.

    loaded = read_config(Path("config.yaml"), flags=Flags(iterations=50), environment=os.environ)
    loaded.config, loaded.warnings

Flags override the file, and the file overrides the environment. Keys of models (`api_key`) are
secrets: they are not stored with the config, and a resumed run reads them again.
"""

import copy
import difflib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from pydantic import SecretStr

from rookery.config import Config, check_url, override, parse_config, parse_overrides, read_document
from rookery.errors import ConfigError
from rookery.loops.evolve.config import EvolveConfig, ModelConfig
from rookery.loops.evolve.config_sections import DEFAULT_API_BASE, Section
from rookery.paths import expanded
from rookery.runs.run_folder import Find, resolve_references

__all__ = [
    "Flags",
    "LoadedConfig",
    "drop_unknown",
    "read_config",
    "warn_not_built",
    "warn_unknown",
    "with_keys",
]

# Keys of a config file that have no effect, each with a sentence for its warning.
#
# They are either unknown to OpenEvolve too, or known to it and not implemented here.


HINTS = {
    "allow_full_rewrites": "write diff_based_evolution: false for whole programs",
    "checkpoints": "write checkpoint_interval",
    "evaluation": "write evaluator",
    "evolution": "write its keys under database or at the top level",
    "llm.model": "write llm.primary_model",
    "logging": "write log_level and log_dir",
    "max_program_length": "write max_code_length",
    "novelty": "write database.similarity_threshold and database.embedding_model",
    "parallel_evaluations": "write evaluator.parallel_evaluations",
}
"""Common keys that no version of OpenEvolve reads."""

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
"""OpenEvolve's keys that are accepted and ignored. `llm.x` also stands for each model's own `x`."""

_MODEL_LISTS = ("models", "evaluator_models")
_OF_A_MODEL = {"name", "weight"}


def drop_unknown(
    model: type[Config], document: Mapping[Any, Any], *, place: str = ""
) -> tuple[dict[str, Any], list[str]]:
    """Return the document without unknown keys, and the dotted names of those."""
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
    """Say that an unknown key has no effect, and what to write instead."""
    plain = ".".join(part for part in dotted.split(".") if not part.isdecimal())
    near = difflib.get_close_matches(plain, list(_all_keys(model)), n=1, cutoff=0.8)
    hint = HINTS.get(plain) or (f"did you mean {near[0]}?" if near else "")
    return f"{dotted} is not a key and changes nothing" + (f": {hint}" if hint else "")


def warn_not_built(document: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[str]:
    """Return warnings for known keys that differ from their default and are ignored."""
    warnings = []
    for key, reason in NOT_BUILT.items():
        *sections, name = key.split(".")
        section_values, default = dict(document), dict(defaults)
        for section in sections:
            section_values, default = section_values.get(section) or {}, default[section]
        if name in section_values and section_values[name] != default[name]:
            warnings.append(f"{key} changes nothing: {reason}")
        if sections == ["llm"] and name not in _OF_A_MODEL:
            warnings += _in_models(section_values, name, reason)
    return warnings


def _in_models(llm: Mapping[str, Any], name: str, reason: str) -> Iterator[str]:
    for models in _MODEL_LISTS:
        for index, model in enumerate(llm.get(models) or ()):
            if isinstance(model, Mapping) and model.get(name) is not None:
                yield f"llm.{models}.{index}.{name} changes nothing: {reason}"


def _drop_in_item(section: type[Section], item: Any, *, place: str) -> tuple[Any, list[str]]:
    return drop_unknown(section, item, place=place) if isinstance(item, Mapping) else (item, [])


def _section_of(annotation: Any) -> type[Section] | None:
    """Return the model of a key that holds one or a list. `rookery` is no Section: it is strict."""
    kinds = [annotation, *get_args(annotation)]
    return next((k for k in kinds if isinstance(k, type) and issubclass(k, Section)), None)


def _all_keys(model: type[Config], place: str = "") -> Iterator[str]:
    for name, info in model.model_fields.items():
        yield place + name
        if section := _section_of(info.annotation):
            yield from _all_keys(section, f"{place}{name}.")


_VARIABLE = re.compile(r"\$\{([^}]+)\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """OpenEvolve's flags that change the config, and dotted ones (`--database.num_islands 3`)."""

    iterations: int | None = None
    target_score: float | None = None
    log_level: str | None = None
    api_base: str | None = None
    primary_model: str | None = None
    secondary_model: str | None = None
    overrides: Sequence[str] = ()
    values: Mapping[str, Any] = field(default_factory=dict)
    """Values laid over the file, section by section, before the overrides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedConfig:
    """A config, and a warning for each key of its file that has no effect."""

    config: EvolveConfig
    warnings: tuple[str, ...]


def read_config(
    source: Path | Mapping[str, Any] | None,
    *,
    environment: Mapping[str, str],
    flags: Flags | None = None,
    find: Find | None = None,
    folder: Path | None = None,
) -> LoadedConfig:
    """Read, override, expand, validate. ConfigError for wrong types and unset variables.

    `find` resolves the runs of `run:NAME/PART`; None leaves these unresolved. `folder` is the base
    of relative paths in a document; None: the current folder.
    """
    flags = flags or Flags()
    path, document = None, {}
    if isinstance(source, Path):
        path, document = source, read_document(source)
    elif source is not None:
        document = copy.deepcopy(dict(source))
    _merge(document, flags.values)
    document, unknown = drop_unknown(EvolveConfig, _without_empty_sections(document))
    given_by_flag = _override(document, flags)
    if find is not None:
        document = resolve_references(document, find=find)
    warnings = [warn_unknown(EvolveConfig, dotted) for dotted in unknown]
    _expand(document.get("llm"), environment)
    origin = str(path) if path else "the config"
    config = parse_config(EvolveConfig, document, origin=origin, flags=given_by_flag)
    warnings += warn_not_built(document, EvolveConfig().model_dump())
    config = _complete(config, flags, environment)
    config = _with_engine_models(config)
    _check_models(config)
    base = path.parent if path else folder or Path()
    return LoadedConfig(config=_beside(config, base.resolve()), warnings=tuple(warnings))


def _without_empty_sections(document: Mapping[str, Any]) -> dict[str, Any]:
    """Drop sections without content: `database:` with nothing below it is the default."""
    defaults = EvolveConfig().model_dump()
    is_section = {key for key, value in defaults.items() if isinstance(value, dict)}
    return {k: v for k, v in document.items() if not (v is None and k in is_section)}


def with_keys(
    config: EvolveConfig, keeper: EvolveConfig | None, *, environment: Mapping[str, str]
) -> EvolveConfig:
    """Return a stored config with the secret keys of the config that it came from."""
    keeper_llm = keeper.llm if keeper is not None else None
    key = keeper_llm.api_key if keeper_llm is not None else None
    if key is None and environment.get("OPENAI_API_KEY"):
        key = SecretStr(environment["OPENAI_API_KEY"])
    models = (*keeper_llm.models, *keeper_llm.evaluator_models) if keeper_llm is not None else ()
    keys = {model.name: model.api_key for model in models}

    def keyed(model: ModelConfig) -> ModelConfig:
        return model.model_copy(update={"api_key": keys.get(model.name)})

    llm = config.llm
    update = {
        "api_key": key,
        "models": tuple(map(keyed, llm.models)),
        "evaluator_models": tuple(map(keyed, llm.evaluator_models)),
    }
    return config.model_copy(update={"llm": llm.model_copy(update=update)})


def _merge(document: dict[str, Any], values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        current = document.get(key)
        if isinstance(current, dict) and isinstance(value, Mapping):
            _merge(current, value)
        else:
            document[key] = copy.deepcopy(value)


def _override(document: dict[str, Any], flags: Flags) -> list[str]:
    """Apply the flags; return the keys that they set."""
    pairs = parse_overrides(flags.overrides)
    alone: dict[str, Any] = {}
    override(EvolveConfig, alone, [pair for pair in pairs if not re.search(r"\.\d+\.", pair[0])])
    if unknown := drop_unknown(EvolveConfig, alone)[1]:
        raise ConfigError(f"--{warn_unknown(EvolveConfig, unknown[0])}.")
    names = override(EvolveConfig, document, pairs)
    if flags.iterations is not None:
        document["max_iterations"] = flags.iterations
        names.append("max_iterations")
    if flags.log_level is not None:
        document["log_level"] = flags.log_level
    if flags.target_score is not None:
        rookery = document.setdefault("rookery", {})
        if isinstance(rookery, dict):  # else the validation says what it is
            rookery["target_score"] = flags.target_score
    return names


def _expand(llm: object, environment: Mapping[str, str], place: str = "llm") -> None:
    """Replace `${NAME}` in keys and URLs of models by environment variables."""
    if not isinstance(llm, dict):
        return
    for key in ("api_key", "api_base"):
        value = llm.get(key)
        match = _VARIABLE.fullmatch(value) if isinstance(value, str) else None
        if match is None:
            continue
        if match[1] not in environment:
            raise ConfigError(
                f"{place}.{key} is ${{{match[1]}}}, and the variable {match[1]} is not set: "
                f"export {match[1]}=..., or leave {key} out for a server that needs none."
            )
        llm[key] = environment[match[1]]
    for models in ("models", "evaluator_models"):
        entries = llm.get(models)
        for index, model in enumerate(entries if isinstance(entries, list) else ()):
            _expand(model, environment, f"{place}.{models}.{index}")


def _complete(config: EvolveConfig, flags: Flags, environment: Mapping[str, str]) -> EvolveConfig:
    """Apply flags to the models, and the environment as the last fallback."""
    llm = config.llm.with_models(primary=flags.primary_model, secondary=flags.secondary_model)
    if flags.api_base:
        llm = llm.with_api_base(flags.api_base)
    base = llm.api_base or environment.get("OPENAI_API_BASE") or DEFAULT_API_BASE
    llm = llm.model_copy(update={"api_base": base})
    if llm.api_key is None and environment.get("OPENAI_API_KEY"):
        llm = llm.model_copy(update={"api_key": SecretStr(environment["OPENAI_API_KEY"])})
    embedding = config.database.embedding_api_base or environment.get("OPENAI_EMBEDDING_BASE_URL")
    database = config.database.model_copy(update={"embedding_api_base": embedding or None})
    evaluator = config.evaluator
    if environment.get("ENABLE_ARTIFACTS", "true").lower() != "true":
        evaluator = evaluator.model_copy(update={"enable_artifacts": False})
    return config.model_copy(update={"llm": llm, "database": database, "evaluator": evaluator})


def _with_engine_models(config: EvolveConfig) -> EvolveConfig:
    """Without configured models, use all models of the engine with equal weight."""
    names = config.rookery.engine_models
    if not names or config.llm.models or config.llm.primary_model:
        return config
    models = tuple(ModelConfig(name=name) for name in names)
    return config.model_copy(update={"llm": config.llm.model_copy(update={"models": models})})


def _check_models(config: EvolveConfig) -> None:
    llm = config.llm
    for key, models in (("models", llm.models), ("evaluator_models", llm.evaluator_models)):
        counts = Counter(model.name for model in models)
        if name := next((name for name, count in counts.items() if count > 1), None):
            raise ConfigError(
                f"llm.{key} names {name!r} twice: models are told apart by name, write it once "
                "with the weight of both."
            )
    if config.database.embedding_api_base:
        _check_url(config.database.embedding_api_base, "database.embedding_api_base is")
    for model in (*llm.ensemble, *llm.judges):
        if model.name not in config.rookery.engine_models:
            _check_url(model.api_base or "", f"api_base of the model {model.name!r} is")
        if model.provider not in (None, "openai"):
            raise ConfigError(
                f"llm.provider is {model.provider!r}; it should be 'openai': give --api-base, "
                "the URL of a server with OpenAI's API."
            )
        if model.manual_mode:
            raise ConfigError("llm.manual_mode is true; answers by hand are not supported.")
        if not model.name:
            raise ConfigError("A model of llm.models has no name: write `- name: ...`.")


def _check_url(url: str, named: str) -> None:
    try:
        check_url(url, named=named)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _beside(config: EvolveConfig, base: Path) -> EvolveConfig:
    """Resolve paths relative to the config file's folder."""
    rookery = config.rookery
    changes: dict[str, Any] = {
        "first_programs": tuple(_absolute(base, name) for name in rookery.first_programs),
        "adapters": {name: _absolute(base, folder) for name, folder in rookery.adapters.items()},
    }
    if rookery.tasks is not None:
        taskset = _taskset_beside(base, rookery.tasks.taskset)
        changes["tasks"] = rookery.tasks.model_copy(update={"taskset": taskset})
    if rookery.checkpoint is not None:
        changes["checkpoint"] = _absolute(base, rookery.checkpoint)
    config = config.model_copy(update={"rookery": rookery.model_copy(update=changes)})
    folder = config.prompt.template_dir
    if folder is None:
        return config
    # OpenEvolve's own are relative to the current folder.
    tried = dict.fromkeys(Path(_absolute(start, str(folder))) for start in (base, Path.cwd()))
    existing = next((each for each in tried if each.is_dir()), None)
    if existing is None:
        places = " nor ".join(map(str, tried))
        raise ConfigError(f"prompt.template_dir is {folder}, and there is no folder {places}.")
    prompt = config.prompt.model_copy(update={"template_dir": existing})
    return config.model_copy(update={"prompt": prompt})


def _taskset_beside(base: Path, name: str) -> str:
    """Resolve a file (maybe with options) beside the config or in the current folder."""
    file, mark, options = name.partition("?")
    for start in (base, Path.cwd()):
        if (path := expanded(file, start)).exists():
            return f"{path.absolute()}{mark}{options}"
    return name


def _absolute(base: Path, name: str) -> str:
    return str(expanded(name, base))
