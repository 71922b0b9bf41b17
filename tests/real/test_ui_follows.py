"""`rookery ui` while runs grow and views change: what is looked at stays where it is."""

from pathlib import Path
from typing import Any

from marks import long
from ui.browser import Visits, browser, live, needs_chromium, visit
from ui.made_runs import (
    append_generation,
    make_eval,
    make_evolve,
    make_genome,
    make_grpo,
    make_icm,
    make_league,
    make_loop,
    make_pipeline,
)

from rookery.runs import NewEvent, Run
from rookery.ui.live.server import LivePage

__all__ = ["browser", "live", "visit"]

pytestmark = needs_chromium


@long
def test_a_list_stays_where_it_is_while_more_comes(
    live: LivePage, visit: Visits, tmp_path: Path
) -> None:
    run = Run.create(tmp_path, kind="genome", name="live", config={"stages": 2})
    append_generation(run, 0, ["founder-a"], parents=[])
    append_generation(run, 1, [f"early-{n}" for n in range(300)], parents=["founder-a"])
    labels = make_icm(tmp_path) / "labels.jsonl"
    rows = [f'{{"id": "i{n:03d}", "label": "yes", "margin": {n}}}\n' for n in range(300)]
    labels.write_text("".join(rows))
    body = "document.querySelector('.{} .lt-body').scrollTop"
    for place, kind in (("live", "dropped"), ("labels", "labels")):
        one = visit(live.url, f"#/run/{place}")
        one.see(f".{kind} .lt-space button")
        one.page.evaluate(f"{body.format(kind)} = 1500")
        if place == "live":
            append_generation(run, 2, [f"late-{n}" for n in range(30)], parents=["founder-a"])
            one.see(".lead", text="111 were dropped")
        else:
            with Run.open(tmp_path / "labels") as again:
                key, labels_then = "0/1/0", {"labels": "-01", "is_accepted": True}
                news = NewEvent(kind="decision", key=key, payload={"item": "i1", **labels_then})
                again.submit([news]).result()
                one.see(".lead", text="7 decisions")
                one.page.wait_for_timeout(500)
        assert one.page.evaluate(body.format(kind)) == 1500
    run.close()


@long
def test_what_is_zoomed_into_stays_while_a_run_grows(
    live: LivePage, visit: Visits, tmp_path: Path
) -> None:
    run = Run.create(tmp_path, kind="genome", name="live", config={"stages": 2})
    for number in range(40):
        append_generation(run, number, [f"child-{number}"], parents=[])
    drawn = "(box) => echarts.getInstanceByDom(box)"
    extent = f"{drawn}.getModel().getComponent('xAxis', 0).axis.scale.getExtent()"
    for place, label in (("?tab=curves", "genome/best"), ("", "Fitness by generation")):
        one = visit(live.url, f"#/run/live{place}")
        box = one.page.get_by_label(label).first
        box.scroll_into_view_if_needed()
        box.locator("canvas").wait_for()
        zoomed = "{ type: 'dataZoom', startValue: 10, endValue: 20 }"
        box.evaluate(f"{drawn}.dispatchAction({zoomed})".replace("=> ", "=> void "))
        assert box.evaluate(extent) == [10, 20]
        size = run.counts()["generation"]
        for number in range(size, size + 20):
            append_generation(run, number, [f"child-{number}"], parents=[])
        one.see(".facts dd", text=f"{2 * size + 41}")
        one.page.wait_for_timeout(700)
        assert box.evaluate(extent) == [10, 20]
        box.dblclick(position={"x": 200, "y": 100})
        first, last = box.evaluate(extent)
        assert first <= 0 and last >= size + 19, "double-click shows all"
    run.close()


@long
def test_a_link_is_not_changed_by_the_view_before(
    live: LivePage, visit: Visits, tmp_path: Path
) -> None:
    make_eval(tmp_path)
    one = visit(live.url)
    one.see(".runs a.name", text="scores")
    held: list[Any] = []
    one.page.route("**/events*", lambda route: held.append(route))
    one.page.evaluate("location.hash = '#/run/scores?tab=events&seq=2'")
    while not held:
        one.page.wait_for_timeout(20)
    one.page.evaluate("location.hash = '#/runs'")
    one.see(".runs a.name", text="scores")
    for route in held:
        route.continue_()
    one.page.wait_for_timeout(500)
    assert one.page.url.endswith("#/runs")


@long
def test_failed_answers_are_counted_before_there_is_a_report(
    live: LivePage, visit: Visits, tmp_path: Path
) -> None:
    with Run.create(tmp_path, kind="eval", name="live", config={}) as run:
        news = [
            NewEvent(
                kind="rollout",
                key=f"1|t{n}",
                payload={
                    "model": "m@1",
                    "task": f"t{n}",
                    "reward": 1.0 if n else None,
                    "error": "" if n else "No answer.",
                },
            )
            for n in range(3)
        ]
        run.submit(news).result()
    visit(live.url, "#/run/live").see(".comparison td.failed", text="1")


@long
def test_a_task_of_any_name_is_shown_with_its_completions(
    live: LivePage, visit: Visits, tmp_path: Path
) -> None:
    run_dir = make_grpo(tmp_path, report={})
    with Run.open(run_dir) as run:
        examples = [{"task": "constructor", "text": "so", "reward": 1.0}]
        run.submit(
            [NewEvent(kind="step", key="9", payload={"step": 9, "examples": examples})]
        ).result()
    visit(live.url, "#/run/train?step=9").see(".group h3", text="constructor")


def test_a_selection_of_rows_outlasts_a_scroll(
    live: LivePage, visit: Visits, tmp_path: Path
) -> None:
    make_eval(tmp_path, size=300)
    one = visit(live.url, "#/run/scores")
    one.see(".tasks .lt-space button")
    chosen = one.page.evaluate(
        "() => { const rows = document.querySelectorAll('.lt-space > .lt-row');"
        "getSelection().setBaseAndExtent(rows[14], 0, rows[16], 2); return String(getSelection()) }"
    )
    assert "sum/15" in chosen
    one.page.evaluate("document.querySelector('.lt-body').scrollTop = 400")
    numbers = (
        "[...document.querySelectorAll('.lt-space > .lt-row')]"
        ".map((row) => Number(row.getAttribute('aria-rowindex')))"
    )
    while (found := one.page.evaluate(numbers)) != sorted(found) or found[0] == 1:
        one.page.wait_for_timeout(20)
    assert one.page.evaluate("String(getSelection())") == chosen


@long
def test_long_names_fit_a_narrow_window(live: LivePage, visit: Visits, tmp_path: Path) -> None:
    for make in (make_genome, make_league, make_loop, make_eval, make_evolve):
        make(tmp_path, text="x" * 80)
    one = visit(live.url, viewport={"width": 320, "height": 700})
    for name in ("demo", "ways", "drawn", "scores", "programs"):
        one.go(f"#/run/{name}")
        one.see(".tab-body section")
        one.check()


@long
def test_another_page_begins_at_its_top(live: LivePage, visit: Visits, tmp_path: Path) -> None:
    make_pipeline(tmp_path, report={})
    make_genome(tmp_path, "steps-icm")
    one = visit(live.url, "#/run/steps", viewport={"width": 1000, "height": 500})
    one.see("section a.name", text="icm").scroll_into_view_if_needed()
    one.page.evaluate("scrollTo(0, 300)")
    one.see("section a.name", text="icm").click()
    one.see("h1", text="steps-icm")
    one.see(".lead", text="descends from")
    assert one.page.evaluate("scrollY") == 0
    one.page.go_back()
    one.see("h1", text="steps")


@long
def test_what_is_folded_out_keeps_the_focus_while_more_comes(
    live: LivePage, visit: Visits, tmp_path: Path
) -> None:
    run = Run.create(tmp_path, kind="genome", name="live", config={"stages": 2})
    append_generation(run, 0, ["founder-a"], parents=[])
    one = visit(live.url, "#/run/live")
    for summary in ("Numbers", "The ancestry as a list"):
        one.see("summary", text=summary).click()
    for number in (1, 2):
        append_generation(run, number, [f"child-{number}"], parents=["founder-a"])
        one.see("details td", text=f"0.4{number}0")
    assert one.page.evaluate("document.activeElement.innerText") == "The ancestry as a list"
    assert one.page.locator("details[open] tbody tr").count() == 5
    run.close()


@long
def test_an_answer_that_fails_once_is_asked_for_again(
    live: LivePage, visit: Visits, tmp_path: Path
) -> None:
    run = Run.create(tmp_path, kind="genome", name="live", config={"stages": 2})
    append_generation(run, 0, ["founder-a"], parents=[])
    one = visit(live.url)
    one.see(".runs a.name", text="live")
    one.page.route("**/api/runs/live", lambda route: route.abort(), times=1)
    one.page.evaluate("location.hash = '#/run/live'")
    one.see(".trouble", text="The server does not answer.")
    one.see("summary", text="The ancestry as a list").click()
    one.page.route("**/live/view?*", lambda route: route.abort(), times=1)
    append_generation(run, 1, ["child"], parents=["founder-a"])
    one.see(".trouble", text="This is the last that was seen.")
    one.see("details td", text="founder-a")
    one.see("details th", text="child")
    one.page.locator(".trouble").wait_for(state="hidden")
    one.complaints.clear()  # of the answers that failed
    run.close()
