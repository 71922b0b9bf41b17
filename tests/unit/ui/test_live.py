"""`rookery ui` without a browser: who may ask, what is refused, what the answers hold."""

import gzip
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from asyncio import CancelledError
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from hashlib import sha256
from html import escape
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from threading import Event, Thread
from typing import Any
from urllib.parse import urlsplit

import pytest
from ui.made_runs import (
    HOSTILE,
    make_eval,
    make_evolve,
    make_genome,
    make_grpo,
    make_icm,
    read_saved,
)

import rookery
from rookery.errors import ConfigError, RookeryError, RunError
from rookery.runs import NewEvent, Run
from rookery.ui.live.export import (
    MODULES,
    export_run,
    inline,
    join_modules,
    read_file,
    render_run,
)
from rookery.ui.live.folder import Curves, RunsFolder, describe_run, thin
from rookery.ui.live.reading import OpenRun
from rookery.ui.live.server import LivePage, open_page

DEEP = "[" * 100_000 + "\n"


class Visitor:
    """Asks a page as a browser does, with its cookie once it has one."""

    def __init__(self, page: LivePage) -> None:
        parts = urlsplit(page.url)
        self.place = (parts.hostname or "", parts.port or 0)
        self.query = parts.query
        self.cookie = ""

    def ask(
        self,
        path: str,
        *,
        method: str = "GET",
        body: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[HTTPResponse, bytes]:
        connection = HTTPConnection(*self.place, timeout=20)
        cookie = {"Cookie": self.cookie} if self.cookie else {}
        connection.request(method, path, body=body, headers={**cookie, **(headers or {})})
        response = connection.getresponse()
        answer = response.read()
        connection.close()
        return response, answer

    def enter(self) -> "Visitor":
        response, _ = self.ask(f"/?{self.query}")
        assert response.status == 303
        assert response.headers["Location"] == "/", "the token leaves the address"
        self.cookie = response.headers["Set-Cookie"].partition(";")[0]
        return self

    def get(self, path: str) -> Any:
        response, body = self.ask(f"/api/{path}")
        assert response.status == 200, body
        return json.loads(body)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("folder") / "runs"
    for make in (make_genome, make_grpo, make_icm, make_evolve, make_eval):
        make(root)
    (root.parent / "secret.json").write_text("{}")
    return root


@pytest.fixture(scope="module")
def page(runs: Path) -> Iterator[LivePage]:
    with open_page(runs, port=0) as opened:
        yield opened


@pytest.fixture
def visitor(page: LivePage) -> Visitor:
    return Visitor(page).enter()


def test_nobody_is_let_in_without_the_token(page: LivePage) -> None:
    visitor = Visitor(page)
    for path in ("/", "/api/runs", "/api/runs/demo/report", "/?token=guess", "/api/stream"):
        response, body = visitor.ask(path)
        assert response.status == 401, path
        assert b"demo" not in body
    assert "HttpOnly" in (visitor.ask(f"/?{visitor.query}")[0].headers["Set-Cookie"])


def test_pages_only_read_and_run_no_script_but_their_own(visitor: Visitor) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert visitor.ask("/api/runs", method=method)[0].status == 405
    for path in ("/", "/api/runs", "/static/page.js"):
        policy = visitor.ask(path)[0].headers["Content-Security-Policy"]
        assert "default-src 'none'; script-src 'self'; style-src 'self'" in policy
        assert "unsafe" not in policy
    html = visitor.ask("/")[1].decode()
    assert not re.search(r"<script(?![^>]* src=)|\son\w+=|https?://", html)


@pytest.mark.parametrize(
    "name",
    ["..", "%2e%2e", "../secret.json", "..%2fsecret.json", "%2fetc%2fpasswd", "nope", "a%00b"],
)
def test_names_never_become_paths(visitor: Visitor, name: str) -> None:
    for path in (f"/api/runs/{name}", f"/api/runs/{name}/report", f"/static/{name}"):
        assert visitor.ask(path)[0].status in {400, 404}, path
    for part in ("program/..%2f..%2fx", "event/99999", "step/77", "duel?candidate=../x"):
        response, body = visitor.ask(f"/api/runs/demo/{part}")
        assert response.status in {200, 404} and b"Traceback" not in body


def test_every_module_of_the_page_is_served_and_exported(visitor: Visitor) -> None:
    static = Path(str(rookery.__file__)).parent / "ui" / "live" / "static"
    modules = {path.stem for path in static.glob("*.js")} - {"closed"}  # of the page before a key
    assert sorted(MODULES) == sorted(modules)
    index = visitor.ask("/")[1].decode()
    files = re.findall(r"/static/[\w.?=]+", index)
    assert [file.partition("?")[0] for file in files] == [
        "/static/page.css", "/static/live.css", "/static/page.js",
    ]  # fmt: skip
    for file in [*files, "/static/echarts.js"]:
        response, _ = visitor.ask(file)
        assert response.status == 200 and "immutable" in response.headers["Cache-Control"]
    script = gzip.decompress(visitor.ask(files[2])[1]).decode()
    assert script == join_modules() and "innerHTML" not in script, "no text becomes markup"


def test_the_table_says_how_each_run_stands(visitor: Visitor) -> None:
    rows = {row["id"]: row for row in visitor.get("runs")["runs"]}
    assert {name: row["status"] for name, row in rows.items()} == {
        "demo": "done",
        "train": "failed",
        "labels": "done",
        "programs": "killed",
        "scores": "done",
    }
    assert rows["train"]["reason"].startswith("No server is left.")
    assert rows["train"]["progress"] | {"left_s": 0} == {
        "done": 4, "total": 5, "noun": "step", "left_s": 0,
    }  # fmt: skip
    demo = rows["demo"]["result"]
    assert (demo["mean"], round(demo["low"], 2), round(demo["high"], 2)) == (0.91, 0.88, 0.94)
    assert rows["demo"]["spark_of"] == "genome/best" and len(rows["demo"]["spark"]) == 4


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", '{"stages": 3}'),
        ("report.json", '{"rows": [null]}'),
        ("report.json", '{"rows": [{"is_winner": true, "mean": NaN}]}'),
        ("metrics.jsonl", '{"step": null, "time_s": 1, "genome/best": null}\n'),
        ("metrics.jsonl", '{"step": 1e999, "time_s": 1, "genome/best": 1}\n'),
        ("progress.json", '{"done": 3, "total": "x"}'),
        ("labels.jsonl", '{"id'),
        ("labels.jsonl", DEEP),
        ("metrics.jsonl", DEEP),
        ("config.json", '{"a":' * 900 + "1" + "}" * 900),
    ],
)
def test_a_file_of_another_form_gets_a_sentence_and_hides_no_other_run(
    tmp_path: Path, file: str, content: str
) -> None:
    make_genome(tmp_path, "good")
    (make_genome(tmp_path, "bad") / file).write_text(content)
    parts = ("", "/view", "/report", "/curves", "/labels", "/event/99999999999999999999")
    with open_page(tmp_path, port=0) as page:
        visitor = Visitor(page).enter()
        assert {row["name"] for row in visitor.get("runs")["runs"]} >= {"good", "bad"}
        for part in parts:
            response, body = visitor.ask(f"/api/runs/bad{part}")
            assert response.status in {200, 404, 422}, (part, body)
            json.loads(body, parse_constant=pytest.fail)
    try:
        export_run(tmp_path / "bad", tmp_path / "bad.html")
    except RookeryError as error:
        assert "bad" in str(error) or "report.json" in str(error)
    else:
        saved = read_saved((tmp_path / "bad.html").read_text())
        json.dumps(saved, allow_nan=False)


def test_half_a_surrogate_pair_is_shown_and_exported(tmp_path: Path) -> None:
    text = "\ud800 <b>"
    make_evolve(tmp_path, text=text)
    with open_page(tmp_path, port=0) as page:
        programs = Visitor(page).enter().get("runs/programs/view")["lists"]["programs"]
    assert programs[-1]["failure"] == ["timeout", f"Over 10 s. {text}"]
    name = os.fsdecode(b"\xff")
    path = make_grpo(tmp_path, text=text, report={"warnings": [text]}).rename(tmp_path / name)
    export_run(path, tmp_path / "out.html")
    saved = read_saved((tmp_path / "out.html").read_text())
    assert re.fullmatch(r"\?~[0-9a-f]{8}", saved["id"]), "no address can have its name"
    folder = RunsFolder(tmp_path)
    folder.refresh()
    assert saved["id"] in {row["id"] for row in folder.changes()["runs"]}
    assert folder.path(saved["id"]) == path


def test_an_answer_does_not_wait_for_what_another_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("first", "second"):
        with Run.create(tmp_path, kind="eval", name=name, config={}):
            pass
    folder, is_reading, may_end = RunsFolder(tmp_path), Event(), Event()
    assert folder.changes()["pending"], "nobody has looked yet"

    def describe(path: Path) -> dict[str, Any]:
        if folder.changes()["runs"]:  # the second of them
            is_reading.set()
            assert may_end.wait(20)
        return describe_run(path)

    monkeypatch.setattr("rookery.ui.live.folder.describe_run", describe)
    reader = Thread(target=folder.refresh)
    reader.start()
    assert is_reading.wait(20)
    folder.refresh(seconds=0.01)
    known = folder.changes()
    assert (len(known["runs"]), known["pending"]) == (1, 1) and reader.is_alive()
    may_end.set()
    reader.join()
    assert len(folder.changes()["runs"]) == 2


def test_a_folder_with_a_name_of_any_kind_is_exported_as_the_page_asks_for_it(
    tmp_path: Path,
) -> None:
    path = make_genome(tmp_path).rename(tmp_path / "a b,ä(1)")
    out = tmp_path / f"{'n' * 250}.html"  # the longest that there is
    export_run(path, out)
    asked = "runs/a%20b%2C%C3%A4(1)"  # `encodeURIComponent`
    assert read_saved(out.read_text())["answers"][asked]["row"]["status"] == "done"
    with pytest.raises(ConfigError, match="cannot be written"):
        export_run(path, out / "below.html")


def test_a_run_that_is_deleted_while_it_is_shown_is_said_to_be_gone(tmp_path: Path) -> None:
    run = make_genome(tmp_path)
    with open_page(tmp_path, port=0) as page:
        visitor = Visitor(page).enter()
        visitor.get("runs/demo")
        connection = HTTPConnection(*visitor.place, timeout=20)
        connection.request("GET", "/api/runs/demo/stream", headers={"Cookie": visitor.cookie})
        stream = connection.getresponse()
        assert stream.readline().startswith(b"data: ")
        shutil.rmtree(run)
        response, body = visitor.ask("/api/runs/demo/view")
        assert response.status == 404 and "is gone" in json.loads(body)["error"]
        assert stream.read().strip() == b"", "the stream ends, so that the page asks again"
        connection.close()
        make_genome(tmp_path, generations=1)
        assert len(visitor.get("runs/demo/view")["lists"]["generations"]) == 2


def test_two_who_follow_one_run_are_both_told(tmp_path: Path) -> None:
    with (
        Run.create(tmp_path, kind="eval", name="a", config={}) as run,
        open_page(tmp_path, port=0) as page,
    ):
        visitors = [Visitor(page).enter() for _ in range(2)]
        assert visitors[0].cookie == visitors[1].cookie
        connections = [HTTPConnection(*visitor.place, timeout=20) for visitor in visitors]
        for connection, visitor in zip(connections, visitors, strict=True):
            connection.request("GET", "/api/runs/a/stream", headers={"Cookie": visitor.cookie})
        streams = [connection.getresponse() for connection in connections]
        first = [stream.readline() for stream in streams]
        run.append_blocking("rollout", {"task": "t", "model": "m", "reward": 1.0})
        for stream, before in zip(streams, first, strict=True):
            assert stream.readline() == b"\n"
            told = json.loads(stream.readline().removeprefix(b"data: "))
            assert told["seq"] == json.loads(before.removeprefix(b"data: "))["seq"] + 1
        assert [len(v.get("runs/a/view")["lists"]["tasks"]) for v in visitors] == [1, 1]
        for connection in connections:
            connection.close()


def test_a_run_of_an_older_version_is_shown_with_what_it_has(tmp_path: Path) -> None:
    """Before steps kept gaps, runs told their progress and genome runs noted versions."""
    path = make_grpo(tmp_path)
    (path / "progress.json").unlink()
    with Run.create(tmp_path, kind="genome", name="old", config={"stages": 2}) as run:
        run.append_blocking("candidate", {"id": "a", "score": 0.5}, key="a")
    with open_page(tmp_path, port=0) as page:
        visitor = Visitor(page).enter()
        rows = {row["id"]: row for row in visitor.get("runs")["runs"]}
        assert rows["train"]["progress"] is None and rows["old"]["status"] == "killed"
        assert visitor.get("runs/train/step/0")["gap"] is None
        [candidate] = visitor.get("runs/old/view")["lists"]["candidates"]
        assert candidate["score"] == 0.5 and candidate["parents"] is None
    for name in ("train", "old"):
        assert read_saved(render_run(tmp_path / name))["id"] == name


def test_only_what_changed_is_read_again(tmp_path: Path) -> None:
    make_eval(tmp_path, "a")
    folder = RunsFolder(tmp_path)
    folder.refresh()
    first = folder.changes()
    assert [row["id"] for row in first["runs"]] == ["a"]
    folder.refresh()
    assert folder.changes(since=first["version"])["runs"] == []
    make_eval(tmp_path, "b")
    folder.refresh()
    assert [row["id"] for row in folder.changes(since=first["version"])["runs"]] == ["b"]


def test_a_page_that_a_server_before_this_one_told_of_runs_gets_them_all(tmp_path: Path) -> None:
    gone = make_eval(tmp_path, "gone")
    before = RunsFolder(tmp_path)
    before.refresh()
    known = before.changes()["version"]
    assert not before.changes(since=known)["is_whole"]
    shutil.rmtree(gone)
    make_eval(tmp_path, "made")
    time.sleep(0.002)
    folder = RunsFolder(tmp_path)
    folder.refresh()
    fresh = folder.changes(since=known)
    assert fresh["is_whole"] and [row["id"] for row in fresh["runs"]] == ["made"]
    assert not folder.changes(since=fresh["version"])["is_whole"]


def test_a_run_that_lost_its_process_is_seen_though_no_file_changed(tmp_path: Path) -> None:
    folder = RunsFolder(tmp_path)
    run = Run.create(tmp_path, kind="eval", name="a", config={})
    folder.refresh()
    assert folder.changes()["runs"][0]["status"] == "running"
    run.close()  # without a word of its end
    folder.refresh()
    assert folder.changes()["runs"][0]["status"] == "killed"


def test_a_run_that_goes_on_has_no_time_left_of_the_process_before(tmp_path: Path) -> None:
    told = {"done": 9, "total": 40, "noun": "step", "left_s": 900.0}
    with Run.create(tmp_path, kind="eval", name="one", config={}) as run:
        run.write_json("progress.json", {**told, "time_s": time.time()})
    with Run.open(tmp_path / "one") as run:
        assert describe_run(run.path)["progress"] == {**told, "left_s": None}
        run.write_json("progress.json", {**told, "time_s": time.time()})
        assert describe_run(run.path)["progress"]["left_s"] > 890


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1), CancelledError()])
def test_what_stops_a_run_is_told_in_words(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)), Run.create(tmp_path, kind="eval", name="one", config={}):
        raise error
    row = describe_run(tmp_path / "one")
    assert (row["status"], row["reason"]) == ("stopped", "Stopped before its end.")


def test_views_send_only_what_is_new(visitor: Visitor) -> None:
    whole = visitor.get("runs/demo/view")
    assert len(whole["lists"]["candidates"]) == 11 and whole["facts"]["winner"] == "g003-c02"
    later = visitor.get(f"runs/demo/view?after={whole['seq']}")
    assert later["lists"] == {"candidates": [], "generations": []}
    duel = visitor.get("runs/demo/duel")
    assert (duel["founder"], duel["candidate"], len(duel["tasks"])) == ("founder-b", "g003-c02", 20)


@pytest.mark.parametrize("make", [make_genome, make_evolve, make_icm, make_eval])
def test_a_view_in_parts_is_the_view(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    path = make(tmp_path)
    whole, opened = OpenRun(path, "a").view(), OpenRun(path, "a")
    known: dict[str, dict[str, Any]] = {name: {} for name in whole["lists"]}
    part: dict[str, Any] = {"seq": 0, "is_more": True}
    num_parts = 0
    while part["is_more"]:
        part = opened.view(after=part["seq"], seconds=0)
        num_parts += 1
        for name, rows in part["lists"].items():
            known[name] |= {row["id"]: row for row in rows}
    assert num_parts > 3 and part["facts"] == whole["facts"]
    assert {name: list(rows.values()) for name, rows in known.items()} == whole["lists"]

    known = {name: {} for name in whole["lists"]}
    part = {"seq": 0, "is_more": True}
    while part["is_more"]:
        part = opened.view(after=part["seq"], most=3)
        assert 0 < sum(map(len, part["lists"].values())) < 12  # an event changes several
        for name, rows in part["lists"].items():
            known[name] |= {row["id"]: row for row in rows}
    by_id = {name: {row["id"]: row for row in rows} for name, rows in whole["lists"].items()}
    assert known == by_id and part["facts"] == whole["facts"]


@pytest.mark.parametrize(("kind", "shown"), [("eval", "first"), ("pipeline", "second")])
def test_the_list_shows_the_best_model_or_the_last_step(
    tmp_path: Path, kind: str, shown: str
) -> None:
    means = {"base": -1.0, "first": 0.0, "second": -0.5}
    with Run.create(tmp_path, kind=kind, name="x", config={}) as run:
        models = [{"name": name, "mean": mean} for name, mean in means.items()]
        run.write_json("report.json", {"models": models})
        run.finish()
    result = describe_run(tmp_path / "x")["result"]
    assert result["label"] == f"mean reward, {shown}" and result["mean"] == means[shown]


def test_answers_that_are_drawn_for_pass_at_k_do_not_replace_what_was_measured(
    tmp_path: Path,
) -> None:
    path = make_genome(tmp_path)
    with Run.open(path) as run:
        rollouts = list(run.events("rollout"))
        drawn = [{**event.payload, "reward": 1.0 - event.payload["reward"]} for event in rollouts]
        keys = [f"{event.key}|1" for event in rollouts]
        news = [
            NewEvent(kind="rollout", key=k, payload=p) for k, p in zip(keys, drawn, strict=True)
        ]
        run.submit(news).result()
        run.finish()
    measured = {event.seq: event.payload["reward"] for event in rollouts}
    tasks = OpenRun(path, "demo").duel("")["tasks"]
    assert tasks and all(measured[row[2]] == row[1] for row in tasks)


def test_programs_and_completions_are_read(visitor: Visitor) -> None:
    program = visitor.get("runs/programs/program/p2")
    assert program["diff"][-2:] == ["-x = 1 # ", "+x = 2 # "]
    rows = {row["id"]: row for row in visitor.get("runs/programs/view")["lists"]["programs"]}
    assert rows["p3"]["failure"][0] == "timeout" and rows["p2"]["parent"] == "p1"
    step = visitor.get("runs/train/step/3")
    assert step["is_whole"] and step["gap"]["answers"][0][0] == ["seven", 0.01]
    assert visitor.get("runs/train/step/0")["groups"][0]["rollouts"][0]["text"] == "five "
    assert visitor.get("runs/labels/labels")["labels"][0]["margin"] == 0.5


def test_a_sweep_shows_the_completions_of_the_chosen_adapter(tmp_path: Path) -> None:
    """All of them from its run; the examples of the report where that is gone."""

    def sweep(*names: str) -> dict[str, Any]:
        return {"sweep": {"adapters": [{"name": n, "is_chosen": n == names[0]} for n in names]}}

    path = make_grpo(tmp_path, "swept", steps=1, report=sweep("hot", "cold"))
    make_grpo(path / "adapters", "hot", steps=2, text="hot")
    make_grpo(path / "adapters", "cold", steps=2, text="cold")
    run = OpenRun(path, "swept")
    step = run.step(1)
    assert step["is_whole"] and step["groups"][0]["rollouts"][0]["text"] == "seven hot"
    saved = read_saved(render_run(path))["answers"]
    assert saved["runs/swept/step/1"]["groups"] == step["groups"] and "runs/swept/step/0" in saved
    shutil.rmtree(path / "adapters")
    assert run.step(1)["groups"][0]["rollouts"][0]["text"].startswith("first line")
    make_grpo(tmp_path, "outside", text="secret")
    for number, name in enumerate(("../../outside", "..")):
        hostile = make_grpo(tmp_path, f"hostile-{number}", report=sweep(name))
        (hostile / "adapters").mkdir()
        assert "secret" not in json.dumps(OpenRun(hostile, "hostile").step(1))


def test_a_decision_tells_every_label_that_it_changed(tmp_path: Path) -> None:
    """Its own item's, and those that a constraint changed with it."""
    with Run.create(tmp_path, kind="icm", name="pairs", config={}) as run:
        rows = [("0/0/0", "1---"), ("0/0/1", "1-10"), ("0/1/0", "0---"), ("0/0/2", "0110")]
        for key, labels in rows:
            payload = {"item": "a", "labels": labels, "is_accepted": True}
            run.append_blocking("decision", payload, key=key)
    decisions = OpenRun(tmp_path / "pairs", "pairs").view()["lists"]["decisions"]
    assert [row["changed"] for row in decisions] == [[], [2, 3], [], [0, 1]]


def test_events_come_in_pages_by_kind_and_text(visitor: Visitor) -> None:
    found = visitor.get("runs/demo/events?kind=candidate&offset=9&limit=5")
    assert found["total"] == 11 and [row[2] for row in found["rows"]] == ["g003-c01", "g003-c02"]
    assert visitor.get("runs/demo/events?text=g002-c01")["total"] == 1
    seq = found["rows"][0][0]
    assert visitor.get(f"runs/demo/event/{seq}")["payload"]["id"] == "g003-c01"


def test_thinning_keeps_every_extreme_and_shows_gaps() -> None:
    values = [math.sin(step / 50) for step in range(10_000)]
    values[4321], values[8765], values[6000] = 99.0, -99.0, math.nan
    thinned = dict(thin(range(10_000), values, points=200))
    assert thinned[4321] == 99.0 and thinned[8765] == -99.0 and thinned[6000] is None
    assert {0, 9999} <= thinned.keys() and len(thinned) <= 204
    assert thin(range(3), [1.0, 2.0, 3.0], points=200) == [(0, 1.0), (1, 2.0), (2, 3.0)]


def test_a_step_that_is_measured_again_replaces_what_was_drawn(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    line = '{{"step": {}, "time_s": 1.0, "loss/a": {}}}\n'
    path.write_text(line.format(0, 1) + line.format(1, 2))
    curves = Curves(path)
    curves.update()
    first = curves.document(points=10)
    with path.open("a") as file:
        file.write(line.format(1, 5) + line.format(2, '"NaN"'))
    curves.update()
    second = curves.document(points=10)
    assert second["revision"] > first["revision"]
    assert second["curves"]["loss/a"] == [(0, 1.0), (1, 5.0), (2, None)]
    assert curves.document(points=10, first=1, last=1)["curves"]["loss/a"] == [(1, 5.0)]


def test_a_curve_behind_the_others_is_told_when_it_goes_on(tmp_path: Path) -> None:
    """The chains of a labelling are each at a step of their own."""
    path = tmp_path / "metrics.jsonl"
    line = '{{"step": {}, "time_s": 1.0, "chain/{}": 1}}\n'
    path.write_text("".join(line.format(step, "a") for step in range(9)) + line.format(0, "b"))
    curves = Curves(path)
    curves.update()
    first = curves.document(points=10)
    with path.open("a") as file:
        file.write(line.format(1, "b") + line.format(9, "a"))
    curves.update()
    second = curves.document(points=10, after=first["rows"])
    assert second["curves"] == {"chain/a": [(9, 1.0)], "chain/b": [(1, 1.0)]}
    assert second["revision"] == first["revision"]


def test_beyond_this_machine_a_key_is_needed(tmp_path: Path) -> None:
    for key in ("", "short"):
        with pytest.raises(ConfigError, match="give a key of at least 16 characters"):
            open_page(tmp_path, host="0.0.0.0", port=0, key=key)
    with open_page(tmp_path, host="0.0.0.0", port=0, key="a key that is long") as page:
        assert "key" not in page.url, "it is not printed"


def test_a_taken_port_and_a_folder_that_is_a_file_get_a_sentence(
    page: LivePage, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="cannot be used: Address already in use"):
        open_page(tmp_path, port=Visitor(page).place[1])
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="is a file: give the folder"):
        open_page(tmp_path / "file", port=0)
    with pytest.raises(ConfigError, match=r"^::zz cannot be used: .* Give another --host"):
        open_page(tmp_path, host="::zz", key="a key that is long")


def test_an_export_holds_the_run_and_its_policy_allows_its_scripts_alone(tmp_path: Path) -> None:
    path = make_evolve(tmp_path, text=HOSTILE)
    export_run(path, tmp_path / "out.html")
    html = (tmp_path / "out.html").read_text()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html)
    assert policy and "default-src 'none'" in policy[1] and "script-src 'sha256-" in policy[1]
    scripts = re.findall(r"<script(?: type=\"module\")?>(.*?)</script>", html, re.DOTALL)
    digests = [b64encode(sha256(script.encode()).digest()).decode() for script in scripts]
    assert set(re.findall(r"'sha256-([^']*)'", policy[1])) == set(digests) and len(digests) == 2
    style = re.findall(r"<style>(.*?)</style>", html, re.DOTALL)[0]
    assert "url(" not in style and "@import" not in style
    assert not re.search(r"<(link|iframe|object|embed|base|img)\b", html.split("<script")[0])
    assert HOSTILE not in html
    document = read_saved(html)
    assert HOSTILE in document["answers"]["runs/programs/program/p1"]["code"]
    assert len(document["events"]) == 14
    for wrong, out in ((tmp_path / "no", "a.html"), (path, "a.txt")):
        with pytest.raises(RookeryError):
            export_run(wrong, tmp_path / out)


def test_the_page_of_a_report_is_the_export_and_says_its_result_without_script(
    tmp_path: Path,
) -> None:
    path = make_genome(tmp_path, report={"warnings": [f"2 tasks failed. {HOSTILE}"]})
    export_run(path, tmp_path / "out.html")
    html = (tmp_path / "out.html").read_text()
    assert html == render_run(path)
    shown = html[html.index('class="plain-summary"') : html.index("<script")]
    assert "Better than the best founder." in shown and "+0.210 (+0.160 to +0.260)" in shown
    assert escape(f"2 tasks failed. {HOSTILE}") in shown
    row = read_saved(render_run(path, status="done"))["answers"]["runs/demo"]["row"]
    assert row["status"] == "done" and row["path"] == "", "a file to send names no folder"


def test_a_large_run_is_exported_as_far_as_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the views read comes first, then the kinds of which there are few."""
    path = make_genome(tmp_path, generations=3)
    monkeypatch.setattr("rookery.ui.live.export.MOST_BYTES", 5_000)
    document = read_saved(render_run(path))
    kinds = {row[1] for row in document["events"]}
    assert "winner" in kinds and "generation" in kinds and len(document["events"]) < 61
    duel = document["answers"]["runs/demo/duel"]["tasks"]
    assert document["answers"]["runs/demo/duel?candidate=g003-c02"]["tasks"] == duel
    differing = {seq for row in duel for seq in (row[2], row[4]) if row[1] != row[3]}
    assert differing and differing <= {row[0] for row in document["events"]}


def test_the_newest_completions_are_exported_as_far_as_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rookery.ui.live.export.MOST_BYTES", 4_000)
    answers = read_saved(render_run(make_grpo(tmp_path, text="x" * 1_000)))["answers"]
    steps = [name.rpartition("/")[2] for name in answers if "/step/" in name]
    assert steps == ["3"], "of four"
    large = make_grpo(tmp_path, "large", text="x" * 3_000)
    saved = read_saved(render_run(large))
    assert not [name for name in saved["answers"] if name.endswith("large/step/3")]
    assert "runs/large/step/2" in saved["answers"], "one that is too large leaves room for others"
    assert "batch" in {row[1] for row in saved["events"]}


def test_a_report_has_what_the_view_has_not(visitor: Visitor) -> None:
    report = visitor.get("runs/demo/report")
    assert report["summary"]["numbers"][0]["value"] == "0.910" and report["is_written"]
    assert report["sources"] == ["label-kind", "add-two"] and "lineage" not in report
    assert report["weights"]["g001-c00"] == [0.6, 0.4]
    empty = visitor.get("runs/train/report")
    assert not empty["is_written"] and empty["summary"]["sentence"].startswith("No result yet.")


def test_scripts_cannot_end_early() -> None:
    given = "a = '</script>' + '</SCRIPT x>' + '<!-- <script>'; b = 1 </re/.exec(a);"
    assert inline(given).replace("<\\", "<") == given
    for script in (given, join_modules(), read_file("vendor/echarts.min.js")):
        assert not re.search(r"</script|<!--", inline(script), re.IGNORECASE)


def test_joined_modules_name_nothing_twice() -> None:
    joined = join_modules()
    assert not re.search(r"^(import|export) ", joined, flags=re.MULTILINE)
    names = re.findall(
        r"^(?:async )?(?:function|class|const|let) (\w+)", joined, flags=re.MULTILINE
    )
    assert len(names) == len(set(names)), sorted({n for n in names if names.count(n) > 1})


def test_the_page_is_opened_from_python_and_importing_stays_light(tmp_path: Path) -> None:
    code = (
        "import sys, rookery\n"
        "assert not {'fastapi', 'uvicorn', 'torch'} & set(sys.modules)\n"
        f"with rookery.ui({str(tmp_path)!r}, port=0) as page:\n"
        "    assert page.url in page._repr_html_()\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
