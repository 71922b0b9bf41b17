"""`run_pipeline`: runs loops that feed each other, and reports on all of them.

    steps:
      labels: {loop: icm, config: icm.yaml}
      student: {loop: sft, values: {model: smollm2, taskset: "run:labels/sft.jsonl", split: all}}
    report: {model: smollm2, taskset: held_out.jsonl}

Each step is an ordinary run named PIPELINE.STEP: it is shown, inspected and resumed like any other.
`run:STEP/PART` refers to the output of an earlier step. After the last step, the base model and
every step's adapter answer tasks that no step has seen.
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
    """Loops in order, and the evaluation that compares their results."""

    steps: dict[str, StepConfig] = Field(min_length=1)
    """Steps by name, in the order in which they run."""
    report: EvaluationConfig | None = None
    """The evaluation of the base model and every step's adapter, on tasks that no step has seen.
    null: the report contains only the steps' own results."""

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
    """Run loops that feed each other, and measure their adapters on unseen tasks.

    `run_pipeline("flywheel.yaml", name="flywheel")`. Each step is the run `flywheel.STEP`.
    """
    return PIPELINE.start(config, {}, name=name, runs_dir=runs_dir, progress=progress)


def _finish(
    config: PipelineConfig, open_run: RunOpener, display: Display
) -> Outcome[PipelineReport]:
    """Run the steps in order, each as its own run, then the report."""
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
"""Key of the report's inputs among the steps. Step names are single words, so it is unique."""
STEPS = "steps.json"
"""File with the digests of all external inputs. A step that begins later must match them."""
UNREADABLE = (AdapterError, ConfigError, EngineError, ModelError, TaskError, TrainError)


def _read_inputs(config: PipelineConfig, settings: Mapping[str, Config]) -> dict[str, RunInputs]:
    """Digest the external inputs of each step and the report. Refuses unreadable inputs."""
    reader = InputReader()
    inputs = {name: read_step_inputs(config, name, each, reader) for name, each in settings.items()}
    if config.report is not None:
        read = replace(find_inputs(read_inputs(config.report)), scorers={})
        inputs[REPORT] = reader.digest(read)  # no scorers: answers may be scored again
    return inputs


def _on_same_inputs(open_run: RunOpener, inputs: Mapping[str, RunInputs]) -> RunOpener:
    """Return an opener that records the digests of all steps' inputs. If the inputs of a step that
    has not begun differ from the recorded digests, refuse now. A step that has begun is checked
    against its own run, because its answers may have been rescored."""
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
    """Run a step. If it is refused before it has a run, forget its digests: its data may change."""
    try:
        work()
    except UNREADABLE:
        if not is_run(place_of(run.path, name)):
            known = run.read_json(STEPS)
            run.write_json(STEPS, {step: each for step, each in known.items() if step != name})
        raise


def _adapters(config: PipelineConfig, pipeline: Path) -> dict[str, Path]:
    """Return the adapter folders by step. A full-weight training has none."""
    folders = {
        name: place_of(pipeline, name) / ADAPTERS[step.loop]
        for name, step in config.steps.items()
        if step.loop in ADAPTERS
    }
    return {n: folder for n, folder in folders.items() if (folder / "adapter_config.json").exists()}


def _plan(config: PipelineConfig, open_run: RunOpener, display: Display) -> RunPlan[PipelineReport]:
    """Plan the report, after all steps have ended."""
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
    """Yield what reports the steps' own results, for a pipeline without an evaluation."""

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
    """Raise ConfigError if a step's adapter has another base model than the report measures."""
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
    """Names of a model. A linked folder also has the name of its target."""
    return model_names(model, expanded(model).resolve().name)


# Check that no step has seen the report's tasks.


def _require_unseen(
    config: PipelineConfig, steps: Mapping[str, Config], *, are_made: bool = True
) -> None:
    """Raise TaskError if a step has seen a report prompt. Steps' outputs are read if `are_made`."""
    if config.report is None:
        return
    tasks = read_inputs(config.report).tasks  # also refuses a missing model before the first step
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
    """Return the words of a prompt, equal for a text and a chat, without system messages."""
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
