"""`rookery genome run`: evolve LoRA adapters as a config says."""

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import cyclopts
from cyclopts import Parameter
from rich.markup import escape

from rookery.cli.engine import model_folder, open_sampler
from rookery.cli.runs import OpenRun, new_run, open_again
from rookery.cli.terminal import (
    check_flags,
    console,
    paths_from_here,
    quiet_libraries,
    resumable,
    run_async,
    say,
    show_notes,
    token_progress,
)
from rookery.config import load_config, parse_config

if TYPE_CHECKING:
    from rich.progress import Progress as ProgressBar

    from rookery.cli.engine import Engine
    from rookery.loops.genome import Generation, GenomeConfig, GenomeResult
    from rookery.rollout import Progress
    from rookery.runs import Run
    from rookery.tasks.taskset import Taskset
    from rookery.tasks.template import Template
    from rookery.types import Adapter

__all__ = ["genome", "resume_genome"]

PATHS = ("init.path", "tasksets.*.path")
"""Flags that name files."""

genome = cyclopts.App(name="genome", help="Evolve a population of LoRA adapters, no gradients.")


@genome.command(name="run")
def run_command(
    config: Path,
    *overrides: Annotated[str, Parameter(allow_leading_hyphen=True, show=False)],
    name: str = "",
    runs_dir: Path = Path("runs"),
    resume: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Evolve adapters as the config says, and report honestly how good the best one is.

    Any value of the config is a flag with a dotted name. An interrupted run goes on with
    `--resume --name NAME` or `rookery runs resume NAME`.

        rookery genome run configs/demo.yaml
        rookery genome run mine.yaml --seed 3 --stages.0.generations 20

    Parameters
    ----------
    config
        A YAML or TOML file; paths in it are relative to it, those of flags to where you are.
    name
        The run's name; made of the time when empty.
    runs_dir
        Where runs are kept.
    resume
        Go on with the run of this name.
    """
    from rookery.loops.genome import GenomeConfig

    check_flags(overrides, fields=GenomeConfig.model_fields, own=("name", "runs_dir", "resume"))
    if resume:
        with open_again(runs_dir, name=name, overrides=overrides) as run:
            return resume_genome(run)
    words = paths_from_here(overrides, paths=PATHS)
    loaded = load_config(GenomeConfig, config, overrides=words).from_folder(config.parent)
    return _finish(loaded, new_run(loaded, kind="genome", name=name, runs_dir=runs_dir))


def resume_genome(run: "Run") -> int:
    """Go on with an evolution from where its event log ends."""
    from rookery.loops.genome import GenomeConfig

    config = parse_config(GenomeConfig, run.config, origin=str(run.path / "config.json"))
    return _finish(config, lambda: nullcontext(run))


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Everything the loop reads, checked before a run is made."""

    tasksets: "list[Taskset]"
    founders: "dict[str, Adapter] | None"
    """None when they are to be made from the model's shape."""
    template: "Template"

    @property
    def notes(self) -> list[str]:
        """What the reader of the report must know of the tasks."""
        return [note for taskset in self.tasksets for note in taskset.notes]


def _read_inputs(config: "GenomeConfig") -> _Inputs:
    from rookery.loops.genome.adapter_builder import check_device
    from rookery.loops.genome.founders import FileInit, read_founders
    from rookery.tasks.splits import SPLITS
    from rookery.tasks.taskset import load_tasksets
    from rookery.tasks.template import load_template

    check_device(config.merge_device)
    tasksets = load_tasksets(config.tasksets)
    for taskset in tasksets:
        for name in SPLITS:
            taskset.split(name)  # refuses one that should have tasks and has none
    founders = read_founders(config.init) if isinstance(config.init, FileInit) else None
    template = load_template(model_folder(config.engine, tokenizer=config.tokenizer))
    return _Inputs(tasksets, founders, template)


def _finish(config: "GenomeConfig", open_run: OpenRun) -> int:
    quiet_libraries()
    inputs = _read_inputs(config)
    show_notes(inputs.notes)
    report, path = run_async(_evolve(config, inputs, open_run))
    _print_report(report)
    for label, file in (("winner", "winner"), ("report", "report.html")):
        console.print(f"{label}   {path / file}", highlight=False, markup=False, soft_wrap=True)
    return 0


async def _evolve(
    config: "GenomeConfig", inputs: _Inputs, open_run: OpenRun
) -> tuple[dict[str, Any], Path]:
    """What can be refused is refused before the run is made."""
    from rookery.loops.genome.checks import check_inputs, check_tasks
    from rookery.rollout import TasksetEvaluator
    from rookery.ui.page import render_page

    _share_cores(config)
    if config.engine.type == "embedded":
        say(f"loading {config.engine.model}")
    async with open_sampler(config.engine) as engine:
        founders = await _ready_founders(config, inputs, engine)
        evaluator = TasksetEvaluator(engine, template=inputs.template, tasksets=inputs.tasksets)
        check_inputs(config, founders=founders, tasksets=inputs.tasksets, engine=engine)
        check_tasks(evaluator, inputs.tasksets, context_tokens=engine.context_tokens)
        with open_run() as run, resumable(run.path):
            result = await _search(run, config, inputs, engine, founders)
            run.write_text("report.html", render_page(result.report))
            run.finish("finished")
    return result.report, run.path


def _share_cores(config: "GenomeConfig") -> None:
    """Candidates are made while servers that were started here answer, which needs cores too."""
    import torch

    if config.engine.type == "fleet" and config.engine.launch is not None:
        torch.set_num_threads(max(1, torch.get_num_threads() // 4))


async def _ready_founders(
    config: "GenomeConfig", inputs: _Inputs, engine: "Engine"
) -> "dict[str, Adapter]":
    """Founders that the engine takes: one that does not fit is the user's mistake."""
    from rookery.loops.genome.founders import RandomInit, ZeroInit, make_founders

    founders = inputs.founders or {}
    if isinstance(config.init, ZeroInit | RandomInit):
        layers, base = engine.linear_layers, engine.base.version
        founders = make_founders(config.init, layers=layers, base=base, seed=config.seed)
    for founder in founders.values():
        await engine.unload(await engine.load(founder))
    return founders


async def _search(
    run: "Run",
    config: "GenomeConfig",
    inputs: _Inputs,
    engine: "Engine",
    founders: "dict[str, Adapter]",
) -> "GenomeResult":
    from rookery.loops.genome import Watcher, evolve
    from rookery.rollout import RolloutLog, TasksetEvaluator

    tasksets = inputs.tasksets
    with token_progress() as bar:
        shown = _Shown(bar, total=_expected_rollouts(config, len(founders), tasksets))
        evaluator = TasksetEvaluator(
            engine,
            template=inputs.template,
            tasksets=tasksets,
            log=RolloutLog(run),
            on_progress=shown.answered,
        )
        result = await evolve(
            config,
            founders=founders,
            tasksets=tasksets,
            engine=engine,
            evaluator=evaluator,
            run=run,
            watcher=Watcher(on_generation=shown.generation_done, on_phase=shown.phase_started),
        )
        shown.finish()
        return result


class _Shown:
    """The search on its progress bar: what it is doing, answers of at most so many, generations."""

    def __init__(self, bar: "ProgressBar", *, total: int) -> None:
        self._bar = bar
        self._line = bar.add_task("founders", total=total, tokens=0)

    def answered(self, progress: "Progress") -> None:
        """A block of answers is there."""
        tokens = self._bar.tasks[self._line].fields["tokens"] + progress.num_tokens
        self._bar.update(self._line, advance=progress.num_rollouts, tokens=tokens)

    def phase_started(self, name: str) -> None:
        """What the following answers are for: `founders`, `ga 3`, `select`, `random search`."""
        self._bar.update(self._line, description=escape(name))

    def generation_done(self, generation: "Generation") -> None:
        """A line that stays."""
        say(_generation_line(generation))

    def finish(self) -> None:
        """The total was a bound: races and known answers make it less."""
        done = self._bar.tasks[self._line].completed
        self._bar.update(self._line, total=done, description="done")


def _expected_rollouts(config: "GenomeConfig", num_founders: int, tasksets: "list[Taskset]") -> int:
    """An upper bound for the bar: racing makes it less, so the bar ends at what was asked."""
    from rookery.tasks.splits import SPLITS

    search, select, report = (
        sum(len(taskset.split(name)) for taskset in tasksets) for name in SPLITS
    )
    candidates = num_founders + sum(stage.num_candidates for stage in config.stages)
    rounds = 2 if config.finals.random_search and num_founders > 1 else 1
    finalists = config.finals.num_finalists * rounds
    entrants = 6 + 2 * config.finals.num_voters
    return candidates * rounds * search + finalists * select + entrants * report


def _generation_line(generation: "Generation") -> str:
    def show(value: float | None) -> str:
        return "  -  " if value is None else f"{value:.3f}"

    dropped = f", {generation.num_dropped} dropped early" if generation.num_dropped else ""
    failed = f", {generation.num_failed} failed" if generation.num_failed else ""
    return (
        f"{generation.stage:>8} {generation.generation:>3}   best {show(generation.best)}   "
        f"mean {show(generation.mean)}   {generation.num_candidates} candidates{dropped}{failed}"
    )


def _print_report(report: dict[str, Any]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from rookery.ui.headline import make_headline
    from rookery.ui.report import parse_report
    from rookery.ui.table import COLUMNS, report_rows

    console.print(make_headline(parse_report(report)).sentence, style="bold", markup=False)
    for warning in report["warnings"]:
        console.print(warning, style="yellow", markup=False)
    num_tasks = sum(taskset["num_report"] for taskset in report["tasksets"])
    title = f"{num_tasks} tasks that the search never saw"
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 0), pad_edge=False)
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == COLUMNS[0] else "right")
    for row in report_rows(report):
        table.add_row(*row)
    console.print(table)
    console.print(
        f"{report['num_candidates']} candidates, {report['num_rollouts']:,} answers, "
        f"{report['num_tokens']:,} tokens, {report['seconds']:.0f} s",
        highlight=False,
    )
