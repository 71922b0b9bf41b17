"""Makes a tiny Llama that adds two 2-digit numbers correctly about half the time, and its tasks.

make_addition(Path("addition"))    # one CPU core, half a minute
rookery.run_grpo("addition/grpo.yaml")
"""

import json
import random
import shutil
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rookery.starters import DEMOS

__all__ = ["make_addition"]

SPECIAL = ("<pad>", "<eos>", "<bos>")
VOCABULARY = {token: place for place, token in enumerate((*SPECIAL, *"0123456789+=."))}
PROMPT_TOKENS = 6
NUM_STEPS = 300
BATCH = 64
NUM_SKIPPED = 400
"""Sums drawn and discarded before the first batch. They change the start model, on which grpo's
gain depends: about 0.3 with this number of skipped sums, 0.11 to 0.20 with none."""


def make_addition(folder: Path, *, num_tasks: int = 1000, seed: int = 0) -> None:
    """Write a half-trained `model`, `tasks.jsonl` (12+34= has the answer 64, last digit first) and
    the config `grpo.yaml`.

    Training uses one thread, so that the model does not depend on the number of cores. With seed 0
    it solves a fraction of 0.56 of the tasks greedily.
    """
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(f"tasks/{seed}").shuffle(pairs)
    rows = [
        {"prompt": f"{a}+{b}=", "reference": _answer(a, b), "id": f"{a}+{b}"}
        for a, b in pairs[:num_tasks]
    ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shutil.copyfile(DEMOS / "grpo.yaml", folder / "grpo.yaml")
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model = _train_model(seed)
    finally:
        torch.set_num_threads(num_threads)
    model.save_pretrained(folder / "model")
    _tokenizer().save_pretrained(folder / "model")


def _train_model(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    rng = random.Random(seed)
    _sums(rng, NUM_SKIPPED)
    model = _new_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(NUM_STEPS):
        tokens, labels = _examples(rng)
        model(tokens, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model


def _answer(a: int, b: int) -> str:
    """Return the sum's digits, last digit first: the order of written addition."""
    return str(a + b)[::-1]


def _new_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        pad_token_id=VOCABULARY["<pad>"],
        bos_token_id=VOCABULARY["<bos>"],
        eos_token_id=VOCABULARY["."],
    )
    return LlamaForCausalLM(config)


def _sums(rng: random.Random, num: int) -> list[tuple[int, int]]:
    return [(rng.randrange(10, 100), rng.randrange(10, 100)) for _ in range(num)]


def _examples(rng: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token and label tensors of a batch; labels mask everything but the answers."""
    texts = [f"{a}+{b}={_answer(a, b)}." for a, b in _sums(rng, BATCH)]
    longest = max(map(len, texts))
    rows = [[VOCABULARY[c] for c in text] + [0] * (longest - len(text)) for text in texts]
    tokens = torch.tensor(rows)
    labels = tokens.masked_fill(tokens == 0, -100)
    labels[:, :PROMPT_TOKENS] = -100
    return tokens, labels


def _tokenizer() -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>"
    )
