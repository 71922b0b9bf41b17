"""`run_evolve` from Python: a run, its keys, what may change when it goes on, what it leaves."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from fleet.stub import Stub, serve
from marks import long
from scripted import Scripted, serve_scripted

import rookery
from rookery.compat.openevolve import read_config, with_keys
from rookery.compose import evolve
from rookery.compose.engine_models import read_engine
from rookery.compose.evolve import describe
from rookery.compose.evolve_inputs import run_config
from rookery.compose.proposers import open_config_embedder, open_models
from rookery.compose.running import resumable
from rookery.errors import (
    ConfigError,
    EngineDownError,
    ExecutorError,
    FleetError,
    FleetSettingsError,
    RookeryError,
    RunError,
)
from rookery.fleet.http.external import ExternalEmbedder, ExternalTextModel
from rookery.loops.evolve.config import EvolveConfig
from rookery.loops.evolve.parts import Iteration
from rookery.loops.evolve.problem import evaluation_spec, read_first_program
from rookery.runs import Run
from rookery.ui.display import Display

PROGRAM = "# EVOLVE-BLOCK-START\ndef solve():\n    return 0.25\n# EVOLVE-BLOCK-END\n"
EVALUATOR = """import runpy

def evaluate(path):
    return {"combined_score": runpy.run_path(path)["solve"]()}
"""
UNSAFE = {"sandbox": {"backend": "none"}, "workers": 1, "in_flight": 4}


@pytest.fixture(scope="module")
def model() -> Iterator[Scripted]:
    with serve_scripted("--latency", 0) as scripted:
        yield scripted


@pytest.fixture
def problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("OPENAI_API_KEY", "OPENAI_API_BASE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "evaluator.py").write_text(EVALUATOR)
    return tmp_path


def document(model: Scripted) -> dict[str, object]:
    return {"llm": {"api_base": model.url, "primary_model": "scripted"}, "rookery": UNSAFE}


def test_a_run_leaves_the_best_program_a_report_and_a_page(problem: Path, model: Scripted) -> None:
    config = document(model) | {"no_such_key": 1}
    outcome = rookery.run_evolve("program.py", "evaluator.py", config, max_iterations=6)
    assert outcome.path == problem / "openevolve_output"
    assert outcome.report.num_iterations == 6
    assert outcome.report.best is not None and (outcome.report.best.score or 0) > 0.25
    assert "no_such_key is not a key and changes nothing" in outcome.report.warnings
    assert any(warning.startswith("unsafe") for warning in outcome.report.warnings)
    written = json.loads((outcome.path / "report.json").read_text())
    assert written["warnings"] == list(outcome.report.warnings)
    assert "unsafe" in (outcome.path / "report.html").read_text()
    logged = (outcome.path / "logs" / "evolve.log").read_text().splitlines()
    assert sum("score" in line for line in logged) == 6, "a line per iteration"
    again = rookery.resume(outcome.path)
    assert again.report.best == outcome.report.best


def test_the_names_of_openevolve_work(problem: Path, model: Scripted) -> None:
    outcome = rookery.run_evolution(
        initial_program="program.py",
        evaluator="evaluator.py",
        config=document(model),
        iterations=5,
        output_dir="theirs",
        target_score=2.0,
    )
    assert outcome.path == problem / "theirs" and outcome.report.num_iterations == 5
    checkpoint = problem / "theirs" / "checkpoints" / "checkpoint_5"
    more = rookery.run_evolution(
        "program.py", "evaluator.py", document(model), 2,
        output_dir="more", checkpoint_path=str(checkpoint),
    )  # fmt: skip
    assert more.report.num_programs > 3
    with pytest.raises(ConfigError, match="no option 'island_selector'"):
        rookery.run_evolution("program.py", "evaluator.py", island_selector=len)
    with pytest.raises(ConfigError, match="program is given as code: write it to a file"):
        rookery.run_evolution("def f():\n    return 1\n", "evaluator.py")
    with pytest.raises(ConfigError, match="evaluator is given as function"):
        rookery.run_evolution("program.py", lambda path: {"score": 1.0})  # type: ignore[arg-type]


def test_keys_are_not_written_and_are_read_again(problem: Path, model: Scripted) -> None:
    config = document(model)
    config["llm"] = {"api_base": model.url, "models": [{"name": "scripted", "api_key": "hush"}]}
    (problem / "config.yaml").write_text(json.dumps(config))
    outcome = rookery.run_evolve(
        "program.py", "evaluator.py", "config.yaml", max_iterations=2, output="out"
    )
    files = [path for path in outcome.path.rglob("*") if path.is_file()]
    assert not [path for path in files if b"hush" in path.read_bytes()]
    with Run.view(outcome.path) as view:
        assert view.config["config_file"] == str(problem / "config.yaml")
        kept = EvolveConfig.model_validate(view.config["settings"])
    [before] = kept.llm.ensemble
    assert before.api_key is None
    keeper = read_config(problem / "config.yaml", environment={}).config
    [after] = with_keys(kept, keeper, environment={}).llm.ensemble
    assert after.api_key is not None and after.api_key.get_secret_value() == "hush"
    [other] = with_keys(kept, None, environment={"OPENAI_API_KEY": "mine"}).llm.ensemble
    assert other.api_key is not None and other.api_key.get_secret_value() == "mine"


async def test_models_that_are_named_twice_are_one_and_two_servers_are_refused() -> None:
    url = "http://127.0.0.1:9/v1"
    llm = {"api_base": url, "primary_model": "big", "secondary_model": "big"}
    config = read_config({"llm": llm}, environment={}).config
    async with open_models(config, Display(is_quiet=True)) as opened:
        assert list(opened.models) == ["big"]
    judge = {"name": "big", "api_base": "http://127.0.0.1:8/v1"}
    judged = {"api_base": url, "primary_model": "big", "evaluator_models": [judge]}
    document = {"llm": judged, "evaluator": {"use_llm_feedback": True}}
    config = read_config(document, environment={}).config
    with pytest.raises(ConfigError, match="two servers"):
        async with open_models(config, Display(is_quiet=True)):
            pass


async def test_what_each_api_takes_is_known(problem: Path) -> None:
    google = "https://generativelanguage.googleapis.com/v1beta/openai/"
    llm = {
        "api_base": "http://127.0.0.1:9/v1",
        "timeout": 7,
        "models": [{"name": "gpt-5-mini", "reasoning_effort": "low"}, {"name": "plain"}],
    }
    config = read_config({"llm": llm}, environment={}).config
    async with open_models(config, Display(is_quiet=True)) as opened:
        mini, plain = opened.models["gpt-5-mini"], opened.models["plain"]
        assert isinstance(mini, ExternalTextModel) and isinstance(plain, ExternalTextModel)
        assert mini.config.token_limit == "max_completion_tokens"
        assert mini.config.reasoning_effort == "low" and mini.config.client.request_s == 7
        assert plain.config.token_limit == "max_tokens" and plain.config.takes_seed
    del llm["models"]
    named = llm | {"api_base": google, "primary_model": "gemini"}
    config = read_config({"llm": named}, environment={}).config
    assert "google" in (config.llm.ensemble[0].api_base or "")


async def test_a_server_that_wants_a_key_is_refused_with_what_to_do() -> None:
    async def refuse(request: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "no key"}}, status=401)

    app = web.Application()
    app.router.add_get("/v1/models", refuse)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
    llm = {"api_base": f"http://127.0.0.1:{port}/v1", "primary_model": "big"}
    config = read_config({"llm": llm}, environment={}).config
    try:
        with pytest.raises(ConfigError, match=r"wants one.*Export OPENAI_API_KEY"):
            async with open_models(config, Display(is_quiet=True)):
                pass
    finally:
        await runner.cleanup()


async def test_a_slow_evaluator_has_a_limit_and_the_wait_is_told(
    problem: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(evolve, "TELL_EVERY_S", 0.05)
    await asyncio.to_thread((problem / "evaluator.py").write_text, "import time; time.sleep(60)")
    own = {"workers": 1, "sandbox": {"backend": "none", "startup_s": 0.3}}
    config = read_config({"rookery": own}, environment={}).config
    first = read_first_program(problem / "program.py", config=config)
    spec = evaluation_spec(config, evaluator=problem / "evaluator.py", first=first)
    with pytest.raises(ExecutorError, match=r"not imported within `startup_s` \(0\.3 s\)"):
        async with evolve.open_executor(config, spec, Display()):
            pass
    assert "may take 0.3 s (rookery.sandbox.startup_s)" in capsys.readouterr().err


@pytest.mark.parametrize("error", [ExecutorError, FleetSettingsError, EngineDownError])
def test_a_run_that_ends_early_says_how_it_goes_on(
    error: type[RookeryError], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder, is_told in ((tmp_path, True), (tmp_path / "none", False)):
        with pytest.raises(error), resumable(folder, Display()):
            raise error("The head died.")
        said = f"Go on with: rookery runs resume {folder}"
        assert (said in capsys.readouterr().err) == is_told


def test_a_run_killed_before_it_began_is_begun_again(problem: Path, model: Scripted) -> None:
    folder = problem / "openevolve_output"
    folder.mkdir()
    for name in ("run.lock", "events.db"):
        (folder / name).touch()
    outcome = rookery.run_evolve("program.py", "evaluator.py", document(model), max_iterations=1)
    assert outcome.report.num_iterations == 1
    with pytest.raises(RunError, match="-i N does N more"):
        rookery.run_evolve("program.py", "evaluator.py", document(model), max_iterations=1)


def test_an_engine_brings_its_models() -> None:
    own = {"engine": {"model": "smollm2"}, "adapters": {"poet": "poet"}}
    config = read_config({"rookery": own}, environment={}).config
    assert [model.name for model in config.llm.ensemble] == ["base", "poet"]
    assert config.rookery.adapters["poet"] == str(Path("poet").absolute())
    llm = {"models": [{"name": "poet", "weight": 3.0}, {"name": "big"}]}
    config = read_config({"rookery": own, "llm": llm}, environment={}).config
    assert [model.name for model in config.llm.ensemble] == ["poet", "big"]


def test_programs_are_compared_by_an_embedding_server(
    problem: Path, model: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_EMBEDDING_BASE_URL", model.url)
    database = {"embedding_model": "letters", "novelty_llm": False, "similarity_threshold": 0.9}
    config = document(model) | {"database": database}
    outcome = rookery.run_evolve("program.py", "evaluator.py", config, max_iterations=5)
    assert {failure.kind for failure in outcome.report.failures} == {"similar"}
    assert outcome.report.num_failed == 5 and not outcome.report.num_workers_lost


async def test_the_server_and_the_key_of_embeddings_are_found() -> None:
    def embedding(**database: object) -> EvolveConfig:
        return read_config({"database": database}, environment={}).config

    def opened(config: EvolveConfig, **environment: str) -> AbstractAsyncContextManager[object]:
        return open_config_embedder(config, environment=environment)

    async with opened(embedding()) as embedder:
        assert embedder is None
    with pytest.raises(ConfigError, match=r"'mine', and no server.*OPENAI_EMBEDDING_BASE_URL"):
        async with opened(embedding(embedding_model="mine")):
            pass
    for model, name in (
        ("text-embedding-3-small", "OPENAI_EMBEDDING_API_KEY"),
        ("gemini-embedding-001", "GEMINI_API_KEY"),
    ):
        with pytest.raises(ConfigError, match=f"needs a key for {model}: export {name}"):
            async with opened(embedding(embedding_model=model)):
                pass
    base = {"embedding_model": "mine", "embedding_api_base": "http://127.0.0.1:9/v1"}
    async with opened(embedding(**base)) as embedder:
        assert isinstance(embedder, ExternalEmbedder)
        assert embedder.config.url == "http://127.0.0.1:9/v1"
        with pytest.raises(FleetError):
            await embedder.embed("x = 1")


def test_the_line_of_an_iteration() -> None:
    common = {"num_decided": 2, "num_iterations": 9, "model": "big", "best_score": 0.5}
    good = Iteration(number=12, score=0.5, is_best=True, **common)  # type: ignore[arg-type]
    assert describe(good) == "   12  0.5  best 0.5 *  big"
    bad = Iteration(
        number=3, failure="error", message="a\n\x1b[31mred", series="sequential",
        **common,  # type: ignore[arg-type]
    )  # fmt: skip
    assert describe(bad) == "sequential     3  failed (error): a [31mred  best 0.5"


def test_a_run_of_a_version_without_strategies_goes_on_as_it_began(
    problem: Path, model: Scripted
) -> None:
    config = document(model) | {"database": {"strategy": "openevolve"}}
    outcome = rookery.run_evolve("program.py", "evaluator.py", config, max_iterations=3)
    with Run.open(outcome.path) as run:
        old = json.loads(json.dumps(run.config))
        del old["settings"]["database"]["strategy"]
        run.extend(old, may_change=["*"])
    loaded = read_config(document(model), environment={})
    assert loaded.config.database.strategy == "adaptive"
    program, evaluator = problem / "program.py", problem / "evaluator.py"
    made_from = run_config(loaded, program=program, evaluator=evaluator)
    longer = evolve.resume(made_from, Display(), iterations=2)
    assert (longer.report.num_iterations, longer.report.strategy) == (5, "openevolve")


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tiny import write_chat_model

    return write_chat_model(tmp_path_factory.mktemp("models") / "chat")


@pytest.mark.parametrize(
    "others", [[{"name": "base", "weight": 0.1}], pytest.param([], marks=long)]
)
def test_an_adapter_learns_from_the_run_and_joins_its_models(
    problem: Path, model: Scripted, chat_model: Path, others: list[dict[str, Any]]
) -> None:
    (problem / "templates").mkdir()
    (problem / "templates" / "diff_user.txt").write_text(
        "# Current Program\n```python\n{current_program}```\nWrite a SEARCH/REPLACE block."
    )
    config = {
        "database": {"strategy": "openevolve"},
        "prompt": {"system_message": "You write Python.", "template_dir": "templates"},
        "llm": {
            "max_tokens": 8,
            "models": [{"name": "scripted", "api_base": model.url}, *others],
        },
        "rookery": UNSAFE
        | {
            "mode": "deterministic",
            "engine": {"model": str(chat_model)},
            "learn": {"every": 20, "rank": 4, "epochs": 4, "learning_rate": 0.01},
        },
    }
    outcome = rookery.run_evolve("program.py", "evaluator.py", config, max_iterations=32)
    [row] = outcome.report.learned
    assert (row.iteration, row.error) == (20, "") and row.num_rows >= 4 and row.tokens > 1000
    assert (row.loss or 9) < 5.5, "a model that knows nothing has log(259)"
    assert {one.name for one in row.models} >= {row.name, "scripted"}
    folder = outcome.path / "learned" / row.name
    assert (folder / "adapter_model.safetensors").is_file()
    exported = (outcome.path / "report.html").read_text()
    assert row.name in exported
    again = rookery.resume(outcome.path)
    assert again.report.learned == outcome.report.learned


def test_an_engine_that_takes_no_adapters_cannot_learn(problem: Path, chat_model: Path) -> None:
    for engine, reason in (
        (None, "an API of llm takes no adapters"),
        ({"model": str(chat_model), "max_rank": 8}, "rookery.learn.rank is 16"),
    ):
        own = UNSAFE | {"learn": {"every": 20}} | ({"engine": engine} if engine else {})
        with pytest.raises(ConfigError, match=reason):
            rookery.run_evolve("program.py", "evaluator.py", {"rookery": own})
        assert not (problem / "openevolve_output").exists()


async def test_servers_that_load_no_adapters_cannot_learn(chat_model: Path) -> None:
    stub = Stub(model=str(chat_model), root=str(chat_model))
    stub.routes = tuple(route for route in stub.routes if "lora" not in route)
    async with serve(stub):
        own = {
            "engine": {"type": "fleet", "urls": [stub.url]},
            "tokenizer": str(chat_model),
            "learn": {"every": 20},
        }
        config = read_config({"rookery": own}, environment={}).config
        engine = read_engine(config.rookery)
        with pytest.raises(ConfigError, match=r"does not load adapters.*Or leave learn out"):
            async with open_models(config, Display(is_quiet=True), engine=engine):
                pass
