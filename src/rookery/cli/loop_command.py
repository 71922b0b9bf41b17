"""The `run` command that every loop has: a config, any of its values as a flag, a run, a report.

    genome = make_loop_app("genome", help="Evolve ...", summary="...", ...)

Only what differs between the loops is given; the loop is imported when its command is called.
"""

import shlex
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import cyclopts
from cyclopts import Parameter

from rookery.cli.terminal import check_flags, log_warnings, paths_from_here, print_outcome
from rookery.config import load_config
from rookery.errors import ConfigError, RunError

if TYPE_CHECKING:
    from rookery.compose.running import Outcome

__all__ = [
    "genome",
    "icm",
    "make_loop_app",
    "pipeline",
    "read_loop_config",
    "run_loop",
]

_REST = """
    Any value of the config is a flag with a dotted name. Resume an interrupted run
    with `--resume --name NAME` or `rookery runs resume NAME`: no request is sent twice.

{examples}

    Parameters
    ----------
    config
        A YAML or TOML file; paths in it are relative to it, those of flags to where you are.
    name
        The run's name; by default the kind and the time.
    runs_dir
        Where runs are kept.
    resume
        Resume the run of this name.
"""
_OWN = ("name", "runs_dir", "resume")


def make_loop_app(
    kind: str, *, help: str, summary: str, examples: Sequence[str], paths: Sequence[str]
) -> cyclopts.App:
    """The command group of a loop with its `run`; `paths` are the flags that name files."""

    def run(
        config: Path,
        *overrides: Annotated[str, Parameter(allow_leading_hyphen=True, show=False)],
        name: str = "",
        runs_dir: Path = Path("runs"),
        resume: Annotated[bool, Parameter(negative="")] = False,
    ) -> int:
        return run_loop(
            kind, config, overrides, paths=paths, name=name, runs_dir=runs_dir, resume=resume
        )

    lines = "\n".join(f"        {example}" for example in examples)
    run.__doc__ = f"{summary}\n{_REST.format(examples=lines)}"
    app = cyclopts.App(name=kind, help=help)
    app.command(run, name="run")
    return app


def run_loop(
    kind: str,
    config: Path,
    overrides: Sequence[str],
    *,
    paths: Sequence[str],
    name: str,
    runs_dir: Path,
    resume: bool,
) -> int:
    """Begin a run of this kind, or go on with it, to its end; the exit code."""
    from rookery.compose.running import find_kind

    loop = find_kind(kind)
    if resume and not name:
        raise RunError("--resume needs the run: add --name NAME, see `rookery runs list`.")
    loaded = read_loop_config(
        loop.config, config, overrides, paths=paths, own=_OWN, runs_dir=runs_dir
    )
    if resume:
        return _resume(runs_dir / name, loaded.model_dump(mode="json"))
    return _print_once(loop.start(loaded, {}, name=name, runs_dir=runs_dir))


def read_loop_config(
    model: Any,
    config: Path,
    overrides: Sequence[str],
    *,
    paths: Sequence[str],
    own: Sequence[str],
    runs_dir: Path,
) -> Any:
    """The config of a file with flags over it; `own` are flags of the command itself. Its
    `run:NAME/PART` are of runs in `runs_dir`."""
    from rookery.runs.references import in_folder, resolve_references

    log_warnings()
    check_flags(overrides, fields=model.model_fields, own=own)
    words = paths_from_here(overrides, paths=paths)
    find = in_folder(runs_dir)
    resolve = partial(resolve_references, find=find, later=model.resolved_later)
    loaded = load_config(model, config, overrides=words, resolve=resolve)
    return loaded.from_folder(config.parent)


def _print_once(outcome: "Outcome[Any]") -> int:
    """Of several processes under torchrun, one prints."""
    from rookery.compose.running import is_first_process

    return print_outcome(outcome) if is_first_process() else 0


def _resume(path: Path, config: Mapping[str, Any]) -> int:
    """A run has one config: the file and the flags must give the one that it was made with."""
    from rookery.compose.running import resume
    from rookery.runs import Run
    from rookery.runs.run_folder import find_changes

    with Run.view(path) as run:
        changes = find_changes(run.config, config)
    if changes:
        key, (old, new) = next(iter(changes.items()))
        raise ConfigError(
            f"The run was made with another config: {key} is {old!r} there and {new!r} here. Give "
            f"the flags it was started with, or go on with its own config by `rookery runs resume "
            f"{shlex.quote(str(path))}`."
        )
    return _print_once(resume(path))


# `rookery genome run`, `icm run` and `pipeline run`: what differs between them.


genome = make_loop_app(
    "genome",
    help="Evolve a population of LoRA adapters, no gradients.",
    summary="Evolve adapters as the config says, and report honestly how good the best one is.",
    examples=(
        "rookery genome run mine/config.yaml",
        "rookery genome run mine.yaml --seed 3 --stages.1.generations 20",
    ),
    paths=("init.path", "tasksets.*.path"),
)
icm = make_loop_app(
    "icm",
    help="Label data without labels, by internal coherence.",
    summary="Label the items of a file, and say honestly what the labels are worth.",
    examples=(
        "rookery icm run mine/config.yaml",
        "rookery icm run mine.yaml --data.path claims.jsonl --num-chains 4",
    ),
    paths=("data.path", "data.gold.path", "iterate.sft.init_from"),
)
pipeline = make_loop_app(
    "pipeline",
    help="Run loops that feed each other, with one report over all of them.",
    summary="Run the steps of the config, each as a run of its own, and measure what each left on "
    "tasks that none has seen.",
    examples=(
        "rookery pipeline run flywheel.yaml --name flywheel",
        "rookery runs resume flywheel                   # after an interruption",
    ),
    paths=("report.taskset",),
)
