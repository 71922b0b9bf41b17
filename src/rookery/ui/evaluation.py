"""The page of an evaluation: how good each model is, and every answer to read.

path.write_text(render_evaluation_page(report), encoding="utf-8")
"""

from rookery.reports import EvaluationReport
from rookery.ui.page import render_template

__all__ = ["render_evaluation_page"]


def render_evaluation_page(report: EvaluationReport) -> str:
    """The page of a report; tasks that some model got wrong come first."""
    ordered = sorted(
        report.tasks, key=lambda task: min((a.reward or 0.0 for a in task.answers), default=0.0)
    )
    return render_template("evaluation.html.jinja", scripts=(), report=report, tasks=ordered)
