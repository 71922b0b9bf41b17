"""The report page in a real browser: every chart is drawn, nothing is fetched, nothing fails."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ui import test_evolve as evolution
from ui.made import made_report, made_row

from rookery.reports import parse_genome_report
from rookery.ui.page import render_genome_page

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

CHROMIUM = Path(os.environ.get("ROOKERY_CHROMIUM", "/usr/bin/chromium"))
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--disable-sync",
]
HOSTILE = "<img src=x onerror=alert(1)>"

pytestmark = pytest.mark.skipif(
    not CHROMIUM.exists(), reason=f"no Chromium at {CHROMIUM}: set ROOKERY_CHROMIUM"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS)
        yield chromium
        chromium.close()


class Visit:
    """A page opened from disk; remembers what went wrong and what it asked for."""

    def __init__(self, browser: Any, folder: Path, report: dict[str, Any], **options: Any) -> None:
        self.path = folder / "report.html"
        html = options.pop("html", None) or render_genome_page(parse_genome_report(report))
        self.path.write_text(html, encoding="utf-8")
        self.page = browser.new_page(**options)
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: self.complaints.append(dialog.message))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(self.path.as_uri())

    def charts(self) -> list[dict[str, Any]]:
        """Kind, drawn size and number of marks of each chart."""
        found: list[dict[str, Any]] = self.page.evaluate(
            """() => [...document.querySelectorAll("[data-chart]")].map((box) => {
                const drawing = box.querySelector("svg, canvas");
                const size = drawing?.getBoundingClientRect();
                return {
                    kind: box.dataset.chart,
                    tag: drawing?.tagName.toLowerCase(),
                    width: size?.width ?? 0,
                    height: size?.height ?? 0,
                    marks: box.querySelectorAll("svg path, svg circle").length,
                    text: box.textContent,
                };
            })"""
        )
        return found

    def pixel(self, kind: str, place: list[float], *, series: int) -> tuple[float, float]:
        """Where a chart draws a value, in page coordinates."""
        x, y = self.page.evaluate(
            """([kind, place, series]) => {
                const box = document.querySelector(`[data-chart=${kind}]`);
                box.scrollIntoView({ block: "center" });
                const corner = box.getBoundingClientRect();
                const chart = echarts.getInstanceByDom(box);
                const [x, y] = chart.convertToPixel({ seriesIndex: series }, place);
                return [corner.x + x, corner.y + y];
            }""",
            [kind, place, series],
        )
        return x, y

    def is_too_wide(self) -> bool:
        root = "document.documentElement"
        return bool(self.page.evaluate(f"{root}.scrollWidth > {root}.clientWidth"))


def large_report() -> dict[str, Any]:
    """1,200 candidates: enough that the lineage is drawn on a canvas."""
    lineage = [
        {
            "id": f"g{generation:03d}-c{place:02d}",
            "generation": generation,
            "operator": "linear",
            "parents": [f"g{generation - 1:03d}-c{place // 2:02d}"] if generation else [],
            "weights": [1.0] if generation else [],
            "score": (place * 7 % 30) / 30,
            "is_winner": (generation, place) == (39, 0),
            "is_ancestor": place == 0,
        }
        for generation in range(40)
        for place in range(30)
    ]
    return made_report(lineage=lineage)


@pytest.mark.parametrize(
    ("scheme", "width"), [("light", 1200), ("dark", 1200), ("light", 390), ("dark", 760)]
)
def test_every_chart_is_drawn(browser: Any, tmp_path: Path, scheme: str, width: int) -> None:
    size = {"width": width, "height": 900}
    visit = Visit(browser, tmp_path, made_report(), viewport=size, color_scheme=scheme)
    charts = visit.charts()
    assert [c["kind"] for c in charts] == ["fitness", "lineage", "taskset", "taskset", "tokens"]
    for chart in charts:
        assert chart["width"] > 200
        assert chart["height"] > 200
        assert chart["marks"] > 3
    assert "Score on the search tasks" in charts[0]["text"]
    assert "founders" in charts[1]["text"]
    assert "0.910" in charts[2]["text"]
    assert visit.complaints == []
    assert visit.requests == [visit.path.as_uri()]
    assert not visit.is_too_wide()
    shot = tmp_path / f"{scheme}-{width}.png"
    visit.page.screenshot(path=str(shot), full_page=True)
    assert shot.stat().st_size > 20_000
    visit.page.close()


def test_pointing_at_a_candidate_tells_how_it_was_made(browser: Any, tmp_path: Path) -> None:
    visit = Visit(browser, tmp_path, made_report())
    # Columns are founders, 0, 1, 2; the winner is the first of the last.
    visit.page.mouse.move(*visit.pixel("lineage", [3, 0], series=1))
    tip = visit.page.locator("[data-chart=lineage] .tip")
    tip.wait_for(state="visible", timeout=5000)
    text = " ".join(tip.inner_text().split())
    assert text == (
        "g002-c01 made by linear from g001-c00 × 0.60 from founder-a × 0.40 score 0.800 winner"
    )
    assert visit.complaints == []
    visit.page.close()


def test_pointing_at_a_generation_without_a_mean_names_it(browser: Any, tmp_path: Path) -> None:
    generations = made_report()["generations"]
    generations[2] |= {"mean": None, "best": None}
    visit = Visit(browser, tmp_path, made_report(generations=generations))
    visit.page.mouse.move(*visit.pixel("fitness", [2, 0.5], series=0))
    tip = visit.page.locator("[data-chart=fitness] .tip")
    tip.wait_for(state="visible", timeout=5000)
    assert tip.inner_text().startswith("Generation 2")
    assert visit.complaints == []
    visit.page.close()


def test_names_stay_text_in_tooltips(browser: Any, tmp_path: Path) -> None:
    lineage = [{"id": HOSTILE, "operator": HOSTILE, "generation": 0, "score": 0.5}]
    rows = [made_row(HOSTILE, 0.5, by_source={HOSTILE: 0.5}), made_row("other", 0.4, by_source={})]
    visit = Visit(browser, tmp_path, made_report(lineage=lineage, rows=rows))
    visit.page.mouse.move(*visit.pixel("lineage", [0, 0], series=1))
    tip = visit.page.locator("[data-chart=lineage] .tip")
    tip.wait_for(state="visible", timeout=5000)
    assert HOSTILE in tip.inner_text()
    visit.page.mouse.move(*visit.pixel("taskset", [0.2, 0], series=0))
    visit.page.locator("[data-chart=taskset] .tip").wait_for(state="visible", timeout=5000)
    assert visit.page.locator("img").count() == 0
    assert visit.complaints == []
    visit.page.close()


def test_the_charts_follow_a_change_of_scheme_and_width(browser: Any, tmp_path: Path) -> None:
    visit = Visit(browser, tmp_path, made_report(), color_scheme="light")
    accent = "getComputedStyle(document.documentElement).getPropertyValue('--accent')"
    light = visit.page.evaluate(accent)
    uses = f"document.querySelector('[data-chart=taskset] svg').outerHTML.includes({accent})"
    assert visit.page.evaluate(uses)
    visit.page.emulate_media(color_scheme="dark")
    assert visit.page.evaluate(accent) != light
    visit.page.wait_for_function(uses, timeout=5000)
    visit.page.set_viewport_size({"width": 420, "height": 900})
    narrow = "document.querySelector('[data-chart=fitness] svg').clientWidth < 420"
    visit.page.wait_for_function(narrow, timeout=5000)
    assert visit.complaints == []
    visit.page.close()


def test_a_large_lineage_is_drawn_on_a_canvas(browser: Any, tmp_path: Path) -> None:
    visit = Visit(browser, tmp_path, large_report())
    lineage = visit.charts()[1]
    assert lineage["tag"] == "canvas"
    assert lineage["width"] > 700
    colours = visit.page.evaluate(
        """() => {
            const canvas = document.querySelector("[data-chart=lineage] canvas");
            const { width, height } = canvas;
            const { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
            return new Set(new Uint32Array(data.buffer)).size;
        }"""
    )
    assert colours > 50
    assert visit.complaints == []
    visit.page.close()


def test_an_empty_and_a_short_report_open_without_complaint(browser: Any, tmp_path: Path) -> None:
    nothing = [{"id": "a"}, {"id": "b", "parents": ["b", "a", "z"], "generation": 3}]
    short = {"generations": [{"generation": 0}], "lineage": nothing, "rows": [{"name": "a"}]}
    for report in ({}, short, made_report(rows=[])):
        visit = Visit(browser, tmp_path, report)
        assert visit.complaints == []
        assert all(chart["height"] > 0 for chart in visit.charts())
        visit.page.close()


def test_the_table_needs_no_javascript(browser: Any, tmp_path: Path) -> None:
    visit = Visit(browser, tmp_path, made_report(), java_script_enabled=False)
    table = visit.page.locator("table.comparison")
    assert table.is_visible()
    assert "+0.210" in table.inner_text()
    remarks = visit.page.locator("noscript p")
    assert remarks.count() == 5
    assert remarks.first.is_visible()
    visit.page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_charts_of_an_evolution_are_drawn(browser: Any, tmp_path: Path, scheme: str) -> None:
    report = evolution.made_report(warnings=[HOSTILE])
    html = evolution.render_evolve_page(report)
    visit = Visit(browser, tmp_path, {}, html=html, color_scheme=scheme)
    charts = visit.charts()
    assert [c["kind"] for c in charts] == ["curve", "grid", "grid", "staleness"]
    assert all(chart["width"] > 200 and chart["marks"] >= 1 for chart in charts)
    assert "complexity" in charts[1]["text"]
    assert visit.complaints == []
    assert visit.requests == [visit.path.as_uri()]
    assert not visit.is_too_wide()
    visit.page.close()


class Evolution:
    """The page of an evolution, as a reader uses it."""

    def __init__(self, browser: Any, folder: Path, **keys: Any) -> None:
        html = evolution.render_evolve_page(evolution.made_report(**keys))
        self.visit = Visit(browser, folder, {}, html=html)
        self.page = self.visit.page

    def point_at(self, kind: str, place: list[float]) -> str:
        """What the first chart of a kind tells of a value."""
        self.page.mouse.move(*self.visit.pixel(kind, place, series=0))
        tip = self.page.locator(f"[data-chart={kind}]").first.locator(".tip")
        tip.wait_for(state="visible", timeout=5000)
        return " ".join(tip.inner_text().split())

    def close(self) -> None:
        assert self.visit.complaints == []
        self.page.close()


def test_the_winning_line_of_an_evolution_opens_to_its_diffs(browser: Any, tmp_path: Path) -> None:
    opened = Evolution(browser, tmp_path)
    line = opened.page.locator("section[aria-labelledby=line] details")
    assert [text.split(":")[0] for text in line.locator("summary").all_inner_texts()] == [
        "Iteration 0",
        "Iteration 7",
        "The best program",
    ]
    step = line.nth(1)
    diff = step.locator("pre.diff")
    assert not diff.is_visible(), "folded until it is wanted"
    step.locator("summary").click()
    assert diff.is_visible()
    assert diff.locator(".removed").all_inner_texts() == ["-x = 1"]
    assert diff.locator(".added").all_inner_texts() == ["+x = 2"]
    colour = "element => getComputedStyle(element).color"
    assert diff.locator(".added").evaluate(colour) != diff.locator(".removed").evaluate(colour)
    assert "speed −2.5" in step.inner_text()
    line.nth(2).locator("summary").click()
    assert line.nth(2).locator("pre").inner_text() == "x = 2\n"
    opened.close()


def test_the_charts_of_an_evolution_tell_what_is_pointed_at(browser: Any, tmp_path: Path) -> None:
    opened = Evolution(browser, tmp_path)
    assert opened.point_at("curve", [6, 0.75]) == "New best iteration 7 decided before 6 score 0.75"
    assert opened.point_at("grid", [0, 3]) == "p0 score 0.5 complexity 0 diversity 3"
    assert opened.point_at("staleness", [1, 3]) == "3 decided meanwhile iterations 6"
    opened.close()


def test_failures_and_costs_of_an_evolution_are_read_without_javascript(
    browser: Any, tmp_path: Path
) -> None:
    failures = [
        {"kind": "timeout", "count": 3, "first_iteration": 2, "first_message": "Over 10 s."},
        {"kind": "similar", "count": 1, "first_iteration": 4, "first_message": HOSTILE},
    ]
    html = evolution.render_evolve_page(evolution.made_report(failures=failures))
    visit = Visit(browser, tmp_path, {}, html=html, java_script_enabled=False)
    rows = visit.page.locator("section[aria-labelledby=failures] tbody tr").all_inner_texts()
    assert [row.split("\t") for row in rows] == [
        ["timeout", "3", "2", "Over 10 s."],
        ["similar", "1", "4", HOSTILE],
    ]
    assert "1 worker lost and replaced" in visit.page.locator("p.costs").last.inner_text()
    assert visit.page.locator("noscript p").first.is_visible()
    visit.page.close()


def test_a_large_grid_of_an_evolution_stays_within_the_page(browser: Any, tmp_path: Path) -> None:
    cells = [
        {"island": island, "cell": f"{x}-{y}", "program": f"p{island}{x}{y}", "score": x / 10}
        for island in range(5)
        for x in range(10)
        for y in range(10)
    ]
    html = evolution.render_evolve_page(evolution.made_report(cells=cells))
    for width in (390, 1200):
        size = {"width": width, "height": 900}
        visit = Visit(browser, tmp_path, {}, html=html, viewport=size)
        grids = [chart for chart in visit.charts() if chart["kind"] == "grid"]
        assert len(grids) == 5 and all(grid["marks"] >= 100 for grid in grids)
        assert not visit.is_too_wide() and visit.complaints == []
        visit.page.close()
