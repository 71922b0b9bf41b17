"""A scripted language model for the icm loop: it knows a hidden concept and sees demonstrations.

log p(True) - log p(False) of an item is t (h + g m n / (n + 4)) + noise: t its hidden label, m the
mean agreement of the n demonstrations with the concept. `order_weight` makes it depend on their
order too, as real models do.
"""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rookery.loops.icm import IcmConfig, Labeller
from rookery.loops.icm.prompts import Encoder
from rookery.seeding import stream
from rookery.testing import BASE, FakeSampler
from rookery.types import ModelRef, TokenIds

__all__ = ["Oracle", "Words", "make_config", "write_items"]


class Words:
    """A tokenizer with a token per word, and one per line break."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}
        self.items: dict[int, int] = {}
        """Token of "#7" -> 7."""

    def __call__(self, text: str) -> TokenIds:
        words = re.findall(r"\n+|\S+", text)
        for word in words:
            token = self.ids.setdefault(word, len(self.ids) + 1)
            if word.startswith("#"):
                self.items[token] = int(word[1:])
        return tuple(self.ids[word] for word in words)


class Oracle:
    """The model; `labeller` puts it behind the Sampler port."""

    def __init__(
        self,
        num_items: int,
        *,
        seed: int = 0,
        prior: float = 1.0,
        pull: float = 2.0,
        noise: float = 0.8,
        bias: float = 0.0,
        order_weight: float = 0.0,
        group_size: int = 2,
    ) -> None:
        rng = stream(seed, "oracle")
        self.truth = [-1] * num_items
        for first in range(0, num_items, group_size):
            self.truth[first + int(rng.integers(min(group_size, num_items - first)))] = 1
        self.noise = [float(x) for x in rng.normal(0.0, noise, num_items)]
        self.prior, self.pull, self.bias = prior, pull, bias
        self.order_weight = order_weight
        self.words = Words()
        self.asked: list[TokenIds] = []
        self.sampler = FakeSampler(logprob=lambda *request: self.logprob(*request))

    @property
    def labeller(self) -> Labeller:
        return Labeller(sampler=self.sampler, model=BASE, encoder=Encoder(encode=self.words))

    def logprob(self, model: ModelRef, tokens: TokenIds, label: int) -> float:
        del model
        if label == self.words.ids["True"]:
            self.asked.append(tokens)
        odds = self.odds(tokens)
        sign = 1.0 if label == self.words.ids["True"] else -1.0
        return -math.log1p(math.exp(-sign * odds)) + math.log(0.9)

    def odds(self, tokens: TokenIds) -> float:
        """Of True against False for the last item of the text."""
        items = self.words.items
        seen = [(items[t], tokens[i + 2 : i + 3]) for i, t in enumerate(tokens) if t in items]
        *demos, (target, _) = seen
        true = (self.words.ids["True"],)
        agree = [self.truth[item] if label == true else -self.truth[item] for item, label in demos]
        mean = sum(agree) / len(agree) if agree else 0.0
        pull = self.prior + self.pull * mean * len(agree) / (len(agree) + 4)
        # Python hashes tuples of whole numbers alike in every process.
        wobble = self.order_weight * (hash(tokens) % 1000 / 1000 - 0.5)
        odds = self.truth[target] * pull + self.noise[target] + self.bias + wobble
        return max(-11.5, min(11.5, odds))

    def accuracy(self, labels: Mapping[str, str | None]) -> float:
        right = [
            labels[f"i{i}"] == ("True" if t > 0 else "False") for i, t in enumerate(self.truth)
        ]
        return sum(right) / len(right)


def write_items(path: Path, oracle: Oracle, *, group_size: int = 2) -> Path:
    """A row per item, its group, and its true label for the report."""
    rows = [
        {"id": f"i{i}", "n": i, "pair": i // group_size, "truth": "True" if t > 0 else "False"}
        for i, t in enumerate(oracle.truth)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make_config(path: Path, **changes: Any) -> IcmConfig:
    """Exclusive pairs and a short search; keywords replace sections."""
    document = {
        "data": {
            "path": str(path),
            "prompt": "#{{ n }} is",
            "group": "pair",
            "gold": {"field": "truth"},
        },
        "constraints": [{"type": "exclusive", "count": "exactly_one"}],
        "search": {"iterations": 300, "num_start": 4},
        "num_chains": 1,
        **changes,
    }
    return IcmConfig.model_validate(document)
