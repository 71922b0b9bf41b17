"""What every run has in common: its config, its folder, its end, and the event loop it runs in.

    GENOME = RunKind("genome", config=GenomeConfig, finish=finish)
    outcome = GENOME.start("configs/demo.yaml", {"seed": 3}, name="", runs_dir="runs")

`KINDS` lists the kinds of runs.
"""

import asyncio
import logging
import os
import shlex
from collections.abc import (
    Callable,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from rookery.compose.stopping import run_stoppable, run_stoppable_in_thread
from rookery.concurrency import run_in_thread
from rookery.config import Config, parse_config, read_document
from rookery.errors import (
    EngineDownError,
    ExecutorError,
    FleetDownError,
    RunError,
)
from rookery.runs import Run
from rookery.runs.following import follow_metrics
from rookery.runs.trackers import TrackerName, require_trackers
from rookery.ui.display import Display

__all__ = [
    "KINDS",
    "ConfigSource",
    "OpenRun",
    "Outcome",
    "RunKind",
    "is_first_process",
    "merge",
    "new_run",
    "num_local_processes",
    "num_processes",
    "quiet_libraries",
    "read_config",
    "resumable",
    "resume",
    "run_async",
    "tracked",
    "write_page",
]

Report = TypeVar("Report")
Result = TypeVar("Result")
Settings = TypeVar("Settings", bound=Config)


@dataclass(frozen=True, slots=True)
class Outcome(Generic[Report]):
    """A finished run: its report, and the folder with everything else it left."""

    report: Report
    path: Path


ConfigSource = str | Path | Mapping[str, Any]
"""A config file, or a document as such a file would hold it."""


@dataclass(frozen=True, slots=True)
class OpenRun:
    """Makes a run or goes on with one, when everything that can be refused has been read."""

    open: Callable[[], AbstractContextManager[Run]]
    folder: Path | None = None
    """Of the run to go on with; None: a new one."""
    rescored: tuple[str, ...] | None = None
    """When what it recorded is to be scored again: the kinds of its events that follow from
    rewards."""

    @property
    def is_new(self) -> bool:
        return self.folder is None

    def __call__(self) -> AbstractContextManager[Run]:
        return self.open()


@dataclass(frozen=True, slots=True)
class RunKind(Generic[Settings, Report]):
    """What a run is made from, and what takes it to its end, from its beginning or from where it
    was."""

    name: str
    config: type[Settings]
    finish: Callable[[Settings, OpenRun, Display], Outcome[Report]]
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
    ) -> Outcome[Report]:
        """A new run, to its end. `values` are keys of the config, see `read_config`."""
        config = read_config(self.config, source, values)
        open_run = new_run(config, kind=self.name, name=name, runs_dir=runs_dir)
        return self.finish(config, open_run, Display(is_quiet=not progress))


def read_config(
    model: type[Settings], source: "ConfigSource | Settings", values: Mapping[str, Any]
) -> Settings:
    """A config from a file, a document or a config, with keyword values laid over it.

    Paths in a file are relative to it, all others to the current folder. A mapping given for a
    section changes the keys it names: `run_genome("demo.yaml", engine={"dtype": "bfloat16"})`. One
    of another `type` replaces the section: the keys of a type are its own.
    """
    if isinstance(source, str | Path):
        path = Path(source)
        config = parse_config(model, read_document(path), origin=str(path))
        config = config.from_folder(path.parent)
    elif isinstance(source, Mapping):
        document = merge(source, values)
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
        own = merged.get(key)
        if isinstance(own, Mapping) and isinstance(value, Mapping) and not _is_other(own, value):
            value = merge(own, value)
        merged[key] = value
    return merged


def _is_other(own: Mapping[str, Any], value: Mapping[str, Any]) -> bool:
    """Whether a section is to be of another type. One that names none is an embedded engine: all
    other sections with types must name theirs."""
    return "type" in value and value["type"] != own.get("type", "embedded")


def new_run(config: Config, *, kind: str, name: str, runs_dir: str | Path) -> OpenRun:
    """The run that is made later, so that a model or an adapter that cannot be used leaves none.

    A name that is taken and a folder that cannot hold runs are refused now, before a model is read.
    """
    root = Path(runs_dir)
    _require_folder(root)
    if name and _is_run(root / name):
        path = root / name
        raise RunError(
            f"{path} already holds a run: go on with it by `rookery runs resume "
            f"{shlex.quote(str(path))}`, or choose another --name."
        )
    document = config.model_dump(mode="json")
    return OpenRun(lambda: Run.create(root, kind=kind, config=document, name=name))


def tracked(open_run: OpenRun, names: Sequence[TrackerName]) -> OpenRun:
    """The run with trackers that follow its metrics; one that is not installed is refused now."""
    require_trackers(names)

    @contextmanager
    def opened() -> Iterator[Run]:
        with open_run() as run, follow_metrics(run, names):
            yield run

    return replace(open_run, open=opened)


def _require_folder(runs_dir: Path) -> None:
    root = runs_dir.absolute()
    nearest = next(folder for folder in (root, *root.parents) if folder.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        problem = "may not be written" if nearest.is_dir() else "is a file"
        raise RunError(
            f"Runs cannot be kept in {runs_dir}: {nearest} {problem}. Give another folder with "
            "--runs-dir."
        )


def _is_run(path: Path) -> bool:
    try:
        Run.view(path).close()
    except RunError:
        return False  # if something else is there, `Run.create` says what
    return True


@contextmanager
def resumable(path: Path, display: Display) -> Iterator[None]:
    """What ends a run before its end says how to go on with it: Ctrl-C, SIGTERM, and the loss of
    servers or workers. A run that left no folder is begun again."""
    go_on = f"Go on with: rookery runs resume {shlex.quote(str(path))}"
    try:
        yield
    except (asyncio.CancelledError, KeyboardInterrupt):
        display.fail(f"Interrupted. {go_on}")
        raise
    except (EngineDownError, FleetDownError, ExecutorError):
        if path.exists():
            display.note([f"The run ended early and is kept. {go_on}"])
        raise


async def write_page(run: Run, render: Callable[[Report], str], report: Report) -> None:
    """Write the page of a report, which ends its run."""
    page = await asyncio.to_thread(render, report)
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


# The kinds of runs there are, and how one that was interrupted goes on.


def resume(path: str | Path, *, rescore: bool = False, progress: bool = True) -> Outcome[Any]:
    """Go on with the run in a folder from where its event log ends; nothing is done twice.

    The run is opened when all it needs has been read: one that cannot be resumed stays as it is.
    With `rescore` its answers are scored again, and what follows from their rewards is made again:
    all answers when a scorer changed, else those without a reward.
    """
    with Run.view(Path(path)) as run:
        if run.kind not in KINDS:
            raise RunError(
                f"{path} is a run of kind {run.kind!r}, which this version cannot resume."
            )
        kind = KINDS[run.kind]()
        if rescore and kind.scored is None:
            raise RunError(
                f"{path} is a run of kind {run.kind!r}, which has no scorer: leave out --rescore."
            )
        place = run.path.absolute()
        config = parse_config(kind.config, run.config, origin=str(run.path / "config.json"))
        if is_first_process():
            run.require_free()
    rescored = kind.scored if rescore else None
    open_run = OpenRun(lambda: Run.open(place), folder=place, rescored=rescored)
    return kind.finish(config, open_run, Display(is_quiet=not progress))


def _evaluation() -> RunKind[Any, Any]:
    from rookery.compose.evaluation import EVALUATION

    return EVALUATION


def _evolve() -> RunKind[Any, Any]:
    from rookery.compose.evolve import EVOLVE

    return EVOLVE


def _genome() -> RunKind[Any, Any]:
    from rookery.compose.genome import GENOME

    return GENOME


def _grpo() -> RunKind[Any, Any]:
    from rookery.compose.grpo import GRPO

    return GRPO


def _icm() -> RunKind[Any, Any]:
    from rookery.compose.icm import ICM

    return ICM


KINDS: Mapping[str, Callable[[], RunKind[Any, Any]]] = {
    "eval": _evaluation,
    "evolve": _evolve,
    "genome": _genome,
    "grpo": _grpo,
    "icm": _icm,
}
"""By the kind of the run; each imports its loop when it is needed."""


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
