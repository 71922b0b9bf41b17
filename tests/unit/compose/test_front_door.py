"""`import rookery`: the functions that run loops, in scripts and in notebooks."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import yaml

import rookery
from rookery.compose.inputs import RunInputs
from rookery.compose.running import RunPlan, finisher, new_run, read_config, run_async
from rookery.embedded import EngineConfig
from rookery.errors import AdapterError, ConfigError, ModelError, RunError
from rookery.fleet import FleetConfig
from rookery.loops.genome import GenomeConfig
from rookery.loops.genome.founders import RandomInit
from rookery.loops.icm import IcmConfig
from rookery.reports import GenomeReport
from rookery.runs import Run
from rookery.train import LoraTrainer
from rookery.train.sft import SftConfig
from rookery.types import OptimStep
from rookery.ui.display import Display

CONFIG = """\
engine: {model: ../tiny}
init: {type: file, path: ../founders}
tasksets: [{type: jsonl, path: ../tasks.jsonl}]
stages: [{type: ga, generations: 1, population: {size: 2, children: {count: 2}}}]
finals: {num_finalists: 2, num_voters: 2, random_search: false}
"""
ICM = """\
engine: {model: tiny}
data: {path: items.jsonl, prompt: "{{ a }}", labels: [w90, w91]}
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


def test_weights_are_read_while_the_engine_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that are refused end an engine that opens, and no run is made."""
    is_opening, is_closed = threading.Event(), threading.Event()

    @asynccontextmanager
    async def opened() -> AsyncIterator[Callable[[Run], Awaitable[GenomeReport]]]:
        is_opening.set()
        try:
            await asyncio.Event().wait()
            raise AssertionError("nothing was refused")
            yield
        finally:
            is_closed.set()

    def digest_models(folders: Mapping[str, Path]) -> dict[str, str]:
        assert is_opening.wait(60), "the engine waits for the weights"
        raise ModelError(f"{min(folders)} cannot be read")

    monkeypatch.setattr("rookery.compose.inputs.digest_models", digest_models)
    inputs = RunInputs(models={"the model": tmp_path})
    finish = finisher(lambda *_: RunPlan(inputs=inputs, opened=opened()))
    open_run = new_run(SftConfig(), kind="genome", name="x", runs_dir=tmp_path)
    with pytest.raises(ModelError, match="cannot be read"):
        finish(SftConfig(), open_run, Display(is_quiet=True))
    assert is_closed.is_set() and not (tmp_path / "x").exists()


def test_a_notebook_whose_loop_runs_already(place: Path) -> None:
    async def cell() -> float | None:
        return measure()

    def measure() -> float | None:
        outcome = rookery.evaluate("tiny", "tasks.jsonl", limit=8, progress=False)
        return outcome.report.models[0].mean

    assert asyncio.run(cell()) == measure() is not None


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


def test_a_section_of_another_type_replaces_the_one_there(config: Path) -> None:
    fleet = {"type": "fleet", "urls": ["http://127.0.0.1:9"]}
    values = {"engine": fleet, "init": {"type": "random", "count": 2}}
    loaded = read_config(GenomeConfig, config, values)
    assert loaded.engine == FleetConfig(urls=("http://127.0.0.1:9",))
    assert isinstance(loaded.init, RandomInit)
    document = {**yaml.safe_load(CONFIG), "engine": {"model": "m"}}
    assert read_config(GenomeConfig, document, {"engine": fleet}).engine == loaded.engine
    same = read_config(GenomeConfig, document, {"engine": {"type": "embedded", "max_rows": 3}})
    assert same.engine == EngineConfig(model="m", max_rows=3)


@pytest.mark.parametrize("where", ["configs", "."], ids=["of the file", "of the caller"])
def test_a_model_folder_is_found_from_anywhere(place: Path, where: str) -> None:
    (place / "configs").mkdir(exist_ok=True)
    model = "../tiny" if where == "configs" else "tiny"
    path = place / "configs/g.yaml"
    path.write_text(CONFIG.replace("../tiny", model) + f"tokenizer: {model}\n")
    loaded = read_config(GenomeConfig, path, {})
    assert loaded.engine == EngineConfig(model=str(place / "tiny"))
    assert loaded.tokenizer == str(place / "tiny")
    launch = {"type": "fleet", "launch": {"model": "tiny"}}
    fleet = read_config(GenomeConfig, path, {"engine": launch, "tokenizer": "Qwen/Qwen3-0.6B"})
    assert isinstance(fleet.engine, FleetConfig) and fleet.engine.launch is not None
    assert fleet.engine.launch.model == str(place / "tiny")
    assert fleet.tokenizer == "Qwen/Qwen3-0.6B"


def test_a_labelling_keeps_its_paths_as_they_were_meant(place: Path) -> None:
    (place / "configs").mkdir()
    path = place / "configs/i.yaml"
    path.write_text(
        ICM.replace("model: tiny", "model: ../tiny") + "iterate: {sft: {init_from: ../a}}\n"
    )
    loaded = read_config(IcmConfig, path, {})
    assert loaded.engine == EngineConfig(model=str(place / "tiny"))
    assert loaded.iterate is not None
    assert loaded.iterate.sft.init_from == (place / "a").resolve()


def test_values_are_laid_over_a_training_config(place: Path) -> None:
    adapter = rookery.run_sft(
        place / "tiny",
        place / "tasks.jsonl",
        "out/x",
        config=SftConfig(steps=1, rank=4, layers=1),
        rank=2,
        progress=False,
    )
    assert adapter.name == "x"
    assert (
        adapter.rank == 2 and len({name.split(".layers.")[1][0] for name in adapter.factors}) == 1
    )
    with pytest.raises(ConfigError, match=r"rnk is not a key\. Did you mean rank"):
        rookery.run_sft("tiny", "tasks.jsonl", "out/y", config=SftConfig(steps=1), rnk=2)


def test_a_budget_ends_a_training_and_says_so(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hours are counted up to now, and up to the last state of a process that was killed."""
    step, seconds = LoraTrainer.optim_step, [1_000_000.0]
    num_steps = 0

    async def slow(self: LoraTrainer, wanted: list[OptimStep]) -> object:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 3:
            raise KeyboardInterrupt
        seconds[0] += 1200
        return await step(self, wanted)

    def train(name: str, **budget: float) -> tuple[int, str]:
        settings = SftConfig(steps=9, rank=2, layers=1, batch_size=1, save_every=1)
        rookery.run_sft(
            "tiny", "tasks.jsonl", "out/x", config=settings, name=name, budget=budget,
            progress=False,
        )  # fmt: skip
        report = json.loads((place / "runs" / name / "report.json").read_text())
        return report["num_steps"], report.get("stop_reason", "")

    monkeypatch.setattr(LoraTrainer, "optim_step", slow)
    monkeypatch.setattr("time.time", lambda: seconds[0])
    with pytest.raises(KeyboardInterrupt):
        train("late", max_hours=1.2)
    assert rookery.resume(place / "runs/late", progress=False).report.num_steps == 4
    report = json.loads((place / "runs/late/report.json").read_text())
    assert report["stop_reason"] == "The budget of 1.2 hours is over."
    said = "The budget of 5 answer tokens has no room for more."
    assert train("cut", max_answer_tokens=5) == (2, said), "a word and the end of the answer each"
    assert train("whole", max_answer_tokens=18) == (9, "")


def test_arguments_that_cannot_be_get_a_sentence(place: Path) -> None:
    with pytest.raises(ConfigError, match="split is \"train\"; it should be 'all', 'search'"):
        rookery.run_sft("tiny", "tasks.jsonl", "out/x", split="train")
    for out in (".", "..", "/"):
        with pytest.raises(AdapterError, match="has no name for an adapter"):
            rookery.run_sft("tiny", "tasks.jsonl", out)
    with pytest.raises(ConfigError, match="adapters is 'a'; it should be a list of folders"):
        rookery.evaluate("tiny", "tasks.jsonl", adapters="a")
    assert not (place / "runs").exists()


def test_bad_keywords_get_a_sentence(config: Path) -> None:
    with pytest.raises(ConfigError, match=r"seeed.*Did you mean"):
        rookery.run_genome(config, seeed=3)
    assert not Path("runs").exists()
    rookery.evaluate("tiny", "tasks.jsonl", limit=1, name="x", progress=False)
    with pytest.raises(RunError, match="already holds a run"):
        rookery.run_genome(config, name="x", progress=False)


def test_models_are_measured_and_engines_opened(place: Path) -> None:
    outcome = rookery.evaluate(
        Path("tiny"), Path("tasks.jsonl"), adapters=["a"], limit=8, progress=False
    )
    assert [row.name for row in outcome.report.models] == ["base", "a"]
    assert outcome.report.model == str(place / "tiny")
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
