"""`run_grpo`: a policy trained from a reward, from its config to its report and page."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rookery.compose.inputs import read_tasksets
from rookery.compose.running import (
    ConfigSource,
    OpenRun,
    Outcome,
    RunKind,
    quiet_libraries,
    resumable,
    run_async,
    write_page,
)
from rookery.compose.sft import base_name
from rookery.embedded import EngineConfig, run_engine
from rookery.embedded.folders import ModelFolder
from rookery.engines import OnLaunch, find_model, open_engine
from rookery.loops.grpo import GrpoConfig, GrpoInputs, Step, Watcher, train_policy
from rookery.loops.grpo.checkpoints import read_start
from rookery.loops.grpo.checks import check_inputs
from rookery.ports import Engine
from rookery.reports import GrpoReport
from rookery.rollout import GroupSampler, RolloutLog, TasksetEvaluator
from rookery.runs import Run
from rookery.slots import SlottedModel, load_model
from rookery.tasks.taskset import Taskset
from rookery.tasks.template import Template, load_template
from rookery.train import AdapterPublisher, LoraTrainer, initial_adapter
from rookery.types import Adapter
from rookery.ui.display import Bar, Display
from rookery.ui.grpo import render_grpo_page
from rookery.weights import read_adapter

__all__ = ["GRPO", "run_grpo"]

POLICY = "policy"
"""The name that versions of the policy are served by."""


def run_grpo(
    config: ConfigSource | GrpoConfig,
    *,
    name: str = "",
    runs_dir: str | Path = "runs",
    progress: bool = True,
    **values: Any,
) -> Outcome[GrpoReport]:
    """Train a policy from a reward, and report honestly how much better it has become.

    `run_grpo("configs/grpo_addition.yaml", seed=3)`; `values` are keys of the config. The folder of
    the outcome holds `trained` (a PEFT folder), `checkpoints`, `report.html`, `report.json` and
    everything to resume.
    """
    return GRPO.start(config, values, name=name, runs_dir=runs_dir, progress=progress)


def _finish(config: GrpoConfig, open_run: OpenRun, display: Display) -> Outcome[GrpoReport]:
    quiet_libraries()
    return run_async(_train(config, _read_inputs(config, display), open_run, display))


GRPO = RunKind("grpo", config=GrpoConfig, finish=_finish)


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Everything that is read before a model is loaded."""

    tasksets: list[Taskset]
    folder: ModelFolder
    template: Template
    init: Adapter | None


def _read_inputs(config: GrpoConfig, display: Display) -> _Inputs:
    tasksets = read_tasksets(config.tasksets, display)
    folder = find_model(config.engine, tokenizer=config.tokenizer)
    init = None if config.init_from is None else read_adapter(config.init_from)
    return _Inputs(tasksets, folder, load_template(folder.path), init)


async def _train(
    config: GrpoConfig, inputs: _Inputs, open_run: OpenRun, display: Display
) -> Outcome[GrpoReport]:
    """What can be refused is refused before the run is made."""
    display.say(f"loading {inputs.folder.name}")
    with display.launching() as show:
        async with _open(config, inputs, show) as (engine, model):
            start = _start(config, inputs, model)
            _check(config, inputs, engine, start)
            with open_run() as run, resumable(run.path, display):
                start = replace(read_start(run) or start, name=POLICY)
                loop_inputs = _loop_inputs(config, inputs, engine, start, model, run)
                report = await _run(loop_inputs, run, display)
    return Outcome(report, run.path)


@asynccontextmanager
async def _open(
    config: GrpoConfig, inputs: _Inputs, on_launch: OnLaunch
) -> AsyncIterator[tuple[Engine, SlottedModel]]:
    """The engine, and the model that the trainer computes with: the same one when shared."""
    folder, dtype = inputs.folder, "auto"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if isinstance(config.engine, EngineConfig):
        dtype = config.engine.dtype
        device = device if config.engine.device == "auto" else config.engine.device

    async def load() -> SlottedModel:
        return await asyncio.to_thread(
            load_model, folder.path, device=device, dtype=dtype, names=folder.names
        )

    if config.share and isinstance(config.engine, EngineConfig):
        model = await load()
        async with run_engine(
            model, config=config.engine, detokenize=_decoder(inputs.template), name=folder.name
        ) as shared:
            yield shared, model
        return
    async with open_engine(config.engine, on_launch=on_launch) as engine:
        yield engine, await load()


def _start(config: GrpoConfig, inputs: _Inputs, model: SlottedModel) -> Adapter:
    """The policy to begin with, refused when it does not fit the model."""
    base = base_name(inputs.folder.name)
    start = inputs.init or initial_adapter(
        model, config.lora, name=POLICY, base=base, seed=config.seed
    )
    start = replace(start, name=POLICY, base=start.base or base)
    model.bank.check(start, max_rank=max(start.rank, 1))
    return start


def _check(config: GrpoConfig, inputs: _Inputs, engine: Engine, start: Adapter) -> None:
    tasksets, template = inputs.tasksets, inputs.template
    evaluator = TasksetEvaluator(engine, template=template, tasksets=tasksets)
    _group_sampler(config, inputs, engine)  # refuses choices
    check_inputs(config, start=start, tasksets=tasksets, engine=engine, evaluator=evaluator)


def _group_sampler(config: GrpoConfig, inputs: _Inputs, engine: Engine) -> GroupSampler:
    params = config.drawing.params(group_size=config.group_size)
    return GroupSampler(engine, template=inputs.template, tasksets=inputs.tasksets, params=params)


def _loop_inputs(
    config: GrpoConfig,
    inputs: _Inputs,
    engine: Engine,
    start: Adapter,
    model: SlottedModel,
    run: Run,
) -> GrpoInputs:
    evaluator = TasksetEvaluator(
        engine, template=inputs.template, tasksets=inputs.tasksets, log=RolloutLog(run)
    )
    return GrpoInputs(
        config=config,
        start=start,
        tasksets=inputs.tasksets,
        engine=engine,
        trainer=LoraTrainer(model, config=config.trainer, publisher=AdapterPublisher(engine)),
        sampler=_group_sampler(config, inputs, engine),
        evaluator=evaluator,
    )


async def _run(inputs: GrpoInputs, run: Run, display: Display) -> GrpoReport:
    with display.bar("train", total=inputs.config.steps) as bar:
        result = await train_policy(inputs, run=run, watcher=_watcher(bar, display))
    await write_page(run, render_grpo_page, result.report)
    return result.report


def _watcher(bar: Bar, display: Display) -> Watcher:
    def stepped(step: Step) -> None:
        tokens = int(step.metrics["grpo/num_drawn_tokens"])
        bar.advance(0, tokens=tokens)
        bar.update(done=step.step + 1)
        display.say(_step_line(step))

    return Watcher(on_step=stepped, on_phase=lambda name: bar.update(name=name))


def _step_line(step: Step) -> str:
    def show(name: str, digits: str) -> str:
        value = step.metrics.get(name)
        return "-" if value is None else format(value, digits)

    return (
        f"step {step.step:>4}   reward {show('reward/mean', '.3f')}   "
        f"gap {show('grpo/logprob_gap', '.1e')}   "
        f"{show('grpo/num_groups', '.0f')} groups, {show('grpo/num_equal_groups', '.0f')} equal"
    )


def _decoder(template: Template) -> Any:
    return lambda tokens: template.decode(tuple(tokens))
