"""What is said of a result, the same on the page, in a notebook and without JavaScript."""

from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ui.made import (
    made_evolve,
    made_grpo,
    made_icm,
    made_icm_row,
    made_program,
    made_report,
    made_row,
)

from rookery.compose.running import Outcome
from rookery.errors import RunError
from rookery.loops.icm.verdict import MANY_FRUSTRATED
from rookery.reports import Estimate, TasksetRecord, parse_genome_report
from rookery.ui import wording
from rookery.ui.headline import Headline, make_headline
from rookery.ui.summary import Summary, parse_report, render_summary, summarize
from rookery.ui.wording import GENOME_COLUMNS, GRPO_COLUMNS

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)> & \"quoted\" 'too'"
MAKERS: dict[str, Any] = {
    "genome": made_report, "grpo": made_grpo, "icm": made_icm, "evolve": made_evolve,
}  # fmt: skip


PROMPTS: dict[str, Any] = {
    "taskset": {"name": "gsm8k", "num_select": 12, "num_report": 30},
    "finalists": [{"id": "p7", "search": 0.75, "select": 0.7}],
    "chosen": "p7",
    "rows": [made_row("chosen prompt", 0.91, is_winner=True), made_row("first prompt", 0.68)],
}


def said(kind: str, /, **keys: Any) -> Summary:
    return summarize(parse_report(kind, MAKERS[kind](**keys)))


def words(summary: Summary) -> str:
    """All that is said, in one line."""
    numbers = [text for n in summary.numbers for text in (n.label, n.value, n.interval)]
    facts = [text for pair in summary.facts for text in pair]
    return " ".join([*facts, *numbers, summary.sentence, *summary.contexts, *summary.costs])


class Tags(HTMLParser):
    """The tags of a fragment, each of which is closed, and its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.text = ""
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not attrs
        self.found.add(tag)
        self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize(
    ("kind", "keys", "wanted"),
    [
        ("genome", {}, "Accuracy of the winner 0.910 95 % interval 0.880 to 0.940"),
        ("genome", {}, "Gain over the best founder +0.210 95 % interval +0.160 to +0.260"),
        ("genome", {}, "Better than the best founder."),
        ("genome", {}, "46 candidates 12,345 rollouts 123,456 tokens 2 min 0 s 1,025 tokens/s"),
        ("genome", {}, "Model smollm2 Tasksets label-kind, add-two Seed 0"),
        ("grpo", {}, "Gain over the start +0.200 95 % interval +0.100 to +0.300"),
        ("grpo", {}, "Better than the start."),
        ("grpo", {}, "The weights after step 2, chosen among 2 checkpoints on the select tasks"),
        ("grpo", {"steps": [], "rows": []}, "No result yet."),
        ("icm", {}, "Items labelled 4 of 4, 0 frustrated"),
        ("icm", {}, "Agreement with the true labels 0.750 95 % interval 0.300 to 0.950"),
        ("icm", {}, "Coherence is not truth"),
        ("icm", {}, "At least three labels of four follow from the others"),
        ("icm", {}, "100 tokens for the search 50 for the comparison 12.0 s"),
        ("icm", {"verdict": "collapsed"}, "same label"),
        ("icm", {"verdict": "partial"}, "Not finished"),
        ("icm", {"verdict": "chance"}, "No better than chance"),
        ("icm", {"verdict": "inverse"}, "opposite"),
        ("icm", {"verdict": "ambiguous"}, "as coherent as these"),
        ("icm", {"verdict": ""}, "No result yet"),
        ("evolve", {}, "Best score 0.75 iteration 7 First program 0.25"),
        ("evolve", {}, "Better than the first program by +0.500."),
        ("evolve", {}, "The best baseline with as much to spend, best_of_n, reached 0.5"),
        ("evolve", {}, "One run of each tells nothing of chance"),
        ("evolve", {}, "1,234 tokens 0.12 USD 12.0 s 30.0 s of evaluations 1 worker lost"),
        ("evolve", {"best": made_program("p0", score=0.25)}, "No program better than the first"),
        ("evolve", {"best": made_program("p7", score=None)}, "No result yet"),
        ("evolve", {"first": None}, "no score to compare with"),
        ("evolve", {"tasks": PROMPTS}, "Gain over the first prompt +0.210 95 % interval"),
        ("evolve", {"tasks": PROMPTS}, "Better than the first prompt on tasks that the search"),
        ("evolve", {"tasks": PROMPTS}, "chosen among 1 prompt on 12 select tasks, measured once"),
        ("evolve", {"tasks": {"chosen": "p0"}}, "No prompt was chosen over the first one"),
        ("evolve", {"tasks": {}}, "No gain over the first prompt was measured"),
        (
            "evolve", {"baselines": [{"name": "sequential", "best": 0.75}]},
            "As good or better with as much to spend: sequential (0.75).",
        ),
        ("evolve", {"baselines": [{"name": "sequential"}]}, "No baseline has a score."),
        ("evolve", {"stop_reason": "The tokens are spent."}, "The tokens are spent."),
    ],
)  # fmt: skip
def test_what_a_reader_must_know_is_said(kind: str, keys: dict[str, Any], wanted: str) -> None:
    assert wanted in words(said(kind, **keys))


def test_coherent_labels_are_said_to_agree_as_far_as_the_verdict_asks() -> None:
    """A quarter of the items may disagree with the others."""
    assert MANY_FRUSTRATED == 0.25
    assert said("icm").verdict == "better" and said("icm", verdict="chance").verdict == "unclear"


def test_the_table_has_a_string_per_column() -> None:
    genome, evolve = said("genome"), said("evolve")
    assert genome.rows[0] == (
        "evolved", "0.910", "0.880 to 0.940", "+0.210 (+0.160 to +0.260)", "0",
    )  # fmt: skip
    assert genome.rows[1] == ("best founder", "0.700", "0.670 to 0.730", "", "0")
    assert said("grpo").rows[0][3] == "+0.200 (+0.100 to +0.300)"
    row = made_icm_row("icm", accuracy=None, low=None, utility=None)
    assert said("icm", rows=[row]).rows == [("icm", "4", "2 / 2", "0", "-", "-", "-")]
    assert evolve.rows == [
        ("first program", "0.25", "0", "", ""),
        ("best program", "0.75", "7", "big", "3 of 10"),
        ("best_of_n", "0.5", "", "", "1 of 10"),
    ]
    for summary in (genome, evolve, said("grpo"), said("icm")):
        assert {len(cells) for cells in summary.rows} == {len(summary.columns)}
    assert (genome.columns, said("grpo").columns) == (GENOME_COLUMNS, GRPO_COLUMNS)


def test_a_row_that_was_not_measured_has_no_numbers() -> None:
    missing = {"mean": None, "low": None, "high": None, "gain": None}
    row = made_row("evolved", float("nan"), **missing, num_failed=60)
    assert said("genome", rows=[row]).rows == [("evolved", "-", "-", "", "60")]


@pytest.mark.parametrize(
    ("kind", "key"), [(kind, key) for kind, make in MAKERS.items() for key in sorted(make())]
)
def test_any_part_may_be_missing(kind: str, key: str) -> None:
    document = MAKERS[kind]()
    del document[key]
    Tags(render_summary(parse_report(kind, document)))


@pytest.mark.parametrize("kind", [*MAKERS, "eval"])
def test_an_empty_report_says_so_and_a_wrong_one_is_an_error(kind: str) -> None:
    assert "No result yet" in render_summary(parse_report(kind, {}))
    with pytest.raises(RunError, match="warnings"):
        parse_report(kind, {"warnings": 3})


def test_text_of_users_stays_text() -> None:
    rows = [made_row(HOSTILE, 0.5, note=HOSTILE, is_winner=True)]
    genome = parse_report("genome", made_report(rows=rows, warnings=[HOSTILE]))
    names = [{"name": HOSTILE, "note": HOSTILE}]
    evolve = parse_report("evolve", made_evolve(baselines=names, stop_reason=HOSTILE))
    for report in (genome, evolve):
        shown = Tags(render_summary(report))
        assert shown.found <= {"div", "p", "table", "thead", "tbody", "tr", "th", "td"}
        assert shown.text.count(HOSTILE) >= 2


def test_a_notebook_shows_reports_and_outcomes(tmp_path: Any) -> None:
    report = parse_report("genome", made_report())
    shown = report._repr_html_()
    assert shown is not None and "Better than the best founder." in shown and "+0.210" in shown
    outcome = Outcome(report, tmp_path)._repr_html_()
    assert shown in outcome and (tmp_path / "report.html").as_uri() in outcome


# Numbers as text.


def test_questions_are_told_where_tasks_share_them() -> None:
    assert wording.tasks(240, 240) == wording.tasks(240, 0) == "240 tasks"
    assert wording.tasks(240, 30) == "30 questions (240 rows)"
    old, new = (
        TasksetRecord(num_report=60),
        TasksetRecord(num_report=240, num_questions=30),
    )
    assert wording.report_tasks([old], "report task") == "60 report tasks"
    assert wording.report_tasks([old, new]) == "90 questions (300 rows)"


def test_no_number_is_minus_zero() -> None:
    assert wording.score(-0.0001) == "0.000"
    assert wording.signed(-0.0004) == "+0.000"


def test_a_gain_has_signs_and_its_interval() -> None:
    gain = Estimate(mean=0.2, low=-0.15, high=0.25)
    assert wording.gain(gain) == "+0.200 (-0.150 to +0.250)"
    assert wording.gain(Estimate(mean=0.2)) == "+0.200"
    assert wording.gain(None) == ""


def test_an_interval_with_one_end_is_missing() -> None:
    assert wording.interval(Estimate(mean=0.9, low=0.88, high=0.94)) == "0.880 to 0.940"
    assert wording.interval(Estimate(mean=0.9, low=0.88)) == "-"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.0 s"),
        (3.24, "3.2 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 0 s"),
        (120.5, "2 min 0 s"),
        (3599.0, "59 min 59 s"),
        (3599.7, "1 h 0 min"),
        (5400.0, "1 h 30 min"),
        (3600.0 * 1000, "1,000 h 0 min"),
        (None, "-"),
    ],
)
def test_durations_have_two_units(seconds: float | None, text: str) -> None:
    assert wording.duration(seconds) == text


@given(st.floats(min_value=0, max_value=1e7))
def test_no_duration_has_sixty_of_a_unit(seconds: float) -> None:
    assert not {"60 s", "60.0 s", "60 min"} & {
        " ".join(pair) for pair in zip(*[iter(wording.duration(seconds).split())] * 2, strict=True)
    }


# The verdict at the top of the page.


def headline(**keys: Any) -> Headline:
    return make_headline(parse_genome_report(made_report(**keys)))


def winner(low: float, high: float) -> list[dict[str, Any]]:
    gain = {"mean": (low + high) / 2, "low": low, "high": high}
    return [made_row("evolved", 0.9, is_winner=True, gain=gain)]


@pytest.mark.parametrize(
    ("low", "high", "verdict", "words"),
    [
        (0.01, 0.2, "better", "above zero"),
        (0.0, 0.2, "unclear", "Not distinguishable from chance"),
        (-0.1, 0.2, "unclear", "Not distinguishable from chance"),
        (-0.2, 0.0, "unclear", "Not distinguishable from chance"),
        (-0.2, -0.01, "worse", "below zero"),
    ],
)
def test_the_interval_of_the_gain_decides(
    low: float, high: float, verdict: str, words: str
) -> None:
    said = headline(rows=winner(low, high))
    assert said.verdict == verdict
    assert words in said.sentence


def test_candidates_and_tasks_are_disclosed() -> None:
    assert "Chosen among 46 candidates; measured once on 120 report tasks." in headline().context
    context = headline(merit="mixed").context
    assert "candidates by rewards and the probability of the right choices together" in context


def test_a_baseline_above_the_winner_is_named() -> None:
    rows = [made_row("evolved", 0.8, is_winner=True), made_row("plain sum", 0.85)]
    assert "Higher on the same tasks: plain sum (0.850)." in headline(rows=rows).context
    assert "Higher" not in headline().context


@pytest.mark.parametrize(
    ("low", "high", "verdict"), [(0.01, 0.2, "unclear"), (-0.1, 0.2, "unclear"), (-2, -1, "worse")]
)
def test_a_base_model_above_the_winner_is_said_first(low: float, high: float, verdict: str) -> None:
    said = headline(rows=[*winner(low, high), made_row("base model", 0.95)])
    assert said.verdict == verdict
    assert said.sentence.startswith(
        "The base model without any adapter scores higher: 0.950 against 0.900. "
    )
    below = headline(rows=[*winner(0.1, 0.2), made_row("base model", 0.9)])
    assert below.verdict == "better" and "base model" not in below.sentence


def test_a_founder_that_wins_is_called_one() -> None:
    lineage = [{"id": "founder-a", "generation": 0, "operator": "founder", "is_winner": True}]
    assert "The winner is a founder" in headline(lineage=lineage).context
    assert "The winner is a founder" not in headline().context


def test_an_unfinished_run_tells_how_far_it_is() -> None:
    said = headline(rows=[])
    assert said.verdict == "unfinished"
    assert said.winner is None
    assert said.context == "Best score on the search tasks so far: 0.800, in generation 2."


def test_the_best_may_be_negative() -> None:
    generations = [{"generation": 0, "best": -2.0}, {"generation": 1, "best": -1.0}]
    assert "-1.000, in generation 1" in headline(rows=[], generations=generations).context
