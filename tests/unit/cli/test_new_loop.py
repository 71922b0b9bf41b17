"""The loop that CONTRIBUTING.md shows is a folder and an entry: it runs, resumes and reports."""

import json
import re
import shutil
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from driving import Command
from forked import forked, kill_at_event, run_command

import rookery.loops
from rookery.cli.app import app
from rookery.compose import KINDS
from rookery.embedded import EmbeddedEngine
from rookery.runs import Run
from rookery.weights import read_adapter

PAGE = Path(__file__).parents[3] / "CONTRIBUTING.md"
KIND = "random_search"
CONFIG = """\
engine: {model: tiny}
tasksets: [{type: jsonl, path: mine.jsonl}]
count: 4
"""


def add_loop(folder: Path) -> None:
    """The folder under `loops/`, and the entry."""
    if str(folder) not in rookery.loops.__path__:
        rookery.loops.__path__.append(str(folder))
    [entry] = re.findall(rf'`"{KIND}": "(\S+)"`', PAGE.read_text())
    KINDS[KIND] = entry


@pytest.fixture
def place_of_loop(place: Path) -> Iterator[Path]:
    [code] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(code.splitlines()) <= 60
    (place / "loops" / KIND).mkdir(parents=True)
    (place / "loops" / KIND / "loop.py").write_text(code)
    (place / "mine.yaml").write_text(CONFIG)
    shutil.copy(place / "tasks.jsonl", place / "mine.jsonl")
    add_loop(place / "loops")
    yield place
    del KINDS[KIND]
    rookery.loops.__path__.remove(str(place / "loops"))
    if KIND in app:
        del app[KIND]


def killed_at(number: int, place: Path, *words: str) -> None:
    add_loop(place / "loops")
    kill_at_event(number)
    run_command(place / "errors", *words)


def test_it_is_killed_goes_on_and_reports(
    rookery: Command, place_of_loop: Path, drawn: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = place_of_loop
    scored: list[object] = []
    score = EmbeddedEngine.score

    async def note(self: EmbeddedEngine, batch: Sequence[Any]) -> Any:
        scored.extend(batch)
        return await score(self, batch)

    monkeypatch.setattr(EmbeddedEngine, "score", note)
    words = (KIND, "run", "mine.yaml", "--seed", "3")
    ended = rookery(*words, "--name", "whole")
    assert ended.code == 0 and "The best of 4 random adapters." in ended.out
    num_asked = len(scored)
    with Run.view(place / "runs/whole") as run:
        num_events = len(list(run.events()))
    with forked(killed_at, num_events // 2, place, *words, "--name", "x") as process:
        assert process.wait() == -signal.SIGKILL, (place / "errors").read_text()
    assert rookery("runs", "resume", "x").code == 0
    assert 0 < len(scored) - num_asked < num_asked, "what was answered is not asked again"
    whole, resumed = (
        json.loads((place / f"runs/{name}/report.json").read_text()) for name in ("whole", "x")
    )
    assert resumed["rows"] == whole["rows"] and resumed["kind"] == KIND
    assert [row["name"] for row in whole["rows"]] == ["random", "base model"]
    assert whole["rows"][0]["is_winner"] and "gain" in whole["rows"][0]
    winners = [read_adapter(place / f"runs/{name}/winner") for name in ("whole", "x")]
    assert winners[0].version == winners[1].version
    for name in ("whole", "x"):
        page = (place / f"runs/{name}/report.html").read_text()
        assert "The best of 4 random adapters." in page and "base model" in page
    listed = rookery("runs", "list")
    assert listed.code == 0 and listed.words.count(KIND) == 2
    assert rookery("runs", "show", "x").code == 0


def test_other_data_and_a_bad_value_are_refused(rookery: Command, place_of_loop: Path) -> None:
    ended = rookery(KIND, "run", "mine.yaml", "--count", "0", "--name", "x")
    assert ended.code == 2 and "count" in ended.err and not (place_of_loop / "runs").exists()
    assert rookery(KIND, "run", "mine.yaml", "--name", "x").code == 0
    rows = place_of_loop / "mine.jsonl"
    rows.write_text(rows.read_text().replace("w5 ", "w6 "))
    ended = rookery("runs", "resume", "x")
    assert ended.code == 2 and "The data of mine changed" in ended.words
