"""`rookery runs list | show | resume | export`, and `rookery ui`: a page of all runs."""

import json
from datetime import datetime
from pathlib import Path
from typing import Annotated

import cyclopts
from cyclopts import Parameter
from rich.markup import escape

from rookery.cli.terminal import console, log_warnings, print_outcome, say
from rookery.errors import near_path
from rookery.paths import expanded

__all__ = ["runs", "ui"]


runs = cyclopts.App(name="runs", help="List, show, resume and export runs.")


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
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from rookery.runs import list_runs
    from rookery.ui import wording

    summaries = list_runs(runs_dir)
    if json_out:
        fields = ("name", "kind", "status", "started_s", "last_event_s", "num_events", "size_bytes")
        console.print_json(json.dumps([{f: getattr(run, f) for f in fields} for run in summaries]))
        return
    results = [_result(run.path) for run in summaries]
    table = Table(box=SIMPLE_HEAD, padding=(0, 0), pad_edge=False)
    table.add_column(
        "name", no_wrap=True, min_width=max((len(run.name) for run in summaries), default=0)
    )
    for column in ("kind", "status", "started", "took"):
        table.add_column(column)
    words = [word for result in results for word in result.split()]
    table.add_column("result", min_width=max(map(len, words), default=0))
    for run, result in zip(summaries, results, strict=True):
        took = wording.duration(run.worked_s) if run.started_s else "-"
        started = _time(run.started_s, "%m-%d %H:%M")
        table.add_row(run.name, run.kind, run.status, started, took, result)
    if summaries:
        console.print(table)
    else:
        say(f"No runs in {runs_dir}.")


@runs.command
def show(path: Path, *, runs_dir: Path = Path("runs")) -> None:
    """Show one run: its state, its result, its newest events and metrics, its config.

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
    console.print(f"[bold]{escape(summary.name)}[/bold]  {escape(summary.kind)}, {summary.status}")
    if summary.message:
        say(summary.message)
    say(f"{summary.path}, {summary.size_bytes / 2**20:.1f} MB")
    console.print(f"started {_time(summary.started_s)}, last event {_time(summary.last_event_s)}")
    say("events: " + ", ".join(f"{n} {kind}" for kind, n in details.counts.items()))
    result = _result(summary.path)
    if result:
        page = summary.path / "report.html"
        say(f"result: {result}")
        if page.is_file():
            say(f"report: {page}")
    for event in details.last_events:
        console.print(
            f"  {event.seq:>6} {_time(event.time_s, '%H:%M:%S')} {event.kind} {event.key}"[
                : console.width
            ],
            highlight=False,
            markup=False,
        )
    for name, value in sorted(details.latest_metrics.items()):
        say(f"  {name} = {value:.6g}")
    console.print("config:")
    console.print_json(json.dumps(details.config))


@runs.command
def resume(
    path: Path,
    *,
    runs_dir: Path = Path("runs"),
    rescore: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Resume an interrupted run from the end of its event log.

    Parameters
    ----------
    path
        The run's folder, or its name in `runs_dir`.
    runs_dir
        Where runs are kept.
    rescore
        Score the recorded answers again: all if a scorer changed, else those without a reward. No
        answer is drawn again.
    """
    from rookery.compose import kinds

    log_warnings()
    return print_outcome(kinds.resume(_find(path, runs_dir), rescore=rescore))


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
    say(f"{num_events} events written to {out}")


def _find(path: Path, runs_dir: Path) -> Path:
    """Find a run by folder or name. A run takes precedence over another folder of the same name."""
    from rookery.runs.run_folder import EVENTS

    here, named = expanded(path), runs_dir / path
    if path.is_absolute() or (here / EVENTS).is_file():
        return path
    return path if here.exists() and not (named / EVENTS).is_file() else named


def _result(path: Path) -> str:
    """Return the main number of the run's report; empty without a report."""
    from rookery.errors import RunError
    from rookery.ui.headline import short_result

    try:
        return short_result(json.loads((path / "report.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, RunError):
        return ""


def _time(seconds: float, form: str = "%Y-%m-%d %H:%M:%S") -> str:
    return datetime.fromtimestamp(seconds).strftime(form) if seconds else "-"


def ui(
    runs_dir: Path = Path("runs"),
    *,
    port: int | None = None,
    host: str = "127.0.0.1",
    key: Annotated[str, Parameter(env_var="ROOKERY_UI_KEY")] = "",
    fleet: Annotated[tuple[str, ...], Parameter(name="--fleet")] = (),
    service: str = "",
    export: Annotated[tuple[Path, Path] | None, Parameter(name="--export")] = None,
) -> int:
    """Serve a live, read-only page of the runs in a folder until Ctrl-C.

        rookery ui
        rookery ui runs --port 7700
        rookery ui --service http://127.0.0.1:8000
        rookery ui --export runs/demo demo.html

    Parameters
    ----------
    runs_dir
        Where runs are kept.
    port
        The port to listen on; by default 7700 or, if that is taken, any free one.
    host
        The address to listen on. An address that other machines reach needs a key.
    key
        The key that visitors need, at least 16 characters; by default the printed URL holds one.
    fleet
        URLs of servers to show; by default those that you started on this machine.
    service
        The URL of a service to show, and to sample from with a tenant's key.
    export
        A run (folder or name) and an HTML file to write, which opens offline.
    """
    log_warnings()
    if export is not None:
        from rookery.ui.live.export import export_run

        run, out = export
        export_run(_find(run, runs_dir), out)
        say(f"written to {out}")
        return 0
    from rookery.ui.live.server import open_page

    with open_page(runs_dir, host=host, port=port, key=key, fleet=fleet, service=service) as page:
        say(page.url)
        if expanded(runs_dir).is_dir():
            say(f"Shows the runs of {runs_dir}. Ctrl-C ends it.")
        else:
            near = near_path(expanded(runs_dir).absolute())
            say(f"There is no folder {runs_dir} yet: its runs will appear.{near} Ctrl-C ends it.")
        page.wait()
    return 0
