"""`run_evolve`: evolves programs with a language model, from the input files to the report.

    outcome = run_evolve("initial_program.py", "evaluator.py", "config.yaml", max_iterations=50)
    outcome.report.best.score, outcome.path / "best"

Input files have OpenEvolve's formats, unchanged. The output folder is the run's folder.
`check_evolve` tests whether a run would start.
"""

import asyncio
import logging
import os
import shutil
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rookery.compat import openevolve
from rookery.compat.openevolve import Flags, list_checkpoints, read_config, with_keys
from rookery.compose.evolve_inputs import EvolveRunConfig, read_inputs, read_step_inputs, run_config
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
from rookery.errors import ConfigError, RookeryError, RunError, SandboxError
from rookery.executors import WorkerSpec, open_local, open_modal, open_ray
from rookery.fleet.http.external import ExternalEmbedder
from rookery.loops.evolve.config import EvolveConfig
from rookery.loops.evolve.loop import EvolveInputs, evolve
from rookery.loops.evolve.parts import Iteration
from rookery.loops.evolve.problem import (
    FORGEABLE,
    EvaluationRequest,
    FirstProgram,
    say_not_isolated,
)
from rookery.loops.evolve.search_state import search_config
from rookery.ports import Executor, Observer, TextModel
from rookery.reports import EvolveReport
from rookery.runs import EXTENDED, FINISHED, Run, RunView
from rookery.runs.run_folder import EVENTS, check_changes, find_changes, in_folder
from rookery.runs.summary import note_elsewhere
from rookery.runtime.concurrency import run_in_thread
from rookery.sandbox import EvaluationOutcome, decode_outcome
from rookery.search.programs.program import numeric_metrics
from rookery.types import Job, JobDone, Message, TextRequest
from rookery.ui.display import Bar, Display

__all__ = [
    "EVOLVE",
    "IterationLines",
    "check_evolve",
    "describe",
    "evolve_prompt",
    "open_executor",
    "read_status",
    "resume",
    "run_evolution",
    "run_evolve",
    "start",
]

# Executors of evaluations.


TELL_EVERY_S = 15.0
"""Seconds between two status lines while workers start."""


@asynccontextmanager
async def open_executor(
    config: EvolveConfig, spec: WorkerSpec, display: Display
) -> AsyncIterator[Executor]:
    """Open the executor of evaluations with at least one worker ready. The wait is displayed."""
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


# One line per iteration in the terminal.


RUNS = Path("runs")
"""The folder that `rookery runs list` reads."""
MAX_CHARS = 100
"""Maximum length of a failure's message, so that an iteration stays one line."""

BASELINE = "baseline"
"""Kind of work of baseline iterations, for the estimate of the time left."""

logger = logging.getLogger(__name__)


class IterationLines(Observer[Iteration]):
    """Prints a line per iteration, and logs the metrics of the evolution itself to the run."""

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
            return  # the bar counts the evolution's iterations only
        self._run.log_metrics(step.num_decided, _metrics(step))
        self._bar.update(
            name=f"best {step.best_score:.4g}",
            done=step.num_decided,
            total=step.num_iterations,
            tokens=self._num_tokens,
        )

    def on_budget(self, share: float) -> None:
        if not self._num_baselines:  # baselines are not limited by the budget
            self._bar.left.limit(share)

    def _list_run(self) -> None:
        """List the run at its first iteration: a run that fails earlier is deleted."""
        if not self._is_listed:
            self._is_listed = True
            try:
                note_elsewhere(RUNS, self._run.path)
            except RunError as error:
                logger.warning("`rookery runs list` does not list this run: %s", error)

    def on_phase(self, name: str) -> None:
        """Show an event such as a model that is down or a training that begins."""
        logger.info("%s", name)  # to the file; a warning would reach the terminal twice
        self._display.note([name])


def _metrics(iteration: Iteration) -> dict[str, float]:
    """Return the metrics of an iteration, without unknown values."""
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

    Unprintable characters of a failure's message are removed: they could move the cursor.
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
"""Settings that a resumed run may change: how far it goes and where it runs. All others decide
the result and must stay."""


def run_evolve(
    program: str | Path,
    evaluator: str | Path,
    config: str | Path | Mapping[str, Any] | None = None,
    *,
    output: str | Path | None = None,
    **values: Any,
) -> Outcome[EvolveReport]:
    """Evolve a program (a file or a folder) with an OpenEvolve evaluator.

    `values` are keys of the config: `max_iterations=50, llm={"primary_model": "big"}`. The folder
    of the outcome holds `best/`, the checkpoints, the report and its page.
    """
    file = Path(config) if isinstance(config, str | Path) else None
    source = file if file is not None or not isinstance(config, Mapping) else config
    find = in_folder(RUNS)
    loaded = read_config(source, environment=os.environ, flags=Flags(values=values), find=find)
    run_settings = run_config(
        loaded,
        program=_as_path(program, "program"),
        evaluator=_as_path(evaluator, "evaluator"),
        output=None if output is None else Path(output),
        config_file=file,
        find=find,
    )
    return start(run_settings, Display())


def _as_path(value: object, what: str) -> Path:
    """Require a path. OpenEvolve also takes code and functions here."""
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
    """`run_evolve` with OpenEvolve's names: `output_dir`, `target_score`, `checkpoint_path`.

    Programs and evaluators must be files: the sandbox cannot run a function. `cleanup` is ignored,
    because the output folder is the run.
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
    """Evolve the prompt in a file on a taskset.

    `model` answers the tasks. It also proposes prompts unless `llm` names another model.
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
    run_settings = run_config(
        loaded,
        program=Path(prompt),
        evaluator=None,
        output=None if output is None else Path(output),
        config_file=file,
        find=find,
    )
    return start(run_settings, Display(is_quiet=not progress))


def start(config: EvolveRunConfig, display: Display) -> Outcome[EvolveReport]:
    """Start a new run. Its folder must be missing or empty."""
    _require_new(config.output)
    display.note(config.warnings)
    open_run = RunOpener(lambda: _create(config.output, config))
    return run_async(_evolve(config, open_run, display))


def resume(
    config: EvolveRunConfig, display: Display, *, iterations: int | None
) -> Outcome[EvolveReport]:
    """Resume the run in the folder. A finished run does `iterations` more.

    For an unfinished run, `iterations` counts from its last finish, so that repeating an
    interrupted command completes it and adds nothing.
    """
    folder, settings = config.output, config.settings
    with Run.view(folder) as view:
        if view.kind != "evolve":
            raise RunError(f"{folder} is a run of kind {view.kind!r}: give another -o.")
        extended_from = _extended_from(view, iterations)
        if settings.rookery.tasks is not None and view.status == "finished":
            raise RunError(
                f"{folder} has finished, and its report tasks are read once: start another run "
                "with -o, from its best/ if you like."
            )
        known = int(view.config["settings"]["max_iterations"])
        total = known if iterations is None else extended_from + iterations
        update: dict[str, object] = {"max_iterations": total}
        # In a deterministic run, the number in flight decides the result.
        is_steady = settings.rookery.mode == "steady"
        may_change = (*MAY_CHANGE, *(["settings.rookery.in_flight"] if is_steady else []))
        if "strategy" not in view.config["settings"]["database"]:
            # Runs without this key were written when only this strategy existed.
            update["database"] = settings.database.model_copy(update={"strategy": "openevolve"})
            may_change = (*may_change, "settings.database.strategy")
        settings = settings.model_copy(update=update)
        config = config.model_copy(update={"settings": settings, "extended_from": extended_from})
        document = config.model_dump(mode="json")
        # Check before opening: a refused command leaves the run unchanged.
        check_changes(find_changes(view.config, document), may_change=may_change)

    @contextmanager
    def reopen() -> Iterator[Run]:
        with Run.open(folder) as run:
            run.extend(document, may_change=may_change)
            yield run

    return run_async(_evolve(config, RunOpener(reopen, folder=folder), display))


def _extended_from(view: RunView, iterations: int | None) -> int:
    """Return the iterations before the requested ones. A finished run stays finished if it was
    reopened without an extension."""
    ended = [e.seq for e in view.events(FINISHED) if e.payload["outcome"] == "finished"]
    begun = [e.seq for e in view.events(EXTENDED) if "extended_from" in e.payload["changes"]]
    if iterations is not None and ended and ended[-1] > max(begun, default=0):
        return int(view.read_json("report.json")["num_iterations"])
    return int(view.config.get("extended_from", 0))


def _resume(
    config: EvolveRunConfig, open_run: RunOpener, display: Display
) -> Outcome[EvolveReport]:
    """Finish the run. API keys of models come from its config file and the environment."""
    file = config.config_file
    keeper = read_config(file, environment=os.environ).config if file and file.is_file() else None
    settings = with_keys(config.settings, keeper, environment=os.environ)
    place = open_run.folder or config.output  # the folder may have been moved
    config = config.model_copy(update={"output": place})
    if open_run.is_new:
        open_run = replace(open_run, open=lambda: _create(place, config))
    keyed = config.model_copy(update={"settings": settings})
    return run_async(_evolve(keyed, open_run, display))


EVOLVE = RunKind("evolve", config=EvolveRunConfig, finish=_resume, inputs=read_step_inputs)


async def _evolve(
    config: EvolveRunConfig, open_run: RunOpener, display: Display
) -> Outcome[EvolveReport]:
    """Run the evolution. Bad input is refused before models are opened and the run is created."""
    settings = config.settings
    open_run = tracked(open_run, settings.rookery.track)
    inputs = await asyncio.to_thread(read_inputs, config)
    open_run = await asyncio.to_thread(on_same_inputs, open_run, inputs.digests)
    workers: AbstractAsyncContextManager[Executor | None] = nullcontext()
    if inputs.spec is not None:  # prompts need no workers: the run's models score them
        workers = open_executor(settings, inputs.spec, display)
    async with (
        workers as executor,
        open_models(settings, display, engine=inputs.engine) as opened,
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
    """Return the status of the run in a folder. None: no run, or an unreadable one."""
    try:
        with Run.view(folder) as view:
            return view.status
    except RunError:
        return None


def _require_new(folder: Path) -> None:
    """Require a missing or empty folder. The error says how to use what is in it."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not folder.is_dir():
        raise RunError(f"The output folder {folder} is a file: give another one with -o.")
    if (folder / EVENTS).is_file():
        status = read_status(folder)
        if status is None:
            return  # a run that was killed before it began may start again
        how = "-i N does N more iterations" if status == "finished" else "--resume goes on with it"
        raise RunError(f"{folder} already holds a run: {how}, -o starts a new one elsewhere.")
    hint = ""
    if checkpoints := list_checkpoints(folder):
        hint = f" Its population can be the first one: --checkpoint {checkpoints[-1]}."
    raise RunError(f"{folder} holds something else than a run: give another folder with -o.{hint}")


@contextmanager
def _create(folder: Path, config: EvolveRunConfig) -> Iterator[Run]:
    """Create the run. If it fails before a program has a score, it is deleted: its name is free."""
    document = config.model_dump(mode="json")
    run = Run.create(folder.parent, kind="evolve", config=document, name=folder.name)
    try:
        with run:
            yield run
    except RookeryError:
        if not (folder / "best").exists():
            shutil.rmtree(folder, ignore_errors=True)
        raise


# Test whether an evolution would start, without starting one.


ASKED = "Reply with the one word: ready"
INSTEAD = (
    "It needs {needed} on an object of the program. Take plain values from the program (numbers, "
    "text, lists, dicts, numpy arrays), and compute with those."
)
"""Hint for an evaluator whose operation needs the program in the evaluator's process."""
MAX_STAGES = 3
MARGIN_S = 60.0
"""Seconds added to the evaluator's own limits before its worker counts as lost."""


def check_evolve(config: EvolveRunConfig, display: Display) -> list[str]:
    """Return a line for each worker, first program and model. Raises the first RookeryError."""
    return run_async(_check(config, display))


async def _check(run_settings: EvolveRunConfig, display: Display) -> list[str]:
    config = run_settings.settings
    config = config.model_copy(update={"rookery": config.rookery.model_copy(update={"workers": 1})})
    inputs = read_inputs(run_settings.model_copy(update={"settings": config}))
    limit_s = MAX_STAGES * config.evaluator.timeout + MARGIN_S
    display.note(inputs.warnings)
    assert inputs.spec is not None, "an evaluator is named"
    async with open_executor(config, inputs.spec, display) as executor:
        lines = [f"workers: {worker.name} {worker.about}" for worker in executor.workers]
        firsts = [each for each in inputs.programs if isinstance(each, FirstProgram)]
        for number, program in enumerate(firsts):
            isolate = config.rookery.sandbox.isolate
            score = partial(_score, program, number, executor, limit_s=limit_s)
            outcome = await score(isolate=isolate != "never")
            needed = outcome.unsupported
            if needed and isolate == "auto":
                outcome = await score(isolate=False)
            _require_score(outcome)
            problem_with = search_config(config).problem_with(numeric_metrics(outcome.metrics))
            if problem_with is not None:
                raise SandboxError(f"The first program cannot be used. {problem_with}")
            lines.append(_describe(outcome))
            if outcome.is_forgeable:
                display.note([FORGEABLE, *([INSTEAD.format(needed=needed)] if needed else [])])
        async with open_models(config, display, engine=inputs.engine) as opened:
            lines += await _ask(opened.models)
            if config.rookery.learn is not None:
                lines.append(
                    f"learn: the engine takes adapters of rank {config.rookery.learn.rank}"
                )
        async with open_config_embedder(config, environment=os.environ) as embedder:
            if embedder is not None:
                lines.append(await _embed(embedder))
    return lines


async def _score(
    program: FirstProgram, number: int, executor: Executor, *, limit_s: float, isolate: bool
) -> EvaluationOutcome:
    payload = EvaluationRequest(code=program.code, isolate=isolate).encode()
    job = Job(attempt=number, epoch=int(not isolate), payload=payload, limit_s=limit_s)
    ended = await executor.submit(job)
    if not isinstance(ended, JobDone):
        raise SandboxError(f"The first program could not be scored: {ended}.")
    return decode_outcome(ended.output)


def _require_score(outcome: EvaluationOutcome) -> None:
    if outcome.unsupported:
        raise SandboxError(say_not_isolated(outcome))
    if outcome.failure is not None:
        failure = outcome.failure
        output = f"\n{outcome.output_tail}" if outcome.output_tail.strip() else ""
        raise SandboxError(
            f"The first program fails ({failure.kind}): {failure.reason} An evolution starts from "
            f"a program that the evaluator can score.{output}"
        )


def _describe(outcome: EvaluationOutcome) -> str:
    metrics = ", ".join(f"{name} {value}" for name, value in outcome.metrics.items())
    return f"first program: {metrics} ({outcome.seconds:.1f} s)"


async def _embed(embedder: ExternalEmbedder) -> str:
    begin = time.perf_counter()
    vector = await embedder.embed(ASKED)
    seconds = time.perf_counter() - begin
    return f"embedding model {embedder.config.model}: {len(vector)} numbers ({seconds:.1f} s)"


async def _ask(models: Mapping[str, TextModel]) -> list[str]:
    lines = []
    request = TextRequest(messages=(Message(role="user", content=ASKED),), max_tokens=256)
    for name, model in models.items():
        begin = time.perf_counter()
        reply = await model.reply(request)
        seconds = time.perf_counter() - begin
        lines.append(f"model {name}: {' '.join(reply.text.split())[:60]!r} ({seconds:.1f} s)")
    return lines
