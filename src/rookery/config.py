"""Configs: one frozen pydantic model per component, read from YAML or TOML, overridden by flags.

    class GenomeConfig(Config):
        population: int = 16
        '''How many candidates live at a time.'''

    load_config(GenomeConfig, Path("genome.yaml"), overrides=["--population", "8"])

Wrong input is answered with what was given, what is allowed and the nearest right name.
"""

import difflib
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from rookery.errors import ConfigError

__all__ = ["Config", "load_config", "parse_config", "parse_overrides", "read_document"]

Model = TypeVar("Model", bound="Config")


class Config(BaseModel):
    """The parent of every config: frozen, no unknown keys, field docs from the docstrings."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=()
    )


def load_config(
    model: type[Model], path: Path | None = None, *, overrides: Sequence[str] = ()
) -> Model:
    """Read `path` (or nothing), lay the overrides over it, validate."""
    document = read_document(path) if path is not None else {}
    for dotted, value in parse_overrides(overrides):
        _assign(document, dotted, value)
    return parse_config(model, document, origin=str(path) if path else "the command line")


def parse_config(model: type[Model], document: Mapping[str, object], *, origin: str) -> Model:
    """Validate a document; every mistake in it becomes one line of the ConfigError."""
    try:
        return model.model_validate(document)
    except ValidationError as error:
        lines = [_sentence(model, detail) for detail in error.errors(include_url=False)]
        head = f"{origin} is not a valid config"
        raise ConfigError(
            f"{head}: {lines[0]}" if len(lines) == 1 else "\n  ".join([f"{head}:", *lines])
        ) from None


def read_document(path: Path) -> dict[str, Any]:
    """A YAML or TOML file as a dict, or a ConfigError that names the file and the line."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = difflib.get_close_matches(path.name, _siblings(path), n=1)
        hint = f" Did you mean {path.parent / near[0]}?" if near else ""
        raise ConfigError(f"There is no config file {path}.{hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The config file {path} cannot be read: {error}") from error
    try:
        if path.suffix == ".toml":
            return tomllib.loads(text)
        if path.suffix in {".yaml", ".yml", ".json"}:
            document = yaml.safe_load(text)
        else:
            raise ConfigError(f"{path} is neither .yaml, .yml, .json nor .toml: rename it.")
    except (tomllib.TOMLDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} does not parse: {' '.join(str(error).split())}") from error
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(
            f"{path} holds {type(document).__name__}; a config is a mapping: write `key: value`."
        )
    return document


def parse_overrides(words: Sequence[str]) -> list[tuple[str, object]]:
    """`--a.b 3`, `--a.b=3`, `a.b=3` and a bare `--flag` (true) as (dotted key, value) pairs."""
    pairs: list[tuple[str, object]] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") and "=" not in word:
            raise ConfigError(f"Got {word!r}: an override is `--section.key value`.")
        key, has_value, value = word.removeprefix("--").partition("=")
        if not has_value:
            is_flag = not rest or rest[0].startswith("--")
            value = "true" if is_flag else rest.pop(0)
        try:
            pairs.append((key.replace("-", "_"), yaml.safe_load(value)))
        except yaml.YAMLError:
            pairs.append((key.replace("-", "_"), value))
    return pairs


def _assign(document: dict[str, Any], dotted: str, value: object) -> None:
    *parents, last = dotted.split(".")
    node: Any = document
    for depth, parent in enumerate(parents):
        if isinstance(node, list):
            node = _item(node, parent, dotted)
            continue
        node = node.setdefault(parent, {})
        if not isinstance(node, dict | list):
            prefix = ".".join(parents[: depth + 1])
            raise ConfigError(f"--{dotted}: {prefix} is {node!r}, not a section.")
    if isinstance(node, list):
        _item(node, last, dotted)
        node[int(last)] = value
    else:
        node[last] = value


def _item(node: list[Any], index: str, dotted: str) -> Any:
    if not index.isdigit() or int(index) >= len(node):
        raise ConfigError(f"--{dotted}: {index!r} is not one of the items 0 to {len(node) - 1}.")
    return node[int(index)]


def _sentence(model: type[BaseModel], detail: ErrorDetails) -> str:
    where = ".".join(str(part) for part in detail["loc"])
    given = _show(detail["input"])
    if detail["type"] == "extra_forbidden":
        *parents, key = detail["loc"]
        allowed = _allowed_keys(model, parents)
        near = difflib.get_close_matches(str(key), allowed, n=1, cutoff=0.5)
        if near:
            return f"{where} is not a key. Did you mean {near[0]}?"
        return f"{where} is not a key. Allowed: {', '.join(allowed)}."
    if detail["type"] == "missing":
        return f"{where} is missing: {detail['msg'].lower()}."
    if detail["type"].startswith("union_tag"):
        return f"{where}: {detail['msg']}."
    message = detail["msg"].removeprefix("Value error, ").removeprefix("Input ")
    if detail["type"] == "value_error":
        return f"{where}: {message}" if where else message
    return f"{where} is {given}; it {message}."


def _show(value: object) -> str:
    text = json.dumps(value, default=repr)
    return text if len(text) <= 80 else text[:77] + "..."


def _allowed_keys(model: type[BaseModel], parents: Sequence[int | str]) -> list[str]:
    """The keys of the config at a place; tags of unions and list indices lead through."""
    candidates: list[type[BaseModel]] = [model]
    for part in parents:
        inner: list[type[BaseModel]] = []
        for candidate in candidates:
            info = candidate.model_fields.get(str(part))
            inner.extend(_models_in(info.annotation) if info is not None else [candidate])
        candidates = [c for c in inner if _is_tagged(c, str(part))] or inner or candidates
    return sorted({key for candidate in candidates for key in candidate.model_fields})


def _is_tagged(model: type[BaseModel], tag: str) -> bool:
    info = model.model_fields.get("type")
    return info is not None and tag in get_args(info.annotation)


def _models_in(annotation: object) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in {Union, UnionType, Annotated, list, tuple, dict}:
        return [m for argument in get_args(annotation) for m in _models_in(argument)]
    return []


def _siblings(path: Path) -> list[str]:
    return [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
