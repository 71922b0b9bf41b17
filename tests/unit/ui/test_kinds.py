"""Every kind of run on the page: its report before and after it is written, its address."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from ui.made_runs import make_evolve, make_league, make_loop, make_pipeline, make_sft
from ui.test_live import Visitor

from rookery.compose import KINDS
from rookery.compose.running import resumable
from rookery.runs import Run
from rookery.ui.display import Display
from rookery.ui.live.folder import describe_run
from rookery.ui.live.reading import OpenRun
from rookery.ui.live.server import open_page


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_run_has_a_report_before_one_is_written(tmp_path: Path, kind: str) -> None:
    with Run.create(tmp_path, kind=kind, name="a", config={}):
        report = OpenRun(tmp_path / "a", "a").report()
        assert not report["is_written"] and "sentence" in report["summary"]


@pytest.mark.parametrize("make", [make_evolve, make_pipeline, make_league, make_sft, make_loop])
def test_a_written_report_is_shown(tmp_path: Path, make: Callable[..., Path]) -> None:
    """Also of a kind of run that the page knows nothing of."""
    report = OpenRun(make(tmp_path, report={"warnings": ["So it is."]}), "a").report()
    assert report["is_written"] and report["summary"]["sentence"]
    assert report["warnings"] == ["So it is."]


def test_the_list_draws_a_metric_of_any_kind_of_run(tmp_path: Path) -> None:
    row = describe_run(make_loop(tmp_path))
    assert row["spark_of"] == "tried/mean" and row["spark"][:2] == [0.5, 0.25]


def test_the_number_of_an_unfinished_run_is_named_in_words(tmp_path: Path) -> None:
    with Run.create(tmp_path, kind="genome", name="a", config={}) as run:
        run.log_metrics(0, {"genome/best": 0.5})
        row = describe_run(tmp_path / "a")
    assert row["result"] == {"label": "best score so far", "mean": 0.5}


def test_a_run_prints_the_address_of_its_page_without_the_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ROOKERY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FORCE_COLOR", "1")
    runs = tmp_path / "runs"

    def begin() -> str:
        with resumable(runs / "a b", Display()):
            return re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().err).strip()

    before = begin()
    with open_page(runs, port=0) as page:
        host, port = Visitor(page).place
        assert begin() == f"See it live at http://{host}:{port}/#/run/a%20b"
        [note] = (tmp_path / "cache" / "pages").iterdir()
    assert before == begin() == f"See it live with: rookery ui {runs}" and not note.exists()
    note.write_text(f"http://{host}:{port}/")  # of a page that was killed
    assert begin() == before
