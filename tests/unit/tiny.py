"""Builds tiny models, tokenizers and adapters for the tests."""

import warnings
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rookery.types import Adapter, LoraFactors
from rookery.weights import make_adapter

VOCAB = 97
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LINEARS = {
    "self_attn.q_proj": (32, 32),
    "self_attn.k_proj": (32, 16),
    "self_attn.v_proj": (32, 16),
    "self_attn.o_proj": (32, 32),
    "mlp.gate_proj": (32, 64),
    "mlp.up_proj": (32, 64),
    "mlp.down_proj": (64, 32),
}


def write_tiny_model(folder: Path, kind: str = "Llama", **extra: object) -> Path:
    """Random weights of standard deviation 0.1: large enough that layers and positions matter."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config" if kind != "Gemma3" else "Gemma3TextConfig")
    model = getattr(transformers, f"{kind}ForCausalLM")(config(**{**SIZES, **extra}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3}
    vocabulary.update({f"w{i}": i for i in range(4, VOCAB)})
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>",
        unk_token="<unk>",
    ).save_pretrained(folder)  # fmt: skip


def write_chat_model(folder: Path, **extra: object) -> Path:
    """A tiny model that takes messages, byte by byte, and knows nothing."""
    words = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    core = Tokenizer(models.BPE({word: place for place, word in enumerate(words)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    extra = {"max_position_embeddings": 2048, **extra}
    write_tiny_model(folder, "Llama", vocab_size=len(words), **extra)
    PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>",
        chat_template="{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
    ).save_pretrained(folder)  # fmt: skip
    return folder


def tiny_adapter(
    name: str,
    *,
    rank: int = 4,
    layers: range = range(4),
    targets: tuple[str, ...] = tuple(LINEARS),
    seed: int = 0,
    scale: float = 2.0,
    base: str = "tiny",
) -> Adapter:
    """A random adapter of the tiny model, strong enough to change what it says."""
    generator = torch.Generator().manual_seed(seed)
    factors = {}
    for layer in layers:
        for target in targets:
            size_in, size_out = LINEARS[target]
            factors[f"model.layers.{layer}.{target}"] = LoraFactors(
                a=torch.randn(rank, size_in, generator=generator) * 0.2,
                b=torch.randn(size_out, rank, generator=generator) * 0.2,
                scale=scale,
            )
    return make_adapter(name, base=base, factors=factors)
