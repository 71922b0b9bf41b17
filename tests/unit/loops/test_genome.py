"""The genome loop end to end on a tiny model: every start, operator and stage; resume; honesty."""

import asyncio
import importlib
import json
import shutil
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fleet.stub import Stub, serve
from loops.evolution import Genome, Inputs, clockless
from marks import long
from peft import PeftModel
from tiny import tiny_adapter
from transformers import AutoModelForCausalLM

from rookery.compose.genome import plan_rollouts
from rookery.errors import AdapterError, RunError, TaskError
from rookery.fleet import FleetConfig, open_fleet
from rookery.loops.genome import (
    GenomeConfig,
    adapter_builder,
    rebuild,
    search_evaluator,
)
from rookery.loops.genome.founders import FileInit, read_founders
from rookery.loops.genome.stages.context import measure_sums
from rookery.loops.genome.stages.random import RandomStage, run_random
from rookery.loops.genome.stages.surrogate import MISSED
from rookery.reports import GenerationRecord, parse_genome_report
from rookery.runs import Run
from rookery.search.fitness import Fitness
from rookery.search.merit import Merit, merits_at
from rookery.search.surrogate import Surrogate, propose
from rookery.tasks.taskset import load_taskset
from rookery.testing import FakeObserver
from rookery.types import Adapter
from rookery.weights import read_adapter, write_adapter
from rookery.weights.merge import merge
from rookery.weights.mutate import unrounded


class Here:
    """The engine behind it, unchanged."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


class Elsewhere(Here):
    """The engine behind it, as if it computed on other hardware."""

    is_remote = True


def _run(root: Path, name: str) -> Run:
    return Run.create(root, kind="genome", config={}, name=name)


def _num_distinct(run: Run) -> int:
    """Candidates of the search that differ: two that are bit-equal are one."""
    return len({event.payload["version"] for event in run.events("candidate")})


async def test_a_run_ends_with_a_report_a_winner_and_a_lineage(
    genome: Genome, tmp_path: Path, tiny_folder: Path
) -> None:
    with _run(tmp_path, "a") as run:
        result = await genome(run)
        names = [row.name for row in result.rows]
        assert names == [
            "evolved", "best founder", "uniform average", "plain sum", "random search",
            "base model", "vote of founders", "vote of finalists",
        ]  # fmt: skip
        evolved, best = result.rows[:2]
        assert best.gain is None
        for found in (evolved, evolved.gain):
            assert found is not None and found.low is not None
            assert found.mean is not None and found.high is not None
            assert found.low <= found.mean <= found.high
        assert result.winner == evolved
        assert parse_genome_report(run.read_json("report.json")) == result
        assert set(evolved.by_source) == {"first", "second"}
        assert len(result.lineage) == 4 + 2 * 4
        assert result.num_candidates == _num_distinct(run)
        assert len(result.generations) == 3
        assert result.num_tokens > 0
        winner = read_adapter(run.path / "winner")
        chosen = run.last("winner")
        assert chosen is not None and chosen.payload["version"] == winner.version
        model = AutoModelForCausalLM.from_pretrained(tiny_folder)
        PeftModel.from_pretrained(model, run.path / "winner")
        lineage = json.loads((run.path / "lineage.json").read_text())
        founders = [read_adapter(f) for f in sorted((run.path / "founders").iterdir())]
        for entry in lineage["candidates"]:
            assert rebuild(lineage, founders, entry["id"]).version == entry["version"]
        with pytest.raises(AdapterError, match="this lineage began with"):
            rebuild(lineage, founders[1:], entry["id"])


async def test_the_same_seed_gives_the_same_winner_and_another_seed_another_search(
    genome: Genome, tmp_path: Path
) -> None:
    reports = []
    for name, seed, wrap in (("a", 1, Here), ("b", 1, Elsewhere), ("c", 2, Here)):
        with _run(tmp_path, name) as run:
            finals = {"random_search": False}
            found = await genome(run, seed=seed, wrap=wrap, race={"enabled": False}, finals=finals)
            reports.append(found)
    first, second, other = map(clockless, reports)
    assert first == second
    assert [n.score for n in first.lineage] != [n.score for n in other.lineage]


@pytest.mark.parametrize("name", ["append_many_blocking", "write_folder"])
async def test_a_cancelled_run_is_closed_when_its_threads_have_written(
    genome: Genome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The first answers, and the winner."""
    begun, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def write_late(*args: Any) -> Any:
        begun.set()
        assert may_end.wait(30)
        written = write(*args)
        ended.set()
        return written

    with _run(tmp_path, "a") as run:
        write = getattr(run, name)
        monkeypatch.setattr(run, name, write_late)
        task = asyncio.ensure_future(genome(run, finals={"random_search": False}))
        assert await asyncio.to_thread(begun.wait, 30)
        task.cancel()
        asyncio.get_running_loop().call_later(0.05, may_end.set)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended.is_set(), "nothing is written into a closed run"


async def test_a_run_whose_children_come_out_otherwise_is_refused_before_it_asks(
    genome: Genome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _run(tmp_path, "a") as run:
        await genome(run)
        num_rollouts = run.counts()["rollout"]

    def merge_elsewhere(*args: Any, **options: Any) -> Adapter:
        """As a float kernel that rounds otherwise."""
        made = merge(*args, **options)
        factors = {
            name: replace(lora, b=torch.nextafter(lora.b, torch.full_like(lora.b, 9)))
            for name, lora in made.factors.items()
        }
        return replace(made, factors=factors)

    monkeypatch.setattr("rookery.loops.genome.adapter_builder.merge", merge_elsewhere)
    with (
        Run.open(run.path) as run,
        pytest.raises(RunError, match=r"version of candidate g\d+-.* depend on the CPU"),
    ):
        await genome(run)
    with Run.view(run.path) as view:
        assert view.counts()["rollout"] == num_rollouts, "nothing was asked"


async def test_weights_and_intervals_are_computed_beside_the_event_loop(
    genome: Genome, inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: dict[str, set[int]] = {}

    def watch(path: str) -> None:
        module, _, name = path.rpartition(".")
        work = getattr(importlib.import_module(module), name)

        def watched(*args: Any, **options: Any) -> Any:
            threads.setdefault(name, set()).add(threading.get_ident())
            return work(*args, **options)

        monkeypatch.setattr(path, watched)

    loops = "rookery.loops"
    for place in ("adapter_builder.merge", "adapter_builder.unrounded", "final_report.merge"):
        watch(f"{loops}.genome.{place}")
    watch(f"{loops}.comparison.bootstrap_mean")
    watch(f"{loops}.genome.stages.context.spread")
    watch(f"{loops}.genome.loop.check_tasks")
    stages = [
        {"type": "random", "count": 2},
        {"type": "cmaes", "generations": 1, "population": 2},
        {"type": "es", "steps": 1, "num_pairs": 1},
    ]
    splits = {"search": 0.6, "select": 0.0, "report": 0.4}  # nothing is made for a select split
    tasks = {"type": "jsonl", "path": str(inputs.tasks / "first.jsonl"), "splits": splits}
    with _run(tmp_path, "a") as run:
        await genome(run, stages=stages, tasksets=[tasks])
    assert set(threads) == {"check_tasks", "merge", "unrounded", "bootstrap_mean", "spread"}
    assert threading.get_ident() not in set().union(*threads.values())


@pytest.mark.parametrize(
    "init",
    [
        {"type": "zero", "count": 3, "rank": 2, "layers": 2},
        {"type": "random", "count": 3, "rank": 2, "targets": ["down_proj"], "size": 0.05},
    ],
)
async def test_fresh_founders_are_distinct(
    genome: Genome, tmp_path: Path, init: dict[str, Any]
) -> None:
    with _run(tmp_path, "a") as run:
        result = await genome(run, init=init, finals={"random_search": False})
        founders = [read_adapter(f) for f in (run.path / "founders").iterdir()]
        assert len({f.version for f in founders}) == 3
        zero = [all(not lora.b.any() for lora in f.factors.values()) for f in founders]
        assert all(zero) == (init["type"] == "zero")
        assert len(result.lineage) == 3 + 8


def test_what_a_killed_writer_left_is_no_founder(founders_folder: Path, tmp_path: Path) -> None:
    """An adapter is built in a hidden folder beside its place, which a kill leaves behind."""
    place = shutil.copytree(founders_folder, tmp_path / "founders")
    shutil.copytree(place / "f0", place / ".f4.x1y2z3")
    assert list(read_founders(FileInit(path=place))) == ["f0", "f1", "f2", "f3"]


def test_founders_may_be_of_several_runs(founders_folder: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        shutil.copytree(founders_folder / "f0", tmp_path / name / "trained")
    trained = ["one.trained", "two.trained"]
    both = (tmp_path / "two" / "trained", tmp_path / "one" / "trained")
    assert list(read_founders(FileInit(path=both))) == trained
    assert list(read_founders(FileInit(path=tmp_path))) == trained, "runs of a sweep"
    with pytest.raises(AdapterError, match=r"two adapters called one\.trained"):
        read_founders(FileInit(path=(both[1], tmp_path)))


MERGES: dict[str, dict[str, Any]] = {
    "linear": {"type": "linear"},
    "sum": {"type": "linear", "normalise": False},
    "ties": {"type": "ties"},
    "dare": {"type": "dare"},
    "dare_ties": {"type": "dare_ties"},
    "layerwise": {"type": "layerwise"},
}


@pytest.mark.parametrize("space", ["delta", pytest.param("factor", marks=long)])
async def test_every_crossover_runs_in_both_spaces(
    genome: Genome, tmp_path: Path, space: str
) -> None:
    operators = [{"type": "crossover", "name": name, "weights": "random"} for name in MERGES]
    stage = {
        "type": "ga", "generations": 1,
        "population": {"size": 4, "children": {"count": 20, "operators": operators}},
    }  # fmt: skip
    with _run(tmp_path, "a") as run:
        result = await genome(
            run,
            stages=[stage],
            merges={name: {**method, "space": space} for name, method in MERGES.items()},
            finals={"random_search": False},
        )
    children = [n for n in result.lineage if n.generation == 1]
    assert {c.operator for c in children} == set(MERGES)
    assert all(c.score is not None for c in children)


@pytest.mark.parametrize(
    "stage",
    [
        {"type": "es", "steps": 2, "num_pairs": 2},
        pytest.param({"type": "cmaes", "generations": 2, "population": 4}, marks=long),
        {"type": "cmaes", "generations": 2, "population": 4, "unit": "block"},
        {"type": "random", "count": 4},
        {"type": "surrogate", "generations": 2, "population": 3},
        pytest.param(
            {"type": "surrogate", "generations": 2, "population": 3, "unit": "model"}, marks=long
        ),
        {"type": "ga", "generations": 3, "population": {"size": 4, "children": {"count": 3}}},
    ],
    ids=["es", "cmaes", "cmaes-block", "random", "surrogate", "surrogate-model", "ga"],
)  # fmt: skip
async def test_every_stage_runs_and_its_candidates_can_be_rebuilt(
    genome: Genome, tmp_path: Path, stage: dict[str, Any]
) -> None:
    with _run(tmp_path, "a") as run:
        result = await genome(
            run,
            stages=[stage],
            finals={"random_search": False},
        )
        lineage = json.loads((run.path / "lineage.json").read_text())
        founders = [read_adapter(f) for f in sorted((run.path / "founders").iterdir())]
        for entry in lineage["candidates"]:
            assert rebuild(lineage, founders, entry["id"]).version == entry["version"]
        assert result.num_candidates == _num_distinct(run)
    assert len(lineage["candidates"]) > 2
    for node in result.lineage:
        assert len(node.weights) == len(node.parents)


async def test_centres_are_made_once_in_generations_of_several_cohorts(
    genome: Genome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = {"type": "es", "steps": 8, "num_pairs": 1}
    num_updates = []

    def counted(*args: Any, seeds: Sequence[Any], amounts: Sequence[float]) -> Any:
        num_updates.append(len(seeds))
        return unrounded(*args, seeds=seeds, amounts=amounts)

    monkeypatch.setattr(search_evaluator, "COHORT", 2)
    monkeypatch.setattr(adapter_builder, "unrounded", counted)
    with _run(tmp_path, "a") as run:
        report = await genome(run, stages=[stage], finals={"random_search": False})
    num_steps = sum(node.operator == "es" for node in report.lineage)
    assert num_steps > 20
    assert len(num_updates) <= 1.5 * num_steps, "at the end the winner's chain is made once more"


async def test_stages_follow_one_another(genome: Genome, tmp_path: Path) -> None:
    """A genetic search counts its own from 1, and its first parents are of the stage before."""
    ga = {"type": "ga", "generations": 2, "population": {"size": 2, "children": {"count": 2}}}
    stages = [{"type": "random", "count": 3}, ga, {"type": "es", "steps": 1, "num_pairs": 1}]
    with _run(tmp_path, "a") as run:
        report = await genome(run, stages=stages, finals={"random_search": False})
    assert [g.stage for g in report.generations] == ["founders", "random", "ga", "ga", "es", "es"]
    nodes = {node.id: node.generation for node in report.lineage}
    assert len(nodes) == len(report.lineage)
    assert list(nodes.values())[:11] == [0] * 4 + [1] * 3 + [2] * 2 + [3] * 2
    assert [g.num_candidates for g in report.generations][:4] == [4, 3, 2, 2]
    for node in report.lineage[:11]:
        assert all(nodes[parent] < node.generation for parent in node.parents)


async def test_the_searchs_own_sums_are_plain_whatever_the_config_calls_sum(
    genome: Genome, tmp_path: Path
) -> None:
    with _run(tmp_path, "a") as run:
        report = await genome(
            run,
            stages=[
                {"type": "random", "count": 2},
                {"type": "cmaes", "generations": 1, "population": 2},
            ],
            merges={"sum": {"type": "ties"}},
        )
    assert [generation.num_failed for generation in report.generations] == [0, 0, 0]
    assert [n.operator for n in report.lineage[4:]] == ["random"] * 2 + ["cmaes"] * 2
    assert "random search" in {row.name for row in report.rows if row.mean is not None}


async def test_cmaes_by_block_goes_on_from_the_best_by_block(
    genome: Genome, tmp_path: Path
) -> None:
    blocks = {"type": "cmaes", "generations": 1, "population": 4, "unit": "block"}
    with _run(tmp_path, "a") as run:
        result = await genome(
            run,
            stages=[blocks, {**blocks, "sigma": 1e-6}],
            race={"enabled": False},
            finals={"random_search": False},
        )
        merits = {event.key: event.payload["merit"] for event in run.events("candidate")}
    first, second = result.lineage[4:8], result.lineage[8:]
    assert len(second) == 4 and len(set(merits.values())) > 1
    best = max(first, key=lambda node: merits[node.id])
    for node in second:
        assert node.weights == pytest.approx(best.weights, abs=1e-4)


async def test_the_bar_knows_how_many_answers_there_can_be(
    genome: Genome, inputs: Inputs, tmp_path: Path
) -> None:
    """Without races: founders, pairs of them and as many points as CMA-ES asks for."""
    changes = {
        "init": {"type": "file", "path": str(inputs.founders), "use": "both"},
        "stages": [{"type": "cmaes", "generations": 1, "unit": "block"}],
        "race": {"enabled": False},
        "floors": {"first": "founder"},
        "finals": {"random_search": False, "num_finalists": 1, "num_voters": 1},
    }
    with _run(tmp_path, "a") as run:
        report = await genome(run, **changes)
    config = GenomeConfig.model_validate(inputs.document(**changes))
    assert isinstance(config.init, FileInit)
    founders = list(read_founders(config.init).values())
    tasksets = [load_taskset(taskset) for taskset in config.tasksets]
    [stage] = config.stages
    assert stage.num_candidates(founders) == report.generations[1].num_candidates
    most = plan_rollouts(config, founders, tasksets).total
    num_report = sum(len(taskset.split("report")) for taskset in tasksets)
    assert most - 2 * num_report <= report.num_rollouts <= most


async def test_cmaes_starts_from_the_best_of_the_random_sums(
    genome: Genome, tmp_path: Path
) -> None:
    with _run(tmp_path, "a") as run:
        result = await genome(
            run,
            stages=[
                {"type": "random", "count": 4},
                {"type": "cmaes", "generations": 1, "population": 4, "sigma": 1e-6},
            ],
            merit="reward",
            race={"enabled": False},
            finals={"random_search": False},
        )
        lineage = json.loads((run.path / "lineage.json").read_text())["candidates"]
    scores = {node.id: node.score for node in result.lineage}
    drawn = [one for one in lineage if one["id"].startswith("r")]
    searched = [one for one in lineage if one["id"].startswith("s1-m")]
    assert len(drawn) == len(searched) == 4
    assert len({tuple(one["weights"]) for one in drawn}) == 4
    best = max(drawn, key=lambda one: scores[one["id"]] or 0.0)
    for one in searched:
        assert one["weights"] == pytest.approx(best["weights"], abs=1e-4)


async def test_a_surrogate_learns_from_founders_and_all_sums(
    genome: Genome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int]] = []

    class Spy(Surrogate):
        def __init__(self, points: Any, certainties: Any, **options: Any) -> None:
            seen.append(points.shape)
            super().__init__(points, certainties, **options)

    monkeypatch.setattr("rookery.loops.genome.stages.surrogate.Surrogate", Spy)
    with _run(tmp_path, "a") as run:
        await genome(
            run,
            stages=[
                {"type": "random", "count": 4},
                {"type": "surrogate", "generations": 1, "population": 3, "unit": "model"},
                {"type": "cmaes", "generations": 1, "population": 2},
                {"type": "surrogate", "generations": 2, "population": 2},
            ],
            finals={"random_search": False},
        )
        num_founders = len(list((run.path / "founders").iterdir()))
        lineage = json.loads((run.path / "lineage.json").read_text())["candidates"]
    blocks = {len(one["weights"]) for one in lineage if one["merge"] == "by_block"}
    assert [num for num, _ in seen] == [num_founders + num for num in (4, 9, 11)]
    assert [size for _, size in seen] == [num_founders, *blocks, *blocks]


async def test_a_surrogate_leaves_alone_what_a_founder_does_not_adapt(
    genome: Genome, tmp_path: Path
) -> None:
    """Two founders of different blocks: of four coefficients two change something, and a box of
    three values each holds nine sums."""
    for name, layers in (("f0", range(2, 3)), ("f1", range(3, 4))):
        adapter = tiny_adapter(name, seed=layers.start, layers=layers)
        write_adapter(adapter, tmp_path / "founders" / name)
    stage = {"type": "surrogate", "generations": 1, "population": 20, "low": 0.0, "high": 2e-4}
    with _run(tmp_path, "a") as run:
        found = await genome(
            run,
            init={"type": "file", "path": str(tmp_path / "founders")},
            stages=[stage],
            finals={"random_search": False},
        )
        lineage = json.loads((run.path / "lineage.json").read_text())["candidates"]
    assert 2 < len(lineage) <= 9
    assert found.num_candidates == 2 + len(lineage), "no two have the same weights"


async def test_a_surrogate_learns_from_founders_that_the_search_does_not_start_from(
    genome: Genome, inputs: Inputs, tmp_path: Path
) -> None:
    init = {"type": "file", "path": str(inputs.founders), "use": "pairs", "num_pairs": 3}
    stage = {"type": "surrogate", "generations": 1, "population": 3}
    with _run(tmp_path, "a") as run:
        found = await genome(run, init=init, stages=[stage], finals={"random_search": False})
    assert [g.num_candidates for g in found.generations] == [7, 3]


async def test_a_surrogate_tells_rewards_beyond_one_apart(
    genome: Genome, inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    class Spy(Surrogate):
        def __init__(self, points: Any, certainties: Any, **options: Any) -> None:
            seen.append(certainties)
            super().__init__(points, certainties, **options)

    monkeypatch.setattr("rookery.loops.genome.stages.surrogate.Surrogate", Spy)
    scorer = tmp_path / "scorer.py"
    scorer.write_text(
        "def reward(task, completion):\n    return float(sum(completion.tokens) % 21) - 10.0\n"
    )
    tasks = {
        "type": "jsonl", "path": str(inputs.tasks / "first.jsonl"), "name": "first",
        "scorer": {"type": "python", "function": f"{scorer}:reward"}, "sampling": {"max_tokens": 2},
    }  # fmt: skip
    with _run(tmp_path, "a") as run:
        await genome(
            run,
            tasksets=[tasks],
            stages=[
                {"type": "random", "count": 4},
                {"type": "surrogate", "generations": 1, "population": 2},
            ],
            race={"low": -10.0, "high": 10.0},
            finals={"random_search": False},
        )
    [certainties] = seen
    assert certainties.min() >= 0 and certainties.max() <= 1
    assert len({round(float(value), 6) for value in certainties.ravel()}) > 10


async def test_a_surrogate_prefers_what_it_expects_to_keep_a_floor(
    genome: Genome, inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def spy(*args: Any, worth: Any, **options: Any) -> Any:
        seen.append(worth)
        return propose(*args, worth=worth, **options)

    monkeypatch.setattr("rookery.loops.genome.stages.surrogate.propose", spy)
    stage = {"type": "surrogate", "generations": 1, "population": 2}
    for floors in ({}, {"first": 0.9}):
        with _run(tmp_path, f"floors-{len(floors)}") as run:
            await genome(run, stages=[stage], floors=floors, finals={"random_search": False})
    config = GenomeConfig.model_validate(inputs.document())
    first, second = (len(load_taskset(own).split("search")) for own in config.tasksets)
    keeps = np.full(first + second, 0.6)
    misses = np.repeat([0.49, 0.99], [first, second])
    plain, floored = (worth(np.stack([keeps, misses])) for worth in seen)
    assert plain[0] < plain[1]
    assert floored[0] == plain[0] and floored[1] < plain.min() - 1


@pytest.mark.parametrize("merit", ["certainty", pytest.param("log_certainty", marks=long)])
async def test_a_surrogate_knows_from_where_on_one_of_four_choices_is_the_likeliest(
    genome: Genome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, merit: Merit
) -> None:
    """What it expects of a candidate that was measured is what that one earned."""
    seen: list[tuple[Any, Any]] = []

    def spy(*args: Any, worth: Any, **options: Any) -> Any:
        values = worth(certainties[0])
        seen.extend(zip(certainties[0], values, strict=True))
        return propose(*args, worth=worth, **options)

    class Spy(Surrogate):
        def __init__(self, points: Any, given: Any, **options: Any) -> None:
            certainties.append(given)
            super().__init__(points, given, **options)

    certainties: list[Any] = []
    monkeypatch.setattr("rookery.loops.genome.stages.surrogate.propose", spy)
    monkeypatch.setattr("rookery.loops.genome.stages.surrogate.Surrogate", Spy)
    rows = [
        {"prompt": f"w{4 + i} w{5 + i * 7 % 80}", "choices": [f"w{90 + c}" for c in range(4)],
         "reference": f"w{90 + i % 4}"}
        for i in range(80)
    ]  # fmt: skip
    path = tmp_path / "four.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with _run(tmp_path, "a") as run:
        await genome(
            run,
            tasksets=[{"type": "jsonl", "path": str(path), "scorer": {"type": "choice"}}],
            stages=[{"type": "surrogate", "generations": 1, "population": 2}],
            floors={"four": 1.0}, race={"enabled": False}, merit=merit,
            finals={"random_search": False},
        )  # fmt: skip
        earned = {e.key: e.payload for e in run.events("candidate") if e.key.startswith("f")}
    by_merit = {round(own["merit"], 6): own["score"] for own in earned.values()}
    assert len(seen) == len(by_merit) == 4
    for own, value in seen:
        limits = np.full(len(own), 0.5)
        merits = merits_at(own, merit=merit, num_choices=[4] * len(own), limits=limits)
        mean = float(merits.mean())
        expected = 1.0 - (mean - value) / MISSED
        assert expected == pytest.approx(by_merit[round(mean, 6)], abs=0.1)


async def test_a_surrogate_takes_rewards_of_choices_as_the_scorer_gives_them(
    genome: Genome, inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tasks have choices, and are judged by a function: a floor is one of its rewards."""
    seen: list[Any] = []

    def spy(*args: Any, worth: Any, **options: Any) -> Any:
        seen.append(worth)
        return propose(*args, worth=worth, **options)

    monkeypatch.setattr("rookery.loops.genome.stages.surrogate.propose", spy)
    scorer = tmp_path / "scorer.py"
    scorer.write_text(
        "def reward(task, completion):\n    return float(sum(completion.tokens) % 11)\n"
    )
    tasks = {
        "type": "jsonl", "path": str(inputs.tasks / "first.jsonl"), "name": "first",
        "scorer": {"type": "python", "function": f"{scorer}:reward"}, "sampling": {"max_tokens": 2},
    }  # fmt: skip
    with _run(tmp_path, "a") as run:
        await genome(
            run,
            tasksets=[tasks],
            stages=[{"type": "surrogate", "generations": 1, "population": 2}],
            floors={"first": 2.0}, race={"low": 0.0, "high": 10.0},
            finals={"random_search": False},
        )  # fmt: skip
    size = len(load_taskset(GenomeConfig.model_validate(
        inputs.document(tasksets=[tasks])).tasksets[0]).split("search"))  # fmt: skip
    [worth] = seen
    keeps, misses = worth(np.stack([np.full(size, 0.9), np.full(size, 0.1)]))
    assert keeps > 2.0, "its rewards, and nothing for a floor that it keeps"
    assert misses < 0.0


async def test_a_candidate_that_fails_is_recorded_and_loses(genome: Genome, tmp_path: Path) -> None:
    """A mutation of absurd strength makes weights that are not finite."""
    stage = {
        "type": "ga", "generations": 1,
        "population": {"size": 4, "children": {
            "count": 3, "operators": [{"type": "mutation", "name": "wild"}],
        }},
    }  # fmt: skip
    with _run(tmp_path, "a") as run:
        result = await genome(
            run,
            stages=[stage],
            mutations={"wild": {"type": "gaussian", "sigma": 1e38}},
            finals={"random_search": False},
        )
        failed = [e.payload for e in run.events("candidate") if e.payload["error"]]
    assert failed and all(f["score"] is None and "NaN" in f["error"] for f in failed)
    assert f"{len(failed)} candidates failed and lost" in " ".join(result.warnings)
    assert result.winner_id.startswith("f")


async def test_when_every_candidate_fails_the_run_says_why(
    genome: Genome, tmp_path: Path, tasks_folder: Path
) -> None:
    scorer = {"type": "python", "function": f"{tasks_folder}/bad.py:reward"}
    path = str(tasks_folder / "first.jsonl")
    tasksets = [{"type": "jsonl", "path": path, "name": "first", "scorer": scorer}]
    (tasks_folder / "bad.py").write_text("def reward(task, completion):\n    return 'nine'\n")
    with _run(tmp_path, "a") as run, pytest.raises(TaskError, match="All 4 founders failed"):
        await genome(run, tasksets=tasksets)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stages": [{"type": "ga", "population": {"children": {
            "operators": [{"type": "crossover", "name": "tiess"}]}}}]}, "'tiess' is not known"),
        ({"stages": [{"type": "ga", "population": {"objective": "pareto"}}]}, "write floors"),
        ({"stages": [{"type": "ga", "population": {"swarm": {}}}]}, "swarm is no key any more"),
        ({"stages": [{"type": "ga", "islands": {"num_islands": 2}}]}, "raise population.size"),
        ({"stages": [{"type": "ga", "archive": {"features": []}}]}, "archive is no key any more"),
        ({"merges": {"arc": {"type": "slerp"}}}, "slerp"),
        ({"merges": {"cmaes": {"type": "ties"}}}, "a name of the search's own"),
        ({"stages": [{"type": "surrogate", "high": 1e4}]}, "less than or equal to 100"),
        ({"stages": [{"type": "cmaes", "low": float("nan")}]}, "finite number"),
        ({"stages": [{"type": "cmaes", "sigma": float("inf")}]}, "finite number"),
        ({"floors": {"label-kind": float("nan")}}, "finite number"),
        ({"floors": {"label-kind": float("inf")}}, "finite number"),
        ({"tasksets": []}, "at least 1 item"),
        ({"populaton": 3}, "populaton"),
        ({"stages": [{"type": "ga", "population": {"children": {"operators": [
            {"type": "cmaes"}]}}}]}, "crossover"),
    ],
)  # fmt: skip
def test_bad_configs_are_refused(change: dict[str, Any], message: str) -> None:
    document = {
        "init": {"type": "zero"},
        "tasksets": [{"type": "generated", "generator": "label-kind"}],
        **change,
    }
    with pytest.raises(ValueError, match=message):
        GenomeConfig.model_validate(document)


@pytest.mark.parametrize(("count", "expected"), [(1, 2), (10, 5), (50, 25), (1000, 64)])
async def test_a_race_of_many_sums_compares_each_with_a_bounded_number(
    count: int, expected: int
) -> None:
    kept = []

    async def measure(plans: Sequence[Any], *, keep: int, **_: Any) -> dict[str, Fitness]:
        kept.append(keep)
        return {plan.id: Fitness(score=0.5) for plan in plans}

    builder = SimpleNamespace(founders=("f0", "f1"), keep=lambda names: None)
    log = SimpleNamespace(generations=[])
    context: Any = SimpleNamespace(
        builder=builder, log=log, seed=0, index=0, prefix="", best=lambda: None, measure=measure
    )
    assert len(await run_random(RandomStage(count=count), context)) == count
    points = [(0.5, 0.5)] * count
    await measure_sums(context, points, stage="cmaes", letter="m", unit="model")
    assert kept == [expected, expected]


async def test_each_row_of_the_report_has_what_finding_it_took(
    genome: Genome, tmp_path: Path, inputs: Inputs
) -> None:
    """Founders are not charged for merges of pairs; a random search that has them among its
    candidates is charged for them."""
    init = {"type": "file", "path": str(inputs.founders), "use": "both", "num_pairs": 2}
    with _run(tmp_path, "x") as run:
        report = await genome(run, init=init)
        num_tasks = sum(taskset.num_search for taskset in report.tasksets)
        cost = {row.name: (row.num_candidates, row.num_rollouts) for row in report.rows}
        assert report.generations[0].num_rollouts == (4 + 2) * num_tasks
        assert cost["best founder"] == cost["vote of founders"] == (4, 4 * num_tasks)
        number = report.num_candidates
        assert cost["random search"][0] == cost["evolved"][0] == number
        assert cost["random search"][1] >= number * num_tasks
    with Run.open(tmp_path / "x") as run:
        assert (await genome(run, init=init)).rows == report.rows, "seconds too"


async def test_one_server_and_three_of_which_one_dies_find_the_same_winner(
    genome: Genome, tmp_path: Path
) -> None:
    reports, lineages = [], []
    for num in (1, 3):
        stubs = [Stub(latency_s=0.002 * i) for i in range(num)]

        def kill(record: GenerationRecord, stubs: list[Stub] = stubs) -> None:
            if record.generation == 1 and len(stubs) > 1:
                stubs[1].crash()

        async with serve(*stubs):
            config = FleetConfig(urls=tuple(stub.url for stub in stubs))
            async with open_fleet(config) as fleet:
                with _run(tmp_path, f"on-{num}") as run:
                    finals = {"random_search": False}
                    observer = FakeObserver(kill)
                    found = await genome(run, fleet=fleet, observer=observer, finals=finals)
                    lineages.append((run.path / "lineage.json").read_text())
        reports.append(clockless(found))
        assert all(stub.loads for stub in stubs), "every server had work"
    assert reports[0] == reports[1] and lineages[0] == lineages[1]
    assert len({node.score for node in reports[0].lineage}) > 1
