"""What the surrogate stage learns from, and what it expects sums to be worth."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loops.evolution import Genome, Inputs
from marks import long
from tiny import tiny_adapter

from rookery.loops.genome import GenomeConfig
from rookery.loops.genome.stages.surrogate import MISSED
from rookery.search.merit import Merit, merits_at
from rookery.search.surrogate import Surrogate, propose
from rookery.tasks.taskset import load_taskset
from rookery.weights import write_adapter

ONE = {"type": "surrogate", "generations": 1, "population": 2}


class Seen:
    """What the surrogates of a run were fitted to, and by what sums are worth."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.points: list[Any] = []
        self.certainties: list[Any] = []
        self.worths: list[Callable[..., Any]] = []
        seen = self

        class Noted(Surrogate):
            def __init__(self, points: Any, certainties: Any, **options: Any) -> None:
                seen.points.append(points)
                seen.certainties.append(certainties)
                super().__init__(points, certainties, **options)

        def noted(*args: Any, worth: Any, **options: Any) -> Any:
            self.worths.append(worth)
            return propose(*args, worth=worth, **options)

        stage = "rookery.loops.genome.stages.surrogate"
        monkeypatch.setattr(f"{stage}.Surrogate", Noted)
        monkeypatch.setattr(f"{stage}.propose", noted)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    return Seen(monkeypatch)


@pytest.fixture
def judged(inputs: Inputs, tmp_path: Path) -> Callable[[str], dict[str, Any]]:
    """The first taskset, whose rewards are this expression of the sum of an answer's tokens."""

    def make(reward: str) -> dict[str, Any]:
        scorer = tmp_path / "scorer.py"
        scorer.write_text(
            "def reward(task, completion):\n"
            f"    total = sum(completion.tokens)\n    return float({reward})\n"
        )
        return {
            "type": "jsonl", "path": str(inputs.tasks / "first.jsonl"), "name": "first",
            "scorer": {"type": "python", "function": f"{scorer}:reward"},
            "sampling": {"max_tokens": 2},
        }  # fmt: skip

    return make


async def test_it_learns_from_founders_and_all_sums(genome: Genome, seen: Seen) -> None:
    found = await genome(
        stages=[
            {"type": "random", "count": 4},
            {**ONE, "population": 3, "unit": "model"},
            {"type": "cmaes", "generations": 1, "population": 2},
            {**ONE, "generations": 2},
        ]
    )
    candidates = found.lineage["candidates"]
    num_founders = len(found.founders)
    blocks = {len(one["weights"]) for one in candidates if one["merge"] == "by_block"}
    shapes = [points.shape for points in seen.points]
    assert [num for num, _ in shapes] == [num_founders + num for num in (4, 9, 11)]
    assert [size for _, size in shapes] == [num_founders, *blocks, *blocks]


async def test_it_leaves_alone_what_a_founder_does_not_adapt(
    genome: Genome, tmp_path: Path
) -> None:
    """Two founders of different blocks: of four coefficients two change something, and a box of
    three values each holds nine sums."""
    for name, layers in (("f0", range(2, 3)), ("f1", range(3, 4))):
        adapter = tiny_adapter(name, seed=layers.start, layers=layers)
        write_adapter(adapter, tmp_path / "founders" / name)
    stage = {**ONE, "population": 20, "low": 0.0, "high": 2e-4}
    init = {"type": "file", "path": str(tmp_path / "founders")}
    found = await genome(init=init, stages=[stage])
    num_sums = len(found.lineage["candidates"])
    assert 2 < num_sums <= 9
    assert found.report.num_candidates == 2 + num_sums, "no two have the same weights"


async def test_it_learns_from_founders_that_the_search_does_not_start_from(
    genome: Genome, inputs: Inputs
) -> None:
    init = {"type": "file", "path": str(inputs.founders), "use": "pairs", "num_pairs": 3}
    found = await genome(init=init, stages=[{**ONE, "population": 3}])
    assert [g.num_candidates for g in found.report.generations] == [7, 3]


async def test_it_tells_rewards_beyond_one_apart(
    genome: Genome, seen: Seen, judged: Callable[[str], dict[str, Any]]
) -> None:
    stages = [{"type": "random", "count": 4}, ONE]
    race = {"low": -10.0, "high": 10.0}
    await genome(tasksets=[judged("total % 21 - 10")], stages=stages, race=race)
    [certainties] = seen.certainties
    assert certainties.min() >= 0 and certainties.max() <= 1
    assert len({round(float(value), 6) for value in certainties.ravel()}) > 10


async def test_it_prefers_what_it_expects_to_keep_a_floor(
    genome: Genome, inputs: Inputs, seen: Seen
) -> None:
    for floors in ({}, {"first": 0.9}):
        await genome(f"floors-{len(floors)}", stages=[ONE], floors=floors)
    config = GenomeConfig.model_validate(inputs.document())
    first, second = (len(load_taskset(own).split("search")) for own in config.tasksets)
    keeps = np.full(first + second, 0.6)
    misses = np.repeat([0.49, 0.99], [first, second])
    plain, floored = (worth(np.stack([keeps, misses])) for worth in seen.worths)
    assert plain[0] < plain[1]
    assert floored[0] == plain[0] and floored[1] < plain.min() - 1


@pytest.mark.parametrize("merit", ["certainty", pytest.param("log_certainty", marks=long)])
async def test_it_knows_from_where_on_one_of_four_choices_is_the_likeliest(
    genome: Genome, tmp_path: Path, seen: Seen, merit: Merit
) -> None:
    """What it expects of a candidate that was measured is what that one earned."""
    rows = [
        {"prompt": f"w{4 + i} w{5 + i * 7 % 80}", "choices": [f"w{90 + c}" for c in range(4)],
         "reference": f"w{90 + i % 4}"}
        for i in range(80)
    ]  # fmt: skip
    path = tmp_path / "four.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = {"type": "jsonl", "path": str(path), "scorer": {"type": "choice"}}
    found = await genome(
        tasksets=[tasks], stages=[ONE], floors={"four": 1.0}, race={"enabled": False}, merit=merit
    )
    [certainties], [worth] = seen.certainties, seen.worths
    by_merit = {
        round(candidate["merit"], 6): candidate["score"]
        for id, candidate in found.candidates.items()
        if id.startswith("f")
    }
    values = worth(certainties)
    assert len(values) == len(by_merit) == 4
    for measured, value in zip(certainties, values, strict=True):
        limits = np.full(len(measured), 0.5)
        num_choices = [4] * len(measured)
        merits = merits_at(measured, merit=merit, num_choices=num_choices, limits=limits)
        mean = float(merits.mean())
        expected = 1.0 - (mean - value) / MISSED
        assert expected == pytest.approx(by_merit[round(mean, 6)], abs=0.1)


async def test_it_takes_rewards_of_choices_as_the_scorer_gives_them(
    genome: Genome, inputs: Inputs, seen: Seen, judged: Callable[[str], dict[str, Any]]
) -> None:
    """The tasks have choices, and are judged by a function: a floor is one of its rewards."""
    tasks = judged("total % 11")
    await genome(
        tasksets=[tasks], stages=[ONE], floors={"first": 2.0}, race={"low": 0.0, "high": 10.0}
    )
    [config] = GenomeConfig.model_validate(inputs.document(tasksets=[tasks])).tasksets
    size = len(load_taskset(config).split("search"))
    [worth] = seen.worths
    keeps, misses = worth(np.stack([np.full(size, 0.9), np.full(size, 0.1)]))
    assert keeps > 2.0, "its rewards, and nothing for a floor that it keeps"
    assert misses < 0.0
