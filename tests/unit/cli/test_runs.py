"""`rookery runs`: list, show, export, resume."""

import json
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from driving import Command

from rookery.runs import Run


@pytest.fixture
def two_runs(rookery: Command, place: Path) -> Path:
    rookery("eval", "tiny", "tasks.jsonl", "--name", "first", "--limit", "2")
    with (
        pytest.raises(ZeroDivisionError),
        Run.create(place / "runs", kind="genome", name="second", config={"seed": 3}) as run,
    ):
        run.log_metrics(1, {"genome/best": 0.25})
        raise ZeroDivisionError("a bug")
    return place


def test_runs_are_listed_the_newest_first(rookery: Command, two_runs: Path) -> None:
    listed = rookery("runs", "list", "--json").document
    assert [(run["name"], run["kind"], run["status"]) for run in listed] == [
        ("second", "genome", "failed"), ("first", "eval", "finished"),
    ]  # fmt: skip
    assert listed[1]["num_events"] == 4 and listed[1]["size_bytes"] > 0
    table = rookery("runs", "list").words
    assert table.index("second") < table.index("first") and "finished" in table


def test_a_service_is_not_resumed_but_started(rookery: Command, place: Path) -> None:
    with Run.create(place / "runs", kind="serve", name="served", config={}) as run:
        pass
    ended = rookery("runs", "resume", "served")
    said = ended.words
    assert (
        ended.code == 2
        and f"goes on when it is started: rookery serve {run.path / 'config.json'}" in said
    )


def test_the_page_of_a_folder_that_is_not_there_says_so(
    rookery: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = SimpleNamespace(url="http://127.0.0.1:7700", wait=lambda: None)
    monkeypatch.setattr("rookery.ui.live.server.open_page", lambda *_, **__: nullcontext(page))
    (tmp_path / "runs").mkdir()
    said = rookery("ui", tmp_path / "rums").out
    assert "yet: its runs will appear. Did you mean" in said and str(tmp_path / "runs") in said
    assert f"Shows the runs of {tmp_path / 'runs'}." in rookery("ui", tmp_path / "runs").out


def test_no_runs_are_an_answer(rookery: Command, tmp_path: Path) -> None:
    ended = rookery("runs", "list", "--runs-dir", tmp_path / "none")
    assert ended.code == 0 and ended.out == f"No runs in {tmp_path / 'none'}.\n"
    assert rookery("runs", "list", "--runs-dir", tmp_path / "none", "--json").document == []


def test_a_run_is_shown_by_name_or_path(rookery: Command, two_runs: Path) -> None:
    by_name, by_path = rookery("runs", "show", "second"), rookery("runs", "show", "runs/second")
    assert by_name.out == by_path.out and by_name.code == 0
    assert "second  genome, failed\nZeroDivisionError: a bug\n" in by_name.out
    assert "genome/best = 0.25" in by_name.out and '"seed": 3' in by_name.out
    (two_runs / "second").mkdir()  # hides no run
    assert rookery("runs", "show", "second").out == by_name.out
    shown = rookery("runs", "show", "first").out
    assert "2 rollout, 1 run/created, 1 run/finished" in shown
    assert f'"taskset": "{two_runs / "tasks.jsonl"}"' in shown.replace("\n", "")


def test_what_a_run_holds_commands_no_terminal(rookery: Command, place: Path) -> None:
    """Models, programs and graders write errors, keys and names."""
    evil = "\x1b]0;owned\x07\x9b2J\u202e[/bold]"
    with Run.create(place / "runs", kind="eval", name="evil", config={"model": evil}) as run:
        run.append_blocking("note", {}, key=evil)
        run.log_metrics(1, {f"reward/{evil}": 0.5})
        run.finish("failed", message=f"boom {evil}")
    ended = rookery("runs", "show", "evil")
    assert ended.code == 0 and "boom ␛]0;owned�2J�[/bold]" in ended.out
    assert not set("\x1b\x07\x9b\u202e") & set(ended.out + ended.err)


def test_a_list_at_80_columns_shows_whole_names_and_results(
    rookery: Command, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    name = "a-name-of-forty-characters-to-be-copied-"
    rookery("eval", "tiny", "tasks.jsonl", "--name", name, "--limit", "2")
    mean = json.loads((place / "runs" / name / "report.json").read_text())["models"][0]["mean"]
    row = next(line for line in rookery("runs", "list").out.splitlines() if name in line)
    assert f"{mean:.3f}" in row and len(row) <= 80
    shown = rookery("runs", "show", name).out
    assert f"result: {mean:.3f}" in shown and f"{name}/report.html" in shown
    assert "1 " in shown and shown.index("run/created run/created") < shown.rindex("run/finished")


def test_a_long_result_is_not_cut_and_idle_time_is_not_work(
    rookery: Command, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("rookery.ui.headline.short_result", lambda _: "inconsistent")
    clock = 1e9
    monkeypatch.setattr(time, "time", lambda: clock)
    name = "icm-20261118-054849"
    with Run.create(place / "runs", kind="icm", name=name, config={}) as run:
        run.write_json("report.json", {})
        clock += 500
        run.finish()
    clock += 80_000
    with Run.open(place / "runs" / name) as run:
        clock += 3
        run.finish()
    row = next(line for line in rookery("runs", "list").out.splitlines() if name in line)
    assert "finished" in row and "8 min 23 s" in row and "inconsistent" in row


def test_events_are_exported_as_lines(rookery: Command, two_runs: Path) -> None:
    ended = rookery("runs", "export", "first", "out.jsonl")
    assert ended.out == "4 events written to out.jsonl\n"
    lines = [json.loads(line) for line in (two_runs / "out.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == [
        "run/created", "rollout", "rollout", "run/finished",
    ]  # fmt: skip
    refused = rookery("runs", "export", "first", "no/such/out.jsonl")
    assert refused.code == 2 and "no/such/out.jsonl" in refused.err


@pytest.mark.parametrize("command", ["show", "resume", "export"])
def test_runs_that_are_not_there(rookery: Command, two_runs: Path, command: str) -> None:
    extra = ["out.jsonl"] if command == "export" else []
    ended = rookery("runs", command, "frist", *extra)
    assert ended.code == 2 and "Did you mean runs/first?" in ended.err
    ended = rookery("runs", command, two_runs, *extra)
    assert ended.code == 2 and "is not a run: it has no events.db" in ended.err
    assert not (two_runs / "out.jsonl").exists()


def test_a_resume_that_cannot_start_leaves_the_run_as_it_is(
    rookery: Command, two_runs: Path
) -> None:
    (two_runs / "tasks.jsonl").rename(two_runs / "moved.jsonl")
    assert rookery("runs", "resume", "first").code == 2
    with Run.create(two_runs / "runs", kind="opera", name="x", config={}) as run:
        run.finish()
    ended = rookery("runs", "resume", "x")
    assert ended.code == 2 and "is a run of kind 'opera', which this version cannot" in ended.err
    for name in ("first", "x"):
        with Run.view(two_runs / "runs" / name) as view:
            assert view.status == "finished" and view.last("run/opened") is None


def test_a_run_in_use_is_refused_before_anything_is_loaded(
    rookery: Command, two_runs: Path
) -> None:
    (two_runs / "tasks.jsonl").unlink()
    with Run.open(two_runs / "runs/first"):
        ended = rookery("runs", "resume", "first")
    assert ended.code == 2 and "is in use by process" in ended.err


def test_a_run_whose_config_was_edited_badly(rookery: Command, place: Path) -> None:
    assert rookery("eval", "tiny", "tasks.jsonl", "--limit", "1", "--name", "x").code == 0
    path = place / "runs/x/config.json"
    path.write_text(path.read_text().replace('"limit"', '"limmit"'))
    ended = rookery("runs", "resume", "x")
    assert ended.code == 2 and "limmit is not a key. Did you mean limit?" in ended.err
