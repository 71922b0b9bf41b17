"""Candidates on their way to the engine, and who is asked together."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

from rookery.errors import AdapterError
from rookery.loops.genome.brood import brood
from rookery.loops.genome.nursery import Drift, Nursery
from rookery.loops.genome.trials import Trials
from rookery.search.candidate import ChildPlan
from rookery.search.racing import RaceConfig
from rookery.testing import FakeAdapters
from rookery.types import Adapter, Evaluation, LoraFactors, ModelRef, Task
from rookery.weights import make_adapter
from rookery.weights.merge import LinearConfig, TiesConfig
from rookery.weights.mutate import GaussianConfig

NAMES = ("first", "second", "third")
TASKS = [Task(id=f"t{i}", prompt="", reference="", source="t") for i in range(4)]


def make(name: str) -> Adapter:
    value = float(NAMES.index(name) + 1)
    factors = LoraFactors(a=torch.full((1, 2), value), b=torch.ones(2, 1), scale=1.0)
    return make_adapter(name, base="tiny", factors={"layer": factors})


class Bench:
    """A nursery that makes by a function."""

    def __init__(self, make: Callable[[str], Adapter] = make, slow: tuple[str, ...] = ()) -> None:
        self.adapter, self._slow = make, slow

    def effort(self, name: str) -> int:
        return 3 if name in self._slow else 2


class Asked:
    """An evaluator that notes which models are asked together."""

    def __init__(self, on_ask: Callable[[list[str]], None] = lambda names: None) -> None:
        self.waves: list[list[str]] = []
        self._on_ask = on_ask

    async def evaluate(self, models: list[ModelRef], tasks: list[Task]) -> list[Evaluation]:
        names = [model.name for model in models]
        self.waves.append(names)
        self._on_ask(names)
        await asyncio.sleep(0)
        rewards = {task.id: 0.5 for task in tasks}
        return [
            Evaluation(model=model, rewards=rewards, errors={}, num_tokens=0, seconds=0.0)
            for model in models
        ]


def open_trials(
    evaluator: Asked,
    *,
    adapters: FakeAdapters | None = None,
    make: Callable[[str], Adapter] = make,
    is_elsewhere: bool,
) -> Trials:
    return Trials(
        evaluator,  # type: ignore[arg-type]
        adapters=adapters or FakeAdapters(),
        nursery=Bench(make),  # type: ignore[arg-type]
        tasks=TASKS,
        weights={"t": 1.0},
        race=RaceConfig(enabled=False),
        is_elsewhere=is_elsewhere,
    )


async def test_candidates_arrive_the_slow_ones_last_and_are_let_go_at_the_end() -> None:
    adapters = FakeAdapters()
    made = []

    def note(name: str) -> Adapter:
        made.append(name)
        return make(name)

    nursery = Bench(note, slow=("first",))
    async with brood(NAMES, nursery=nursery, adapters=adapters) as arrivals:  # type: ignore[arg-type]
        refs = [await arrivals[name] for name in NAMES]
        assert [ref.name for ref in refs] == list(NAMES)
        assert made == ["second", "third", "first"] == [ref.name for ref in adapters.loaded]
    assert not adapters.loaded


def test_what_takes_longer_to_make_has_the_greater_effort() -> None:
    founders = {name: make(name) for name in NAMES}
    nursery = Nursery(
        founders,
        merges={"linear": LinearConfig(), "ties": TiesConfig()},
        mutations={"gaussian": GaussianConfig()},
        rank=1,
    )
    plan = partial(
        ChildPlan, generation=1, parents=NAMES[:2], weights=(0.5, 0.5), sigma=0.1, seed_key=1
    )
    nursery.plan(
        [
            plan(id="ties", merge="ties", mutation=None),
            plan(id="linear", merge="linear", mutation="gaussian"),
            plan(id="move", merge="move", mutation=None),
            replace(plan(id="mutant", merge=None, mutation="gaussian"), parents=NAMES[:1]),
            Drift(id="drift", generation=1, parent="first", seeds=(1,), amounts=(0.1,)),
        ]
    )
    names = ("first", "drift", "mutant", "move", "linear", "ties")
    assert [nursery.effort(name) for name in names] == [0, 1, 1, 2, 2, 3]
    nursery.adapter("ties")
    assert nursery.effort("ties") == 0


async def test_leaving_early_makes_no_more_and_lets_go_what_arrived() -> None:
    adapters, made, may_go_on = FakeAdapters(), [], threading.Event()

    def slow(name: str) -> Adapter:
        made.append(name)
        if name == "second":
            may_go_on.wait(30)
        return make(name)

    with pytest.raises(RuntimeError, match="enough"):
        nursery = Bench(slow)
        async with brood(NAMES, nursery=nursery, adapters=adapters) as arrivals:  # type: ignore[arg-type]
            await arrivals["first"]
            raise RuntimeError("enough")
    may_go_on.set()
    assert not adapters.loaded
    assert "third" not in made


async def test_an_engine_in_this_process_is_asked_for_all_together() -> None:
    evaluator = Asked()
    await open_trials(evaluator, is_elsewhere=False).measure(NAMES, rivals=(), seed=0, keep=1)
    assert evaluator.waves == [list(NAMES)]


async def test_an_engine_elsewhere_answers_while_candidates_are_made() -> None:
    is_asked = {name: threading.Event() for name in NAMES}
    evaluator = Asked(on_ask=lambda names: [is_asked[name].set() for name in names])  # type: ignore[arg-type]

    def slow(name: str) -> Adapter:
        before = NAMES.index(name) - 1
        if before >= 0 and not is_asked[NAMES[before]].wait(30):
            raise AssertionError(f"{NAMES[before]} waits for {name} to be made")
        return make(name)

    trials = open_trials(evaluator, make=slow, is_elsewhere=True)
    measured = await trials.measure(NAMES, rivals=(), seed=0, keep=1)
    assert evaluator.waves == [["first"], ["second"], ["third"]]
    assert [found.is_complete for found in measured.values()] == [True] * 3


async def test_with_a_race_only_the_first_block_is_asked_one_by_one() -> None:
    evaluator = Asked()
    trials = open_trials(evaluator, is_elsewhere=True)
    trials._race = RaceConfig(block=2)
    await trials.measure(NAMES, rivals=(), seed=0, keep=3)
    assert evaluator.waves == [["first"], ["second"], ["third"], list(NAMES)]


@pytest.mark.parametrize("is_elsewhere", [False, True])
async def test_a_candidate_that_cannot_be_made_or_loaded_loses_alone(is_elsewhere: bool) -> None:
    class Picky(FakeAdapters):
        async def load(self, adapter: Adapter) -> ModelRef:
            if adapter.name == "third":
                raise AdapterError("its rank is too high")
            return await super().load(adapter)

    def fail_second(name: str) -> Adapter:
        if name == "second":
            raise AdapterError("its weights sum to 0")
        return make(name)

    adapters = Picky()
    trials = open_trials(Asked(), adapters=adapters, make=fail_second, is_elsewhere=is_elsewhere)
    measured = await trials.measure(NAMES, rivals=(), seed=0, keep=1)
    assert measured["first"].fitness.score == 0.5
    assert [measured[name].error for name in NAMES[1:]] == [
        "its weights sum to 0",
        "its rank is too high",
    ]
    assert not adapters.loaded
