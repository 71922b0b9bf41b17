"""`rookery evolve`: what is refused before any model is asked, and what a run leaves."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from driving import Command
from scripted import Scripted, serve_scripted

from rookery.compose.evolve import evolve_prompt
from rookery.runs import Run
from rookery.tasks.taskset import load_taskset_file

PROGRAM = """# EVOLVE-BLOCK-START
def solve():
    return 0.25
# EVOLVE-BLOCK-END
"""
EVALUATOR = """import runpy

def evaluate(path):
    return {"combined_score": runpy.run_path(path)["solve"]()}
"""


@pytest.fixture(scope="module")
def model() -> Iterator[Scripted]:
    with serve_scripted("--latency", 0) as scripted:
        yield scripted


@pytest.fixture(autouse=True)
def problem(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a problem, which is the current one."""
    folder = place / "problem"
    folder.mkdir()
    monkeypatch.chdir(folder)
    for name in ("OPENAI_API_KEY", "OPENAI_API_BASE"):
        monkeypatch.delenv(name, raising=False)
    (folder / "program.py").write_text(PROGRAM)
    (folder / "evaluator.py").write_text(EVALUATOR)
    return folder


RUN = ("evolve", "run", "program.py", "evaluator.py", "--unsafe")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("evolve", "run", "none.py", "evaluator.py"), "There is no program"),
        (("evolve", "run", "program.py", "none.py"), "There is no evaluator"),
        ((*RUN, "-i", "many"), "many"),
        ((*RUN, "-i", "-3"), "max_iterations"),
        ((*RUN, "-i", "0"), "max_iterations is 0"),
        ((*RUN, "--evaluator.memory_limit_mb", "8"), "greater than or equal to 16"),
        ((*RUN, "-l", "LOUD"), "LOUD"),
        ((*RUN, "--mode", "fast"), "fast"),
        ((*RUN, "--distributed", "--executor", "local"), "--distributed is --executor ray"),
        ((*RUN, "--rezume"), "Did you mean --resume?"),
        ((*RUN, "--database.num_islnds", "3"), "did you mean database.num_islands?"),
        ((*RUN, "-i", "0"), "error: The command line: max_iterations is 0; it should be"),
        (
            (*RUN, "--rookery.sandbox.memory_mb", "1"),
            "error: The command line: rookery.sandbox.memory_mb is 1; it should be",
        ),
        ((*RUN, "--resume"), "There is no run"),
        ((*RUN, "--checkpoint", "nowhere"), "is not a checkpoint"),
        ((*RUN, "-o", "program.py"), "is a file: give another one with -o"),
        ((*RUN, "-c", "none.yaml"), "none.yaml"),
    ],
)
def test_bad_words_are_refused(
    refused: Command, model: Scripted, words: tuple[str, ...], said: str
) -> None:
    before = model.stats()["calls"]
    assert said in refused(*words, *model.flags).words
    assert model.stats()["calls"] == before


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("program.py", "", "is empty"),
        ("program.py", "# EVOLVE-BLOCK-START\nx = 1\n", "EVOLVE-BLOCK"),
        (
            "evaluator.py",
            "def score(path): return {}\n",
            "has no function `evaluate(program_path)`",
        ),
        ("config.yaml", "max_iterations: many\n", "max_iterations"),
        ("config.yaml", "llm: {api_key: '${NO_SUCH_KEY}'}\n", "NO_SUCH_KEY is not set"),
        ("config.yaml", "rookery: {confirm: often}\n", "confirm"),
    ],
)
def test_bad_files_are_refused(
    refused: Command, problem: Path, model: Scripted, file: str, text: str, said: str
) -> None:
    (problem / "config.yaml").write_text("max_iterations: 3\n")
    (problem / file).write_text(text)
    before = model.stats()["calls"]
    assert said in refused(*RUN, "-c", "config.yaml", *model.flags).words
    assert model.stats()["calls"] == before


def test_a_model_and_a_key_are_needed(refused: Command) -> None:
    without = refused(*RUN, "--api-base", "http://127.0.0.1:9/v1").words
    assert "No model is named" in without and "starting workers" not in without
    assert "needs a key: export OPENAI_API_KEY" in refused(*RUN, "--primary-model", "big").words


def test_torn_and_foreign_checkpoints_are_refused(
    refused: Command, problem: Path, model: Scripted
) -> None:
    (problem / "foreign" / "programs").mkdir(parents=True)
    torn = problem / "old" / "checkpoints" / "checkpoint_5"
    (torn / "programs").mkdir(parents=True)
    (torn / "metadata.json").write_text(json.dumps({"islands": [["gone"]]}))
    for name in ("foreign", torn):
        ended = refused(*RUN, "--checkpoint", name, *model.flags)
        assert "is incomplete" in ended.words


def test_an_old_output_is_not_overwritten(refused: Command, problem: Path, model: Scripted) -> None:
    (problem / "openevolve_output" / "checkpoints" / "checkpoint_7").mkdir(parents=True)
    ended = refused(*RUN, *model.flags)
    assert "give another folder with -o" in ended.words
    assert "--checkpoint" in ended.words and "checkpoint_7" in ended.words


def test_a_cluster_that_is_not_there_is_refused(refused: Command, model: Scripted) -> None:
    pytest.importorskip("ray", reason="ray is not installed")
    ended = refused(*RUN, "--executor", "ray", "--address", "127.0.0.1:9", *model.flags)
    assert "nothing answers there" in ended.words


def test_check_scores_and_asks_once(rookery: Command, problem: Path, model: Scripted) -> None:
    """Where the flags of places say, also where the config says otherwise."""
    before = model.stats()["calls"]
    (problem / "config.yaml").write_text("evaluator: {distributed: true}\n")
    check = ("evolve", "check", "program.py", "evaluator.py", "--unsafe", "-c", "config.yaml")
    ended = rookery(*check, "--executor", "local", "--in-flight", 2, *model.flags)
    assert ended.code == 0 and "workers: local/0" in ended.words, ended
    assert "first program: combined_score 0.25" in ended.words
    assert "model scripted: 'There is no program" in ended.words
    assert model.stats()["calls"] == before + 1
    assert not (problem / "openevolve_output").exists()


def test_check_embeds_once_where_programs_are_compared(
    rookery: Command, problem: Path, model: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = ("evolve", "check", "program.py", "evaluator.py", "--unsafe", *model.flags)
    named = ("--database.embedding_model", "letters")
    monkeypatch.setenv("OPENAI_EMBEDDING_BASE_URL", model.url)
    ended = rookery(*check, *named)
    assert ended.code == 0 and "embedding model letters: 36 numbers" in ended.words, ended
    monkeypatch.delenv("OPENAI_EMBEDDING_BASE_URL")
    ended = rookery(*check, *named)
    assert ended.code == 2 and "no server is named for it" in ended.words


def test_check_warns_where_scores_can_be_forged(
    rookery: Command, problem: Path, model: Scripted
) -> None:
    code = "class Box:\n def __float__(self): return 0.5\nbox = Box()\n"
    (problem / "program.py").write_text(code)
    text = "import runpy\ndef evaluate(path):\n"
    text += " return {'combined_score': float(runpy.run_path(path)['box'])}\n"
    (problem / "evaluator.py").write_text(text)
    ended = rookery("evolve", "check", "program.py", "evaluator.py", "--unsafe", *model.flags)
    assert ended.code == 0 and "combined_score 0.5" in ended.words, ended
    assert "a program can forge its score" in ended.words
    assert "Take plain values from the program" in ended.words


def test_check_says_why_the_first_program_fails(
    refused: Command, problem: Path, model: Scripted
) -> None:
    (problem / "program.py").write_text("def solve(): raise ValueError('far off')\n")
    ended = refused("evolve", "check", "program.py", "evaluator.py", "--unsafe", *model.flags)
    assert "The first program fails (error)" in ended.words and "far off" in ended.words


def test_check_wants_the_dimensions_of_the_search(
    refused: Command, problem: Path, model: Scripted
) -> None:
    (problem / "config.yaml").write_text("database: {feature_dimensions: [speed]}\n")
    check = ("evolve", "check", "program.py", "evaluator.py", "--unsafe", "-c", "config.yaml")
    ended = refused(*check, *model.flags)
    assert "The evaluator reported no 'speed', a dimension of the search" in ended.words


def test_a_finished_run_is_extended_under_its_own_config(
    rookery: Command, problem: Path, model: Scripted
) -> None:
    first = rookery(*RUN, "-i", 3, "--in-flight", 2, *model.flags)
    assert first.code == 0 and "Better than the first program by" in first.words, first
    best = problem / "openevolve_output" / "best" / "best_program.py"
    assert f"best {best.parent}" in first.words and "return" in best.read_text()
    other = rookery(*RUN, "-i", 2, "--in-flight", 2, "--random-seed", 7, *model.flags)
    assert other.code == 2 and "random_seed is 42 there, 7 here" in other.words
    more = rookery(*RUN, "-i", 2, "--in-flight", 3, "--workers", 2, *model.flags)
    assert more.code == 0 and "of 5" in more.words, more
    population = problem / "population.jsonl"
    assert rookery("evolve", "export", "openevolve_output", population).code == 0
    lines = [json.loads(line) for line in population.read_text().splitlines()]
    assert [line.get("iteration") for line in lines].count(None) == 1 and len(lines) == 6
    [listed] = rookery("runs", "list", "--json").document
    assert (listed["name"], listed["kind"]) == ("openevolve_output", "evolve")
    assert rookery("runs", "show", listed["name"]).code == 0
    again = rookery(*RUN, *model.flags)
    assert again.code == 2 and "-i N does N more iterations" in again.words


def test_patience_that_ended_a_run_does_not_end_what_is_asked_for_more(
    rookery: Command, problem: Path, model: Scripted
) -> None:
    (problem / "config.yaml").write_text("early_stopping_patience: 2\n")
    words = (*RUN, "-c", "config.yaml", "--in-flight", 1, *model.flags)
    assert "did not improve" in rookery(*words, "-i", 40).words
    report = problem / "openevolve_output" / "report.json"
    num_first = json.loads(report.read_text())["num_iterations"]
    assert rookery(*words, "--resume").code == 0
    assert json.loads(report.read_text())["num_iterations"] == num_first, "it had ended"
    assert rookery(*words, "-i", 1).code == 0
    assert json.loads(report.read_text())["num_iterations"] == num_first + 1


def cut_off(folder: Path, *, before: int, after: int) -> None:
    """As a command leaves it that was killed when it had extended the run."""
    with Run.open(folder) as run:
        document = run.config | {"extended_from": before}
        document["settings"]["max_iterations"] = after
        run.extend(document, may_change=["extended_from", "settings.max_iterations"])


def test_a_run_is_extended_wherever_it_stopped_before(
    rookery: Command, problem: Path, model: Scripted
) -> None:
    """Also one that was moved, whose folder is still kept from programs."""
    listing = "import os\n" + EVALUATOR.replace(
        "}", ', "beside": len(os.listdir(os.path.dirname(__file__)))}'
    )
    (problem / "evaluator.py").write_text(listing)
    assert rookery(*RUN, "-i", 1, *model.flags).code == 0
    Run.open(problem / "openevolve_output").close()  # killed before anything was extended
    assert "of 2" in rookery(*RUN, "-i", 1, "--resume", *model.flags).words
    report = json.loads((problem / "openevolve_output/report.json").read_text())
    assert report["num_iterations"] == 2
    cut_off(problem / "openevolve_output", before=2, after=3)
    assert "of 3" in rookery(*RUN, "-i", 1, "--resume", *model.flags).words
    cut_off(problem / "openevolve_output", before=3, after=4)
    (problem / "openevolve_output").rename(problem / "moved")
    assert rookery("runs", "resume", problem / "moved").code == 0
    assert rookery("evolve", "export", "moved", "all.jsonl").code == 0
    lines = [json.loads(line) for line in (problem / "all.jsonl").read_text().splitlines()]
    assert len(lines) == 5 and len({line["metrics"]["beside"] for line in lines}) == 1


def test_a_run_does_not_go_on_with_another_evaluator_or_program(
    rookery: Command, problem: Path, model: Scripted
) -> None:
    assert rookery(*RUN, "-i", 1, *model.flags).code == 0
    before = model.stats()["calls"]
    for name in ("program.py", "evaluator.py"):
        text = (problem / name).read_text()
        (problem / name).write_text(f"{text}# changed\n")
        ended = rookery(*RUN, "-i", 1, *model.flags)
        assert ended.code == 2 and f"{name} changed since" in ended.words
        (problem / name).write_text(text)
    assert model.stats()["calls"] == before
    with Run.view(problem / "openevolve_output") as run:
        assert run.status == "finished", "as it was"


def test_answers_that_improved_a_program_are_exported(
    rookery: Command, refused: Command, problem: Path, model: Scripted
) -> None:
    assert rookery(*RUN, "-i", 6, *model.flags).code == 0
    wins = problem / "wins.jsonl"
    ended = rookery("evolve", "export", "openevolve_output", "--training-data", wins)
    rows = [json.loads(line) for line in wins.read_text().splitlines()]
    assert ended.code == 0 and f"{len(rows)} answers that improved a program" in ended.words
    assert rows and all(row["score"] > row["parent_score"] for row in rows)
    assert "<<<<<<< SEARCH" in rows[0]["messages"][-1]["content"]
    assert "No file is named" in refused("evolve", "export", "openevolve_output").words
    (problem / "evaluator.py").write_text("def evaluate(path):\n    return {'combined_score': 0}\n")
    assert rookery(*RUN, "-i", 2, "-o", "none", *model.flags).code == 0
    ended = rookery("evolve", "export", "none", "--training-data", "none.jsonl")
    assert ended.code == 2 and "there is nothing to learn" in ended.words
    assert not (problem / "none.jsonl").exists()


# Prompts.

PROMPT = ("evolve", "prompt", "prompt.txt")
CHAT = ("--model", "../chat")
TASKS = ("--taskset", "../tasks.jsonl")


@pytest.mark.parametrize(
    ("text", "words", "sentence"),
    [
        (" \n", (*CHAT, *TASKS), "prompt.txt is empty: write what the model is told"),
        ("Hi", CHAT, "No tasks are named: give --taskset FILE"),
        ("Hi", TASKS, "answered by a model of rookery.engine, and none is named"),
        ("Hi", (*CHAT, "--taskset", "none.jsonl"), "none.jsonl"),
        ("Hi", (*CHAT, *TASKS, "--rookery.tasks.model", "x"), "the engine's models are base"),
        ("Hi", (*CHAT, *TASKS, "--rookery.tune", "{evaluations: 9}"), "tune is for programs"),
        ("x" * 20_000, (*CHAT, *TASKS), "max_code_length is 10000"),
        ("Hi", ("--model", "../tiny", *TASKS), "no chat template"),
        ("Hi", (*CHAT, *TASKS, "--fleet", "gpu1"), "gpu1"),
    ],
)
def test_prompts_that_cannot_be_asked_are_refused(
    refused: Command, problem: Path, text: str, words: tuple[str, ...], sentence: str
) -> None:
    (problem / "prompt.txt").write_text(text)
    ended = refused(*PROMPT, *words)
    assert sentence in ended.words


def test_a_model_without_a_chat_template_answers_where_another_proposes(
    rookery: Command, problem: Path, model: Scripted
) -> None:
    (problem / "prompt.txt").write_text("Hi")
    ended = rookery(*PROMPT, "--model", "../tiny", *TASKS, "-i", 2, *model.flags)
    assert ended.code == 0, ended.err


def test_a_prompt_with_braces_is_evolved_and_read_once(problem: Path) -> None:
    """From Python, with a taskset that another run left."""
    text = "Say {{ nothing }} of {% raw %} {0} or {{"
    (problem / "prompt.txt").write_text(text)
    with Run.create(problem / "runs", kind="icm", name="a", config={}) as run:
        run.write_text("rows.jsonl", (problem / "../tasks.jsonl").read_text())
    outcome = evolve_prompt(
        "prompt.txt", "run:a/rows.jsonl", "../chat", max_iterations=2, llm={"max_tokens": 4}
    )
    tasks = outcome.report.tasks
    assert tasks is not None and tasks.taskset.num_report == len(
        load_taskset_file("../tasks.jsonl").split("report")
    )
    assert "first1" in {row.id for row in tasks.finalists}
    assert (outcome.path / "best/best_program.txt").exists()
    assert any("{{ nothing }} of the prompt is no field" in w for w in outcome.report.warnings)
    with Run.view(outcome.path) as run:
        assert run.counts()["prompt/chosen"] == 1
