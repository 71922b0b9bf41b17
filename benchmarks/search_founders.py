"""The search of genome on made-up founders: its winner beside random search, in seconds a run.

    python benchmarks/search_founders.py [--families 5 "20, harmful"] [--seeds 24] [--parallel 2]

Every run is the real loop (`rookery.loops.genome.evolve`: founders, stages, races, the choice on
`select`, the report); only the model is made up. A founder is an adapter of one number per block, a
candidate's merge coefficients follow from its weights, and a task's log-odds are a function of
them: the founders' knowledge of the task's kind, their interference with other kinds and single
tasks, and the excess of the sum over the model's tolerance. Families differ in the number of
founders, the number of harmful ones, and the visible part of an answer: whether it is right
(`generated`), or also how certain the model is. On `mislabelled` tasks, certainty says little:
better models are surer of answers that count as wrong.

`--picks` prints the results of random search without a loop, by the distribution of its weights and
by the merit of its choice.

A seed makes founders, tasks and the search. Gains are means over seeds of paired differences on
the report tasks, with 95 % intervals (Student's t).
"""

import argparse
import asyncio
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from search_quality import say

from rookery.loops.genome import GenomeConfig
from rookery.loops.genome.documents import GenomeInputs, assemble
from rookery.loops.genome.generation_log import Cost
from rookery.loops.genome.stages import STAGES, StageContext
from rookery.ports import UNOBSERVED
from rookery.runs import Run
from rookery.search.merit import MIXED, Merit, merits_at
from rookery.search.population import random_weights
from rookery.seeding import stream
from rookery.tasks.scorers import ChoiceConfig
from rookery.tasks.splits import SplitsConfig
from rookery.tasks.taskset import Taskset
from rookery.testing import BASE, FakeAdapters
from rookery.types import Adapter, Evaluation, Group, LoraFactors, ModelRef, Rollout, Task
from rookery.weights import make_adapter

Array = NDArray[np.float64]
NUM_BLOCKS = 4
NUM_ASKED, NUM_REPORTED = 180, 1800
"""Numbers of tasks over all kinds: the first for search and choice, half each; the second for the
report."""
SPLITS = SplitsConfig(search=0.5, select=0.5, report=0.0)


@dataclass(frozen=True, kw_only=True)
class Family:
    """Founders of a made-up family, and the visible part of their answers."""

    num_founders: int
    num_harmful: int = 0
    has_choices: bool = True
    mislabelled: float = 0.0
    """Share of tasks with a wrong reference; better models are surer of the other answer."""

    @property
    def name(self) -> str:
        words = ["harmful"] * (self.num_harmful > 0)
        words += ["generated"] * (not self.has_choices) + ["mislabelled"] * (self.mislabelled > 0)
        return ", ".join([str(self.num_founders), *words])


FAMILIES = {
    family.name: family
    for family in (
        *(
            Family(num_founders=num, num_harmful=harmful, has_choices=has_choices)
            for has_choices, (num, bad) in product(
                (True, False), ((2, 1), (5, 1), (10, 2), (20, 4))
            )
            for harmful in (0, bad)
        ),
        *(Family(num_founders=num, mislabelled=0.3) for num in (3, 5, 10)),
    )
}

HELD_OUT = {
    family.name: family
    for family in (
        Family(num_founders=num, num_harmful=harmful, has_choices=False)
        for num, harmful in ((3, 0), (3, 1), (6, 0), (6, 1), (8, 2), (14, 0), (14, 3))
    )
}
"""Families scored by rewards alone, to try changes on with `--first-seed 100` before the others."""

VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "by reward": {"merit": "reward"},
    "by log_certainty": {"merit": "log_certainty"},
}
"""Changes to the default config, by name. Random search chooses by the same merit."""


class World:
    """The engine and the evaluator of one made-up family."""

    max_rank, context_tokens, is_remote, base = 1024, None, False, BASE

    def __init__(self, family: Family, *, seed: int) -> None:
        rng = stream(seed, "world", family.name)
        num, self.num_kinds = family.num_founders, min(5, family.num_founders)
        self.family = family
        self._adapters = FakeAdapters()
        shape = (num, NUM_BLOCKS)
        shared = rng.normal(-0.3, 0.6, (self.num_kinds, num, 1))
        gains = (shared + rng.normal(0.0, 0.6, (self.num_kinds, *shape))) / NUM_BLOCKS
        strength = rng.uniform(1.0, 3.0, num)
        for founder in range(num):
            shares = rng.dirichlet(np.ones(NUM_BLOCKS))
            gains[founder % self.num_kinds, founder] += strength[founder] * shares
        gains[:, num - family.num_harmful :] -= 3.0 / NUM_BLOCKS
        kinds = np.arange(NUM_ASKED + NUM_REPORTED) % self.num_kinds
        count = len(kinds)
        ease = rng.lognormal(0.0, 0.5, count)
        self._slopes = ease[:, None, None] * gains[kinds]
        # Effects on single tasks, independent of kind, which a search can overfit.
        self._slopes += rng.normal(0.0, NUM_BLOCKS**-0.5, (count, *shape))
        is_wrong = rng.random(count) < family.mislabelled
        self._slopes[is_wrong] *= -2.0
        self._start = rng.normal(0.0, 1.0, count)
        self._broken = rng.normal(0.0, 1.5, count)
        self._alike = 0.1 + 0.9 * np.eye(num)

    def odds(self, weights: Array) -> Array:
        """Log-odds of every task's right answer, for coefficients [founders, blocks]."""
        plain = self._start + np.einsum("tfb,fb->t", self._slopes, weights)
        load = np.sqrt(np.einsum("fb,fg,gb->b", weights, self._alike, weights))
        damage = float(np.square(np.maximum(0.0, load - 1.0)).mean()) * 2.0
        odds: Array = plain / (1.0 + damage) + damage * (
            self._broken if self.family.has_choices else -1.0
        )
        return odds

    @property
    def founders(self) -> dict[str, Adapter]:
        found = {}
        num = self.family.num_founders
        for place in range(num):
            row = torch.eye(num)[place : place + 1]
            factors = {
                layer: LoraFactors(a=row, b=row.T.contiguous(), scale=1.0)
                for layer in self.linear_layers
            }
            found[f"founder{place}"] = make_adapter(f"founder{place}", base="", factors=factors)
        return found

    @property
    def linear_layers(self) -> Mapping[str, tuple[int, int]]:
        num = self.family.num_founders
        return {f"model.layers.{block}.self_attn.q_proj": (num, num) for block in range(NUM_BLOCKS)}

    @property
    def tasksets(self) -> list[Taskset]:
        choices = ("right", "wrong") if self.family.has_choices else ()
        return [
            Taskset(
                name=f"kind{kind}",
                tasks=tuple(
                    Task(id=f"{place}", prompt=f"{place}", reference="right", choices=choices,
                         source=f"kind{kind}")
                    for place in range(kind, NUM_ASKED, self.num_kinds)
                ),
                scorer=ChoiceConfig(),
                splits=SPLITS,
            )
            for kind in range(self.num_kinds)
        ]  # fmt: skip

    num_rollouts = num_tokens = 0

    async def load(self, adapter: Adapter) -> ModelRef:
        return await self._adapters.load(adapter)

    async def unload(self, ref: ModelRef) -> None:
        await self._adapters.unload(ref)

    async def evaluate(self, models: Sequence[ModelRef], tasks: Sequence[Task]) -> list[Evaluation]:
        places = [int(task.id) for task in tasks]
        evaluations = []
        for model in models:
            odds = self.odds(self._weights(self._adapters.loaded[model]))[places]
            ids = [task.id for task in tasks]
            rewards = dict(zip(ids, (odds > 0).astype(float).tolist(), strict=True))
            sure = dict(zip(ids, (1.0 / (1.0 + np.exp(-odds))).tolist(), strict=True))
            evaluations.append(
                Evaluation(
                    model=model,
                    rewards=rewards,
                    errors={},
                    num_tokens=0,
                    seconds=0.0,
                    certainties=sure if self.family.has_choices else {},
                )
            )
        return evaluations

    def _weights(self, adapter: Adapter) -> Array:
        """Coefficients of an adapter, [founders, blocks]."""
        factors = [adapter.factors[layer] for layer in self.linear_layers]
        columns = [own.scale * (own.b * own.a.T).sum(dim=1).numpy() for own in factors]
        return np.stack(columns, axis=1).astype(float)

    def mean(self, adapter: Adapter) -> float:
        """Mean reward of an adapter on the report tasks, which are equally many per kind."""
        return float((self.odds(self._weights(adapter))[NUM_ASKED:] > 0).mean())

    async def rollout(self, models: Sequence[ModelRef], tasks: Sequence[Task]) -> list[Group]:
        groups = []
        for model, found in zip(models, await self.evaluate(models, tasks), strict=True):
            for task in tasks:
                sure = found.certainties.get(task.id)
                rollout = Rollout(
                    task=task,
                    completion=None,
                    reward=found.rewards[task.id],
                    metrics={} if sure is None else {"certainty": sure},
                )
                groups.append(Group(task=task, model=model, rollouts=(rollout,)))
        return groups

    def read_answer(self, rollout: Rollout) -> str:
        return str(rollout.reward)


def run_one(case: tuple[str, str, int]) -> dict[str, float]:
    """Mean rewards on the report tasks of one search's winner and its baselines."""
    torch.set_num_threads(1)
    name, variant, seed = case
    world = World((FAMILIES | HELD_OUT)[name], seed=seed)
    unused = {"init": {"type": "file", "path": "."},
              "tasksets": [{"type": "generated", "generator": "mark-kind"}]}  # fmt: skip
    config = GenomeConfig.model_validate(
        {**unused, "rank": world.family.num_founders, "seed": seed, **VARIANTS[variant]}
    )
    with (
        tempfile.TemporaryDirectory() as place,
        Run.create(Path(place), kind="genome", config={}, name="run") as run,
    ):
        return asyncio.run(search(world, config, run))


async def search(world: World, config: GenomeConfig, run: Run) -> dict[str, float]:
    """Search as `rookery.loops.genome.evolve` does, without voting baselines."""
    inputs = GenomeInputs(
        config=config,
        founders=world.founders,
        tasksets=world.tasksets,
        evaluator=world,  # type: ignore[arg-type]
    )
    parts = assemble(inputs, engine=world, run=run, observer=UNOBSERVED)  # type: ignore[arg-type]
    founders, keep = list(parts.builder.founders), config.finals.num_finalists
    measured = await parts.search.measure(founders, rivals=(), seed=config.seed, keep=len(founders))
    await parts.log.record("founders", measured, Cost())
    for index, stage in enumerate(config.stages):
        context = StageContext(
            builder=parts.builder, search=parts.search, log=parts.log, seed=config.seed, index=index
        )
        await STAGES[stage.type](stage, context)
    count = parts.builder.num_distinct(parts.search.measured)
    found = {"winner": parts.final.finalists(keep), "founder": parts.final.founders()[:1]}
    found["random"] = await parts.final.random_search(count, seed=config.seed, keep=keep)
    means = {}
    for name, names in found.items():
        choice = await parts.final.choose(names, parts.split("select"), floor_holders={})
        means[name] = world.mean(parts.builder.adapter(choice.ranked[0]))
    return means


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--families", nargs="+", choices=[*FAMILIES, *HELD_OUT], default=list(FAMILIES)
    )
    parser.add_argument("--held-out", action="store_true", help="the families for trying changes")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--seeds", type=int, default=24)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--parallel", type=int, default=2)
    parser.add_argument("--picks", action="store_true")
    options = parser.parse_args()
    families = list(HELD_OUT) if options.held_out else options.families
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    if options.picks:
        for family in options.families:
            found = [pick(FAMILIES[family], seed) for seed in range(options.seeds)]
            means = {name: np.mean([own[name] for own in found]) for name in found[0]}
            print(f"{family:23}" + "  ".join(f"{n} {mean:.3f}" for n, mean in means.items()))
        return
    with ProcessPoolExecutor(options.parallel) as pool:
        for family in families:
            # Without choices, every merit equals the reward.
            variants = options.variants if "generated" not in family else ["default"]
            cases = [(family, name, seed) for name in variants for seed in seeds]
            show(family, dict(zip(cases, pool.map(run_one, cases), strict=True)))


def pick(family: Family, seed: int) -> dict[str, float]:
    """Mean reward on the report tasks of the best of 50 random candidates (51 with 20 founders), by
    the distribution of weights (chosen in two steps by `mixed`) and by merit on 90 tasks."""
    world, num = World(family, seed=seed), family.num_founders
    found = {}
    draws: dict[str, Callable[[np.random.Generator], Array]] = {
        "0 to 1.5": lambda rng: 1.5 * rng.random(num),
        "total of 1": lambda rng: rng.dirichlet(np.ones(num)),
        "now": lambda rng: random_weights(num, rng=rng),
    }
    half = NUM_ASKED // 2
    for name, draw in draws.items():
        rng = stream(seed, "picks")
        known = [] if name == "0 to 1.5" else [*np.eye(num), np.full(num, 1 / num)]
        points = [*known, *(draw(rng) for _ in range(max(50, num + 31) - len(known)))]
        odds = np.array([world.odds(np.tile(own[:, None], NUM_BLOCKS)) for own in points])
        reported = (odds[:, NUM_ASKED:] > 0).mean(axis=1)
        merits = all_merits(odds[:, :NUM_ASKED], has_choices=family.has_choices)
        best = np.argsort(-merits["mixed"][:, :half].mean(axis=1), kind="stable")[:5]
        found[name] = reported[best[merits["mixed"][best, half:].mean(axis=1).argmax()]]
    first = {name: own[:, :half] for name, own in merits.items()}
    by_merit = {f"by {n}": reported[own.mean(axis=1).argmax()] for n, own in first.items()}
    gains = {name: foretold(first[name], first["reward"]) for name in ("log_certainty", "reward")}
    return {
        **found,
        **by_merit,
        "by the better": by_merit[f"by {max(gains, key=gains.__getitem__)}"],
    }


def all_merits(odds: Array, *, has_choices: bool) -> dict[Merit, Array]:
    """Each merit as an array [candidates, tasks]."""
    rewards = (odds > 0).astype(float)
    sure = 1.0 / (1.0 + np.exp(-np.clip(odds, -50.0, 50.0))) if has_choices else rewards
    merits: dict[Merit, Array] = {"reward": rewards, "certainty": sure}
    choices, limits = [2 * has_choices] * odds.shape[1], np.full(odds.shape[1], 0.5)
    merits["log_certainty"] = merits_at(
        sure, merit="log_certainty", num_choices=choices, limits=limits
    )
    merits["mixed"] = np.mean([merits[name] for name in MIXED], axis=0)
    return merits


def foretold(merits: Array, rewards: Array) -> float:
    """Expected gain on unseen tasks from choosing by this merit: the covariance of merits with
    rewards of other tasks over the spread of mean merits, for the better half of candidates."""
    scaled = [(own.mean(axis=1) - own.mean()) / (own.mean(axis=1).std() + 1e-9)
              for own in (merits, rewards)]  # fmt: skip
    top = np.argsort(-(scaled[0] + scaled[1]), kind="stable")[: len(merits) // 2]
    ours, theirs = (own[top] - own[top].mean(axis=0) for own in (merits, rewards))
    pairs = ours.sum(axis=1) @ theirs.sum(axis=1) - (ours * theirs).sum()
    return float(pairs / (ours.mean(axis=1).std() + 1e-9))


def show(family: str, found: Mapping[tuple[str, str, int], Mapping[str, float]]) -> None:
    """Print each variant's means and its gain over random search by each merit."""
    seeds = sorted({seed for _, _, seed in found})
    variants = list(dict.fromkeys(variant for _, variant, _ in found))
    for variant in variants:
        means = {
            row: np.mean([found[family, variant, seed][row] for seed in seeds])
            for row in ("winner", "random", "founder")
        }
        gains = {
            other: [
                found[family, variant, s]["winner"] - found[family, other, s]["random"]
                for s in seeds
            ]
            for other in variants
        }
        shown = "  ".join(f"{row} {mean:.3f}" for row, mean in means.items())
        over = "  ".join(f"{other}: {say(own)}" for other, own in gains.items())
        print(f"{family:22}{variant:17}{shown}   over random, {over}", flush=True)


if __name__ == "__main__":
    main()
