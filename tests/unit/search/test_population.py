"""The generation as a pure plan: determinism, elites, survivors, resume, a toy it improves."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rookery.errors import ConfigError
from rookery.search.candidate import FAILED, Candidate, ChildPlan, Fitness
from rookery.search.children import (
    Birth,
    ChildrenConfig,
    CrossoverConfig,
    MutationConfig,
    RouletteConfig,
    SelectionConfig,
    SigmaConfig,
    TournamentConfig,
    WeightRule,
    convex_weights,
    parent_weights,
    plan_children,
)
from rookery.search.population import (
    Mark,
    Population,
    PopulationConfig,
    SurvivalConfig,
    ask,
    make_population,
    pair_plans,
    random_plans,
    survivors,
    tell,
)
from rookery.seeding import stream

Places = dict[str, np.ndarray]
TARGET = np.array([0.8, 1.4, 0.6, -0.5])
FOUNDERS = {f"a{i}": np.eye(4)[i] * 0.5 for i in range(4)}
OPERATORS = (CrossoverConfig(share=3.0, weights="free"), MutationConfig())
SMALL = PopulationConfig(size=8, children=ChildrenConfig(count=8, operators=OPERATORS))
members = st.dictionaries(
    st.sampled_from([f"m{i}" for i in range(8)]),
    st.just(FAILED)
    | st.builds(
        Fitness,
        score=st.sampled_from([-2.0, 0.0, 0.0, 0.4]),
        objectives=st.tuples(*[st.sampled_from([0.0, 1.0])] * 2),
        violation=st.sampled_from([0.0, 0.0, 0.3]),
    ),
    min_size=1,
)


def carry_out(plan: ChildPlan, places: Places) -> np.ndarray:
    parts = [w * places[id] for id, w in zip(plan.parents, plan.weights, strict=True)]
    place: np.ndarray = np.sum(parts, axis=0)
    if plan.mutation is not None:
        place = place + plan.sigma * stream(plan.seed_key).normal(size=4)
    return place


def measure(place: np.ndarray) -> Fitness:
    return Fitness(score=-float(np.sum((place - TARGET) ** 2)))


def best_of(population: Population) -> Mark:
    assert population.best is not None
    return population.best


def evolve(
    population: Population,
    places: Places,
    *,
    until: int,
    config: PopulationConfig = SMALL,
    seed: int = 0,
) -> Population:
    while population.generation < until:
        plans = ask(population, config=config, seed=seed)
        places |= {plan.id: carry_out(plan, places) for plan in plans}
        fitness = {plan.id: measure(places[plan.id]) for plan in plans}
        population = tell(population, fitness, config=config, seed=seed)
    return population


def founded(seed: int = 0, config: PopulationConfig = SMALL) -> tuple[Population, Places]:
    places = dict(FOUNDERS)
    fitness = {id: measure(place) for id, place in places.items()}
    return make_population(fitness, config=config, seed=seed), places


def test_a_toy_problem_improves() -> None:
    population, places = founded()
    start = best_of(population).fitness.score
    evolved = evolve(population, places, until=15)
    best = best_of(evolved)
    assert start is not None and best.fitness.score is not None
    assert best.fitness.score > start / 3
    assert best.fitness == measure(places[best.id])
    assert evolved.num_evaluated == 4 + 15 * 8


def test_going_on_from_any_generation_is_as_if_uninterrupted() -> None:
    population, places = founded()
    straight = evolve(population, dict(places), until=6)
    for stop in range(6):
        places_here = dict(places)
        part = evolve(population, places_here, until=stop)
        assert evolve(part, places_here, until=6) == straight


def test_other_seeds_and_generations_plan_otherwise() -> None:
    population, _ = founded()
    plans = ask(population, config=SMALL, seed=0)
    assert plans == ask(population, config=SMALL, seed=0)
    assert plans != ask(population, config=SMALL, seed=1)
    assert [p.id for p in plans] == [f"g001-c{i:02d}" for i in range(8)]
    assert len({plan.seed_key for plan in plans}) == len(plans)


@given(
    fitness=members,
    outcome=st.lists(st.sampled_from([FAILED, Fitness(score=0.1, objectives=(0.0, 2.0))])),
    weights=st.sampled_from(["fitness", "uniform", "random", "free"]),
)
def test_any_fitness_makes_a_next_generation(
    fitness: dict[str, Fitness],
    outcome: list[Fitness],
    weights: WeightRule,
) -> None:
    operators = (CrossoverConfig(weights=weights), MutationConfig())
    config = PopulationConfig(
        size=4,
        children=ChildrenConfig(count=3, selection=RouletteConfig(), operators=operators),
        survival=SurvivalConfig(num_elites=2),
    )
    population = make_population(fitness, config=config, seed=0)
    plans = ask(population, config=config, seed=0)
    told = {p.id: outcome[i] if i < len(outcome) else FAILED for i, p in enumerate(plans)}
    following = tell(population, told, config=config, seed=0)
    assert 1 <= len(following.members) <= 4
    assert following.num_evaluated == len(fitness) + len(plans)
    everyone = [*fitness.values(), *told.values()]
    feasible = [f.score for f in everyone if f.score is not None and f.violation == 0]
    assert (following.best is None) == all(f.is_failed for f in everyone)
    if feasible:
        assert best_of(following).fitness.score == max(feasible)
        assert following.members[0].fitness.score == max(feasible)
    if any(not f.is_failed for f in everyone):
        assert not any(member.fitness.is_failed for member in following.members)


def test_elites_are_kept_when_every_child_is_worse_or_failed() -> None:
    config = SMALL.model_copy(update={"survival": SurvivalConfig(num_elites=2, rule=None)})
    population, _ = founded(config=config)
    elite = {member.id for member in population.members[:2]}
    for generation in range(4):
        plans = ask(population, config=config, seed=0)
        bad = FAILED if generation % 2 else Fitness(score=-1e6)
        population = tell(population, {p.id: bad for p in plans}, config=config, seed=0)
        assert elite <= {member.id for member in population.members}
        assert best_of(population).generation == 0
        assert population.num_stale == generation + 1


def test_told_exactly_what_was_asked() -> None:
    population, _ = founded()
    with pytest.raises(ValueError, match="not asked for"):
        tell(population, {"g001-c00": FAILED, "x": FAILED}, config=SMALL, seed=0)
    with pytest.raises(ValueError, match="no founders"):
        make_population({}, config=SMALL, seed=0)


def living(*scores: float | None) -> tuple[list[Candidate], list[float | None]]:
    return [
        Candidate(id=f"m{i}", generation=0, fitness=Fitness(score=s), sigma=0.1 * (i + 1))
        for i, s in enumerate(scores)
    ], list(scores)


def children(
    scores: Sequence[float | None],
    *operators: CrossoverConfig | MutationConfig,
    count: int = 400,
    **fields: Any,
) -> tuple[ChildPlan, ...]:
    config = ChildrenConfig(count=count, operators=operators, **fields)
    return plan_children(*living(*scores), config=config, at=Birth(generation=1), seed=0)


def test_operators_are_mixed_by_share() -> None:
    plans = children(
        (0.1, 0.4, 0.5),
        CrossoverConfig(name="ties", share=2.0, weights="random"),
        CrossoverConfig(name="dare", share=1.0, weights="random"),
        MutationConfig(share=1.0, after_crossover=0.25),
    )
    merges = Counter(plan.merge for plan in plans)
    assert merges["ties"] / 400 == pytest.approx(0.5, abs=0.07)
    assert merges["dare"] / 400 == pytest.approx(0.25, abs=0.07)
    mutated = [plan.mutation for plan in plans if plan.merge is not None]
    assert mutated.count("gaussian") / len(mutated) == pytest.approx(0.25, abs=0.07)
    assert all(plan.mutation == "gaussian" for plan in plans if plan.merge is None)


def test_parents_are_different_alive_and_the_fittest_comes_first() -> None:
    plans = children((0.1, None, 0.4, 0.5), CrossoverConfig(num_parents=3), count=40)
    for plan in plans:
        assert set(plan.parents) == {"m0", "m2", "m3"}
        assert plan.parents[0] == "m3"
        assert plan.weights == pytest.approx((0.5, 0.4, 0.1))


def test_too_few_parents() -> None:
    assert children((0.1, None), CrossoverConfig()) == ()
    plans = children((0.1, None), CrossoverConfig(share=100.0), MutationConfig(share=0.01))
    assert {plan.parents for plan in plans} == {("m0",)}


def test_siblings_repeat_only_when_there_is_nothing_else() -> None:
    fields = {"selection": TournamentConfig(size=1)}
    plans = children((0.1, 0.2, 0.3, 0.4), CrossoverConfig(weights="uniform"), count=5, **fields)
    assert len({frozenset(plan.parents) for plan in plans}) == 5
    assert len(children((0.1, 0.2), CrossoverConfig(weights="uniform"), count=3)) == 3


def test_sigma_is_inherited_and_adapts_within_limits() -> None:
    sigma = SigmaConfig(factor=2.0, low=0.06, high=0.3)
    plans = children((0.1, 0.2), MutationConfig(), sigma=sigma)
    assert {plan.sigma for plan in plans if plan.parents == ("m0",)} == {0.06, 0.1, 0.2}
    assert {plan.sigma for plan in plans if plan.parents == ("m1",)} == {0.1, 0.2, 0.3}
    merged = children((0.1, 0.9), CrossoverConfig(weights="fitness"), count=5)
    assert {plan.sigma for plan in merged} == {0.2}


def test_parent_weights() -> None:
    def weights(
        rule: WeightRule, shares: tuple[float, ...] = (0.3, 0.1), reach: float = 0.5
    ) -> tuple[float, ...]:
        return parent_weights(rule, shares=shares, reach=reach, rng=stream(1))

    assert weights("fitness") == pytest.approx((0.75, 0.25))
    assert weights("fitness", shares=(0.0, 0.0)) == (0.5, 0.5)
    assert weights("fitness", shares=(1.0, 0.0)) == pytest.approx((1 / 1.05, 0.05 / 1.05))
    assert weights("uniform", shares=(1.0, 2.0, 5.0)) == (1 / 3,) * 3
    assert all(0 <= w <= 1.5 for w in weights("free"))
    assert weights("free")[0] + weights("free")[1] != pytest.approx(1.0)


@given(count=st.integers(1, 6), seed=st.integers(0, 100))
def test_convex_weights_are_on_the_simplex(count: int, seed: int) -> None:
    weights = convex_weights(count, rng=stream(seed))
    assert len(weights) == count
    assert min(weights) >= 0
    assert sum(weights) == pytest.approx(1.0)


def test_founders_are_paired_before_pairs_repeat() -> None:
    plans = pair_plans(["a", "b", "c"], count=5, seed=1)
    assert len({plan.parents for plan in plans[:3]}) == 3
    assert plans[3].parents == plans[0].parents
    assert plans[3].weights != plans[0].weights
    assert plans == pair_plans(["a", "b", "c"], count=5, seed=1)
    assert {plan.merge for plan in plans} == {"linear"}
    with pytest.raises(ConfigError, match="two different"):
        pair_plans(["a"], count=1, seed=0)


@pytest.mark.parametrize("num", [2, 5, 20])
def test_random_search_tries_the_average_then_shares_of_some_founders(num: int) -> None:
    """Totals lie between a mean and a plain sum: with twenty founders no sum explodes."""
    plans = random_plans([f"f{i}" for i in range(num)], count=500, seed=0)
    average, *drawn = [np.array(plan.weights) for plan in plans]
    assert average == pytest.approx(np.full(num, 1 / num))
    assert min(weights.min() for weights in drawn) >= 0
    counts = np.array([np.count_nonzero(weights) for weights in drawn])
    totals = np.array([weights.sum() for weights in drawn])
    assert set(counts) == set(range(2, num + 1))
    assert (totals >= 1 - 1e-9).all() and (totals <= counts + 1e-9).all()
    assert np.median(totals) == pytest.approx(np.median(counts) ** 0.5, rel=0.25)
    assert np.mean(drawn, axis=0) == pytest.approx(np.mean(drawn), rel=0.35)


def test_a_single_founder_is_tried_in_other_strengths() -> None:
    strengths = [plan.weights[0] for plan in random_plans(["a"], count=50, seed=0)]
    assert 0 <= min(strengths) < 0.3 and 1.2 < max(strengths) <= 1.5


@pytest.mark.parametrize(
    "build",
    [
        lambda: PopulationConfig(size=2, survival=SurvivalConfig(num_elites=3)),
        lambda: ChildrenConfig(operators=()),
        lambda: ChildrenConfig(operators=(MutationConfig(share=0.0),)),
        lambda: SigmaConfig(start=2.0),
        lambda: SurvivalConfig(num_elites=0),
        lambda: PopulationConfig.model_validate({"objective": "pareto"}),
        lambda: PopulationConfig.model_validate({"swarm": {"step": 0.5}}),
    ],
)
def test_wrong_configs_are_refused(build: Callable[[], object]) -> None:
    with pytest.raises(ValidationError):
        build()


@given(
    scores=st.lists(st.none() | st.sampled_from([-1.0, 0.0, 0.3, 0.3, 2.0]), min_size=1),
    size=st.integers(1, 12),
    num_elites=st.integers(1, 3),
    rule=st.sampled_from([None, TournamentConfig(), RouletteConfig()]),
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


def test_configs_of_runs_from_before_are_read() -> None:
    old = {"size": 4, "objective": "score", "swarm": None}
    assert PopulationConfig.model_validate(old) == PopulationConfig(size=4)
