"""Turns one row of a file or dataset into a Task, or into an error that names the row and problem.

    {"prompt": "2+2=", "answer": "4"}
    {"messages": [{"role": "user", "content": "2+2="}], "reference": 4}
    {"messages": [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"}]}
    {"prompt": "2+2=", "choices": ["3", "4"], "answer": 1}
    {"prompt": "2+2=", "choices": {"A": "3", "B": "4"}, "answer": "B"}

The config assigns roles to fields; otherwise the usual names on the first usable row do. All other
rows must have the same fields, and no additional field with a usual name.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jinja2

from rookery.config import Config
from rookery.errors import TaskError, did_you_mean
from rookery.tasks.template import compile_prompt_template, render_prompt_template
from rookery.types import Json, Message, Task

__all__ = ["FieldsConfig", "Row", "RowReader", "require_plain"]

MAX_DEPTH = 100
"""Limit on nested lists and objects in a row: far above real data, safe for recursive programs."""

USUAL_NAMES: Mapping[str, tuple[str, ...]] = {
    "prompt": ("prompt", "question", "problem"),
    "messages": ("messages",),
    "reference": ("reference", "answer", "completion"),
    "choices": ("choices",),
    "id": ("id",),
    "group": (),
    "weight": (),
}


class FieldsConfig(Config):
    """Names of the row's fields. If a name is empty, the usual names are tried."""

    prompt: str = ""
    """Field with the question: a text or messages. Usual names: prompt, question, problem."""
    messages: str = ""
    """Field with a chat instead of a prompt: a list of {role, content}. If no field holds the
    reference, the assistant's last message is the reference. Usual name: messages."""
    reference: str = ""
    """Field with the right answer. Usual names: reference, answer, completion."""
    choices: str = ""
    """Field with [text, ...], {A: ..., B: ...} or {text: [...], label: [...]}. Usual name: choices.
    """
    id: str | None = ""
    """Field with a text or whole number that is unique in the file. Usual name: id. Without the
    field, or with `null`, ids are made from the content. Use `null` if the file repeats ids."""
    group: str = ""
    """Field that tells questions apart. Rows of one question are in the same split and count as one
    cluster in intervals. Empty: rows with equal prompts are one question."""
    weight: str = ""
    """Field with the weight of a row, 0 or more. It weighs answers in sft, advantages in grpo, and
    means over search and select tasks; reports weigh all rows equally. Rows of weight 0 are left
    out. Empty: every row has weight 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The fields of one row, and its place for error messages: "data.jsonl line 17"."""

    where: str
    fields: Mapping[str, object]


class RowReader:
    """Reads rows with the same fields as the first; TaskError if the first has no prompt."""

    def __init__(self, fields: FieldsConfig, *, prompt_template: str, first: Row) -> None:
        # With a template, fields that look like a prompt are only its input.
        names = {"prompt": "", "messages": ""} if prompt_template else {}
        named = fields.model_dump(exclude=set(names))
        for role, name in named.items():
            names[role] = _find_name(role, name, first)
        self._names = names
        # Only roles without a configured field can be overlooked in later rows.
        looked_for = [role for role, name in named.items() if name == ""]
        self._other_names = {
            name: role
            for role in looked_for
            for name in USUAL_NAMES[role]
            if name not in names.values()
        }
        self._first = first.where
        if not prompt_template:
            self._require_one_prompt(first)
        self._template: jinja2.Template | None = (
            compile_prompt_template(prompt_template) if prompt_template else None
        )

    def _require_one_prompt(self, first: Row) -> None:
        prompt, messages = self._names["prompt"], self._names["messages"]
        if prompt and messages:
            raise TaskError(
                f"{first.where}: has both {prompt!r} and {messages!r}; a task has one of them. "
                "Leave the other out."
            )
        if not prompt and not messages:
            raise TaskError(
                f"{first.where}: found no prompt among the fields {_listed(first)}. Name the field "
                "(fields.prompt, fields.messages) or write a prompt_template."
            )

    def read(self, row: Row, *, source: str) -> Task:
        """Return the task of a row; its id begins with the taskset's name, `source`."""
        self._require_none_ignored(row)
        prompt, last_turn = self._prompt(row)
        reference = _as_json(self._value(row, "reference"), row, "reference")
        reference = last_turn if reference is None else _unwrap_completion(reference)
        choices, reference = self._choices(row, reference)
        name = self._id(row) or _content_id(prompt, reference, choices)
        return Task(
            id=f"{source}/{name}",
            prompt=prompt,
            reference=reference,
            choices=choices,
            source=source,
            group=self._group(row),
            weight=self._weight(row),
        )

    def _require_none_ignored(self, row: Row) -> None:
        for name, role in self._other_names.items():
            if row.fields.get(name) is not None:
                remedy = "fields: {id: null} makes ids from the content" if role == "id" else ""
                raise TaskError(
                    f"{row.where}: has the field {name!r}, usually the {role}, and {self._first}, "
                    f"which settled the fields, has not. "
                    f"{remedy or f'Give all rows the same fields, or name one as fields.{role}'}."
                )

    @property
    def has_ids(self) -> bool:
        return bool(self._names["id"])

    def open_fields(self, row: Row) -> dict[str, object]:
        """Return the fields a prompt may show: without the reference, and without `messages`, which
        may end with the reference."""
        hidden = {self._names["reference"], self._names["messages"]}
        return {name: value for name, value in row.fields.items() if name not in hidden}

    def _group(self, row: Row) -> str:
        """Return the row's group as JSON text; "" if the taskset has no group field."""
        if not self._names["group"]:
            return ""
        return json.dumps(_as_json(self._value(row, "group"), row, "group"), sort_keys=True)

    def _weight(self, row: Row) -> float:
        value = self._value(row, "weight") if self._names["weight"] else 1.0
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 <= float(value) < math.inf:  # type: ignore[arg-type]
            name = self._names["weight"]
            raise TaskError(f"{row.where}: {name!r} is {_shown(value)}; it must be 0 or more.")
        return float(value)  # type: ignore[arg-type]

    def _value(self, row: Row, role: str) -> object:
        name = self._names[role]
        if not name:
            return None
        if name not in row.fields:
            raise TaskError(f"{row.where}: has no field {name!r}; it has {_listed(row)}.")
        return row.fields[name]

    def _prompt(self, row: Row) -> tuple[str | tuple[Message, ...], str | None]:
        """Return the prompt, and the final assistant message of a chat if there is one."""
        if self._template is not None:
            return render_prompt_template(self._template, row.fields, where=row.where), None
        role = "prompt" if self._names["prompt"] else "messages"
        value, name = self._value(row, role), self._names[role]
        if isinstance(value, str) and role == "prompt":
            if not value.strip():
                raise TaskError(f"{row.where}: {name!r} is empty; a prompt needs text.")
            return value, None
        if isinstance(value, list) and value:
            return self._chat(row, tuple(_message(item, row, name) for item in value), name)
        wanted = "a text or a list of messages" if role == "prompt" else "a list of messages"
        raise TaskError(f"{row.where}: {name!r} is {_shown(value)}; it must be {wanted}.")

    def _chat(
        self, row: Row, messages: tuple[Message, ...], name: str
    ) -> tuple[tuple[Message, ...], str | None]:
        if messages[-1].role != "assistant":
            return messages, None
        if self._names["reference"] or len(messages) == 1:
            raise TaskError(
                f"{row.where}: {name!r} ends with the assistant's message, which leaves nothing to "
                "answer. Drop it, or drop the reference field to make it the reference."
            )
        return messages[:-1], messages[-1].content

    def _choices(self, row: Row, reference: Json) -> tuple[tuple[str, ...], Json]:
        value = self._value(row, "choices")
        if value is None and not self._names["choices"]:
            return (), reference
        texts, labels = _texts_and_labels(value)
        if texts is None or not all(isinstance(text, str) for text in texts):
            raise TaskError(
                f"{row.where}: {self._names['choices']!r} is {_shown(value)}; it must be a list of "
                "texts, {A: text, B: text, ...}, or {text: [...], label: [...]}."
            )
        if labels is None:
            return tuple(str(text) for text in texts), reference
        if (
            not isinstance(labels, list)
            or len(labels) != len(texts)
            or any(labels.index(label) < place for place, label in enumerate(labels))
        ):
            raise TaskError(
                f"{row.where}: {self._names['choices']!r} has {len(texts)} texts and the labels "
                f"{_shown(labels)}; they must be a list of one label for each text, all different."
            )
        if reference in labels:
            reference = labels.index(reference)
        return tuple(str(text) for text in texts), reference

    def _id(self, row: Row) -> str:
        value = self._value(row, "id")
        if value is None and not self._names["id"]:
            return ""
        if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
            raise TaskError(
                f"{row.where}: {self._names['id']!r} is {_shown(value)}; an id is a text or a "
                "whole number. fields: {id: null} makes ids from the content."
            )
        return str(value)


def _find_name(role: str, named: str | None, first: Row) -> str:
    """Return the field of a role on the first row; "" if it has none, or if `named` is None."""
    if named is None:
        return ""
    if named:
        if named in first.fields:
            return named
        hint = did_you_mean(named, first.fields, shown=repr)
        raise TaskError(
            f"{first.where}: fields.{role} is {named!r} and the row has no such field; "
            f"it has {_listed(first)}.{hint}"
        )
    usual = [name for name in USUAL_NAMES[role] if name in first.fields]
    if len(usual) > 1:
        raise TaskError(
            f"{first.where}: {' and '.join(map(repr, usual))} could each be the {role}. "
            f"Say which with fields.{role}."
        )
    return usual[0] if usual else ""


def _texts_and_labels(value: object) -> tuple[Sequence[object] | None, object]:
    """Return a row's choices and their labels; None for either that the row lacks.

    ["3", "4"] -> ["3", "4"], None; {"A": "3", "B": "4"} -> ["3", "4"], ["A", "B"]
    """
    match value:
        case list():
            return value, None
        case {"text": list() as texts, **others}:
            return texts, others.get("label")
        case dict():
            # A dataset column has the letters of all rows; letters of other rows are null here.
            named = {label: text for label, text in value.items() if text is not None}
            return list(named.values()) or None, list(named)
    return None, None


def _message(item: object, row: Row, name: str) -> Message:
    if isinstance(item, dict):
        role, content = item.get("role"), item.get("content")
        if isinstance(role, str) and role and isinstance(content, str):
            return Message(role=role, content=content)
    raise TaskError(
        f"{row.where}: {name!r} holds {_shown(item)}; a message is "
        '{"role": "user", "content": "..."} with texts.'
    )


def _unwrap_completion(reference: Json) -> Json:
    """[{"role": "assistant", "content": "4"}] -> "4"; everything else is unchanged."""
    match reference:
        case [{"role": "assistant", "content": str(content)}]:
            return content
    return reference


def _content_id(
    prompt: str | tuple[Message, ...], reference: Json, choices: tuple[str, ...]
) -> str:
    words: Json = prompt if isinstance(prompt, str) else [[m.role, m.content] for m in prompt]
    content = json.dumps([words, reference, list(choices)], sort_keys=True)
    return hashlib.blake2b(content.encode(), digest_size=6).hexdigest()


def require_plain(fields: Mapping[str, object], *, where: str) -> None:
    """Raise TaskError for values that JSON parsers accept but files, hashes or tokenizers do not:
    lone surrogates, numbers beyond the range of floats, and very deep nesting."""
    level: list[object] = [fields]
    for _ in range(MAX_DEPTH):
        inner: list[object] = []
        for value in level:
            match value:
                case dict():
                    inner += [*value, *value.values()]
                case list():
                    inner += value
                case str() if not value.isascii():
                    _require_unicode(value, where)
                case float() if not math.isfinite(value):
                    raise TaskError(
                        f"{where}: holds a number too large for a float, such as 1e999; write "
                        "null or a number."
                    )
        level = inner
        if not level:
            return
    raise TaskError(
        f"{where}: has lists or objects more than {MAX_DEPTH} deep; a row is a few levels deep."
    )


def _require_unicode(text: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TaskError(
            f"{where}: a text holds {text[error.start]!r}, half of a surrogate pair, which is no "
            "character: write the whole pair or the character itself."
        ) from None


def _as_json(value: object, row: Row, role: str) -> Json:
    if isinstance(value, float) and not math.isfinite(value):
        raise TaskError(f"{row.where}: the {role} is {value}; write null or a number.")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_as_json(item, row, role) for item in value]
    if isinstance(value, dict):
        return {str(key): _as_json(item, row, role) for key, item in value.items()}
    raise TaskError(
        f"{row.where}: the {role} is {_shown(value)}; it must be text, a number, true, false, "
        "null, or lists and objects of them."
    )


def _listed(row: Row) -> str:
    return ", ".join(repr(name) for name in row.fields) or "no fields"


def _shown(value: object) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}"
