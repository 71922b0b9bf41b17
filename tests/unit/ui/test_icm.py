"""The page and the table of a labelling."""

from typing import Any

import pytest
from ui.test_page import HOSTILE, Page, words

from rookery.errors import RunError
from rookery.loops.icm.verdict import MANY_FRUSTRATED
from rookery.reports import parse_icm_report
from rookery.ui import icm
from rookery.ui.icm import COLUMNS


def render_icm_page(document: dict[str, Any]) -> str:
    return icm.render_icm_page(parse_icm_report(document))


def icm_rows(document: dict[str, Any]) -> list[tuple[str, ...]]:
    return icm.icm_rows(parse_icm_report(document))


def made_row(name: str, /, **keys: Any) -> dict[str, Any]:
    return {
        "name": name,
        "is_winner": False,
        "note": "",
        "num_labelled": 4,
        "balance": {"True": 2, "False": 2},
        "num_violated": 0,
        "utility": 58.8,
        "agreement": 1.0,
        "accuracy": 0.75,
        "low": 0.3,
        "high": 0.95,
        "chance": 0.5,
    } | keys


def made_report(**keys: Any) -> dict[str, Any]:
    step = {"utility": 1.0, "best": 1.0, "temperature": 10.0, "counts": [1, 1]}
    chain = {
        "batch": 0,
        "chain": 0,
        "is_best": True,
        "num_iterations": 9,
        "is_settled": True,
        "utility": 58.8,
        "steps": [step | {"iteration": i, "num_labelled": i, "num_frustrated": 1} for i in (1, 4)],
    }
    return {
        "kind": "icm",
        "run": "demo",
        "model": "smollm2",
        "data": "reviews.jsonl",
        "seed": 0,
        "labels": ["True", "False"],
        "num_items": 4,
        "num_labelled": 4,
        "verdict": "coherent",
        "warnings": [],
        "utility": 58.8,
        "balance": {"True": 2, "False": 2},
        "rows": [made_row("icm", is_winner=True), made_row("zero-shot", num_violated=2)],
        "chains": [chain],
        "items": [
            {"id": f"r{i}", "text": f"Review {i}", "label": "True", "margin": float(i)}
            for i in range(4)
        ],
        "tokens": {"naive": 1000, "requested": 300, "computed": 100, "baselines": 50},
        "seconds": 12.0,
    } | keys


def test_coherent_labels_are_said_to_agree_as_far_as_the_verdict_asks() -> None:
    """A quarter of the items may disagree with the others."""
    assert MANY_FRUSTRATED == 0.25
    page = render_icm_page(made_report(verdict="coherent", num_frustrated=1))
    assert "the others predict at least three labels of four" in page


def test_the_page_says_what_the_report_says() -> None:
    page = Page(render_icm_page(made_report()))
    text = words(page.text)
    assert page.charts == ["utility", "frustrated", "labelled", "margins", "prefill"]
    assert "Items labelled 4 of 4, 0 frustrated" in text
    assert "Agreement with the true labels 0.750 95 % interval 0.300 to 0.950" in text
    assert "Coherence is not truth" in text and "10.0 times less" in text
    assert len(page.scripts) == 3
    shown = [[words(cell) for cell in row] for row in page.rows[1:3]]
    assert [row[0] for row in shown] == ["icm", "zero-shot"]
    assert shown[1][3] == "2"


@pytest.mark.parametrize(
    ("verdict", "said"),
    [
        ("collapsed", "same label"),
        ("partial", "Not finished"),
        ("chance", "No better than chance"),
        ("inverse", "opposite"),
        ("ambiguous", "as coherent as these"),
        ("", "No result yet"),
    ],
)
def test_the_headline_is_the_verdict(verdict: str, said: str) -> None:
    html = render_icm_page(made_report(verdict=verdict, warnings=["Careful."]))
    assert said in words(Page(html).text) and 'data-verdict="unclear"' in html
    assert "1 warning Careful." in words(Page(html).text)


def test_text_of_users_stays_text() -> None:
    report = made_report(
        run=HOSTILE,
        labels=[HOSTILE, "False"],
        rows=[made_row(HOSTILE, note=HOSTILE)],
        items=[{"id": HOSTILE, "text": HOSTILE, "label": HOSTILE, "margin": 1.0}],
        warnings=[HOSTILE],
    )
    html = render_icm_page(report)
    page = Page(html)
    assert "<script>alert" not in html and "img" not in {tag for tag, _ in page.tags}
    assert page.text.count(HOSTILE) >= 6 and "<" not in page.scripts[0]


@pytest.mark.parametrize("key", ["rows", "chains", "items", "tokens", "warnings", "verdict"])
def test_any_part_may_be_missing(key: str) -> None:
    report = made_report()
    del report[key]
    Page(render_icm_page(report))


def test_an_empty_report_is_a_page_and_a_wrong_one_an_error() -> None:
    assert "No result yet." in Page(render_icm_page({})).text
    with pytest.raises(RunError, match="rows"):
        render_icm_page({"rows": 3})


def test_the_table_has_a_string_per_column() -> None:
    rows = icm_rows(made_report(rows=[made_row("icm", accuracy=None, low=None, utility=None)]))
    assert rows == [("icm", "4", "2 / 2", "0", "-", "-", "-")]
    assert len(COLUMNS) == len(rows[0])
