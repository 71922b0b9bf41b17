"""`report.html` in a real browser: every chart is drawn, nothing is fetched, nothing fails."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from marks import long
from ui.browser import Visit, browser, needs_chromium
from ui.made import made_program, made_row
from ui.made_runs import HOSTILE, make_evolve, make_genome, make_grpo, make_icm

from rookery.ui.live.export import render_run

__all__ = ["browser"]

pytestmark = needs_chromium
CHARTS: dict[Callable[..., Path], list[str]] = {
    make_genome: [
        "Fitness by generation, every candidate a point",
        "Candidates by generation, joined to their parents",
        "Accuracy of every method on label-kind",
        "Accuracy of every method on add-two",
        "Tokens used by each generation",
    ],
    make_grpo: ["Reward over the steps"],
    make_icm: [
        "Utility over the iterations of each chain",
        "Items by the log-odds of their label",
        "Prompt tokens of a plain loop and of this search",
    ],
    make_evolve: [
        "Score of every program, and the best so far",
        "Programs by generation, joined to their parents",
        "Cells of island 0",
        "Cells of island 1",
        "Iterations by how many were decided meanwhile",
    ],
}
"""By loop, the charts that a report has."""


class Report(Visit):
    """The page of a run, opened from disk."""

    def __init__(self, browser: Any, run: Path, **options: Any) -> None:
        path = run / "report.html"
        path.write_text(render_run(run, status="done"), encoding="utf-8")
        super().__init__(browser, path.as_uri(), **options)

    def chart(self, label: str) -> Any:
        found = self.page.get_by_label(label, exact=True)
        found.scroll_into_view_if_needed()
        found.locator("canvas").first.wait_for(state="visible", timeout=10_000)
        return found

    def num_colours(self, label: str) -> int:
        """How many colours a chart has: an empty one has one."""
        canvas = self.chart(label).locator("canvas").first
        num: int = canvas.evaluate(
            """(canvas) => {
                const { width, height } = canvas;
                const { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
                return new Set(new Uint32Array(data.buffer)).size;
            }"""
        )
        return num

    def point_at(self, label: str, place: list[float], *, series: int) -> str:
        """What a chart tells of a value."""
        box = self.chart(label)
        x, y = box.evaluate(
            """(box, [place, series]) => {
                box.scrollIntoView({ block: "center" });
                const corner = box.getBoundingClientRect();
                const chart = echarts.getInstanceByDom(box);
                const [x, y] = chart.convertToPixel({ seriesIndex: series }, place);
                return [corner.x + x, corner.y + y];
            }""",
            [place, series],
        )
        self.page.mouse.move(x, y)
        tip = box.locator(".tip")
        tip.wait_for(state="visible", timeout=5000)
        return " ".join(tip.inner_text().split())


Reports = Callable[..., Report]


@pytest.fixture
def report(browser: Any) -> Iterator[Reports]:
    """Opens the report of a run; it is checked at the end of the test."""
    opened: list[Report] = []

    def begin(run: Path, **options: Any) -> Report:
        opened.append(Report(browser, run, **options))
        return opened[-1]

    yield begin
    for one in opened:
        one.close()


@pytest.mark.parametrize(
    ("scheme", "width"), [("light", 1200), pytest.param("dark", 390, marks=long)]
)
def test_every_chart_is_drawn(report: Reports, tmp_path: Path, scheme: str, width: int) -> None:
    size = {"width": width, "height": 900}
    for make, labels in CHARTS.items():
        one = report(make(tmp_path, report={}), viewport=size, color_scheme=scheme)
        one.see(".state .mark", text="done")
        for label in labels:
            assert one.num_colours(label) > 3, label
        shot = tmp_path / f"{make.__name__}.png"
        one.page.screenshot(path=str(shot), full_page=True)
        assert shot.stat().st_size > 20_000


def test_pointing_at_what_is_drawn_tells_what_it_is(report: Reports, tmp_path: Path) -> None:
    """Names stay text, there and in tables."""
    lineage = [{"id": "g001-c00", "parents": ["founder-a", "founder-b"], "weights": [0.6, 0.4]}]
    one = report(make_genome(tmp_path, report={"lineage": lineage}))
    one.see("label.switch input").check()
    told = one.point_at("Candidates by generation, joined to their parents", [1, 2], series=1)
    assert told.startswith("g001-c00 made by linear from founder-a × 0.60 from founder-b × 0.40")
    assert one.point_at("Accuracy of every method on add-two", [0.2, 0], series=0) == (
        "evolved add-two 0.810"
    )
    one = report(make_evolve(tmp_path, report={}))
    assert one.point_at("Cells of island 0", [0, 3], series=0) == (
        "p0 score 0.5 complexity 0 diversity 3"
    )
    drawn = "Iterations by how many were decided meanwhile"
    assert one.point_at(drawn, [1, 3], series=0).endswith("iterations 6.000")
    rows = [made_row(HOSTILE, 0.5, by_source={HOSTILE: 0.5}), made_row("other", 0.4, by_source={})]
    keys = {"rows": rows, "warnings": [HOSTILE], "tasksets": [{"name": HOSTILE}]}
    one = report(make_genome(tmp_path, "hostile", text=HOSTILE, report=keys))
    assert HOSTILE in one.see("table.comparison").inner_text()
    assert HOSTILE in one.point_at(f"Accuracy of every method on {HOSTILE}", [0.2, 0], series=0)
    one.see(".warnings", text=HOSTILE)


@long
def test_every_row_is_in_the_table_as_in_the_terminal(report: Reports, tmp_path: Path) -> None:
    """Without JavaScript the result is read, too."""
    run = make_genome(tmp_path)
    one = report(run)
    rows = one.see("table.comparison").locator("tbody tr").all_inner_texts()
    assert " ".join(rows[0].split()) == (
        "evolved g002-c01 0.910 0.880 to 0.940 +0.210 +0.160 to +0.260 0"
    )
    assert len(rows) == 8
    ends = one.page.locator("table.comparison .ends").inner_text().split()
    assert ends == ["0.3", "1"], "a round scale"
    one.see(".costs", text="46 candidates")
    context = one.context.browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(one.origin)
    assert "+0.210" in page.locator("table").first.inner_text()
    assert page.locator("noscript p").is_visible()
    context.close()


@long
def test_the_charts_follow_a_change_of_scheme_and_width(report: Reports, tmp_path: Path) -> None:
    one = report(make_genome(tmp_path), color_scheme="light")
    box = one.chart("Tokens used by each generation")
    light = box.screenshot()
    one.page.emulate_media(color_scheme="dark")
    one.page.wait_for_timeout(300)
    assert box.screenshot() != light
    one.page.set_viewport_size({"width": 420, "height": 900})
    narrow = "(box) => box.querySelector('canvas').clientWidth < 420"
    one.page.wait_for_function(narrow, arg=box.element_handle(), timeout=5000)


@long
def test_an_empty_and_a_short_report_open_without_complaint(
    report: Reports, tmp_path: Path
) -> None:
    nothing = ("rows", "lineage", "generations", "tasksets", "warnings")
    short = {"rows": [{"name": "a"}], "front": [{"id": "b"}, {"id": "c"}]}
    for name, keys in (("empty", {key: [] for key in nothing}), ("short", short)):
        report(make_genome(tmp_path, name, report=keys)).see("h2", text="Fitness per generation")


@long
def test_the_winning_line_opens_to_its_diffs(report: Reports, tmp_path: Path) -> None:
    line = [made_program("first1", iteration=0, parent=""), made_program("p2", parent="p1")]
    one = report(make_evolve(tmp_path, report={"winning_line": line}))
    steps = one.see("section", text="The winning line").locator("details")
    assert [text.split(":")[0] for text in steps.locator("summary").all_inner_texts()] == [
        "Iteration 0",
        "Iteration 7",
    ]
    steps.nth(1).locator("summary").click()
    diff = steps.nth(1).locator("pre.diff")
    diff.wait_for(state="visible", timeout=5000)
    assert diff.locator(".removed").last.inner_text() == "-x = 1 # "
    assert diff.locator(".added").last.inner_text() == "+x = 2 # "
    assert "speed −2.5" in " ".join(steps.nth(1).inner_text().split())
    one.see("section", text="Failures")
