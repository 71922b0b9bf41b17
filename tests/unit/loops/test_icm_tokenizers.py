"""Contexts are what a tokenizer makes of their whole text, for every family of tokenizers."""

import json
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from rookery.errors import TaskError
from rookery.loops.icm.items import DataConfig, Item
from rookery.loops.icm.prompts import BatchPrompts, Encoder
from rookery.search.labelling import UNLABELLED, Labels, PrefixCache, TreeOrder
from rookery.types import TokenIds

LABELS = ("True", "False")
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CORPUS = [
    "Review: A fine film.\nPositive: True\n\nReview: Dull and long.\nPositive: False\n\n",
    "Question: How many?\nClaim: There were 12.\nI think this claim is True\n\n\nJudge them.\n\n",
    "I think this answer is False, or True\n---\n###\n | Is it? yes no good bad A B C",
] * 40


def _byte_level(pre_tokenizer: Any) -> Tokenizer:
    """Every byte is a character; words are cut by a regular expression before they are merged."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizer
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    )
    return made


def make_gpt2() -> Tokenizer:
    return _byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False))


def make_llama3() -> Tokenizer:
    """The pattern of Llama 3 and, but for the digits, of Qwen: a full stop takes line breaks in."""
    split = pre_tokenizers.Split(Regex(LLAMA3), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made = _byte_level(pre_tokenizers.Sequence([split, byte_level]))
    made.normalizer = normalizers.NFC()
    return made


def make_llama2() -> Tokenizer:
    """Spaces are characters of words, a text begins with one; a line break is a byte."""
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    special = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    lines = [line for text in CORPUS for line in text.splitlines()]
    made.train_from_iterator(
        lines, trainers.BpeTrainer(vocab_size=700, special_tokens=special, show_progress=False)
    )
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return made


def make_unigram() -> Tokenizer:
    made = Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    trainer = trainers.UnigramTrainer(
        vocab_size=300, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False
    )
    made.train_from_iterator([f"{text} True False" for text in CORPUS], trainer)
    return made


def make_sticky() -> Tokenizer:
    """Words are cut at spaces alone: a label and the line breaks behind it are one token."""
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>"], show_progress=False)
    made.train_from_iterator([*CORPUS, "is True False is" * 9, " is True False" * 9] * 2, trainer)
    return made


MAKERS: dict[str, Callable[[], Tokenizer]] = {
    "gpt2": make_gpt2,
    "llama3": make_llama3,
    "llama2": make_llama2,
    "unigram": make_unigram,
    "sticky": make_sticky,
}


@cache
def encoder(name: str) -> Encoder:
    made = MAKERS[name]()
    return Encoder(encode=lambda text: tuple(made.encode(text).ids), first=(9999,))


def make_items(texts: list[str]) -> list[Item]:
    return [Item(id=f"i{n}", text=text, group=f"i{n}", fields={}) for n, text in enumerate(texts)]


def make_data(**changes: Any) -> DataConfig:
    return DataConfig.model_validate({"path": "x", "prompt": "{{ x }}", **changes})


def whole_text(
    texts: list[str], labels: Labels, target: int, order: Sequence[int], data: DataConfig
) -> str:
    """The context as a person would write it."""
    shown = [f"{texts[i]} {data.labels[labels[i]]}" for i in order if labels[i] != UNLABELLED]
    return data.separator.join([*([data.preamble] if data.preamble else []), *shown, texts[target]])


texts_drawn = st.lists(
    st.text(st.sampled_from("aé e.:'12\n\t -éTrue世"), min_size=0, max_size=12).map(
        lambda text: f"{text}\nPositive:"
    ),
    min_size=2,
    max_size=5,
)
separators = st.sampled_from(["\n\n", "\n", "\n\n\n", " ", "", "s", ".\n", "\t", "\n ", ", ", "é"])


@given(
    st.sampled_from(sorted(MAKERS)),
    texts_drawn,
    separators,
    st.sampled_from(["", "Judge them.", "Is it?\n", "Rate"]),
    st.data(),
)
def test_contexts_are_exact_or_refused_with_a_separator_that_works(
    name: str, texts: list[str], separator: str, preamble: str, draw: st.DataObject
) -> None:
    own, data = encoder(name), make_data(separator=separator, preamble=preamble)
    try:
        prompts = BatchPrompts(make_items(texts), encoder=own, data=data)
    except TaskError as error:
        found = re.search(r"write data\.separator: (\".*\")\.", str(error))
        if found is None:
            assert "do not work either" in str(error) or "do not join" in str(error)
            return
        data = make_data(separator=json.loads(found[1]), preamble=preamble)
        prompts = BatchPrompts(make_items(texts), encoder=own, data=data)
    labels = draw.draw(st.tuples(*[st.integers(-1, 1)] * len(texts)))
    target = draw.draw(st.integers(0, len(texts) - 1))
    order = [i for i in draw.draw(st.permutations(range(len(texts)))) if i != target]
    text = whole_text(texts, labels, target, order, data)
    tokens = prompts.context(labels, target, order=order)
    assert tokens == own.first + own.encode(text)
    assert prompts.num_tokens(labels, target, order=order) == len(tokens) <= prompts.longest_tokens
    for label, token in zip(data.labels, prompts.label_tokens, strict=True):
        assert own.first + own.encode(f"{text} {label}") == (*tokens, token)


@pytest.mark.parametrize("name", ["gpt2", "llama3", "llama2"])
@pytest.mark.parametrize("preamble", ["", "Judge them."])
def test_the_default_separator_works_and_prefixes_are_shared(name: str, preamble: str) -> None:
    texts = [f"Review: film {n} is {'good' if n % 2 else 'bad'}.\nPositive:" for n in range(16)]
    own, data = encoder(name), make_data(preamble=preamble)
    prompts = BatchPrompts(make_items(texts), encoder=own, data=data)
    order, labels = TreeOrder([(n, n + 1) for n in range(0, 16, 2)]), (0, 1) * 8
    contexts = [prompts.context(labels, n, order=order.of(n)) for n in order.leaves]
    for target, tokens in zip(order.leaves, contexts, strict=True):
        text = whole_text(texts, labels, target, order.of(target), data)
        assert tokens == own.first + own.encode(text)
    cache = PrefixCache(block_tokens=1)
    computed, naive = sum(map(cache.add, contexts)), sum(map(len, contexts))
    assert computed < naive / 2.9, "log2 16 + 1 demonstrations of each in place of 16"


def test_line_breaks_before_a_word_are_other_tokens_than_at_the_end_of_a_text() -> None:
    """What makes pieces encoded apart wrong."""
    encode = encoder("gpt2").encode
    assert len(encode("True\n\n")) + 2 == len(encode("True\n\nA"))
    encode = encoder("llama3").encode
    assert len(encode("Judge them.")) == len(encode("Judge them.\n\n")), "one token with the stop"


def test_a_separator_that_tokens_reach_across_is_refused_and_another_one_named() -> None:
    items = make_items(["Review: A\nPositive:", "Review: B\nPositive:"])
    with pytest.raises(TaskError) as refused:
        BatchPrompts(items, encoder=encoder("sticky"), data=make_data())
    assert 'data.separator is "\\n\\n"' in str(refused.value)
    assert str(refused.value).endswith('write data.separator: "\\n".')
    BatchPrompts(items, encoder=encoder("sticky"), data=make_data(separator="\n"))


def test_pieces_are_never_encoded_apart_to_make_them_fit() -> None:
    """A tokenizer whose tokens depend on all that stands before them has no pieces."""

    def drifting(text: str) -> TokenIds:
        return tuple(len(text[:end]) * 1000 + ord(text[end]) for end in range(len(text)))

    def sealed(text: str) -> TokenIds:
        return tuple(7 if word == " True" else 8 if word == " False" else hash((word, len(text)))
                     for word in re.findall(r" True| False|\s|\S+", text))  # fmt: skip

    texts = ["Review: A\nPositive:", "Review: B\nPositive:"]
    for encode in (drifting, sealed):
        with pytest.raises(TaskError):
            BatchPrompts(make_items(texts), encoder=Encoder(encode=encode), data=make_data())
