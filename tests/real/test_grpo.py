"""A tiny model learns two-digit addition from a reward alone. Three minutes on an idle core.

ROOKERY_LONG=1 pytest tests/real/test_grpo.py
"""

from pathlib import Path

import pytest
from addition_training import gaps, select_gain, train_addition
from marks import long

pytestmark = [pytest.mark.timeout(900), long]


@pytest.mark.parametrize(("seed", "staleness"), [(0, 0), (1, 0), (2, 0), (0, 1)])
def test_a_policy_learns_from_the_reward(addition: Path, seed: int, staleness: int) -> None:
    report = train_addition(addition, f"rank-8-{seed}-{staleness}", seed=seed, staleness=staleness)
    assert select_gain(report) >= 0.15
    assert report.trained is not None and report.trained.gain is not None
    assert report.trained.gain.low is not None and report.trained.gain.low > 0
    assert max(gaps(report)) < 1e-4


def test_shuffled_advantages_teach_nothing(addition: Path) -> None:
    report = train_addition(addition, "shuffled", seed=0, advantages="shuffled")
    assert select_gain(report) <= 0
