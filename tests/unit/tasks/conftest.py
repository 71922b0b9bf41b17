"""Fixtures of the tasks tests: completions, and small real tokenizers made on the spot."""

from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from rookery.types import Completion, Json, ModelRef, Task

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|im_start|>", "<|im_end|>", "<s>"]
CORPUS = ["Label the word red or blue. Answer: red Answer: blue assistant user system"] * 3


@pytest.fixture
def completion() -> Callable[..., Completion]:
    def make(text: str, *, finish_reason: Any = "stop") -> Completion:
        return Completion(
            model=ModelRef(name="base", version="1"),
            tokens=(1,),
            logprobs=(-0.5,),
            text=text,
            finish_reason=finish_reason,
        )

    return make


@pytest.fixture
def task() -> Callable[..., Task]:
    def make(reference: Json, *, choices: tuple[str, ...] = ()) -> Task:
        return Task(id="set/1", prompt="Q", reference=reference, choices=choices, source="set")

    return make


@pytest.fixture(scope="session")
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE, in which a word with a space before it is another token; has a chat."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(CORPUS, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", additional_special_tokens=SPECIAL[:2]
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@pytest.fixture(scope="session")
def metaspace_tokenizer() -> PreTrainedTokenizerFast:
    """As SentencePiece: a space before every text, <s> first; no chat."""
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=SPECIAL, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", SPECIAL.index("<s>"))]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")
