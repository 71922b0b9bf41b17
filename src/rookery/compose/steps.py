"""Runs loops one after the other, each as an ordinary run beside that of the whole.

    steps:
      labels: {loop: icm, config: icm.yaml}
      student: {loop: sft, values: {model: smollm2, taskset: "run:labels/sft.jsonl", split: all}}

The whole is the run of a pipeline or a league. A step of the run `flow` is the run `flow.STEP`: it
is shown, inspected and resumed like any other. `run:STEP/PART` refers to an earlier step's output.
"""

import ctypes
import gc
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator

from rookery.compat.openevolve import read_config as read_evolve_config
from rookery.compose.evolve_inputs import EvolveRunConfig, run_config
from rookery.compose.inputs import InputReader, RunInputs
from rookery.compose.kinds import find_kind, resume
from rookery.compose.running import (
    RunOpener,
    StartedOn,
    is_run,
    merge,
    read_digests,
    require_same,
    require_same_scorers,
    resumable,
)
from rookery.config import Config, parse_config, read_document
from rookery.errors import ConfigError, RunError
from rookery.reports import PipelineStep
from rookery.runs import Run
from rookery.runs.run_folder import (
    Find,
    check_name,
    find_changes,
    find_names,
    find_sources,
    in_folder,
    resolve_references,
    resolve_text,
)
from rookery.ui import wording
from rookery.ui.display import Display
from rookery.ui.headline import short_result
from rookery.ui.steps import Steps

__all__ = [
    "ADAPTERS",
    "StepConfig",
    "StepsConfig",
    "describe_step",
    "feeds",
    "give_back_memory",
    "has_begun",
    "place_of",
    "read_step",
    "read_step_inputs",
    "require_order",
    "require_places",
    "take_steps",
]

Loop = Literal["evolve", "genome", "grpo", "icm", "sft"]
ADAPTERS: Mapping[str, str] = {"genome": "winner", "grpo": "trained", "sft": "trained"}
"""Folder of the adapter in a step's run, by loop."""


class StepConfig(Config):
    """One loop with its config."""

    loop: Loop
    """The loop to run."""
    config: Path | None = None
    """The loop's config file, relative to the pipeline's file. Empty: `values` are the whole
    config. For an evolve step, the file holds its `settings`."""
    values: dict[str, Any] = Field(default_factory=dict)
    """Keys of the loop's config that override the file. An evolve step has the keys `program`,
    `evaluator` and `settings`. `run:STEP/PART` refers to the output of an earlier step. Paths are
    relative to the step's file or, without one, to the pipeline's file."""


class StepsConfig(Config):
    """Loops in order."""

    resolved_later = frozenset({"steps"})
    steps: dict[str, StepConfig]
    """Steps by name, in the order in which they run."""
    folder: Path = Path()
    """The folder that relative paths start from: that of the config file."""

    @field_validator("steps")
    @classmethod
    def _are_named(cls, steps: dict[str, StepConfig]) -> dict[str, StepConfig]:
        for name in steps:
            try:
                check_name(name, what="name of a step")
            except RunError as error:
                raise ValueError(str(error)) from None
        return steps

    def from_folder(self, folder: Path) -> Self:
        return self.model_copy(update={"folder": (folder / self.folder).absolute()})


Take = Callable[[Run, str, Callable[[], None]], None]
"""Called with the run of the whole, a step's name, and a function that runs the step."""


def place_of(whole: Path, step: str) -> Path:
    """Return the folder of a step's run."""
    return whole.with_name(f"{whole.name}.{step}")


def take_steps(
    begin: Callable[[Run], StepsConfig],
    open_run: RunOpener,
    display: Display,
    *,
    inputs: Mapping[str, RunInputs],
    take: Take = lambda _run, _name, work: work(),
) -> RunOpener:
    """Start, resume or skip each step in order; return an opener of the whole's run.

    `begin` gets that run and returns its steps. `take` gets a function that runs one step, and may
    skip it. `inputs` are the current inputs of the steps. A step that begins later must read the
    same inputs, or is refused.
    """
    with open_run() as run, resumable(run.path, display):
        config = begin(run)
        path = run.path
        steps = Steps({name: place_of(path, name) for name in config.steps})
        with steps.told(run):
            for number, name in enumerate(config.steps, start=1):
                left_s = steps.left_s()
                left = "" if left_s is None else f", {wording.duration(left_s)} left"
                display.say(f"step {number} of {len(config.steps)}: {name}{left}")
                same = StartedOn(path, inputs[name])
                take(run, name, partial(_take_step, config, name, whole=same, display=display))
                run.append_blocking("pipeline/step", {"name": name}, key=name)
                steps.end(name)
                give_back_memory()
    return replace(open_run, open=lambda: Run.open(path), folder=path)


def give_back_memory() -> None:
    """Return freed memory to the operating system. The C library otherwise keeps gigabytes of it in
    fragments that the next model does not fit into."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)


def _take_step(config: StepsConfig, name: str, *, whole: StartedOn, display: Display) -> None:
    path, kind = place_of(whole.folder, name), find_kind(config.steps[name].loop)
    settings = read_step(config, name, whole.folder)
    shown = not display.is_quiet
    if not is_run(path):
        _require_unused(config, name, whole.folder)
        runs_dir = path.parent
        kind.start(settings, {}, name=path.name, runs_dir=runs_dir, progress=shown, whole=whole)
        return
    with Run.view(path) as run:
        if run.kind != kind.name:
            raise RunError(
                f"{path} is a run of kind {run.kind}, and the step {name} of {kind.name}: remove "
                "it, or give the whole another --name."
            )
        before = parse_config(kind.config, run.config, origin=str(path / "config.json"))
        changes = find_changes(*(each.model_dump(mode="json") for each in (before, settings)))
        changes.pop("output", None)  # the run of an evolve step may have been moved
        is_finished = run.status == "finished"
    if changes:
        raise RunError(
            f"{path} was made with another {', '.join(changes)}: remove it, or give the whole "
            "another --name."
        )
    has_begun(path, whole.inputs, is_rescored=True)  # refuses changed inputs
    if not is_finished:
        resume(path, progress=shown, whole=whole)


def has_begun(path: Path, inputs: RunInputs, *, is_rescored: bool) -> bool:
    """True if a step's run has recorded its inputs. Raises RunError if they have changed since.
    Changed scorers are allowed if `is_rescored`."""
    begun = read_digests(path)
    if begun is None:
        return False
    recorded = {each: digest for each, digest in begun.items() if each in inputs.digests}
    require_same(path, recorded, inputs.digests)
    if not is_rescored:
        require_same_scorers(path, begun, inputs.scorers)
    return True


def _require_unused(config: StepsConfig, name: str, whole: Path) -> None:
    """Raise RunError if a later step was made from an earlier run of this step, now deleted."""
    for other in config.steps:
        path = place_of(whole, other)
        if is_run(path) and name in {step for _, step in feeds(config, other)}:
            raise RunError(
                f"{path} was made from an earlier {place_of(whole, name).name}, which is gone: "
                "remove it too, and what was made from it."
            )


def _finder(config: StepsConfig, whole: Path, *, are_made: bool) -> Find:
    """Return a lookup of runs by name, which finds steps by their short names."""
    others = in_folder(whole.parent)

    def find(name: str) -> Path | None:
        if name not in config.steps:
            return others(name)
        return place_of(whole, name) if are_made else None

    return find


def read_step(config: StepsConfig, name: str, whole: Path, *, are_made: bool = True) -> Config:
    """Read a step's own config. `whole` is the folder of the whole's run, existing or not. Unless
    `are_made`, outputs of other steps need not exist."""
    file, document = _read_document(config, name)
    document = resolve_references(document, find=_finder(config, whole, are_made=are_made))
    origin = f"the step {name}" if file is None else f"the step {name} ({file})"
    folder = config.folder if file is None else file.parent
    if config.steps[name].loop == "evolve":
        output = place_of(whole, name)
        return _read_evolve_step(document, origin=origin, folder=folder, file=file, output=output)
    model: type[Config] = find_kind(config.steps[name].loop).config
    return parse_config(model, document, origin=origin).from_folder(folder)


def read_step_inputs(
    config: StepsConfig,
    name: str,
    settings: Config,
    reader: InputReader,
    *,
    made: Collection[str] = (),
) -> RunInputs:
    """Digest a step's inputs that neither another step nor the whole (`made`) produces."""
    made = {*made, *(key for key, _ in feeds(config, name))}
    return reader.read(name, find_kind(config.steps[name].loop).inputs, settings, made=made)


class _StepFiles(Config):
    """Keys of an evolve step beside `settings`."""

    program: Path
    """A file or a folder. Without an evaluator, it is a prompt."""
    evaluator: Path | None = None


def _read_evolve_step(
    document: Mapping[str, Any], *, origin: str, folder: Path, file: Path | None, output: Path
) -> EvolveRunConfig:
    """Read the config of an evolve step: `program`, `evaluator`, and `settings` with the keys of an
    evolve config. `file` is the config file, `folder` the start of relative paths."""
    rest = {key: value for key, value in document.items() if key != "settings"}
    files = parse_config(_StepFiles, rest, origin=origin)
    settings = document.get("settings") or {}
    if not isinstance(settings, Mapping):
        raise ConfigError(f"{origin}: settings should be the keys of an evolve config.")
    loaded = read_evolve_config(settings, environment=os.environ, folder=folder)
    place = folder.absolute()
    return run_config(
        loaded,
        program=place / files.program,
        evaluator=None if files.evaluator is None else place / files.evaluator,
        output=output,
        config_file=file,
    )


def _read_document(config: StepsConfig, name: str) -> tuple[Path | None, dict[str, Any]]:
    """Return a step's config file, if any, and its unresolved config."""
    step = config.steps[name]
    file = None if step.config is None else config.folder / step.config.expanduser()
    document = {} if file is None else read_document(file)
    if step.loop == "evolve":
        document = {"settings": document}
    return file, merge(document, step.values)


def feeds(config: StepsConfig, name: str) -> list[tuple[str, str]]:
    """Return (key, step) for each config key that refers to the output of another step."""
    return [(key, run) for key, _, run in _references(config, name) if run in config.steps]


def _references(config: StepsConfig, name: str) -> list[tuple[str, str, str]]:
    return find_names(_read_document(config, name)[1])


def require_order(config: StepsConfig) -> None:
    """Raise ConfigError if a step refers to a step that is not before it."""
    earlier: set[str] = set()
    for name in config.steps:
        for key, run in feeds(config, name):
            if run not in earlier:
                raise ConfigError(
                    f"{key} of the step {name} takes from {run}, which is not an earlier step."
                )
        earlier.add(name)


def require_places(config: StepsConfig, whole: Path) -> None:
    """Raise an error if a step's run cannot have its name, or a step refers to a missing run.
    `whole` is the folder of the whole's run, existing or not."""
    find = in_folder(whole.parent)
    for name in config.steps:
        check_name(place_of(whole, name).name, what=f"name of the run of the step {name}")
        for key, reference, run in _references(config, name):
            if run not in config.steps:
                resolve_text(reference, find=find, key=f"{key} of the step {name}")


def describe_step(config: StepsConfig, name: str, whole: Path) -> PipelineStep:
    """Describe a finished step for a report."""
    path = place_of(whole, name)
    with Run.view(path) as run:
        sources = [source.run for source in find_sources(run.config)]
        return PipelineStep(
            name=name,
            loop=config.steps[name].loop,
            run=path.name,
            made_from=tuple(dict.fromkeys(each.name for each in sources)),
            result=short_result(run.read_json("report.json")),
            seconds=run.worked_s,
        )
