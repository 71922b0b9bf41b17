"""The run: created, resumed, viewed; its status comes from its events and its lock."""

import asyncio
import json
import os
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rookery.errors import ConfigError, RunError
from rookery.runs import NewEvent, Run
from rookery.runs.run_folder import (
    TakenPart,
    find_changes,
    find_sources,
    in_folder,
    resolve_references,
)


def make(root: Path, name: str = "poet") -> Run:
    return Run.create(root, kind="genome", name=name, config={"population": 8, "seed": 1})


def test_what_is_written_is_on_disk_before_it_has_its_name_and_its_name_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a power cut would test: of a file, of a folder's files, and of a blob."""
    done: list[str] = []
    sync, replace, rename = os.fsync, os.replace, os.rename

    def record_sync(descriptor: int) -> None:
        done.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        sync(descriptor)

    def record_name(move: Callable[..., None], *paths: Path) -> None:
        done.append("named")
        move(*paths)

    with make(tmp_path) as run:
        monkeypatch.setattr(os, "fsync", record_sync)
        monkeypatch.setattr(os, "replace", partial(record_name, replace))
        monkeypatch.setattr(os, "rename", partial(record_name, rename))
        for write in (
            lambda: run.write_json("report.json", {"score": 1}),
            lambda: run.write_folder("winner", lambda f: (f / "a.txt").write_text("a")),
            lambda: run.blobs.put_bytes(b"program"),
        ):
            done.clear()
            write()
            named = done.index("named")
            assert "file" in done[:named] and "folder" in done[named:], done


def test_a_run_holds_what_was_put_into_it(tmp_path: Path) -> None:
    with make(tmp_path / "runs") as run:
        event = run.append_blocking("label", {"task": "t1"}, key="t1")
        pair = run.append_many_blocking(
            [NewEvent(kind="score", payload={"i": i}) for i in range(2)]
        )
        run.log_metrics(0, {"loss/policy": 0.5})
        digest = run.blobs.put_bytes(b"program")
        run.write_json("report.json", {"score": 0.25, "name": "Grüße"})
        run.write_text("report.html", "<p>")
        run.finish(message="all done")
    with Run.view(tmp_path / "runs" / "poet") as view:
        assert (view.kind, view.name, view.status) == ("genome", "poet", "finished")
        assert view.config == {"population": 8, "seed": 1}
        assert view.get("label", "t1") == event
        assert list(view.events("score")) == pair
        assert [row.values for row in view.metrics()] == [{"loss/policy": 0.5}]
        assert view.blobs.read_bytes(digest, verify=True) == b"program"
        assert view.read_json("report.json") == {"score": 0.25, "name": "Grüße"}
        assert view.ending is not None and view.ending.payload["message"] == "all done"
    found = {p.name for p in view.path.iterdir()} - {"events.db-wal", "events.db-shm", ".tmp"}
    assert found == {
        *("config.json", "events.db", "blobs", "metrics.jsonl", "run.lock"),
        *("report.json", "report.html"),
    }
    assert json.loads((view.path / "config.json").read_text()) == {"population": 8, "seed": 1}


def test_status_follows_the_events(tmp_path: Path) -> None:
    with make(tmp_path) as run:
        assert run.status == "running"
    with Run.view(run.path) as view:
        seen = {"closed without finish": view.status}
        with Run.open(run.path) as run:
            seen["opened"] = view.status
            run.finish("failed", message="no GPU")
            seen["failed"] = view.status
        seen["closed"] = view.status
        with Run.open(run.path) as run:
            seen["opened again"] = view.status
            assert view.ending is None
            run.finish()
        seen["finished"] = view.status
    assert seen == {
        "closed without finish": "interrupted",
        "opened": "running",
        "failed": "failed",
        "closed": "failed",
        "opened again": "running",
        "finished": "finished",
    }


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ValueError("bad reward"), "failed"),
        (RunError("mine"), "failed"),
        (KeyboardInterrupt(), "interrupted"),
        (asyncio.CancelledError(), "interrupted"),
    ],
)
def test_an_error_that_leaves_the_block_is_the_outcome(
    tmp_path: Path, error: BaseException, status: str
) -> None:
    with pytest.raises(type(error)), make(tmp_path) as run:
        raise error
    with Run.view(run.path) as view:
        assert view.status == status
        assert view.ending is not None
        assert view.ending.payload["message"] == f"{type(error).__name__}: {error}"


def test_an_error_after_finish_does_not_change_the_outcome(tmp_path: Path) -> None:
    with pytest.raises(ValueError), make(tmp_path) as run:
        run.finish()
        raise ValueError
    with Run.view(run.path) as view:
        assert view.status == "finished"


def test_create_refuses_what_is_not_its_own(tmp_path: Path) -> None:
    make(tmp_path).close()
    with pytest.raises(RunError, match="already holds a run: resume it"):
        make(tmp_path)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("x")
    with pytest.raises(RunError, match=r"not a run and not empty \(it holds chapter\.tex\)"):
        make(tmp_path, "thesis")
    assert [p.name for p in (tmp_path / "thesis").iterdir()] == ["chapter.tex"]
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunError, match="Making"):
        make(tmp_path, "file")
    (tmp_path / "empty").mkdir()
    make(tmp_path, "empty").close()


@pytest.mark.parametrize("name", ["../up", "a/b", ".hidden", "-x", "two words", "."])
def test_names_are_plain(tmp_path: Path, name: str) -> None:
    with pytest.raises(RunError, match="one word of at most 200 letters"):
        make(tmp_path, name)
    with make(tmp_path) as run:
        with pytest.raises(RunError, match="one word of at most 200 letters"):
            run.write_text(name, "x")
        with pytest.raises(RunError, match="one word of at most 200 letters"):
            run.read_json(name)
    assert [p.name for p in tmp_path.iterdir()] == ["poet"]


@pytest.mark.parametrize("name", ["config.json", "events.db", "run.lock", "metrics.jsonl", "blobs"])
def test_the_runs_own_files_are_not_written_over(tmp_path: Path, name: str) -> None:
    with make(tmp_path) as run, pytest.raises(RunError, match="the run writes that file itself"):
        run.write_text(name, "x")


def test_runs_without_a_name_get_different_ones(tmp_path: Path) -> None:
    runs = [Run.create(tmp_path, kind="icm", config={}) for _ in range(3)]
    assert len({run.name for run in runs}) == 3
    assert all(run.name.startswith("icm-20") and run.path.name == run.name for run in runs)
    for run in runs:
        run.close()


def test_a_config_that_is_not_json_creates_nothing(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r'The config: \["limit"\] is inf'):
        Run.create(tmp_path, kind="icm", name="x", config={"limit": float("inf")})
    assert list(tmp_path.iterdir()) == []


def test_a_report_that_is_not_json_leaves_the_old_one(tmp_path: Path) -> None:
    with make(tmp_path) as run:
        run.write_json("report.json", {"score": 1})
        with pytest.raises(RunError, match="nan"):
            run.write_json("report.json", {"score": float("nan")})
        assert run.read_json("report.json") == {"score": 1}


def test_a_folder_is_replaced_whole_and_disturbs_no_stage(tmp_path: Path) -> None:
    def fill(name: str) -> Callable[[Path], object]:
        return lambda folder: (folder / name).write_bytes(b"weights")

    def fail(folder: Path) -> None:
        (folder / "half").write_bytes(b"x")
        raise ValueError("mine")

    with make(tmp_path) as run, run.blobs.stage() as staged:
        for name in ("first", "second"):
            winner = run.write_folder("winner", fill(name))
            assert [p.name for p in winner.iterdir()] == [name]
        with pytest.raises(ValueError, match="mine"):
            run.write_folder("winner", fail)
        assert [p.name for p in winner.iterdir()] == ["second"]
        with pytest.raises(RunError, match="the run writes that folder itself"):
            run.write_folder("blobs", fill("x"))
        assert list((run.path / ".tmp").iterdir()) == [staged]


def test_a_missing_run_suggests_the_nearest(tmp_path: Path) -> None:
    make(tmp_path).close()
    for opening in (Run.open, Run.view):
        with pytest.raises(RunError, match=r"no run .*poett\. Did you mean .*poet\?"):
            opening(tmp_path / "poett")
        with pytest.raises(RunError, match="rookery runs list"):
            opening(tmp_path / "somewhere" / "else")
        with pytest.raises(RunError, match=r"is not a run: it has no events\.db"):
            opening(tmp_path)


def test_kinds_of_the_run_itself_are_reserved(tmp_path: Path) -> None:
    with make(tmp_path) as run, pytest.raises(RunError, match="kinds in run/"):
        run.append_blocking("run/finished", {"outcome": "finished"})


def test_a_wrong_outcome_is_refused(tmp_path: Path) -> None:
    with make(tmp_path) as run, pytest.raises(RunError, match="finished, failed, interrupted"):
        run.finish("done")  # type: ignore[arg-type]


def test_a_closed_run_takes_nothing(tmp_path: Path) -> None:
    run = make(tmp_path)
    run.close()
    run.close()
    with pytest.raises(RunError, match="does not own the run"):
        run.append_blocking("label", {})


def test_the_folder_of_the_process_may_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with Run.create(Path("runs"), kind="icm", name="x", config={}) as run:
        monkeypatch.chdir("/")
        run.append_blocking("label", {})
        run.write_text("report.html", "x")
    assert (tmp_path / "runs" / "x" / "report.html").exists()


def test_events_that_are_set_aside_count_no_longer(tmp_path: Path) -> None:
    with Run.create(tmp_path, kind="eval", name="x", config={}) as run:
        for key, score in (("a", 1), ("b", 2)):
            run.append_blocking("score", {"score": score}, key=key)
        run.append_blocking("note", {"text": "kept"})
        run.set_aside(["score"], keep=lambda event: event.key == "b")
        assert [e.key for e in run.events("score")] == ["b"] and run.counts()["note"] == 1
        run.append_blocking("score", {"score": 3}, key="a")
        run.set_aside(["score"])
    with Run.open(tmp_path / "x") as run:
        former = run.get("former/score", "a"), run.get("former/score", "b")
        assert [event and event.payload["score"] for event in former] == [3, 2], "the newest"
        assert [e.payload["score"] for e in run.events("former/score")] == [1, 2, 3]
        assert list(run.events("score")) == []


# A run goes on under its own config; what the loop names may change.


CONFIG = {"steps": 100, "seed": 1, "stages": [{"type": "ga", "generations": 3}], "engine": {"a": 1}}


def finished(root: Path) -> Path:
    with Run.create(root, kind="grpo", name="poet", config=CONFIG) as run:
        run.append_blocking("step", {}, key="99")
        run.finish()
    return run.path


def test_a_finished_run_is_extended_and_keeps_what_it_has(tmp_path: Path) -> None:
    path = finished(tmp_path)
    longer = {**CONFIG, "steps": 200, "stages": [{"type": "ga", "generations": 9}]}
    with Run.open(path) as run:
        changes = run.extend(longer, may_change=("steps", "stages.*.generations"))
        assert changes == {"steps": (100, 200), "stages.0.generations": (3, 9)}
        assert run.config == longer and run.status == "running"
        assert run.extend(longer, may_change=()) == {}, "no change needs no leave"
    with Run.open(path) as run:
        assert run.config == longer and run.get("step", "99") is not None
        [event] = run.events("run/extended")
        assert event.payload["changes"]["steps"] == {"from": 100, "to": 200}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seed": 2}, r"seed is 1 there, 2 here\. Only steps may change"),
        ({"steps": 200, "engine": {"a": 2}}, r"engine\.a is 1 there, 2 here"),
        ({"stages": []}, r"stages is \[\{.*there, \[\] here"),
        ({"seed": True}, r"seed is 1 there, true here"),
        ({"floors": {"math": 0.9}}, r"floors is null there, .*0\.9.* here"),
        ({"engine": {"a": 1, "b": 2}}, r"engine\.b is null there, 2 here"),
    ],
)
def test_another_config_is_refused_and_nothing_changes(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    with Run.open(finished(tmp_path)) as run:
        with pytest.raises(RunError, match=words):
            run.extend({**CONFIG, **change}, may_change=("steps",))
        assert run.config == CONFIG and not list(run.events("run/extended"))


def test_a_loop_that_names_nothing_cannot_be_extended(tmp_path: Path) -> None:
    with Run.open(finished(tmp_path)) as run, pytest.raises(RunError, match="None of it may"):
        run.extend({**CONFIG, "steps": 200}, may_change=())


def test_a_new_key_and_a_lost_one_are_changes() -> None:
    assert find_changes({"a": 1}, {"a": 1, "b": 2}) == {"b": (None, 2)}
    assert find_changes({"a": {}}, {"a": {"b": 2}}) == {"a.b": (None, 2)}
    assert find_changes({"a": 1}, {"a": 1, "b": None}) == {}
    assert find_changes({"a": 1, "b": 2}, {"a": 1}) == {"b": (2, None)}
    assert find_changes({"a": [1, [2, 3]]}, {"a": [1, [2, 4]]}) == {"a.1.1": (3, 4)}


# `run:NAME/PART` in configs, and which runs a run was made from.


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
        ("run:tutor//etc", "the run has no /etc"),
    ],
)
def test_a_reference_to_nothing_says_what_there_is(
    runs_dir: Path, text: str, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        resolve({"init": {"path": text}}, runs_dir)


def test_a_part_that_is_not_there_yet_says_how_to_get_it(runs_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"ended: .* `rookery runs resume \S+/tutor`\.$"):
        resolve({"init": "run:tutor/trained"}, runs_dir)
    with Run.create(runs_dir, kind="sft", name="tutor.first", config={}) as run:
        (run.path / "trained").mkdir()
    with Run.open(runs_dir / "tutor") as run:
        run.write_json("report.json", {})
    with pytest.raises(ConfigError, match=r"winner\. Its steps have: run:tutor\.first/trained\.$"):
        resolve({"init": "run:tutor/trained"}, runs_dir)


@pytest.mark.parametrize("text", ["run: the program", "run:", "run:../secret/winner", "rerun:x"])
def test_other_texts_stay(runs_dir: Path, text: str) -> None:
    assert resolve({"prompt": text}, runs_dir) == {"prompt": text}


def test_a_run_knows_which_runs_it_was_made_from(runs_dir: Path) -> None:
    config = resolve({"init": {"path": "run:tutor/winner"}, "seed": 1, "data": ["/etc"]}, runs_dir)
    config["prompt"] = f"/no_think {'Answer in words. ' * 20}Use and/or."
    assert find_sources(config) == [TakenPart("init.path", runs_dir / "tutor", "winner")]
