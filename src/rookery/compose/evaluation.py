"""`evaluate`: measures a model and its adapters on a taskset, with intervals."""

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from pydantic import Field, model_validator

from rookery.compose.inputs import RunInputs, digest, digest_adapters, digest_scorers, join_digests
from rookery.compose.running import (
    Outcome,
    RunKind,
    RunOpener,
    RunPlan,
    finisher,
    new_run,
    open_shown_engine,
)
from rookery.config import Config, parse_config
from rookery.embedded import EngineConfig, resolve_model
from rookery.embedded.engine import check_int4
from rookery.engines import AnyEngineConfig, require_adapters
from rookery.errors import ConfigError, TaskError
from rookery.fleet import FleetConfig
from rookery.loops.comparison import ReportConfig, Samples, warn_of_batches, warn_of_precision
from rookery.ports import Engine
from rookery.remote import ServiceClientConfig
from rookery.reports import (
    AnswerRecord,
    Estimate,
    EvaluationReport,
    ModelRow,
    SampledRecord,
    TaskRecord,
    describe_task,
)
from rookery.rollout import BlockProgress, RolloutLog, TasksetEvaluator
from rookery.runs import Run
from rookery.runs.run_folder import in_folder, resolve_references
from rookery.runtime.concurrency import run_in_thread
from rookery.search.statistics import Strata, bootstrap_mean, paired_difference, proportion
from rookery.seeding import stream
from rookery.tasks.splits import question_of
from rookery.tasks.taskset import Taskset, load_taskset_file, options_start
from rookery.tasks.template import Template, load_template
from rookery.types import Adapter, Evaluation, Group, ModelRef, Rollout, Task
from rookery.ui.display import Display
from rookery.weights import read_adapter

__all__ = [
    "BASE",
    "EVALUATION",
    "EvaluationConfig",
    "Split",
    "anchored",
    "evaluate",
    "find_inputs",
    "model_row",
    "plan_evaluation",
    "read_inputs",
]

Completed = TypeVar("Completed", bound=EvaluationReport)
Split = Literal["all", "search", "select", "report"]
BASE = "base"
"""Name of the model without an adapter in reports."""
SHOWN_TASKS = 200
"""Maximum number of tasks whose answers are on the page."""
SHOWN_CHARACTERS = 2000
"""Maximum length of an answer on the page, in characters."""


class EvaluationConfig(Config):
    """Config of an evaluation."""

    model: str
    """A Hugging Face id, a local folder, or `smollm2`."""
    taskset: str
    """A file of rows, a taskset's file, hf://datasets/ID, or generated:NAME."""
    adapters: tuple[str, ...] = ()
    """PEFT folders to measure beside the model."""
    split: Split = "all"
    """The part of the taskset to answer."""
    limit: int | None = Field(default=None, ge=1)
    """Answer at most this many tasks of the split; null: all."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """The device to compute on; `auto` takes a GPU if there is one."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """`auto` is float32 on the CPU and the model's own type on a GPU."""
    weights: Literal["auto", "int4"] = "auto"
    """`int4` rounds the weights of linear layers to 4 bit, as in the embedded engine."""
    report: ReportConfig = ReportConfig()
    """`{samples: 8}` also draws 8 answers to each task, for pass@k. The temperature is that of the
    taskset's `sampling`, or 1 if that is greedy."""
    fleet: FleetConfig | None = None
    """The servers to run on; null: run in this process."""
    engine: ServiceClientConfig | None = None
    """A service to run on (`{type: service, url: ...}`); `model` is then read for its tokenizer."""

    @model_validator(mode="after")
    def _check_weights(self) -> Self:
        if self.fleet is not None and self.engine is not None:
            raise ValueError("fleet and engine are given: leave one of them out")
        if self.weights != "auto" and (self.fleet is not None or self.engine is not None):
            raise ValueError(
                f"weights is {self.weights}, and servers have their own weights: leave it out"
            )
        check_int4(self.weights, device=self.device, dtype=self.dtype)
        return self

    def from_folder(self, folder: Path) -> Self:
        """Make existing paths absolute, so that a run resumes from any folder."""
        is_short = self.model.lower() == "smollm2"
        return self.model_copy(
            update={
                "model": self.model if is_short else anchored(self.model, folder),
                "taskset": anchored(self.taskset, folder),
                "adapters": tuple(anchored(path, folder) for path in self.adapters),
            }
        )


def evaluate(
    model: str | Path,
    taskset: str | Path,
    *,
    adapters: Sequence[str | Path] = (),
    name: str = "",
    runs_dir: str | Path = "runs",
    progress: bool = True,
    **values: Any,
) -> Outcome[EvaluationReport]:
    """Measure a model and its adapters on a taskset: accuracy with a 95 % interval each.

    `evaluate("smollm2", "tasks.jsonl", adapters=["out/poet"])`; `values` are split, limit, device,
    dtype, weights, report, fleet (its config) and engine.
    """
    if isinstance(adapters, str | Path):
        raise ConfigError(f"adapters is {str(adapters)!r}; it should be a list of folders.")
    named = {"model": str(model), "taskset": str(taskset), "adapters": [*map(str, adapters)]}
    named = resolve_references(named, find=in_folder(runs_dir))
    document = {
        **named,
        **values,
    }
    config = parse_config(EvaluationConfig, document, origin="the evaluation")
    config = config.from_folder(Path.cwd())
    open_run = new_run(config, kind=EVALUATION.name, name=name, runs_dir=runs_dir)
    return EVALUATION.finish(config, open_run, Display(is_quiet=not progress))


def anchored(name: str, folder: Path) -> str:
    """Make an existing path absolute; return any other name unchanged. The name may end with
    options of a taskset's file: `rows.jsonl?bad_rows=skip`."""
    end = options_start(name, folder)
    path = folder / os.path.expanduser(name[:end])
    return f"{path.absolute()}{name[end:]}" if end and os.path.exists(path) else name


@dataclass(frozen=True, slots=True)
class _Inputs:
    """All inputs of an evaluation, checked before the run is created."""

    taskset: Taskset
    tasks: tuple[Task, ...]
    adapters: list[Adapter]
    folder: Path
    """The model's folder."""
    template: Template


def read_inputs(config: EvaluationConfig) -> _Inputs:
    """Read all inputs. Raises an error for one that cannot be measured."""
    taskset = load_taskset_file(config.taskset)
    tasks = taskset.split(config.split)[: config.limit]
    if not tasks:
        raise TaskError(f"{config.taskset} has no tasks in its {config.split} split.")
    adapters = [read_adapter(path) for path in config.adapters]
    folder = resolve_model(config.model).path
    return _Inputs(taskset, tasks, adapters, folder, load_template(folder))


def find_inputs(inputs: _Inputs) -> RunInputs:
    tasks = {inputs.taskset.name: digest(inputs.tasks)}
    adapters = {"adapters": digest_adapters(inputs.adapters)} if inputs.adapters else {}
    return RunInputs(
        digests=join_digests(tasks, adapters),
        models={"the model": inputs.folder},
        scorers=digest_scorers([inputs.taskset]),
    )


def _engine(config: EvaluationConfig, ranks: Collection[int]) -> AnyEngineConfig:
    """Return the engine's config with room for adapters of these ranks."""
    fleet = config.fleet
    if config.engine is not None:
        return config.engine
    if fleet is None:
        engine = EngineConfig(
            model=config.model, device=config.device, dtype=config.dtype, weights=config.weights
        )
        return engine.model_copy(update={"max_rank": max(engine.max_rank, *ranks, 0)})
    launch = fleet.launch
    with_model = None if launch is None else launch.model_copy(update={"model": config.model})
    return fleet.model_copy(update={"name": fleet.name or config.model, "launch": with_model})


def _plan(
    config: EvaluationConfig, open_run: RunOpener, display: Display
) -> RunPlan[EvaluationReport]:
    del open_run
    names = _names(config.adapters)
    return plan_evaluation(config, display, names=names, complete=lambda report: report)


def plan_evaluation(
    config: EvaluationConfig,
    display: Display,
    *,
    names: Sequence[str],
    complete: Callable[[EvaluationReport], Completed],
) -> RunPlan[Completed]:
    """Plan the measurement of a model and its adapters, called `names` in the report. `complete`
    turns the evaluation into the report that is written."""
    inputs = read_inputs(config)
    return RunPlan(
        inputs=find_inputs(inputs),
        opened=_open(config, inputs, display, names=[BASE, *names], complete=complete),
    )


EVALUATION = RunKind("eval", config=EvaluationConfig, finish=finisher(_plan), scored=())


@asynccontextmanager
async def _open(
    config: EvaluationConfig,
    inputs: _Inputs,
    display: Display,
    *,
    names: Sequence[str],
    complete: Callable[[EvaluationReport], Completed],
) -> AsyncIterator[Callable[[Run], Awaitable[Completed]]]:
    display.note(inputs.taskset.notes)
    ranks = {f"The rank of {adapter.name}": adapter.rank for adapter in inputs.adapters}
    engine_config = _engine(config, ranks.values())
    require_adapters(engine_config, ranks)
    async with open_shown_engine(engine_config, display) as engine:
        models = [engine.base, *[await engine.load(adapter) for adapter in inputs.adapters]]
        TasksetEvaluator(engine, template=inputs.template, tasksets=[inputs.taskset])

        async def measure(run: Run) -> Completed:
            report = complete(
                await _measure(run, config, inputs, engine, models, display, names=names)
            )
            document = report.model_dump(mode="json", exclude_none=True)
            await run_in_thread(run.write_json, "report.json", document)
            return report

        yield measure


async def _measure(
    run: Run,
    config: EvaluationConfig,
    inputs: _Inputs,
    engine: Engine,
    models: list[ModelRef],
    display: Display,
    *,
    names: Sequence[str],
) -> EvaluationReport:
    taskset, tasks = inputs.taskset, inputs.tasks
    log = RolloutLog(run)
    is_resumed = len(log) > 0 or log.has_answers
    with display.bar(taskset.name, total=len(models) * len(tasks), run=run) as bar:

        def advance(progress: BlockProgress) -> None:
            bar.advance(progress.num_rollouts, tokens=progress.num_tokens)

        evaluator = TasksetEvaluator(
            engine,
            template=inputs.template,
            tasksets=[taskset],
            log=log,
            on_progress=advance,
        )
        evaluations = await evaluator.evaluate(models, tasks)
    sampled: dict[str, SampledRecord] = {}
    if config.report.samples is not None:
        sampled = await Samples(config.report.samples).measure(
            evaluator,
            dict(zip(names, models, strict=True)),
            tasks,
            weights={taskset.name: 1.0},
            seed=0,
        )
    earned = {reward for each in evaluations for reward in each.rewards.values()}
    groups = await evaluator.rollout(models, tasks[:SHOWN_TASKS])  # read from the run's log
    return EvaluationReport(
        run=run.name,
        model=config.model,
        taskset=taskset.name,
        num_tasks=len(tasks),
        num_questions=len(set(map(question_of, tasks))),
        num_skipped_rows=taskset.skipped.num_skipped,
        warnings=_warnings(config, taskset, engine),
        models=tuple(
            model_row(name, evaluation, evaluations[0], tasks, earned).model_copy(
                update={"sampled": sampled.get(name)}
            )
            for name, evaluation in zip(names, evaluations, strict=True)
        ),
        tasks=_answered(groups, names=names),
        seconds=run.worked_s,
        tokens=_tokens(evaluator, {} if is_resumed else engine.token_counts),
    )


def _warnings(config: EvaluationConfig, taskset: Taskset, engine: Engine) -> tuple[str, ...]:
    precision = warn_of_precision(_engine(config, ()))
    return (*taskset.notes, *warn_of_batches(engine), *precision)


def _tokens(evaluator: TasksetEvaluator, counts: Mapping[str, int]) -> dict[str, int]:
    """Return the token counts of the engine or, after a resume, of the evaluator."""
    return dict(counts) or {"asked_and_answered": evaluator.num_tokens}


def _answered(groups: Sequence[Group], *, names: Sequence[str]) -> tuple[TaskRecord, ...]:
    """Return the tasks with each model's answer. `groups` are ordered by model, then by task."""
    num_tasks = len(groups) // len(names)
    return tuple(
        TaskRecord(
            task=groups[place].task.id,
            **describe_task(groups[place].task),
            answers=tuple(
                _answer(name, groups[model * num_tasks + place].rollouts[0])
                for model, name in enumerate(names)
            ),
        )
        for place in range(num_tasks)
    )


def _answer(name: str, rollout: Rollout) -> AnswerRecord:
    text = "" if rollout.completion is None else rollout.completion.text[:SHOWN_CHARACTERS]
    return AnswerRecord(name=name, text=text, reward=rollout.reward, error=rollout.error)


def _names(paths: tuple[str, ...]) -> tuple[str, ...]:
    """Return the folder names of the adapters, or their paths if names are not unique."""
    names = tuple(Path(path).name for path in paths)
    return names if len({BASE, *names}) == len(names) + 1 else paths


def model_row(
    name: str,
    evaluation: Evaluation,
    base: Evaluation,
    tasks: tuple[Task, ...],
    earned: Collection[float],
) -> ModelRow:
    """Return a model's row: mean with interval, and the paired difference to the base model.
    `earned` holds every reward that any of the models earned for any task."""
    scored = [t for t in tasks if t.id in evaluation.rewards]
    rewards = [evaluation.rewards[t.id] for t in scored]
    row = ModelRow(
        name=name,
        version=evaluation.model.version,
        num_scored=len(rewards),
        num_failed=len(evaluation.errors),
        first_error=next(iter(evaluation.errors.values()), ""),
    )
    if not rewards:
        return row
    limits = (min([0.0, *earned]), max([1.0, *earned]))
    if set(earned) <= {0.0, 1.0}:
        interval = proportion(list(map(bool, rewards)), clusters=list(map(question_of, scored)))
    else:
        rng = stream(0, "eval", name)
        interval = bootstrap_mean(rewards, rng=rng, strata=_one_source(scored), limits=limits)
    row = row.model_copy(
        update={"mean": interval.estimate, "low": interval.low, "high": interval.high}
    )
    both = [t for t in scored if t.id in base.rewards]
    if evaluation is base or not both:
        return row
    gain = paired_difference(
        [evaluation.rewards[t.id] for t in both],
        [base.rewards[t.id] for t in both],
        rng=stream(0, "gain", name),
        strata=_one_source(both),
        limits=limits,
    )
    gained = Estimate(mean=gain.estimate, low=gain.low, high=gain.high)
    return row.model_copy(update={"gain": gained})


def _one_source(tasks: Sequence[Task]) -> Strata:
    return Strata(names=("all",) * len(tasks), clusters=tuple(map(question_of, tasks)))
