"""Files of a run that are pipes, links, endless or damaged keep nobody waiting and tell nothing."""

import errno
import json
import os
import re
import sqlite3
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from starlette.datastructures import URL
from ui.made_runs import make_eval, make_evolve, make_genome, make_icm
from ui.test_live import Visitor

from rookery.errors import RunError
from rookery.runs import Run
from rookery.ui.live.folder import DOCUMENT_BYTES, Curves, RunsFolder, spark
from rookery.ui.live.reading import OpenRun, OpenRuns
from rookery.ui.live.server import open_page

NAMES = (
    "metrics.jsonl", "config.json", "report.json", "progress.json", "labels.jsonl",
    "events.db-journal",
)  # fmt: skip


def make_pipe(file: Path) -> None:
    os.mkfifo(file)


def make_link(file: Path) -> None:
    secret = file.parents[2] / "secret.json"
    secret.write_text("{}")
    file.symlink_to(secret)


def make_large(file: Path) -> None:
    with file.open("wb") as opened:
        opened.truncate(DOCUMENT_BYTES + 1)  # takes no room on the disk


@pytest.mark.parametrize(
    ("make", "names", "told"),
    [
        (make_pipe, NAMES, "is not a plain file"),
        (make_link, NAMES, "is a link out of"),
        (make_large, NAMES[1:4], "has 256 MiB"),
    ],
)
def test_a_file_that_must_not_be_read_hides_no_other_run(
    tmp_path: Path, make: Callable[[Path], None], names: tuple[str, ...], told: str
) -> None:
    folder = RunsFolder(tmp_path / "runs")
    make_eval(folder.root, "whole")
    for name in names:
        run = make_eval(folder.root, name)
        (run / name).unlink(missing_ok=True)
        make(run / name)
    folder.refresh()
    rows = {row["id"]: row for row in folder.changes()["runs"]}
    assert rows["whole"]["status"] == "done"
    for name in names:
        said = re.escape(f"{folder.root / name / name} {told}")
        assert rows[name]["status"] == "unreadable" and re.match(said, rows[name]["reason"])
        with pytest.raises(RunError, match=said):
            OpenRuns(folder).get(name)


def test_a_lock_that_is_a_pipe_or_cannot_be_read_hides_no_other_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_eval(tmp_path, "piped")
    (tmp_path / "piped" / "run.lock").unlink()
    make_pipe(tmp_path / "piped" / "run.lock")
    folder = RunsFolder(tmp_path)
    with Run.create(tmp_path, kind="eval", name="live", config={}):
        folder.refresh()
        make_eval(tmp_path, "late")
        monkeypatch.setattr("rookery.runs.disk.FileLock", refuse)
        folder.refresh()
    rows = {row["id"]: row for row in folder.changes()["runs"]}
    assert rows["piped"]["status"] == "done" and "late" in rows
    assert rows["live"]["reason"].endswith("run.lock cannot be read: Permission denied.")


def refuse(path: Path, **_: object) -> None:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)


def test_a_run_that_another_was_made_from_keeps_nobody_waiting(tmp_path: Path) -> None:
    source = make_eval(tmp_path, "source")
    with Run.create(tmp_path, kind="sft", name="made", config={"init": f"{source}/x"}) as run:
        run.finish()
    (source / "config.json").unlink()
    make_pipe(source / "config.json")
    [told] = OpenRun(tmp_path / "made", "made").overview()["made_from"]
    assert (told["id"], told["made_from"]) == ("source", [])


def test_what_was_read_before_a_damage_is_not_read_again(tmp_path: Path) -> None:
    run = make_evolve(tmp_path)
    whole, opened = OpenRun(run, "programs").view(), OpenRun(run, "programs")
    with sqlite3.connect(run / "events.db") as database:
        late = "SELECT seq FROM events WHERE kind = 'attempt' ORDER BY seq DESC LIMIT 1 OFFSET 1"
        [seq] = database.execute(late).fetchone()
        [good] = database.execute("SELECT payload FROM events WHERE seq = ?", [seq]).fetchone()
        put = "UPDATE events SET payload = ? WHERE seq = ?"
        database.execute(put, ["[1", seq])
        database.commit()
        for _ in range(2):
            with pytest.raises(RunError, match="is damaged"):
                opened.view()
        database.execute(put, [good, seq])
    database.close()
    assert opened.view()["lists"] == whole["lists"]


def test_a_run_that_is_a_link_itself_is_shown(tmp_path: Path) -> None:
    """Large disks are often elsewhere."""
    run = make_icm(tmp_path / "disk")
    (run / "labels.jsonl").rename(run / "first.jsonl")
    (run / "labels.jsonl").symlink_to("first.jsonl")
    folder = RunsFolder(tmp_path / "runs")
    folder.root.mkdir()
    (folder.root / "linked").symlink_to(run)
    assert OpenRuns(folder).get("linked").labels()["labels"]


def test_a_gigabyte_without_lines_is_told_apart_soon(tmp_path: Path) -> None:
    run = make_icm(tmp_path)
    for name in ("metrics.jsonl", "labels.jsonl"):
        with (run / name).open("wb") as file:
            file.truncate(1 << 30)  # takes no room on the disk
    tracemalloc.start()
    assert spark(run / "metrics.jsonl", ("icm/",)) == ("", [])
    with pytest.raises(RunError, match="line 1 is damaged"):
        Curves(run / "metrics.jsonl").update()
    with pytest.raises(ValueError, match="Expecting value"):
        OpenRun(run, "labels").labels()
    assert tracemalloc.get_traced_memory()[1] < 64 << 20
    tracemalloc.stop()


def test_a_program_that_is_a_pipe_keeps_nobody_waiting(tmp_path: Path) -> None:
    run = make_evolve(tmp_path)
    opened = OpenRun(run, "programs")
    for blob in (run / "blobs").iterdir():
        blob.unlink()
        os.mkfifo(blob)
    assert opened.program("p2")["code"] == ""


def test_two_candidates_are_compared_without_reading_what_the_others_answered(
    tmp_path: Path,
) -> None:
    run = make_genome(tmp_path)
    with sqlite3.connect(run / "events.db") as database:
        wrong = "UPDATE events SET seq = 0, key = 'v-other|t|said', payload = '[1' WHERE seq = ?"
        first = "SELECT min(seq) FROM events WHERE kind = 'rollout'"
        database.execute(wrong, database.execute(first).fetchone())
    database.close()
    assert len(OpenRun(run, "demo").duel("")["tasks"]) == 19


def test_a_long_error_is_cut_in_a_list_and_whole_in_its_event(tmp_path: Path) -> None:
    programs = OpenRun(make_evolve(tmp_path, text="x" * 5_000), "programs")
    [failed] = [p for p in programs.view()["lists"]["programs"] if p["state"] == "failed"]
    assert len(failed["failure"][1]) == 1_000
    [seq] = [
        row[0] for row in programs.events(kind="attempt", text="timeout", offset=0, limit=9)["rows"]
    ]
    assert len(programs.event(seq)["payload"]["data"]["failure"]["message"]) > 5_000


def test_a_long_text_of_one_run_does_not_fill_the_list(tmp_path: Path) -> None:
    with Run.create(tmp_path, kind="eval", name="fat", config={"model": "m" * 1_000_000}) as run:
        run.log_metrics(0, {"reward/" + "m" * 100_000: 0.5})
        run.finish("failed", message="boom " * 200_000)
    folder = RunsFolder(tmp_path)
    folder.refresh()
    assert len(json.dumps(folder.changes())) < 6_000
    assert folder.changes()["runs"][0]["reason"].startswith("boom boom")


def test_the_grid_of_a_running_evolution_is_that_of_its_last_checkpoint(tmp_path: Path) -> None:
    run = make_evolve(tmp_path)
    opened = OpenRun(run, "programs")
    assert opened.report()["cells"] == []
    before = opened.pulse()
    for number, grid in ((9, {"0-0": "p1"}), (10, {"0-2": "p2", "1-1": "gone"})):
        folder = run / "checkpoints" / f"checkpoint_{number}"
        folder.mkdir(parents=True)
        (folder / "metadata.json").write_text(json.dumps({"island_feature_maps": [grid, {}]}))
    assert opened.pulse() != before, "so that a page asks again"
    report = opened.report()
    assert report["cells"] == [{"island": 0, "cell": "0-2", "program": "p2", "score": 0.2}]
    assert report["bins"] == [1, 3] and not report["is_written"]


def test_the_token_leads_to_no_other_site(tmp_path: Path) -> None:
    with open_page(tmp_path, port=0) as page:
        visitor = Visitor(page)
        for path in ("//elsewhere.example/", "/api/runs"):
            response, _ = visitor.ask(f"{path}?{visitor.query}")
            assert (response.status, response.headers["Location"]) == (303, "/")
        response, _ = visitor.ask("/", headers={"Host": "elsewhere.example"})
        assert response.status == 401, "a name that leads here brings no cookie"


def test_no_host_that_a_visitor_names_opens_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older web frameworks put it before the path: what they call the path begins as the host
    ends."""
    with open_page(tmp_path, port=0) as page:
        monkeypatch.setattr("starlette.requests.Request.url", URL("http://x/static//api/runs"))
        response, _ = Visitor(page).ask("/api/runs", headers={"Host": "x/static/"})
        assert response.status == 401
