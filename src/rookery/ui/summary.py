"""Summary of any loop's report: facts, numbers, a sentence, a table, costs.

    summary = summarize(report)
    summary.sentence            # "Better than the best founder. ..."
    render_summary(report)      # the same as HTML, as a notebook shows a report

The page, notebooks and the part of the page without JavaScript use it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any

from rookery.errors import RunError
from rookery.reports import (
    EvaluationReport,
    EvolveReport,
    GenomeReport,
    GrpoReport,
    IcmReport,
    LeagueReport,
    LoopReport,
    PipelineReport,
    Report,
    SftReport,
    parse_evaluation_report,
    parse_evolve_report,
    parse_genome_report,
    parse_grpo_report,
    parse_icm_report,
    parse_league_report,
    parse_loop_report,
    parse_pipeline_report,
    parse_sft_report,
)
from rookery.reports.evolve import TasksReport
from rookery.ui import league, loops, wording
from rookery.ui.headline import gain_verdict, make_headline

__all__ = [
    "STEP_COLUMNS",
    "Number",
    "Summary",
    "has_report",
    "parse_report",
    "render_summary",
    "step_rows",
    "summarize",
]

MIN_SECONDS = 0.001
"""Shortest run, in seconds, for which a rate of tokens per second is shown."""
SFT_DONE = (
    "The adapter is trained. The loss is of the rows it was trained on: `rookery eval` measures "
    "it on others."
)
PIPELINE_SENTENCES = {
    "better": "The last step is better than the base model.",
    "worse": "The last step is worse than the base model.",
    "unclear": "The last step is not distinguishable from the base model.",
}
PARSERS = {
    "genome": parse_genome_report,
    "grpo": parse_grpo_report,
    "icm": parse_icm_report,
    "evolve": parse_evolve_report,
    "eval": parse_evaluation_report,
    "league": parse_league_report,
    "pipeline": parse_pipeline_report,
    "sft": parse_sft_report,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """One large number of a page: `Number(label="First program", value="0.25")`."""

    label: str
    value: str
    interval: str = ""
    is_gain: bool = False
    """Whether to colour the number if the verdict is `better`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    facts: Sequence[tuple[str, str]]
    verdict: str
    """`better` colours the gains; other words do not."""
    numbers: Sequence[Number]
    sentence: str
    contexts: Sequence[str]
    columns: Sequence[str]
    rows: Sequence[tuple[str, ...]]
    costs: Sequence[str]


def has_report(kind: str, document: Mapping[str, Any]) -> bool:
    """Whether runs of a kind have a report. Reports of added loops name their kind."""
    return kind in PARSERS or document.get("kind") == kind


def parse_report(kind: str, document: dict[str, Any]) -> Report:
    """Parse the report of any loop. An empty document belongs to a run that has just begun."""
    if not has_report(kind, document):
        raise RunError(f"A {kind} run has no report.")
    return PARSERS.get(kind, parse_loop_report)(document)


def summarize(report: Report) -> Summary:
    """Summarize a report. Raises RunError if it belongs to no loop."""
    match report:
        case GenomeReport():
            return _genome(report)
        case GrpoReport():
            return _grpo(report)
        case IcmReport():
            return _icm(report)
        case EvolveReport():
            return _evolve(report)
        case PipelineReport():
            return _pipeline(report)
        case LeagueReport():
            return _league(report)
        case EvaluationReport():
            return _evaluation(report)
        case SftReport():
            return _sft(report)
        case LoopReport():
            return _loop(report)
    raise RunError(f"{type(report).__name__} is not the report of a loop.")


def _genome(report: GenomeReport) -> Summary:
    headline = make_headline(report)
    winner = headline.winner
    numbers = []
    if winner is not None:
        numbers.append(
            Number(
                label="Accuracy of the winner",
                value=wording.score(winner.mean),
                interval=f"95 % interval {wording.interval(winner)}",
            )
        )
        if winner.gain is not None:
            numbers.append(_gain("Gain over the best founder", winner.gain))
    names = ", ".join(taskset.name for taskset in report.tasksets)
    return Summary(
        facts=_facts(
            Model=report.model,
            **{"Taskset" if len(report.tasksets) == 1 else "Tasksets": names},
            Seed=report.seed,
        ),
        verdict=headline.verdict,
        numbers=numbers,
        sentence=headline.sentence,
        contexts=[headline.context],
        columns=wording.GENOME_COLUMNS,
        rows=wording.report_rows(report.rows),
        costs=_genome_costs(report),
    )


def _genome_costs(report: GenomeReport) -> list[str]:
    """["46 candidates", "123,456 tokens", "2 min 0 s", "1,025 tokens/s"]."""
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


def _grpo(report: GrpoReport) -> Summary:
    trained = report.trained
    numbers = []
    if trained is not None:
        if trained.gain is not None:
            numbers.append(_gain("Gain over the start", trained.gain))
        numbers.append(
            Number(
                label="Trained policy",
                value=wording.score(trained.mean),
                interval=f"95 % interval {wording.interval(trained)}",
            )
        )
    costs = [
        wording.plural(len(report.steps), "step"),
        wording.plural(report.num_rollouts, "rollout"),
        wording.plural(report.num_tokens, "drawn token"),
    ]
    loss = {"Loss": report.loss, "Advantages": report.advantages, "Staleness": report.staleness}
    return Summary(
        facts=_facts(
            Model=report.model,
            **(loss if report.loss else {}),
            Game=report.game,
            Tasks=", ".join(taskset.name for taskset in report.tasksets),
            Seed=report.seed,
        ),
        verdict=loops.grpo_verdict(report),
        numbers=numbers,
        sentence=loops.grpo_sentence(report),
        contexts=[loops.grpo_context(report)],
        columns=wording.GRPO_COLUMNS,
        rows=wording.report_rows(report.rows),
        costs=[*costs, wording.duration(report.seconds)] if report.seconds else costs,
    )


def _icm(report: IcmReport) -> Summary:
    winner, support = next((row for row in report.rows if row.is_winner), None), report.support
    numbers, contexts = [], []
    if winner is not None:
        labelled = wording.count(report.num_labelled)
        unsure = f"{wording.count(report.num_frustrated)} frustrated"
        numbers.append(
            Number(
                label="Items labelled",
                value=labelled,
                interval=f"of {wording.count(report.num_items)}, {unsure}",
                is_gain=True,
            )
        )
        if support is not None and support.strength is not None:
            word = "weak" if support.strength < loops.WEAK_SUPPORT else "clear"
            numbers.append(
                Number(
                    label="Strength, 0 to 1",
                    value=wording.score(support.strength),
                    interval=f"{word}; p {wording.score(support.p)} against random models",
                )
            )
        if winner.accuracy is not None:
            ends = f"{wording.score(winner.low)} to {wording.score(winner.high)}"
            numbers.append(
                Number(
                    label="Agreement with the true labels",
                    value=wording.score(winner.accuracy),
                    interval=f"95 % interval {ends}, chance {wording.score(winner.chance)}",
                )
            )
        contexts = loops.icm_contexts(report)
    return Summary(
        facts=_facts(
            Model=report.model,
            Items=report.data,
            Labels=", ".join(report.labels),
            Seed=report.seed,
        ),
        verdict="better" if report.verdict == "coherent" else "unclear",
        numbers=numbers,
        sentence=loops.ICM_SENTENCES.get(report.verdict, report.verdict),
        contexts=contexts,
        columns=loops.ICM_COLUMNS,
        rows=loops.icm_rows(report),
        costs=loops.icm_costs(report),
    )


def _evolve(report: EvolveReport) -> Summary:
    if report.tasks is not None:
        return _prompts(report, report.tasks)
    best, first, gain = report.best, report.first, loops.gain_over_first(report)
    numbers = []
    if best is not None and best.score is not None:
        when = f"iteration {wording.count(best.iteration)}"
        value = loops.six_digits(best.score)
        numbers.append(Number(label="Best score", value=value, interval=when, is_gain=True))
        if first is not None and first.score is not None:
            numbers.append(Number(label="First program", value=loops.six_digits(first.score)))
        numbers.append(
            Number(
                label="Iterations",
                value=wording.count(report.num_iterations),
                interval=f"{wording.count(report.num_failed)} failed",
            )
        )
    return Summary(
        facts=_facts(
            Models=", ".join(model.name for model in report.models),
            Language=report.language,
            Mode=report.mode,
            Seed=report.seed,
        ),
        verdict="better" if (gain or 0.0) > 0 else "unclear",
        numbers=numbers,
        sentence=loops.evolve_sentence(report),
        contexts=[report.stop_reason],
        columns=loops.EVOLVE_COLUMNS,
        rows=loops.evolve_rows(report),
        costs=loops.evolve_costs(report),
    )


def _prompts(report: EvolveReport, tasks: TasksReport) -> Summary:
    row = tasks.rows[0] if tasks.rows else None
    gained = None if row is None else row.gain
    ends = "" if row is None else f"95 % interval {wording.interval(row)}"
    mean = None if row is None else row.mean
    return Summary(
        facts=_facts(
            Model=tasks.model,
            Proposers=", ".join(model.name for model in report.models),
            Tasks=tasks.taskset.name,
            Mode=report.mode,
            Seed=report.seed,
        ),
        verdict=gain_verdict(gained),
        numbers=[
            *([] if gained is None else [_gain("Gain over the first prompt", gained)]),
            Number(label="Chosen prompt", value=wording.score(mean), interval=ends),
        ],
        sentence=loops.prompt_sentence(report, tasks),
        contexts=[loops.prompt_context(tasks), report.stop_reason],
        columns=loops.PROMPT_COLUMNS,
        rows=loops.prompt_rows(report, tasks),
        costs=loops.evolve_costs(report),
    )


def _evaluation(report: EvaluationReport) -> Summary:
    tasks = f"{report.taskset}, {wording.count(report.num_tasks)}" if report.taskset else ""
    rows = [
        (
            row.name,
            wording.score(row.mean),
            wording.interval(row),
            wording.gain(row.gain),
            wording.count(row.num_failed),
        )
        for row in report.models
    ]
    return Summary(
        facts=_facts(Model=report.model, Tasks=tasks),
        verdict="unclear",
        numbers=[],
        sentence="" if report.models else "No result yet: intervals come with the report.",
        contexts=[],
        columns=("model", "accuracy", "95 % interval", "gain over base", "failed"),
        rows=rows,
        costs=[wording.duration(report.seconds)] if report.seconds else [],
    )


def _pipeline(report: PipelineReport) -> Summary:
    """Summarize an evaluation whose last row is the result."""
    last = report.models[-1] if len(report.models) > 1 else None
    if last is None or last.gain is None or last.gain.low is None or last.gain.high is None:
        return _evaluation(report)
    verdict = "better" if last.gain.low > 0 else "worse" if last.gain.high < 0 else "unclear"
    measured = Number(
        label=f"Accuracy of {last.name}",
        value=wording.score(last.mean),
        interval=f"95 % interval {wording.interval(last)}",
    )
    return replace(
        _evaluation(report),
        verdict=verdict,
        numbers=[measured, _gain("Gain over the base model", last.gain)],
        sentence=PIPELINE_SENTENCES[verdict],
    )


def _league(report: LeagueReport) -> Summary:
    best = report.rows[0] if report.rows else None
    numbers = []
    if best is not None and best.mean is not None:
        ends = f"95 % interval {wording.interval(best)}"
        numbers.append(
            Number(label=f"Accuracy of {best.name}", value=wording.score(best.mean), interval=ends)
        )
        if best.gain is not None:
            numbers.append(_gain("Gain over the model as it is", best.gain))
    costs = {row[0]: row[1:] for row in league.cost_rows(report)}
    blank = ("",) * (len(league.COST_COLUMNS) - 1)
    return Summary(
        facts=_facts(Model=report.model, Tasks=report.taskset, Budget=report.budget),
        verdict=league.league_verdict(report),
        numbers=numbers,
        sentence=league.league_sentence(report),
        contexts=league.league_contexts(report),
        columns=(*league.COLUMNS, *league.COST_COLUMNS[1:]),
        rows=[(*row, *costs.get(row[0], blank)) for row in league.league_rows(report)],
        costs=[wording.duration(report.seconds)] if report.seconds else [],
    )


STEP_COLUMNS = ("step", "loop", "made from", "result", "time")


def step_rows(report: PipelineReport) -> list[tuple[str, ...]]:
    return [
        (
            step.name,
            step.loop,
            ", ".join(step.made_from),
            step.result,
            wording.duration(step.seconds) if step.seconds else "",
        )
        for step in report.steps
    ]


def _sft(report: SftReport) -> Summary:
    is_done = bool(report.version)
    losses = (("Loss of the first step", report.first_loss), ("of the last", report.last_loss))
    seconds = [wording.duration(report.seconds)] if report.seconds else []
    return Summary(
        facts=_facts(Model=report.model, Tasks=report.taskset, Seed=report.seed),
        verdict="unclear",
        numbers=[
            Number(label=label, value=wording.score(loss)) for label, loss in losses if is_done
        ],
        sentence=SFT_DONE if is_done else "The training has not ended yet.",
        contexts=[],
        columns=(),
        rows=[],
        costs=[
            wording.plural(report.num_rows, "row"),
            wording.plural(report.num_steps, "step"),
            wording.plural(report.num_tokens, "token"),
            *seconds,
        ],
    )


def _loop(report: LoopReport) -> Summary:
    winner = report.winner
    numbers = []
    if winner is not None:
        ends = f"95 % interval {wording.interval(winner)}"
        label, value = f"Reward of {winner.name}", wording.score(winner.mean)
        numbers.append(Number(label=label, value=value, interval=ends))
        if winner.gain is not None:
            numbers.append(_gain(f"Gain over {report.rows[1].name}", winner.gain))
    return Summary(
        facts=_facts(Model=report.model, Seed=report.seed),
        verdict=gain_verdict(None if winner is None else winner.gain),
        numbers=numbers,
        sentence=report.sentence,
        contexts=[],
        columns=wording.LOOP_COLUMNS,
        rows=wording.report_rows(report.rows),
        costs=[wording.duration(report.seconds)] if report.seconds else [],
    )


def _facts(**pairs: object) -> list[tuple[str, str]]:
    return [(term, str(detail)) for term, detail in pairs.items() if detail not in (None, "")]


def _gain(label: str, gain: Any) -> Number:
    ends = f"95 % interval {wording.signed(gain.low)} to {wording.signed(gain.high)}"
    return Number(label=label, value=wording.signed(gain.mean), interval=ends, is_gain=True)


def render_summary(report: Report) -> str:
    """The result as HTML without style or script: facts, sentence, warnings, table, costs."""
    summary = summarize(report)
    facts = " · ".join(f"{term}: {detail}" for term, detail in summary.facts)
    said = [facts, summary.sentence, *summary.contexts, *report.warnings]
    head = "".join(f"<th>{escape(column)}</th>" for column in summary.columns)
    rows = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in summary.rows
    )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>" if rows else ""
    paragraphs = "".join(f"<p>{escape(text)}</p>" for text in said if text)
    costs = f"<p>{escape(' · '.join(summary.costs))}</p>" if summary.costs else ""
    return f"<div>{paragraphs}{table}{costs}</div>"


Report.render = staticmethod(render_summary)
