"""Survivors and moves: elites stay, failures go, coefficients are fresh, steps shrink once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery.search.candidate import Candidate, ChildPlan, ParticleState
from rookery.search.fitness import FAILED, Fitness
from rookery.search.population import (
    SurvivalConfig,
    SwarmConfig,
    SwarmState,
    next_particle_state,
    plan_moves,
    step_length,
    survivors,
)
from rookery.search.selection import RankConfig, RouletteConfig, SelectionConfig, TournamentConfig
from rookery.seeding import stream

AT = SwarmState(generation=1, best="b", worst="w")


def candidate(
    id: str, score: float | None = 0.5, particle: ParticleState | None = None
) -> Candidate:
    return Candidate(
        id=id, generation=0, fitness=Fitness(score=score), sigma=0.1, particle=particle
    )


@given(
    scores=st.lists(st.none() | st.sampled_from([-1.0, 0.0, 0.3, 0.3, 2.0]), min_size=1),
    size=st.integers(1, 12),
    num_elites=st.integers(1, 3),
    rule=st.sampled_from([None, TournamentConfig(), RouletteConfig(), RankConfig()]),
)
def test_elites_survive_and_failures_do_not(
    scores: list[float | None], size: int, num_elites: int, rule: SelectionConfig | None
) -> None:
    config = SurvivalConfig(num_elites=num_elites, rule=rule)
    kept = survivors(scores, size=size, config=config, rng=stream(0))
    alive = [i for i, score in enumerate(scores) if score is not None]
    assert len(kept) == len(set(kept)) == min(size, len(alive) or len(scores))
    if alive:
        assert set(kept) <= set(alive)
        best = sorted((s for s in scores if s is not None), reverse=True)[: min(num_elites, size)]
        assert [scores[i] for i in kept[: len(best)]] == best


def test_without_a_rule_the_best_survive() -> None:
    kept = survivors([0.1, 0.5, None, 0.4, 0.2], size=3, config=SurvivalConfig(), rng=stream(0))
    assert kept == (1, 3, 4)


def test_the_step_shrinks_per_generation_not_per_candidate() -> None:
    config = SwarmConfig(step=0.5, decay=0.5, min_step=0.1)
    assert [step_length(config, generation=g) for g in (1, 2, 3, 4)] == [0.5, 0.25, 0.125, 0.1]
    members = [candidate(f"c{i}") for i in range(6)]
    for generation, step in ((1, 0.5), (2, 0.25)):
        at = SwarmState(generation=generation, best="b", worst="w")
        plans = plan_moves(members, config=config, at=at, seed=0)
        assert {plan.step for plan in plans} == {step}


def test_a_move_is_the_velocity_formula() -> None:
    particle = ParticleState(best="p", best_fitness=Fitness(score=0.6), previous="q", step=0.4)
    config = SwarmConfig(inertia=0.2, own_best=0.3, global_best=0.4, global_worst=0.1)
    (plan,) = plan_moves([candidate("x", particle=particle)], config=config, at=AT, seed=5)
    r = stream(5, "move", "", 1, "x").random(4) * [0.2, 0.3, 0.4, 0.1]
    place = {name: stream(9, name).normal(size=3) for name in "xpqbw"}
    velocity = (place["x"] - place["q"]) / 0.4
    pull = (
        r[0] * velocity
        + r[1] * (place["p"] - place["x"])
        + r[2] * (place["b"] - place["x"])
        - r[3] * (place["w"] - place["x"])
    )
    expected = place["x"] + 0.5 * pull / r.sum()
    moved = sum(w * place[id] for id, w in zip(plan.parents, plan.weights, strict=True))
    assert np.allclose(moved, expected)
    assert sum(plan.weights) == pytest.approx(1.0)
    assert (plan.merge, plan.moved_from, plan.id, plan.operator) == (
        "move",
        "x",
        "g001-m00",
        "move",
    )


def test_coefficients_are_drawn_per_candidate_and_per_generation() -> None:
    members = [candidate("x"), candidate("y")]
    first = plan_moves(members, config=SwarmConfig(decay=1.0), at=AT, seed=0)
    again = plan_moves(members, config=SwarmConfig(decay=1.0), at=AT, seed=0)
    later = plan_moves(
        members,
        config=SwarmConfig(decay=1.0),
        at=SwarmState(generation=2, best="b", worst="w"),
        seed=0,
    )
    assert first == again
    assert len({plan.weights for plan in (*first, *later)}) == 4
    # A candidate's draw does not depend on who else moves.
    alone = plan_moves(members[1:], config=SwarmConfig(decay=1.0), at=AT, seed=0)
    assert alone[0].weights == first[1].weights


def test_moves_go_to_the_best_and_away_from_the_worst() -> None:
    (plan,) = plan_moves([candidate("x")], config=SwarmConfig(), at=AT, seed=0)
    weights = dict(zip(plan.parents, plan.weights, strict=True))
    assert weights["b"] > 0 > weights["w"]


def test_failed_and_lonely_candidates_stay() -> None:
    at = SwarmState(generation=1, best="x", worst="x")
    members = [candidate("f", score=None), candidate("x")]
    assert plan_moves(members, config=SwarmConfig(), at=at, seed=0) == ()


def test_the_own_best_is_remembered() -> None:
    (plan,) = plan_moves([candidate("x", 0.5)], config=SwarmConfig(), at=AT, seed=0)
    worse = next_particle_state(candidate("x", 0.5), plan, fitness=Fitness(score=0.4))
    assert (worse.best, worse.previous, worse.step) == ("x", "x", plan.step)
    better = next_particle_state(candidate("x", 0.5), plan, fitness=Fitness(score=0.6))
    assert better.best == plan.id
    failed = next_particle_state(candidate("x", 0.5, particle=worse), plan, fitness=FAILED)
    assert failed.best == "x"
    old = ParticleState(best="old", best_fitness=Fitness(score=0.9), previous="y", step=0.5)
    kept = next_particle_state(candidate("x", 0.5, particle=old), plan, fitness=Fitness(score=0.6))
    assert (kept.best, kept.best_fitness.score) == ("old", 0.9)


def test_operator_names() -> None:
    plan = ChildPlan(
        id="c",
        generation=1,
        merge="ties",
        parents=("a", "b"),
        weights=(0.5, 0.5),
        mutation="gaussian",
        sigma=0.1,
        seed_key=1,
    )
    assert plan.operator == "ties+gaussian"
