"""Plans, opens, resumes and reports every run, and starts its event loop.

    GENOME = RunKind("genome", config=GenomeConfig, finish=finisher(plan), scored=(...))
    outcome = GENOME.start("mine.yaml", {"seed": 3}, name="", runs_dir="runs")
    outcome = resume("runs/demo")                   # in kinds.py

    stage     what it does                                              if it fails
    plan      read and digest all inputs that the config names          no run is left
    open      open the engine; refuse what it cannot do                 no run is left
    run       create the run, or open it on the same inputs             the run is left
    loop      inputs, engine, run, observer -> report                   resumes from its events
    page      write report.html and finish the run                      resumes from its events

`KINDS` of `rookery.compose` lists the kinds of runs.
"""

import asyncio
import logging
import os
import shlex
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
)
from dataclasses import dataclass, replace
from functools import partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from rookery.compose.inputs import InputReader, IsMade, RunInputs
from rookery.config import Config, parse_config, read_document
from rookery.errors import (
    EngineDownError,
    ExecutorError,
    FleetDownError,
    RunError,
)
from rookery.paths import expanded
from rookery.ports import Engine
from rookery.reports import Report as AnyReport
from rookery.rollout import set_scores_aside
from rookery.runs import Run
from rookery.runs.run_folder import check_name, in_folder, resolve_references
from rookery.runs.trackers import TrackerName, follow_metrics, require_trackers
from rookery.runtime.concurrency import run_in_thread, task_group
from rookery.runtime.stopping import run_stoppable, run_stoppable_in_thread
from rookery.tasks.splits import SPLITS
from rookery.tasks.taskset import Taskset, TasksetConfig, load_tasksets
from rookery.ui.display import Display
from rookery.ui.live.address import run_address
from rookery.ui.live.export import render_run
from rookery.ui.summary import render_summary

if TYPE_CHECKING:
    from rookery.engines import AnyEngineConfig

__all__ = [
    "ConfigSource",
    "Outcome",
    "RunKind",
    "RunOpener",
    "RunPlan",
    "StartedOn",
    "carry_out",
    "finisher",
    "is_first_process",
    "is_run",
    "merge",
    "new_run",
    "num_local_processes",
    "num_processes",
    "on_same_inputs",
    "open_shown_engine",
    "quiet_libraries",
    "read_config",
    "read_digests",
    "read_tasksets",
    "require_same",
    "require_same_scorers",
    "resumable",
    "run_async",
    "tracked",
    "write_page",
]

Report = TypeVar("Report", bound=AnyReport)
Result = TypeVar("Result")
Settings = TypeVar("Settings", bound=Config)


@dataclass(frozen=True, slots=True)
class Outcome(Generic[Report]):
    """A finished run: its report, and the folder with its other results."""

    report: Report
    path: Path

    def _repr_html_(self) -> str:
        """Return HTML for notebooks: the result, and a link to its page."""
        page = self.path / "report.html"
        link = f'<a href="{escape(page.absolute().as_uri())}">{escape(str(page))}</a>'
        return f"{render_summary(self.report)}<p>{link}</p>"


ConfigSource = str | Path | Mapping[str, Any]
"""A config file, or a document with the content of one."""


@dataclass(frozen=True, slots=True)
class StartedOn:
    """The run of a pipeline or league, and the inputs that one of its steps must match."""

    folder: Path
    inputs: RunInputs
    """Inputs of the step that no other step makes, digested when the whole began."""


@dataclass(frozen=True, slots=True)
class RunOpener:
    """Creates or reopens a run. Call it after all checks of the inputs have passed."""

    open: Callable[[], AbstractContextManager[Run]]
    folder: Path | None = None
    """Folder of the run to resume; None: a new run."""
    place: Path | None = None
    """Folder of a new run. If the run has no name yet, its final folder may differ."""
    rescored: tuple[str, ...] | None = None
    """Kinds of events that depend on rewards, if recorded answers are scored again."""
    whole: StartedOn | None = None
    """Set for a step: its inputs must match."""

    @property
    def is_new(self) -> bool:
        return self.folder is None

    def __call__(self) -> AbstractContextManager[Run]:
        return self.open()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan(Generic[Report]):
    """A run whose inputs have all been read."""

    inputs: RunInputs
    """Inputs to check, see `on_same_inputs`. Weights are digested while the engine opens."""
    opened: AbstractAsyncContextManager[Callable[[Run], Awaitable[Report]]]
    """Opens and checks the engine; yields the loop, a function from a run to its report."""


@dataclass(frozen=True, slots=True)
class RunKind(Generic[Settings, Report]):
    """A kind of run: its config, and the function that starts or resumes a run and finishes it."""

    name: str
    config: type[Settings]
    finish: Callable[[Settings, RunOpener, Display], Outcome[Report]]
    inputs: Callable[[Settings, IsMade], RunInputs] = lambda _config, _is_made: RunInputs()
    """Reads the inputs of a step that no other step makes."""
    scored: tuple[str, ...] | None = None
    """Kinds of events, beside rollouts, that depend on rewards. None: the kind has no scorer."""

    def start(
        self,
        source: "ConfigSource | Settings",
        values: Mapping[str, Any],
        *,
        name: str,
        runs_dir: str | Path,
        progress: bool = True,
        whole: StartedOn | None = None,
    ) -> Outcome[Report]:
        """Create a run and finish it. `values` are keys of the config, see `read_config`."""
        config = read_config(self.config, source, values, runs_dir=runs_dir)
        open_run = new_run(config, kind=self.name, name=name, runs_dir=runs_dir)
        open_run = replace(open_run, whole=whole)
        return self.finish(config, open_run, Display(is_quiet=not progress))


def finisher(
    plan: Callable[[Settings, RunOpener, Display], RunPlan[Report]],
    *,
    track: Callable[[Settings], Sequence[TrackerName]] = lambda _: (),
) -> Callable[[Settings, RunOpener, Display], Outcome[Report]]:
    """Return the `finish` of a `RunKind` from its `plan`."""

    def finish(config: Settings, open_run: RunOpener, display: Display) -> Outcome[Report]:
        open_run = tracked(open_run, track(config))
        quiet_libraries()
        planned = plan(config, open_run, display)
        return run_async(carry_out(planned, open_run, display))

    return finish


async def carry_out(
    planned: RunPlan[Report], open_run: RunOpener, display: Display
) -> Outcome[Report]:
    """Carry out a planned run. All checks of inputs and engine come before the run is created."""

    def check() -> RunOpener:
        inputs = InputReader().digest(planned.inputs)
        return on_same_inputs(open_run, inputs.digests, inputs.scorers)

    async with AsyncExitStack() as stack:
        async with task_group() as tasks:
            checking = tasks.create_task(run_in_thread(check))
            loop = await stack.enter_async_context(planned.opened)
        with checking.result()() as run, resumable(run.path, display):
            report = await loop(run)
            await write_page(run)
    return Outcome(report, run.path)


def read_config(
    model: type[Settings],
    source: "ConfigSource | Settings",
    values: Mapping[str, Any],
    *,
    runs_dir: str | Path = "runs",
) -> Settings:
    """Read a config from a file, a document or a config, and override it with `values`.

    Paths in a file are relative to it, all others to the current folder. `run:NAME/PART` refers to
    the output of a run in `runs_dir`. A mapping overrides only the keys it names:
    `run_genome("demo.yaml", engine={"dtype": "bfloat16"})`. A mapping with another `type` replaces
    the whole section, because the keys depend on the type.
    """
    resolve = partial(resolve_references, find=in_folder(runs_dir), later=model.resolved_later)
    values = resolve(values)
    if isinstance(source, str | Path):
        path = Path(source)
        document = resolve(read_document(path))
        config = parse_config(model, document, origin=str(path)).from_folder(path.parent)
    elif isinstance(source, Mapping):
        document = merge(resolve(source), values)
        return parse_config(model, document, origin="the config").from_folder(Path.cwd())
    else:
        config = source.from_folder(Path.cwd())
    if not values:
        return config
    document = merge(config.model_dump(mode="json"), values)
    return parse_config(model, document, origin="the config").from_folder(Path.cwd())


def merge(document: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Override the document with the values, section by section."""
    merged = dict(document)
    for key, value in values.items():
        section = merged.get(key)
        if isinstance(section, Mapping) and isinstance(value, Mapping):
            value = value if _is_other(section, value) else merge(section, value)
        merged[key] = value
    return merged


def _is_other(section: Mapping[str, Any], value: Mapping[str, Any]) -> bool:
    """True if the value has another `type` than the section. A section without one is an embedded
    engine: all other typed sections must name their type."""
    return "type" in value and value["type"] != section.get("type", "embedded")


def new_run(config: Config, *, kind: str, name: str, runs_dir: str | Path) -> RunOpener:
    """Return an opener that creates the run later, so that bad inputs leave no folder. A taken name
    and a folder that cannot hold runs are refused now, before a model is read."""
    root = Path(runs_dir)
    _require_folder(root)
    if name:
        check_name(name, what="name of a run")
    if name and is_run(root / name):
        path = root / name
        with Run.view(path) as run:
            run.require_free()
        raise RunError(
            f"{path} already holds a run: go on with it by `rookery runs resume "
            f"{shlex.quote(str(path))}`, or choose another --name."
        )
    document = config.model_dump(mode="json")
    place = root / (name or f"{kind}-{time.strftime('%Y%m%d-%H%M%S')}")
    return RunOpener(lambda: Run.create(root, kind=kind, config=document, name=name), place=place)


def tracked(open_run: RunOpener, names: Sequence[TrackerName]) -> RunOpener:
    """Attach trackers that follow the run's metrics. A missing tracker package is refused now."""
    require_trackers(names)

    @contextmanager
    def opened() -> Iterator[Run]:
        with open_run() as run, follow_metrics(run, names):
            yield run

    return replace(open_run, open=opened)


def _require_folder(runs_dir: Path) -> None:
    root = expanded(runs_dir).absolute()
    nearest = next(folder for folder in (root, *root.parents) if folder.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        problem = "may not be written" if nearest.is_dir() else "is a file"
        raise RunError(
            f"Runs cannot be kept in {runs_dir}: {nearest} {problem}. Give another folder with "
            "--runs-dir."
        )


def is_run(path: Path) -> bool:
    """True if the folder holds a run."""
    try:
        Run.view(path).close()
    except RunError:
        return False  # `Run.create` reports anything else there
    return True


@contextmanager
def resumable(path: Path, display: Display) -> Iterator[None]:
    """Print where to watch the run and, after Ctrl-C or a loss of workers, how to resume it."""
    address = run_address(path)
    command = f"with: rookery ui {shlex.quote(str(path.parent))}"
    display.hint(f"See it live {f'at {address}' if address else command}")
    resume_by = f"Go on with: rookery runs resume {shlex.quote(str(path))}"
    try:
        yield
    except (asyncio.CancelledError, KeyboardInterrupt):
        display.fail(f"Interrupted. {resume_by}")
        raise
    except (EngineDownError, FleetDownError, ExecutorError):
        if path.exists():
            display.note([f"The run ended early and is kept. {resume_by}"])
        raise


async def write_page(run: Run) -> None:
    """Write the page of a run that has its report, and finish the run."""
    page = await asyncio.to_thread(render_run, run.path, status="done")
    await run_in_thread(run.write_text, "report.html", page)
    await run_in_thread(run.finish, "finished")


def run_async(work: Coroutine[Any, Any, Result], *, stop_s: float | None = None) -> Result:
    """Run the coroutine in a new event loop: in this thread or, if a loop already runs here as in a
    notebook, in another. Ctrl-C and SIGTERM cancel it and wait for its end. With `stop_s`, the
    process exits at most that many seconds later, unless it is a notebook's."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return run_stoppable(work, stop_s=stop_s)
    return run_stoppable_in_thread(work)


def quiet_libraries() -> None:
    """Silence progress bars and warnings of libraries: Rookery prints its own."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


# Digests of a run's inputs, so that it is not resumed on other tasks, models or scorers.


INPUTS = "inputs.json"


def on_same_inputs(
    open_run: RunOpener,
    digests: Mapping[str, str],
    scorers: Mapping[str, str] | None = None,
    *,
    file: str = INPUTS,
) -> RunOpener:
    """Return an opener that checks and records the digests of the run's inputs.

    If the recorded digests differ, refuse now and leave the run unchanged. Changed scorers are
    allowed if answers are rescored. The check is needed because answers are recorded by task id and
    weights by path: changed content under the same name would get the old results.
    """
    scorers = scorers or {}
    if open_run.whole is not None:
        now = {**digests, **scorers}
        known_there = open_run.whole.inputs.all
        now = {name: now[name] for name in known_there if name in now}
        require_same(open_run.whole.folder, known_there, now)
    known = read_digests(open_run.folder, file)
    is_same_scorer = True
    if known is not None and open_run.folder is not None:
        require_same(open_run.folder, known, digests, scorers)
        is_same_scorer = not _changed(known, scorers)
        if open_run.rescored is None:
            require_same_scorers(open_run.folder, known, scorers)

    @contextmanager
    def opened() -> Iterator[Run]:
        with open_run() as run:
            if open_run.rescored is not None:
                further = open_run.rescored
                set_scores_aside(run, further=further, only_failed=is_same_scorer)
            if known is None or not is_same_scorer:
                run.write_json(file, {**digests, **scorers})
            yield run

    return replace(open_run, open=opened)


def read_digests(folder: Path | None, file: str = INPUTS) -> dict[str, str] | None:
    """Read the recorded digests of a run. None: it has neither these nor answers."""
    if folder is None or not (folder / file).exists():
        return None
    with Run.view(folder) as run:
        known: dict[str, str] = run.read_json(file)
    return known


def require_same_scorers(
    folder: Path, known: Mapping[str, str], scorers: Mapping[str, str]
) -> None:
    """Raise RunError if a scorer has changed since the run recorded rewards."""
    if changed := _changed(known, scorers):
        raise RunError(
            f"{', '.join(changed)} changed since {folder} was started, and it recorded rewards of "
            "the former: put the former back, or score its answers again with `rookery runs resume "
            f"{shlex.quote(str(folder))} --rescore`."
        )


def _changed(known: Mapping[str, str], scorers: Mapping[str, str]) -> list[str]:
    return [name for name, new in scorers.items() if known.get(name, new) != new]


def require_same(
    folder: Path,
    known: Mapping[str, str],
    digests: Mapping[str, str],
    scorers: Collection[str] = (),
) -> None:
    """Raise RunError if data have changed since the run in the folder was started."""
    names = {*known, *digests} - set(scorers)
    changed = sorted(name for name in names if known.get(name) != digests.get(name))
    if changed:
        raise RunError(
            f"The data of {', '.join(changed)} changed since {folder} was started, and what it "
            "recorded belongs to the former: put the former data back, or start a new run."
        )


# Shared by several kinds of runs before the run is created.


def read_tasksets(configs: Iterable[TasksetConfig], display: Display) -> list[Taskset]:
    """Load the tasksets of a run. Raises TaskError for an empty required split."""
    tasksets = load_tasksets(configs)
    for taskset in tasksets:
        for name in SPLITS:
            taskset.split(name)
        display.note(taskset.notes)
    return tasksets


@asynccontextmanager
async def open_shown_engine(config: "AnyEngineConfig", display: Display) -> AsyncIterator[Engine]:
    """Open the engine for the block, and show the progress of loading and launching."""
    from rookery.engines import open_engine  # needs the extra `hf`; evolve does not

    if config.type == "embedded":
        display.say(f"loading {config.model}")
    with display.launching() as show:
        async with open_engine(config, on_launch=show) as engine:
            yield engine


# Position of this process under torchrun, from the environment.


def is_first_process() -> bool:
    """True for the process that owns the run and prints, and without torchrun. Others compute."""
    return int(os.environ.get("RANK") or 0) == 0


def num_processes() -> int:
    """Return the number of processes on all machines; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def num_local_processes() -> int:
    """Return the number of processes on this machine; 1 without torchrun."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
