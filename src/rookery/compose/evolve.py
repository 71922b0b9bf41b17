"""`run_evolve`: programs evolved by a language model, from files to the best one and its report.

    outcome = run_evolve("initial_program.py", "evaluator.py", "config.yaml", max_iterations=50)
    outcome.report.best.score, outcome.path / "best"

The files are OpenEvolve's, unmodified. The output folder is the run's folder.
"""

import asyncio
import logging
import os
import shutil
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from rookery.compat import openevolve
from rookery.compat.openevolve import (
    Flags,
    LoadedConfig,
    list_checkpoints,
    read_config,
    with_keys,
)
from rookery.compose.evolve_inputs import (
    EvolveProblem,
    EvolveRunConfig,
    read_inputs,
    read_step_inputs,
    resolve_problem,
    run_config,
)
from rookery.compose.proposers import open_config_embedder, open_models
from rookery.compose.running import (
    Outcome,
    RunKind,
    RunOpener,
    merge,
    on_same_inputs,
    resumable,
    run_async,
    tracked,
    write_page,
)
from rookery.concurrency import run_in_thread
from rookery.errors import ConfigError, RookeryError, RunError
from rookery.executors import WorkerSpec, open_local, open_modal, open_ray
from rookery.loops.evolve.config import EvolveConfig
from rookery.loops.evolve.loop import EvolveInputs, evolve
from rookery.loops.evolve.parts import Iteration
from rookery.ports import Executor, Observer
from rookery.reports import EvolveReport
from rookery.runs import EXTENDED, FINISHED, Run, RunView
from rookery.runs.run_folder import (
    EVENTS,
    check_changes,
    find_changes,
    in_folder,
)
from rookery.runs.summary import note_elsewhere
from rookery.ui.display import Bar, Display

__all__ = [
    "EVOLVE",
    "IterationLines",
    "describe",
    "evolve_prompt",
    "open_executor",
    "read_status",
    "resume",
    "run_evolution",
    "run_evolve",
    "start",
]

# Where programs are scored.


TELL_EVERY_S = 15.0
"""Between two lines while workers start."""


@asynccontextmanager
async def open_executor(
    config: EvolveConfig, spec: WorkerSpec, display: Display
) -> AsyncIterator[Executor]:
    """Where evaluations run; one worker at least is ready. The wait for it is told."""
    display.say(f"starting workers ({config.executor})")
    loop, began = asyncio.get_running_loop(), time.monotonic()
    telling = loop.call_later(TELL_EVERY_S, lambda: tell())

    def tell() -> None:
        nonlocal telling
        display.say(
            f"starting workers: {time.monotonic() - began:.0f} s. The evaluator's imports may take "
            f"{spec.startup_s:g} s (rookery.sandbox.startup_s)"
        )
        telling = loop.call_later(TELL_EVERY_S, tell)

    opening: AbstractAsyncContextManager[Executor]
    if config.executor == "ray":
        opening = open_ray(spec, address=config.rookery.address, num_workers=config.workers)
    elif config.executor == "modal":
        opening = open_modal(spec, num_workers=config.workers)
    else:
        opening = open_local(spec, num_workers=config.workers)
    try:
        async with opening as executor:
            telling.cancel()
            yield executor
    finally:
        telling.cancel()


# What is said of an evolution in the terminal while it runs: a line per iteration.


RUNS = Path("runs")
"""Where `rookery runs list` looks."""
MAX_CHARS = 100
"""Of the sentence of a failure: a line of a log is read at a glance."""

BASELINE = "baseline"
"""The kind of work of iterations that are not of the evolution."""

logger = logging.getLogger(__name__)


class IterationLines(Observer[Iteration]):
    """The metrics of the evolution itself go to the run too."""

    def __init__(self, display: Display, bar: Bar, run: Run, *, num_baselines: int) -> None:
        self._display = display
        self._num_baselines = num_baselines
        self._bar = bar
        self._run = run
        self._num_tokens = 0
        self._is_listed = False

    def on_step(self, step: Iteration) -> None:
        self._list_run()
        self._num_tokens += step.tokens or 0
        self._display.say(describe(step))
        if step.series:
            self._bar.left.did(1, BASELINE)
            return  # the bar is of the evolution
        self._run.log_metrics(step.num_decided, _metrics(step))
        self._bar.update(
            name=f"best {step.best_score:.4g}",
            done=step.num_decided,
            total=step.num_iterations,
            tokens=self._num_tokens,
        )

    def on_budget(self, share: float) -> None:
        if not self._num_baselines:  # they come on top
            self._bar.left.limit(share)

    def _list_run(self) -> None:
        """From its first iteration on: what ends before leaves no run."""
        if not self._is_listed:
            self._is_listed = True
            try:
                note_elsewhere(RUNS, self._run.path)
            except RunError as error:
                logger.warning("`rookery runs list` does not list this run: %s", error)

    def on_phase(self, name: str) -> None:
        """Of an evolution a sentence: a model is down, a training begins."""
        logger.info("%s", name)  # for the file: a warning would be in the terminal twice
        self._display.note([name])


def _metrics(iteration: Iteration) -> dict[str, float]:
    """What is not known of an iteration is left out."""
    values = {
        "evolve/best_score": iteration.best_score,
        "evolve/score": iteration.score,
        "evolve/is_failed": float(bool(iteration.failure)),
        "evolve/num_tokens": iteration.tokens,
        "time/evaluation_s": iteration.evaluation_s,
    }
    return {name: float(value) for name, value in values.items() if value is not None}


def describe(iteration: Iteration) -> str:
    """`   12  0.73  best 0.73 *  big` or `   13  failed (timeout): It took ...  best 0.73`.

    What a program or a model wrote cannot move the cursor or colour the terminal.
    """
    series = f"{iteration.series} " if iteration.series else ""
    head = f"{series}{iteration.number:>5}"
    best = f"best {iteration.best_score:.4g}"
    if iteration.failure:
        words = " ".join(iteration.message.split())[:MAX_CHARS]
        reason = "".join(char for char in words if char.isprintable())
        return f"{head}  failed ({iteration.failure}): {reason}  {best}"
    score = "-" if iteration.score is None else f"{iteration.score:.4g}"
    return f"{head}  {score}  {best}{' *' if iteration.is_best else ''}  {iteration.model}"


MAY_CHANGE = (
    "extended_from",
    "output",
    "settings.checkpoint_interval",
    "settings.database.embedding_api_base",
    "settings.early_stopping_patience",
    "settings.llm.*",
    "settings.log_dir",
    "settings.log_level",
    "settings.max_iterations",
    "settings.rookery.adapters*",
    "settings.rookery.address",
    "settings.rookery.bandit",
    "settings.rookery.budget.*",
    "settings.rookery.engine*",
    "settings.rookery.executor",
    "settings.rookery.model_down_s",
    "settings.rookery.sandbox.startup_s",
    "settings.rookery.target_score",
    "settings.rookery.tokenizer",
    "settings.rookery.workers",
    "warnings",
)
"""How far a run goes and where it runs; all else decides what it finds, and stays."""


def run_evolve(
    program: str | Path,
    evaluator: str | Path,
    config: str | Path | Mapping[str, Any] | None = None,
    *,
    output: str | Path | None = None,
    **values: Any,
) -> Outcome[EvolveReport]:
    """Evolve a program, a file or a folder, under an evaluator of OpenEvolve.

    `values` are keys of the config: `max_iterations=50, llm={"primary_model": "big"}`. The folder
    of the outcome holds `best/`, the checkpoints, the report and its page.
    """
    file = Path(config) if isinstance(config, str | Path) else None
    source = file if file is not None or not isinstance(config, Mapping) else config
    find = in_folder(RUNS)
    loaded = read_config(source, environment=os.environ, flags=Flags(values=values), find=find)
    problem = EvolveProblem(
        program=_as_path(program, "program"),
        evaluator=_as_path(evaluator, "evaluator"),
        output=None if output is None else Path(output),
        config_file=file,
    )
    return start(resolve_problem(problem, find=find), loaded, Display())


def _as_path(value: object, what: str) -> Path:
    """OpenEvolve also takes code and functions here."""
    is_path = isinstance(value, Path) or (isinstance(value, str) and "\n" not in value)
    if not is_path:
        kind = "code" if isinstance(value, str) else type(value).__name__
        raise ConfigError(
            f"The {what} is given as {kind}: write it to a file and give the path. The sandbox "
            "runs files only."
        )
    return Path(str(value))


def run_evolution(
    initial_program: str | Path,
    evaluator: str | Path,
    config: str | Path | Mapping[str, Any] | None = None,
    iterations: int | None = None,
    **options: Any,
) -> Outcome[EvolveReport]:
    """`run_evolve` with the names of OpenEvolve: `output_dir`, `target_score`, `checkpoint_path`.

    Programs and evaluators are files: a function cannot go into the sandbox. `cleanup` changes
    nothing, as the output is the run.
    """
    unknown = options.keys() - {"output_dir", "cleanup", "target_score", "checkpoint_path"}
    if unknown:
        raise ConfigError(f"run_evolution has no option {min(unknown)!r}.")
    section = {
        "target_score": options.get("target_score"),
        "checkpoint": options.get("checkpoint_path"),
    }
    values: dict[str, Any] = {"rookery": {k: v for k, v in section.items() if v is not None}}
    if iterations is not None:
        values["max_iterations"] = iterations
    output = options.get("output_dir")
    return run_evolve(initial_program, evaluator, config, output=output, **values)


def evolve_prompt(
    prompt: str | Path,
    taskset: str | Path,
    model: str | Path,
    config: str | Path | Mapping[str, Any] | None = None,
    *,
    output: str | Path | None = None,
    progress: bool = True,
    **values: Any,
) -> Outcome[EvolveReport]:
    """Evolve the prompt of a file on a taskset, with the model that answers, and proposes too
    unless `llm` names another.

    `values` are keys of the config: `max_iterations=50, rookery={"tasks": {"minibatch": 8}}`.
    """
    section = {"engine": {"model": str(model)}, "tasks": {"taskset": str(taskset)}}
    file = Path(config) if isinstance(config, str | Path) else None
    source = file if file is not None or not isinstance(config, Mapping) else config
    values = merge({"rookery": section}, values)
    if values["rookery"]["engine"].get("type") == "service":
        values["rookery"].setdefault("tokenizer", str(model))
    find = in_folder(RUNS)
    loaded = read_config(source, environment=os.environ, flags=Flags(values=values), find=find)
    problem = EvolveProblem(
        program=Path(prompt),
        evaluator=None,
        output=None if output is None else Path(output),
        config_file=file,
    )
    return start(resolve_problem(problem, find=find), loaded, Display(is_quiet=not progress))


def start(problem: EvolveProblem, loaded: LoadedConfig, display: Display) -> Outcome[EvolveReport]:
    """A new run in a folder that is new or empty."""
    folder = problem.folder
    _require_new(folder)
    config = run_config(problem, loaded)
    display.note(config.warnings)
    open_run = RunOpener(lambda: _create(folder, config))
    return run_async(_evolve(config, loaded.config, open_run, display))


def resume(
    problem: EvolveProblem, loaded: LoadedConfig, display: Display, *, iterations: int | None
) -> Outcome[EvolveReport]:
    """The run in the folder, on to its end; `iterations` more if it is finished already.

    Of a run that is not finished `iterations` are all there will be since it last finished, so
    that the same command goes on with what it began.
    """
    with Run.view(problem.folder) as view:
        if view.kind != "evolve":
            raise RunError(f"{problem.folder} is a run of kind {view.kind!r}: give another -o.")
        extended_from = _extended_from(view, iterations)
        if loaded.config.rookery.tasks is not None and view.status == "finished":
            raise RunError(
                f"{problem.folder} has finished, and its report tasks are read once: start another "
                "run with -o, from its best/ if you like."
            )
        known = int(view.config["settings"]["max_iterations"])
        total = known if iterations is None else extended_from + iterations
        settings = loaded.config.model_copy(update={"max_iterations": total})
        may_change: tuple[str, ...] = MAY_CHANGE
        if "strategy" not in view.config["settings"]["database"]:
            # Written by a version that knew one strategy: it goes on with that.
            database = settings.database.model_copy(update={"strategy": "openevolve"})
            settings = settings.model_copy(update={"database": database})
            may_change = (*may_change, "settings.database.strategy")
        config = run_config(problem, LoadedConfig(config=settings, warnings=loaded.warnings))
        config = config.model_copy(update={"extended_from": extended_from})
        document = config.model_dump(mode="json")
        # How many are in flight decides what a deterministic run finds.
        is_steady = settings.rookery.mode == "steady"
        may_change = (*may_change, *(["settings.rookery.in_flight"] if is_steady else []))
        # Now, and not when it is opened: a command that is refused leaves the run as it was.
        check_changes(find_changes(view.config, document), may_change=may_change)

    @contextmanager
    def reopen() -> Iterator[Run]:
        with Run.open(problem.folder) as run:
            run.extend(document, may_change=may_change)
            yield run

    open_run = RunOpener(reopen, folder=problem.folder)
    return run_async(_evolve(config, settings, open_run, display))


def _extended_from(view: RunView, iterations: int | None) -> int:
    """How many iterations there were before those that are asked for now. A run that finished, and
    was opened since for nothing more, is a finished one."""
    ended = [e.seq for e in view.events(FINISHED) if e.payload["outcome"] == "finished"]
    begun = [e.seq for e in view.events(EXTENDED) if "extended_from" in e.payload["changes"]]
    if iterations is not None and ended and ended[-1] > max(begun, default=0):
        return int(view.read_json("report.json")["num_iterations"])
    return int(view.config.get("extended_from", 0))


def _resume(
    config: EvolveRunConfig, open_run: RunOpener, display: Display
) -> Outcome[EvolveReport]:
    """On to the end; keys of models are read from its config file and the environment."""
    file = config.config_file
    keeper = read_config(file, environment=os.environ).config if file and file.is_file() else None
    settings = with_keys(config.settings, keeper, environment=os.environ)
    place = open_run.folder or config.output  # it may have been moved
    config = config.model_copy(update={"output": place})
    if open_run.is_new:
        open_run = replace(open_run, open=lambda: _create(place, config))
    return run_async(_evolve(config, settings, open_run, display))


EVOLVE = RunKind("evolve", config=EvolveRunConfig, finish=_resume, inputs=read_step_inputs)


async def _evolve(
    config: EvolveRunConfig, settings: EvolveConfig, open_run: RunOpener, display: Display
) -> Outcome[EvolveReport]:
    """What can be refused is refused before the run is made, and before a model is opened."""
    open_run = tracked(open_run, settings.rookery.track)
    inputs = await asyncio.to_thread(read_inputs, config, settings)
    open_run = await asyncio.to_thread(on_same_inputs, open_run, inputs.digests)
    workers: AbstractAsyncContextManager[Executor | None] = nullcontext()
    if inputs.spec is not None:  # prompts have none: the models of the run score them
        workers = open_executor(settings, inputs.spec, display)
    async with (
        workers as executor,
        open_models(settings, display) as opened,
        open_config_embedder(settings, environment=os.environ) as embedder,
    ):
        with resumable(config.output, display), open_run() as run:
            with display.bar(
                "evolving", total=settings.max_iterations, noun="program", run=run
            ) as bar:
                num_baselines = len(settings.rookery.baselines)
                bar.left.expect(num_baselines * settings.max_iterations, BASELINE)
                loop_inputs = EvolveInputs(
                    config=settings,
                    programs=inputs.programs,
                    executor=executor,
                    tasks=inputs.tasks,
                    output_format=openevolve,
                    extended_from=config.extended_from,
                )
                engine = replace(opened, embedder=embedder)
                shown = IterationLines(display, bar, run, num_baselines=num_baselines)
                report = await evolve(loop_inputs, engine=engine, run=run, observer=shown)
            new = tuple(each for each in inputs.warnings if each not in report.warnings)
            report = report.model_copy(update={"warnings": (*new, *report.warnings)})
            await run_in_thread(run.write_json, "report.json", report.model_dump(mode="json"))
            await write_page(run)
    return Outcome(report, run.path)


def read_status(folder: Path) -> str | None:
    """How the run in a folder stands; None where there is none, or none that can be read."""
    try:
        with Run.view(folder) as view:
            return view.status
    except RunError:
        return None


def _require_new(folder: Path) -> None:
    """Say what to do with what is there, as OpenEvolve's users have old outputs."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not folder.is_dir():
        raise RunError(f"The output folder {folder} is a file: give another one with -o.")
    if (folder / EVENTS).is_file():
        status = read_status(folder)
        if status is None:
            return  # a run that was killed before it began can be begun again
        how = "-i N does N more iterations" if status == "finished" else "--resume goes on with it"
        raise RunError(f"{folder} already holds a run: {how}, -o starts a new one elsewhere.")
    hint = ""
    if checkpoints := list_checkpoints(folder):
        hint = f" Its population can be the first one: --checkpoint {checkpoints[-1]}."
    raise RunError(f"{folder} holds something else than a run: give another folder with -o.{hint}")


@contextmanager
def _create(folder: Path, config: EvolveRunConfig) -> Iterator[Run]:
    """A run that ends before its first program has a score leaves nothing: it can be begun again
    under the same name."""
    document = config.model_dump(mode="json")
    run = Run.create(folder.parent, kind="evolve", config=document, name=folder.name)
    try:
        with run:
            yield run
    except RookeryError:
        if not (folder / "best").exists():
            shutil.rmtree(folder, ignore_errors=True)
        raise
