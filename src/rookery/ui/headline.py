"""The result of a genome run in one sentence, and of any run in one number.

headline = make_headline(report)
headline.verdict    # "better": the whole interval of the gain is above zero
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rookery.reports import (
    Estimate,
    GenomeReport,
    ReportRow,
    parse_evaluation_report,
    parse_evolve_report,
    parse_genome_report,
    parse_grpo_report,
    parse_icm_report,
    parse_league_report,
    parse_loop_report,
)
from rookery.types import Json
from rookery.ui import wording

__all__ = ["ELSEWHERE", "Headline", "Verdict", "gain_verdict", "make_headline", "short_result"]

BASE = "base model"

Verdict = Literal["better", "unclear", "worse", "unmeasured", "unfinished"]

SENTENCES: dict[Verdict, str] = {
    "better": "Better than the best founder. The whole 95 % interval of the gain lies above "
    "zero: chance alone is an unlikely explanation.",
    "unclear": "Not distinguishable from chance. The 95 % interval of the gain includes zero: "
    "this run does not show that the winner beats the best founder.",
    "worse": "Worse than the best founder. The whole 95 % interval of the gain lies below zero.",
    "unmeasured": "No gain over the best founder was measured.",
    "unfinished": "No result yet. The report tasks are read once, when the search is over.",
}
ELSEWHERE = "Not measured here: the report tasks are read by the run that this one is a part of."
"""Sentence for a run whose report tasks are hidden, because a larger run reads them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    verdict: Verdict
    sentence: str
    winner: ReportRow | None
    context: str
    """Origin of the number: "Chosen among 46 candidates; measured once on 60 report tasks."."""


MERITS = {
    "certainty": " by the probability of the right choices",
    "log_certainty": " by the log probability of the right choices",
    "mixed": " by rewards and the probability of the right choices together, because either alone "
    "can mislead",
    "reward": " by rewards",
}
"""Criterion by which candidates were compared, in words."""


def make_headline(report: GenomeReport) -> Headline:
    """Compare the winner with the best founder, or describe an unfinished search."""
    winner = report.winner
    if winner is None:
        is_done = report.winner_id and not any(each.num_report for each in report.tasksets)
        return Headline(
            verdict="unmeasured" if is_done else "unfinished",
            sentence=ELSEWHERE if is_done else SENTENCES["unfinished"],
            winner=None,
            context=_progress(report),
        )
    verdict = gain_verdict(winner.gain)
    sentence = SENTENCES[verdict]
    if verdict in {"unclear", "unmeasured"} and _is_founder(report):
        sentence = "The winner is a founder: no candidate of the search was chosen over it."
    base = next((row for row in report.rows if row.name == BASE), None)
    if base is not None and _is_higher(base, winner):
        verdict = "unclear" if verdict == "better" else verdict
        sentence = (
            f"The base model without any adapter scores higher: {wording.score(base.mean)} against "
            f"{wording.score(winner.mean)}. {sentence}"
        )
    return Headline(
        verdict=verdict, sentence=sentence, winner=winner, context=_context(report, winner)
    )


def short_result(document: Mapping[str, Json]) -> str:
    """Main number of any loop's report: `0.783 (+0.158)`; empty before there is one.

    Raises RunError for a document that is not a report.
    """
    match document.get("kind"):
        case "genome":
            return _with_gain(parse_genome_report(document).winner)
        case "grpo":
            return _with_gain(parse_grpo_report(document).trained)
        case "icm":
            return parse_icm_report(document).verdict
        case "evolve":
            report = parse_evolve_report(document)
            if report.tasks is not None:
                return _with_gain(report.tasks.rows[0] if report.tasks.rows else None)
            best = report.best
            return "" if best is None or best.score is None else f"{best.score:.6g}"
        case "league":
            rows = parse_league_report(document).rows
            return f"{rows[0].name} {wording.score(rows[0].mean)}" if rows else ""
        case "eval" | "pipeline":
            models = parse_evaluation_report(document).models
            return ", ".join(wording.score(row.mean) for row in models[:3])
        case "sft":
            loss = document.get("last_loss")
            return f"loss {loss:.3f}" if isinstance(loss, float) else ""
    return _with_gain(parse_loop_report(document).winner)


def _with_gain(row: ReportRow | None) -> str:
    if row is None:
        return ""
    gain = "" if row.gain is None else f" ({wording.signed(row.gain.mean)})"
    return f"{wording.score(row.mean)}{gain}"


def gain_verdict(gain: Estimate | None) -> Verdict:
    if gain is None or gain.low is None or gain.high is None:
        return "unmeasured"
    if gain.low > 0:
        return "better"
    return "worse" if gain.high < 0 else "unclear"


def _is_founder(report: GenomeReport) -> bool:
    return any(c.is_winner and not c.parents and c.generation == 0 for c in report.lineage)


def _context(report: GenomeReport, winner: ReportRow) -> str:
    origin = []
    if report.num_candidates:
        reason = MERITS.get(report.merit, "")
        origin.append(f"Chosen among {wording.plural(report.num_candidates, 'candidate')}{reason}")
    if any(taskset.num_report for taskset in report.tasksets):
        origin.append(f"measured once on {wording.report_tasks(report.tasksets, 'report task')}")
    sentences = ["; ".join(origin)] if origin else []
    if _is_founder(report):
        sentences.append("The winner is a founder: no candidate of the search was chosen over it")
    higher = [row for row in report.rows if _is_higher(row, winner)]
    if higher:
        names = ", ".join(f"{row.name} ({wording.score(row.mean)})" for row in higher)
        sentences.append(f"Higher on the same tasks: {names}")
    return " ".join(f"{sentence[0].upper()}{sentence[1:]}." for sentence in sentences)


def _is_higher(row: ReportRow, winner: ReportRow) -> bool:
    return row.mean is not None and winner.mean is not None and row.mean > winner.mean


def _progress(report: GenomeReport) -> str:
    scored = [g for g in report.generations if g.best is not None]
    if not scored:
        return ""
    best = max(scored, key=lambda g: g.best or 0.0)
    return (
        f"Best score on the search tasks so far: {wording.score(best.best)}, "
        f"in generation {best.generation}."
    )
