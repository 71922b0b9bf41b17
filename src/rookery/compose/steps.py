"""Steps: loops that are run one after the other, each as an ordinary run beside that of the whole.

    steps:
      labels: {loop: icm, config: icm.yaml}
      student: {loop: sft, values: {model: smollm2, taskset: "run:labels/sft.jsonl", split: all}}

A step of the run `flow` is called `flow.STEP`: it is shown, inspected and resumed as any other.
`run:STEP/PART` is what an earlier step left.
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
"""What a step leaves that can be measured."""


class StepConfig(Config):
    """One loop, with its config."""

    loop: Loop
    """Which one."""
    config: Path | None = None
    """Its config file, relative to the pipeline's; empty: `values` are all of it. Of an evolve
    step the file is its `settings`."""
    values: dict[str, Any] = Field(default_factory=dict)
    """Keys of its config, laid over the file; of an evolve step `program`, `evaluator` and
    `settings`. `run:STEP/PART` is what an earlier step left. Paths
    are relative to the step's file; without one, to the pipeline's."""


class StepsConfig(Config):
    """Loops in their order."""

    resolved_later = frozenset({"steps"})
    steps: dict[str, StepConfig]
    """By name, in their order."""
    folder: Path = Path()
    """Where relative paths begin: the folder of the file."""

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
"""Takes a step of the run of a whole, by its name."""


def place_of(whole: Path, step: str) -> Path:
    """The folder of a step's run."""
    return whole.with_name(f"{whole.name}.{step}")


def take_steps(
    begin: Callable[[Run], StepsConfig],
    open_run: RunOpener,
    display: Display,
    *,
    inputs: Mapping[str, RunInputs],
    take: Take = lambda _run, _name, work: work(),
) -> RunOpener:
    """Begin the steps one after the other, go on with them, or find that they have ended; the run
    of the whole, to be gone on with. `begin` is given that run and says its steps; `take` is given
    what takes a step, and may leave it out. `inputs` are what the steps read now: one that begins
    later reads the same, or is refused."""
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
    """What a step freed goes back to the machine: the C library keeps gigabytes of it, in pieces
    that the next model does not fit into."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
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
        changes.pop("output", None)  # of an evolve step that was moved
        is_finished = run.status == "finished"
    if changes:
        raise RunError(
            f"{path} was made with another {', '.join(changes)}: remove it, or give the whole "
            "another --name."
        )
    has_begun(path, whole.inputs, is_rescored=True)  # refuses other data
    if not is_finished:
        resume(path, progress=shown, whole=whole)


def has_begun(path: Path, inputs: RunInputs, *, is_rescored: bool) -> bool:
    """Whether a step's run has a record of its inputs. RunError where they are others now; of
    scorers unless its answers are scored again."""
    begun = read_digests(path)
    if begun is None:
        return False
    own = {each: digest for each, digest in begun.items() if each in inputs.digests}
    require_same(path, own, inputs.digests)
    if not is_rescored:
        require_same_scorers(path, begun, inputs.scorers)
    return True


def _require_unused(config: StepsConfig, name: str, whole: Path) -> None:
    """RunError where a later step was made from an earlier run of this one, which is gone."""
    for other in config.steps:
        path = place_of(whole, other)
        if is_run(path) and name in {step for _, step in feeds(config, other)}:
            raise RunError(
                f"{path} was made from an earlier {place_of(whole, name).name}, which is gone: "
                "remove it too, and what was made from it."
            )


def _finder(config: StepsConfig, whole: Path, *, are_made: bool) -> Find:
    """Steps by their names, other runs by theirs."""
    others = in_folder(whole.parent)

    def find(name: str) -> Path | None:
        if name not in config.steps:
            return others(name)
        return place_of(whole, name) if are_made else None

    return find


def read_step(config: StepsConfig, name: str, whole: Path, *, are_made: bool = True) -> Config:
    """A step's own config; `whole` is where the run of the whole is or will be. What other steps
    leave need not be there if they are not `are_made`."""
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
    """What a step reads that no other makes, and that is not `made` by the whole."""
    made = {*made, *(key for key, _ in feeds(config, name))}
    return reader.read(name, find_kind(config.steps[name].loop).inputs, settings, made=made)


class _StepFiles(Config):
    """What a step of a pipeline says beside `settings`."""

    program: Path
    """A file or a folder; without an evaluator, a prompt."""
    evaluator: Path | None = None


def _read_evolve_step(
    document: Mapping[str, Any], *, origin: str, folder: Path, file: Path | None, output: Path
) -> EvolveRunConfig:
    """The config of an evolution in a pipeline: `program`, `evaluator`, and as `settings` what a
    config file has. `file` is that file, `folder` is where paths begin."""
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
    """A step's file, if it has one, and its config as it is written."""
    step = config.steps[name]
    file = None if step.config is None else config.folder / step.config.expanduser()
    document = {} if file is None else read_document(file)
    if step.loop == "evolve":
        document = {"settings": document}
    return file, merge(document, step.values)


def feeds(config: StepsConfig, name: str) -> list[tuple[str, str]]:
    """(key, step) for all that a step takes from other steps."""
    return [(key, run) for key, _, run in _references(config, name) if run in config.steps]


def _references(config: StepsConfig, name: str) -> list[tuple[str, str, str]]:
    return find_names(_read_document(config, name)[1])


def require_order(config: StepsConfig) -> None:
    """ConfigError where a step takes from one that is not before it."""
    earlier: set[str] = set()
    for name in config.steps:
        for key, run in feeds(config, name):
            if run not in earlier:
                raise ConfigError(
                    f"{key} of the step {name} takes from {run}, which is not an earlier step."
                )
        earlier.add(name)


def require_places(config: StepsConfig, whole: Path) -> None:
    """An error where the run of a step cannot have its name, or a step takes from a run that is
    not there; `whole` is where the run of the whole is or will be."""
    find = in_folder(whole.parent)
    for name in config.steps:
        check_name(place_of(whole, name).name, what=f"name of the run of the step {name}")
        for key, reference, run in _references(config, name):
            if run not in config.steps:
                resolve_text(reference, find=find, key=f"{key} of the step {name}")


def describe_step(config: StepsConfig, name: str, whole: Path) -> PipelineStep:
    """A step that has ended, for a report."""
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
