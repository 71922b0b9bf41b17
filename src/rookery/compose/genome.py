"""`run_genome`: runs an evolution of adapters, from its config to its report and page."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rookery.compose.inputs import IsMade, RunInputs, digest_adapters, list_inputs, load_not_made
from rookery.compose.running import (
    ConfigSource,
    Outcome,
    RunKind,
    RunOpener,
    RunPlan,
    finisher,
    open_shown_engine,
    read_tasksets,
)
from rookery.engines import model_folder, require_adapters
from rookery.loops.genome import GenomeConfig, GenomeInputs, evolve
from rookery.loops.genome.adapter_builder import check_device
from rookery.loops.genome.config import check_inputs, check_tasks
from rookery.loops.genome.founders import (
    FileInit,
    RandomInit,
    ZeroInit,
    make_founders,
    read_founders,
)
from rookery.ports import Engine, Observer
from rookery.reports import GenerationRecord, GenomeReport
from rookery.rollout import BlockProgress, RolloutLog, TasksetEvaluator
from rookery.runs import Run
from rookery.runtime.concurrency import run_in_thread
from rookery.tasks.splits import SPLITS, SplitName
from rookery.tasks.taskset import Taskset
from rookery.tasks.template import Template, load_template
from rookery.types import Adapter
from rookery.ui.display import Bar, Display

__all__ = ["GENOME", "RolloutPlan", "SearchBar", "plan_rollouts", "run_genome"]


def run_genome(
    config: ConfigSource | GenomeConfig,
    *,
    name: str = "",
    runs_dir: str | Path = "runs",
    progress: bool = True,
    **values: Any,
) -> Outcome[GenomeReport]:
    """Evolve adapters, and measure the best one on tasks that the search never saw.

    `run_genome("mine.yaml", seed=3)`; `values` are keys of the config. The folder of the outcome
    holds `winner` (a PEFT folder), `report.html`, `report.json` and everything to resume.
    """
    return GENOME.start(config, values, name=name, runs_dir=runs_dir, progress=progress)


@dataclass(frozen=True, slots=True)
class _Inputs:
    """All inputs of the loop, checked before the run is created."""

    tasksets: list[Taskset]
    founders: dict[str, Adapter] | None
    """None: made from the model's layer shapes when the engine is open."""
    folder: Path
    """The model's folder."""
    template: Template


def _read_inputs(config: GenomeConfig, display: Display) -> _Inputs:
    check_device(config.merge_device)
    tasksets = read_tasksets(config.tasksets, display)
    founders = read_founders(config.init) if isinstance(config.init, FileInit) else None
    require_adapters(config.engine, _rank(config, founders))
    folder = model_folder(config.engine, tokenizer=config.tokenizer)
    return _Inputs(tasksets, founders, folder, load_template(folder))


def _rank(config: GenomeConfig, founders: dict[str, Adapter] | None) -> dict[str, int]:
    """Return the largest adapter rank that the engine gets, by the setting that decides it."""
    if config.rank is not None:
        return {"rank": config.rank}
    if isinstance(config.init, FileInit):
        largest = max(adapter.rank for adapter in (founders or {}).values())
        return {"the founders' rank, which children have,": largest}
    return {"init.rank": config.init.rank}


def _plan(config: GenomeConfig, open_run: RunOpener, display: Display) -> RunPlan[GenomeReport]:
    del open_run
    inputs = _read_inputs(config, display)
    founders = inputs.founders
    init = {} if founders is None else {"init": digest_adapters(founders.values())}
    return RunPlan(
        inputs=list_inputs(inputs.tasksets, init, {"the model": inputs.folder}),
        opened=_open(config, inputs, display),
    )


def _read_step_inputs(config: GenomeConfig, is_made: IsMade) -> RunInputs:
    tasksets = load_not_made(config.tasksets, is_made)
    init = _digest_founders(config.init, is_made) if isinstance(config.init, FileInit) else {}
    models = {}
    if not is_made("engine", "tokenizer"):
        models = {"the model": model_folder(config.engine, tokenizer=config.tokenizer)}
    return list_inputs(tasksets, init, models)


def _digest_founders(config: FileInit, is_made: IsMade) -> dict[str, str]:
    """Digest all founders. If another step makes some, only check the others and return {}."""
    is_list = isinstance(config.path, tuple)
    keys = [f"init.path.{i}" if is_list else "init.path" for i in range(len(config.paths))]
    pairs = zip(keys, config.paths, strict=True)
    paths = tuple(path for key, path in pairs if not is_made(key))
    founders = read_founders(config.model_copy(update={"path": paths})) if paths else {}
    return {"init": digest_adapters(founders.values())} if len(paths) == len(keys) else {}


GENOME = RunKind(
    "genome",
    config=GenomeConfig,
    finish=finisher(_plan, track=lambda config: config.track),
    inputs=_read_step_inputs,
    scored=("candidate", "failure", "generation", "phase", "winner"),
)


@asynccontextmanager
async def _open(
    config: GenomeConfig, inputs: _Inputs, display: Display
) -> AsyncIterator[Callable[[Run], Awaitable[GenomeReport]]]:
    _share_cores(config)
    async with open_shown_engine(config.engine, display) as engine:
        founders = await _ready_founders(config, inputs, engine)
        await run_in_thread(_check, config, inputs, engine, founders)
        yield partial(
            _search,
            config=config,
            inputs=inputs,
            engine=engine,
            founders=founders,
            display=display,
        )


def _share_cores(config: GenomeConfig) -> None:
    """Leave cores to servers on this machine: they answer while candidates are made."""
    if config.engine.type == "fleet" and config.engine.launch is not None:
        torch.set_num_threads(max(1, torch.get_num_threads() // 4))


def _check(
    config: GenomeConfig, inputs: _Inputs, engine: Engine, founders: dict[str, Adapter]
) -> None:
    evaluator = TasksetEvaluator(engine, template=inputs.template, tasksets=inputs.tasksets)
    check_inputs(config, founders=founders, tasksets=inputs.tasksets, engine=engine)
    check_tasks(evaluator, inputs.tasksets, context_tokens=engine.context_tokens)


async def _ready_founders(
    config: GenomeConfig, inputs: _Inputs, engine: Engine
) -> dict[str, Adapter]:
    """Return the founders. Loads each once, so that the engine refuses one that does not fit."""
    founders = inputs.founders or {}
    if isinstance(config.init, ZeroInit | RandomInit):
        layers, base = engine.linear_layers, engine.base.version
        founders = make_founders(config.init, layers=layers, base=base, seed=config.seed)
    for founder in founders.values():
        await engine.unload(await engine.load(founder))
    return founders


async def _search(
    run: Run,
    *,
    config: GenomeConfig,
    inputs: _Inputs,
    engine: Engine,
    founders: dict[str, Adapter],
    display: Display,
) -> GenomeReport:
    tasksets = inputs.tasksets
    plan = plan_rollouts(config, list(founders.values()), tasksets)
    with display.bar("founders", total=plan.total, run=run) as bar:
        shown = SearchBar(bar, display, plan, is_remote=engine.is_remote)
        evaluator = TasksetEvaluator(
            engine,
            template=inputs.template,
            tasksets=tasksets,
            log=RolloutLog(run),
            on_progress=shown.answered,
        )
        loop_inputs = GenomeInputs(
            config=config, founders=founders, tasksets=tasksets, evaluator=evaluator
        )
        report = await evolve(loop_inputs, engine=engine, run=run, observer=shown)
        shown.finish()
        return report


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPlan:
    """Maximum number of answers that a run asks for. Races ask for fewer on the search split."""

    num_tasks: Mapping[SplitName, int]
    founders: int
    search: int
    """On the search split, including the founders'."""
    random: int
    """On the search split, by random search."""
    select: int
    """On the select split, by the search. Random search asks for as many again."""
    report: int

    @property
    def total(self) -> int:
        rounds = 2 if self.random else 1
        return self.search + self.random + rounds * self.select + self.report


NEW_TASK = 4.0
"""Cost of reading a new task in this process, in answers. Later answers to the task share most of
its prompt. Servers share nothing between adapters."""


class SearchBar(Observer[GenerationRecord]):
    """Shows phase, answers and generations of the search on its progress bar."""

    def __init__(
        self, bar: Bar, display: Display, plan: RolloutPlan, *, is_remote: bool = False
    ) -> None:
        self._bar, self._display, self._plan = bar, display, plan
        self._allowed = 0
        """Maximum number of answers of the generations so far."""
        self._asked = 1.0
        """Fraction of `_allowed` that was asked for; the rest is expected to ask for as much."""
        new, num = 0.0 if is_remote else NEW_TASK, plan.num_tasks
        self._reading = {
            "founders": new * num["search"],
            "select": new * num["select"],
            "report": new * num["report"],
        }
        """Cost of reading new tasks by phase, in answers."""
        self._worth = 1.0
        """Cost of an answer in this phase with its share of the reading, in answers."""
        self._expect(plan.search, ("founders", "select", "random search", "report"))

    def answered(self, progress: BlockProgress) -> None:
        self._bar.advance(progress.num_rollouts, tokens=progress.num_tokens, worth=self._worth)

    def on_budget(self, share: float) -> None:
        self._bar.left.limit(share)

    def on_phase(self, name: str) -> None:
        """Start a phase: `founders`, `ga 3`, `select`, `random search` or `report`."""
        self._bar.update(name=name)
        plan, last = self._plan, ("select", "random search", "report")
        answers = {"founders": plan.founders, "select": plan.select, "report": plan.report}
        self._worth = 1 + self._reading.get(name, 0.0) / max(1, answers.get(name, 1))
        if name in last:
            self._expect(0.0, last[last.index(name) :])

    def on_step(self, step: GenerationRecord) -> None:
        """Print the generation, and update the expected number of answers."""
        self._display.say(_generation_line(step))
        plan = self._plan
        self._allowed += step.num_candidates * plan.num_tasks["search"]
        if 0 < self._bar.done < self._allowed:
            self._asked = self._bar.done / self._allowed
        raced = self._asked * max(0, plan.search - self._allowed)
        self._expect(raced, ("select", "random search", "report"))

    def finish(self) -> None:
        """Replace the total, an upper bound, by the number of answers asked for."""
        self._bar.update(total=self._bar.done, name="done")

    def _expect(self, num_search: float, phases: Sequence[str]) -> None:
        """Expect `num_search` answers of the search, and all answers of these phases."""
        plan = self._plan
        random = self._asked * plan.random + (plan.select if plan.random else 0)
        answers = {"select": plan.select, "random search": random, "report": plan.report}
        num_left = num_search + sum(answers.get(name, 0) for name in phases)
        self._bar.update(total=self._bar.done + num_left)
        self._bar.left.expect(num_left + sum(self._reading.get(name, 0) for name in phases))


def plan_rollouts(
    config: GenomeConfig, founders: Sequence[Adapter], tasksets: Sequence[Taskset]
) -> RolloutPlan:
    """Return an upper bound of the answers, for the progress bar."""
    num_tasks = {name: sum(len(taskset.split(name)) for taskset in tasksets) for name in SPLITS}
    search, select, report = num_tasks.values()
    candidates = len(founders) + sum(stage.num_candidates(founders) for stage in config.stages)
    if isinstance(config.init, FileInit) and config.init.use != "adapters":
        candidates += config.init.num_pairs
    finals = config.finals
    is_random = finals.random_search and len(founders) > 1
    voters = min(finals.num_voters, len(founders)) + min(finals.num_voters, finals.num_finalists)
    return RolloutPlan(
        num_tasks=num_tasks,
        founders=len(founders) * search,
        search=candidates * search,
        random=(candidates - len(founders)) * search if is_random else 0,
        select=(finals.num_finalists + len(config.floors)) * select,
        report=(4 + voters) * report,  # winner and best founder are among the voters too
    )


def _generation_line(generation: GenerationRecord) -> str:
    def show(value: float | None) -> str:
        return "  -  " if value is None else f"{value:.3f}"

    dropped = f", {generation.num_dropped} dropped early" if generation.num_dropped else ""
    failed = f", {generation.num_failed} failed" if generation.num_failed else ""
    return (
        f"{generation.stage:>8} {generation.generation:>3}   best {show(generation.best)}   "
        f"mean {show(generation.mean)}   {generation.num_candidates} candidates{dropped}{failed}"
    )
