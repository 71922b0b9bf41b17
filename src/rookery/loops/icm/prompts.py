"""Items as tokens: a demonstration of each item with each label, and the query that asks for it.

    prompts = Prompts(items, encoder=load_encoder(folder), data=config.data)
    prompts.context(labels, target=3, order=order.of(3))     # head, demonstrations, query
    prompts.label_tokens                                     # one token per label

Every piece is encoded as it reads within the whole, and the pieces are checked to join exactly: the
label is the same single token in a demonstration and as the answer to a query.
"""

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from rookery.errors import ModelError, TaskError, boundary
from rookery.loops.icm.items import DataConfig, Item
from rookery.search.labelling import UNLABELLED, Labels
from rookery.types import TokenIds

__all__ = ["Encoder", "Prompts", "load_encoder"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoder:
    """A tokenizer as it is needed here."""

    encode: Callable[[str], TokenIds]
    """Text to tokens, nothing added, no text read as a special token."""
    first: TokenIds = ()
    """What every prompt of the model begins with, such as its begin-of-text token."""


class Prompts:
    """The tokens of one batch of items."""

    def __init__(self, items: Sequence[Item], *, encoder: Encoder, data: DataConfig) -> None:
        self.items = tuple(items)
        self._separator = data.separator
        self._encode = encoder.encode
        self.head: TokenIds = encoder.first
        if data.preamble:
            self.head += self._encode(data.preamble) + self._after(data.preamble, data.separator)
        self.queries = [self._after(data.separator, item.text) for item in items]
        self.label_tokens = tuple(self._label_token(items[0].text, label) for label in data.labels)
        tail = self._after(f"{items[0].text} {data.labels[0]}", data.separator)
        self._check(data)
        self._demos = [[(*q, token, *tail) for token in self.label_tokens] for q in self.queries]
        self._digests = [[_digest(demo) for demo in own] for own in self._demos]
        self._query_digests = [_digest(query) for query in self.queries]

    @property
    def longest_tokens(self) -> int:
        """The tokens of the longest context: all items as demonstrations, and a query."""
        demos = sum(len(own[0]) for own in self._demos)
        rest = (len(q) - len(own[0]) for q, own in zip(self.queries, self._demos, strict=True))
        return len(self.head) + demos + max(rest)

    def demo(self, item: int, label: int) -> TokenIds:
        """An item with a label, as others are shown it."""
        return self._demos[item][label]

    def context(self, labels: Labels, target: int, *, order: Sequence[int]) -> TokenIds:
        """Head, the labelled items in the given order, and the query of the target."""
        demos = (self._demos[i][labels[i]] for i in order if labels[i] != UNLABELLED)
        return (*self.head, *chain.from_iterable(demos), *self.queries[target])

    def num_tokens(self, labels: Labels, target: int, *, order: Sequence[int]) -> int:
        """The length of that context, without building it."""
        demos = sum(len(self._demos[i][0]) for i in order if labels[i] != UNLABELLED)
        return len(self.head) + demos + len(self.queries[target])

    def digest(self, labels: Labels, target: int, *, order: Sequence[int], salt: str) -> str:
        """Names the content of that context under one model, `salt`: equal names, equal tokens."""
        parts = [self._digests[i][labels[i]] for i in order if labels[i] != UNLABELLED]
        key = hashlib.blake2b(salt.encode(), digest_size=16)
        key.update(_digest((*self.head, *self.label_tokens)))
        key.update(b"".join(parts))
        key.update(self._query_digests[target])
        return key.hexdigest()

    def _after(self, before: str, text: str) -> TokenIds:
        """The tokens of a text as it continues another one."""
        head, both = self._encode(before), self._encode(before + text)
        return both[len(head) :] if both[: len(head)] == head else self._encode(text)

    def _label_token(self, text: str, label: str) -> int:
        tokens = self._after(text, f" {label}")
        if len(tokens) != 1:
            raise TaskError(
                f"The label {label!r} is {len(tokens)} tokens behind a prompt; it must be one, the "
                "same in demonstrations and as the answer: take another word, such as True, yes, A."
            )
        return tokens[0]

    def _check(self, data: DataConfig) -> None:
        """The pieces join to what the tokenizer makes of the whole text, for every item."""
        if len(set(self.label_tokens)) < len(self.label_tokens):
            raise TaskError(f"The labels {list(data.labels)} are not different tokens.")
        for item, query in zip(self.items, self.queries, strict=True):
            for label, token in zip(data.labels, self.label_tokens, strict=True):
                whole = self._after(data.separator, f"{item.text} {label}{data.separator}")
                if whole[: len(query) + 1] != (*query, token):
                    raise TaskError(
                        f"Item {item.id}: its text and the label {label!r} do not join: the "
                        "tokenizer reads them differently apart and together. End data.prompt with "
                        "a word, and begin data.separator with a line break."
                    )


def load_encoder(model_folder: str | Path) -> Encoder:
    """The encoder of a model folder's tokenizer."""
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ModelError(
            "Reading a tokenizer needs the package transformers: pip install 'rookery[hf]'."
        ) from error
    remedy = "Give a folder that holds tokenizer.json, or a Hugging Face id"
    with boundary(
        ModelError,
        f"Reading the tokenizer of {model_folder}",
        remedy={OSError: remedy, ValueError: remedy},
    ):
        tokenizer = AutoTokenizer.from_pretrained(str(model_folder))

    def encode(text: str) -> TokenIds:
        found = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        return tuple(int(token) for token in found)

    with_special = tuple(tokenizer.encode("a", add_special_tokens=True))
    plain = encode("a")
    start = with_special.index(plain[0]) if plain and plain[0] in with_special else 0
    return Encoder(encode=encode, first=with_special[:start])


def _digest(tokens: TokenIds) -> bytes:
    return hashlib.blake2b(array("q", tokens).tobytes(), digest_size=16).digest()
