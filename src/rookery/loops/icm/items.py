r"""Items to be labelled: rows of a .jsonl or .json file, without the answers.

    data:
      path: claims.jsonl
      prompt: "Question: {{ question }}\nClaim: {{ claim }}\nI think this claim is"
      labels: ["True", "False"]
      group: question

Only the report reads gold labels. Their field is dropped from the items, in any file, so that no
prompt or constraint can see it.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from rookery.config import Config
from rookery.errors import TaskError
from rookery.paths import expanded
from rookery.tasks.files import read_json, read_jsonl
from rookery.tasks.rows import Row
from rookery.tasks.template import (
    check_prompt_template,
    compile_prompt_template,
    render_prompt_template,
)

__all__ = ["DataConfig", "GoldConfig", "Item", "batch_items", "read_gold", "read_items"]


class GoldConfig(Config):
    """True labels, read after the search and only for the report."""

    path: Path | None = None
    """A .jsonl or .json file. Empty: the file of the items."""
    field: str = "label"
    """Field of the true label."""
    values: dict[str, str] = Field(default_factory=dict)
    """Label by value, where values are not label names: {"1": "True", "0": "False"}."""


class DataConfig(Config):
    """The items and their possible labels."""

    path: Path
    """A .jsonl file with an object per line, or a .json file with a list of objects."""
    key: str = ""
    """Key of the list in a .json file that holds several: `test`."""
    prompt: str
    """jinja2 template over an item's fields. It ends where the label begins, without a space."""
    labels: tuple[str, ...] = Field(default=("True", "False"), min_length=2)
    """Possible labels. Each must be one token after the prompt and a space."""
    preamble: str = ""
    """Text before the first demonstration."""
    separator: str = "\n\n"
    """Text between a label and the next demonstration."""
    id: str = ""
    """Field of the item's id. Empty: `id` if the item has it, else a hash of the prompt."""
    group: str = ""
    """Field of the group. Items with equal values stay in one batch and next to one another."""
    limit: int | None = Field(default=None, ge=1)
    """Use only the first so many items."""
    gold: GoldConfig | None = None

    @field_validator("prompt")
    @classmethod
    def _is_template(cls, value: str) -> str:
        if value != value.rstrip():
            raise ValueError(
                f"the prompt ends in whitespace ({value[-8:]!r}): end it with the last word, the "
                "space belongs to the label's token"
            )
        return check_prompt_template(value)

    @model_validator(mode="after")
    def _has_distinct_labels(self) -> Self:
        if len(set(self.labels)) < len(self.labels):
            raise ValueError(f"labels are {list(self.labels)}: each may be there once")
        return self

    def from_folder(self, folder: Path) -> Self:
        """Return the config with its paths resolved against the folder of its file."""
        gold = self.gold
        if gold is not None and gold.path is not None:
            gold = gold.model_copy(update={"path": expanded(gold.path, folder).resolve()})
        return self.model_copy(update={"path": expanded(self.path, folder).resolve(), "gold": gold})


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One item to label, for example `Item(id="q7-2", text="Question: ...", group="q7", ...)`."""

    id: str
    text: str
    """The prompt, up to the label."""
    group: str
    fields: Mapping[str, Any]
    """The row without its true label."""


def read_items(config: DataConfig) -> list[Item]:
    """Read the items in file order. Raises TaskError with the row's position."""
    template = compile_prompt_template(config.prompt)
    # Hidden even if gold.path is another file: paths may name the same file differently.
    hidden = None if config.gold is None else config.gold.field
    items: list[Item] = []
    seen: dict[str, str] = {}
    for row in _rows(config.path, key=config.key):
        if config.limit is not None and len(items) == config.limit:
            break
        fields = {key: value for key, value in row.fields.items() if key != hidden}
        text = render_prompt_template(template, fields, where=row.where)
        name = _name(config, fields, text, where=row.where)
        if name in seen:
            raise TaskError(
                f"{row.where}: has the id {name!r} of {seen[name]}: an id names one item. Give "
                "another field as data.id, or drop the repeated row."
            )
        seen[name] = row.where
        group = _group(config, fields, where=row.where) if config.group else name
        items.append(Item(id=name, text=text, group=group, fields=fields))
    if len(items) < 2:
        raise TaskError(f"{config.path} has {len(items)} items; labels need at least 2.")
    return items


def read_gold(config: DataConfig, items: Sequence[Item]) -> dict[str, int]:
    """Read the true labels by item id, for items that have one. Only for the report."""
    gold = config.gold
    if gold is None:
        return {}
    names = {item.id for item in items}
    labels: dict[str, int] = {}
    template = compile_prompt_template(config.prompt)
    key = config.key if gold.path is None else ""
    for row in _rows(gold.path or config.path, key=key):
        fields = {key: value for key, value in row.fields.items() if key != gold.field}
        text = ""
        if not _id_field(config, fields):
            text = render_prompt_template(template, fields, where=row.where)
        name = _name(config, fields, text, where=row.where)
        if name in names and gold.field in row.fields:
            labels[name] = _label(config, row)
    if not labels:
        raise TaskError(
            f"{gold.path or config.path} has no item with a field {gold.field!r}: name the field "
            "as data.gold.field, or leave data.gold out."
        )
    return labels


def batch_items(items: Sequence[Item], *, size: int) -> list[list[Item]]:
    """Split into batches of at most `size`, as even as possible, in order, keeping groups whole."""
    groups: dict[str, list[Item]] = {}
    for item in items:
        groups.setdefault(item.group, []).append(item)
    largest = max(groups.values(), key=len)
    if len(largest) > size:
        raise TaskError(
            f"The group {largest[0].group!r} has {len(largest)} items and a batch {size}: a group "
            "stays in one batch. Write a larger batch_size, or another data.group."
        )
    num_batches = -(-len(items) // size)
    goal = -(-len(items) // num_batches)
    batches: list[list[Item]] = [[]]
    for group in groups.values():
        is_full = len(batches[-1]) + len(group) > size or len(batches[-1]) >= goal
        if is_full and batches[-1]:
            batches.append([])
        batches[-1].extend(group)
    return batches


def _rows(path: Path, *, key: str) -> Iterator[Row]:
    if path.suffix == ".json":
        return read_json(path, key=key)
    if key:
        raise TaskError(f"data.key is {key!r}, and {path} is not a .json file: leave it out.")
    return read_jsonl(path)


def _id_field(config: DataConfig, fields: Mapping[str, object]) -> str:
    return config.id or ("id" if "id" in fields else "")


def _name(config: DataConfig, fields: Mapping[str, object], text: str, *, where: str) -> str:
    field = _id_field(config, fields)
    if not field:
        return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
    value = fields.get(field)
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise TaskError(f"{where}: {field!r} is {value!r}; an id is a text or a whole number.")
    return str(value)


def _group(config: DataConfig, fields: Mapping[str, object], *, where: str) -> str:
    if config.group not in fields:
        known = ", ".join(map(repr, fields))
        raise TaskError(f"{where}: has no field {config.group!r} (data.group); it has {known}.")
    return json.dumps(fields[config.group], sort_keys=True)


def _label(config: DataConfig, row: Row) -> int:
    assert config.gold is not None
    value = row.fields[config.gold.field]
    text = value if isinstance(value, str) else json.dumps(value)
    name = config.gold.values.get(text, text)
    if name not in config.labels:
        raise TaskError(
            f"{row.where}: the true label {text!r} is none of {list(config.labels)}: say what it "
            f'means, data.gold.values: {{"{text}": "{config.labels[0]}"}}.'
        )
    return config.labels.index(name)
