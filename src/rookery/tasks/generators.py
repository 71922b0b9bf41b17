"""Generated tasksets: made from words and a seed, the same on every machine, nothing to download.

    arithmetic, letter-reversal, unit-conversion, json-slots     plain skills
    label-*                                                      tasks that interfere

Every `label-` task asks for the label of an item and all of them answer with the same two words,
red and blue, each by a rule of its own, which the prompt names and does not give away:

    Task: size      Item: elephant     -> red     (big)
    Task: living    Item: elephant     -> blue    (an animal)
    Task: alphabet  Item: elephant     -> red     (e is in the first half)

A model trained on one of them answers the others wrongly, so a merge of such models has something
to lose and something to win.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, product, zip_longest
from typing import TypeVar

from rookery.errors import TaskError
from rookery.tasks import wordlists as words
from rookery.tasks.rows import Row
from rookery.tasks.scorers import (
    ChoiceConfig,
    ExactConfig,
    JsonSchemaConfig,
    NumericConfig,
    ScorerConfig,
)

__all__ = ["GENERATORS", "LABELS", "Generator", "generate"]

LABELS = ("red", "blue")
"""The one vocabulary of all `label-` tasks."""

Item = TypeVar("Item")
Fields = dict[str, object]

WORDS = tuple(
    dict.fromkeys(
        word
        for words_of in (
            words.POSITIVE,
            words.NEGATIVE,
            words.BIG_ANIMALS,
            words.SMALL_ANIMALS,
            words.OBJECTS,
            words.FRUITS,
            words.TOOLS,
            words.ENGLISH,
        )
        for word in words_of
        if word.isascii() and word.isalpha()
    )
)
"""Every English item of one word, once."""

UNITS = {
    ("kilometers", "meters"): 1000,
    ("meters", "centimeters"): 100,
    ("kilograms", "grams"): 1000,
    ("liters", "milliliters"): 1000,
    ("hours", "minutes"): 60,
    ("minutes", "seconds"): 60,
    ("days", "hours"): 24,
    ("weeks", "days"): 7,
    ("years", "months"): 12,
    ("feet", "inches"): 12,
    ("yards", "feet"): 3,
    ("pounds", "ounces"): 16,
    ("dollars", "cents"): 100,
}
"""How many of the second unit one of the first is."""

PERSON_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "city": {"type": "string"},
    },
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Generator:
    """How one generated taskset is made and judged."""

    summary: str
    draw: Callable[[int], Iterator[Fields]]
    """Seed -> the fields of every item there is, each once, in the order of that seed."""
    scorer: ScorerConfig


def generate(name: str, *, size: int, seed: int) -> Iterator[Row]:
    """The first `size` rows of a generator. A larger size begins with the same rows."""
    rows = list(islice(GENERATORS[name].draw(seed), size))
    if len(rows) < size:
        raise TaskError(f"{name} has {len(rows)} different tasks, and size is {size}: lower size.")
    for number, fields in enumerate(rows, start=1):
        yield Row(where=f"generated:{name} row {number}", fields=fields)


def _arithmetic(seed: int) -> Iterator[Fields]:
    # 47 + 38 and 38 + 47 are one task: the two of them would fall into two splits.
    pairs = [(a, b) if (a + b) % 2 else (b, a) for a in range(10, 100) for b in range(a, 100)]
    for a, b in _shuffled(pairs, seed=seed):
        prompt = f"What is {a} + {b}? Answer with the number only."
        yield {"id": f"{a}+{b}", "prompt": prompt, "reference": str(a + b)}


def _letter_reversal(seed: int) -> Iterator[Fields]:
    candidates = [word for word in WORDS if 4 <= len(word) <= 8 and word != word[::-1]]
    for word in _shuffled(candidates, seed=seed):
        prompt = f"Write the word {word} backwards. Answer with the letters only."
        yield {"id": word, "prompt": prompt, "reference": word[::-1]}


def _unit_conversion(seed: int) -> Iterator[Fields]:
    for units, amount in _shuffled(list(product(UNITS, range(2, 61))), seed=seed):
        source, target = units
        prompt = f"Convert {amount} {source} to {target}. Answer with the number only."
        reference = str(amount * UNITS[units])
        yield {"id": f"{amount}-{source}-{target}", "prompt": prompt, "reference": reference}


def _json_slots(seed: int) -> Iterator[Fields]:
    people = list(product(words.NAMES, range(18, 90), words.CITIES))
    for name, age, city in _shuffled(people, seed=seed):
        prompt = (
            f"{name} is {age} years old and lives in {city}.\n"
            'Write this as a JSON object with the keys "name", "age" and "city".'
        )
        reference = {"name": name, "age": age, "city": city}
        yield {"id": f"{name}-{age}-{city}", "prompt": prompt, "reference": reference}


def _label(
    title: str,
    *,
    red: Sequence[str],
    blue: Sequence[str],
    labels: tuple[str, str] = LABELS,
) -> Generator:
    """A task whose items alternate between the labels for as long as both last."""

    def draw(seed: int) -> Iterator[Fields]:
        orders = (_shuffled(red, seed=seed), _shuffled(blue, seed=seed))
        for pair in zip_longest(*orders):
            for item, label in zip(pair, labels, strict=True):
                if item is not None:
                    question = f"Is it {labels[0]} or {labels[1]}?"
                    yield {
                        "id": item,
                        "prompt": f"Task: {title}\nItem: {item}\n{question} Answer:",
                        "reference": label,
                        "choices": list(labels),
                    }

    summary = f"{title}: {len(red)} {labels[0]} and {len(blue)} {labels[1]} items"
    return Generator(summary=summary, draw=draw, scorer=ChoiceConfig())


def _shuffled(items: Sequence[Item], *, seed: int) -> Iterator[Item]:
    """All items in an order that the seed fixes for every version of Python."""
    yield from sorted(items, key=lambda i: hashlib.blake2b(f"{seed}/{i!r}".encode()).digest())


GENERATORS: dict[str, Generator] = {
    "arithmetic": Generator(
        summary="addition of two numbers of two digits", draw=_arithmetic, scorer=NumericConfig()
    ),
    "letter-reversal": Generator(
        summary="a word backwards",
        draw=_letter_reversal,
        scorer=ExactConfig(ignore_case=True, ignore_punctuation=True),
    ),
    "unit-conversion": Generator(
        summary="whole amounts to a smaller unit", draw=_unit_conversion, scorer=NumericConfig()
    ),
    "json-slots": Generator(
        summary="the facts of a sentence as a JSON object",
        draw=_json_slots,
        scorer=JsonSchemaConfig.model_validate(
            {"json_schema": PERSON_SCHEMA, "match_reference": True}
        ),
    ),
    "label-alphabet": _label(
        "alphabet",
        red=[word for word in WORDS if word[0] <= "m"],
        blue=[word for word in WORDS if word[0] > "m"],
    ),
    "label-kind": _label("kind", red=words.FRUITS, blue=words.TOOLS),
    "label-language": _label("language", red=words.FRENCH, blue=words.ENGLISH),
    "label-length": _label(
        "length",
        red=[word for word in WORDS if len(word) <= 5],
        blue=[word for word in WORDS if len(word) >= 8],
    ),
    "label-living": _label(
        "living", red=words.OBJECTS, blue=words.BIG_ANIMALS + words.SMALL_ANIMALS
    ),
    "label-parity": _label(
        "parity",
        red=[str(number) for number in range(1, 1000, 2)],
        blue=[str(number) for number in range(2, 1000, 2)],
    ),
    "label-sentiment": _label("sentiment", red=words.POSITIVE, blue=words.NEGATIVE),
    "label-size": _label("size", red=words.BIG_ANIMALS, blue=words.SMALL_ANIMALS),
    # The same rules with labels of their own: adapters of these can be merged, those above clash.
    "mark-kind": _label("kind", red=words.FRUITS, blue=words.TOOLS, labels=("red", "blue")),
    "mark-language": _label(
        "language", red=words.FRENCH, blue=words.ENGLISH, labels=("left", "right")
    ),
    "mark-living": _label(
        "living",
        red=words.OBJECTS,
        blue=words.BIG_ANIMALS + words.SMALL_ANIMALS,
        labels=("up", "down"),
    ),
    "mark-sentiment": _label(
        "sentiment", red=words.POSITIVE, blue=words.NEGATIVE, labels=("north", "south")
    ),
}
