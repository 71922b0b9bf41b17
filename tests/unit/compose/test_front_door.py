"""`import rookery`: the functions that run loops, in scripts and in notebooks."""

import asyncio
import json
import threading
from pathlib import Path

import pytest

import rookery
from rookery.compose.running import read_config, run_async
from rookery.errors import ConfigError, RunError
from rookery.loops.genome import GenomeConfig

CONFIG = """\
engine: {model: ../tiny}
init: {type: file, path: ../founders}
tasksets: [{type: jsonl, path: ../tasks.jsonl}]
stages: [{type: ga, generations: 1, population: {size: 2, children: {count: 2}}}]
finals: {num_finalists: 2, num_voters: 2, random_search: false}
"""
ICM = """\
engine: {model: tiny}
data: {path: items.jsonl, labels: [w90, w91]}
search: {iterations: 4}
num_chains: 1
"""


@pytest.fixture
def config(place: Path) -> Path:
    (place / "configs").mkdir()
    path = place / "configs/g.yaml"
    path.write_text(CONFIG.replace("../tiny", str(place / "tiny")))
    return path


def test_a_path_and_keywords_run_a_search(config: Path, capfd: pytest.CaptureFixture[str]) -> None:
    outcome = rookery.run_genome(str(config), seed=3, name="x", finals={"num_voters": 1})
    assert outcome.path == Path("runs/x").absolute() and outcome.report.seed == 3
    written = json.loads((outcome.path / "report.json").read_text())
    assert outcome.report.winner is not None
    assert written["rows"][0]["mean"] == outcome.report.winner.mean
    finals = json.loads((outcome.path / "config.json").read_text())["finals"]
    assert (finals["num_finalists"], finals["num_voters"]) == (2, 1)
    assert "ga   1" in capfd.readouterr().err
    again = rookery.resume(outcome.path, progress=False)
    assert again.report.rows == outcome.report.rows and capfd.readouterr().err == ""


def test_a_notebook_whose_loop_runs_already(config: Path) -> None:
    async def cell() -> float | None:
        outcome = rookery.run_genome(config, name="n", progress=False)
        assert outcome.report.winner is not None
        return outcome.report.winner.mean

    inside = asyncio.run(cell())
    outside = rookery.run_genome(config, name="s", progress=False)
    assert outside.report.winner is not None and inside == outside.report.winner.mean


def test_work_in_a_thread_hands_over_its_error_and_leaves_no_thread() -> None:
    async def fail() -> None:
        await asyncio.sleep(0)
        raise ConfigError("broken")

    async def cell() -> None:
        run_async(fail())

    with pytest.raises(ConfigError, match="broken"):
        asyncio.run(cell())
    assert not [t for t in threading.enumerate() if t.name == "rookery-run"]


def test_paths_of_a_file_are_its_own_and_those_of_keywords_are_where_the_caller_is(
    config: Path, place: Path
) -> None:
    (place / "here").mkdir()
    init = {"type": "file", "path": "here"}
    loaded = read_config(GenomeConfig, config, {"init": init})
    assert loaded.init.path == place / "here"  # type: ignore[union-attr]
    assert loaded.tasksets[0].path == (place / "tasks.jsonl").resolve()  # type: ignore[union-attr]
    document = {"init": init, "tasksets": [{"type": "jsonl", "path": "tasks.jsonl"}]}
    made = read_config(GenomeConfig, document, {"seed": 7})
    assert made.seed == 7 and made.init.path == place / "here"  # type: ignore[union-attr]


def test_bad_keywords_get_a_sentence(config: Path) -> None:
    with pytest.raises(ConfigError, match=r"seeed.*Did you mean"):
        rookery.run_genome(config, seeed=3)
    assert not Path("runs").exists()
    rookery.run_genome(config, name="x", progress=False)
    with pytest.raises(RunError, match="already holds a run"):
        rookery.run_genome(config, name="x", progress=False)


def test_models_are_measured_and_engines_opened(place: Path) -> None:
    outcome = rookery.evaluate("tiny", "tasks.jsonl", adapters=["a"], limit=8, progress=False)
    assert [row.name for row in outcome.report.models] == ["base", "a"]
    assert outcome.report.num_tasks == 8 and outcome.report.models[1].gain is not None

    async def ask() -> str:
        async with rookery.open_engine("tiny") as engine:
            prompt = rookery.SampleRequest(model=engine.base, prompt=(5, 6))
            [[completion]] = await engine.sample([prompt])
            return completion.model.version

    assert asyncio.run(ask()) == "tiny"


def test_names_that_are_not_there() -> None:
    with pytest.raises(AttributeError, match="run_genom"):
        rookery.run_genom  # noqa: B018
    assert {"run_genome", "open_engine", "Task"} <= set(dir(rookery))
