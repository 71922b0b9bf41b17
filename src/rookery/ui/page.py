"""The report page: one HTML file that opens from disk, offline, and makes no requests.

    path.write_text(render_genome_page(report), encoding="utf-8")

The template, the style and the scripts lie beside this file; the chart library is inlined from
vendor/. The page's own policy allows these scripts, by their hash, and no request at all.
"""

import base64
import hashlib
import math
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from rookery.reports import EvaluationReport, GenomeReport, ReportRow, ServiceStatus
from rookery.ui import wording
from rookery.ui.headline import make_headline

__all__ = [
    "render_evaluation_page",
    "render_genome_page",
    "render_service_page",
    "render_template",
]

LISTED_GENERATIONS = 200
"""Rows of the folded tables; beyond that a table is not read, and report.json has them all."""

MIN_SECONDS = 0.001
"""Below it a rate of tokens per second says nothing."""


def render_genome_page(report: GenomeReport) -> str:
    """The page of a report; what is not there yet is named as missing."""
    return render_template(
        "page.html.jinja",
        scripts=("frame.js", "lineage.js", "page.js", "draw.js"),
        report=report,
        headline=make_headline(report),
        scale=_scale(report.rows),
        costs=_costs(report),
        generations=report.generations[-LISTED_GENERATIONS:],
        is_timed=any(g.seconds is not None for g in report.generations),
        is_weighted=len({taskset.weight for taskset in report.tasksets}) > 1,
        ancestry=[c for c in report.lineage if c.is_ancestor or c.is_winner],
        document=report.model_dump(mode="json"),
    )


def render_template(name: str, *, scripts: tuple[str, ...], **values: object) -> str:
    """A template beside this file, with the style, the chart library and its own scripts."""
    texts = _scripts(scripts)
    return (
        _environment()
        .get_template(name)
        .render(
            style=Markup(_read("page.css")),
            scripts=[Markup(script) for script in texts],
            script_hashes=[_hash(script) for script in texts],
            **values,
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scale:
    """The common axis of the interval drawings in the table, in percent of their width.

    `_Scale(low=0.4, high=0.9).at(0.65)` is "50.00%".
    """

    low: float
    high: float

    def at(self, value: float) -> str:
        return f"{100 * (value - self.low) / (self.high - self.low):.2f}%"


def _scale(rows: tuple[ReportRow, ...]) -> _Scale | None:
    """Round numbers around every mean and interval: 0.3 and 1 for ends of 0.31 and 0.94."""
    ends = [end for row in rows for end in (row.mean, row.low, row.high) if end is not None]
    if not ends or not math.isfinite(max(ends) - min(ends)):
        return None
    low, high = min(ends), max(ends)
    size = max(1.0, abs(low), abs(high))
    if high - low < 1e-9 * size:
        return _Scale(low=low - 0.1 * size, high=high + 0.1 * size)
    step = 10.0 ** math.floor(math.log10(high - low))
    return _Scale(low=step * math.floor(low / step), high=step * math.ceil(high / step))


def _costs(report: GenomeReport) -> list[str]:
    """What the run used: ["46 candidates", "123,456 tokens", "2 min 0 s", "1,025 tokens/s"]."""
    amounts = [
        (report.num_candidates, "candidate"),
        (report.num_rollouts, "rollout"),
        (report.num_tokens, "token"),
    ]
    costs = [wording.plural(amount, noun) for amount, noun in amounts if amount]
    if report.seconds:
        costs.append(wording.duration(report.seconds))
        if report.num_tokens and report.seconds > MIN_SECONDS:
            costs.append(f"{wording.count(round(report.num_tokens / report.seconds))} tokens/s")
    return costs


@cache
def _scripts(names: tuple[str, ...]) -> tuple[str, str]:
    """The chart library and a page's own script, safe between script tags."""
    own = "\n".join(_read(name) for name in names)
    return _inline(_read("vendor/echarts.min.js")), _inline(own)


def _inline(script: str) -> str:
    """The same program without the two texts that end or bend a script element."""
    return re.sub(r"<(?=/script|!--)", r"<\\", script, flags=re.IGNORECASE)


@cache
def _hash(script: str) -> str:
    """The source expression that lets a browser run exactly this text."""
    digest = hashlib.sha256(script.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def _minus(text: str) -> str:
    """The sign of a negative number as wide as a plus, so that columns of gains align."""
    return re.sub(r"-(?=\d)", "\N{MINUS SIGN}", text)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FunctionLoader(_read),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["wording"] = wording
    environment.filters["minus"] = _minus
    return environment


@cache
def _read(name: str) -> str:
    """A file beside this one; line ends as a browser counts them, or the hashes would differ."""
    text = files("rookery.ui").joinpath(name).read_text(encoding="utf-8")
    return text.replace("\r\n", "\n")


# The page of an evaluation: how good each model is, and every answer to read.
#
# path.write_text(render_evaluation_page(report), encoding="utf-8")


def render_evaluation_page(report: EvaluationReport) -> str:
    """The page of a report; tasks that some model got wrong come first."""
    ordered = sorted(
        report.tasks, key=lambda task: min((a.reward or 0.0 for a in task.answers), default=0.0)
    )
    return render_template("evaluation.html.jinja", scripts=(), report=report, tasks=ordered)


# The status page of a service, which loads itself anew every few seconds.


def render_service_page(status: ServiceStatus) -> str:
    """The page; without scripts."""
    return render_template("service.html.jinja", scripts=(), status=status)
