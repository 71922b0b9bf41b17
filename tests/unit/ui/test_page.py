"""The HTML of the page: self-contained, escaped, complete."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ui.made import made_report, made_row

from rookery.reports import parse_genome_report
from rookery.ui.page import _inline, render_genome_page
from rookery.ui.wording import report_rows


def render_page(document: dict[str, Any]) -> str:
    return render_genome_page(parse_genome_report(document))


HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)> & \"quoted\" 'too'"


class Page(HTMLParser):
    """Tags with their attributes, the texts of the table's cells, and the scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self.scripts: list[str] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in {"meta", "line", "circle"}:
            self._open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in {"td", "th"}:
            self.rows[-1].append("")
        if tag == "script":
            self.scripts.append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "script" in self._open:
            self.scripts[-1] += data
        elif "style" not in self._open:
            self.text += data
            if {"td", "th"} & set(self._open):
                self.rows[-1][-1] += data

    @property
    def document(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads(self.scripts[0])
        return loaded

    @property
    def charts(self) -> list[str | None]:
        return [attrs["data-chart"] for _, attrs in self.tags if "data-chart" in attrs]


def words(text: str) -> str:
    return " ".join(text.replace("\N{MINUS SIGN}", "-").split())


def test_the_page_asks_nobody_for_anything() -> None:
    html = render_page(made_report())
    page = Page(html)
    assert html.startswith("<!doctype html>")
    assert not [a for _, a in page.tags if {"src", "href", "srcset", "action", "data"} & a.keys()]
    assert not {tag for tag, _ in page.tags} & {"link", "iframe", "object", "embed", "base", "img"}
    style = re.findall(r"<style>(.*?)</style>", html, re.DOTALL)[0]
    assert "url(" not in style
    assert "@import" not in style


def test_the_policy_allows_the_two_scripts_and_nothing_else() -> None:
    page = Page(render_page(made_report()))
    policy = next(a["content"] for t, a in page.tags if t == "meta" and "http-equiv" in a) or ""
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";") if rule.strip())
    assert rules["default-src"] == "'none'"
    hashes = {
        "'sha256-" + base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() + "'"
        for s in page.scripts[1:]
    }
    assert len(hashes) == 2
    assert set(rules["script-src"].split()) == hashes


def test_every_row_is_in_the_table_as_in_the_terminal() -> None:
    report = made_report()
    page = Page(render_page(report))
    shown = [[words(cell) for cell in row] for row in page.rows[1 : 1 + len(report["rows"])]]
    for source, cells, row in zip(
        report["rows"], shown, report_rows(parse_genome_report(report).rows), strict=True
    ):
        name, mean, interval, gain, failed = row
        assert cells[0] == f"{name} {source['note']}".strip()
        assert cells[1] == f"{mean} {interval}"
        assert cells[3:] == [gain, failed]


def test_the_headline_is_the_winner() -> None:
    text = words(Page(render_page(made_report())).text)
    assert "Accuracy of the winner 0.910 95 % interval 0.880 to 0.940" in text
    assert "Gain over the best founder +0.210 95 % interval +0.160 to +0.260" in text
    assert "Better than the best founder." in text
    assert "46 candidates 12,345 rollouts 123,456 tokens 2 min 0 s 1,025 tokens/s" in text
    assert "1 warning 2 tasks of add-two could not be scored." in text


def test_every_chart_has_a_place() -> None:
    charts = Page(render_page(made_report())).charts
    assert charts == ["fitness", "lineage", "taskset", "taskset", "tokens"]


def test_text_of_users_stays_text() -> None:
    lineage = [{"id": HOSTILE, "operator": HOSTILE, "parents": [HOSTILE], "is_winner": True}]
    report = made_report(
        run=HOSTILE,
        model=HOSTILE,
        tasksets=[{"name": HOSTILE}],
        rows=[made_row(HOSTILE, 0.5, note=HOSTILE, is_winner=True, by_source={HOSTILE: 0.5})],
        generations=[{"stage": HOSTILE}],
        lineage=lineage,
        warnings=[HOSTILE],
    )
    html = render_page(report)
    page = Page(html)
    assert "<script>alert" not in html
    assert "img" not in {tag for tag, _ in page.tags}
    assert len(page.scripts) == 3
    assert not [attrs for _, attrs in page.tags if "onerror" in attrs]
    assert page.text.count(HOSTILE) >= 9
    assert page.document["rows"][0]["name"] == HOSTILE
    assert "<" not in page.scripts[0]


def test_scripts_cannot_end_early() -> None:
    given_script = "a = '</script>' + '</SCRIPT x>' + '<!-- <script>'; b = 1 </re/.exec(a);"
    inlined = _inline(given_script)
    assert not re.search(r"</script|<!--", inlined, re.IGNORECASE)
    assert inlined.replace("<\\", "<") == given_script


@pytest.mark.parametrize("key", ["rows", "generations", "lineage", "tasksets", "warnings"])
def test_any_part_may_be_missing(key: str) -> None:
    report = made_report()
    del report[key]
    for document in (report, made_report(**{key: []})):
        page = Page(render_page(document))
        assert page.document[key] == []
    missing = {"rows": "taskset", "generations": "fitness", "lineage": "lineage"}.get(key)
    assert missing not in page.charts


def test_an_empty_report_is_a_page() -> None:
    page = Page(render_page({}))
    assert page.charts == []
    assert "No result yet." in page.text
    assert page.rows == []


def test_numbers_that_are_none_reach_no_script() -> None:
    report = made_report(rows=[made_row("a", float("nan"), gain={"mean": float("inf")})])
    html = render_page(report)
    assert "NaN" not in Page(html).scripts[0]
    assert Page(html).document["rows"][0]["mean"] is None


def test_equal_rows_have_a_scale() -> None:
    rows = [made_row("a", 0.5, low=0.5, high=0.5), made_row("b", 0.5, low=None, high=None)]
    places = re.findall(r'cx="([0-9.]+)%"', render_page(made_report(rows=rows)))
    assert places == ["50.00", "50.00"]


def test_marks_of_the_table_lie_on_a_round_scale() -> None:
    rows = [made_row("a", 0.5, low=0.31, high=0.94), made_row("best founder", 0.65)]
    html = render_page(made_report(rows=rows))
    assert "<span>0.3</span><span>1</span>" in html
    assert re.findall(r'cx="([0-9.]+)%"', html) == ["28.57", "50.00"]


def test_weights_are_shown_when_they_differ() -> None:
    assert "60 tasks, weight 2" in Page(render_page(made_report())).text
    alike = [{"name": "add-two", "weight": 1.0, "num_report": 60}]
    assert "weight" not in Page(render_page(made_report(tasksets=alike))).text


def test_long_lists_of_generations_are_cut_and_say_so() -> None:
    generations = [{"generation": index, "best": 0.5} for index in range(250)]
    page = Page(render_page(made_report(generations=generations)))
    assert "The last 200 of 250 generations." in page.text
    assert len(page.document["generations"]) == 250


names = st.text(max_size=12)
numbers = st.none() | st.floats()
rows = st.fixed_dictionaries(
    {"name": names},
    optional={
        "is_winner": st.booleans(),
        "mean": numbers,
        "low": numbers,
        "high": numbers,
        "gain": st.none()
        | st.fixed_dictionaries({"mean": numbers, "low": numbers, "high": numbers}),
        "by_source": st.dictionaries(names, numbers, max_size=2),
        "num_failed": st.integers(0, 10**6),
        "note": names,
    },
)
candidates = st.fixed_dictionaries(
    {"id": names, "generation": st.integers(0, 5)},
    optional={
        "parents": st.lists(names, max_size=2),
        "weights": st.lists(numbers, max_size=3),
        "score": numbers,
        "is_winner": st.booleans(),
        "is_ancestor": st.booleans(),
    },
)
generations = st.fixed_dictionaries(
    {"generation": st.integers(0, 5)},
    optional={"best": numbers, "mean": numbers, "scores": st.lists(numbers, max_size=3)},
)
reports = st.fixed_dictionaries(
    {},
    optional={
        "run": names,
        "rows": st.lists(rows, max_size=3),
        "lineage": st.lists(candidates, max_size=3),
        "generations": st.lists(generations, max_size=3),
        "seconds": numbers,
        "num_tokens": st.integers(0, 10**12),
        "warnings": st.lists(names, max_size=2),
    },
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(reports)
def test_any_report_is_a_well_formed_page(report: dict[str, Any]) -> None:
    html = render_page(report)
    html.encode()
    page = Page(html)
    assert [row["name"] for row in page.document["rows"]] == [
        row[0] for row in report_rows(parse_genome_report(report).rows)
    ]
    assert len(page.scripts) == 3
