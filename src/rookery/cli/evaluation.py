"""`rookery eval`: how good a model and its adapters are on a taskset, with intervals."""

import json
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter
from pydantic import Field
from rich.markup import escape

from rookery.cli.engine import open_sampler
from rookery.cli.runs import OpenRun, new_run
from rookery.cli.terminal import (
    console,
    fail,
    quiet_libraries,
    resumable,
    run_async,
    say,
    show_notes,
    token_progress,
)
from rookery.config import Config, load_config, parse_config
from rookery.errors import ConfigError, TaskError

if TYPE_CHECKING:
    from rookery.cli.engine import Engine
    from rookery.embedded import EngineConfig
    from rookery.fleet import FleetConfig
    from rookery.runs import Run
    from rookery.tasks.taskset import Taskset
    from rookery.tasks.template import Template
    from rookery.types import Adapter, Evaluation, ModelRef, Task

__all__ = ["EvalConfig", "evaluate", "resume_evaluation"]


class EvalConfig(Config):
    """What one evaluation measures."""

    model: str
    taskset: str
    adapters: tuple[str, ...] = ()
    split: Literal["all", "search", "select", "report"] = "all"
    limit: int | None = Field(default=None, ge=1)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    fleet: dict[str, Any] | None = None
    """The servers to run on, a FleetConfig's document; None computes in this process."""


def evaluate(
    model: str,
    taskset: str,
    *,
    adapter: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    split: Literal["all", "search", "select", "report"] = "all",
    limit: int | None = None,
    name: str = "",
    runs_dir: Path = Path("runs"),
    json_out: Annotated[bool, Parameter(name="--json", negative="")] = False,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    fleet: Annotated[tuple[str, ...], Parameter(negative="")] = (),
) -> int:
    """Measure a model, and adapters of it, on a taskset: accuracy with a 95 % interval each.

    All of them are answered in one batch. The run can be interrupted and resumed.

        rookery eval smollm2 tasks.jsonl
        rookery eval smollm2 generated:arithmetic --adapter out/poet --adapter out/judge
        rookery eval Qwen/Qwen3-8B tasks.jsonl --fleet configs/fleet/8b.yaml
        rookery eval Qwen/Qwen3-8B tasks.jsonl --fleet http://gpu1:8000

    Parameters
    ----------
    model
        A Hugging Face id, a local folder, or `smollm2`.
    taskset
        A file of rows, a .yaml or .toml taskset, hf://datasets/ID, or generated:NAME; values of
        its config may follow, FILE?bad_rows=skip.
    adapter
        A PEFT folder; give it once for each adapter.
    split
        Which part of the taskset to ask.
    limit
        Ask at most this many tasks of the split.
    name
        The run's name; made of the time when empty.
    runs_dir
        Where runs are kept.
    json_out
        Print the report as JSON instead of a table.
    device
        Where to compute; `auto` takes a GPU when there is one.
    dtype
        Number type; `auto` is float32 on the CPU.
    fleet
        URLs of vLLM servers that run this model, each with its own --fleet, or a config of servers
        to start for it; without any, this process computes.
    """
    given = {
        "model": _anchored(model) if model.lower() != "smollm2" else model,
        "taskset": _anchored(taskset),
        "adapters": [_anchored(path) for path in adapter],
        **{"split": split, "limit": limit, "device": device, "dtype": dtype},
        "fleet": _read_fleet(fleet),
    }
    config = parse_config(EvalConfig, given, origin="the command line")
    open_run = new_run(config, kind="eval", name=name, runs_dir=runs_dir)
    return _finish(config, open_run, json_out=json_out)


def resume_evaluation(run: "Run", config: EvalConfig) -> int:
    """Go on with an evaluation; prints its report and returns the exit code."""
    return _finish(config, lambda: nullcontext(run), json_out=False)


def _read_fleet(given: tuple[str, ...]) -> dict[str, Any] | None:
    """The servers that the command line names, checked."""
    from rookery.fleet import FleetConfig

    if not given:
        return None
    urls = tuple(word for word in given if word.startswith(("http://", "https://")))
    if urls and len(urls) < len(given):
        raise ConfigError(
            f"--fleet is given as {' and '.join(given)}; give URLs alone, or one config file."
        )
    if not urls and len(given) > 1:
        raise ConfigError(f"--fleet names {len(given)} config files; give one.")
    config = FleetConfig(urls=urls) if urls else load_config(FleetConfig, Path(given[0]))
    return config.model_dump(mode="json")


def _engine(config: EvalConfig) -> "EngineConfig | FleetConfig":
    from rookery.embedded import EngineConfig
    from rookery.fleet import FleetConfig

    if config.fleet is None:
        return EngineConfig(model=config.model, device=config.device, dtype=config.dtype)
    fleet = parse_config(FleetConfig, config.fleet, origin="the servers")
    launch = fleet.launch
    own = None if launch is None else launch.model_copy(update={"model": config.model})
    return fleet.model_copy(update={"name": fleet.name or config.model, "launch": own})


def _anchored(name: str) -> str:
    """A path to something that is there, made absolute: a run is resumed from any folder.

    A taskset's file may have options behind it: `rows.jsonl?bad_rows=skip`.
    """
    for end in (len(name), name.find("?")):
        path = Path(name[:end]).expanduser()
        if end > 0 and path.exists():
            return f"{path.absolute()}{name[end:]}"
    return name


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Everything an evaluation reads, checked before the run is made."""

    taskset: "Taskset"
    tasks: "tuple[Task, ...]"
    adapters: "list[Adapter]"
    template: "Template"


def _read_inputs(config: EvalConfig) -> _Inputs:
    from rookery.embedded import resolve_model
    from rookery.tasks.taskset import load_taskset_file
    from rookery.tasks.template import load_template
    from rookery.weights import read_adapter

    taskset = load_taskset_file(config.taskset)
    tasks = taskset.split(config.split)[: config.limit]
    if not tasks:
        raise TaskError(f"{config.taskset} has no tasks in its {config.split} split.")
    adapters = [read_adapter(path) for path in config.adapters]
    template = load_template(resolve_model(config.model).path)
    return _Inputs(taskset, tasks, adapters, template)


def _finish(config: EvalConfig, open_run: OpenRun, *, json_out: bool) -> int:
    quiet_libraries()
    inputs = _read_inputs(config)
    if not json_out:
        show_notes(inputs.taskset.notes)
    if not json_out and config.fleet is None:
        say(f"loading {config.model}")
    report, path = run_async(_evaluate(config, inputs, open_run, is_quiet=json_out))
    if json_out:
        console.print_json(json.dumps(report))
    else:
        _print_table(report, path)
    failures = [m for m in report["models"] if m["num_failed"]]
    for failed in failures:
        fail(f"{failed['name']}: {failed['num_failed']} tasks failed. {failed['first_error']}")
    return 2 if failures else 0


async def _evaluate(
    config: EvalConfig, inputs: _Inputs, open_run: OpenRun, *, is_quiet: bool
) -> tuple[dict[str, Any], Path]:
    """What can be refused is refused before the run is made."""
    from rookery.rollout import TasksetEvaluator

    async with open_sampler(_engine(config)) as engine:
        models = [engine.base, *[await engine.load(adapter) for adapter in inputs.adapters]]
        TasksetEvaluator(engine, template=inputs.template, tasksets=[inputs.taskset])
        with open_run() as run, resumable(run.path):
            report = await _measure(run, config, inputs, engine, models, is_quiet=is_quiet)
            run.write_json("report.json", report)
            run.finish("finished")
    return report, run.path


async def _measure(
    run: "Run",
    config: EvalConfig,
    inputs: _Inputs,
    engine: "Engine",
    models: "list[ModelRef]",
    *,
    is_quiet: bool,
) -> dict[str, Any]:
    from rookery.rollout import Progress, RolloutLog, TasksetEvaluator

    taskset, tasks = inputs.taskset, inputs.tasks
    with token_progress(is_quiet=is_quiet) as bar:
        line = bar.add_task(escape(taskset.name), total=len(models) * len(tasks), tokens=0)

        def advance(progress: Progress) -> None:
            tokens = bar.tasks[line].fields["tokens"] + progress.num_tokens
            bar.update(line, advance=progress.num_rollouts, tokens=tokens)

        evaluator = TasksetEvaluator(
            engine,
            template=inputs.template,
            tasksets=[taskset],
            log=RolloutLog(run),
            on_progress=advance,
        )
        evaluations = await evaluator.evaluate(models, tasks)
    names = ["base", *_names(config.adapters)]
    return {
        "model": config.model,
        "taskset": taskset.name,
        "num_tasks": len(tasks),
        "num_skipped_rows": taskset.skipped.num_skipped,
        "warnings": list(taskset.notes),
        "models": [
            _row(name, evaluation, evaluations[0], tasks)
            for name, evaluation in zip(names, evaluations, strict=True)
        ],
        "seconds": evaluations[0].seconds,
        "tokens": _tokens(engine, evaluator.num_tokens),
    }


def _tokens(engine: "Engine", num_tokens: int) -> dict[str, int]:
    """What was computed, as far as the engine tells."""
    from rookery.embedded import EmbeddedEngine

    if not isinstance(engine, EmbeddedEngine):
        return {"asked_and_answered": num_tokens}
    stats = engine.stats
    return {
        "prompt_asked": stats.requested_tokens,
        "prompt_computed": stats.prompt_tokens,
        "prompt_computed_below_adapters": stats.trunk_tokens,
        "decoded": stats.decoded_tokens,
    }


def _names(paths: tuple[str, ...]) -> tuple[str, ...]:
    """The folders' names where they tell the adapters apart, else their paths."""
    names = tuple(Path(path).name for path in paths)
    return names if len({"base", *names}) == len(names) + 1 else paths


def _row(
    name: str, evaluation: "Evaluation", base: "Evaluation", tasks: "tuple[Task, ...]"
) -> dict[str, Any]:
    """One model's line: mean with interval, and the paired difference to the base model."""
    from rookery.search.statistics import bootstrap_mean, paired_difference, wilson
    from rookery.seeding import stream

    rewards = [evaluation.rewards[t.id] for t in tasks if t.id in evaluation.rewards]
    row: dict[str, Any] = {
        "name": name,
        "version": evaluation.model.version,
        "num_scored": len(rewards),
        "num_failed": len(evaluation.errors),
        "first_error": next(iter(evaluation.errors.values()), ""),
    }
    if not rewards:
        return row
    if set(rewards) <= {0.0, 1.0}:
        interval = wilson(successes=int(sum(rewards)), trials=len(rewards))
    else:
        interval = bootstrap_mean(rewards, rng=stream(0, "eval", name))
    row |= {"mean": interval.estimate, "low": interval.low, "high": interval.high}
    both = [t.id for t in tasks if t.id in evaluation.rewards and t.id in base.rewards]
    if evaluation is not base and both:
        gain = paired_difference(
            [evaluation.rewards[i] for i in both],
            [base.rewards[i] for i in both],
            rng=stream(0, "gain", name),
        )
        row["gain"] = {"mean": gain.estimate, "low": gain.low, "high": gain.high}
    return row


def _print_table(report: dict[str, Any], path: Path) -> None:
    from rich.table import Table

    table = Table(title=escape(f"{report['taskset']}: {report['num_tasks']} tasks"))
    for column in ("model", "accuracy", "95 % interval", "gain over base", "failed"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for row in report["models"]:
        gain = row.get("gain")
        table.add_row(
            escape(row["name"]),
            f"{row['mean']:.3f}" if "mean" in row else "-",
            f"{row['low']:.3f} to {row['high']:.3f}" if "mean" in row else "-",
            f"{gain['mean']:+.3f} ({gain['low']:+.3f} to {gain['high']:+.3f})" if gain else "",
            str(row["num_failed"]),
        )
    console.print(table)
    tokens = report["tokens"]
    counts = (
        f"{tokens['prompt_asked']:,} prompt tokens asked, {tokens['prompt_computed']:,} computed, "
        f"{tokens['decoded']:,} decoded"
        if "decoded" in tokens
        else f"{tokens['asked_and_answered']:,} tokens asked and answered"
    )
    console.print(
        f"{report['seconds']:.1f} s; {counts}. Run: {path}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
