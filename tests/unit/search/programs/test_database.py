from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from rookery.search.programs.bandit import Arm, BanditConfig
from rookery.search.programs.database import (
    Ask,
    DatabaseState,
    ProgramDatabase,
    ProgramDatabaseConfig,
    Tell,
    Window,
)
from rookery.search.programs.population import ParentSamplingConfig, Plan
from rookery.search.programs.program import FailedRecord, ScoredProgram, summarize
from rookery.seeding import stream

CONFIG = ProgramDatabaseConfig(
    population_size=30,
    archive_size=9,
    num_islands=3,
    feature_dimensions=("complexity", "diversity", "score"),
    migration_interval=5,
    diversity_reference_size=4,
    objectives=("combined_score", "speed"),
    bandit=BanditConfig(policy="ucb"),
)
ARMS = (Arm(name="small", weight=0.8), Arm(name="large", weight=0.2))


def founder(id: str, score: float, *, code: str = "", island: int = 0) -> ScoredProgram:
    """A program that the search starts from."""
    return ScoredProgram(
        id=id,
        attempt=0,
        island=island,
        metrics={"combined_score": score},
        code=summarize(code or id),
    )


def child_of(
    plan: Plan, metrics: dict[str, float], *, code: str, cost: float = 10
) -> ScoredProgram:
    """What carrying out the plan gave."""
    return ScoredProgram(
        id=f"p{plan.attempt}",
        attempt=plan.attempt,
        island=plan.island,
        metrics=metrics,
        code=summarize(code),
        parent=plan.parent,
        parent_score=plan.parent_score,
        generation=plan.generation,
        arm=plan.arm,
        cost=cost,
    )


def start(config: ProgramDatabaseConfig = CONFIG, *, seed: int = 3) -> ProgramDatabase:
    database = ProgramDatabase(config, seed=seed, arms=ARMS)
    first = founder("first", 0.1)
    database.tell(replace(first, metrics={"combined_score": 0.1, "speed": 0.5}))
    return database


def carry_out(plan: Plan) -> ScoredProgram | None:
    """A model and an evaluator that know nothing but the plan; one attempt in five fails."""
    rng = stream(11, "outcome", plan.attempt, plan.parent, *plan.inspirations)
    if rng.random() < 0.2:
        return None
    metrics = {"combined_score": round(float(rng.random()), 1), "speed": float(rng.random())}
    return child_of(plan, metrics, code="y" * int(rng.integers(1, 300)) + plan.parent)


def tell(database: ProgramDatabase, plan: Plan, outcome: ScoredProgram | None) -> None:
    if outcome is None:
        database.tell_failure(FailedRecord(arm=plan.arm, cost=10))
    else:
        database.tell(outcome)


def reload(database: ProgramDatabase, config: ProgramDatabaseConfig = CONFIG) -> ProgramDatabase:
    document = TypeAdapter(DatabaseState).dump_json(database.state)
    return ProgramDatabase(config, seed=3, state=TypeAdapter(DatabaseState).validate_json(document))


@settings(max_examples=8)
@given(saved_at=st.integers(1, 80), failures=st.integers(2, 9))
def test_saved_reloaded_and_replayed_databases_are_equal(saved_at: int, failures: int) -> None:
    database, events = start(), []
    other = None
    for attempt in range(1, 81):
        if attempt == saved_at:
            other = reload(database)
        plan = database.ask(attempt)
        outcome = carry_out(plan) if attempt % failures else None
        events.append((plan, outcome))
        tell(database, plan, outcome)
        if other is not None:
            assert other.ask(attempt) == plan
            tell(other, plan, outcome)
    replayed = start()
    for plan, outcome in events:
        tell(replayed, plan, outcome)
    assert replayed.state == database.state
    assert other is not None and other.state == database.state
    assert reload(database).state == database.state


def test_asking_changes_nothing_and_depends_on_seed_and_attempt() -> None:
    database = start()
    for attempt in range(1, 40):
        plan = database.ask(attempt)
        tell(database, plan, carry_out(plan))
    before = database.state
    plans = [database.ask(attempt) for attempt in range(40, 70)]
    assert [database.ask(attempt) for attempt in range(40, 70)] == plans
    assert database.state == before
    other_seed = ProgramDatabase(CONFIG, seed=4, state=before)
    others = [other_seed.ask(attempt) for attempt in range(40, 70)]
    assert [plan.parent for plan in others] != [plan.parent for plan in plans]
    assert [plan.arm for plan in others] != [plan.arm for plan in plans]


def test_plans_name_distinct_programs_of_the_island_that_are_kept() -> None:
    database = start()
    for attempt in range(1, 120):
        plan = database.ask(attempt)
        members = database.state.population.islands[plan.island].members
        assert plan.island == (attempt - 1) % 3
        assert plan.parent in database.members
        assert len({plan.parent, *plan.inspirations}) == 1 + len(plan.inspirations)
        assert set(plan.inspirations) <= set(members)
        if members:
            scores = [database.members[id].score for id in plan.top]
            everybody = sorted((database.members[id].score for id in members), reverse=True)
            assert scores == everybody[:5]
            assert len(plan.inspirations) == min(2, len({*members} - {plan.parent}))
        tell(database, plan, carry_out(plan))


def run_window(decide_next: Callable[[list[int]], int], *, width: int = 4) -> ProgramDatabase:
    """Attempts end in the order that `decide_next` chooses from those in flight."""
    database = start()
    window: Window[tuple[Plan, ScoredProgram | None]] = Window(width=width, num_attempts=60)
    in_flight: dict[int, Plan] = {}
    while True:
        while (step := window.next_step()) is not None:
            match step:
                case Ask(attempt=attempt):
                    in_flight[attempt] = database.ask(attempt)
                case Tell(result=(plan, outcome)):
                    tell(database, plan, outcome)
        if not in_flight:
            return database
        attempt = decide_next(sorted(in_flight))
        plan = in_flight.pop(attempt)
        window.decide(attempt, (plan, carry_out(plan)))


def test_in_a_window_the_order_of_results_does_not_matter() -> None:
    rng = stream(0, "order")
    in_order = run_window(lambda running: running[0]).state
    assert run_window(lambda running: running[-1]).state == in_order
    assert run_window(lambda running: running[int(rng.integers(len(running)))]).state == in_order
    assert run_window(lambda running: running[0], width=5).state != in_order


def test_an_island_without_programs_gets_a_parent_from_elsewhere() -> None:
    database = start()
    plan = database.ask(2)
    assert (plan.island, plan.parent, plan.inspirations) == (1, "first", ())
    assert plan.top == ("first",)


def share_of(config: ParentSamplingConfig, id: str) -> float:
    database = ProgramDatabase(
        ProgramDatabaseConfig(num_islands=1, archive_size=1, sampling=config), seed=5
    )
    for name, score in (("low", 1.0), ("high", 3.0)):
        database.tell(founder(name, score, code=name * 40))
    return sum(database.ask(k).parent == id for k in range(1, 401)) / 400


@pytest.mark.parametrize(
    ("exploration", "exploitation", "expected"),
    [(1.0, 0.0, 0.5), (0.0, 1.0, 1.0), (0.0, 0.0, 0.75)],
)
def test_parents_are_drawn_alike_from_the_archive_or_by_score(
    exploration: float, exploitation: float, expected: float
) -> None:
    config = ParentSamplingConfig(exploration_ratio=exploration, exploitation_ratio=exploitation)
    assert share_of(config, "high") == pytest.approx(expected, abs=0.07)


def test_with_objectives_parents_come_from_the_front() -> None:
    sampling = ParentSamplingConfig(exploration_ratio=0, exploitation_ratio=1)
    config = ProgramDatabaseConfig(num_islands=1, objectives=("a", "b"), sampling=sampling)
    database = ProgramDatabase(config, seed=0)
    for id, a, b in (("x", 1.0, 0.0), ("y", 0.0, 1.0), ("z", 0.0, 0.5)):
        database.tell(replace(founder(id, 0.0, code=id * 9), metrics={"a": a, "b": b}))
    assert {database.ask(k).parent for k in range(1, 60)} == {"x", "y"}


def test_metrics_that_cannot_be_used_get_a_sentence_and_change_nothing() -> None:
    config = ProgramDatabaseConfig(feature_dimensions=("complexity", "speed"), objectives=("size",))
    database = ProgramDatabase(config, seed=0)
    good = {"combined_score": 1.0, "speed": 1.0, "size": 2.0}
    assert database.problem_with(good) is None
    for bad, words in [
        ({**good, "combined_score": float("nan")}, "no score"),
        ({"combined_score": 1.0, "size": 2.0}, "no 'speed'"),
        ({"combined_score": 1.0, "speed": 2.0}, "no 'size'"),
        ({**good, "speed": float("inf")}, "is inf"),
    ]:
        assert words in (database.problem_with(bad) or "")
        with pytest.raises(ValueError, match="Tell it as a failure"):
            database.tell(replace(founder("p", 0.0), metrics=bad))
    assert database.best is None
    assert database.state == ProgramDatabase(config, seed=0).state


def test_a_program_is_told_once_on_an_island_that_exists() -> None:
    database = start(ProgramDatabaseConfig())
    with pytest.raises(ValueError, match="told before"):
        database.tell(founder("first", 0.1))
    with pytest.raises(ValueError, match="0 to 4"):
        database.tell(founder("other", 0.1, island=5))
    with pytest.raises(ValueError, match="no arm 'none'"):
        database.tell(replace(founder("other", 0.1), arm="none"))
    assert list(database.members) == ["first"]
    with pytest.raises(ValueError, match="tell the programs to start from"):
        ProgramDatabase(ProgramDatabaseConfig(), seed=0).ask(1)


def test_improvement_over_the_parent_is_the_arms_gain() -> None:
    database = start(ProgramDatabaseConfig())
    plan = replace(database.ask(1), arm="small")
    database.tell(child_of(plan, {"combined_score": 0.6}, code="a", cost=100))
    worse = replace(plan, attempt=2)
    database.tell(child_of(worse, {"combined_score": 0.0}, code="b", cost=50))
    database.tell_failure(FailedRecord(arm="large", cost=30))
    small, large = database.state.arms
    assert (small.num_plays, small.cost) == (2, 150) and small.gain == pytest.approx(0.5)
    assert (large.num_plays, large.gain, large.cost) == (1, 0, 30)


def test_a_metric_takes_the_place_of_a_built_in_feature() -> None:
    config = ProgramDatabaseConfig(num_islands=1, feature_dimensions=("complexity",))
    database = ProgramDatabase(config, seed=0)
    member = database.tell(
        ScoredProgram(id="p", attempt=0, island=0, code=summarize("abc"),
                      metrics={"combined_score": 1.0, "complexity": 77.0})
    )  # fmt: skip
    assert member.features == (77.0,)
    assert database.tell(founder("q", 1.0, code="abcd")).features == (4.0,)


def steps_of(window: Window[str]) -> list[str]:
    found = []
    while (step := window.next_step()) is not None:
        found.append(f"ask {step.attempt}" if isinstance(step, Ask) else f"tell {step.attempt}")
    return found


def test_attempt_k_is_asked_after_exactly_the_tells_up_to_k_minus_width() -> None:
    window: Window[str] = Window(width=3, num_attempts=5)
    assert steps_of(window) == ["ask 1", "ask 2", "ask 3"]
    window.decide(3, "c")
    window.decide(2, "b")
    assert steps_of(window) == []
    assert window.num_waiting == 2
    window.decide(1, "a")
    assert steps_of(window) == ["tell 1", "ask 4", "tell 2", "ask 5", "tell 3"]
    window.decide(5, "e")
    window.decide(4, "d")
    assert steps_of(window) == ["tell 4", "tell 5"]


def test_the_first_result_of_an_attempt_counts() -> None:
    window: Window[str] = Window(width=1, num_attempts=2)
    assert window.next_step() == Ask(attempt=1)
    window.decide(1, "first")
    window.decide(1, "second")
    assert window.next_step() == Tell(attempt=1, result="first")
    window.decide(1, "third")
    assert window.next_step() == Ask(attempt=2)
    assert window.next_step() is None


def test_a_window_has_width_and_decides_what_was_asked() -> None:
    with pytest.raises(ValueError, match="1 or above"):
        Window(width=0, num_attempts=1)
    with pytest.raises(ValueError, match="before it was asked"):
        Window[str](width=1, num_attempts=1).decide(1, "a")
