"""Writes the reference pages from the code: commands, config keys, parts, routes.

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


ROUTES = {
    "/api/v1/healthz": "Says that the service is up.",
    "/api/v1/client/config": "Tells the SDK its settings.",
    "/api/v1/client/dynamic_config": "Tells the SDK the settings that may change.",
    "/api/v1/get_server_capabilities": "Lists the base models and their context lengths.",
    "/api/v1/telemetry": "Takes the SDK's telemetry and stores nothing.",
    "/api/v1/create_session": "Begins a session of one client program.",
    "/api/v1/session_heartbeat": "Keeps a session alive.",
    "/api/v1/sessions/{session_id}/finish": "Ends a session.",
    "/api/v1/sessions": "Lists your sessions.",
    "/api/v1/sessions/{session_id}": "Shows one session.",
    "/api/v1/create_model": "Makes a model to train: a base model and a LoRA shape.",
    "/api/v1/get_info": "Shows a model in training.",
    "/api/v1/weights_info": "Shows the base model and the LoRA shape of a checkpoint.",
    "/api/v1/optim_step": "Takes an AdamW step with the given values.",
    "/api/v1/save_weights": "Saves a checkpoint to train on.",
    "/api/v1/save_weights_for_sampler": "Saves a version to sample from.",
    "/api/v1/save_weights_external": "Saves weights for download; with `merged` the whole model.",
    "/api/v1/load_weights": "Loads a checkpoint into a model.",
    "/api/v1/copy_weights": "Copies a checkpoint.",
    "/api/v1/create_sampling_session": (
        "Begins a sampling session on a base model or saved weights."
    ),
    "/api/v1/join_sampling_session": "Uses a sampling session of another program of the same key.",
    "/api/v1/samplers/{sampler_id}": "Shows a sampling session.",
    "/api/v1/asample": "Draws samples; the result is fetched later.",
    "/api/v1/cancel_future": "Cancels an accepted request.",
    "/api/v1/training_runs": "Lists your models.",
    "/api/v1/training_runs/{run_id}": "Shows one model.",
    "/api/v1/training_runs/{run_id}/checkpoints": "Lists the checkpoints of one model.",
    "/api/v1/checkpoints": "Lists all your checkpoints.",
    "/api/v1/training_runs/{run_id}/checkpoints/{kind}/{name}": "Deletes a checkpoint.",
    "/api/v1/training_runs/{run_id}/checkpoints/{kind}/{name}/publish": (
        "Publishes a checkpoint to all tenants, or takes that back."
    ),
    "/api/v1/training_runs/{run_id}/checkpoints/{kind}/{name}/ttl": (
        "Sets how long a checkpoint is kept."
    ),
    "/api/v1/training_runs/{run_id}/checkpoints/{kind}/{name}/external_weights_urls": (
        "Gives links to the files of a checkpoint."
    ),
    "/api/v1/download/{token}/archive.tar": "Downloads a checkpoint as a tar file.",
    "/api/v1/download/{token}": "Downloads a checkpoint by its link.",
    "/api/v1/download/{token}/{file:path}": "Downloads one file of a checkpoint.",
    "/api/v1/adapters": "Adds a PEFT adapter (POST), or lists them (GET).",
    "/api/v1/adapters/{adapter_id}": "Removes an adapter.",
    "/api/v1/sample": "Draws from text prompts and answers at once.",
    "/v1/models": "Lists the models, as OpenAI does.",
    "/v1/completions": "Completes a prompt, as OpenAI does.",
    "/v1/chat/completions": "Answers a chat, as OpenAI does.",
    "/health": "Says that the engine is up.",
    "/version": "Tells the version.",
    "/tokenize": "Turns text into tokens, as vLLM does.",
    "/detokenize": "Turns tokens into text, as vLLM does.",
    "/v1/load_lora_adapter": "Adds an adapter, as vLLM does.",
    "/v1/unload_lora_adapter": "Removes an adapter, as vLLM does.",
    "/api/v1/sequences": "Lists the stored turns of chats.",
    "/api/v1/sequences/{sequence_id}": "Removes a stored turn.",
    "/": "Names the API.",
    "/register": "Registers a trainer.",
    "/register-env": "Registers an environment.",
    "/disconnect-env": "Takes an environment off.",
    "/wandb_info": "Tells the W&B group and project.",
    "/info": "Tells batch size and longest sequence.",
    "/scored_data": "Takes one group.",
    "/scored_data_list": "Takes several groups, all or none.",
    "/latest_example": "Shows the newest group.",
    "/status": "Tells the step and how many groups wait.",
    "/status-env": "Tells an environment its share of the queue.",
    "/batch": "Gives a trainer the next batch.",
    "/reset_data": "Forgets trainers, environments and groups.",
    "/generate": "Draws from text or tokens, as vLLM's example server does.",
    "/inference/v1/generate": "Draws from tokens.",
}
"""What a route does, for handlers without a docstring."""


def on_page_markdown(markdown: str, **_: object) -> str:
    """What mkdocs calls for every page."""
    return MARK.sub(lambda match: TABLES[match[1]](), markdown)


# Config keys.


def configs() -> str:
    """A section for every config and every part of it, each part where it first occurs."""
    from rookery.compose.kinds import find_kind
    from rookery.compose.serve import ServeConfig
    from rookery.fleet import FleetConfig
    from rookery.loops.evolve.config import EvolveConfig
    from rookery.tasks.taskset import GeneratedConfig, HfConfig, JsonlConfig

    roots: dict[str, type[BaseModel]] = {"fleet": FleetConfig}
    roots |= {f"taskset ({kind.model_fields['type'].default})": kind
              for kind in (JsonlConfig, HfConfig, GeneratedConfig)}  # fmt: skip
    roots |= {name: find_kind(name).config for name in ("genome", "grpo", "icm")}
    roots |= {"evolve": EvolveConfig}
    roots |= {name: find_kind(name).config for name in ("sft", "eval", "pipeline", "league")}
    roots |= {"serve": ServeConfig}
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


def routes() -> str:
    """A table of the routes of each application; its handlers need no service to be listed."""
    from unittest.mock import MagicMock

    from rookery.compat.atropos.app import make_atropos_app
    from rookery.compat.serving import make_app

    stub = MagicMock()
    gateway = make_atropos_app(stub, delivery=stub, side=stub, key="", limit_bytes=1)
    applications = {"rookery serve": make_app(stub, keys=None), "The Atropos gateway": gateway}
    lines = []
    for title, app in applications.items():
        lines += [f"## {title}", "", "| route | | keys of the body |", "|---|---|---|"]
        rows = [
            f"| `{' '.join(sorted(route.methods - {'HEAD'}))} {path}` | "
            f"{_sentence(inspect.cleandoc(route.endpoint.__doc__ or '')) or ROUTES[path]} | "
            f"{_body(route)} |"
            for path, route in _routes(app.router)
        ]
        lines += [*dict.fromkeys(rows), ""]
    return "\n".join(lines)


def _routes(router: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The routes of a router and of those that it includes, with their whole paths."""
    for route in router.routes:
        inner = getattr(route, "original_router", None)
        if inner is not None:
            yield from _routes(inner, prefix + router.prefix)
        elif hasattr(route, "endpoint") and route.endpoint.__module__.startswith("rookery"):
            yield prefix + route.path, route


def _body(route: Any) -> str:
    """The keys that a request may have; none where the handler reads the bytes itself."""
    parameters = inspect.signature(route.endpoint).parameters.values()
    models = [kind for one in parameters for kind in _models(one.annotation)]
    return ", ".join(f"`{key}`" for kind in models for key in kind.model_fields)


TABLES: dict[str, Callable[[], str]] = {
    "commands": commands,
    "configs": configs,
    "parts": parts,
    "routes": routes,
    "changelog": lambda: (ROOT / "CHANGELOG.md").read_text().partition("\n")[2],
}
if __name__ == "__main__":
    sys.stdout.write(TABLES[sys.argv[1]]() + "\n")
