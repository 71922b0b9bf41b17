"""Progress where no bar can be drawn: lines, whether the work reports anything or not."""

import io
import json
import threading
from contextlib import redirect_stderr
from pathlib import Path

import pytest
from driving import Command

from rookery.runs import Run
from rookery.ui import display
from rookery.ui.display import Display

GENOME = """\
engine: {model: tiny}
init: {type: file, path: founders}
tasksets:
  - {type: jsonl, path: tasks.jsonl}
  - {type: jsonl, path: tasks.jsonl, name: again, bad_rows: skip,
     splits: {search: 0.8, select: 0.1, report: 0.1}}
stages: [{type: ga, generations: 1, population: {size: 2, children: {count: 2}}}]
finals: {num_finalists: 2, num_voters: 2}
"""


class Lines(io.StringIO):
    """Stands for stderr: what was written, and a way to wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""
        self._changed = threading.Condition()

    def write(self, text: str) -> int:
        with self._changed:
            self.text += text
            self._changed.notify_all()
        return len(text)

    def wait_for(self, words: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: words in self.text, timeout=30), self.text


def test_lines_come_while_the_work_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(display, "LINE_EVERY_S", 0.001)
    with (
        redirect_stderr(Lines()) as lines,
        Display().bar("random search", total=1900) as bar,
    ):
        lines.wait_for("random search  0 of 1,900  0 tok/s  0:00\n")
        bar.advance(320, tokens=50)
        lines.wait_for("random search  320 of 1,900  ")
    assert "tok/s" in lines.text.splitlines()[-1]


def test_the_last_line_tells_how_it_ended_and_nothing_follows() -> None:
    with (
        redirect_stderr(Lines()) as lines,
        pytest.raises(KeyError),
        Display().bar("rows[a]", total=None) as bar,
    ):
        bar.update(done=7)
        raise KeyError
    assert lines.text == "rows[a]  7  0 tok/s  0:00\n"
    assert not [thread for thread in threading.enumerate() if thread.name == "progress"]


def test_colours_make_no_terminal_of_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook sets FORCE_COLOR; a bar that is drawn there leaves a line for each change."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    with redirect_stderr(Lines()) as lines, Display().bar("founders", total=2) as bar:
        bar.advance(2)
    assert lines.text == "founders  2 of 2  0 tok/s  0:00\n"


def test_hints_are_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    with redirect_stderr(Lines()) as lines:
        Display().hint("See it live with: rookery ui runs")
        assert lines.text == ""
        monkeypatch.setenv("FORCE_COLOR", "1")
        Display().hint("See it live with: rookery ui runs")
        Display(is_quiet=True).hint("not this")
    assert "rookery ui runs" in lines.text and "not this" not in lines.text


def test_a_quiet_command_prints_no_line() -> None:
    with redirect_stderr(Lines()) as lines, Display(is_quiet=True).bar("x", total=1) as bar:
        bar.advance(1)
    assert lines.text == ""


def test_every_phase_prints_progress_and_what_was_skipped_is_told_there_and_in_the_report(
    rookery: Command, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Progress comes between generations, and in the last phase: baselines and random search."""
    monkeypatch.setattr(display, "LINE_EVERY_S", 0.02)
    rows = (place / "tasks.jsonl").read_text().splitlines()
    (place / "tasks.jsonl").unlink()
    (place / "tasks.jsonl").write_text("\n".join([*rows, rows[0]]) + "\n")
    (place / "bad.jsonl").write_text("\n".join([*rows, "{", '{"prompt": 3}']) + "\n")
    (place / "g.yaml").write_text(GENOME.replace("tasks.jsonl, name", "bad.jsonl, name"))
    ended = rookery("genome", "run", "g.yaml", "--name", "x")
    assert ended.code == 0
    said = ended.err.splitlines()
    last = max(i for i, line in enumerate(said) if "   best " in line)
    after = [line for line in said[last + 1 :] if "tok/s" in line]
    assert len(after) > 2 and after[-1].startswith("done  "), said
    told = json.loads((place / "runs/x/progress.json").read_text())
    assert told["done"] == told["total"] > 0 and told["noun"] == "answer" and not told["left_s"]
    skipped = f"again: 2 of {len(rows) + 2} rows were skipped. The first: "
    report = json.loads((place / "runs/x/report.json").read_text())
    page = (place / "runs/x/report.html").read_text()
    for words in (skipped, "tasks are in a later split than its own fractions give"):
        assert words in ended.err
        assert any(words in warning for warning in report["warnings"])
        assert words in page
    ended = rookery("eval", "tiny", "bad.jsonl?bad_rows=skip", "--json")
    assert ended.code == 0 and ended.document["num_skipped_rows"] == 2
    assert ended.document["warnings"][0].startswith("bad: 2 of ")
    told = rookery("eval", "tiny", "bad.jsonl?bad_rows=skip").err
    assert "rows were skipped" in told and f"loading {place / 'tiny'}" in told
    assert [line for line in told.splitlines() if line.startswith("bad  ")]
    refused = rookery("eval", "tiny", "bad.jsonl")
    assert refused.code == 2 and f"2 of {len(rows) + 2} rows cannot be used" in refused.err


def test_what_was_skipped_is_not_left_at_the_end(tmp_path: Path) -> None:
    with Run.create(tmp_path, kind="eval", name="one", config={}) as run:
        with Display(is_quiet=True).bar("train", total=2, run=run) as bar:
            bar.left.expect(500, "answer", worth=1.0)
            bar.update(done=1)
            bar.update(done=2)
        told = json.loads((run.path / "progress.json").read_text())
    assert (told["done"], told["left_s"]) == (2, None)
