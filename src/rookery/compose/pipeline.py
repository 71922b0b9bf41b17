"""`run_pipeline`: loops that feed each other, and one report over all of them.

    steps:
      labels: {loop: icm, config: icm.yaml}
      student: {loop: sft, values: {model: smollm2, taskset: "run:labels/sft.jsonl", split: all}}
    report: {model: smollm2, taskset: held_out.jsonl}

Each step is an ordinary run beside the pipeline's own, called PIPELINE.STEP: it is shown, inspected
and resumed as any other. `run:STEP/PART` is what an earlier step left. When all have ended, the
base model and the adapter of every step answer tasks that no step has seen.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator

from rookery.compose.evaluation import EvaluationConfig, plan_evaluation
from rookery.compose.running import (
    ConfigSource,
    OpenRun,
    Outcome,
    RunKind,
    RunPlan,
    find_kind,
    finisher,
    is_run,
    merge,
    resumable,
    resume,
)
from rookery.compose.sft import SftRunConfig
from rookery.config import Config, parse_config, read_document
from rookery.errors import ConfigError, RunError, TaskError
from rookery.loops.genome import GenomeConfig
from rookery.loops.grpo import GrpoConfig
from rookery.loops.icm import IcmConfig, read_items
from rookery.reports import EvaluationReport, PipelineReport, PipelineStep, describe_task
from rookery.runs import Run
from rookery.runs.references import Find, find_names, find_sources, in_folder, resolve_references
from rookery.runs.run_folder import check_name, find_changes
from rookery.tasks.taskset import load_taskset_file, load_tasksets
from rookery.ui.display import Display
from rookery.ui.headline import short_result

__all__ = ["PIPELINE", "PipelineConfig", "StepConfig", "run_pipeline"]

Loop = Literal["genome", "grpo", "icm", "sft"]
ADAPTERS: Mapping[str, str] = {"genome": "winner", "grpo": "trained", "sft": "trained"}
"""What a step leaves that can be measured."""


class StepConfig(Config):
    """One loop, with its config."""

    loop: Loop
    """Which one."""
    config: Path | None = None
    """Its config file, relative to the pipeline's; empty: `values` are all of it."""
    values: dict[str, Any] = Field(default_factory=dict)
    """Keys of its config, laid over the file. `run:STEP/PART` is what an earlier step left. Paths
    are relative to the step's file; without one, to the pipeline's."""


class PipelineConfig(Config):
    """Loops in their order, and what all of them are measured on."""

    resolved_later = frozenset({"steps"})
    steps: dict[str, StepConfig] = Field(min_length=1)
    """By name, in their order."""
    report: EvaluationConfig
    """What the base model and every step's adapter answer: tasks that no step has seen."""
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
        place = (folder / self.folder).absolute()
        return self.model_copy(update={"folder": place, "report": self.report.from_folder(place)})


def run_pipeline(
    config: ConfigSource | PipelineConfig,
    *,
    name: str = "",
    runs_dir: str | Path = "runs",
    progress: bool = True,
) -> Outcome[PipelineReport]:
    """Run loops that feed each other, and measure what each left on tasks that none has seen.

    `run_pipeline("flywheel.yaml", name="flywheel")`. Each step is the run `flywheel.STEP`.
    """
    return PIPELINE.start(config, {}, name=name, runs_dir=runs_dir, progress=progress)


def _finish(config: PipelineConfig, open_run: OpenRun, display: Display) -> Outcome[PipelineReport]:
    """The steps one after the other, each as its own run; then the report."""
    settings = {name: _read_step(config, name) for name in config.steps}
    _require_order(config)
    _require_unseen(config, {n: each for n, each in settings.items() if not _feeds(config, n)})
    with open_run() as run, resumable(run.path, display):
        for number, name in enumerate(config.steps, start=1):
            display.say(f"step {number} of {len(config.steps)}: {name}")
            _take_step(config, name, pipeline=run.path, display=display)
            run.append_blocking("pipeline/step", {"name": name}, key=name)
        path = run.path
    again = replace(open_run, open=lambda: Run.open(path), folder=path)
    return finisher(_plan)(config, again, display)


def _take_step(config: PipelineConfig, name: str, *, pipeline: Path, display: Display) -> None:
    """Begin it, go on with it, or find that it has ended."""
    path = _place(pipeline, name)
    settings = _read_step(config, name, find=_finder(config, pipeline))
    if is_run(path):
        with Run.view(path) as run:
            changes = find_changes(run.config, settings.model_dump(mode="json"))
            is_finished = run.status == "finished"
        if changes:
            raise RunError(
                f"{path} was made with another {', '.join(changes)}: remove it, or give the "
                "pipeline another --name."
            )
        if not is_finished:
            resume(path, progress=not display.is_quiet)
        return
    kind = find_kind(config.steps[name].loop)
    kind.start(settings, {}, name=path.name, runs_dir=path.parent, progress=not display.is_quiet)


def _place(pipeline: Path, step: str) -> Path:
    return pipeline.with_name(f"{pipeline.name}.{step}")


def _finder(config: PipelineConfig, pipeline: Path) -> Find:
    """Steps by their names, other runs by theirs."""
    others = in_folder(pipeline.parent)
    return lambda name: _place(pipeline, name) if name in config.steps else others(name)


def _read_step(config: PipelineConfig, name: str, find: Find | None = None) -> Config:
    """A step's own config; without `find` what it refers to need not be there yet."""
    file, document = _read_document(config, name)
    if find is not None:
        document = resolve_references(document, find=find)
    model: type[Config] = find_kind(config.steps[name].loop).config
    origin = f"the step {name}" if file is None else f"the step {name} ({file})"
    folder = config.folder if file is None else file.parent
    return parse_config(model, document, origin=origin).from_folder(folder)


def _read_document(config: PipelineConfig, name: str) -> tuple[Path | None, dict[str, Any]]:
    """A step's file, if it has one, and its config as it is written."""
    step = config.steps[name]
    file = None if step.config is None else config.folder / step.config
    return file, merge({} if file is None else read_document(file), step.values)


def _feeds(config: PipelineConfig, name: str) -> list[tuple[str, str]]:
    """(key, step) for all that a step takes from other steps."""
    names = find_names(_read_document(config, name)[1])
    return [(key, run) for key, run in names if run in config.steps]


def _require_order(config: PipelineConfig) -> None:
    earlier: set[str] = set()
    for name in config.steps:
        for key, run in _feeds(config, name):
            if run not in earlier:
                raise ConfigError(
                    f"{key} of the step {name} takes from {run}, which is not an earlier step."
                )
        earlier.add(name)


def _adapters(config: PipelineConfig, pipeline: Path) -> dict[str, Path]:
    """By step, the adapter it left; a training of all weights leaves none."""
    folders = {
        name: _place(pipeline, name) / ADAPTERS[step.loop]
        for name, step in config.steps.items()
        if step.loop in ADAPTERS
    }
    return {n: folder for n, folder in folders.items() if (folder / "adapter_config.json").exists()}


def _plan(config: PipelineConfig, open_run: OpenRun, display: Display) -> RunPlan[PipelineReport]:
    """What is left when all steps have ended."""
    assert open_run.folder is not None
    pipeline = open_run.folder
    adapters = _adapters(config, pipeline)
    _require_unseen(
        config, {n: _read_step(config, n, _finder(config, pipeline)) for n in config.steps}
    )
    measured = config.report.model_copy(update={"adapters": tuple(map(str, adapters.values()))})

    def complete(report: EvaluationReport) -> PipelineReport:
        steps = tuple(_describe(config, name, pipeline) for name in config.steps)
        return PipelineReport(**{**report.model_dump(exclude={"kind"}), "steps": steps})

    return plan_evaluation(measured, display, names=[*adapters], complete=complete)


PIPELINE = RunKind("pipeline", config=PipelineConfig, finish=_finish, scored=())


def _describe(config: PipelineConfig, name: str, pipeline: Path) -> PipelineStep:
    path = _place(pipeline, name)
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


# Whether the tasks of the report are new to all steps.


def _require_unseen(config: PipelineConfig, steps: Mapping[str, Config]) -> None:
    """TaskError where a step has seen a task of the report, by its prompt."""
    taskset = load_taskset_file(config.report.taskset)
    tasks = taskset.split(config.report.split)[: config.report.limit]
    asked = {describe_task(task)["prompt"].strip() for task in tasks}
    for name, settings in steps.items():
        seen = asked & {prompt.strip() for prompt in _prompts(settings)}
        if seen:
            raise TaskError(
                f"{len(seen)} of {len(asked)} tasks of the report are among those of the step "
                f"{name}, {min(seen)[:60]!r} for one: give report.taskset others."
            )


def _prompts(settings: Config) -> Iterator[str]:
    match settings:
        case IcmConfig():
            yield from (item.text for item in read_items(settings.data))
        case GenomeConfig() | GrpoConfig():
            for taskset in load_tasksets(settings.tasksets):
                yield from (describe_task(task)["prompt"] for task in taskset.tasks)
        case SftRunConfig():
            taskset = load_taskset_file(settings.taskset)
            yield from (describe_task(task)["prompt"] for task in taskset.split(settings.split))
