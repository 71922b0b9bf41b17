"""Emitters: they climb, are told exactly what they asked, and begin again when others lead."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rookery.search import population as ga
from rookery.search.candidate import ChildPlan, EsStep, Recipe
from rookery.search.children import ChildrenConfig
from rookery.search.emitters import (
    CmaesEmitter,
    CmaesOperatorConfig,
    Emitter,
    EmitterPlace,
    EsEmitter,
    EsOperatorConfig,
)
from rookery.search.fitness import FAILED, Fitness
from rookery.search.population import PopulationConfig
from rookery.seeding import stream

TARGET = np.array([0.8, 1.2, 0.3, 0.6])
AT = EmitterPlace(seed=3, island="", index=2)
Places = dict[str, np.ndarray]


def carry_out(plan: Recipe, places: Places) -> np.ndarray:
    """The toy's counterpart of making an adapter."""
    start = np.zeros(len(TARGET))
    if isinstance(plan, EsStep):
        noises = [stream(seed).standard_normal(len(TARGET)) for seed in plan.seeds]
        start = places[plan.parent]
        return start + sum(
            (a * n for a, n in zip(plan.amounts, noises, strict=True)), np.zeros(len(TARGET))
        )
    assert plan.mutation is None
    for parent, weight in zip(plan.parents, plan.weights, strict=True):
        start = start + weight * places[parent]
    return start


def measure(place: np.ndarray) -> Fitness:
    return Fitness(score=-float(np.sum((place - TARGET) ** 2)))


def founders() -> Places:
    return {f"f{i}": np.eye(len(TARGET))[i] for i in range(len(TARGET))}


def make_cmaes(**fields: Any) -> CmaesEmitter:
    return CmaesEmitter(
        CmaesOperatorConfig(**fields), count=6, at=AT, founders=list(founders()), mutation_sigma=0.1
    )


def make_es(**fields: Any) -> EsEmitter:
    emitter = EsEmitter(EsOperatorConfig(**fields), count=9, at=AT)
    emitter.begin("f0", scale=1.0)
    return emitter


def climb(emitter: Emitter, *, generations: int) -> list[float]:
    """The best score of each generation; every best of all is the emitter's own."""
    places, scores = founders(), []
    for generation in range(1, generations + 1):
        plans = emitter.ask(generation=generation)
        assert plans == emitter.ask(generation=generation), "the same until they are told"
        for plan in plans:
            places[plan.id] = carry_out(plan, places)
        fitness = {plan.id: measure(places[plan.id]) for plan in plans}
        emitter.tell(fitness, best=plans[0].id)
        scores.append(max(f.score for f in fitness.values() if f.score is not None))
    return scores


@pytest.mark.parametrize("make", [make_es, make_cmaes])
def test_each_alone_climbs(make: Callable[[], Emitter]) -> None:
    scores = climb(make(), generations=30)
    assert scores[-1] > -0.05 > scores[0]


@pytest.mark.parametrize("make", [make_es, make_cmaes])
def test_told_the_same_it_asks_the_same(make: Callable[[], Emitter]) -> None:
    first, second = make(), make()
    assert climb(first, generations=4) == climb(second, generations=4)
    assert first.ask(generation=5) == second.ask(generation=5)
    assert first.state == second.state


@pytest.mark.parametrize("make", [make_es, make_cmaes])
def test_it_is_told_what_it_asked(make: Callable[[], Emitter]) -> None:
    emitter = make()
    plans = emitter.ask(generation=1)
    told = {plan.id: FAILED for plan in plans}
    with pytest.raises(ValueError, match=plans[1].id):
        emitter.tell({id: told[id] for id in told if id != plans[1].id}, best=None)
    with pytest.raises(ValueError, match="'stranger'"):
        emitter.tell({**told, "stranger": FAILED}, best=None)
    emitter.tell(told, best=None)
    assert {plan.id for plan in emitter.ask(generation=2)}.isdisjoint(told)


def test_an_es_asks_for_its_centre_and_mirrored_pairs() -> None:
    emitter = make_es(sigma=0.2)
    centre, *trials = emitter.ask(generation=1)
    assert isinstance(centre, EsStep) and (centre.parent, centre.is_chained) == ("f0", False)
    assert [plan.id for plan in (centre, *trials[:2])] == [
        "g001-o2-centre", "g001-o2-p00-pos", "g001-o2-p00-neg",
    ]  # fmt: skip
    for forth, back in zip(trials[::2], trials[1::2], strict=True):
        assert isinstance(forth, EsStep) and isinstance(back, EsStep)
        assert forth.seeds == back.seeds and forth.amounts == (0.2,) == (-back.amounts[0],)
        assert forth.parent == centre.id
    emitter.tell({plan.id: Fitness(score=0.0) for plan in (centre, *trials)}, best=centre.id)
    following = emitter.ask(generation=2)[0]
    assert isinstance(following, EsStep) and following.is_chained
    assert following.parent == centre.id and following.amounts == (0.0,) * 4
    assert emitter.references == {centre.id}


def test_an_es_begins_again_when_others_lead() -> None:
    emitter = make_es(patience=2)
    for generation, leads in enumerate([True, False, False], start=1):
        plans = emitter.ask(generation=generation)
        assert plans and not emitter.needs_start
        told = {plan.id: Fitness(score=0.0) for plan in plans}
        emitter.tell(told, best=plans[1].id if leads else "other")
    assert emitter.needs_start and emitter.references == frozenset()
    assert emitter.ask(generation=4) == ()
    emitter.tell({}, best="other")
    emitter.begin("other", scale=0.5)
    centre, trial, *_ = emitter.ask(generation=5)
    assert isinstance(centre, EsStep) and (centre.parent, centre.seeds) == ("other", ())
    assert isinstance(trial, EsStep) and trial.amounts == (0.05,)


def test_shares_become_numbers_of_children() -> None:
    config = ChildrenConfig.model_validate(
        {"count": 16, "operators": [
            {"type": "crossover", "share": 2}, {"type": "es", "share": 1},
            {"type": "cmaes", "share": 1},
        ]}
    )  # fmt: skip
    assert config.emitted == {1: 3, 2: 4}
    assert config.num_drawn == 9
    assert ChildrenConfig().emitted == {} and ChildrenConfig().num_drawn == 16


@pytest.mark.parametrize(
    ("children", "message"),
    [
        ({"count": 8, "operators": [{"type": "crossover", "share": 7}, {"type": "es"}]},
         "which is 1 of 8 children, and needs at least 3"),
        ({"count": 3, "operators": [{"type": "cmaes"}]}, "needs at least 4"),
        ({"operators": [{"type": "cmaes", "low": 2.0}]}, "low must be below high"),
    ],
)  # fmt: skip
def test_operators_that_do_not_fit_are_refused(children: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChildrenConfig.model_validate(children)


def test_emitters_and_pareto_are_refused_together() -> None:
    with pytest.raises(ValueError, match="climb the weighted score"):
        PopulationConfig.model_validate(
            {"objective": "pareto", "children": {"operators": [{"type": "cmaes"}]}}
        )


def evolve(config: PopulationConfig, emitters: list[Emitter], *, generations: int) -> float:
    """The best score; an emitter that needs a start begins from the best so far."""
    places = founders()
    first = {id: measure(place) for id, place in places.items()}
    population = ga.found(first, config=config, seed=1)
    for generation in range(1, generations + 1):
        assert population.best is not None
        for emitter in emitters:
            if isinstance(emitter, EsEmitter) and emitter.needs_start:
                emitter.begin(population.best.id, scale=1.0)
        emitted = [emitter.ask(generation=generation) for emitter in emitters]
        every = [plan for plans in emitted for plan in plans]
        plans = [*ga.ask(population, config=config, seed=1), *every]
        assert len({plan.id for plan in plans}) == len(plans) == config.children.count
        for plan in plans:
            places[plan.id] = carry_out(plan, places)
        fitness = {plan.id: measure(places[plan.id]) for plan in plans}
        population = ga.tell(population, fitness, config=config, seed=1, emitted=every)
        assert population.best is not None
        for emitter, own in zip(emitters, emitted, strict=True):
            emitter.tell({p.id: fitness[p.id] for p in own}, best=population.best.id)
    assert population.best is not None and population.best.fitness.score is not None
    assert population.num_evaluated == len(founders()) + generations * config.children.count
    return population.best.fitness.score


def test_beside_crossovers_they_reach_what_crossovers_alone_do_not() -> None:
    crossover = {"type": "crossover", "name": "sum", "weights": "random"}
    plain = PopulationConfig.model_validate(
        {"size": 8, "children": {"count": 20, "operators": [crossover, crossover]}}
    )
    mixed = PopulationConfig.model_validate(
        {"size": 8, "children": {"count": 20, "operators": [
            crossover, crossover, {"type": "es", "share": 2}, {"type": "cmaes", "share": 1},
        ]}}
    )  # fmt: skip
    assert mixed.children.emitted == {2: 7, 3: 4}
    es = EsEmitter(EsOperatorConfig(), count=7, at=AT)
    cmaes = CmaesEmitter(
        CmaesOperatorConfig(), count=4, at=EmitterPlace(seed=3, island="", index=3),
        founders=list(founders()), mutation_sigma=0.1,
    )  # fmt: skip
    # Convex crossovers cannot leave the hull of the founders, where the target is not.
    alone = evolve(plain, [], generations=12)
    assert evolve(mixed, [es, cmaes], generations=12) > 0.2 * alone


def test_children_of_cmaes_are_weighted_sums_of_the_founders() -> None:
    for plan in make_cmaes().ask(generation=7):
        assert isinstance(plan, ChildPlan) and plan.operator == "cmaes"
        assert plan.parents == tuple(founders()) and plan.generation == 7
        assert all(0 <= weight <= 1.5 for weight in plan.weights)
