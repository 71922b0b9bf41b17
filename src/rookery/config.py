"""Configs: one frozen pydantic model per component, read from YAML or TOML, overridden by flags.

    class GenomeConfig(Config):
        population: int = 16
        '''How many candidates live at a time.'''

    load_config(GenomeConfig, Path("genome.yaml"), overrides=["--population", "8"])

An error names the given value, the allowed ones and the nearest right name.
"""

import json
import tomllib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Self, TypeVar, Union, get_args, get_origin
from urllib.parse import SplitResult, urlsplit

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from rookery.errors import ConfigError, did_you_mean, near_path

__all__ = [
    "Config",
    "assign",
    "check_url",
    "is_loopback",
    "load_config",
    "override",
    "parse_config",
    "parse_overrides",
    "read_document",
    "without_removed",
]

Model = TypeVar("Model", bound="Config")


class Config(BaseModel):
    """The base of every config: frozen, no unknown keys, finite numbers; docstrings describe the
    fields."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )

    resolved_later: ClassVar[frozenset[str]] = frozenset()
    """Keys whose `run:NAME/PART` may name runs that do not exist yet."""

    def from_folder(self, folder: Path) -> Self:  # noqa: ARG002
        """The config with relative paths resolved from `folder`, the folder of its file."""
        return self


def without_removed(document: object, removed: Mapping[str, tuple[object, str]]) -> object:
    """Drop keys of earlier versions. `removed` maps each to the value that configs of old runs
    have, and to a remedy; any other value raises ValueError with the remedy."""
    if not isinstance(document, Mapping):
        return document
    for key, (neutral, instead) in removed.items():
        if key in document and document[key] != neutral:
            raise ValueError(f"{key} is no key any more: {instead}.")
    return {key: value for key, value in document.items() if key not in removed}


def load_config(
    model: type[Model],
    path: Path | None = None,
    *,
    overrides: Sequence[str] = (),
    resolve: Callable[[dict[str, Any]], dict[str, Any]] = lambda document: document,
) -> Model:
    """Read `path` if given, apply the overrides, resolve references, validate."""
    document = read_document(path) if path is not None else {}
    flags = override(model, document, parse_overrides(overrides))
    document = resolve(document)
    return parse_config(
        model, document, origin=str(path) if path else "the command line", flags=flags
    )


def override(
    model: type[Config], document: dict[str, Any], pairs: Iterable[tuple[str, str]]
) -> list[str]:
    """Apply (dotted key, text) pairs to a document; return the keys as the document has them."""
    names = []
    for dotted, text in pairs:
        keys, kinds = _resolve(model, dotted)
        assign(document, keys, _value(text, kinds))
        names.append(".".join(keys))
    return names


def parse_config(
    model: type[Model], document: Mapping[str, object], *, origin: str, flags: Sequence[str] = ()
) -> Model:
    """Validate a document; every mistake in it becomes one line of the ConfigError.

    `flags` are the keys given on the command line: if all mistakes are in them, the message names
    no file.
    """
    try:
        return model.model_validate(document)
    except ValidationError as error:
        details = error.errors(include_url=False)
        lines = [_sentence(model, document, detail) for detail in details]
        places = [f"{_place_of(document, detail)}." for detail in details]
        is_flag = all(any(place.startswith(f"{flag}.") for flag in flags) for place in places)
        head = "The command line" if is_flag else f"{origin} is not a valid config"
        raise ConfigError(
            f"{head}: {lines[0]}" if len(lines) == 1 else "\n  ".join([f"{head}:", *lines])
        ) from None


def read_document(path: Path) -> dict[str, Any]:
    """Read a YAML, TOML or JSON file as a dict; a ConfigError names the file and the line."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"There is no config file {path}.{near_path(path)}") from None
    except IsADirectoryError:
        raise ConfigError(
            f"{path} is a folder: give the config in it, such as {path / 'config.yaml'}."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The config file {path} cannot be read: {error}") from error
    try:
        document = _parse(text, path)
    except RecursionError:
        raise ConfigError(f"{path} does not parse: it is nested too deeply.") from None
    except (yaml.YAMLError, ValueError) as error:  # also of tomllib, json, huge numbers
        what = " ".join(str(error).split()).replace('in "<unicode string>", ', "in ")
        raise ConfigError(f"{path} does not parse: {what}") from error
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(
            f"{path} holds {type(document).__name__}; a config is a mapping: write `key: value`."
        )
    _check_size(document, path)
    return document


def _check_size(document: dict[str, Any], path: Path) -> None:
    """Refuse huge documents: YAML's aliases repeat their targets, and may be recursive."""
    count, waiting = 0, [document]
    while waiting:
        node: Any = waiting.pop()
        inside = node.values() if isinstance(node, dict) else node
        if isinstance(inside, str) or not isinstance(inside, Iterable):
            continue
        waiting.extend(inside)
        count += len(node)
        if count > MOST_VALUES:
            raise ConfigError(
                f"{path} has more than {MOST_VALUES:,} values, with what its aliases (`*name`) "
                "repeat: write fewer."
            )


def parse_overrides(words: Sequence[str]) -> list[tuple[str, str]]:
    """Parse `--a.b 3`, `--a.b=3`, `a.b=3` and a bare `--flag` (true) to (dotted key, text)
    pairs."""
    pairs: list[tuple[str, str]] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        key, has_value, text = word.removeprefix("--").partition("=")
        if not (word.startswith("--") or has_value) or "" in key.split("."):
            raise ConfigError(f"Got {word!r}: an override is `--section.key value`.")
        if not has_value:
            is_flag = not rest or rest[0].startswith("--")
            text = "true" if is_flag else rest.pop(0)
        pairs.append((key, text))
    return pairs


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def check_url(url: str, *, named: str) -> SplitResult:
    """Split a server's address; ValueError unless it has a scheme and a host.

    `named` begins the error: `llm.api_base is`.
    """
    is_spaced = len(url.split()) != 1
    if not url.startswith(("http://", "https://")):
        place = "" if is_spaced else url.rpartition("://")[2]
        raise ValueError(
            f"{named} {url!r}, which does not begin with http:// or https://: write "
            f"http://{place or 'host:8000'}."
        )
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:  # an open bracket, a port that is no number
        raise ValueError(f"{named} {url!r}: {error}. Write http://host:8000.") from None
    if is_spaced or not host:
        raise ValueError(f"{named} {url!r}, which names no host: write http://host:8000.")
    return parts


class _Loader(yaml.SafeLoader):
    """YAML with dates as text, and repeated keys as errors."""

    yaml_implicit_resolvers = {  # noqa: RUF012 (a class attribute of PyYAML)
        first: [(tag, regex) for tag, regex in resolvers if not tag.endswith(":timestamp")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} is repeated", key.start_mark
                )
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else id(key))
        return super().construct_mapping(node, deep)


MOST_VALUES = 100_000
"""Limit of one config."""


def _parse(text: str, path: Path) -> Any:
    match path.suffix:
        case ".toml":
            return tomllib.loads(text)
        case ".json":
            return json.loads(text, object_pairs_hook=_distinct)
        case ".yaml" | ".yml":
            return yaml.load(text, _Loader)
        case _:
            raise ConfigError(f"{path} is neither .yaml, .yml, .json nor .toml: rename it.")


def _distinct(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    document: dict[str, Any] = {}
    for key, value in pairs:
        if key in document:
            raise ValueError(f"the key {key!r} is repeated.")
        document[key] = value
    return document


def _value(text: str, kinds: Sequence[Any]) -> Any:
    """Parse the text as YAML, unless the key takes only text: a folder may be called `123`."""
    try:
        value = yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError):
        return text
    is_text = bool(kinds) and {*kinds} <= {str, Path, NoneType}
    is_null = value is None and NoneType in kinds
    return text if is_text and not is_null and not isinstance(value, str) else value


def assign(document: dict[str, Any], keys: Sequence[str], value: object) -> None:
    """Set a value in a document; missing sections are made."""
    node: Any = document
    for depth, key in enumerate(keys):
        place, dotted = ".".join(keys[:depth]), ".".join(keys)
        index: int | str = key
        if isinstance(node, list):
            index = _index(node, key, place=place, dotted=dotted)
        elif not isinstance(node, dict):
            raise ConfigError(f"--{dotted}: {place} is {node!r}, not a section.")
        elif depth + 1 < len(keys) and node.get(key) is None:
            node[key] = {}
        if depth + 1 == len(keys):
            node[index] = value
        node = node[index]


def _index(node: list[Any], key: str, *, place: str, dotted: str) -> int:
    if key.isdecimal() and int(key) < len(node):
        return int(key)
    if not node:
        raise ConfigError(f"--{dotted}: {place} is an empty list: give the list whole.")
    last = f" to {place}.{len(node) - 1}" if len(node) > 1 else ""
    raise ConfigError(
        f"--{dotted}: {place} has {len(node)} item{'s' * (len(node) > 1)}: write {place}.0{last}, "
        "or the list whole."
    )


def _place_of(document: object, detail: ErrorDetails) -> str:
    is_tag = detail["type"].startswith("union_tag")
    return ".".join([*_place(document, detail["loc"]), *(["type"] if is_tag else [])])


def _sentence(model: type[BaseModel], document: object, detail: ErrorDetails) -> str:
    where = _place_of(document, detail)
    written = _show(detail["input"])
    message = detail["msg"].removeprefix("Value error, ").removeprefix("Input ")
    match detail["type"]:
        case "extra_forbidden":
            return _unknown_key(where, _kinds_at(model, detail["loc"][:-1]))
        case "invalid_key":
            return f"{where} is not a key: keys are words."
        case "missing":
            return f"{where} is missing: {message.lower()}."
        case "union_tag_invalid" | "union_tag_not_found":
            return _unknown_tag(where, _kinds_at(model, detail["loc"]), detail)
        case "value_error":
            return f"{where}: {message}" if where else message
        case "model_type" | "model_attributes_type" | "dict_type":
            message = "should be a section of `key: value` pairs"
        case "tuple_type" | "list_type":
            message = "should be a list: write [..., ...]"
        case "too_short" | "too_long" as kind:
            bound = "min_length" if kind == "too_short" else "max_length"
            limit = detail["ctx"][bound]
            least = "at least" if kind == "too_short" else "at most"
            message = f"should have {least} {limit} item{'s' * (limit != 1)}"
    return f"{where} is {written}; it {message}."


def _unknown_key(where: str, kinds: Sequence[Any]) -> str:
    allowed = sorted({key for kind in kinds if _is_model(kind) for key in kind.model_fields})
    hint = did_you_mean(where.rpartition(".")[2], allowed, cutoff=0.5)
    return f"{where} is not a key." + (hint or f" Allowed: {', '.join(allowed)}.")


def _unknown_tag(where: str, kinds: Sequence[Any], detail: ErrorDetails) -> str:
    tags = [tag for kind in kinds for tag in _tags(kind)]
    allowed = " or ".join(filter(None, [", ".join(map(repr, tags[:-1])), repr(tags[-1])]))
    tag = detail.get("ctx", {}).get("tag")
    is_what = "is missing" if tag is None else f"is {_show(tag)}"
    hint = did_you_mean(str(tag), tags, cutoff=0.5)
    return f"{where} {is_what}; it should be {allowed}.{hint}"


def _show(value: object) -> str:
    try:
        text = json.dumps(value, default=repr)
    except (TypeError, ValueError):  # keys that are no text, a list that contains itself
        text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _place(document: object, loc: Sequence[int | str]) -> list[str]:
    """The place of an error in the user's words: pydantic's also names members of unions."""
    node: Any = document
    place = []
    for depth, part in enumerate(loc):
        is_there = isinstance(node, dict) and part in node
        if isinstance(node, list) and isinstance(part, int):
            is_there = part < len(node)
        if is_there or (isinstance(node, dict) and depth + 1 == len(loc)):
            place.append(str(part))
        node = node[part] if is_there else node
    return place


def _resolve(model: type[BaseModel], dotted: str) -> tuple[list[str], list[Any]]:
    """Split a dotted name into keys, and return the types allowed there.

    `-` becomes `_` in field names. Keys that the user chooses, such as those of `floors`, stay.
    """
    keys: list[str] = []
    kinds: list[Any] = [model]
    for part in dotted.split("."):
        is_own = any(get_origin(kind) is dict for kind in kinds)
        keys.append(part if is_own else part.replace("-", "_"))
        kinds = _inside(kinds, keys[-1])
    return keys, kinds


def _kinds_at(model: type[BaseModel], loc: Sequence[int | str]) -> list[Any]:
    kinds: list[Any] = [model]
    for part in loc:
        kinds = _inside(kinds, str(part))
    return kinds


def _inside(kinds: Sequence[Any], part: str) -> list[Any]:
    """Types allowed under a key, at an index, or in the union member of a tag."""
    if len(kinds) > 1 and (tagged := [kind for kind in kinds if part in _tags(kind)]):
        return tagged
    inner: list[Any] = []
    for kind in kinds:
        if _is_model(kind) and part in kind.model_fields:
            inner += _flatten(kind.model_fields[part].annotation)
        elif get_origin(kind) is dict:
            inner += _flatten(get_args(kind)[1])
        elif get_origin(kind) in {list, tuple}:
            inner += [member for argument in get_args(kind) for member in _flatten(argument)]
    return inner


def _flatten(annotation: Any) -> list[Any]:
    """The members of a union, or the type itself."""
    if get_origin(annotation) is Annotated:
        return _flatten(get_args(annotation)[0])
    if get_origin(annotation) in {Union, UnionType}:
        return [member for argument in get_args(annotation) for member in _flatten(argument)]
    return [annotation]


def _tags(kind: Any) -> tuple[str, ...]:
    is_tagged = _is_model(kind) and "type" in kind.model_fields
    return get_args(kind.model_fields["type"].annotation) if is_tagged else ()


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)
