"""The benchmark of searches over programs: its simulation, its ranks, its bar."""

import importlib
import math
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark_module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("evolve_search")


def test_every_search_runs_on_every_landscape(benchmark_module: ModuleType) -> None:
    for name in benchmark_module.SEARCHES:
        for landscape in benchmark_module.LANDSCAPES:
            best = [
                benchmark_module.run_search(name, (landscape, "two ideas", num, 3, 1))
                for num in (1, 20)
            ]
            assert 0 <= best[0] <= best[1] <= 1
    again = benchmark_module.run_search("default", ("sphere", "climber", 40, 16, 2))
    assert again == benchmark_module.run_search("default", ("sphere", "climber", 40, 16, 2))


def test_every_landscape_has_its_best_score_at_its_optimum(benchmark_module: ModuleType) -> None:
    optima = {"Rosenbrock": 1.0, "deceptive": 2.5}
    for name, landscape in benchmark_module.LANDSCAPES.items():
        assert landscape((optima.get(name, 0.0),) * 6) == pytest.approx(0.0, abs=1e-12)
        assert math.isfinite(landscape((4.0, -4.0) * 3)) and landscape((4.0, -4.0) * 3) > 0


def test_equal_scores_share_their_ranks(benchmark_module: ModuleType) -> None:
    ranks = benchmark_module.rank_runs({"a": [0.5, 0.1], "b": [0.5, 0.3], "c": [0.2, 0.2]})
    assert ranks == {"a": [1.5, 3.0], "b": [1.5, 1.0], "c": [3.0, 2.0]}


@pytest.mark.parametrize(("theirs", "is_met"), [(0.50, True), (0.53, False)])
def test_a_search_that_is_behind_on_one_landscape_does_not_meet_the_bar(
    benchmark_module: ModuleType, capsys: pytest.CaptureFixture[str], theirs: float, is_met: bool
) -> None:
    jobs = [("sphere", "climber", 100, 1, seed) for seed in range(9)]
    jobs.append(("funnel", "climber", 100, 1, 0))
    scores = {"default": [0.6] * 9 + [0.5], "sequential": [0.3] * 9 + [theirs]}
    benchmark_module.show(jobs, scores)
    assert ("NOT MET" not in capsys.readouterr().out) == is_met
