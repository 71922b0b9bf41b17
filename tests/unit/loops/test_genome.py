"""The genome loop end to end on a tiny model: every start, operator and stage; resume; honesty."""

import asyncio
import importlib
import shutil
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fleet.stub import Stub, serve
from loops.evolution import SEARCHED, Evolved, Genome, Inputs, clockless
from marks import long
from peft import PeftModel
from tiny import LINEARS
from transformers import AutoModelForCausalLM

from rookery.compose.genome import plan_rollouts
from rookery.errors import AdapterError, ConfigError, RunError
from rookery.fleet import FleetConfig, open_fleet
from rookery.loops.genome import GenomeConfig, rebuild, search_evaluator
from rookery.loops.genome.founders import (
    FileInit,
    RandomInit,
    ZeroInit,
    make_founders,
    read_founders,
)
from rookery.loops.genome.stages import EsStage
from rookery.loops.genome.stages.context import measure_sums
from rookery.loops.genome.stages.ga import RandomStage, run_random
from rookery.reports import GenerationRecord, parse_genome_report
from rookery.runs import Run
from rookery.search.candidate import Fitness
from rookery.tasks.taskset import load_taskset
from rookery.testing import FakeObserver
from rookery.types import Adapter
from rookery.weights import read_adapter
from rookery.weights.merge import merge

GA = {"type": "ga", "generations": 1, "population": {"size": 4, "children": {"count": 4}}}


def check_rebuilt(found: Evolved) -> None:
    """Every candidate can be made again from the founders, and bit-equal ones count once."""
    lineage = found.lineage
    for entry in lineage["candidates"]:
        assert rebuild(lineage, found.founders, entry["id"]).version == entry["version"]


def num_distinct(found: Evolved) -> int:
    """Candidates of the search that differ: two that are bit-equal are one."""
    return len({candidate["version"] for candidate in found.candidates.values()})


def test_a_run_ends_with_a_report_a_winner_and_a_lineage(
    evolved: Evolved, tiny_folder: Path
) -> None:
    result = evolved.report
    assert [row.name for row in result.rows] == [
        "evolved", "best founder", "uniform average", "plain sum", "random search",
        "base model", "vote of founders", "vote of finalists",
    ]  # fmt: skip
    first, best = result.rows[:2]
    assert best.gain is None
    for interval in (first, first.gain):
        assert interval is not None and interval.low is not None
        assert interval.mean is not None and interval.high is not None
        assert interval.low <= interval.mean <= interval.high
    assert result.winner == first and set(first.by_source) == {"first", "second"}
    assert len(result.lineage) == 4 + 2 * 4 and len(result.generations) == 3
    assert result.num_candidates == num_distinct(evolved) and result.num_tokens > 0
    winner = read_adapter(evolved.path / "winner")
    with Run.view(evolved.path) as run:
        assert parse_genome_report(run.read_json("report.json")) == result
        chosen = run.last("winner")
    assert chosen is not None and chosen.payload["version"] == winner.version
    model = AutoModelForCausalLM.from_pretrained(tiny_folder)
    PeftModel.from_pretrained(model, evolved.path / "winner")
    check_rebuilt(evolved)
    with pytest.raises(AdapterError, match="this lineage began with"):
        rebuild(evolved.lineage, evolved.founders[1:], result.lineage[-1].id)


async def test_another_seed_is_another_search(genome: Genome, evolved: Evolved) -> None:
    other = await genome(seed=2)
    assert len(other.report.lineage) == len(evolved.report.lineage)
    assert [n.score for n in other.report.lineage] != [n.score for n in evolved.report.lineage]


async def test_a_cancelled_run_is_closed_when_its_threads_have_written(
    genome: Genome, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the winner."""
    begun, may_end, ended = threading.Event(), threading.Event(), threading.Event()
    write = Run.write_folder

    def write_late(*args: Any) -> Any:
        begun.set()
        assert may_end.wait(30)
        written = write(*args)
        ended.set()
        return written

    monkeypatch.setattr(Run, "write_folder", write_late)
    task = asyncio.ensure_future(genome())
    assert await asyncio.to_thread(begun.wait, 30)
    task.cancel()
    asyncio.get_running_loop().call_later(0.05, may_end.set)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set(), "nothing is written into a closed run"


async def test_a_run_whose_children_come_out_otherwise_is_refused_before_it_asks(
    genome: Genome, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_rollouts = len((await genome()).events("rollout"))

    def merge_elsewhere(*args: Any, **options: Any) -> Adapter:
        """As a float kernel that rounds otherwise."""
        made = merge(*args, **options)
        factors = {
            name: replace(lora, b=torch.nextafter(lora.b, torch.full_like(lora.b, 9)))
            for name, lora in made.factors.items()
        }
        return replace(made, factors=factors)

    monkeypatch.setattr("rookery.loops.genome.adapter_builder.merge", merge_elsewhere)
    with pytest.raises(RunError, match=r"version of candidate g\d+-.* depend on the CPU"):
        await genome()
    monkeypatch.undo()
    assert len((await genome()).events("rollout")) == num_rollouts, "nothing was asked"


async def test_weights_and_intervals_are_computed_beside_the_event_loop(
    genome: Genome, inputs: Inputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: dict[str, set[int]] = {}

    def watch(path: str) -> None:
        module, _, name = path.rpartition(".")
        work = getattr(importlib.import_module(module), name)

        def watched(*args: Any, **options: Any) -> Any:
            threads.setdefault(name, set()).add(threading.get_ident())
            return work(*args, **options)

        monkeypatch.setattr(path, watched)

    for place in (
        "genome.adapter_builder.merge", "genome.adapter_builder.unrounded",
        "genome.final_report.merge", "comparison.bootstrap_mean", "genome.stages.context.spread",
        "genome.loop.check_tasks",
    ):  # fmt: skip
        watch(f"rookery.loops.{place}")
    stages = [
        {"type": "random", "count": 2},
        {"type": "cmaes", "generations": 1, "population": 2},
        {"type": "es", "steps": 1, "num_pairs": 1},
    ]
    splits = {"search": 0.6, "select": 0.0, "report": 0.4}  # nothing is made for a select split
    tasks = {"type": "jsonl", "path": str(inputs.tasks / "first.jsonl"), "splits": splits}
    await genome(stages=stages, tasksets=[tasks], finals=SEARCHED)
    assert set(threads) == {"check_tasks", "merge", "unrounded", "bootstrap_mean", "spread"}
    assert threading.get_ident() not in set().union(*threads.values())


@pytest.mark.parametrize(
    "init",
    [
        {"type": "zero", "count": 3, "rank": 2, "layers": 2},
        {"type": "random", "count": 3, "rank": 2, "targets": ["down_proj"], "size": 0.05},
    ],
)
def test_fresh_founders_are_distinct(inputs: Inputs, init: dict[str, Any]) -> None:
    config = GenomeConfig.model_validate(inputs.document(init=init))
    assert isinstance(config.init, ZeroInit | RandomInit)
    layers = {f"model.layers.{i}.{name}": size for i in range(4) for name, size in LINEARS.items()}
    made = make_founders(config.init, layers=layers, base="tiny", seed=0)
    assert len({founder.version for founder in made.values()}) == 3
    zero = [all(not lora.b.any() for lora in f.factors.values()) for f in made.values()]
    assert all(zero) == (init["type"] == "zero")


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
async def test_every_crossover_runs_in_both_spaces(genome: Genome, space: str) -> None:
    operators = [{"type": "crossover", "name": name, "weights": "random"} for name in MERGES]
    children = {"count": 14, "operators": operators}
    stage = {"type": "ga", "generations": 1, "population": {"size": 4, "children": children}}
    merges = {name: {**method, "space": space} for name, method in MERGES.items()}
    found = await genome(stages=[stage], merges=merges)
    children_found = [n for n in found.report.lineage if n.generation == 1]
    assert {child.operator for child in children_found} == set(MERGES)
    assert all(child.score is not None for child in children_found)


async def test_every_stage_follows_another_and_its_candidates_can_be_rebuilt(
    genome: Genome,
) -> None:
    """A genetic search counts its own from 1, and its first parents are of the stage before."""
    ga = {"type": "ga", "generations": 2, "population": {"size": 2, "children": {"count": 2}}}
    stages = [
        {"type": "random", "count": 3},
        ga,
        {"type": "es", "steps": 1, "num_pairs": 1},
        {"type": "cmaes", "generations": 1, "population": 3, "unit": "block"},
        {"type": "surrogate", "generations": 2, "population": 2},
        {"type": "es", "steps": 2, "population": 6, "rank": 1, "tasks_per_step": 4},
    ]
    # The sums of a search are plain, whatever the config calls sum.
    found = await genome(stages=stages, merges={"sum": {"type": "ties"}})
    report = found.report
    check_rebuilt(found)
    assert not any(generation.num_failed for generation in report.generations)
    assert report.num_candidates == num_distinct(found) + 2 * 6, "members leave no adapters"
    generations = [(g.stage, g.num_candidates) for g in report.generations]
    assert generations[:4] == [("founders", 4), ("random", 3), ("ga", 2), ("ga", 2)]
    assert list(dict(generations)) == ["founders", "random", "ga", "es", "cmaes", "surrogate"]
    nodes = {node.id: node.generation for node in report.lineage}
    assert len(nodes) == len(report.lineage)
    assert list(nodes.values())[:11] == [0] * 4 + [1] * 3 + [2] * 2 + [3] * 2
    assert all(len(node.weights) == len(node.parents) for node in report.lineage)
    for node in report.lineage[:11]:
        assert all(nodes[parent] < node.generation for parent in node.parents)


async def test_members_have_the_same_bits_in_any_batch(
    genome: Genome, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = {"type": "es", "steps": 2, "population": 10, "rank": 1, "tasks_per_step": 5}
    reports, answers = [], []
    for name, cohort in (("together", 64), ("apart", 3)):
        monkeypatch.setattr(search_evaluator, "COHORT", cohort)
        found = await genome(name, stages=[stage])
        reports.append(clockless(found.report))
        answers.append(sorted((e.key, str(e.payload)) for e in found.events("rollout")))
    assert reports[0] == reports[1] and answers[0] == answers[1]
    steps = [g for g in reports[0].generations if g.stage == "es"]
    assert [g.num_candidates for g in steps] == [11, 11, 1]
    assert {len(g.scores) for g in steps[:2]} == {11} and not steps[0].num_dropped


CMAES = {"type": "cmaes", "generations": 1, "population": 4}


async def test_cmaes_starts_from_the_best_sum_before_it(genome: Genome) -> None:
    first = {**CMAES, "unit": "block"}
    narrow = {**first, "sigma": 1e-6}
    found = await genome(stages=[first, narrow], merit="log_certainty", race={"enabled": False})
    merits = {id: candidate["merit"] for id, candidate in found.candidates.items()}
    drawn, searched = found.lineage["candidates"][:4], found.lineage["candidates"][4:]
    assert len(searched) == 4 and len({tuple(one["weights"]) for one in drawn}) == 4
    best = max(drawn, key=lambda one: merits[one["id"]])
    for one in searched:
        assert one["weights"] == pytest.approx(best["weights"], abs=1e-4)


async def test_the_bar_knows_how_many_answers_there_can_be(genome: Genome, inputs: Inputs) -> None:
    """Without races: founders, pairs of them and as many points as CMA-ES asks for."""
    changes = {
        "init": {"type": "file", "path": str(inputs.founders), "use": "both"},
        "stages": [{"type": "cmaes", "generations": 1, "unit": "block"}],
        "race": {"enabled": False},
        "floors": {"first": "founder"},
        "finals": {"random_search": False, "num_finalists": 1, "num_voters": 1},
    }
    report = (await genome(**changes)).report
    config = GenomeConfig.model_validate(inputs.document(**changes))
    assert isinstance(config.init, FileInit)
    founders = list(read_founders(config.init).values())
    tasksets = [load_taskset(taskset) for taskset in config.tasksets]
    [stage] = config.stages
    assert stage.num_candidates(founders) == report.generations[1].num_candidates
    most = plan_rollouts(config, founders, tasksets).total
    num_report = sum(len(taskset.split("report")) for taskset in tasksets)
    assert most - 2 * num_report <= report.num_rollouts <= most


async def test_a_candidate_that_fails_is_recorded_and_loses(genome: Genome) -> None:
    """A mutation of absurd strength makes weights that are not finite."""
    children = {"count": 3, "operators": [{"type": "mutation", "name": "wild"}]}
    stage = {"type": "ga", "generations": 1, "population": {"size": 4, "children": children}}
    found = await genome(stages=[stage], mutations={"wild": {"type": "gaussian", "sigma": 1e38}})
    failed = [candidate for candidate in found.candidates.values() if candidate["error"]]
    assert failed and all(f["score"] is None and "NaN" in f["error"] for f in failed)
    assert f"{len(failed)} candidates failed and lost" in " ".join(found.report.warnings)
    assert found.report.winner_id.startswith("f")


async def test_too_few_tasks_for_a_step_are_refused(genome: Genome) -> None:
    stage = {"type": "es", "population": 4, "rank": 1, "tasks_per_step": 1}
    with pytest.raises(ConfigError, match="2 tasksets have search tasks"):
        await genome(stages=[stage])


@pytest.mark.parametrize("size", ["6", 6.0])
def test_a_population_is_twice_the_pairs_however_it_is_written(size: object) -> None:
    assert EsStage.model_validate({"population": size}).num_pairs == 3
    assert EsStage.model_validate({"population": size, "num_pairs": "3"}).num_pairs == 3
    with pytest.raises(ValueError, match="population is 6 and num_pairs is 4"):
        EsStage.model_validate({"population": size, "num_pairs": 4})


async def test_members_that_fail_are_in_the_report(genome: Genome) -> None:
    stage = {"type": "es", "steps": 1, "population": 2, "rank": 1, "sigma": 1e38}
    said = " ".join((await genome(stages=[stage])).report.warnings)
    assert "2 of 2 members of populations failed and lost. The first error: " in said


def of_stage(kind: str, **values: Any) -> dict[str, Any]:
    return {"stages": [{"type": kind, **values}]}


def of_operator(**operator: Any) -> dict[str, Any]:
    return of_stage("ga", population={"children": {"operators": [operator]}})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (of_operator(type="crossover", name="tiess"), "'tiess' is not known"),
        (of_operator(type="cmaes"), "crossover"),
        (of_stage("ga", population={"objective": "pareto"}), "write floors"),
        (of_stage("ga", population={"swarm": {}}), "swarm is no key any more"),
        (of_stage("ga", islands={"num_islands": 2}), "raise population.size"),
        (of_stage("ga", archive={"features": []}), "archive is no key any more"),
        (of_stage("surrogate", high=1e4), "less than or equal to 100"),
        (of_stage("cmaes", low=float("nan")), "finite number"),
        (of_stage("cmaes", sigma=float("inf")), "finite number"),
        (of_stage("es", population=7), "an even number, such as 8"),
        (of_stage("es", population=8, num_pairs=8), "write one of them"),
        (of_stage("es", tasks_per_step=8), "write rank: 1 besides"),
        ({"merges": {"arc": {"type": "slerp"}}}, "slerp"),
        ({"merges": {"cmaes": {"type": "ties"}}}, "a name of the search's own"),
        ({"floors": {"label-kind": float("nan")}}, "finite number"),
        ({"floors": {"label-kind": float("inf")}}, "finite number"),
        ({"tasksets": []}, "at least 1 item"),
        ({"populaton": 3}, "populaton"),
    ],
)
def test_bad_configs_are_refused(change: dict[str, Any], message: str) -> None:
    tasks = {"type": "generated", "generator": "label-kind"}
    document = {"init": {"type": "zero"}, "tasksets": [tasks], **change}
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

    async def has_room(_: int) -> bool:
        return True

    builder = SimpleNamespace(founders=("f0", "f1"), keep=lambda names: None)
    log = SimpleNamespace(generations=[])
    context: Any = SimpleNamespace(
        builder=builder,
        log=log,
        seed=0,
        index=0,
        prefix="",
        best=lambda: None,
        measure=measure,
        has_room=has_room,
    )
    assert len(await run_random(RandomStage(count=count), context)) == count
    points = [(0.5, 0.5)] * count
    await measure_sums(context, points, stage="cmaes", letter="m", unit="model")
    assert kept == [expected, expected]


async def test_each_row_of_the_report_has_what_finding_it_took(
    genome: Genome, inputs: Inputs
) -> None:
    """Founders are not charged for merges of pairs; a random search that has them among its
    candidates is charged for them."""
    init = {"type": "file", "path": str(inputs.founders), "use": "both", "num_pairs": 2}
    report = (await genome(init=init, stages=[GA], finals=SEARCHED)).report
    num_tasks = sum(taskset.num_search for taskset in report.tasksets)
    cost = {row.name: (row.num_candidates, row.num_rollouts) for row in report.rows}
    assert report.generations[0].num_rollouts == (4 + 2) * num_tasks
    assert cost["best founder"] == cost["vote of founders"] == (4, 4 * num_tasks)
    number = report.num_candidates
    assert cost["random search"][0] == cost["evolved"][0] == number
    assert cost["random search"][1] >= number * num_tasks
    again = await genome(init=init, stages=[GA], finals=SEARCHED)
    assert again.report.rows == report.rows, "seconds too"


async def test_one_server_and_three_of_which_one_dies_find_the_same_winner(genome: Genome) -> None:
    found = []
    for num in (1, 3):
        stubs = [Stub(latency_s=0.002 * i) for i in range(num)]

        def kill(record: GenerationRecord, stubs: list[Stub] = stubs) -> None:
            if record.generation == 0 and len(stubs) > 1:
                stubs[1].crash()

        async with serve(*stubs):
            config = FleetConfig(urls=tuple(stub.url for stub in stubs))
            async with open_fleet(config) as fleet:
                observer = FakeObserver(kill)
                found.append(await genome(f"on-{num}", fleet=fleet, observer=observer, stages=[GA]))
        assert all(stub.loads for stub in stubs), "every server had work"
    one, three = found
    assert clockless(one.report) == clockless(three.report) and one.lineage == three.lineage
    assert len({node.score for node in one.report.lineage}) > 1
