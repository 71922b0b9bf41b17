"""Shared by the commands: the console, error lines, warnings, and flags that change a config."""

import difflib
import fnmatch
import json
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from rich.logging import RichHandler
from rich.markup import escape

from rookery.config import parse_overrides
from rookery.errors import ConfigError
from rookery.paths import expanded
from rookery.tasks.python_function import function_from_folder
from rookery.ui.display import Display, PlainConsole

if TYPE_CHECKING:
    from rookery.compose.running import Outcome
    from rookery.reports import (
        EvaluationReport,
        EvolveReport,
        GenomeReport,
        GrpoReport,
        IcmReport,
        LeagueReport,
        ModelRow,
        PipelineReport,
        Report,
        ReportRow,
        SftReport,
        SweepRecord,
    )

__all__ = [
    "check_flags",
    "console",
    "display",
    "fail",
    "log_warnings",
    "paths_from_here",
    "print_outcome",
    "print_table",
    "say",
]

FUNCTIONS = ("*.function",)
"""Flags of any command that name a Python function."""
ELSEWHERE = ("run:", "generated:", "hf://")
"""Prefixes of flag values that name a file or a taskset other than by its path."""

console = PlainConsole()
display = Display()


def fail(sentence: str) -> None:
    """Print one error line on stderr."""
    display.fail(sentence)


def say(line: str) -> None:
    """Print a line as it is, without colours and wrapping."""
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def check_flags(
    overrides: Sequence[str], *, fields: Collection[str], own_flags: Sequence[str]
) -> None:
    """Refuse a misspelt flag of the command itself, which the config could not correct. For a
    command with `--resume`, `--rezume` would otherwise reach its config as an override."""
    for key, _ in parse_overrides(overrides):
        head = key.partition(".")[0].replace("-", "_")
        near = difflib.get_close_matches(head, [*fields, *own_flags], n=1)
        if head not in fields and near and near[0] in own_flags:
            flag = near[0].replace("_", "-")
            raise ConfigError(f"--{key} is not a flag. Did you mean --{flag}?")


def paths_from_here(overrides: Sequence[str], *, paths: Sequence[str]) -> list[str]:
    """Make flags that match `paths`, and files of functions (`file.py:function`), absolute: shells
    complete paths from the current folder, but paths in a config are relative to its file."""
    return [f"--{key}={_from_here(key, text, paths)}" for key, text in parse_overrides(overrides)]


def _from_here(key: str, text: str, paths: Sequence[str]) -> str:
    if _is_any(key, paths):
        if text.startswith("["):
            return json.dumps([_from_here(key, path, paths) for path in _listed(key, text)])
        return text if text.startswith(ELSEWHERE) else str(expanded(text).absolute())
    return function_from_folder(text, Path.cwd()) if _is_any(key, FUNCTIONS) else text


def _listed(key: str, text: str) -> list[str]:
    try:
        return list(map(str, yaml.safe_load(text)))
    except yaml.YAMLError:
        raise ConfigError(f"--{key} is {text}: a list is [..., ...].") from None


def _is_any(key: str, patterns: Sequence[str]) -> bool:
    written = key.replace("-", "_")
    return any(fnmatch.fnmatchcase(written, pattern) for pattern in patterns)


def log_warnings() -> None:
    """Print warnings as lines on stderr."""
    handler = RichHandler(
        logging.WARNING, console=PlainConsole(stderr=True), show_path=False, show_time=False
    )
    logging.basicConfig(
        level=logging.WARNING,
        format="%(message)s",
        handlers=[handler],
    )


# The end of a run: headline, table, paths, exit code.


def print_outcome(outcome: "Outcome[Any]", *, as_json: bool = False) -> int:
    """Print the result of a run. Returns the exit code: 2 if tasks or entrants failed."""
    report = outcome.report
    if as_json:
        console.print_json(report.model_dump_json(exclude_none=True))
    else:
        _PRINTERS.get(report.kind, _print_loop)(report, outcome.path)
    if report.kind == "league":
        is_partial = any(one.is_failure for one in report.left_out)
        return 2 if is_partial or any(row.num_failed for row in report.rows) else 0
    return _fail_if_tasks_failed(report) if report.kind in ("eval", "pipeline") else 0


def _print_genome(report: "GenomeReport", path: Path) -> None:
    from rookery.ui import wording
    from rookery.ui.headline import make_headline
    from rookery.ui.wording import GENOME_COLUMNS, report_rows

    console.print(make_headline(report).sentence, style="bold", markup=False)
    _print_warnings(report.warnings)
    title = f"{wording.report_tasks(report.tasksets)} that the search never saw"
    print_table(title, columns=GENOME_COLUMNS, rows=report_rows(report.rows))
    _print_sampled(report.rows)
    console.print(
        f"{report.num_candidates} candidates, {report.num_rollouts:,} answers, "
        f"{report.num_tokens:,} tokens, {report.seconds or 0:.0f} s",
        highlight=False,
    )
    _print_places({"winner": path / "winner", "report": path / "report.html"})


def _print_grpo(report: "GrpoReport", path: Path) -> None:
    from rookery.ui import wording
    from rookery.ui.loops import SETTING_COLUMNS, grpo_sentence, setting_rows
    from rookery.ui.wording import GRPO_COLUMNS, report_rows

    console.print(grpo_sentence(report), style="bold", markup=False)
    _print_warnings(report.warnings)
    title = f"{wording.report_tasks(report.tasksets)} that the training never saw"
    print_table(title, columns=GRPO_COLUMNS, rows=report_rows(report.rows))
    _print_sampled(report.rows)
    places = {"trained": path / "trained", "report": path / "report.html"}
    drawn: GrpoReport | SweepRecord = report
    if report.sweep is not None:
        drawn, places = report.sweep, {**places, "adapters": path / "adapters"}
        num = wording.plural(len(report.sweep.adapters), "adapter")
        title = f"{num}, ranked by the select tasks"
        print_table(title, columns=SETTING_COLUMNS, rows=setting_rows(report))
    console.print(
        f"{wording.plural(len(report.steps), 'step')}, {drawn.num_rollouts:,} answers, "
        f"{drawn.num_tokens:,} drawn tokens, {report.seconds or 0:.0f} s",
        highlight=False,
    )
    _print_places(places)


def _print_sampled(rows: "Sequence[ReportRow | ModelRow]") -> None:
    """Print the results of randomly drawn answers, if there are any."""
    from rookery.ui import wording

    if cells := wording.sampled_rows(rows):
        columns = wording.sampled_columns(rows)
        print_table("Several answers to each task", columns=columns, rows=cells)


def _print_icm(report: "IcmReport", path: Path) -> None:
    from rookery.ui.loops import ICM_COLUMNS, icm_rows, verdict_words

    title = f"{report.num_labelled} of {report.num_items} items labelled"
    print_table(title, columns=ICM_COLUMNS, rows=icm_rows(report))
    console.print(f"verdict  [bold]{escape(verdict_words(report))}[/bold]", highlight=False)
    _print_warnings(report.warnings)
    tokens = report.tokens
    console.print(
        f"search: {tokens.computed:,} prompt tokens computed of {tokens.naive:,} that a plain loop "
        f"computes; baselines {tokens.baselines:,}; {report.seconds or 0:.0f} s",
        highlight=False,
    )
    _print_places(
        {
            "labels": path / "labels.jsonl",
            "exports": f"{path / 'sft.jsonl'}, pairs.jsonl, soft.jsonl",
            "report": path / "report.html",
        }
    )


def _print_evolve(report: "EvolveReport", path: Path) -> None:
    _print_loop(report, path, {"best": path / "best", "checkpoints": path / "checkpoints"})


def _print_loop(report: "Report", path: Path, places: Mapping[str, Path] = {}) -> None:
    """Print the summary of the run's page, and paths."""
    from rookery.ui.summary import summarize

    summary = summarize(report)
    console.print(summary.sentence, style="bold", markup=False)
    _print_warnings(report.warnings)
    rows = [[_printable(cell) for cell in row] for row in summary.rows]
    print_table(path.name, columns=summary.columns, rows=rows)
    for context in filter(None, summary.contexts):
        console.print(context, highlight=False, markup=False)
    _print_places({**places, "report": path / "report.html"})


def _printable(text: str) -> str:
    """Remove escape sequences: names of models come from servers."""
    return "".join(char for char in text if char.isprintable())


def _print_evaluation(report: "EvaluationReport", path: Path) -> None:
    from rich.table import Table

    from rookery.ui import wording

    measured = wording.tasks(report.num_tasks, report.num_questions)
    table = Table(title=escape(f"{report.taskset}: {measured}"))
    for column in ("model", "accuracy", "95 % interval", "gain over base", "failed"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for row in report.models:
        cells = (wording.score(row.mean), wording.interval(row), wording.gain(row.gain))
        table.add_row(escape(row.name), *cells, str(row.num_failed))
    console.print(table)
    _print_sampled(report.models)
    tokens = report.tokens
    counts = (
        f"{tokens['prompt_asked']:,} prompt tokens asked, {tokens['prompt_computed']:,} computed, "
        f"{tokens['decoded']:,} decoded"
        if "decoded" in tokens
        else f"{tokens['asked_and_answered']:,} tokens asked and answered"
    )
    console.print(f"{report.seconds or 0:.1f} s; {counts}", highlight=False, markup=False)
    _print_places({"run": path, "answers": path / "report.html"})


def _print_pipeline(report: "PipelineReport", path: Path) -> None:
    from rookery.ui.summary import STEP_COLUMNS, step_rows

    print_table("Steps, each a run", columns=STEP_COLUMNS, rows=step_rows(report))
    if report.models:
        _print_evaluation(report, path)
    else:
        _print_places({"run": path, "report": path / "report.html"})


def _print_league(report: "LeagueReport", path: Path) -> None:
    from rookery.ui import league, wording

    console.print(league.league_sentence(report), style="bold", markup=False)
    for context in league.league_contexts(report):
        console.print(context, highlight=False, markup=False)
    _print_warnings(report.warnings)
    tasks = wording.tasks(report.num_tasks, report.num_questions, "report task")
    title = escape(f"{report.taskset}: {tasks}")
    print_table(title, columns=league.COLUMNS, rows=league.league_rows(report))
    title = "What a seed took on average: answer tokens drawn and trained on"
    print_table(title, columns=league.COST_COLUMNS, rows=league.cost_rows(report))
    for line in league.setting_lines(report):
        say(line)
    columns, rows = league.pair_table(report)
    print_table("Row above column; * the 95 % interval excludes zero", columns=columns, rows=rows)
    console.print(f"{report.seconds or 0:.0f} s", highlight=False)
    _print_places({"run": path, "report": path / "report.html"})


def _print_sft(report: "SftReport", path: Path) -> None:
    from rookery.ui.summary import summarize

    summary = summarize(report)
    losses = ", ".join(f"{number.label.lower()} {number.value}" for number in summary.numbers)
    console.print(losses.capitalize(), style="bold", highlight=False)
    console.print(summary.sentence, highlight=False)
    _print_warnings(report.warnings)
    console.print(", ".join(summary.costs), highlight=False)
    _print_places({"trained": path / "trained", "report": path / "report.html"})


def _fail_if_tasks_failed(report: "EvaluationReport") -> int:
    """Print a line for each model with failed tasks. Returns the exit code."""
    failures = [row for row in report.models if row.num_failed]
    for row in failures:
        fail(f"{row.name}: {row.num_failed} tasks failed. {row.first_error}")
    return 2 if failures else 0


def _print_warnings(warnings: Iterable[str]) -> None:
    for warning in warnings:
        console.print(warning, style="yellow", markup=False)


def print_table(title: str, *, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 0), pad_edge=False)
    for column in columns:
        table.add_column(column, justify="left" if column == columns[0] else "right")
    for row in rows:
        table.add_row(*map(escape, row))
    console.print(table)


def _print_places(places: Mapping[str, str | Path]) -> None:
    width = max(map(len, places))
    for name, place in places.items():
        say(f"{name:<{width}}  {place}")


_PRINTERS: Mapping[str, Callable[[Any, Path], None]] = {
    "eval": _print_evaluation,
    "evolve": _print_evolve,
    "genome": _print_genome,
    "grpo": _print_grpo,
    "icm": _print_icm,
    "league": _print_league,
    "pipeline": _print_pipeline,
    "sft": _print_sft,
}
