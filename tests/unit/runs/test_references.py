"""`run:NAME/PART` in configs, and which runs a run was made from."""

from pathlib import Path
from typing import Any

import pytest

from rookery.errors import ConfigError
from rookery.runs import Run
from rookery.runs.references import Source, find_sources, in_folder, resolve_references


@pytest.fixture
def runs_dir(tmp_path: Path) -> Path:
    with Run.create(tmp_path, kind="genome", name="tutor", config={}) as run:
        run.write_text("sft.jsonl", "{}\n")
        (run.path / "winner").mkdir()
    return tmp_path


def resolve(document: Any, runs_dir: Path) -> Any:
    return resolve_references(document, find=in_folder(runs_dir))


def test_a_reference_becomes_a_path_at_any_depth(runs_dir: Path) -> None:
    document = {
        "init": {"path": "run:tutor/winner"},
        "adapters": ["out/poet", Path("run:tutor/winner")],
        "taskset": "run:tutor/sft.jsonl?bad_rows=skip",
        "seed": 3,
    }
    winner = str(runs_dir / "tutor" / "winner")
    assert resolve(document, runs_dir) == {
        "init": {"path": winner},
        "adapters": ["out/poet", winner],
        "taskset": f"{runs_dir}/tutor/sft.jsonl?bad_rows=skip",
        "seed": 3,
    }


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("run:tuter/winner", r"init\.path is run:tuter/winner: there is no run .*run:tutor\?"),
        ("run:tutor/trained", r"the run has no trained\. It has sft\.jsonl, winner"),
        ("run:tutor/../tutor/winner", "the run has no"),
    ],
)
def test_a_reference_to_nothing_says_what_there_is(
    runs_dir: Path, text: str, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        resolve({"init": {"path": text}}, runs_dir)


@pytest.mark.parametrize("text", ["run: the program", "run:", "run:../secret/winner", "rerun:x"])
def test_other_texts_stay(runs_dir: Path, text: str) -> None:
    assert resolve({"prompt": text}, runs_dir) == {"prompt": text}


def test_a_run_knows_which_runs_it_was_made_from(runs_dir: Path) -> None:
    config = resolve({"init": {"path": "run:tutor/winner"}, "seed": 1, "data": ["/etc"]}, runs_dir)
    assert find_sources(config) == [Source("init.path", runs_dir / "tutor", "winner")]
