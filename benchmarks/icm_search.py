"""Whole icm searches on a scripted model: prompt tokens of a plain loop, of id order, of the tree.

    python benchmarks/icm_search.py                            # five minutes, no GPU
    python benchmarks/icm_search.py --claims truthfulqa.json   # the lengths of your claims

256 items, four to a group, 1500 iterations. The scripted model knows a hidden concept: A well, B
noisily, C as B and from start labels that are all wrong, which leads to the opposite concept, where
many items stay frustrated and are tried in vain. It does not mind the order of its context, so all
ways take the same decisions, which is checked. Counted in 16-token blocks with a cache of 450,000
tokens. `published` is the search as its authors' code does it: another repair, other random
numbers, nothing remembered, nothing shared.
"""

import argparse
import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np
from icm import make_prompts, read_claims  # type: ignore[import-not-found]
from numpy.typing import NDArray

from rookery.embedded import resolve_model
from rookery.loops.icm.chain import Chain, ChainResult, Problem
from rookery.loops.icm.items import DataConfig, Item
from rookery.loops.icm.objective import ObjectiveConfig
from rookery.loops.icm.prompts import Encoder, Prompts
from rookery.loops.icm.reader import PlainReader, Reader, ScoreStore, SharedReader
from rookery.ports import Sampler
from rookery.search.annealing import AnnealingConfig, temperature
from rookery.search.constraints import Constraints, EqualAnswer
from rookery.search.labelling import UNLABELLED, Labels
from rookery.search.orders import IdOrder, Order, TreeOrder
from rookery.search.prefixes import PrefixCache
from rookery.search.streams import stream
from rookery.testing import BASE
from rookery.types import Completion, SampleRequest, Score, ScoreRequest, TokenIds

NUM_ITEMS = 256
CACHE_TOKENS = 450_000
"""What an 8B model keeps on one GPU of 80 GB."""


@dataclass(frozen=True, slots=True)
class Setting:
    """How strongly the model knows the concept by itself, follows others, and errs."""

    prior: float
    pull: float
    noise: float
    answers: str = "xxyz"
    """Of the four items of a group, x or y the right one. With a z the opposite is inconsistent."""
    is_misled: bool = False
    """All start labels are wrong."""


SETTINGS = {
    "A": Setting(1.3, 1.8, 1.3),
    "B": Setting(0.7, 2.2, 1.6),
    "C": Setting(0.7, 2.2, 1.6, answers="xxyy", is_misled=True),
}
CONFIG = AnnealingConfig(iterations=1500, num_start=8)


class OracleSampler:
    """Answers three-token demonstrations (item, label, break) and counts them as real ones."""

    def __init__(self, setting: Setting, *, real: Prompts, seed: int) -> None:
        rng = stream(seed, "oracle")
        size = len(real.items)
        self.answers = [setting.answers[i % 4] for i in range(size)]
        rights = rng.choice(["x", "y"], size=size // 4 + 1)
        self.truth = np.array([1 if self.answers[i] == rights[i // 4] else -1 for i in range(size)])
        self.noise = rng.normal(0.0, setting.noise, size)
        self.setting = setting
        self.cache = PrefixCache(block_tokens=16, capacity_tokens=CACHE_TOKENS)
        self.asked = 0
        self.computed = 0
        # Labels change a token, not a length: the counts of real texts follow.
        self.demos = [
            [np.array(real.demo(i, label), dtype=np.uint64) for label in range(2)]
            for i in range(size)
        ]
        self.queries = [np.array(query, dtype=np.uint64) for query in real.queries]

    async def sample(self, requests: Sequence[SampleRequest]) -> list[tuple[Completion, ...]]:
        raise NotImplementedError

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        return [self._score(request.tokens) for request in requests]

    def _score(self, tokens: TokenIds) -> Score:
        items = tokens[0:-1:3]
        labels = tokens[1::3]
        target = tokens[-1] - FIRST_ITEM
        places = np.array(items, dtype=np.int64) - FIRST_ITEM
        signs = 1 - 2 * (np.array(labels, dtype=np.int64) - FIRST_LABEL)
        self._count(places, labels, target)
        total = len(places)
        agree = float((signs * self.truth[places]).sum()) if total else 0.0
        pull = self.setting.prior + self.setting.pull * agree / (total + 4)
        odds = float(np.clip(self.truth[target] * pull + self.noise[target], -11.5, 11.5))
        true = -float(np.log1p(np.exp(-odds)))
        return Score(model=BASE, logprobs=(), label_logprobs=(true, true - odds))

    def _count(self, places: NDArray[np.int64], labels: TokenIds, target: int) -> None:
        parts = [
            self.demos[place][label - FIRST_LABEL]
            for place, label in zip(places.tolist(), labels, strict=True)
        ]
        prompt = np.concatenate([*parts, self.queries[target]])
        self.asked += len(prompt)
        self.computed += self.cache.add(prompt)


FIRST_ITEM, FIRST_LABEL, BREAK = 10, 2, 1


def encode(text: str) -> TokenIds:
    """ "#7 True\\n\\n" as (17, 2, 1)."""
    names = {"True": FIRST_LABEL, "False": FIRST_LABEL + 1}
    words = text.replace("\n\n", " | ").split()
    return tuple(
        BREAK if w == "|" else names[w] if w in names else FIRST_ITEM + int(w[1:]) for w in words
    )


class Published:
    """The search of the authors' code on the same scripted model; counts the tokens it asks for.

    Its repair takes up one broken pair at a time, in two ways, each a whole evaluation, and begins
    again up to ten times while pairs are broken.
    """

    def __init__(self, oracle: OracleSampler, *, seed: int) -> None:
        self._oracle = oracle
        self._rng = stream(seed, "published")
        self._demos = np.array([len(own[0]) for own in oracle.demos])
        self._queries = np.array([len(query) for query in oracle.queries])
        self.asked = 0
        self.num_evaluations = 0

    def run(self) -> NDArray[np.int64]:
        """The signs of the labels: +1, -1, and 0 for none."""
        size = len(self._demos)
        signs = np.zeros(size, dtype=np.int64)
        signs[: CONFIG.num_start] = self._rng.permutation([1, -1] * (CONFIG.num_start // 2))
        if self._oracle.setting.is_misled:
            signs[: CONFIG.num_start] = -self._oracle.truth[: CONFIG.num_start]
        signs, utility = self._repair(signs, self._utility(signs))
        num_accepted = 0
        for _ in range(CONFIG.iterations):
            item = self._draw(signs)
            self.asked += int(self._demos[signs != 0].sum() + self._queries[item])
            label = 1 if self._odds(signs)[item] > 0 else -1
            if label == signs[item]:
                continue
            tried = signs.copy()
            tried[item] = label
            tried, _ = self._repair(tried, -np.inf)
            found = self._utility(tried)
            heat = temperature(CONFIG.schedule, iteration=0, num_accepted=num_accepted)
            if self._rng.random() < np.exp(min(0.0, (found - utility) / heat)):
                signs, utility, num_accepted = tried, found, num_accepted + 1
        return signs

    def _draw(self, signs: NDArray[np.int64]) -> int:
        begun = np.repeat((signs.reshape(-1, 4) != 0).any(axis=1), 4)
        weights = np.where((signs == 0) & begun, CONFIG.boost, 1.0)
        return int(self._rng.choice(len(signs), p=weights / weights.sum()))

    def _repair(self, signs: NDArray[np.int64], utility: float) -> tuple[NDArray[np.int64], float]:
        is_found = False
        for _ in range(10):
            pairs = self._broken(signs)
            for place in self._rng.permutation(len(pairs)):
                one, other, is_same = pairs[place]
                options = []
                for first in (-1, 1):
                    option = signs.copy()
                    option[[one, other]] = first, first if is_same else -first
                    options.append((self._utility(option), first, option))
                best, _, option = max(options, key=lambda found: found[:2])
                if best >= utility:
                    signs, utility, is_found = option, best, True
                    break
            if not is_found or not self._broken(signs):
                break
        return signs, utility

    def _broken(self, signs: NDArray[np.int64]) -> list[tuple[int, int, bool]]:
        answers = self._oracle.answers
        found = []
        for first in range(0, len(signs), 4):
            for one, other in combinations(range(first, first + 4), 2):
                is_same = answers[one] == answers[other]
                both = (int(signs[one]), int(signs[other]))
                if (both == (1, 1) and not is_same) or (is_same and sum(both) == 0 and all(both)):
                    found.append((one, other, is_same))
        return found

    def _odds(self, signs: NDArray[np.int64]) -> NDArray[np.float64]:
        oracle, held = self._oracle, signs != 0
        agree = (signs * oracle.truth).sum() - signs * oracle.truth
        pull = oracle.setting.pull * agree / (held.sum() - held + 4)
        odds: NDArray[np.float64] = oracle.truth * (oracle.setting.prior + pull) + oracle.noise
        return odds.clip(-11.5, 11.5)

    def _utility(self, signs: NDArray[np.int64]) -> float:
        held = signs != 0
        others = self._demos[held].sum() - self._demos[held]
        self.asked += int((others + self._queries[held]).sum())
        self.num_evaluations += 1
        return float(50.0 * (signs * self._odds(signs))[held].mean()) - len(self._broken(signs))


async def run_oracle(name: str, setting: Setting, *, prompts: Prompts, seed: int = 1) -> None:
    """A plain loop in id order, then the shared reader on the tree: the same decisions."""
    size = len(prompts.items)
    rows = []
    for way in ("plain", "tree"):
        sampler = OracleSampler(setting, real=prompts, seed=seed)
        start = time.perf_counter()
        result = await _search(sampler, way=way, size=size, seed=seed)
        rows.append((sampler, result, time.perf_counter() - start))
    (plain, expected, _), (shared, found, seconds) = rows
    assert found == expected, "both ways take the same decisions"
    truth = shared.truth
    right = sum((label == 0) == (truth[i] > 0) for i, label in enumerate(found.labels))
    published = Published(OracleSampler(setting, real=prompts, seed=seed), seed=seed)
    signs = published.run()
    num_same = int((signs * truth > 0).sum())
    print(f"{name}, seed {seed}: {right} of {size} labels right, {len(found.steps)} decisions, the "
          f"same in both ways; {seconds:.0f} s of search")  # fmt: skip
    print(f"  published  {published.asked:>15,} tokens, {published.num_evaluations} evaluations, "
          f"{num_same} right")  # fmt: skip
    for way, tokens in (("plain loop", plain.asked), ("id order", plain.computed)):
        print(f"  {way:<10} {tokens:>15,}")
    fewer = ", ".join(
        f"{tokens / shared.computed:.1f}x fewer than {way}"
        for way, tokens in (
            ("published", published.asked),
            ("plain loop", plain.asked),
            ("id order", plain.computed),
        )
    )
    print(f"  tree       {shared.computed:>15,}  {fewer}", flush=True)


async def _search(sampler: OracleSampler, *, way: str, size: int, seed: int) -> ChainResult:
    items = [Item(id=str(i), text=f"#{i}", group=str(i // 4), fields={}) for i in range(size)]
    data = DataConfig(path=Path("items.jsonl"), prompt="#{{ n }}")
    short = Prompts(items, encoder=Encoder(encode=encode), data=data)
    groups = [tuple(range(first, min(first + 4, size))) for first in range(0, size, 4)]
    tied = [
        EqualAnswer(members=own, answers=tuple(sampler.answers[i] for i in own), label=0)
        for own in groups
    ]
    problem = Problem(
        num_items=size,
        num_labels=2,
        groups=tuple(i // 4 for i in range(size)),
        constraints=Constraints(tied, num_items=size, num_labels=2),
        reader=_reader(sampler, short, way=way, groups=groups, size=size),
        objective=ObjectiveConfig(),
    )
    start: Labels | None = None
    if sampler.setting.is_misled:
        wrong = [int(sign > 0) for sign in sampler.truth[: CONFIG.num_start]]
        start = (*wrong, *[UNLABELLED] * (size - len(wrong)))
    return await Chain(problem, config=CONFIG, seed=seed).run(start)


def _reader(
    sampler: Sampler, prompts: Prompts, *, way: str, groups: Sequence[tuple[int, ...]], size: int
) -> Reader:
    order: Order = IdOrder(size) if way == "plain" else TreeOrder(groups)
    if way == "plain":
        return PlainReader(sampler, prompts=prompts, order=order, model=BASE)
    return SharedReader(sampler, prompts=prompts, order=order, model=BASE, store=ScoreStore())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--claims", type=Path, help="a .json list with question and choice")
    parser.add_argument("--settings", default="ABC", help="which scripted models")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    arguments = parser.parse_args()
    items = read_claims(arguments.claims, count=NUM_ITEMS)
    prompts = make_prompts(items, resolve_model("smollm2").path)
    for name in arguments.settings:
        for seed in arguments.seeds:
            asyncio.run(run_oracle(name, SETTINGS[name], prompts=prompts, seed=seed))


if __name__ == "__main__":
    main()
