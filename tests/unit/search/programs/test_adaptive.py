"""Adaptive search: operators compete, failures are mended once, lines fit the attempts left."""

from collections import Counter
from dataclasses import replace

import pytest

from rookery.search.programs.adaptive import AdaptiveDatabase, SearchBudget
from rookery.search.programs.bandit import OPERATORS, OperatorBandit
from rookery.search.programs.database import ProgramDatabaseConfig
from rookery.search.programs.population import Plan
from rookery.search.programs.program import FailedRecord, ScoredProgram, summarize
from rookery.seeding import stream

CONFIG = ProgramDatabaseConfig(migration_interval=10**9)
ALL = dict.fromkeys(OPERATORS, True)


def start(num_attempts: int = 1000, *, max_cost: float | None = None) -> AdaptiveDatabase:
    budget = SearchBudget(num_attempts=num_attempts, max_cost=max_cost)
    database = AdaptiveDatabase(CONFIG, seed=3, budget=budget)
    database.tell(
        ScoredProgram(
            id="first",
            attempt=0,
            island=0,
            metrics={"combined_score": 0.1},
            code=summarize("first"),
        )
    )
    return database


def child_of(plan: Plan, score: float) -> ScoredProgram:
    return ScoredProgram(
        id=f"p{plan.attempt}",
        attempt=plan.attempt,
        island=plan.island,
        metrics={"combined_score": score},
        code=summarize(f"program {plan.attempt}"),
        parent=plan.parent,
        parent_score=plan.parent_score,
        generation=plan.generation,
        cost=100.0,
        operator=plan.operator,
        mends=plan.mends,
    )


def failure_of(plan: Plan, kind: str = "error", message: str = "NameError: np") -> FailedRecord:
    return FailedRecord(
        id=f"p{plan.attempt}",
        cost=100.0,
        operator=plan.operator,
        mends=plan.mends,
        kind=kind,
        message=message,
        parent=plan.parent,
        parent_score=plan.parent_score,
        generation=plan.generation,
        can_be_mended=kind == "error",
    )


def carry_out(database: AdaptiveDatabase, plan: Plan, *, can_improve: bool = True) -> None:
    rng = stream(5, "outcome", plan.attempt, plan.parent, plan.mends)
    if rng.random() < 0.3:
        database.tell_failure(failure_of(plan))
        return
    step = 0.01 if can_improve and rng.random() < 0.3 else -0.05
    database.tell(child_of(plan, plan.parent_score + step * rng.random()))


def play(database: AdaptiveDatabase, num: int, *, can_improve: bool = True) -> list[Plan]:
    plans = []
    for attempt in range(1, num + 1):
        plans.append(database.ask(attempt))
        assert database.ask(attempt) == plans[-1], "asking changes nothing"
        carry_out(database, plans[-1], can_improve=can_improve)
    return plans


def test_telling_the_same_again_gives_the_same_search() -> None:
    database, again = start(), start()
    plans = play(database, 300)
    for plan in plans:
        carry_out(again, plan)
    assert again.ask(301) == database.ask(301)
    assert again.operators == database.operators
    assert {plan.operator for plan in plans} >= {"best", "repair", "top", "crossover"}


def test_a_search_that_improves_draws_the_best_and_one_that_does_not_draws_all() -> None:
    improving = Counter(plan.operator for plan in play(start(), 400))
    assert improving["best"] + improving["repair"] > 0.85 * 400
    stuck = Counter(plan.operator for plan in play(start(), 400, can_improve=False))
    assert stuck["best"] < 0.7 * 400
    assert set(stuck) == set(OPERATORS) - {"improver"}, "nothing improved on its parent"


def test_no_line_begins_that_cannot_climb() -> None:
    operators = Counter(plan.operator for plan in play(start(150), 150, can_improve=False))
    assert not operators["restart"] and not operators["elite"]
    by_cost = play(start(10_000, max_cost=15_000.0), 140, can_improve=False)
    # What an attempt costs is known after the first one.
    assert not [plan for plan in by_cost[1:] if plan.operator in {"restart", "elite"}]


def test_lines_are_apart_from_the_main_one() -> None:
    for plan in play(start(2000), 800, can_improve=False):
        is_line = plan.operator in {"restart", "elite"}
        assert is_line == (plan.island > 0)
        assert not (is_line and plan.top), "a line does not look at the best programs"
        assert plan.operator != "restart" or plan.parent == "first"


def test_a_plateau_is_walked_over() -> None:
    database = start()
    for attempt in (1, 2, 3):
        plan = database.ask(attempt)
        database.tell(child_of(plan, 0.1))
    assert database.ask(4).parent == "p3", "of equal programs the newest"
    assert database.best is not None and database.best.id == "first"


def plan_of(database: AdaptiveDatabase, operator: str, attempt: int) -> Plan:
    """As if the operator had been drawn."""
    return replace(database.ask(attempt), operator=operator)


def test_a_failed_program_is_mended_once() -> None:
    database = start(200)
    database.tell_failure(failure_of(plan_of(database, "best", 1)))
    repairs = [plan for k in range(2, 60) if (plan := database.ask(k)).operator == "repair"]
    assert 3 < len(repairs) < 20, "offered to one of four attempts, as likely as the best"
    assert {(plan.mends, plan.parent, plan.parent_score) for plan in repairs} == {
        ("p1", "first", 0.1)
    }
    database.tell_failure(failure_of(repairs[0]))
    assert "repair" not in {database.ask(attempt).operator for attempt in range(60, 120)}


@pytest.mark.parametrize("kind", ["repeated", "no_diff"])
def test_what_gave_no_program_is_not_mended(kind: str) -> None:
    database = start(200)
    database.tell_failure(failure_of(plan_of(database, "best", 1), kind=kind))
    assert {database.ask(k).operator for k in range(2, 60)} == {"best"}


def test_failures_that_recur_are_named() -> None:
    database = start()
    for attempt in (1, 2, 3):
        assert database.ask(attempt).failures == ()
        database.tell_failure(failure_of(plan_of(database, "best", attempt)))
    database.tell_failure(failure_of(plan_of(database, "best", 4), kind="timeout"))
    for attempt in (5, 6, 7):  # no program is to blame
        database.tell_failure(failure_of(plan_of(database, "best", attempt), kind="model"))
    assert database.ask(8).failures == (
        "3 of the last 7 answers failed (error NameError): NameError: np",
    )


def test_shares_follow_improvement_per_token_and_none_starves() -> None:
    bandit = OperatorBandit()
    before = bandit.shares(ALL, horizon=1000, num_left=1000)
    assert before["best"] > 0.4 and before["best"] + before["repair"] > 0.9
    for _ in range(60):
        bandit.tell("best", gain=0.001, cost=100, is_accepted=True, horizon=1000)
        bandit.tell("top", gain=0.001, cost=1000, is_accepted=True, horizon=1000)
        bandit.tell("crossover", gain=0.003, cost=100, is_accepted=True, horizon=1000)
    after = bandit.shares(ALL, horizon=1000, num_left=800)
    assert after["crossover"] > after["best"] > 10 * after["top"]
    assert after["crossover"] > 10 * before["crossover"]
    assert min(after.values()) > 0
    assert sum(after.values()) == pytest.approx(1)
    for _ in range(500):
        bandit.tell("best", gain=0.0, cost=100, is_accepted=True, horizon=1000)
    stuck = bandit.shares(ALL, horizon=1000, num_left=300)
    assert stuck["elite"] > 10 * after["elite"]
    at_the_end = bandit.shares(ALL, horizon=1000, num_left=1)
    assert at_the_end["elite"] < 0.1 * stuck["elite"]


def test_models_that_report_no_tokens_count_by_attempts() -> None:
    bandit = OperatorBandit()
    bandit.tell("best", gain=0.1, cost=0.0, is_accepted=True, horizon=100)
    assert bandit.mean_cost == 1.0
    assert sum(bandit.shares(ALL, horizon=100, num_left=99).values()) == pytest.approx(1)


def test_objectives_draw_from_the_front() -> None:
    config = CONFIG.model_copy(update={"objectives": ("combined_score", "speed")})
    database = AdaptiveDatabase(config, seed=1, budget=SearchBudget(num_attempts=50))
    for number, metrics in enumerate(
        ({"combined_score": 0.9, "speed": 0.1}, {"combined_score": 0.1, "speed": 0.9})
    ):
        database.tell(
            ScoredProgram(
                id=f"f{number}", attempt=0, island=0, metrics=metrics, code=summarize(str(number))
            )
        )
    assert {database.ask(k).parent for k in range(1, 30)} == {"f0", "f1"}
