"""Candidates on their way to the engine, and who is asked together."""

import asyncio
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from rookery.errors import EngineDownError, EngineError, FleetError
from rookery.loops.genome import search_evaluator
from rookery.loops.genome.adapter_builder import AdapterBuilder
from rookery.loops.genome.search_evaluator import CandidateLoader, SearchEvaluator
from rookery.runs import Run
from rookery.search.candidate import ChildPlan, EsStep
from rookery.search.merit import Merit
from rookery.search.racing import RaceConfig
from rookery.testing import FakeAdapters
from rookery.types import Adapter, Evaluation, LoraFactors, ModelRef, Task
from rookery.weights import make_adapter
from rookery.weights.merge import LinearConfig, TiesConfig
from rookery.weights.mutate import GaussianConfig

NAMES = ("first", "second", "third")
UNRACED = RaceConfig(enabled=False)
TASKS = [Task(id=f"t{i}", prompt="", reference="", source="t") for i in range(4)]


def make(name: str) -> Adapter:
    value = float(NAMES.index(name) + 1)
    factors = LoraFactors(a=torch.full((1, 2), value), b=torch.ones(2, 1), scale=1.0)
    return make_adapter(name, base="tiny", factors={"layer": factors})


class Makers:
    """A builder that makes by a function."""

    def __init__(self, make: Callable[[str], Adapter] = make, slow: tuple[str, ...] = ()) -> None:
        self._make, self._slow = make, slow
        self.forgotten: list[str] = []
        self.chained: set[str] = set()

    def effort(self, name: str) -> int:
        return 3 if name in self._slow else 2

    def maker(self, name: str) -> Callable[[], Adapter]:
        return partial(self._make, name)

    def learn(self, name: str, version: str | None) -> None:
        self.learned = {name: version}

    def forget(self, names: Iterable[str]) -> None:
        self.forgotten += names


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with Run.create(tmp_path, kind="genome", name="r", config={}) as run:
        yield run


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


def open_search(
    evaluator: Asked,
    run: Run,
    *,
    adapters: FakeAdapters | None = None,
    make: Callable[[str], Adapter] = make,
    slow: tuple[str, ...] = (),
    race: RaceConfig = UNRACED,
    num_tasks: int | None = None,
    is_remote: bool,
) -> SearchEvaluator:
    """Of `num_tasks` tasks, or of TASKS."""
    numbers = range(num_tasks or 0)
    tasks = [Task(id=f"t{i}", prompt="", reference="", source="t") for i in numbers] or TASKS
    return SearchEvaluator(
        evaluator,  # type: ignore[arg-type]
        loader=CandidateLoader(adapters or FakeAdapters(), run=run),
        builder=Makers(make, slow),  # type: ignore[arg-type]
        tasks=tasks,
        weights={"t": 1.0},
        race=race,
        is_remote=is_remote,
    )


async def test_candidates_are_made_the_slow_ones_last_and_unloaded_at_the_end(run: Run) -> None:
    adapters = FakeAdapters()
    made = []

    def note(name: str) -> Adapter:
        made.append(name)
        return make(name)

    search = open_search(
        Asked(), run, adapters=adapters, make=note, slow=("first",), is_remote=False
    )
    await search.measure(NAMES, rivals=(), seed=0, keep=1)
    assert made == ["second", "third", "first"] and adapters.num_loads == 3
    assert not adapters.loaded


def test_what_takes_longer_to_make_has_the_greater_effort() -> None:
    founders = {name: make(name) for name in NAMES}
    builder = AdapterBuilder(
        founders,
        merges={"linear": LinearConfig(), "ties": TiesConfig()},
        mutations={"gaussian": GaussianConfig()},
        rank=1,
    )
    plan = partial(
        ChildPlan, generation=1, parents=NAMES[:2], weights=(0.5, 0.5), sigma=0.1, seed_key=1
    )
    builder.plan(
        [
            plan(id="ties", merge="ties", mutation=None),
            plan(id="linear", merge="linear", mutation="gaussian"),
            plan(id="move", merge="move", mutation=None),
            replace(plan(id="mutant", merge=None, mutation="gaussian"), parents=NAMES[:1]),
            EsStep(id="step", generation=1, parent="first", seeds=(1,), amounts=(0.1,)),
        ]
    )
    names = ("first", "step", "mutant", "move", "linear", "ties")
    assert [builder.effort(name) for name in names] == [0, 1, 1, 2, 2, 3]
    builder.adapter("ties")
    assert builder.effort("ties") == 0


async def test_leaving_early_makes_no_more_and_unloads_what_arrived(run: Run) -> None:
    adapters, made, may_go_on = FakeAdapters(), [], threading.Event()

    def slow(name: str) -> Adapter:
        made.append(name)
        if name == "second":
            may_go_on.wait(30)
        return make(name)

    loader = CandidateLoader(adapters, run=run)
    with pytest.raises(RuntimeError, match="enough"):
        makers = {name: partial(slow, name) for name in NAMES}
        async with loader.load(makers, phase="search") as arrivals:
            await arrivals["first"]
            raise RuntimeError("enough")
    may_go_on.set()
    assert not adapters.loaded
    assert "third" not in made


async def test_an_adapter_that_cannot_be_unloaded_does_not_end_the_run(run: Run) -> None:
    class Stuck(FakeAdapters):
        async def unload(self, ref: ModelRef) -> None:
            await super().unload(ref)
            if ref.name == "first":
                raise FleetError("The server does not answer.")

    adapters = Stuck()
    makers = {name: partial(make, name) for name in NAMES}
    async with CandidateLoader(adapters, run=run).load(makers, phase="search") as arrivals:
        arrived = [await arrivals[name] for name in NAMES]
    assert [ref.name for ref in arrived if isinstance(ref, ModelRef)] == list(NAMES)
    assert not adapters.loaded


async def test_members_are_asked_while_others_are_prepared_and_read_nothing(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read of the run waits for its writer: no server is asked meanwhile."""
    adapters, num_loaded = FakeAdapters(), []
    search = open_search(
        Asked(on_ask=lambda _: num_loaded.append(adapters.num_loads)),
        run,
        adapters=adapters,
        is_remote=True,
    )

    def refuse(*_: object) -> None:
        raise AssertionError("the run is read")

    monkeypatch.setattr(run, "get", refuse)
    members = {f"m{i}": partial(replace, make("first"), name=f"m{i}") for i in range(100)}
    measured = await search.measure_members(members, [task.id for task in TASKS])
    assert list(measured) == list(members)
    assert num_loaded[0] < 20 and num_loaded[-1] == 100 and not adapters.loaded


@pytest.mark.parametrize("is_remote", [False, True])
async def test_a_member_is_forgotten_once_the_engine_has_it(run: Run, is_remote: bool) -> None:
    """An engine that reads its numbers makes them, and they stay with the member."""
    made: list[weakref.ref[Numbers]] = []

    def make_member(name: str) -> Adapter:
        numbers = Numbers(make("first").factors)
        made.append(weakref.ref(numbers))
        return replace(make("first"), name=name, factors=numbers)

    def check(_: Sequence[str]) -> None:
        assert made and not any(reference() for reference in made)

    search = open_search(Asked(on_ask=check), run, adapters=Forgetful(), is_remote=is_remote)
    members = {f"m{i}": partial(make_member, f"m{i}") for i in range(20)}
    assert len(await search.measure_members(members, [TASKS[0].id])) == len(made) == 20


class Numbers(dict[str, LoraFactors]):
    """Factors of which one sees when they are gone."""


class Forgetful(FakeAdapters):
    """Copies the numbers of an adapter into its slots."""

    async def load(self, adapter: Adapter) -> ModelRef:
        return await super().load(replace(adapter, factors=dict(adapter.factors)))


async def test_a_member_that_could_not_be_loaded_is_not_tried_again(run: Run) -> None:
    class Full(FakeAdapters):
        async def load(self, adapter: Adapter) -> ModelRef:
            raise EngineError("No place is left.")

    for adapters in (Full(), FakeAdapters()):
        search = open_search(Asked(), run, adapters=adapters, is_remote=True)
        measured = await search.measure_members({"first": partial(make, "first")}, [TASKS[0].id])
        assert measured["first"].error == "No place is left." and not adapters.num_loads


async def test_a_remote_engine_answers_while_candidates_are_made(run: Run) -> None:
    is_asked = {name: threading.Event() for name in NAMES}

    def answered(names: Sequence[str]) -> None:
        for name in names:
            is_asked[name].set()

    evaluator = Asked(on_ask=answered)

    def slow(name: str) -> Adapter:
        before = NAMES.index(name) - 1
        if before >= 0 and not is_asked[NAMES[before]].wait(30):
            raise AssertionError(f"{NAMES[before]} waits for {name} to be made")
        return make(name)

    search = open_search(evaluator, run, make=slow, is_remote=True)
    measured = await search.measure(NAMES, rivals=(), seed=0, keep=1)
    assert evaluator.waves == [["first"], ["second"], ["third"]]
    assert [found.is_complete for found in measured.values()] == [True] * 3


async def test_more_than_a_cohort_is_measured_piece_by_piece(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search_evaluator, "COHORT", 2)
    adapters, most = FakeAdapters(), []
    evaluator = Asked(on_ask=lambda names: most.append(len(adapters.loaded)))
    search = open_search(evaluator, run, adapters=adapters, is_remote=False)
    measured = await search.measure(NAMES, rivals=(), seed=0, keep=1)
    assert max(most) == 2 and list(measured) == list(NAMES)
    assert all(found.is_complete for found in measured.values())


@pytest.mark.parametrize("is_remote", [False, True])
async def test_a_candidate_that_cannot_be_made_or_loaded_loses_alone_and_for_good(
    run: Run, is_remote: bool
) -> None:
    class Picky(FakeAdapters):
        async def load(self, adapter: Adapter) -> ModelRef:
            if adapter.name == "third":
                raise FleetError("its rank is too high")
            return await super().load(adapter)

    def fail_second(name: str) -> Adapter:
        if name == "second":
            raise ZeroDivisionError("its weights sum to 0")
        return make(name)

    for adapters, makes in ((Picky(), fail_second), (FakeAdapters(), make)):
        search = open_search(Asked(), run, adapters=adapters, make=makes, is_remote=is_remote)
        measured = await search.measure(NAMES, rivals=(), seed=0, keep=1)
        assert measured["first"].fitness.score == 0.5
        assert [measured[name].error for name in NAMES[1:]] == [
            "Making second: its weights sum to 0",
            "its rank is too high",
        ]
        assert not adapters.loaded


async def test_an_engine_that_is_gone_ends_the_search_and_fails_nobody(run: Run) -> None:
    class Gone(FakeAdapters):
        async def load(self, adapter: Adapter) -> ModelRef:
            raise EngineDownError("The engine is closed.")

    search = open_search(Asked(), run, adapters=Gone(), is_remote=False)
    with pytest.raises(EngineDownError):
        await search.measure(NAMES, rivals=(), seed=0, keep=1)
    assert not list(run.events("failure"))


class Ranked(Asked):
    """Each candidate has its own reward on every task; keeps count of the answers in flight."""

    def __init__(self, rewards: dict[str, float]) -> None:
        super().__init__()
        self.rewards, self.num_answers = rewards, 0
        self.num_open = self.most_open = 0
        self.expected = 0
        self.is_full = asyncio.Event()

    async def evaluate(self, models: list[ModelRef], tasks: list[Task]) -> list[Evaluation]:
        self.num_answers += len(models) * len(tasks)
        self.num_open += len(models) * len(tasks)
        self.most_open = max(self.most_open, self.num_open)
        if self.num_open >= self.expected:
            self.is_full.set()
        await asyncio.wait_for(self.is_full.wait(), 30)
        self.num_open -= len(models) * len(tasks)
        return [
            Evaluation(
                model=model,
                rewards={task.id: self.rewards[model.name] for task in tasks},
                errors={},
                num_tokens=0,
                seconds=0.0,
            )
            for model in models
        ]


@pytest.mark.parametrize("is_remote", [False, True])
async def test_a_race_drops_the_hopeless_and_keeps_servers_full(
    run: Run, monkeypatch: pytest.MonkeyPatch, is_remote: bool
) -> None:
    monkeypatch.setattr(search_evaluator, "WAVE", 12)
    monkeypatch.setattr(search_evaluator, "REMOTE_WAVE", 12)
    evaluator = Ranked({"first": 1.0, "second": 0.0, "third": 0.0})
    evaluator.expected = 48 if is_remote else 12
    race = RaceConfig(block=4)
    search = open_search(evaluator, run, race=race, num_tasks=120, is_remote=is_remote)
    measured = await search.measure(NAMES, rivals=(), seed=0, keep=1)
    assert measured["first"].is_complete and measured["first"].fitness.score == 1.0
    for name in NAMES[1:]:
        assert 0 < len(measured[name].rewards) < 60 and len(measured[name].rewards) % 4 == 0
    assert evaluator.num_answers < 240
    # Servers have the next wave while the last one is out; an engine here is asked by waves.
    assert evaluator.most_open == evaluator.expected


async def test_floors_that_come_later_judge_everyone(run: Run) -> None:
    evaluator = Ranked({"first": 0.9, "second": 0.6, "third": 0.5})
    search = open_search(evaluator, run, is_remote=False)
    await search.measure(NAMES, rivals=(), seed=0, keep=3)
    assert not any(found.fitness.violation for found in search.measured.values())
    search.set_floors({"t": 0.55})
    missed = [search.measured[name].fitness.violation for name in NAMES]
    assert missed == pytest.approx([0.0, 0.0, 0.05])


async def test_a_failure_while_the_next_wave_is_out_fails_the_candidate_alone(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search_evaluator, "REMOTE_WAVE", 12)

    class Failing(Ranked):
        async def evaluate(self, models: list[ModelRef], tasks: list[Task]) -> list[Evaluation]:
            found = await super().evaluate(models, tasks)
            return [_without(e, "t3") if e.model.name == "second" else e for e in found]

    evaluator = Failing({"first": 1.0, "second": 0.9, "third": 0.8})
    race = RaceConfig(block=4)
    search = open_search(evaluator, run, race=race, num_tasks=60, is_remote=True)
    measured = await search.measure(NAMES, rivals=(), seed=0, keep=2)
    assert measured["second"].error == "t3 fails" and measured["second"].fitness.is_failed
    assert measured["first"].is_complete and not measured["third"].error


def _without(evaluation: Evaluation, task: str) -> Evaluation:
    """The evaluation with one task failed, if it was asked."""
    rewards = {id: reward for id, reward in evaluation.rewards.items() if id != task}
    failed = set(evaluation.rewards) - set(rewards)
    return replace(evaluation, rewards=rewards, errors={id: f"{id} fails" for id in failed})


async def test_a_dropped_candidate_that_did_not_see_every_taskset_keeps_its_violation(
    run: Run,
) -> None:
    tasks = [Task(id=f"a{i}", prompt="", reference="", source="a") for i in range(200)]
    tasks.append(Task(id="b0", prompt="", reference="", source="b"))
    evaluator = Ranked({"first": 1.0, "second": 0.1, "third": 0.2})
    search = SearchEvaluator(
        evaluator,  # type: ignore[arg-type]
        loader=CandidateLoader(FakeAdapters(), run=run),
        builder=Makers(),  # type: ignore[arg-type]
        tasks=tasks,
        weights={"a": 1.0, "b": 1.0},
        race=RaceConfig(block=4),
        is_remote=False,
    )
    search.set_floors({"a": 0.5})
    measured = await search.measure(NAMES, rivals=(), seed=3, keep=1)
    dropped = [m for m in measured.values() if not m.is_complete]
    assert dropped and not any("b0" in m.rewards for m in dropped), "the case is met"
    assert all(m.fitness.violation > 0.2 for m in dropped)


class Unsure:
    """An evaluator to whose models every choice is right: `third` is the surest of them."""

    async def evaluate(self, models: list[ModelRef], tasks: list[Task]) -> list[Evaluation]:
        await asyncio.sleep(0)
        sure = {"first": 0.6, "second": 0.7, "third": 0.9}
        return [
            Evaluation(
                model=model,
                rewards={task.id: 1.0 for task in tasks},
                errors={},
                num_tokens=0,
                seconds=0.0,
                certainties={task.id: sure[model.name] for task in tasks},
            )
            for model in models
        ]


@pytest.mark.parametrize(
    ("merit", "scores"), [("reward", (1, 1, 1)), ("certainty", (0.6, 0.7, 0.9))]
)
async def test_candidates_are_compared_by_merit_and_reported_by_reward(
    run: Run, merit: Merit, scores: tuple[float, ...]
) -> None:
    search = SearchEvaluator(
        Unsure(),  # type: ignore[arg-type]
        loader=CandidateLoader(FakeAdapters(), run=run),
        builder=Makers(),  # type: ignore[arg-type]
        tasks=TASKS,
        weights={"t": 1.0},
        race=UNRACED,
        merit=merit,
    )
    measured = await search.measure(NAMES, rivals=(), seed=0, keep=3)
    assert [measured[n].fitness.score for n in NAMES] == pytest.approx(list(scores))
    assert [measured[name].mean for name in NAMES] == [1.0, 1.0, 1.0]
    assert search.means("first") == {"t": 1.0}
    search.set_floors({"t": 0.95})
    assert [search.measured[name].fitness.violation for name in NAMES] == [0, 0, 0]
