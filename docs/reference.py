"""Writes the reference pages from the code: commands, config keys, parts.

mkdocs calls `on_page_markdown` for every page; a comment `generated: NAME` in it is replaced by the
table of that name. `python docs/reference.py NAME` prints one.
"""

import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import cyclopts
from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

ROOT = Path(__file__).parents[1]
MARK = re.compile(r"<!-- generated: ([a-z]+) -->")
PLAIN = {str: "text", int: "whole number", float: "number", bool: "true or false"}
PLAIN |= {Path: "path", NoneType: "null", SecretStr: "text", object: "anything", Any: "anything"}
BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
BOUNDS |= {"min_length": "at least", "max_length": "at most"}


MERGES = {
    "linear": "A weighted sum.",
    "layerwise": "Every block takes one parent, or a mixture of its own.",
    "dare": "Drop random entries of each parent, scale up the rest, add.",
    "ties": "Keep the largest entries of each parent, elect a sign for each, average those of it.",
    "dare_ties": "Drop random entries as dare does, then elect signs as ties does.",
}


def on_page_markdown(markdown: str, **_: object) -> str:
    """What mkdocs calls for every page."""
    return MARK.sub(lambda match: TABLES[match[1]](), markdown)


# Config keys.


def configs() -> str:
    """A section for every config and every part of it, each part where it first occurs."""
    from rookery.compose.serve import ServeConfig
    from rookery.fleet import FleetConfig
    from rookery.loops.evolve.config import EvolveConfig
    from rookery.loops.genome import GenomeConfig
    from rookery.loops.grpo import GrpoConfig
    from rookery.loops.icm import IcmConfig
    from rookery.tasks.taskset import GeneratedConfig, HfConfig, JsonlConfig

    roots: dict[str, type[BaseModel]] = {"fleet": FleetConfig}
    roots |= {f"taskset ({kind.model_fields['type'].default})": kind
              for kind in (JsonlConfig, HfConfig, GeneratedConfig)}  # fmt: skip
    roots |= {"genome": GenomeConfig, "grpo": GrpoConfig, "icm": IcmConfig}
    roots |= {"evolve": EvolveConfig, "serve": ServeConfig}
    places: dict[type[BaseModel], str] = {kind: name for name, kind in roots.items()}
    order: dict[str, list[type[BaseModel]]] = {name: [] for name in roots}
    for name, kind in roots.items():
        _collect(kind, name, places, order[name])
    lines = []
    for name, kinds in order.items():
        for kind in kinds:
            level = "##" if places[kind] == name else "###"
            lines += [f"{level} {places[kind]} {{ #{_anchor(places[kind])} }}", ""]
            lines += [_own_sentence(kind), "", *_keys(kind, places), ""]
    return "\n".join(lines)


def _collect(
    kind: type[BaseModel], place: str, places: dict[type[BaseModel], str], order: list[Any]
) -> None:
    order.append(kind)
    inner = []
    for key, field in kind.model_fields.items():
        for part in _models(field.annotation):
            if part not in places:
                tag = part.model_fields.get("type")
                is_tagged = tag is not None and isinstance(tag.default, str)
                places[part] = f"{place}.{key}" + (f" ({tag.default})" if tag and is_tagged else "")
                inner.append(part)
    for part in inner:
        _collect(part, places[part], places, order)


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [kind for argument in get_args(annotation) for kind in _models(argument)]


def _keys(kind: type[BaseModel], places: dict[type[BaseModel], str]) -> Iterator[str]:
    if not kind.model_fields:
        return
    yield "| key | type | default | |"
    yield "|---|---|---|---|"
    for key, field in kind.model_fields.items():
        inner = _models(field.annotation)
        own = _own_sentence(inner[0]) if len(inner) == 1 else ""
        own = "Names this part." if key == "type" else own
        text = _sentence(field.description or "") or own
        of_type = _type(field.annotation, places) + _bounds(field.metadata)
        yield f"| `{key}` | {of_type} | {_default(field)} | {text} |"


def _type(annotation: Any, places: dict[type[BaseModel], str]) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation in places:
        place = places[annotation]
        tag = re.search(r"\((.*)\)$", place)
        return f"[{tag[1] if tag else place}](#{_anchor(place)})"
    if origin is Annotated:
        return _type(arguments[0], places) + _bounds(arguments[1:])
    if origin is Literal:
        return ", ".join(f"`{json.dumps(value)}`".replace('"', "") for value in arguments)
    if origin in {Union, UnionType}:
        return " or ".join(dict.fromkeys(_type(argument, places) for argument in arguments))
    if origin in {tuple, list}:
        inner = [_type(argument, places) for argument in arguments if argument is not ...]
        return "list of " + (" or ".join(inner) if ... in arguments else ", ".join(inner))
    if origin is dict:
        return f"names with {_type(arguments[1], places)}"
    return PLAIN.get(annotation) or str(getattr(annotation, "__name__", annotation))


def _bounds(metadata: Any) -> str:
    flat = [inner for item in metadata for inner in getattr(item, "metadata", [item])]
    found = [
        f"{word} {getattr(item, name):g}" + (" long" if name.endswith("length") else "")
        for item in flat
        for name, word in BOUNDS.items()
        if isinstance(getattr(item, name, None), int | float)
    ]
    return f" ({', '.join(found)})" if found else ""


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "**required**"
    value = field.get_default(call_default_factory=True, validated_data={})
    if value == sys.executable:
        return "the running Python"
    if isinstance(value, BaseModel):
        changed = value.model_dump(mode="json", exclude_defaults=True)
        tag = {"type": value.type} if "type" in type(value).model_fields else {}  # type: ignore[attr-defined]
        value = {**tag, **changed}
        if not value:
            return "as there"
    text = json.dumps(value, default=_plain, ensure_ascii=False)
    return f"`{text}`".replace('"', "" if len(text) > 2 else '"').replace("|", "\\|")


def _plain(value: object) -> object:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude_defaults=True) or {}
    return str(value)


def _anchor(place: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", place.lower()).strip("-")


def _own_sentence(kind: type[BaseModel]) -> str:
    return _sentence(inspect.cleandoc(vars(kind).get("__doc__") or ""))


def _sentence(text: str) -> str:
    """The first paragraph on one line that a table can hold."""
    return " ".join(text.split("\n\n")[0].split()).replace("|", "\\|").replace("'''", "`")


# Commands.


def commands() -> str:
    """A section for every command: its sentence, its examples, its flags."""
    from rookery.cli.app import app

    return "\n".join(line for name in app if name[0] != "-" for line in _command(app[name], name))


def _command(app: cyclopts.App, words: str) -> Iterator[str]:
    children = [name for name in app if name[0] != "-"]
    function = app.default_command
    yield from (f"{'##' if ' ' not in words else '###'} rookery {words}", "")
    text = inspect.cleandoc((function.__doc__ if function else None) or app.help or "")
    yield from (re.split(r"\n+Parameters\n-+\n", text)[0], "")
    rows = []
    for argument in app.assemble_argument_collection(parse_docstring=True) if function else ():
        if argument.show and (argument.parameter.help or argument.field_info.name):
            is_word = argument.index is not None
            names = [argument.name.lstrip("-").upper()] if is_word else argument.names
            default = argument.field_info.default
            is_empty = argument.required or default in (None, "", ())
            shown = "**required**" if argument.required else "" if is_empty else f"`{default}`"
            name = ", ".join(f"`{name}`" for name in names)
            sentence = _sentence(argument.parameter.help or "")
            rows.append(f"| {name} | {_type(argument.hint, {})} | {shown} | {sentence} |")
    if rows:
        yield from ("| | type | default | |", "|---|---|---|---|", *rows, "")
    for name in children:
        yield from _command(app[name], f"{words} {name}")


# Parts that are chosen by name.


def parts() -> str:
    """Losses, scorers, merges and mutations by the name that a config gives them."""
    from rookery.tasks.scorers import ScorerConfig
    from rookery.train.losses import LOSSES
    from rookery.weights import merge, mutate

    def tagged(module: Any) -> list[Any]:
        kinds = [kind for _, kind in inspect.getmembers(module, inspect.isclass)]
        return [kind for kind in kinds if "type" in getattr(kind, "model_fields", ())]

    groups = {"Losses": [*LOSSES.values()], "Scorers": [*get_args(get_args(ScorerConfig)[0])]}
    groups |= {"Merges": tagged(merge), "Mutations": tagged(mutate)}
    lines = []
    for title, kinds in groups.items():
        lines += [f"## {title}", "", "| `type` | | keys |", "|---|---|---|"]
        for kind in kinds:
            keys = ", ".join(f"`{key}`" for key in kind.model_fields if key != "type")
            name = kind.model_fields["type"].default
            lines.append(f"| `{name}` | {_own_sentence(kind) or MERGES[name]} | {keys} |")
        lines.append("")
    return "\n".join(lines)


TABLES: dict[str, Callable[[], str]] = {
    "commands": commands,
    "configs": configs,
    "parts": parts,
    "changelog": lambda: (ROOT / "CHANGELOG.md").read_text().partition("\n")[2],
}
if __name__ == "__main__":
    sys.stdout.write(TABLES[sys.argv[1]]() + "\n")
