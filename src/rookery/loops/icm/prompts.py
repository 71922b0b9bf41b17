r"""Items as tokens: demonstrations with labels, then the query that asks for a label.

    prompts = BatchPrompts(items, encoder=load_encoder(folder), data=config.data)
    prompts.context(labels, target=3, order=order.of(3))     # demonstrations, then the query
    prompts.label_tokens                                     # one token per label

A context has exactly the tokens of its whole text. It is assembled from pieces that are cut after
the labels, where no token crosses:

    Review: Fine.\nPositive: True | \n\nReview: Dull.\nPositive: False | \n\nReview: ...

The separator belongs to the piece after it, because many tokenizers encode it differently before a
word than at the end of a text ("\n\n" is two tokens of SmolLM2 before a word, one at the end). The
first piece includes the preamble and the effects of a text's beginning.
"""

import hashlib
import json
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from rookery.errors import ModelError, TaskError, boundary, install_extra
from rookery.loops.icm.items import DataConfig, Item
from rookery.search.labelling import UNLABELLED, Labels
from rookery.types import TokenIds

__all__ = ["BatchPrompts", "Encoder", "load_encoder"]

SEPARATORS = ("\n\n", "\n", "\n\n###\n\n", "\n---\n", " ", ", ", " | ")
"""Separators to suggest, tried in this order if the config's does not work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoder:
    """The tokenizer functions that prompts need."""

    encode: Callable[[str], TokenIds]
    """Encodes text without adding tokens or parsing special tokens."""
    first: TokenIds = ()
    """Tokens that every prompt of the model begins with, such as begin-of-text."""


class BatchPrompts:
    """The tokens of one batch of items."""

    def __init__(self, items: Sequence[Item], *, encoder: Encoder, data: DataConfig) -> None:
        self.items = tuple(items)
        self.label_tokens = _label_tokens(items[0], encoder, data)
        pieces = _cut([item.text for item in items], encoder, data, self.label_tokens)
        if pieces is None:
            raise TaskError(_explain_failure(items, encoder, data, self.label_tokens))
        self._openings = [encoder.first + opening for opening in pieces.openings]
        self._queries = pieces.queries
        self._demos = [[(*q, token) for token in self.label_tokens] for q in self._queries]
        self._digests = [[_digest(demo) for demo in demos] for demos in self._demos]
        self._opening_digests = [_digest(opening) for opening in self._openings]
        self._query_digests = [_digest(query) for query in self._queries]

    @property
    def longest_tokens(self) -> int:
        """Tokens of the longest context: one query after demonstrations of all other items."""
        pairs = zip(self._openings, self._queries, strict=True)
        begun = max(len(opening) - len(query) for opening, query in pairs)
        return begun + sum(len(demos[0]) for demos in self._demos) - 1

    def context(self, labels: Labels, target: int, *, order: Sequence[int]) -> TokenIds:
        """Return the labelled items in the given order, then the query of the target."""
        shown = [item for item in order if labels[item] != UNLABELLED]
        if not shown:
            return self._openings[target]
        first, *others = shown
        demos = (self._demos[item][labels[item]] for item in others)
        return (
            *self._openings[first],
            self.label_tokens[labels[first]],
            *chain.from_iterable(demos),
            *self._queries[target],
        )

    def num_tokens(self, labels: Labels, target: int, *, order: Sequence[int]) -> int:
        """Return the length of that context without building it."""
        shown = [item for item in order if labels[item] != UNLABELLED]
        if not shown:
            return len(self._openings[target])
        begun = len(self._openings[shown[0]]) - len(self._queries[shown[0]])
        demos = sum(len(self._demos[item][0]) for item in shown)
        return begun + demos + len(self._queries[target])

    def digest(self, labels: Labels, target: int, *, order: Sequence[int], salt: str) -> str:
        """Return a digest of the context's tokens under the model named by `salt`."""
        shown = [item for item in order if labels[item] != UNLABELLED]
        parts = [self._opening_digests[shown[0] if shown else target]]
        if shown:
            parts += [self._digests[item][labels[item]] for item in shown]
            parts.append(self._query_digests[target])
        key = hashlib.blake2b(salt.encode(), digest_size=16)
        key.update(_digest(self.label_tokens))
        key.update(b"".join(parts))
        return key.hexdigest()


def _label_tokens(item: Item, encoder: Encoder, data: DataConfig) -> TokenIds:
    last_tokens = []
    query = encoder.encode(item.text)
    for label in data.labels:
        whole = encoder.encode(f"{item.text} {label}")
        if whole[: len(query)] != query:
            raise TaskError(_describe_mismatch(item, label))
        if len(whole) != len(query) + 1:
            raise TaskError(
                f"The label {label!r} is {len(whole) - len(query)} tokens after a prompt; it must "
                "be one, the same in demonstrations and as the answer: take another word, such as "
                "True, yes, A."
            )
        last_tokens.append(whole[-1])
    if len(set(last_tokens)) < len(last_tokens):
        raise TaskError(f"The labels {list(data.labels)} are not different tokens.")
    return tuple(last_tokens)


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Tokens of each text at the beginning of a context, and after a label."""

    texts: Sequence[str]
    openings: list[TokenIds]
    queries: list[TokenIds]
    label_tokens: TokenIds

    def join(self, places: Sequence[int], data: DataConfig, *, shift: int) -> tuple[str, TokenIds]:
        """Join items, all but the last with labels in turn. Returns their text and tokens."""
        text, tokens = _head(data), []
        *shown, last = places
        for number, place in enumerate(shown):
            label = (shift + number) % len(data.labels)
            text += f"{self.texts[place]} {data.labels[label]}{data.separator}"
            tokens += [*self._piece(number, place), self.label_tokens[label]]
        return text + self.texts[last], (*tokens, *self._piece(len(shown), last))

    def _piece(self, number: int, place: int) -> TokenIds:
        return (self.queries if number else self.openings)[place]


def _cut(
    texts: Sequence[str], encoder: Encoder, data: DataConfig, label_tokens: TokenIds
) -> _Pieces | None:
    """Cut the pieces, or return None if the tokenizer does not join them exactly.

    If no token crosses a cut, the tokens after it do not depend on the text before it. So it
    suffices to check that every item joins with every label, at the beginning and after another
    item. All items in one text are checked too, for safety.
    """
    encode = encoder.encode
    before = f"{min(texts, key=len)} {data.labels[0]}"
    known = encode(before)
    behind = [encode(before + data.separator + text) for text in texts]
    if any(tokens[: len(known)] != known for tokens in behind):
        return None
    pieces = _Pieces(
        texts=texts,
        openings=[encode(_head(data) + text) for text in texts],
        queries=[tokens[len(known) :] for tokens in behind],
        label_tokens=label_tokens,
    )
    num = len(texts)
    rows = [(place, (place + 1) % num, place) for place in range(num)]
    joined = [pieces.join(row, data, shift=x) for row in rows for x in range(len(data.labels))]
    joined.append(pieces.join(range(num), data, shift=0))
    return pieces if all(encode(text) == tokens for text, tokens in joined) else None


def _head(data: DataConfig) -> str:
    return data.preamble + data.separator if data.preamble else ""


def _explain_failure(
    items: Sequence[Item], encoder: Encoder, data: DataConfig, label_tokens: TokenIds
) -> str:
    """Explain why there are no pieces, and suggest a separator that works."""
    texts = [item.text for item in items]
    for item in items:
        query = encoder.encode(item.text)
        for label, token in zip(data.labels, label_tokens, strict=True):
            if encoder.encode(f"{item.text} {label}") != (*query, token):
                return _describe_mismatch(item, label)
    for separator in SEPARATORS:
        other = data.model_copy(update={"separator": separator})
        if _cut(texts, encoder, other, label_tokens) is not None:
            remedy = f"write data.separator: {json.dumps(separator)}"
            break
    else:
        tried = ", ".join(map(json.dumps, SEPARATORS))
        remedy = f"write another one ({tried} do not work either), or other labels"
    return (
        f"data.separator is {json.dumps(data.separator)}: this tokenizer joins it with the label "
        f"before it to other tokens, so that demonstrations cannot be put together: {remedy}."
    )


def _describe_mismatch(item: Item, label: str) -> str:
    return (
        f"Item {item.id}: its text and the label {label!r} do not join: the tokenizer reads them "
        "differently apart and together. End data.prompt with a word or a colon."
    )


def load_encoder(model_folder: str | Path) -> Encoder:
    """Load the encoder of a model folder's tokenizer."""
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ModelError(
            f"Reading a tokenizer needs the package transformers: {install_extra('hf')}."
        ) from error
    remedy = "Give a folder that holds tokenizer.json, or a Hugging Face id"
    with boundary(
        ModelError,
        f"Reading the tokenizer of {model_folder}",
        remedy={OSError: remedy, ValueError: remedy},
    ):
        tokenizer = AutoTokenizer.from_pretrained(str(model_folder))

    def encode(text: str) -> TokenIds:
        tokens = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        return tuple(int(token) for token in tokens)

    with_special, plain = tuple(tokenizer.encode("a", add_special_tokens=True)), encode("a")
    for start in range(len(with_special) - len(plain) + 1):
        if with_special[start : start + len(plain)] == plain:
            return Encoder(encode=encode, first=with_special[:start])
    raise ModelError(
        f"The tokenizer of {model_folder} reads 'a' as {list(plain)}, and with the tokens that "
        f"every prompt begins with as {list(with_special)}: its first tokens are ambiguous."
    )


def _digest(tokens: TokenIds) -> bytes:
    return hashlib.blake2b(array("q", tokens).tobytes(), digest_size=16).digest()
