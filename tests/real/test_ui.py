"""`rookery ui` in a real browser: the table, links, live updates, hostile texts, large runs."""

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
from marks import long
from ui.browser import Visits, browser, live, needs_chromium, visit
from ui.made import made_report
from ui.made_runs import (
    HOSTILE,
    append_generation,
    make_eval,
    make_evolve,
    make_genome,
    make_grpo,
    make_icm,
    make_league,
    make_loop,
    make_pipeline,
    make_sft,
)

from rookery.runs import NewEvent, Run
from rookery.ui.display import Display
from rookery.ui.live.export import export_run
from rookery.ui.live.server import LivePage, open_page

__all__ = ["browser", "live", "visit"]

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "ui.py"
MAKERS: Mapping[str, Callable[..., Path]] = {
    "demo": make_genome,
    "train": make_grpo,
    "labels": make_icm,
    "programs": make_evolve,
    "scores": make_eval,
    "steps": make_pipeline,
    "ways": make_league,
    "answers": make_sft,
    "drawn": make_loop,
}
"""A run of every loop, and of one that the page knows nothing of, by their names."""
KEYS = ("tab", "only", "by", "cost", "colour", "candidate", "item", "step", "sort")
pytestmark = needs_chromium


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LivePage]:
    """Runs of every loop in which all texts try to inject."""
    root = tmp_path_factory.mktemp("ui") / "runs"
    for make in MAKERS.values():
        make(root, text=HOSTILE)
    with open_page(root, port=0) as page:
        yield page


def test_every_view_of_every_run_is_shown_and_no_text_of_it_runs(
    served: LivePage, visit: Visits
) -> None:
    """Where a link has unknown values, a view is shown as it begins."""
    one = visit(served.url)
    unknown = "&".join(f"{key}=constructor" for key in KEYS)
    for name in MAKERS:
        for tab in ("", "?tab=curves", "?tab=events", "?tab=config", f"?{unknown}"):
            one.go(f"#/run/{name}{tab}")
            one.see("h1", text=name)
            one.see(".tab-body section")
            for button in one.page.locator(".tab-body .lt-space button.plain:visible").all()[:1]:
                button.click()
                one.see(".detail")
            one.check()
    one.page.wait_for_timeout(300)
    one.check()
    # Should a text ever become markup, the policy of the page refuses to run it.
    refused = one.page.evaluate(
        """() => new Promise((done) => {
            document.addEventListener("securitypolicyviolation", (e) => done(e.effectiveDirective));
            const script = document.createElement("script");
            script.textContent = "window.injected = true";
            document.body.append(script);
            if (window.injected) done("it ran");
        })"""
    )
    assert refused == "script-src-elem" and not one.page.evaluate("window.injected")
    one.complaints.clear()


@pytest.mark.parametrize(
    ("scheme", "width"), [("light", 1400), pytest.param("dark", 390, marks=long)]
)
def test_the_table_filters_sorts_and_links_to_its_state(
    served: LivePage, visit: Visits, scheme: str, width: int
) -> None:
    one = visit(served.url, color_scheme=scheme, viewport={"width": width, "height": 800})
    one.see(".runs a.name", text="demo")
    assert one.page.locator(".runs .lt-space .lt-row").count() == len(MAKERS)
    assert "token" not in one.page.url
    one.page.get_by_label("Status").select_option("failed")
    one.see(".runs .reason, .runs progress")
    assert one.page.locator(".runs .lt-space a.name").all_inner_texts() == ["train"]
    link = one.page.url
    assert link.endswith("status=failed")
    one.page.goto("about:blank")
    one.page.goto(link)
    one.see(".runs a.name", text="train")
    assert one.page.locator(".runs .lt-space .lt-row").count() == 1
    one.page.get_by_label("Search").fill("nothing like it")
    one.see(".empty", text="No run fits.")


def test_links_and_clicks_open_what_they_name(served: LivePage, visit: Visits) -> None:
    one = visit(served.url, "#/constructor")  # any word shows the runs
    one.see(".runs a.name", text="demo").click()
    one.see(".dropped .lt-space button").click()
    name = one.see(".detail h3").inner_text().removesuffix(" clear")
    assert "candidate=" in one.page.url and HOSTILE in name
    one.page.reload()
    assert one.see(".detail h3").inner_text().startswith(name), "a link is a view"
    one.go("#/run/programs?program=p2")
    assert HOSTILE in one.see(".detail .diff .added", text="x = 2").inner_text()
    one.page.locator(".detail details").filter(has_text="first1").locator("summary").click()
    one.see(".detail .code", text="x = 0")
    one.see("td", text="Over 10 s.")
    one.see("summary", text="Iteration 2: 0.2")  # the winning line, though there is no report
    one.go("#/run/train?step=3")
    one.see(".completion-row.up", text="seven")
    one.go("#/run/train")
    one.see("select[aria-label=Colour]").select_option("gap")
    assert one.see(".token").inner_text().startswith("seven")
    assert one.page.locator(".token").count() == 3 and "colour=gap" in one.page.url
    one.go("#/runs")
    for name in ("demo", "programs"):
        one.see(".runs a.name", text=name)
        one.page.get_by_label(f"Select {name}").check()
    one.see("a.button", text="Compare 2 runs").click()
    one.see(".diff-table th", text="max_iterations")


def test_a_run_is_followed_while_it_writes_and_when_it_dies(
    live: LivePage, visit: Visits, tmp_path: Path
) -> None:
    config = {"stages": [{"generations": 3}]}
    table = visit(live.url)
    table.see(".empty", text="There are no runs")
    run = Run.create(tmp_path, kind="genome", name="live", config=config)
    table.see(".runs .mark", text="running")
    append_generation(run, 0, ["founder-a", "founder-b"], parents=[])
    one = visit(live.url, "#/run/live?tab=events")
    one.see(".events .key", text="founder-b")
    with Display(is_quiet=True).bar("ga 1", total=40, run=run) as bar:
        bar.update(done=20)
    begun = time.monotonic()
    append_generation(run, 1, ["late-child"], parents=["founder-a"])
    one.see(".events .key", text="late-child")
    assert time.monotonic() - begun < 30, "a second, and what a busy machine adds"
    one.see(".state .note", text="20 of 40 answers")
    run.close()  # without a word of its end
    one.see(".state .mark", text="killed")
    table.see(".runs .mark", text="killed")
    with Run.open(tmp_path / "live") as run:
        one.see(".state .mark", text="running")
        append_generation(run, 2, ["child"], parents=["founder-a"])
        one.go("#/run/live")
        one.see(".lead", text="What child, the best so far, descends from")
        run.write_json("report.json", made_report(run="live", winner_id="child"))
        run.finish()
    one.see(".state .mark", text="done")
    one.see(".number strong", text="0.910")


@long
def test_a_very_long_answer_is_shown_in_part_and_opens(
    live: LivePage, visit: Visits, tmp_path: Path
) -> None:
    texts = {"line": "x" * 30_000, "lines": "x\n" * 15_000}
    for name, text in texts.items():
        make_eval(tmp_path, name, text=text)
        one = visit(live.url, f"#/run/{name}")
        one.see(".tasks .lt-space button").click()
        assert len(one.see(".detail pre").text_content()) == 20_000
        one.see(".detail summary", text="10005 more characters").click()
        one.see(".detail details pre")


@long
def test_a_link_to_a_program_of_a_later_part_of_the_view_opens_it(
    live: LivePage, visit: Visits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_evolve(tmp_path, size=9)
    monkeypatch.setattr("rookery.ui.live.server.VIEW_ROWS", 2)
    monkeypatch.setattr("rookery.ui.live.server.NEXT_ROWS", 3)
    visit(live.url, "#/run/programs?program=p8").see(".detail .diff .added", text="x = 8")


@long
def test_clicks_follow_a_cell_and_an_item(live: LivePage, visit: Visits, tmp_path: Path) -> None:
    make_evolve(tmp_path, report={"cells": [{"cell": "1-1", "program": "p1", "score": 0.1}]})
    make_icm(tmp_path, report={"labels": ["yes", "no"]})
    one = visit(live.url, "#/run/programs")
    grid = one.page.get_by_label("Cells of island 0")
    grid.scroll_into_view_if_needed()
    grid.locator("canvas").first.wait_for(state="visible")
    place = grid.evaluate(
        "(box) => echarts.getInstanceByDom(box).convertToPixel({ seriesIndex: 0 }, [1, 1])"
    )
    grid.click(position={"x": place[0], "y": place[1]})
    one.see(".detail h3", text="p1")
    assert "program=p1" in one.page.url
    row = one.page.locator(".programs .lt-space .lt-row").filter(has_text="p3")
    row.locator(".payload").click()
    one.see(".detail h3", text="p3")
    one.go("#/run/labels?item=i1")
    one.see(".detail dd", text="yes")


def answering(document: object) -> Callable[[Any], None]:
    """A route that answers with a document."""
    return lambda route: route.fulfill(json=document)


@long
def test_fleet_and_service_show_themselves_and_names_stay_text(
    visit: Visits, tmp_path: Path
) -> None:
    with open_page(tmp_path, port=0, fleet=["http://127.0.0.1:9"]) as page:
        one = visit(page.url, "#/fleet")
        one.see(".mark", text="down")
        one.page.get_by_role("link", name="service").click()
        one.see(".empty code", text="rookery ui --service URL")
        status = {
            "url": HOSTILE, "models": [HOSTILE], "journal_bytes": 0,
            "queues": [
                {"name": HOSTILE, "num_waiting": 1, "tokens_waiting": 5, "tokens_per_s": 2.5}
            ],
            "tenants": [
                {"name": HOSTILE, "num_pending": 1, "num_models": 0, "num_checkpoints": 0,
                 "tokens": {"sampled": 1234}}
            ],
        }  # fmt: skip
        sampled = {"text": HOSTILE, "finish_reason": "stop", "usage": {"completion_tokens": 1}}
        answers = {"": status, "/models": {"models": [HOSTILE], "checkpoints": []}}
        for path, answer in {**answers, "/sample": sampled}.items():
            one.page.route(f"**/api/service{path}", answering(answer))
        one.see("td", text="1,234")
        one.complaints.clear()  # of the answer before, which was an error
        one.page.get_by_text("Show its models and checkpoints").click()
        one.see(".sample .empty", text="no checkpoint")
        one.page.get_by_label("Prompt").fill("2 + 2 =")
        one.page.get_by_role("button", name="Sample").click()
        assert one.see("pre.answer").inner_text() == HOSTILE
        one.close()


@long
def test_a_run_of_a_kind_without_a_view_has_its_curves_and_events(
    live: LivePage, visit: Visits, tmp_path: Path
) -> None:
    """Such as the folder of a service."""
    with Run.create(tmp_path, kind="serve", name="tink", config={}) as run:
        run.submit([NewEvent(kind="session", payload={"text": "x" * 300_000})]).result()
    one = visit(live.url, "#/run/tink")
    one.see(".empty", text="Nothing is reported")
    one.go("#/run/tink?tab=events&seq=2")
    assert len(one.see(".json-text").inner_text()) == 200_000, "no more at once"


@long
def test_adapters_of_one_name_have_a_column_each(
    live: LivePage, visit: Visits, tmp_path: Path
) -> None:
    """Those of two steps of a pipeline, in its answers."""
    with Run.create(tmp_path, kind="eval", name="two", config={}) as run:
        news = [
            NewEvent(
                kind="rollout",
                key=f"{version}|t",
                payload={"model": f"trained@{version}", "task": "t", "reward": reward, "error": ""},
            )
            for version, reward in (("aaaa1111", 1.0), ("bbbb2222", 0.0))
        ]
        run.submit(news).result()
        run.finish()
    one = visit(live.url, "#/run/two")
    one.see(".tasks .lt-space .right", text="1.00")
    one.see(".tasks .lt-space .wrong", text="0.00")
    one.see(".tasks", text="trained bbbb2222")


@long
def test_a_link_beyond_this_machine_asks_for_the_key_and_goes_on(
    visit: Visits, tmp_path: Path
) -> None:
    make_eval(tmp_path)
    with open_page(tmp_path, port=0, key="sixteen letters!") as page:
        one = visit(page.url, "#/run/scores")
        for key, title in (("?", "That key is not right."), ("!", "scores")):
            one.complaints.clear()  # of an answer that is no page
            one.page.get_by_label("Key").fill(f"sixteen letters{key}")
            one.page.get_by_role("button", name="Open").click()
            one.see("h1", text=title)
        assert "letters" not in one.page.url
        one.close()


@long
def test_runs_with_a_comma_in_their_names_are_compared(
    live: LivePage, visit: Visits, tmp_path: Path
) -> None:
    for name in ("a", "b"):
        make_genome(tmp_path, name).rename(tmp_path / f"{name},1")
    one = visit(live.url, "#/compare?runs=a%2C1&runs=b%2C1")
    one.see("section", text="Reports")
    assert one.page.locator(".reports article").count() == 2
    one.page.get_by_role("link", name="runs", exact=True).click()
    one.see("a.button", text="Compare 2 runs")


@long
def test_what_is_gone_is_told_and_seen_again_when_it_is_back(visit: Visits, tmp_path: Path) -> None:
    root, away = tmp_path / "runs", tmp_path / "away"
    make_eval(root)
    page = open_page(root, port=0)
    table, one = visit(page.url), visit(page.url, "#/run/scores?tab=events")
    table.see(".runs a.name", text="scores")
    one.see(".events .lt-space .lt-row")
    ended: list[str] = []
    one.page.on("requestfinished", lambda request: ended.append(request.url))
    root.rename(away)
    table.see(".empty", text="There are no runs")
    one.see(".trouble", text="This is the last that was seen.")
    while not any(url.endswith("stream") for url in ended):
        one.page.wait_for_timeout(20)
    away.rename(root)
    table.see(".runs a.name", text="scores")
    one.page.locator(".trouble").wait_for(state="hidden", timeout=20_000)
    page.close()
    for gone in (table, one):
        gone.see(".trouble code", text="rookery ui")
        gone.complaints.clear()  # of what was not there
        gone.close()


@long
def test_a_click_and_the_focus_outlast_what_comes_meanwhile(
    live: LivePage, visit: Visits, tmp_path: Path
) -> None:
    """A list and a page that change many times a second can be used with mouse and keyboard."""
    run = Run.create(tmp_path, kind="genome", name="live", config={"stages": 2})
    append_generation(run, 0, ["founder-a", "founder-b"], parents=[])
    one = visit(live.url)

    def grow(number: int, seen: str) -> None:
        append_generation(run, number, [f"child-{number}"], parents=["founder-a"])
        one.see(seen)

    def press(target: Any, *, number: int, seen: str) -> None:
        box = target.bounding_box()
        one.page.mouse.move(box["x"] + 5, box["y"] + box["height"] / 2)
        one.page.mouse.down()
        grow(number, seen)
        one.page.mouse.up()

    pick = one.page.get_by_label("Select live")
    pick.focus()
    one.page.keyboard.press("Space")
    one.page.get_by_text("Select one more").wait_for()
    grow(1, ".runs .value b:has-text('0.41')")
    assert pick.is_checked() and pick.evaluate("(box) => box === document.activeElement")
    make_eval(tmp_path)
    one.page.get_by_label("Select scores").check()
    compare = one.see("a.button", text="Compare 2 runs")
    compare.focus()
    grow(11, ".runs .value b:has-text('0.51')")
    assert compare.evaluate("(link) => link === document.activeElement")
    press(one.see(".runs a.name", text="live"), number=2, seen=".runs .value b:has-text('0.42')")
    one.see(".state .mark", text="running")
    tab = one.page.get_by_role("link", name="Events")
    press(tab, number=3, seen=".facts dd:text-is('10')")
    button = one.see(".events .lt-space button", text="2")
    press(button, number=4, seen=".events .key:has-text('child-4')")
    one.see(".detail h3", text="candidate founder-a")
    assert button.evaluate("(one) => one === document.activeElement")
    run.close()


@long
def test_what_answers_late_is_not_drawn_over_what_is_looked_at(
    live: LivePage, visit: Visits, tmp_path: Path
) -> None:
    for name in ("a", "b"):
        make_eval(tmp_path, name)
    one = visit(live.url)
    one.see(".runs a.name", text="a")
    held: list[Any] = []
    for path in ("**/api/runs/a", "**/api/runs/a/curves*", "**/event/3"):
        one.page.route(path, lambda route: held.append(route))

    def wait_for_request() -> None:
        while not held:
            one.page.wait_for_timeout(20)

    def answer() -> None:
        for route in held:
            route.continue_()
        held.clear()
        one.page.wait_for_timeout(500)

    for place in ("#/run/a", "#/compare?runs=a&runs=b"):
        one.page.evaluate("(place) => { location.hash = place }", place)
        wait_for_request()
        one.page.evaluate("location.hash = '#/runs'")
        one.see(".runs a.name", text="b")
        answer()
        assert one.page.locator("h1").all_inner_texts() == ["Runs"]
        assert one.page.locator("h2").count() == 0 and "Runs" in one.page.title()
    for place, table, first in (("?tab=events", ".events", 2), ("", ".tasks", 1)):
        one.go(f"#/run/b{place}")
        rows = one.page.locator(f"{table} .lt-space button")
        for row in (first, first + 1):
            rows.nth(row).click()
            wait_for_request()
        answer()
        assert "sum/2" in one.see(".detail h3").inner_text()


@long
def test_a_run_that_is_made_again_under_its_name_is_shown_alone(
    live: LivePage, visit: Visits, tmp_path: Path
) -> None:
    make_eval(tmp_path, size=9, text="former")
    one = visit(live.url, "#/run/scores")
    one.see(".tasks .lt-space button", text="sum/8former")
    shutil.rmtree(tmp_path / "scores")
    make_eval(tmp_path, size=2, text="new")
    one.see(".tasks .lt-space button", text="sum/1new")
    assert one.page.get_by_text("former").count() == 0
    one.complaints.clear()  # of what was not there


@long
def test_a_list_follows_a_server_that_was_started_anew(visit: Visits, tmp_path: Path) -> None:
    key = "sixteen letters!"
    for name in ("a", "b"):
        make_eval(tmp_path, name)
    with open_page(tmp_path, port=0, key=key) as page:
        one = visit(f"{page.url}?token=sixteen+letters!")
        one.see(".runs a.name", text="b")
    one.see(".trouble", text="rookery ui")
    shutil.rmtree(tmp_path / "b")
    make_eval(tmp_path, "c")
    with open_page(tmp_path, port=int(one.origin.split(":")[-1].strip("/")), key=key):
        other = one.context.new_page()
        other.goto(f"{one.origin}?token=sixteen+letters!")
        one.see(".runs a.name", text="c")
        assert one.page.locator(".runs .lt-space a.name").all_inner_texts() == ["c", "a"]
        one.complaints.clear()  # of the server that was gone
        one.close()


@long
def test_a_damaged_report_hides_no_other_part_of_its_run(
    live: LivePage, visit: Visits, tmp_path: Path
) -> None:
    report = make_genome(tmp_path, report={}) / "report.json"
    whole = report.read_bytes()
    report.write_bytes(whole[:200])
    one = visit(live.url, "#/run/demo")
    one.see(".tab-body .trouble", text="report.json is damaged")
    one.page.get_by_role("link", name="Events").click()
    one.see(".events .key", text="founder-b")
    one.page.get_by_role("link", name="Overview").click()
    one.see(".tab-body .trouble")
    report.write_bytes(whole)
    one.see(".number strong", text="0.910")
    one.complaints.clear()  # of the answers that were errors


@long
def test_an_export_opens_from_disk_and_asks_for_nothing(visit: Visits, tmp_path: Path) -> None:
    for name, make in MAKERS.items():
        out = tmp_path / f"{name}.html"
        export_run(make(tmp_path / "runs", text=HOSTILE), out)
        one = visit(out.as_uri())
        one.see("h1", text=name)
        one.see(".tab-body section")
        one.page.get_by_role("link", name="Events").click()
        one.see(".events .lt-space .lt-row button").click()
        one.see(".detail .json")
        one.close()


@long
def test_large_runs_are_shown_in_part(
    browser: Any, live: LivePage, visit: Visits, tmp_path: Path
) -> None:
    """10,000 candidates, 100,000 events, 1,000 runs; `benchmarks/ui.py` takes their times. Seconds
    are those of the processor: 20 ms of it for a frame are 50 frames a second."""
    (make_genome(tmp_path, "large", generations=100, size=100) / "report.json").unlink()
    with Run.create(tmp_path, kind="eval", name="long", config={}) as run:
        for block in range(100):
            news = [
                NewEvent(kind="note", key=f"{block}/{n}", payload={"number": n, "text": "x" * 80})
                for n in range(1000)
            ]
            run.submit(news).result()
        run.finish()
    small = make_eval(tmp_path, "run-0000")
    for number in range(1, 998):
        shutil.copytree(small, tmp_path / f"run-{number:04d}")
    table = visit(live.url)
    table.see(".lead", text="1,000 runs in")
    assert table.page.locator(".runs .lt-row").count() < 60, "only what is seen exists"
    table.close()
    events = visit(live.url, "#/run/long?tab=events")
    events.see(".events .lt-space .lt-row button")
    events.page.evaluate("document.querySelector('.lt-body').scrollTop = 1e9")
    events.see(".events .key", text="99/999")
    events.close()
    search = visit(live.url, "#/run/large")
    search.see(".lead, .number, h2")
    search.page.locator(".chart").first.scroll_into_view_if_needed()  # drawn when it is seen
    search.see(".chart canvas")
    search.close()
    spec = spec_from_file_location("benchmark", BENCHMARK)
    assert spec is not None and spec.loader is not None
    benchmark = module_from_spec(spec)
    sys.modules["benchmark"] = benchmark  # where its dataclass looks for itself
    spec.loader.exec_module(benchmark)
    bench = benchmark.Bench(browser, live.url, os.getpid())
    for place, wanted, move in (
        ("#/runs", ".runs .lt-space .lt-row", benchmark.SCROLL),
        ("#/run/long?tab=events", ".events .lt-space button", benchmark.SCROLL),
        ("#/run/large", ".chart canvas", benchmark.PAN),
    ):
        seen = bench.visit(place, wanted, move)
        assert seen.page_s < 1 and seen.frame_ms < 20, (place, seen)


def test_rows_that_are_scrolled_show_others_and_keep_their_order(
    live: LivePage, visit: Visits, tmp_path: Path
) -> None:
    """No node is made for a row while a list is scrolled, and no row gets the focus of another."""
    make_eval(tmp_path, size=3000)
    body = "document.querySelector('.lt-body')"
    rows = "[...document.querySelectorAll('.lt-space > .lt-row')]"
    one = visit(live.url, "#/run/scores")
    one.see(".tasks .lt-space button", text="sum/3")
    one.page.evaluate(f"{body}.scrollTop = 3000")
    one.see(".tasks .lt-space button", text="sum/95")
    one.page.evaluate(
        f"window.made = 0; window.known = new Set({rows});"
        "new MutationObserver((all) => all.forEach((one) => one.addedNodes.forEach((node) => {"
        "    if (!window.known.has(node)) window.made += 1;"
        "    window.known.add(node);"
        "}))).observe(document.querySelector('.lt-space'), { childList: true, subtree: true })"
    )
    held = one.see(".tasks .lt-space button", text="sum/90")
    held.evaluate("(one) => one.focus({ preventScroll: true })")
    for top in (3100, 3700, 3200, 60_000):
        one.page.evaluate(f"{body}.scrollTop = {top}")
        one.see(".tasks .lt-space button", text=f"sum/{top // 34 + 5}")
    assert not one.page.evaluate(f"{body}.contains(document.activeElement)")
    assert one.page.evaluate("window.made") <= 4, "the row that had the focus"
    index = "Number(row.getAttribute('aria-rowindex'))"
    texts = f"{rows}.every((row) => row.textContent.startsWith(`sum/${{{index} - 1}}`))"
    numbers = f"{rows}.map((row) => {index})"
    while (found := one.page.evaluate(numbers)) != sorted(found):
        one.page.wait_for_timeout(20)
    assert len(found) > 20 and one.page.evaluate(texts)


def test_links_with_values_that_are_none_show_the_runs(served: LivePage, visit: Visits) -> None:
    for place in ("?sort=trend", "?sort=-pick", "?status=gone"):
        one = visit(served.url, f"#/runs{place}")
        one.see(".runs a.name", text="demo")
        assert one.page.locator(".runs .lt-space .lt-row").count() == len(MAKERS)
    one = visit(served.url, "#/runs?loop=gone")
    one.see(".empty", text="No run fits.")
    assert one.page.get_by_label("Loop").input_value() == "gone", "what is asked for is seen"
    one.go("#/run/demo?tab=events&kind=gone")
    one.see(".bar .note", text="0 events")
    assert one.page.get_by_label("Kind").input_value() == "gone"


def test_the_order_is_changed_with_the_keyboard(served: LivePage, visit: Visits) -> None:
    one = visit(served.url)
    one.see(".runs a.name", text="demo")
    one.page.get_by_role("button", name="Run").focus()
    for mark in "↓", "↑":
        one.page.keyboard.press("Enter")
        one.see(".lt-head button:focus", text=f"Run {mark}")
    while one.page.locator(".runs .lt-space a.name").all_inner_texts() != sorted(MAKERS):
        one.page.wait_for_timeout(20)
