"""`run_pipeline`: loops that feed each other, and one report over all of them.

    steps:
      labels: {loop: icm, config: icm.yaml}
      student: {loop: sft, values: {model: smollm2, taskset: "run:labels/sft.jsonl", split: all}}
    report: {model: smollm2, taskset: held_out.jsonl}

Each step is an ordinary run beside the pipeline's own, called PIPELINE.STEP: it is shown, inspected
and resumed as any other. `run:STEP/PART` is what an earlier step left. When all have ended, the
base model and the adapter of every step answer tasks that no step has seen.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Self

from pydantic import Field, field_validator

from rookery.compose.evaluation import (
    BASE,
    EvaluationConfig,
    find_inputs,
    plan_evaluation,
    read_inputs,
)
from rookery.compose.evolve_inputs import EvolveRunConfig
from rookery.compose.inputs import InputReader, IsMade, RunInputs, is_among, load_not_made
from rookery.compose.running import (
    ConfigSource,
    Outcome,
    RunKind,
    RunOpener,
    RunPlan,
    StartedOn,
    finisher,
    is_run,
    require_same,
)
from rookery.compose.sft import SftRunConfig
from rookery.compose.steps import (
    ADAPTERS,
    StepConfig,
    StepsConfig,
    describe_step,
    feeds,
    has_begun,
    place_of,
    read_step,
    read_step_inputs,
    require_order,
    require_places,
    take_steps,
)
from rookery.config import Config
from rookery.embedded import EngineConfig
from rookery.errors import (
    AdapterError,
    ConfigError,
    EngineError,
    ModelError,
    TaskError,
    TrainError,
)
from rookery.loops.genome import GenomeConfig
from rookery.loops.grpo import GrpoConfig
from rookery.loops.icm import IcmConfig, read_items
from rookery.model_names import model_names
from rookery.paths import expanded
from rookery.reports import EvaluationReport, PipelineReport, PipelineStep
from rookery.runs import Run
from rookery.runtime.concurrency import run_in_thread
from rookery.tasks.taskset import load_taskset_file
from rookery.types import Message
from rookery.ui.display import Display

__all__ = ["PIPELINE", "PipelineConfig", "run_pipeline"]


class PipelineConfig(StepsConfig):
    """Loops in their order, and what all of them are measured on."""

    steps: dict[str, StepConfig] = Field(min_length=1)
    """By name, in their order."""
    report: EvaluationConfig | None = None
    """What the base model and every step's adapter answer: tasks that no step has seen. null: the
    steps' own reports are all."""

    @field_validator("report")
    @classmethod
    def _measures_the_steps(cls, report: EvaluationConfig | None) -> EvaluationConfig | None:
        if report is not None and report.adapters:
            raise ValueError(
                "report.adapters is set, and the report measures what the steps leave: leave it out"
            )
        return report

    def from_folder(self, folder: Path) -> Self:
        pipeline = super().from_folder(folder)
        report = None if pipeline.report is None else pipeline.report.from_folder(pipeline.folder)
        return pipeline.model_copy(update={"report": report})


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


def _finish(
    config: PipelineConfig, open_run: RunOpener, display: Display
) -> Outcome[PipelineReport]:
    """The steps one after the other, each as its own run; then the report."""
    place = open_run.folder or open_run.place or Path(PIPELINE.name)
    require_order(config)
    require_places(config, place)
    settings = {name: read_step(config, name, place, are_made=False) for name in config.steps}
    inputs = _read_inputs(config, settings)
    _require_unseen(config, settings, are_made=False)
    _require_one_model(config, settings)
    same = _on_same_inputs(open_run, inputs)
    again = take_steps(lambda _: config, same, display, inputs=inputs, take=_take)
    if again.folder is not None and REPORT in inputs:
        again = replace(again, whole=StartedOn(again.folder, inputs[REPORT]))
    return finisher(_plan)(config, again, display)


REPORT = "the report"
"""Among the steps, whose names are one word."""
STEPS = "steps.json"
"""Digests of what steps and report read by themselves: who begins later begins with the same."""
UNREADABLE = (AdapterError, ConfigError, EngineError, ModelError, TaskError, TrainError)


def _read_inputs(config: PipelineConfig, settings: Mapping[str, Config]) -> dict[str, RunInputs]:
    """What each step and the report read that no step makes; refuses what cannot be read."""
    reader = InputReader()
    inputs = {name: read_step_inputs(config, name, each, reader) for name, each in settings.items()}
    if config.report is not None:
        read = replace(find_inputs(read_inputs(config.report)), scorers={})
        inputs[REPORT] = reader.digest(read)  # answers may be scored again
    return inputs


def _on_same_inputs(open_run: RunOpener, inputs: Mapping[str, RunInputs]) -> RunOpener:
    """The run with the digests of what its steps read. One whose steps have read something else, or
    were to read it, is refused now. A step that has begun is known by its own run: its answers may
    have been scored again."""
    if (folder := open_run.folder) is not None:
        known: Mapping[str, Mapping[str, str]] = {}
        if (folder / STEPS).exists():
            with Run.view(folder) as run:
                known = run.read_json(STEPS)
        is_rescored = open_run.rescored is not None
        for name, step in inputs.items():
            if not has_begun(place_of(folder, name), step, is_rescored=is_rescored):
                require_same(folder, known.get(name, step.all), step.all)

    @contextmanager
    def opened() -> Iterator[Run]:
        with open_run() as run:
            run.write_json(STEPS, {name: step.all for name, step in inputs.items()})
            yield run

    return replace(open_run, open=opened)


def _take(run: Run, name: str, work: Callable[[], None]) -> None:
    """One that is refused, and so leaves no run, may begin with other data when they are mended."""
    try:
        work()
    except UNREADABLE:
        if not is_run(place_of(run.path, name)):
            known = run.read_json(STEPS)
            run.write_json(STEPS, {step: each for step, each in known.items() if step != name})
        raise


def _adapters(config: PipelineConfig, pipeline: Path) -> dict[str, Path]:
    """By step, the adapter it left; a training of all weights leaves none."""
    folders = {
        name: place_of(pipeline, name) / ADAPTERS[step.loop]
        for name, step in config.steps.items()
        if step.loop in ADAPTERS
    }
    return {n: folder for n, folder in folders.items() if (folder / "adapter_config.json").exists()}


def _plan(config: PipelineConfig, open_run: RunOpener, display: Display) -> RunPlan[PipelineReport]:
    """What is left when all steps have ended."""
    assert open_run.folder is not None
    pipeline = open_run.folder
    if config.report is None:
        return RunPlan(inputs=RunInputs(), opened=_report_steps(config, pipeline))
    adapters = _adapters(config, pipeline)
    _require_unseen(config, {n: read_step(config, n, pipeline) for n in config.steps})
    measured = config.report.model_copy(update={"adapters": tuple(map(str, adapters.values()))})

    def complete(report: EvaluationReport) -> PipelineReport:
        steps = _describe_all(config, pipeline)
        return PipelineReport(**{**report.model_dump(exclude={"kind"}), "steps": steps})

    names = [place_of(pipeline, name).name if name == BASE else name for name in adapters]
    return plan_evaluation(measured, display, names=names, complete=complete)


@asynccontextmanager
async def _report_steps(
    config: PipelineConfig, pipeline: Path
) -> AsyncIterator[Callable[[Run], Awaitable[PipelineReport]]]:
    """Of a pipeline that measures nothing itself: what its steps say."""

    async def report_steps(run: Run) -> PipelineReport:
        steps = await run_in_thread(_describe_all, config, pipeline)
        report = PipelineReport(run=run.name, steps=steps, seconds=run.worked_s)
        document = report.model_dump(mode="json", exclude_none=True)
        await run_in_thread(run.write_json, "report.json", document)
        return report

    yield report_steps


PIPELINE = RunKind("pipeline", config=PipelineConfig, finish=_finish, scored=())


def _describe_all(config: PipelineConfig, pipeline: Path) -> tuple[PipelineStep, ...]:
    return tuple(describe_step(config, name, pipeline) for name in config.steps)


def _require_one_model(config: PipelineConfig, steps: Mapping[str, Config]) -> None:
    """ConfigError where the report would measure an adapter of another model, when all steps have
    ended."""
    if config.report is None:
        return
    names = _names_of(config.report.model)
    for name, settings in steps.items():
        match settings:
            case SftRunConfig(model=model):
                pass
            case GenomeConfig(engine=EngineConfig(model=model)):
                pass
            case GrpoConfig(engine=EngineConfig(model=model), full=None):
                pass
            case _:
                continue
        if not names & _names_of(model):
            raise ConfigError(
                f"The step {name} makes an adapter of {model}, and report.model is "
                f"{config.report.model}: an adapter is measured on its own model. Write the same "
                "in both, or leave report out."
            )


def _names_of(model: str) -> frozenset[str]:
    """A folder may be linked under another name."""
    return model_names(model, expanded(model).resolve().name)


# Whether the tasks of the report are new to all steps.


def _require_unseen(
    config: PipelineConfig, steps: Mapping[str, Config], *, are_made: bool = True
) -> None:
    """TaskError where a step has seen a task of the report, by its prompt. What other steps leave
    is not looked at if they are not `are_made`."""
    if config.report is None:
        return
    tasks = read_inputs(config.report).tasks  # refuses a model too, before the first step
    asked = {_words(task.prompt) for task in tasks}
    for name, settings in steps.items():
        made = [] if are_made else [key for key, _ in feeds(config, name)]
        seen = asked & set(map(_words, _prompts(settings, partial(is_among, made))))
        if seen:
            raise TaskError(
                f"{len(seen)} of {len(asked)} report tasks are also data of the step {name}, "
                f"such as {min(seen)[:60]!r}: give report.taskset other tasks."
            )


def _words(prompt: str | tuple[Message, ...]) -> str:
    """What is asked, whether as a text or as a chat, and under any system message."""
    if not isinstance(prompt, str):
        turns = [message for message in prompt if message.role != "system"]
        texts = [f"{turn.role}: {turn.content}" for turn in turns]
        prompt = turns[0].content if len(turns) == 1 else "\n\n".join(texts)
    return " ".join(prompt.split())


def _prompts(settings: Config, is_made: IsMade) -> Iterator[str | tuple[Message, ...]]:
    match settings:
        case IcmConfig() if not is_made("data.path"):
            yield from (item.text for item in read_items(settings.data))
        case GenomeConfig() | GrpoConfig():
            for taskset in load_not_made(settings.tasksets, is_made):
                yield from (task.prompt for task in taskset.tasks)
        case EvolveRunConfig():
            tasks = settings.settings.rookery.tasks
            if tasks is not None and not is_made("settings.rookery.tasks"):
                yield from (task.prompt for task in load_taskset_file(tasks.taskset).tasks)
        case SftRunConfig() if not is_made("taskset"):
            taskset = load_taskset_file(settings.taskset)
            yield from (task.prompt for task in taskset.split(settings.split))
