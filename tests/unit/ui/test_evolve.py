"""The page and the table of an evolution of programs."""

from typing import Any

import pytest
from ui.test_page import HOSTILE, Page, words

from rookery.errors import RunError
from rookery.reports import parse_evolve_report
from rookery.ui import evolve
from rookery.ui.evolve import COLUMNS


def render_evolve_page(document: dict[str, Any]) -> str:
    return evolve.render_evolve_page(parse_evolve_report(document))


def evolve_rows(document: dict[str, Any]) -> list[tuple[str, ...]]:
    return evolve.evolve_rows(parse_evolve_report(document))


def made_program(id: str, /, **keys: Any) -> dict[str, Any]:
    return {
        "id": id,
        "iteration": 7,
        "generation": 2,
        "island": 0,
        "parent": "p0",
        "score": 0.75,
        "metrics": {"combined_score": 0.75, "speed": -2.5},
        "model": "big",
        "changes": "Change 1: tighter loop",
        "diff": "--- a\n+++ b\n@@ -1 +1 @@\n-x = 1\n+x = 2\n unchanged",
    } | keys


def made_report(**keys: Any) -> dict[str, Any]:
    first = made_program("p0", iteration=0, parent="", score=0.25, diff="", model="", changes="")
    best = made_program("p7", code="x = 2\n")
    return {
        "kind": "evolve",
        "run": "packing",
        "models": [{"name": "big", "weight": 1.0, "num_plays": 9, "gain": 0.5, "cost": 900.0}],
        "seed": 42,
        "mode": "steady",
        "language": "python",
        "feature_dimensions": ["complexity", "diversity"],
        "bins": [10, 10],
        "num_iterations": 10,
        "num_failed": 3,
        "num_programs": 8,
        "first": first,
        "best": best,
        "winning_line": [first, best],
        "curve": [
            {"iteration": 0, "num_decided": 0, "best": 0.25, "program": "p0"},
            {"iteration": 7, "num_decided": 6, "best": 0.75, "program": "p7"},
        ],
        "cells": [
            {"island": island, "cell": f"{island}-3", "program": f"p{island}", "score": 0.5}
            for island in range(2)
        ],
        "failures": [
            {"kind": "timeout", "count": 3, "first_iteration": 2, "first_message": "Over 10 s."}
        ],
        "staleness": {"0": 4, "3": 6},
        "tokens": {"prompt": 1000, "completion": 234},
        "usd": 0.125,
        "seconds": 12.0,
        "evaluation_seconds": 30.0,
        "num_workers_lost": 1,
        "baselines": [{"name": "best_of_n", "best": 0.5, "num_iterations": 10, "num_failed": 1}],
        "warnings": [],
    } | keys


def test_the_page_says_what_the_report_says() -> None:
    page = Page(render_evolve_page(made_report()))
    text = words(page.text)
    assert page.charts == ["curve", "grid", "grid", "staleness"]
    assert "Best score 0.75 iteration 7 First program 0.25" in text
    assert "Better than the first program by +0.500." in text
    assert "The best baseline with as much to spend, best_of_n, reached 0.5, which is" in text
    assert "One run of each tells nothing of chance" in text
    assert ["timeout", "3", "2", "Over 10 s."] in page.rows
    assert "-x = 1 +x = 2" in text and "speed -2.5" in text
    assert "10 iterations 1,234 tokens 0.12 USD 12.0 s 30.0 s of evaluations 1 worker lost" in text
    assert len(page.scripts) == 3
    assert page.document["staleness"] == {"0": 4, "3": 6}


def test_lines_of_a_diff_are_marked_as_what_they_are() -> None:
    page = Page(render_evolve_page(made_report()))
    spans = [attrs["class"] for tag, attrs in page.tags if tag == "span" and "class" in attrs]
    assert [name for name in spans if name in ("place", "removed", "added", "")] == [
        "place", "place", "place", "removed", "added", "",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"best": made_program("p0", score=0.25)}, "No program better than the first one"),
        ({"best": made_program("p7", score=None)}, "No result yet"),
        ({"first": None}, "no score to compare with"),
        (
            {"baselines": [{"name": "sequential", "best": 0.75}]},
            "As good or better with as much to spend: sequential (0.75).",
        ),
        ({"baselines": [{"name": "sequential"}]}, "No baseline has a score."),
        ({"stop_reason": "The budget of tokens is spent."}, "The budget of tokens is spent."),
        ({"num_demoted": 2}, "2 programs looked like the best and did not hold"),
        ({"warnings": ["unsafe: no sandbox"]}, "1 warning unsafe: no sandbox"),
    ],
)
def test_what_a_reader_must_know_is_said(changes: dict[str, Any], said: str) -> None:
    assert said in words(Page(render_evolve_page(made_report(**changes))).text)


def test_the_front_has_a_row_for_each_program() -> None:
    report = made_report(objectives=["speed"], front=[made_program("p7")])
    rows = [[words(cell) for cell in row] for row in Page(render_evolve_page(report)).rows]
    assert rows[rows.index(["Program", "Iteration", "speed"]) + 1] == ["p7", "7", "-2.5"]


def test_text_of_programs_and_models_stays_text() -> None:
    hostile = made_program(HOSTILE, model=HOSTILE, changes=HOSTILE, diff=HOSTILE, code=HOSTILE)
    hostile["metrics"] = {HOSTILE: 1.0}
    report = made_report(
        run=HOSTILE,
        models=[{"name": HOSTILE}],
        feature_dimensions=[HOSTILE],
        best=hostile,
        winning_line=[hostile],
        front=[hostile],
        objectives=[HOSTILE],
        cells=[{"cell": HOSTILE, "program": HOSTILE, "score": 1.0}],
        curve=[{"program": HOSTILE, "best": 1.0}],
        failures=[{"kind": HOSTILE, "first_message": HOSTILE}],
        baselines=[{"name": HOSTILE, "note": HOSTILE}],
        stop_reason=HOSTILE,
        warnings=[HOSTILE],
    )
    html = render_evolve_page(report)
    page = Page(html)
    assert "<script>alert" not in html and "img" not in {tag for tag, _ in page.tags}
    assert page.text.count(HOSTILE) >= 15 and "<" not in page.scripts[0]


def test_long_diffs_and_grids_are_cut_with_a_word() -> None:
    cells = [{"island": 0, "cell": f"{i}-0", "program": "p", "score": 1.0} for i in range(1000)]
    report = made_report(cells=cells, winning_line=[made_program("p7", diff="+x\n" * 10_000)])
    text = words(Page(render_evolve_page(report)).text)
    assert "The first 400 of 1,000 cells" in text and "10,000 more characters" in text


@pytest.mark.parametrize("key", sorted(made_report()))
def test_any_part_may_be_missing(key: str) -> None:
    report = made_report()
    del report[key]
    Page(render_evolve_page(report))


def test_an_empty_report_is_a_page_and_a_wrong_one_an_error() -> None:
    assert "No result yet" in Page(render_evolve_page({})).text
    with pytest.raises(RunError, match="curve"):
        render_evolve_page({"curve": 3})


def test_the_table_has_a_string_per_column() -> None:
    rows = evolve_rows(made_report())
    assert rows == [
        ("first program", "0.25", "0", "", ""),
        ("best program", "0.75", "7", "big", "3 of 10"),
        ("best_of_n", "0.5", "", "", "1 of 10"),
    ]
    assert {len(row) for row in rows} == {len(COLUMNS)}
