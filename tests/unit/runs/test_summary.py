"""Summaries: what the command line lists, shows and exports, also of a run in progress."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from rookery.errors import RunError
from rookery.runs import Run, export_events, list_runs
from rookery.runs.summary import note_elsewhere


def test_the_list_has_the_newest_first(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with Run.create(tmp_path, kind="eval", name=name, config={}) as run:
            run.append_blocking("label", {})
            run.finish("failed", message=f"{name} broke")
    with Run.open(tmp_path / "a") as run:
        listed = list_runs(tmp_path)
        assert [(s.name, s.kind, s.status) for s in listed] == [
            ("a", "eval", "running"),
            ("b", "eval", "failed"),
        ]
        assert [(s.num_events, s.message) for s in listed] == [(4, ""), (3, "b broke")]
        newest = run.last()
        assert newest is not None
        assert listed[0].last_event_s == newest.time_s
        assert listed[0].started_s == run.created.time_s < newest.time_s
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "other").mkdir()
    assert len(list_runs(tmp_path)) == 2


def test_runs_that_are_kept_elsewhere_are_listed_by_their_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    runs, out = Path("runs"), tmp_path / "problem" / "out"
    for folder in (out, tmp_path / "runs" / "here", out):
        note_elsewhere(runs, folder)
    assert list_runs(runs) == [], "there is none"
    Run.create(out.parent, kind="evolve", name="out", config={}).close()
    Run.create(runs, kind="eval", name="here", config={}).close()
    assert {summary.name: summary.path for summary in list_runs(runs)} == {
        "here": tmp_path / "runs" / "here",
        "problem/out": out,
    }


@pytest.mark.parametrize("name", [os.fsdecode(b"\xff"), "two\u2028lines"])
def test_a_folder_with_any_name_is_listed_where_it_is_noted(tmp_path: Path, name: str) -> None:
    runs, folder = tmp_path / "runs", tmp_path / name / "out"
    for _ in range(2):
        note_elsewhere(runs, folder)
    Run.create(folder.parent, kind="evolve", name="out", config={}).close()
    assert [summary.path for summary in list_runs(runs)] == [folder]


def test_a_folder_that_this_user_may_not_look_into_hides_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where several people keep their runs."""
    (tmp_path / "private").mkdir()
    Run.create(tmp_path, kind="eval", name="mine", config={}).close()
    look = os.stat

    def refuse(path: Any, **options: Any) -> os.stat_result:
        if Path(path).parent.name == "private":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return look(path, **options)

    monkeypatch.setattr(os, "stat", refuse)
    assert [summary.name for summary in list_runs(tmp_path)] == ["mine"]


def test_size_is_what_the_files_hold(tmp_path: Path) -> None:
    with Run.create(tmp_path, kind="eval", name="a", config={}) as run:
        before = list_runs(tmp_path)[0].size_bytes
        run.blobs.put_bytes(b"x" * 100_000)
        assert list_runs(tmp_path)[0].size_bytes == before + 100_000


def test_no_folder_has_no_runs_and_a_file_is_told(tmp_path: Path) -> None:
    assert list_runs(tmp_path / "missing") == []
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunError, match="is a file"):
        list_runs(tmp_path / "file")


def test_export_is_a_line_per_event(tmp_path: Path) -> None:
    target = tmp_path / "events.jsonl"
    with Run.create(tmp_path, kind="eval", name="a", config={}) as run:
        run.append_blocking("label", {"text": "Grüße\n", "odd": "\udcff"}, key="k")
        with Run.view(run.path) as view:
            assert export_events(view, target) == 2
        events = list(run.events())
    lines = [json.loads(line) for line in target.read_text().splitlines()]
    assert [line["payload"] for line in lines] == [event.payload for event in events]
    assert lines[1]["key"] == "k" and lines[1]["seq"] == 2
    assert [p.name for p in tmp_path.iterdir() if "partial" in p.name] == []


def test_export_to_nowhere_is_a_sentence(tmp_path: Path) -> None:
    with (
        Run.create(tmp_path, kind="eval", name="a", config={}) as run,
        pytest.raises(RunError, match=r"Writing .*missing/x\.jsonl: No such file"),
    ):
        export_events(run, tmp_path / "missing" / "x.jsonl")
