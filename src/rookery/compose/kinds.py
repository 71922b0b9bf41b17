"""Find a kind of run by name, and resume an interrupted run.

outcome = resume("runs/demo")
kind = find_kind("genome")                      # from `KINDS`; wraps a bare `Loop` as a `RunKind`
"""

import pkgutil
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rookery.compose import KINDS
from rookery.compose.running import Outcome, RunKind, RunOpener, StartedOn, is_first_process
from rookery.config import parse_config
from rookery.errors import RunError
from rookery.runs import Run
from rookery.ui.display import Display

if TYPE_CHECKING:
    from rookery.loops.contract import Loop

__all__ = ["find_kind", "resume"]


def resume(
    path: str | Path,
    *,
    rescore: bool = False,
    progress: bool = True,
    whole: StartedOn | None = None,
) -> Outcome[Any]:
    """Resume the run in a folder from the end of its event log. No work is repeated.

    The run is opened only after all its inputs are read, so a failed resume leaves it unchanged.
    With `rescore`, answers are scored again, and everything that depends on their rewards is
    redone: all answers if a scorer changed, else those without a reward. For a step, `whole` is
    the run of its pipeline or league.
    """
    with Run.view(Path(path)) as run:
        if run.kind == "serve":
            config_file = shlex.quote(str(run.path / "config.json"))
            raise RunError(
                f"{path} is a service, which goes on when it is started: rookery serve "
                f"{config_file}"
            )
        if run.kind not in KINDS:
            raise RunError(
                f"{path} is a run of kind {run.kind!r}, which this version cannot resume."
            )
        kind = find_kind(run.kind)
        if rescore and kind.scored is None:
            raise RunError(
                f"{path} is a run of kind {run.kind!r}, which has no scorer: leave out --rescore."
            )
        place = run.path.absolute()
        config = parse_config(kind.config, run.config, origin=str(run.path / "config.json"))
        if is_first_process():
            run.require_free()
    rescored = kind.scored if rescore else None
    open_run = RunOpener(lambda: Run.open(place), folder=place, rescored=rescored, whole=whole)
    return kind.finish(config, open_run, Display(is_quiet=not progress))


def find_kind(name: str) -> RunKind[Any, Any]:
    """Return the kind with this name. A `Loop` is wrapped as a `RunKind`."""
    entry: RunKind[Any, Any] | Loop[Any] = pkgutil.resolve_name(KINDS[name])
    if isinstance(entry, RunKind):
        return entry
    from rookery.compose.loop import kind_of  # needs the extra `hf`; evolve does not

    return kind_of(name, entry)
