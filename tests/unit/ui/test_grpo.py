"""The page and the table of a training from rewards."""

from typing import Any

from ui.test_page import HOSTILE, Page, words

from rookery.reports import parse_grpo_report
from rookery.ui.grpo import grpo_sentence, render_grpo_page
from rookery.ui.wording import GRPO_COLUMNS, report_rows


def made_report(**keys: Any) -> dict[str, Any]:
    """Two steps with one checkpoint each; `keys` replace those of the report."""
    gain = {"mean": 0.2, "low": 0.1, "high": 0.3}
    return {
        "kind": "grpo",
        "run": "adding",
        "model": "tiny",
        "loss": "grpo",
        "advantages": "group_relative",
        "tasksets": [{"name": "sums", "num_search": 60, "num_select": 20, "num_report": 20}],
        "rows": [
            {"name": "trained", "is_winner": True, "mean": 0.7, "low": 0.6, "high": 0.8,
             "gain": gain},
            {"name": "base model", "mean": 0.5, "low": 0.4, "high": 0.6},
        ],
        "chosen_step": 2,
        "checkpoints": [{"step": 0, "mean": 0.5}, {"step": 2, "mean": 0.7, "is_chosen": True}],
        "steps": [made_step(0), made_step(1)],
    } | keys  # fmt: skip


def made_step(number: int, **metrics: float) -> dict[str, Any]:
    return {
        "step": number,
        "model_step": number,
        "metrics": {
            "reward/mean": 0.3 + 0.1 * number,
            "train/grad_norm": 1.0 + number,
            "train/ratio": 1.0 + 1e-8 * number,
            "grpo/staleness": 0.0,
            "time/draw_s": 0.5,
        }
        | metrics,
        "examples": [{"task": "12+34", "text": "first line\nsecond line", "reward": 1.0}],
    }


def test_metrics_that_change_are_charts_and_the_others_one_line() -> None:
    page = render_grpo_page(parse_grpo_report(made_report()))
    assert 'data-metric="train/grad_norm"' in page
    assert 'data-metric="train/ratio"' not in page
    assert 'data-metric="grpo/staleness"' not in page
    assert "Mean ratio: 1" in page and "Staleness, steps: 0" in page
    assert "Gradient norm:" not in page


def test_a_metric_that_is_missing_in_a_step_can_still_be_constant() -> None:
    steps = [made_step(0), made_step(1, **{"train/kl": 0.25})]
    page = render_grpo_page(parse_grpo_report(made_report(steps=steps)))
    assert "KL to the reference: 0.25" in page


def test_the_page_names_the_result_and_keeps_the_lines_of_answers() -> None:
    report = parse_grpo_report(made_report())
    page = render_grpo_page(report)
    assert grpo_sentence(report).startswith("Better than the start.")
    assert grpo_sentence(report) in words(page)
    assert '<td class="completion">first line\nsecond line</td>' in page


def test_a_run_without_a_step_has_a_page() -> None:
    page = render_grpo_page(parse_grpo_report(made_report(steps=[], rows=[], checkpoints=[])))
    assert "No step is taken yet." in page and "No result yet." in words(page)


def test_text_of_a_run_never_becomes_markup() -> None:
    step = made_step(0) | {"examples": [{"task": HOSTILE, "text": HOSTILE, "reward": 0.0}]}
    page = render_grpo_page(parse_grpo_report(made_report(run=HOSTILE, steps=[step])))
    assert HOSTILE not in page
    Page(page)


def test_a_row_has_a_cell_for_every_column() -> None:
    rows = report_rows(parse_grpo_report(made_report()).rows)
    assert all(len(row) == len(GRPO_COLUMNS) for row in rows)
    assert rows[0] == ("trained", "0.700", "0.600 to 0.800", "+0.200 (+0.100 to +0.300)", "0")
