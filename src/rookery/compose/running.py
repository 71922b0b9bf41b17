"""How every run is planned, opened, resumed and reported, and the event loop it runs in.

    GENOME = RunKind("genome", config=GenomeConfig, finish=finisher(plan), scored=(...))
    outcome = GENOME.start("mine.yaml", {"seed": 3}, name="", runs_dir="runs")
    outcome = resume("runs/demo")                   # of kinds.py

    plan      read everything that the config names, and digest it      nothing is left behind
    open      the engine; refuse what it cannot do                      nothing is left behind
    run       made, or opened where it was, on the same inputs          the folder is there
    loop      inputs, engine, run, observer -> report                   resumes from its events
    page      report.html, and the run is finished

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
    """A finished run: its report, and the folder with everything else it left."""

    report: Report
    path: Path

    def _repr_html_(self) -> str:
        """What a notebook shows: the result, and where its page is."""
        page = self.path / "report.html"
        link = f'<a href="{escape(page.absolute().as_uri())}">{escape(str(page))}</a>'
        return f"{render_summary(self.report)}<p>{link}</p>"


ConfigSource = str | Path | Mapping[str, Any]
"""A config file, or a document as such a file would hold it."""


@dataclass(frozen=True, slots=True)
class StartedOn:
    """What the run of a whole was started on."""

    folder: Path
    inputs: RunInputs
    """What this step reads and no other step makes."""


@dataclass(frozen=True, slots=True)
class RunOpener:
    """Makes a run or goes on with one, when everything that can be refused has been read."""

    open: Callable[[], AbstractContextManager[Run]]
    folder: Path | None = None
    """Of the run to go on with; None: a new one."""
    place: Path | None = None
    """Where a new run will be; without a name, one as long beside it."""
    rescored: tuple[str, ...] | None = None
    """When what it recorded is to be scored again: the kinds of its events that follow from
    rewards."""
    whole: StartedOn | None = None
    """Of a step: it reads the same, or does not begin."""

    @property
    def is_new(self) -> bool:
        return self.folder is None

    def __call__(self) -> AbstractContextManager[Run]:
        return self.open()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan(Generic[Report]):
    """A run whose inputs have all been read."""

    inputs: RunInputs
    """What it reads, see `on_same_inputs`. All weights are read while the engine opens."""
    opened: AbstractAsyncContextManager[Callable[[Run], Awaitable[Report]]]
    """Opens the engine and refuses what it cannot do; gives the loop, from a run to its report."""


@dataclass(frozen=True, slots=True)
class RunKind(Generic[Settings, Report]):
    """What a run is made from, and what takes it to its end, from its beginning or from where it
    was."""

    name: str
    config: type[Settings]
    finish: Callable[[Settings, RunOpener, Display], Outcome[Report]]
    inputs: Callable[[Settings, IsMade], RunInputs] = lambda _config, _is_made: RunInputs()
    """As a step: reads what no other step makes."""
    scored: tuple[str, ...] | None = None
    """Kinds of events, beside rollouts, that follow from rewards; None: it has no scorer."""

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
        """A new run, to its end. `values` are keys of the config, see `read_config`."""
        config = read_config(self.config, source, values, runs_dir=runs_dir)
        open_run = new_run(config, kind=self.name, name=name, runs_dir=runs_dir)
        open_run = replace(open_run, whole=whole)
        return self.finish(config, open_run, Display(is_quiet=not progress))


def finisher(
    plan: Callable[[Settings, RunOpener, Display], RunPlan[Report]],
    *,
    track: Callable[[Settings], Sequence[TrackerName]] = lambda _: (),
) -> Callable[[Settings, RunOpener, Display], Outcome[Report]]:
    """What takes a run of a kind to its end, from its beginning or from where it was."""

    def finish(config: Settings, open_run: RunOpener, display: Display) -> Outcome[Report]:
        open_run = tracked(open_run, track(config))
        quiet_libraries()
        planned = plan(config, open_run, display)
        return run_async(carry_out(planned, open_run, display))

    return finish


async def carry_out(
    planned: RunPlan[Report], open_run: RunOpener, display: Display
) -> Outcome[Report]:
    """The run to its end. What can be refused is refused before it is made."""

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
    """A config from a file, a document or a config, with keyword values laid over it.

    Paths in a file are relative to it, all others to the current folder; `run:NAME/PART` is what a
    run in `runs_dir` left. A mapping given for a section changes the keys it names:
    `run_genome("demo.yaml", engine={"dtype": "bfloat16"})`. One of another `type` replaces the
    section: the keys of a type are its own.
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
    """The document with values laid over it, section by section."""
    merged = dict(document)
    for key, value in values.items():
        section = merged.get(key)
        if isinstance(section, Mapping) and isinstance(value, Mapping):
            value = value if _is_other(section, value) else merge(section, value)
        merged[key] = value
    return merged


def _is_other(section: Mapping[str, Any], value: Mapping[str, Any]) -> bool:
    """Whether a section is to be of another type. One that names none is an embedded engine: all
    other sections with types must name theirs."""
    return "type" in value and value["type"] != section.get("type", "embedded")


def new_run(config: Config, *, kind: str, name: str, runs_dir: str | Path) -> RunOpener:
    """The run that is made later, so that a model or an adapter that cannot be used leaves none.

    A name that is taken and a folder that cannot hold runs are refused now, before a model is read.
    """
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
    """The run with trackers that follow its metrics; one that is not installed is refused now."""
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
    """Whether a run was begun there."""
    try:
        Run.view(path).close()
    except RunError:
        return False  # if something else is there, `Run.create` says what
    return True


@contextmanager
def resumable(path: Path, display: Display) -> Iterator[None]:
    """Says where to watch a run. What ends it before its end says how to go on with it: Ctrl-C,
    SIGTERM, and the loss of servers or workers. A run that left no folder is begun again."""
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
    """Write the page of a run whose report is written, which ends the run."""
    page = await asyncio.to_thread(render_run, run.path, status="done")
    await run_in_thread(run.write_text, "report.html", page)
    await run_in_thread(run.finish, "finished")


def run_async(work: Coroutine[Any, Any, Result], *, stop_s: float | None = None) -> Result:
    """The only place where an event loop starts: in this thread, or in one of its own where a loop
    runs already, as in a notebook. Ctrl-C and SIGTERM cancel the work and wait for its end; with
    `stop_s` the process, unless it is a notebook's, ends so much later in any case."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return run_stoppable(work, stop_s=stop_s)
    return run_stoppable_in_thread(work)


def quiet_libraries() -> None:
    """The libraries print bars and warnings of their own; ours say what matters."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


# What a run was started on: it does not go on with other tasks, another model or another scorer
# under the same names.


INPUTS = "inputs.json"


def on_same_inputs(
    open_run: RunOpener,
    digests: Mapping[str, str],
    scorers: Mapping[str, str] | None = None,
    *,
    file: str = INPUTS,
) -> RunOpener:
    """The run with the digests of its data and its scorers, by name. One that was started on others
    is refused now, and stays as it is; with other scorers it may go on when all is scored again.

    The recorded answers are known by the ids of their tasks: a task that changed under its id would
    be reported with the answers to another question. Weights that changed under their path would be
    trained on, and reported with the answers of the former ones.
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
    """What a run was started on. None: one that was killed before it had a record has no answers
    either."""
    if folder is None or not (folder / file).exists():
        return None
    with Run.view(folder) as run:
        known: dict[str, str] = run.read_json(file)
    return known


def require_same_scorers(
    folder: Path, known: Mapping[str, str], scorers: Mapping[str, str]
) -> None:
    """RunError where scorers are others than those that the run in a folder recorded rewards of."""
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
    """RunError where data are others than those that the run in a folder was started on."""
    names = {*known, *digests} - set(scorers)
    changed = sorted(name for name in names if known.get(name) != digests.get(name))
    if changed:
        raise RunError(
            f"The data of {', '.join(changed)} changed since {folder} was started, and what it "
            "recorded belongs to the former: put the former data back, or start a new run."
        )


# What several kinds of runs read and open before the run is made, and say to the user.


def read_tasksets(configs: Iterable[TasksetConfig], display: Display) -> list[Taskset]:
    """The tasksets of one run; TaskError for a split that should have tasks and has none."""
    tasksets = load_tasksets(configs)
    for taskset in tasksets:
        for name in SPLITS:
            taskset.split(name)
        display.note(taskset.notes)
    return tasksets


@asynccontextmanager
async def open_shown_engine(config: "AnyEngineConfig", display: Display) -> AsyncIterator[Engine]:
    """The engine, open for the block; what takes long is said."""
    from rookery.engines import open_engine  # needs the extra `hf`, and evolve need not have it

    if config.type == "embedded":
        display.say(f"loading {config.model}")
    with display.launching() as show:
        async with open_engine(config, on_launch=show) as engine:
            yield engine


# Whether this process is one of several that torchrun started, from what it put into the
# environment.


def is_first_process() -> bool:
    """The first one owns the run and speaks; the others compute. True without torchrun."""
    return int(os.environ.get("RANK") or 0) == 0


def num_processes() -> int:
    """On all machines; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def num_local_processes() -> int:
    """On this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
