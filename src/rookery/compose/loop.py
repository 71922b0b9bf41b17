"""Runs a loop of `rookery.loops.contract`: opens its tasks and its engine, writes its report."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from rookery.compose.inputs import list_inputs
from rookery.compose.running import (
    RunKind,
    RunOpener,
    RunPlan,
    finisher,
    open_shown_engine,
    read_tasksets,
)
from rookery.engines import model_folder
from rookery.loops.comparison import describe_taskset
from rookery.loops.contract import Loop, LoopConfig, LoopInputs
from rookery.ports import Engine, Observer
from rookery.reports import LoopReport
from rookery.rollout import RolloutLog, TasksetEvaluator
from rookery.runs import Run
from rookery.runtime.concurrency import run_in_thread
from rookery.tasks.taskset import Taskset
from rookery.tasks.template import load_template
from rookery.ui.display import Bar, Display

__all__ = ["kind_of"]


def kind_of(name: str, loop: Loop[Any]) -> RunKind[Any, LoopReport]:
    return RunKind(
        name, config=loop.config, finish=finisher(partial(_plan, loop, name)), scored=loop.scored
    )


def _plan(
    loop: Loop[Any], name: str, config: LoopConfig, open_run: RunOpener, display: Display
) -> RunPlan[LoopReport]:
    del open_run
    tasksets = read_tasksets(config.tasksets, display)
    folder = model_folder(config.engine, tokenizer=config.tokenizer)

    @asynccontextmanager
    async def opened() -> AsyncIterator[Callable[[Run], Awaitable[LoopReport]]]:
        template = load_template(folder)
        async with open_shown_engine(config.engine, display) as engine:
            evaluator = partial(TasksetEvaluator, engine, template=template, tasksets=tasksets)
            evaluator()  # refuses tasks that this engine cannot answer

            async def work(run: Run) -> LoopReport:
                inputs = LoopInputs(
                    config=config, tasksets=tasksets, evaluator=evaluator(log=RolloutLog(run))
                )
                with display.bar(name, total=0, noun="step", run=run) as bar:
                    report = await loop.run(inputs, engine=engine, run=run, observer=_Shown(bar))
                written = report.model_copy(update=_about(name, config, tasksets, engine, run))
                document = written.model_dump(mode="json", exclude_none=True)
                await run_in_thread(run.write_json, "report.json", document)
                return written

            yield work

    return RunPlan(inputs=list_inputs(tasksets, {}, {"the model": folder}), opened=opened())


def _about(
    name: str, config: LoopConfig, tasksets: list[Taskset], engine: Engine, run: Run
) -> dict[str, Any]:
    """Return the fields that every loop's report has."""
    return {
        "kind": name,
        "run": run.name,
        "model": engine.base.version,
        "seed": config.seed,
        "tasksets": tuple(map(describe_taskset, tasksets)),
        "seconds": run.worked_s,
    }


class _Shown(Observer[Any]):
    """Shows phases and progress on a bar."""

    def __init__(self, bar: Bar) -> None:
        self._bar = bar

    def on_phase(self, name: str) -> None:
        self._bar.update(name=name)

    def on_progress(self, done: float, expected: float) -> None:
        self._bar.update(done=done, total=expected)
