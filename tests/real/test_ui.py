"""`rookery ui` in a real browser: the table, links, live updates, hostile texts, large runs."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
from ui.browser import CHROMIUM, Visit, open_browser
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

pytestmark = pytest.mark.skipif(
    not CHROMIUM.exists(), reason=f"no Chromium at {CHROMIUM}: set ROOKERY_CHROMIUM"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LivePage, Path]]:
    """Runs of every loop in which all texts try to inject."""
    root = tmp_path_factory.mktemp("ui") / "runs"
    for make in MAKERS.values():
        make(root, text=HOSTILE)
    with open_page(root, port=0) as page:
        yield page, root


@pytest.mark.parametrize(("scheme", "width"), [("light", 1400), ("dark", 390)])
def test_the_table_filters_sorts_and_links_to_its_state(
    browser: Any, served: tuple[LivePage, Path], scheme: str, width: int
) -> None:
    size = {"width": width, "height": 800}
    visit = Visit(browser, served[0].url, color_scheme=scheme, viewport=size)
    visit.see(".runs a.name", text="demo")
    assert visit.page.locator(".runs .lt-space .lt-row").count() == len(MAKERS)
    assert "token" not in visit.page.url
    visit.page.get_by_label("Status").select_option("failed")
    visit.see(".runs .reason, .runs progress")
    assert visit.page.locator(".runs .lt-space a.name").all_inner_texts() == ["train"]
    link = visit.page.url
    assert link.endswith("status=failed")
    visit.page.goto("about:blank")
    visit.page.goto(link)
    visit.see(".runs a.name", text="train")
    assert visit.page.locator(".runs .lt-space .lt-row").count() == 1
    visit.page.get_by_label("Search").fill("nothing like it")
    visit.see(".empty", text="No run fits.")
    visit.close()


def test_an_address_of_any_word_shows_the_runs(browser: Any, served: tuple[LivePage, Path]) -> None:
    visit = Visit(browser, served[0].url, "#/constructor")
    visit.see(".runs a.name", text="demo").click()
    visit.see("h1", text="demo")
    visit.close()


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("tab", ["", "?tab=curves", "?tab=events", "?tab=config"])
def test_a_link_opens_each_part_of_each_run_and_no_text_of_it_runs(
    browser: Any, served: tuple[LivePage, Path], name: str, tab: str
) -> None:
    visit = Visit(browser, served[0].url, f"#/run/{name}{tab}")
    visit.see("h1", text=name)
    visit.see(".tab-body section")
    visit.page.mouse.move(400, 500)
    for button in visit.page.locator(".tab-body .lt-space button.plain:visible").all()[:1]:
        button.click()
        visit.see(".detail")
    visit.page.wait_for_timeout(300)
    visit.close()


@pytest.mark.parametrize("word", ["nothing", "constructor", "%E0%A4%A"])
def test_an_address_with_unknown_values_shows_the_view_as_it_begins(
    browser: Any, served: tuple[LivePage, Path], word: str
) -> None:
    names = ("tab", "only", "by", "cost", "colour", "candidate", "item", "step", "sort")
    query = "&".join(f"{name}={word}" for name in names)
    for name in MAKERS:
        visit = Visit(browser, served[0].url, f"#/run/{name}?{query}")
        visit.see("h1", text=name)
        visit.see(".tab-body section")
        visit.close()


@pytest.mark.parametrize("text", ["x" * 30_000, "x\n" * 15_000])
def test_a_very_long_answer_is_shown_in_part_and_opens(
    browser: Any, tmp_path: Path, text: str
) -> None:
    make_eval(tmp_path, text=text)
    with open_page(tmp_path, port=0) as page:
        visit = Visit(browser, page.url, "#/run/scores")
        visit.see(".tasks .lt-space button").click()
        assert len(visit.see(".detail pre").text_content()) == 20_000
        visit.see(".detail summary", text="10005 more characters").click()
        visit.see(".detail details pre")
        visit.close()


def test_programs_open_with_their_line_and_answers_are_text(
    browser: Any, served: tuple[LivePage, Path]
) -> None:
    visit = Visit(browser, served[0].url, "#/run/programs?program=p2")
    assert HOSTILE in visit.see(".detail .diff .added", text="x = 2").inner_text()
    visit.page.locator(".detail details").filter(has_text="first1").locator("summary").click()
    visit.see(".detail .code", text="x = 0")
    visit.see("td", text="Over 10 s.")
    visit.see("summary", text="Iteration 2: 0.2")  # the winning line, though there is no report
    visit.page.goto(visit.origin + "#/run/train?step=3")
    visit.see(".completion-row.up", text="seven")
    visit.close()


def test_a_link_to_a_program_of_a_later_part_of_the_view_opens_it(
    browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_evolve(tmp_path, size=9)
    monkeypatch.setattr("rookery.ui.live.server.VIEW_ROWS", 2)
    monkeypatch.setattr("rookery.ui.live.server.NEXT_ROWS", 3)
    with open_page(tmp_path, port=0) as page:
        visit = Visit(browser, page.url, "#/run/programs?program=p8")
        visit.see(".detail .diff .added", text="x = 8")
        visit.close()


def test_clicks_follow_a_candidate_a_cell_and_an_item(
    browser: Any, served: tuple[LivePage, Path], tmp_path: Path
) -> None:
    visit = Visit(browser, served[0].url, "#/run/demo")
    visit.see(".dropped .lt-space button").click()
    name = visit.see(".detail h3").inner_text().removesuffix(" clear")
    assert "candidate=" in visit.page.url and HOSTILE in name
    visit.page.reload()
    assert visit.see(".detail h3").inner_text().startswith(name), "a link is a view"
    visit.close()
    make_evolve(tmp_path, report={"cells": [{"cell": "1-1", "program": "p1", "score": 0.1}]})
    make_icm(tmp_path, report={"labels": ["yes", "no"]})
    with open_page(tmp_path, port=0) as page:
        visit = Visit(browser, page.url, "#/run/programs")
        grid = visit.page.get_by_label("Cells of island 0")
        grid.scroll_into_view_if_needed()
        grid.locator("canvas").first.wait_for(state="visible")
        place = grid.evaluate(
            "(box) => echarts.getInstanceByDom(box).convertToPixel({ seriesIndex: 0 }, [1, 1])"
        )
        grid.click(position={"x": place[0], "y": place[1]})
        visit.see(".detail h3", text="p1")
        assert "program=p1" in visit.page.url
        row = visit.page.locator(".programs .lt-space .lt-row").filter(has_text="p3")
        row.locator(".payload").click()
        visit.see(".detail h3", text="p3")
        visit.page.goto(visit.origin + "#/run/labels?item=i1")
        visit.see(".detail dd", text="yes")
        visit.close()


def test_no_script_but_the_page_s_own_runs(browser: Any, served: tuple[LivePage, Path]) -> None:
    """Should a text ever become markup, the policy of the page refuses to run it."""
    visit = Visit(browser, served[0].url)
    visit.see(".runs a.name")
    refused = visit.page.evaluate(
        """() => new Promise((done) => {
            document.addEventListener("securitypolicyviolation", (e) => done(e.effectiveDirective));
            const script = document.createElement("script");
            script.textContent = "window.injected = true";
            document.body.append(script);
            if (window.injected) done("it ran");
        })"""
    )
    assert refused == "script-src-elem" and not visit.page.evaluate("window.injected")
    visit.complaints.clear()
    visit.close()


def test_fleet_and_service_show_themselves_and_names_stay_text(
    browser: Any, tmp_path: Path
) -> None:
    with open_page(tmp_path, port=0, fleet=["http://127.0.0.1:9"]) as page:
        visit = Visit(browser, page.url, "#/fleet")
        visit.see(".mark", text="down")
        visit.page.get_by_role("link", name="service").click()
        visit.see(".empty code", text="rookery ui --service URL")
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
        visit.page.route("**/api/service", lambda route: route.fulfill(json=status))
        sampled = {"text": HOSTILE, "finish_reason": "stop", "usage": {"completion_tokens": 1}}
        listed = {"models": [HOSTILE], "checkpoints": []}
        visit.page.route("**/api/service/models", lambda route: route.fulfill(json=listed))
        visit.page.route("**/api/service/sample", lambda route: route.fulfill(json=sampled))
        visit.see("td", text="1,234")
        visit.complaints.clear()  # of the answer before, which was an error
        visit.page.get_by_text("Show its models and checkpoints").click()
        visit.see(".sample .empty", text="no checkpoint")
        visit.page.get_by_label("Prompt").fill("2 + 2 =")
        visit.page.get_by_role("button", name="Sample").click()
        assert visit.see("pre.answer").inner_text() == HOSTILE
        visit.close()


def test_a_run_of_a_kind_without_a_view_has_its_curves_and_events(
    browser: Any, tmp_path: Path
) -> None:
    """Such as the folder of a service."""
    with Run.create(tmp_path, kind="serve", name="tink", config={}) as run:
        run.submit([NewEvent(kind="session", payload={"text": "x" * 300_000})]).result()
    with open_page(tmp_path, port=0) as page:
        visit = Visit(browser, page.url, "#/run/tink")
        visit.see(".empty", text="Nothing is reported")
        visit.page.goto(visit.origin + "#/run/tink?tab=events&seq=2")
        assert len(visit.see(".json-text").inner_text()) == 200_000, "no more at once"
        visit.close()


def test_adapters_of_one_name_have_a_column_each(browser: Any, tmp_path: Path) -> None:
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
    with open_page(tmp_path, port=0) as page:
        visit = Visit(browser, page.url, "#/run/two")
        visit.see(".tasks .lt-space .right", text="1.00")
        visit.see(".tasks .lt-space .wrong", text="0.00")
        visit.see(".tasks", text="trained bbbb2222")
        visit.close()


def test_a_link_beyond_this_machine_asks_for_the_key_and_goes_on(
    browser: Any, tmp_path: Path
) -> None:
    make_eval(tmp_path)
    with open_page(tmp_path, port=0, key="sixteen letters!") as page:
        visit = Visit(browser, page.url, "#/run/scores")
        visit.page.get_by_label("Key").fill("sixteen letters?")
        visit.page.get_by_role("button", name="Open").click()
        visit.see("h1", text="That key is not right.")
        visit.complaints.clear()  # of an answer that is no page
        visit.page.get_by_label("Key").fill("sixteen letters!")
        visit.page.get_by_role("button", name="Open").click()
        visit.see("h1", text="scores")
        assert "letters" not in visit.page.url
        visit.close()


def test_runs_with_a_comma_in_their_names_are_compared(browser: Any, tmp_path: Path) -> None:
    for name in ("a", "b"):
        make_genome(tmp_path, name).rename(tmp_path / f"{name},1")
    with open_page(tmp_path, port=0) as page:
        visit = Visit(browser, page.url, "#/compare?runs=a%2C1&runs=b%2C1")
        visit.see("section", text="Reports")
        assert visit.page.locator(".reports article").count() == 2
        visit.page.get_by_role("link", name="runs", exact=True).click()
        visit.see("a.button", text="Compare 2 runs")
        visit.close()


def test_completions_are_coloured_by_the_gap(browser: Any, served: tuple[LivePage, Path]) -> None:
    visit = Visit(browser, served[0].url, "#/run/train")
    visit.see("select[aria-label=Colour]").select_option("gap")
    assert visit.see(".token").inner_text().startswith("seven")
    assert visit.page.locator(".token").count() == 3 and "colour=gap" in visit.page.url
    visit.close()


def test_two_runs_are_compared(browser: Any, served: tuple[LivePage, Path]) -> None:
    visit = Visit(browser, served[0].url)
    for name in ("demo", "programs"):
        visit.see(".runs a.name", text=name)
        visit.page.get_by_label(f"Select {name}").check()
    visit.see("a.button", text="Compare 2 runs").click()
    visit.see(".diff-table th", text="max_iterations")
    visit.close()


def test_a_run_is_followed_while_it_writes_and_when_it_dies(browser: Any, tmp_path: Path) -> None:
    config = {"stages": [{"generations": 3}]}
    with open_page(tmp_path, port=0) as page:
        table = Visit(browser, page.url)
        table.see(".empty", text="There are no runs")
        run = Run.create(tmp_path, kind="genome", name="live", config=config)
        table.see(".runs .mark", text="running")
        append_generation(run, 0, ["founder-a", "founder-b"], parents=[])
        visit = Visit(browser, page.url, "#/run/live?tab=events")
        visit.see(".events .key", text="founder-b")
        with Display(is_quiet=True).bar("ga 1", total=40, run=run) as bar:
            bar.update(done=20)
        begun = time.monotonic()
        append_generation(run, 1, ["late-child"], parents=["founder-a"])
        visit.see(".events .key", text="late-child")
        assert time.monotonic() - begun < 30, "a second, and what a busy machine adds"
        visit.see(".state .note", text="20 of 40 answers")
        run.close()  # without a word of its end
        visit.see(".state .mark", text="killed")
        table.see(".runs .mark", text="killed")
        table.close()
        visit.close()


def test_what_is_gone_is_told_and_seen_again_when_it_is_back(browser: Any, tmp_path: Path) -> None:
    root, away = tmp_path / "runs", tmp_path / "away"
    make_eval(root)
    page = open_page(root, port=0)
    table, visit = Visit(browser, page.url), Visit(browser, page.url, "#/run/scores?tab=events")
    table.see(".runs a.name", text="scores")
    visit.see(".events .lt-space .lt-row")
    ended: list[str] = []
    visit.page.on("requestfinished", lambda one: ended.append(one.url))
    root.rename(away)
    table.see(".empty", text="There are no runs")
    visit.see(".trouble", text="This is the last that was seen.")
    while not any(url.endswith("stream") for url in ended):
        visit.page.wait_for_timeout(20)
    away.rename(root)
    table.see(".runs a.name", text="scores")
    visit.page.locator(".trouble").wait_for(state="hidden", timeout=20_000)
    page.close()
    table.see(".trouble code", text="rookery ui")
    visit.see(".trouble code", text="rookery ui")
    for one in (table, visit):
        one.complaints.clear()  # of what was not there
        one.close()


def test_a_click_and_the_focus_outlast_what_comes_meanwhile(browser: Any, tmp_path: Path) -> None:
    """A list and a page that change many times a second can be used with mouse and keyboard."""
    run = Run.create(tmp_path, kind="genome", name="live", config={"stages": 2})
    append_generation(run, 0, ["founder-a", "founder-b"], parents=[])

    def grow(number: int, visit: Visit, seen: str) -> None:
        append_generation(run, number, [f"child-{number}"], parents=["founder-a"])
        visit.see(seen)

    def press(visit: Visit, target: Any, *, number: int, seen: str) -> None:
        box = target.bounding_box()
        visit.page.mouse.move(box["x"] + 5, box["y"] + box["height"] / 2)
        visit.page.mouse.down()
        grow(number, visit, seen)
        visit.page.mouse.up()

    with open_page(tmp_path, port=0) as page:
        visit = Visit(browser, page.url)
        pick = visit.page.get_by_label("Select live")
        pick.focus()
        visit.page.keyboard.press("Space")
        visit.page.get_by_text("Select one more").wait_for()
        grow(1, visit, ".runs .value b:has-text('0.41')")
        assert pick.is_checked() and pick.evaluate("(box) => box === document.activeElement")
        link = visit.see(".runs a.name")
        press(visit, link, number=2, seen=".runs .value b:has-text('0.42')")
        visit.see(".state .mark", text="running")
        tab = visit.page.get_by_role("link", name="Events")
        press(visit, tab, number=3, seen=".facts dd:text-is('10')")
        button = visit.see(".events .lt-space button", text="2")
        press(visit, button, number=4, seen=".events .key:has-text('child-4')")
        visit.see(".detail h3", text="candidate founder-a")
        assert button.evaluate("(one) => one === document.activeElement")
        run.close()
        visit.close()


def test_what_answers_late_is_not_drawn_over_what_is_looked_at(
    browser: Any, tmp_path: Path
) -> None:
    for name in ("a", "b"):
        make_eval(tmp_path, name)
    with open_page(tmp_path, port=0) as page:
        visit = Visit(browser, page.url)
        visit.see(".runs a.name", text="a")
        held: list[Any] = []
        for path in ("**/api/runs/a", "**/api/runs/a/curves*", "**/event/3"):
            visit.page.route(path, lambda route: held.append(route))
        for place in ("#/run/a", "#/compare?runs=a&runs=b"):
            visit.page.evaluate("(place) => { location.hash = place }", place)
            while not held:
                visit.page.wait_for_timeout(20)
            visit.page.evaluate("location.hash = '#/runs'")
            visit.see(".runs a.name", text="b")
            for route in held:
                route.continue_()
            held.clear()
            visit.page.wait_for_timeout(500)
            assert visit.page.locator("h1").all_inner_texts() == ["Runs"]
            assert visit.page.locator("h2").count() == 0 and "Runs" in visit.page.title()
        for place, table, first in (("?tab=events", ".events", 2), ("", ".tasks", 1)):
            visit.page.goto(f"{visit.origin}#/run/b{place}")
            rows = visit.page.locator(f"{table} .lt-space button")
            for row in (first, first + 1):
                rows.nth(row).click()
                while not held:
                    visit.page.wait_for_timeout(20)
            for route in held:
                route.continue_()
            held.clear()
            visit.page.wait_for_timeout(500)
            assert "sum/2" in visit.see(".detail h3").inner_text()
        visit.close()


def test_a_run_that_is_made_again_under_its_name_is_shown_alone(
    browser: Any, tmp_path: Path
) -> None:
    make_eval(tmp_path, size=9, text="former")
    with open_page(tmp_path, port=0) as page:
        visit = Visit(browser, page.url, "#/run/scores")
        visit.see(".tasks .lt-space button", text="sum/8former")
        shutil.rmtree(tmp_path / "scores")
        make_eval(tmp_path, size=2, text="new")
        visit.see(".tasks .lt-space button", text="sum/1new")
        assert visit.page.get_by_text("former").count() == 0
        visit.complaints.clear()  # of what was not there
        visit.close()


def test_a_list_follows_a_server_that_was_started_anew(browser: Any, tmp_path: Path) -> None:
    key = "sixteen letters!"
    for name in ("a", "b"):
        make_eval(tmp_path, name)
    with open_page(tmp_path, port=0, key=key) as page:
        visit = Visit(browser, f"{page.url}?token=sixteen+letters!")
        visit.see(".runs a.name", text="b")
    visit.see(".trouble", text="rookery ui")
    shutil.rmtree(tmp_path / "b")
    make_eval(tmp_path, "c")
    with open_page(tmp_path, port=int(visit.origin.split(":")[-1].strip("/")), key=key):
        other = visit.context.new_page()
        other.goto(f"{visit.origin}?token=sixteen+letters!")
        visit.see(".runs a.name", text="c")
        assert visit.page.locator(".runs .lt-space a.name").all_inner_texts() == ["c", "a"]
        visit.complaints.clear()  # of the server that was gone
        visit.close()


def test_a_damaged_report_hides_no_other_part_of_its_run(browser: Any, tmp_path: Path) -> None:
    report = make_genome(tmp_path, report={}) / "report.json"
    whole = report.read_bytes()
    report.write_bytes(whole[:200])
    with open_page(tmp_path, port=0) as page:
        visit = Visit(browser, page.url, "#/run/demo")
        visit.see(".tab-body .trouble", text="report.json is damaged")
        visit.page.get_by_role("link", name="Events").click()
        visit.see(".events .key", text="founder-b")
        visit.page.get_by_role("link", name="Overview").click()
        visit.see(".tab-body .trouble")
        report.write_bytes(whole)
        visit.see(".number strong", text="0.910")
        visit.complaints.clear()  # of the answers that were errors
        visit.close()


def test_a_run_whose_process_is_killed_is_seen_to_be(browser: Any, tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from rookery.runs import Run\n"
        "run = Run.create(Path(sys.argv[1]), kind='eval', name='live', config={})\n"
        "run.append_blocking('note', {'number': 1}, key='first')\n"
        "print('written', flush=True)\n"
        "sys.stdin.read()\n"
    )
    words = [sys.executable, "-c", code, str(tmp_path)]
    pipe = subprocess.PIPE
    with (
        subprocess.Popen(words, text=True, stdin=pipe, stdout=pipe) as process,
        open_page(tmp_path, port=0) as page,
    ):
        assert process.stdout is not None and process.stdout.readline() == "written\n"
        visit = Visit(browser, page.url, "#/run/live?tab=events")
        visit.see(".state .mark", text="running")
        visit.see(".events .key", text="first")
        process.kill()
        visit.see(".state .mark", text="killed")
        visit.see(".state .reason", text="Its process ended silently")
        visit.close()


def test_a_run_that_is_killed_and_goes_on_is_watched_through_it(
    browser: Any, tmp_path: Path
) -> None:
    run = Run.create(tmp_path, kind="genome", name="live", config={"stages": 2})
    append_generation(run, 0, ["founder-a", "founder-b"], parents=[])
    with open_page(tmp_path, port=0) as page:
        visit = Visit(browser, page.url, "#/run/live")
        visit.see(".state .mark", text="running")
        run.close()  # without a word of its end
        visit.see(".state .mark", text="killed")
        with Run.open(tmp_path / "live") as run:
            visit.see(".state .mark", text="running")
            append_generation(run, 1, ["child"], parents=["founder-a"])
            visit.see(".lead", text="What child, the best so far, descends from")
            run.write_json("report.json", made_report(run="live", winner_id="child"))
            run.finish()
        visit.see(".state .mark", text="done")
        visit.see(".number strong", text="0.910")
        visit.close()


def test_an_export_opens_from_disk_and_asks_for_nothing(browser: Any, tmp_path: Path) -> None:
    for name, make in MAKERS.items():
        out = tmp_path / f"{name}.html"
        export_run(make(tmp_path / "runs", text=HOSTILE), out)
        visit = Visit(browser, out.as_uri())
        visit.see("h1", text=name)
        visit.see(".tab-body section")
        visit.page.get_by_role("link", name="Events").click()
        visit.see(".events .lt-space .lt-row button").click()
        visit.see(".detail .json")
        visit.close()


def test_large_runs_are_shown_in_part(browser: Any, tmp_path: Path) -> None:
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
    with open_page(tmp_path, port=0) as page:
        table = Visit(browser, page.url)
        table.see(".lead", text="1,000 runs in")
        assert table.page.locator(".runs .lt-row").count() < 60, "only what is seen exists"
        table.close()
        events = Visit(browser, page.url, "#/run/long?tab=events")
        events.see(".events .lt-space .lt-row button")
        events.page.evaluate("document.querySelector('.lt-body').scrollTop = 1e9")
        events.see(".events .key", text="99/999")
        events.close()
        search = Visit(browser, page.url, "#/run/large")
        search.see(".lead, .number, h2")
        search.page.locator(".chart").first.scroll_into_view_if_needed()  # drawn when it is seen
        search.see(".chart canvas")
        search.close()
        spec = spec_from_file_location("benchmark", BENCHMARK)
        assert spec is not None and spec.loader is not None
        benchmark = module_from_spec(spec)
        sys.modules["benchmark"] = benchmark  # where its dataclass looks for itself
        spec.loader.exec_module(benchmark)
        bench = benchmark.Bench(browser, page.url, os.getpid())
        for place, wanted, move in (
            ("#/runs", ".runs .lt-space .lt-row", benchmark.SCROLL),
            ("#/run/long?tab=events", ".events .lt-space button", benchmark.SCROLL),
            ("#/run/large", ".chart canvas", benchmark.PAN),
        ):
            seen = bench.visit(place, wanted, move)
            assert seen.page_s < 1 and seen.frame_ms < 20, (place, seen)


def test_rows_that_are_scrolled_show_others_and_keep_their_order(
    browser: Any, tmp_path: Path
) -> None:
    """No node is made for a row while a list is scrolled, and no row gets the focus of another."""
    make_eval(tmp_path, size=3000)
    body = "document.querySelector('.lt-body')"
    rows = "[...document.querySelectorAll('.lt-space > .lt-row')]"
    with open_page(tmp_path, port=0) as page:
        visit = Visit(browser, page.url, "#/run/scores")
        visit.see(".tasks .lt-space button", text="sum/3")
        visit.page.evaluate(f"{body}.scrollTop = 3000")
        visit.see(".tasks .lt-space button", text="sum/95")
        visit.page.evaluate(
            f"window.made = 0; window.known = new Set({rows});"
            "new MutationObserver((all) => all.forEach((one) => one.addedNodes.forEach((node) => {"
            "    if (!window.known.has(node)) window.made += 1;"
            "    window.known.add(node);"
            "}))).observe(document.querySelector('.lt-space'), { childList: true, subtree: true })"
        )
        held = visit.see(".tasks .lt-space button", text="sum/90")
        held.evaluate("(one) => one.focus({ preventScroll: true })")
        for top in (3100, 3700, 3200, 60_000):
            visit.page.evaluate(f"{body}.scrollTop = {top}")
            visit.see(".tasks .lt-space button", text=f"sum/{top // 34 + 5}")
        assert not visit.page.evaluate(f"{body}.contains(document.activeElement)")
        assert visit.page.evaluate("window.made") <= 4, "the row that had the focus"
        index = "Number(row.getAttribute('aria-rowindex'))"
        texts = f"{rows}.every((row) => row.textContent.startsWith(`sum/${{{index} - 1}}`))"
        numbers = f"{rows}.map((row) => {index})"
        while (found := visit.page.evaluate(numbers)) != sorted(found):
            visit.page.wait_for_timeout(20)
        assert len(found) > 20 and visit.page.evaluate(texts)
        visit.close()
