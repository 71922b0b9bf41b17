"""forward_backward of the trainer beside a padded pass of transformers + peft, on the same data.

    python benchmarks/train.py                       # SmolLM2, rank 8 on q, k, v and o

SmolLM2 in float32, 640 tokens in sequences of several lengths, every token a target. Both take
turns in one process on all cores of an otherwise idle machine; the best of several rounds each. The
last column is how far their gradients are apart, relative to the largest. About three minutes.
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from rookery.embedded import resolve_model
from rookery.slots import SlottedModel, load_model
from rookery.train import LoraConfig, LoraTrainer, TrainerConfig, initial_adapter
from rookery.types import Adapter, Datum, LoraFactors, TrainRequest
from rookery.weights import make_adapter, write_adapter

SHAPES: dict[str, list[int]] = {
    "64 x 10": [10] * 64,
    "8 x 80": [80] * 8,
    "1 x 640": [640],
    "5 to 15": [5 + i % 11 for i in range(64)],
}
ROUNDS = 5


def make_data(lengths: Sequence[int], vocab_size: int) -> list[Datum]:
    """Random tokens, each predicted from those before it."""
    generator = torch.Generator().manual_seed(0)
    data = []
    for length in lengths:
        tokens = torch.randint(vocab_size, (length + 1,), generator=generator).tolist()
        data.append(
            Datum(
                tokens=tuple(tokens[:-1]),
                positions=tuple(range(length)),
                targets=tuple(tokens[1:]),
                weights=(1.0,) * length,
            )
        )
    return data


def make_start(model: SlottedModel) -> Adapter:
    """A rank 8 adapter whose B is not zero, so that all gradients matter."""
    start = initial_adapter(model, LoraConfig(), name="start", base="smollm2", seed=0)
    generator = torch.Generator().manual_seed(1)
    factors = {
        name: LoraFactors(
            a=lora.a, b=torch.randn(lora.b.shape, generator=generator) * 0.02, scale=lora.scale
        )
        for name, lora in start.factors.items()
    }
    return make_adapter("start", base="smollm2", factors=factors)


def open_peft(folder: Path, start: Adapter) -> Any:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with tempfile.TemporaryDirectory() as place:
        write_adapter(start, Path(place) / "start")
        return PeftModel.from_pretrained(base, Path(place) / "start", is_trainable=True).eval()


def peft_pass(model: Any, data: Sequence[Datum]) -> None:
    """Run one padded batch; the gradients stay in the parameters."""
    longest = max(len(datum.tokens) for datum in data)
    tokens = torch.zeros(len(data), longest, dtype=torch.long)
    targets = torch.full((len(data), longest), -100)
    mask = torch.zeros(len(data), longest, dtype=torch.long)
    for row, datum in enumerate(data):
        length = len(datum.tokens)
        tokens[row, :length] = torch.tensor(datum.tokens)
        targets[row, :length] = torch.tensor(datum.targets)
        mask[row, :length] = 1
    model.zero_grad()
    logits = model(tokens, attention_mask=mask).logits
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten(), reduction="sum"
    )
    torch.autograd.backward(loss)


def gradient_gap(model: Any, trainer: LoraTrainer) -> float:
    named = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    theirs = [named[name] for name in sorted(named)]
    mine = trainer.trainee("start").gradients or []
    largest = max(float(gradient.abs().max()) for gradient in theirs)
    gaps = [float((a - b).abs().max()) for a, b in zip(mine, theirs, strict=True)]
    return max(gaps) / largest


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def compare(
    model: SlottedModel, peft: Any, start: Adapter, data: list[Datum], *, rounds: int
) -> tuple[list[float], float]:
    """Tokens per second of both, and the gap between their gradients."""
    trainer = LoraTrainer(model, config=TrainerConfig())
    trainer.add("start", start)
    request = TrainRequest(trainee="start", data=tuple(data))

    def mine() -> None:
        asyncio.run(trainer.forward_backward([request]))

    def theirs() -> None:
        peft_pass(peft, data)

    mine()
    theirs()
    gap = gradient_gap(peft, trainer)
    times: list[list[float]] = [[], []]
    for _ in range(rounds):
        for kept, work in zip(times, (mine, theirs), strict=True):
            kept.append(seconds(work))
    num_tokens = sum(len(datum.tokens) for datum in data)
    return [num_tokens / min(kept) for kept in times], gap


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    folder = resolve_model(options.model).path
    model = load_model(folder, device="cpu", dtype="float32")
    start = make_start(model)
    peft = open_peft(folder, start)
    print(f"{'sequences':<10} {'rookery':>12} {'padded peft':>12} {'ratio':>6} {'gap':>9}")
    for name, lengths in SHAPES.items():
        data = make_data(lengths, model.shape.vocab_size)
        rates, gap = compare(model, peft, start, data, rounds=options.rounds)
        print(
            f"{name:<10} {rates[0]:>8.0f} t/s {rates[1]:>8.0f} t/s {rates[0] / rates[1]:>6.2f} "
            f"{gap:>9.1e}",
            flush=True,
        )


if __name__ == "__main__":
    main()
