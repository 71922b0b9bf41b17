"""`rookery ui`: a page over all runs."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from rookery.cli.terminal import log_warnings, say

__all__ = ["ui"]


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
    """Serve a page over the runs of a folder, live and read-only; Ctrl-C ends it.

        rookery ui
        rookery ui runs --port 7700
        rookery ui --service http://127.0.0.1:8000
        rookery ui --export runs/demo demo.html

    Parameters
    ----------
    runs_dir
        Where runs are kept.
    port
        The port; 7700 where that is free, else any.
    host
        The address to listen on. Beyond this machine a key is needed.
    key
        What a visitor has to know, at least 16 characters; by default the printed address has one.
    fleet
        Servers to show, by their addresses; by default those that your pools started here.
    service
        The address of a service to show, and to sample from with a tenant's key.
    export
        A run, by its folder or its name, and the HTML file to write: it opens offline.
    """
    log_warnings()
    if export is not None:
        from rookery.ui.live.export import export_run

        run, out = export
        found = run if run.exists() or run.is_absolute() else runs_dir / run
        export_run(found, out)
        say(f"written to {out}")
        return 0
    from rookery.ui.live.server import open_page

    with open_page(runs_dir, host=host, port=port, key=key, fleet=fleet, service=service) as page:
        say(page.url)
        say(f"Shows the runs of {runs_dir}. Ctrl-C ends it.")
        page.wait()
    return 0
