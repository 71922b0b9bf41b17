"""`run_grpo`: a policy trained from a reward, from its config to its report and page."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rookery.compose.grpo_policy import MakePolicy, adapter_policy, full_policy, start_folder
from rookery.compose.inputs_record import digest, require_same_inputs
from rookery.compose.running import (
    Given,
    OpenRun,
    Outcome,
    new_run,
    quiet_libraries,
    read_config,
    resumable,
    run_async,
)
from rookery.compose.sft import base_name
from rookery.concurrency import run_in_thread
from rookery.embedded import EngineConfig, run_engine
from rookery.embedded.folders import ModelFolder
from rookery.engines import OnLaunch, find_model, open_engine
from rookery.loops.grpo import GrpoConfig, GrpoInputs, Step, Watcher, train_policy
from rookery.loops.grpo.checks import check_inputs
from rookery.loops.grpo.policy_weights import POLICY, PolicyWeights
from rookery.ports import Engine
from rookery.reports import GrpoReport
from rookery.rollout import GroupSampler, RolloutLog, TasksetEvaluator
from rookery.runs import Run
from rookery.slots import SlottedModel, load_model
from rookery.tasks.splits import SPLITS
from rookery.tasks.taskset import Taskset, load_tasksets
from rookery.tasks.template import Template, load_template
from rookery.train import initial_adapter
from rookery.types import Adapter
from rookery.ui.display import Bar, Display
from rookery.ui.grpo import render_grpo_page
from rookery.weights import read_adapter

__all__ = ["finish_grpo", "run_grpo"]


def run_grpo(
    config: Given | GrpoConfig,
    *,
    name: str = "",
    runs_dir: str | Path = "runs",
    progress: bool = True,
    **values: Any,
) -> Outcome[GrpoReport]:
    """Train a policy from a reward, and report honestly how much better it has become.

    `run_grpo("configs/grpo_addition.yaml", seed=3)`; `values` are keys of the config. The folder of
    the outcome holds `trained` (a PEFT folder, or a model folder with `full`), `checkpoints`,
    `report.html`, `report.json` and everything to resume.
    """
    loaded = read_config(GrpoConfig, config, values)
    open_run = new_run(loaded, kind="grpo", name=name, runs_dir=runs_dir)
    return finish_grpo(loaded, open_run, Display(is_quiet=not progress))


def finish_grpo(config: GrpoConfig, open_run: OpenRun, display: Display) -> Outcome[GrpoReport]:
    """Take a training to its end, from its beginning or from where it was."""
    quiet_libraries()
    files = _read_files(config)
    display.note(note for taskset in files.tasksets for note in taskset.notes)
    return run_async(_train(config, files, open_run, display))


@dataclass(frozen=True, slots=True)
class _Files:
    """Everything that is read before a model is loaded."""

    tasksets: list[Taskset]
    folder: ModelFolder
    template: Template
    start: Path
    """The model that training begins with."""
    init: Adapter | None


def _read_files(config: GrpoConfig) -> _Files:
    tasksets = load_tasksets(config.tasksets)
    for taskset in tasksets:
        for name in SPLITS:
            taskset.split(name)  # refuses one that should have tasks and has none
    folder = find_model(config.engine, tokenizer=config.tokenizer)
    start, init = start_folder(config, folder), None
    if config.init_from is not None and config.full is None:
        init = read_adapter(config.init_from)
    return _Files(tasksets, folder, load_template(folder.path), start, init)


async def _train(
    config: GrpoConfig, files: _Files, open_run: OpenRun, display: Display
) -> Outcome[GrpoReport]:
    """What can be refused is refused before the run is made."""
    display.say(f"loading {files.folder.name}")
    with display.launching() as show:
        async with _open(config, files, show) as (engine, model):
            make_policy = await _checked_policy(config, files, engine, model)
            with open_run() as run, resumable(run.path, display):
                digests = {each.name: digest(each.tasks) for each in files.tasksets}
                await run_in_thread(require_same_inputs, run, digests)
                inputs = _inputs(config, files, engine, make_policy(run), run)
                report = await _finish(inputs, run, display)
    return Outcome(report, run.path)


@asynccontextmanager
async def _open(
    config: GrpoConfig, files: _Files, on_launch: OnLaunch
) -> AsyncIterator[tuple[Engine, SlottedModel]]:
    """The engine, and the model that the trainer computes with: the same one when shared."""
    folder, dtype = files.folder, "auto"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if isinstance(config.engine, EngineConfig):
        dtype = config.engine.dtype
        device = device if config.engine.device == "auto" else config.engine.device

    async def load() -> SlottedModel:
        return await asyncio.to_thread(
            load_model,
            files.start,
            device=device,
            dtype=dtype,
            names=folder.names,
            is_exact=config.share,
        )

    if config.share and isinstance(config.engine, EngineConfig):
        model = await load()
        async with run_engine(
            model, config=config.engine, detokenize=_decoder(files.template), name=folder.name
        ) as shared:
            yield shared, model
        return
    async with open_engine(config.engine, on_launch=on_launch) as engine:
        yield engine, await load()


async def _checked_policy(
    config: GrpoConfig, files: _Files, engine: Engine, model: SlottedModel
) -> MakePolicy:
    """What is to be trained; whatever would make the run fail is refused."""
    if config.full is not None:
        _check(config, files, engine, start=None)
        return await full_policy(config, files.folder, model=model, engine=engine)
    start = _start(config, files, model)
    _check(config, files, engine, start=start)
    return adapter_policy(config, start, model=model, engine=engine)


def _start(config: GrpoConfig, files: _Files, model: SlottedModel) -> Adapter:
    """The policy to begin with, refused when it does not fit the model."""
    base = base_name(files.folder.name)
    start = files.init or initial_adapter(
        model, config.lora, name=POLICY, base=base, seed=config.seed
    )
    start = replace(start, name=POLICY, base=start.base or base)
    model.bank.check(start, max_rank=max(start.rank, 1))
    return start


def _check(config: GrpoConfig, files: _Files, engine: Engine, *, start: Adapter | None) -> None:
    tasksets, template = files.tasksets, files.template
    evaluator = TasksetEvaluator(engine, template=template, tasksets=tasksets)
    _group_sampler(config, files, engine)  # refuses choices
    check_inputs(config, start=start, tasksets=tasksets, engine=engine, evaluator=evaluator)


def _group_sampler(config: GrpoConfig, files: _Files, engine: Engine) -> GroupSampler:
    params = config.drawing.params(group_size=config.group_size)
    return GroupSampler(engine, template=files.template, tasksets=files.tasksets, params=params)


def _inputs(
    config: GrpoConfig,
    files: _Files,
    engine: Engine,
    weights: PolicyWeights,
    run: Run,
) -> GrpoInputs:
    evaluator = TasksetEvaluator(
        engine, template=files.template, tasksets=files.tasksets, log=RolloutLog(run)
    )
    return GrpoInputs(
        config=config,
        weights=weights,
        tasksets=files.tasksets,
        engine=engine,
        sampler=_group_sampler(config, files, engine),
        evaluator=evaluator,
    )


async def _finish(inputs: GrpoInputs, run: Run, display: Display) -> GrpoReport:
    with display.bar("train", total=inputs.config.steps) as bar:
        result = await train_policy(inputs, run=run, watcher=_watcher(bar, display))
    page = await asyncio.to_thread(render_grpo_page, result.report)
    await run_in_thread(run.write_text, "report.html", page)
    await run_in_thread(run.finish, "finished")
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
