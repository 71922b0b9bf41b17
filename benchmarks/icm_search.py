"""Whole icm searches on a scripted model: prompt tokens of a plain loop, of id order, of the tree.

    python benchmarks/icm_search.py                            # seven minutes, no GPU
    python benchmarks/icm_search.py --claims truthfulqa.json   # the lengths of your claims

256 items, four per group, 1,500 iterations. The scripted model knows a hidden concept: A well, B
noisily, C like B but from start labels that are all wrong. C leads to the opposite concept, where
many items stay frustrated and are retried in vain. The model ignores the order of its context, so
all ways must take the same decisions, which is checked. Tokens are counted in 16-token blocks with
a cache of 450,000 tokens.

Two searches: `ours`, and `published`, which follows its authors' code (another repair, which
repeats many requests, and other random numbers). Each runs twice: as a plain loop in id order, one
context after another, without a memory; and through the loop's scorer, which remembers, on the
tree.
"""

import argparse
import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np
from icm import make_prompts, read_claims
from numpy.typing import NDArray

from rookery.embedded import resolve_model
from rookery.loops.icm.chain import Chain, Problem
from rookery.loops.icm.items import DataConfig, Item
from rookery.loops.icm.label_scorer import (
    Context,
    LabelScorer,
    ScoreStore,
    SharedLabelScorer,
)
from rookery.loops.icm.objective import LabelLogprobs, ObjectiveConfig
from rookery.loops.icm.prompts import BatchPrompts, Encoder
from rookery.search.annealing import AnnealingConfig, temperature
from rookery.search.labelling import (
    UNLABELLED,
    Constraints,
    EqualAnswer,
    IdOrder,
    Labels,
    PrefixCache,
    TreeOrder,
    relabel,
)
from rookery.seeding import stream
from rookery.testing import BASE
from rookery.types import Completion, SampleRequest, Score, ScoreRequest, TokenIds

NUM_ITEMS = 256
CACHE_TOKENS = 450_000
"""Tokens that an 8B model caches on one GPU of 80 GB."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Strength of the model's own knowledge (prior), of the context (pull), and of its errors."""

    prior: float
    pull: float
    noise: float
    answers: str = "xxyz"
    """Answers of a group's four items; x or y is right. With a z, the opposite is inconsistent."""
    is_misled: bool = False
    """Whether all start labels are wrong."""


SETTINGS = {
    "A": Setting(1.3, 1.8, 1.3),
    "B": Setting(0.7, 2.2, 1.6),
    "C": Setting(0.7, 2.2, 1.6, answers="xxyy", is_misled=True),
}
CONFIG = AnnealingConfig(iterations=1500, num_start=8)


@dataclass(frozen=True, slots=True)
class Found:
    """Result and decisions of a search; equal for all ways to read."""

    labels: Labels
    decisions: tuple[tuple[int, float, bool], ...]
    """Per decision: iteration, utility of the proposal, whether it was accepted."""
    num_evaluations: int


class OracleSampler:
    """Answers three-token demonstrations (item, label, break), counting the tokens of real ones."""

    def __init__(self, setting: Setting, *, real: BatchPrompts, seed: int) -> None:
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
        # Tokens of real texts at the beginning of a context and after a label.
        blank: Labels = (UNLABELLED,) * size
        openings = [real.context(blank, i, order=()) for i in range(size)]
        queries = []
        for i in range(size):
            before = (i - 1) % size
            tokens = real.context(relabel(blank, before, 0), i, order=(before,))
            queries.append(tokens[len(openings[before]) + 1 :])
        self.queries = [[_array(piece[i]) for piece in (openings, queries)] for i in range(size)]
        self.demos = [
            [[_array((*piece[i], label)) for label in real.label_tokens] for i in range(size)]
            for piece in (openings, queries)
        ]

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
        pairs = zip(places.tolist(), labels, strict=True)
        parts = [
            self.demos[number > 0][place][label - FIRST_LABEL]
            for number, (place, label) in enumerate(pairs)
        ]
        prompt = np.concatenate([*parts, self.queries[target][len(parts) > 0]])
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
    """The search of the authors' code on the same scripted model.

    Its repair evaluates two changes for one broken pair at a time, each in a whole evaluation, and
    repeats up to ten times while pairs are broken.
    """

    def __init__(self, oracle: OracleSampler, scorer: LabelScorer, *, seed: int) -> None:
        self._oracle = oracle
        self._scorer = scorer
        self._rng = stream(seed, "published")
        self._num_evaluations = 0

    async def run(self) -> Found:
        size = len(self._oracle.truth)
        signs = np.zeros(size, dtype=np.int64)
        signs[: CONFIG.num_start] = self._rng.permutation([1, -1] * (CONFIG.num_start // 2))
        if self._oracle.setting.is_misled:
            signs[: CONFIG.num_start] = -self._oracle.truth[: CONFIG.num_start]
        signs, utility = await self._repair(signs, await self._utility(signs))
        decisions: list[tuple[int, float, bool]] = []
        num_accepted = 0
        for iteration in range(CONFIG.iterations):
            item = self._draw(signs)
            [odds] = await self._odds(signs, [item])
            label = 1 if odds > 0 else -1
            if label == signs[item]:
                continue
            tried = signs.copy()
            tried[item] = label
            tried, _ = await self._repair(tried, -np.inf)
            found = await self._utility(tried)
            heat = temperature(CONFIG.schedule, iteration=0, num_accepted=num_accepted)
            is_accepted = bool(self._rng.random() < np.exp(min(0.0, (found - utility) / heat)))
            decisions.append((iteration, found, is_accepted))
            if is_accepted:
                signs, utility, num_accepted = tried, found, num_accepted + 1
        return Found(_labels(signs), tuple(decisions), self._num_evaluations)

    def _draw(self, signs: NDArray[np.int64]) -> int:
        begun = np.repeat((signs.reshape(-1, 4) != 0).any(axis=1), 4)
        weights = np.where((signs == 0) & begun, CONFIG.boost, 1.0)
        return int(self._rng.choice(len(signs), p=weights / weights.sum()))

    async def _repair(
        self, signs: NDArray[np.int64], utility: float
    ) -> tuple[NDArray[np.int64], float]:
        is_found = False
        for _ in range(10):
            pairs = self._broken(signs)
            for place in self._rng.permutation(len(pairs)):
                one, other, is_same = pairs[place]
                options = []
                for first in (-1, 1):
                    option = signs.copy()
                    option[[one, other]] = first, first if is_same else -first
                    options.append((await self._utility(option), first, option))
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

    async def _odds(self, signs: NDArray[np.int64], items: Sequence[int]) -> NDArray[np.float64]:
        labels = _labels(signs)
        reads = await self._scorer.score([(labels, item) for item in items])
        return np.array([read[0] - read[1] for read in reads if read is not None])

    async def _utility(self, signs: NDArray[np.int64]) -> float:
        self._num_evaluations += 1
        held = np.flatnonzero(signs)
        odds = await self._odds(signs, held.tolist())
        return float(50.0 * (signs[held] * odds).mean()) - len(self._broken(signs))


def _array(tokens: Sequence[int]) -> NDArray[np.uint64]:
    return np.array(tokens, dtype=np.uint64)


def _labels(signs: NDArray[np.int64]) -> Labels:
    return tuple(np.where(signs > 0, 0, np.where(signs < 0, 1, UNLABELLED)).tolist())


async def run_oracle(name: str, setting: Setting, *, prompts: BatchPrompts, seed: int = 1) -> None:
    """Run each search as a plain loop in id order, then through the scorer on the tree."""
    for search in (run_ours, run_published):
        plain = OracleSampler(setting, real=prompts, seed=seed)
        expected = await search(plain, way="plain", seed=seed)
        start = time.perf_counter()
        shared = OracleSampler(setting, real=prompts, seed=seed)
        found = await search(shared, way="tree", seed=seed)
        seconds = time.perf_counter() - start
        assert found == expected, "both ways take the same decisions"
        size = len(shared.truth)
        right = sum((label == 0) == (shared.truth[i] > 0) for i, label in enumerate(found.labels))
        title = f"{name}, seed {seed}, {search.__name__.removeprefix('run_')}"
        print(f"{title}: {right} of {size} labels right, {len(found.decisions)} decisions, the "
              f"same both ways; {found.num_evaluations} evaluations; {seconds:.0f} s")  # fmt: skip
        print(f"  plain loop {plain.asked:>15,}")
        print(f"  id order   {plain.computed:>15,}  {plain.asked / plain.computed:.1f}x fewer")
        print(f"  tree       {shared.computed:>15,}  {plain.asked / shared.computed:.1f}x fewer, "
              f"{plain.computed / shared.computed:.1f}x fewer than id order: "
              f"{plain.asked / shared.asked:.2f}x by memory, {shared.asked / shared.computed:.1f}x "
              "by the tree", flush=True)  # fmt: skip


async def run_published(sampler: OracleSampler, *, way: str, seed: int) -> Found:
    return await Published(sampler, _scorer(sampler, way=way), seed=seed).run()


async def run_ours(sampler: OracleSampler, *, way: str, seed: int) -> Found:
    size = len(sampler.truth)
    tied = [
        EqualAnswer(members=own, answers=tuple(sampler.answers[i] for i in own), label=0)
        for own in _groups(size)
    ]
    problem = Problem(
        num_items=size,
        num_labels=2,
        groups=tuple(i // 4 for i in range(size)),
        constraints=Constraints(tied, num_items=size, num_labels=2),
        scorer=_scorer(sampler, way=way),
        objective=ObjectiveConfig(),
    )
    start: Labels | None = None
    if sampler.setting.is_misled:
        wrong = [int(sign > 0) for sign in sampler.truth[: CONFIG.num_start]]
        start = (*wrong, *[UNLABELLED] * (size - len(wrong)))
    result = await Chain(problem, config=CONFIG, seed=seed).run(start)
    decisions = [(s.iteration, s.proposed_utility, s.is_accepted) for s in result.steps]
    num_evaluations = 1 + sum(step.tried for step in result.steps)
    return Found(result.labels, tuple(decisions), num_evaluations)


def _groups(size: int) -> list[tuple[int, ...]]:
    return [tuple(range(first, min(first + 4, size))) for first in range(0, size, 4)]


def _scorer(sampler: OracleSampler, *, way: str) -> LabelScorer:
    size = len(sampler.truth)
    items = [Item(id=str(i), text=f"#{i}", group=str(i // 4), fields={}) for i in range(size)]
    data = DataConfig(path=Path("items.jsonl"), prompt="#{{ n }}")
    prompts = BatchPrompts(items, encoder=Encoder(encode=encode), data=data)
    if way == "plain":
        order, store = IdOrder(size), Forgetful()
        return OneByOne(sampler, prompts=prompts, order=order, model=BASE, store=store)
    tree = TreeOrder(_groups(size))
    return SharedLabelScorer(sampler, prompts=prompts, order=tree, model=BASE, store=ScoreStore())


class Forgetful(ScoreStore):
    """Remembers nothing: every context is requested again."""

    def __contains__(self, key: str) -> bool:
        del key
        return False


class OneByOne(SharedLabelScorer):
    async def score(self, contexts: Sequence[Context]) -> list[LabelLogprobs | None]:
        return [
            read for context in contexts for read in await super(OneByOne, self).score([context])
        ]


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
