import math
from collections import Counter

import pytest

from rookery.search.programs.bandit import Arm, Bandit, BanditConfig
from rookery.seeding import stream

ARMS = (Arm(name="small", weight=3), Arm(name="large", weight=1))


def draws(bandit: Bandit, count: int = 400) -> Counter[str]:
    return Counter(bandit.draw(stream(0, "arm", attempt)) for attempt in range(count))


@pytest.mark.parametrize("policy", ["weights", "ucb"])
def test_draws_start_by_weight(policy: str) -> None:
    bandit = Bandit(BanditConfig.model_validate({"policy": policy}), arms=ARMS)
    assert bandit.shares() == pytest.approx({"small": 0.75, "large": 0.25})
    assert draws(bandit)["small"] == pytest.approx(300, abs=35)
    assert draws(bandit) == draws(bandit)


def play(
    bandit: Bandit,
    rates: dict[str, float],
    num_rounds: int,
    *,
    in_flight: int = 32,
    seed: int = 0,
) -> None:
    """Rounds of attempts that are all drawn before the first reward is told."""
    for number in range(num_rounds):
        arms = [bandit.draw(stream(1 + 2 * seed, number, place)) for place in range(in_flight)]
        for place, arm in enumerate(arms):
            rng = stream(2 + 2 * seed, number, place)
            cost = float(rng.integers(50, 150))
            bandit.tell(arm, gain=cost * rates[arm] if rng.random() < 0.5 else 0.0, cost=cost)


def test_ucb_finds_the_arm_with_more_improvement_per_cost() -> None:
    rates = {"small": 0.001, "large": 0.01}
    bandit = Bandit(BanditConfig(policy="ucb"), arms=ARMS)
    play(bandit, rates, 20)
    assert bandit.shares()["large"] > 0.75
    fixed = Bandit(BanditConfig(policy="weights"), arms=ARMS)
    play(fixed, rates, 20)
    assert fixed.shares()["large"] == 0.25


def test_a_costly_arm_with_equal_gains_is_drawn_less() -> None:
    bandit = Bandit(BanditConfig(policy="ucb"), arms=[Arm(name="a"), Arm(name="b")])
    for _ in range(50):
        bandit.tell("a", gain=1.0, cost=100)
        bandit.tell("b", gain=1.0, cost=1000)
    assert bandit.shares()["a"] > 0.8


def test_a_new_arm_is_tried_and_one_without_gains_is_never_lost() -> None:
    bandit = Bandit(BanditConfig(policy="ucb"), arms=[Arm(name="old"), Arm(name="dull")])
    for _ in range(100):
        bandit.tell("old", gain=1.0, cost=10)
        bandit.tell("dull", gain=0.0, cost=10)
    bandit.add(Arm(name="adapter"))
    shares = bandit.shares()
    assert shares["adapter"] > shares["old"] > shares["dull"] > 0.03
    assert math.fsum(shares.values()) == pytest.approx(1)


def test_rewards_are_checked_and_extremes_stay_finite() -> None:
    bandit = Bandit(BanditConfig(policy="ucb"), arms=ARMS)
    for gain, cost in ((-1.0, 1.0), (math.nan, 1.0), (1.0, math.inf), (1.0, -1.0)):
        with pytest.raises(ValueError, match="0 or above"):
            bandit.tell("small", gain=gain, cost=cost)
    with pytest.raises(ValueError, match="no arm 'medium'"):
        bandit.tell("medium", gain=0.0, cost=0.0)
    with pytest.raises(ValueError, match="already"):
        bandit.add(Arm(name="small"))
    bandit.tell("small", gain=math.inf, cost=1.0)
    bandit.tell("large", gain=0.0, cost=0.0)
    assert all(math.isfinite(share) for share in bandit.shares().values())
    assert Bandit(BanditConfig()).draw(stream(0)) == ""
    with pytest.raises(ValueError, match="weight above 0"):
        Bandit(BanditConfig(), arms=[Arm(name="off", weight=0)]).draw(stream(0))


@pytest.mark.parametrize(
    ("rate", "least", "most"), [(0.0, 0.03, 0.12), (0.001, 0.3, 0.7), (0.003, 0.8, 0.97)]
)
def test_an_arm_that_joins_is_judged_by_what_all_earn_from_then_on(
    rate: float, least: float, most: float
) -> None:
    """Before, the old arm earned a hundred times as much: gains shrink while a search goes on."""
    shares = []
    for seed in range(5):
        bandit = Bandit(BanditConfig(policy="ucb"), arms=[Arm(name="base")])
        play(bandit, {"base": 0.1}, 5, seed=seed)
        bandit.join(Arm(name="learned"))
        assert bandit.shares() == pytest.approx({"base": 0.5, "learned": 0.5})
        play(bandit, {"base": 0.001, "learned": rate}, 8, seed=seed)
        shares.append(bandit.shares()["learned"])
    assert least < sum(shares) / 5 < most, shares


def test_an_arm_that_retires_is_drawn_no_more() -> None:
    bandit = Bandit(BanditConfig(policy="ucb"), arms=ARMS)
    bandit.tell("small", gain=5.0, cost=1.0)
    bandit.join(Arm(name="learned"), retires=["small"])
    assert set(draws(bandit)) == {"large", "learned"}
    assert bandit.arms[0].gain == 5.0, "what it earned stays known"
