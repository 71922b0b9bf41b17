"""`rookery runs list | show | resume | export`."""

import json
import os
import shlex
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import cyclopts
from cyclopts import Parameter

from rookery.cli.terminal import console
from rookery.config import Config, parse_config, parse_overrides
from rookery.errors import ConfigError, RunError

if TYPE_CHECKING:
    from rookery.runs import Run

__all__ = ["OpenRun", "new_run", "open_again", "runs"]

OpenRun = Callable[[], "AbstractContextManager[Run]"]
"""Makes a run or goes on with one, when everything that can be refused has been read."""

runs = cyclopts.App(name="runs", help="Look at runs, go on with one, take one apart.")


@runs.command(name="list")
def list_(
    *,
    runs_dir: Path = Path("runs"),
    json_out: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> None:
    """List the runs, the newest first.

    Parameters
    ----------
    runs_dir
        Where runs are kept.
    json_out
        Print JSON instead of a table.
    """
    from rich.table import Table

    from rookery.runs import list_runs

    found = list_runs(runs_dir)
    if json_out:
        fields = ("name", "kind", "status", "started_s", "last_event_s", "num_events", "size_bytes")
        console.print_json(json.dumps([{f: getattr(run, f) for f in fields} for run in found]))
        return
    table = Table("name", "kind", "status", "started", "last event", "events", "size")
    for run in found:
        table.add_row(
            run.name,
            run.kind,
            run.status,
            _time(run.started_s),
            _time(run.last_event_s),
            str(run.num_events),
            f"{run.size_bytes / 2**20:.1f} MB",
        )
    if found:
        console.print(table)
    else:
        console.print(f"No runs in {runs_dir}.", markup=False, soft_wrap=True)


@runs.command
def show(path: Path, *, runs_dir: Path = Path("runs")) -> None:
    """Show one run: its config, its state, its newest events and metrics.

    Parameters
    ----------
    path
        The run's folder, or its name in `runs_dir`.
    runs_dir
        Where runs are kept.
    """
    from rookery.runs import show as show_run

    details = show_run(_find(path, runs_dir))
    summary = details.summary
    console.print(f"[bold]{summary.name}[/bold]  {summary.kind}, {summary.status}")
    if summary.message:
        console.print(summary.message, markup=False, soft_wrap=True)
    size = f"{summary.size_bytes / 2**20:.1f} MB"
    console.print(f"{summary.path}, {size}", markup=False, soft_wrap=True)
    console.print(f"started {_time(summary.started_s)}, last event {_time(summary.last_event_s)}")
    console.print("events: " + ", ".join(f"{n} {kind}" for kind, n in details.counts.items()))
    for name, value in sorted(details.latest_metrics.items()):
        console.print(f"  {name} = {value:.6g}")
    console.print("config:")
    console.print_json(json.dumps(details.config))


@runs.command
def resume(path: Path, *, runs_dir: Path = Path("runs")) -> int:
    """Go on with an interrupted run from where its event log ends.

    Parameters
    ----------
    path
        The run's folder, or its name in `runs_dir`.
    runs_dir
        Where runs are kept.
    """
    from rookery.runs import Run

    with Run.open(_find(path, runs_dir)) as run:
        if run.kind == "eval":
            from rookery.cli.evaluation import EvalConfig, resume_evaluation

            return resume_evaluation(run, parse_config(EvalConfig, run.config, origin=str(path)))
        if run.kind == "genome":
            from rookery.cli.genome import resume_genome

            return resume_genome(run)
        if run.kind == "icm":
            from rookery.cli.icm import resume_icm

            return resume_icm(run)
        raise RunError(f"{path} is a run of kind {run.kind!r}, which this version cannot resume.")


@runs.command
def export(path: Path, out: Path, *, runs_dir: Path = Path("runs")) -> None:
    """Write every event of a run as one line of JSON.

    Parameters
    ----------
    path
        The run's folder, or its name in `runs_dir`.
    out
        The .jsonl file to write.
    runs_dir
        Where runs are kept.
    """
    from rookery.runs import Run, export_events

    with Run.view(_find(path, runs_dir)) as run:
        num_events = export_events(run, out)
    console.print(f"{num_events} events written to {out}", markup=False, soft_wrap=True)


def new_run(config: Config, *, kind: str, name: str, runs_dir: Path) -> OpenRun:
    """The run that is made later, so that a model or an adapter that cannot be used leaves none.

    A name that is taken and a folder that cannot hold runs are refused now, before a model is read.
    """
    from rookery.runs import Run

    _require_folder(runs_dir)
    if name and _is_run(runs_dir / name):
        path = runs_dir / name
        raise RunError(
            f"{path} already holds a run: go on with it by `rookery runs resume "
            f"{shlex.quote(str(path))}`, or choose another --name."
        )
    document = config.model_dump(mode="json")
    return lambda: Run.create(runs_dir, kind=kind, config=document, name=name)


def open_again(
    runs_dir: Path, *, name: str, overrides: Sequence[str], may_change: Collection[str] = ()
) -> "Run":
    """The run that `--resume` goes on with; a run has one config, the one it was made with.

    `may_change` names the values that a loop lets grow, such as "steps": a flag of such a value is
    accepted here, and the loop gives it to `Run.extend`.
    """
    from rookery.runs import Run

    if not name:
        raise RunError("--resume needs the run: add --name NAME, see `rookery runs list`.")
    changed = [key.replace("-", "_") for key, _ in parse_overrides(overrides)]
    if not all(any(fnmatchcase(key, name) for name in may_change) for key in changed):
        allowed = f" Only {', '.join(sorted(may_change))} may change." if may_change else ""
        raise ConfigError(
            "--resume goes on with the config that the run was made with: leave out "
            f"{' '.join(overrides)}, or start a new run.{allowed}"
        )
    return Run.open(runs_dir / name)


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
    from rookery.runs import Run

    try:
        Run.view(path).close()
    except RunError:
        return False  # if something else is there, `Run.create` says what
    return True


def _find(path: Path, runs_dir: Path) -> Path:
    return path if path.exists() or path.is_absolute() else runs_dir / path


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S") if seconds else "-"
