"""Racing with floors: who keeps a floor is not dropped by who does not."""

import pytest

from rookery.search.annealing import Waves
from rookery.search.fitness import fitness_of, rank_key
from rookery.search.racing import Race, RaceConfig, start, tell
from rookery.seeding import stream

Rewards = dict[str, dict[str, float]]

TASKS = [f"t{i}" for i in range(120)]
FLOORS = {"x": 0.5}
WEIGHTS = {"x": 1.0, "y": 2.0}
SOURCES = {task: "xy"[place % 2] for place, task in enumerate(TASKS)}


def run(race: Race, rewards: Rewards) -> Race:
    waves = Waves(race, size=1)
    while asks := waves.next():
        tell(race, {id: [rewards[id][t] for t in tasks] for id, tasks in asks.items()})
    return race


def constrained_key(rewards: dict[str, float]) -> tuple[int, float]:
    """The order of search, from all tasks."""
    rows = {s: [rewards[t] for t, source in SOURCES.items() if source == s] for s in WEIGHTS}
    means = {source: sum(row) / len(row) for source, row in rows.items()}
    return rank_key(fitness_of(means, weights=WEIGHTS, floors=FLOORS))


def sourced(accuracies: list[tuple[float, float]], *, seed: int) -> Rewards:
    rng = stream(seed, "sourced")
    return {
        f"c{index}": {
            task: float(rng.random() < by_source["xy".index(SOURCES[task])]) for task in SOURCES
        }
        for index, by_source in enumerate(accuracies)
    }


@pytest.mark.parametrize(("keep", "num_known"), [(1, 0), (3, 2)])
def test_with_floors_the_best_of_the_constrained_order_are_kept(keep: int, num_known: int) -> None:
    """The ones with the highest score miss the floor: they must not drop those who keep it."""
    accuracies = [(0.2, 0.95), (0.45, 0.9), (0.7, 0.6), (0.6, 0.5), (0.9, 0.2), (0.5, 0.5)]
    config = RaceConfig(confidence=0.9, block=10, keep=keep)
    wrong, members, used, num_races = 0, 0, 0, 20
    for seed in range(num_races):
        rewards = sourced(accuracies, seed=seed)
        known = {id: rewards[id] for id in list(rewards)[2 : 2 + num_known]}
        race = start(
            list(rewards), TASKS, config=config, rng=stream(seed, "race"),
            sources=SOURCES, weights=WEIGHTS, floors=FLOORS, known=known,
        )  # fmt: skip
        race = run(race, rewards)
        keys = {id: constrained_key(row) for id, row in rewards.items()}
        place = {id: sum(other > keys[id] for other in keys.values()) for id in keys}
        wrong += sum(id in race.dropped for id in keys if place[id] < keep)
        members += sum(place[id] < keep for id in keys)
        used += race.num_evaluations
    assert wrong / members <= 0.1
    assert used / num_races < 720 * (0.8 if keep == 1 else 0.95)


def test_the_confidence_holds_at_the_edge_of_a_floor() -> None:
    """A mean of exactly the floor against one just below it with a higher score."""
    tasks = list(SOURCES)
    x_tasks = [task for task in tasks if SOURCES[task] == "x"]
    on_floor = set(x_tasks[:30])
    rewards = {
        "keeps": {task: float(task in on_floor) for task in tasks},
        "misses": {task: float(SOURCES[task] == "y" or task in x_tasks[31:]) for task in tasks},
    }
    assert constrained_key(rewards["keeps"]) > constrained_key(rewards["misses"])
    config, num_races, wrong = RaceConfig(confidence=0.8, block=10), 40, 0
    for seed in range(num_races):
        race = start(
            list(rewards), tasks, config=config, rng=stream(seed), sources=SOURCES,
            weights=WEIGHTS, floors=FLOORS,
        )  # fmt: skip
        wrong += "keeps" in run(race, rewards).dropped
    assert wrong / num_races <= 0.2


def test_a_lower_violation_wins_among_those_who_miss_a_floor() -> None:
    rewards = {
        "worse": {task: float(source == "y") for task, source in SOURCES.items()},
        "better": {t: float(int(t[1:]) % 8 < 3 and s == "x") for t, s in SOURCES.items()},
    }
    race = start(
        list(rewards), list(SOURCES), config=RaceConfig(block=6), rng=stream(0), sources=SOURCES,
        weights=WEIGHTS, floors={"x": 0.9},
    )  # fmt: skip
    race = run(race, rewards)
    assert race.leader == "better"
    assert race.dropped["worse"].reason == "impossible"


def test_merits_decide_the_order_and_rewards_the_floors() -> None:
    """The sure candidate has the higher merit and misses the floor; rewards alone would let the
    unsure one drop."""
    rewards = {
        "sure": {task: float(SOURCES[task] == "y") for task in TASKS},
        "unsure": dict.fromkeys(TASKS, 1.0),
        "vague": dict.fromkeys(TASKS, 1.0),
    }
    merits = {
        "sure": dict.fromkeys(TASKS, 0.99),
        "unsure": dict.fromkeys(TASKS, 0.6),
        "vague": dict.fromkeys(TASKS, 0.1),
    }
    race = start(
        list(rewards), TASKS, config=RaceConfig(block=4), rng=stream(0, "race"),
        sources=SOURCES, weights=WEIGHTS, floors=FLOORS,
    )  # fmt: skip
    waves = Waves(race, size=1)
    while asks := waves.next():
        tell(
            race,
            {id: [rewards[id][t] for t in tasks] for id, tasks in asks.items()},
            merits={id: [merits[id][t] for t in tasks] for id, tasks in asks.items()},
        )
    assert race.leader == "unsure"
    assert set(race.dropped) == {"sure", "vague"}
    estimate, reward_estimate = race.estimates["vague"], race.reward_estimates["vague"]
    assert estimate is not None and estimate < 0.2
    assert reward_estimate == pytest.approx(1.0)
