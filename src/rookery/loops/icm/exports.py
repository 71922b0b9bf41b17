"""Labels as training files. They contain only the labelled data.

labels.jsonl   every item: label, probability, margin, provenance; null if unlabelled
sft.jsonl      a taskset: prompt, choices, answer (`rookery sft`, `genome`, any scorer of choices),
               and as weight tanh(margin / 2): how much more likely the label is than not, 0 to 1
pairs.jsonl    preferences: prompt, chosen, rejected
soft.jsonl     prompt and the probability of each label
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from rookery.config import Config
from rookery.errors import TaskError
from rookery.loops.icm.items import Item
from rookery.loops.icm.objective import LabelLogprobs
from rookery.runs import Run
from rookery.tasks.template import (
    check_prompt_template,
    compile_prompt_template,
    render_prompt_template,
)

__all__ = [
    "ExportsConfig",
    "LabelRecord",
    "PairsConfig",
    "check_exports",
    "make_pairs",
    "write_exports",
]


class LabelPairsConfig(Config):
    """The label against every other label, after the item's own prompt."""

    type: Literal["label"] = "label"


class GroupPairsConfig(Config):
    """Items of a group that have the label against those that do not."""

    type: Literal["group"] = "group"
    prompt: str
    """jinja2 template over an item's fields: the prompt of both, such as "{{ question }}"."""
    response: str
    """jinja2 template over an item's fields: the response, for example "{{ claim }}"."""
    label: str = ""
    """The label of chosen responses. Empty: the first label."""

    @field_validator("prompt", "response")
    @classmethod
    def _is_template(cls, value: str) -> str:
        return check_prompt_template(value)


class ComparePairsConfig(Config):
    """Items that compare two responses: with the label the first one is chosen, else the second."""

    type: Literal["compare"] = "compare"
    prompt: str
    """jinja2 template over an item's fields: the common prompt of both responses."""
    first: str
    """jinja2 template: the response that the label prefers."""
    second: str
    """jinja2 template: the other response."""
    label: str = ""
    """The label that prefers the first response. Empty: the first label."""

    @field_validator("prompt", "first", "second")
    @classmethod
    def _is_template(cls, value: str) -> str:
        return check_prompt_template(value)


PairsConfig = Annotated[
    ComparePairsConfig | GroupPairsConfig | LabelPairsConfig, Field(discriminator="type")
]


class ExportsConfig(Config):
    """Contents of the training files."""

    pairs: PairsConfig = LabelPairsConfig()
    """Kind of preference pairs to write."""
    min_margin: float = 0.0
    """Minimum log-odds of a label to be exported. labels.jsonl contains all items."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelRecord:
    """The result for one item."""

    item: Item
    label: int | None
    read: LabelLogprobs | None
    """Log-probabilities among the labels, given the labels of all other items."""
    margin: float | None
    """Log-odds of the label."""
    iteration: int | None
    """Iteration in which it got its label; None for a start label."""
    provenance: Mapping[str, Any]
    """Model, order, batch, chain and seed."""


def check_exports(items: Sequence[Item], *, labels: Sequence[str], config: ExportsConfig) -> None:
    """Refuse in advance what `write_exports` would refuse after the search."""
    match config.pairs:
        case LabelPairsConfig():
            return
        case GroupPairsConfig(prompt=prompt, response=response, label=label):
            texts = [prompt, response]
        case ComparePairsConfig(prompt=prompt, first=first, second=second, label=label):
            texts = [prompt, first, second]
    _wanted(label, labels)
    for template in map(compile_prompt_template, texts):
        for item in items:
            render_prompt_template(template, item.fields, where=f"exports.pairs, item {item.id}")


def write_exports(
    run: Run, records: Sequence[LabelRecord], *, labels: Sequence[str], config: ExportsConfig
) -> None:
    """Write the four files, each atomically."""
    run.write_text("labels.jsonl", _lines(_label_row(record, labels) for record in records))
    sure = [r for r in records if r.margin is not None and r.margin >= config.min_margin]
    run.write_text("sft.jsonl", _lines(_sft_row(record, labels) for record in sure))
    run.write_text("soft.jsonl", _lines(_soft_row(record, labels) for record in sure))
    run.write_text("pairs.jsonl", _lines(make_pairs(sure, labels=labels, config=config.pairs)))


def make_pairs(
    records: Sequence[LabelRecord], *, labels: Sequence[str], config: PairsConfig
) -> list[dict[str, Any]]:
    """Make preference rows. The margin is the log-odds that the choice is right."""
    match config:
        case LabelPairsConfig():
            return [
                _pair(r.item.text, f" {labels[r.label or 0]}", f" {other}", r.margin)
                for r in records
                for index, other in enumerate(labels)
                if index != r.label
            ]
        case GroupPairsConfig():
            return _group_pairs(records, config, wanted=_wanted(config.label, labels))
        case ComparePairsConfig():
            return _compare_pairs(records, config, wanted=_wanted(config.label, labels))


def _group_pairs(
    records: Sequence[LabelRecord], config: GroupPairsConfig, *, wanted: int
) -> list[dict[str, Any]]:
    prompt, response = map(compile_prompt_template, (config.prompt, config.response))
    groups: dict[str, list[LabelRecord]] = {}
    for record in records:
        groups.setdefault(record.item.group, []).append(record)

    def fill(template: Any, record: LabelRecord) -> str:
        return render_prompt_template(template, record.item.fields, where=record.item.id)

    return [
        _pair(
            fill(prompt, good),
            fill(response, good),
            fill(response, bad),
            min(good.margin or 0.0, bad.margin or 0.0),
        )
        for group in groups.values()
        for good in group
        for bad in group
        if good.label == wanted and bad.label != wanted
    ]


def _compare_pairs(
    records: Sequence[LabelRecord], config: ComparePairsConfig, *, wanted: int
) -> list[dict[str, Any]]:
    """Make one row per comparison. The reverse of an existing one adds nothing."""
    prompt, first, second = map(
        compile_prompt_template, (config.prompt, config.first, config.second)
    )
    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    for record in records:
        fields, where = record.item.fields, record.item.id
        texts = [render_prompt_template(t, fields, where=where) for t in (prompt, first, second)]
        chosen, rejected = texts[1:] if record.label == wanted else texts[:0:-1]
        key = (texts[0], chosen, rejected)
        rows.setdefault(key, _pair(texts[0], chosen, rejected, record.margin))
    return list(rows.values())


def _pair(prompt: str, chosen: str, rejected: str, margin: float | None) -> dict[str, Any]:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected, "margin": margin}


def _wanted(label: str, labels: Sequence[str]) -> int:
    if label and label not in labels:
        raise TaskError(f"exports.pairs.label is {label!r}; the labels are {list(labels)}.")
    return labels.index(label) if label else 0


def _label_row(record: LabelRecord, labels: Sequence[str]) -> dict[str, Any]:
    return {
        "id": record.item.id,
        "label": None if record.label is None else labels[record.label],
        "score": None if record.read is None else record.read[record.label or 0],
        "margin": record.margin,
        "iteration": record.iteration,
        "text": record.item.text,
        **record.provenance,
    }


def _sft_row(record: LabelRecord, labels: Sequence[str]) -> dict[str, Any]:
    return {
        "id": record.item.id,
        "prompt": record.item.text,
        "choices": list(labels),
        "answer": labels[record.label or 0],
        "weight": math.tanh(max(0.0, record.margin or 0.0) / 2),
    }


def _soft_row(record: LabelRecord, labels: Sequence[str]) -> dict[str, Any]:
    read = record.read or ()
    return {
        "id": record.item.id,
        "prompt": record.item.text,
        "probabilities": {name: math.exp(v) for name, v in zip(labels, read, strict=True)},
    }


def _lines(rows: Iterable[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
