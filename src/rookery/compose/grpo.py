"""`run_grpo`: a policy trained from a reward, from its config to its report and page."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

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
from rookery.environments import Game, GameEvaluator, GameSampler
from rookery.loops.grpo import GrpoConfig, GrpoInputs, Step, Watcher, train_policy
from rookery.loops.grpo.checkpoints import read_start
from rookery.loops.grpo.checks import check_inputs
from rookery.ports import Engine, Evaluator, GroupDrawer
from rookery.reports import GrpoReport
from rookery.rollout import GroupSampler, RolloutLog, TasksetEvaluator
from rookery.runs import Run
from rookery.slots import SlottedModel, load_model
from rookery.tasks.splits import SPLITS
from rookery.tasks.taskset import Taskset, load_tasksets
from rookery.tasks.template import Template, load_template
from rookery.train import AdapterPublisher, LoraTrainer, initial_adapter
from rookery.types import Adapter, SampleRequest
from rookery.ui.display import Bar, Display
from rookery.ui.grpo import render_grpo_page
from rookery.weights import read_adapter

__all__ = ["finish_grpo", "run_grpo"]

POLICY = "policy"
"""The name that versions of the policy are served by."""


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
    the outcome holds `trained` (a PEFT folder), `checkpoints`, `report.html`, `report.json` and
    everything to resume.
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
    init: Adapter | None


def _read_files(config: GrpoConfig) -> _Files:
    tasksets = load_tasksets(config.judged_tasksets)
    for taskset in tasksets:
        for name in SPLITS:
            taskset.split(name)  # refuses one that should have tasks and has none
    folder = find_model(config.engine, tokenizer=config.tokenizer)
    init = None if config.init_from is None else read_adapter(config.init_from)
    return _Files(tasksets, folder, load_template(folder.path), init)


async def _train(
    config: GrpoConfig, files: _Files, open_run: OpenRun, display: Display
) -> Outcome[GrpoReport]:
    """What can be refused is refused before the run is made."""
    display.say(f"loading {files.folder.name}")
    with display.launching() as show:
        async with _open(config, files, show) as (engine, model):
            start = _start(config, files, model)
            _check(config, files, engine, start)
            await _try_drawing(config, files, engine)
            with open_run() as run, resumable(run.path, display):
                digests = {each.name: digest(each.tasks) for each in files.tasksets}
                await run_in_thread(require_same_inputs, run, digests)
                start = replace(read_start(run) or start, name=POLICY)
                inputs = _inputs(config, files, engine, start, model, run)
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
            load_model, folder.path, device=device, dtype=dtype, names=folder.names
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


def _start(config: GrpoConfig, files: _Files, model: SlottedModel) -> Adapter:
    """The policy to begin with, refused when it does not fit the model."""
    base = base_name(files.folder.name)
    start = files.init or initial_adapter(
        model, config.lora, name=POLICY, base=base, seed=config.seed
    )
    start = replace(start, name=POLICY, base=start.base or base)
    model.bank.check(start, max_rank=max(start.rank, 1))
    return start


def _check(config: GrpoConfig, files: _Files, engine: Engine, start: Adapter) -> None:
    tasksets, template = files.tasksets, files.template
    has_game = config.environment is not None
    evaluator = None if has_game else TasksetEvaluator(engine, template=template, tasksets=tasksets)
    _drawer(config, files, engine)  # refuses choices, and games that cannot be played
    check_inputs(config, start=start, tasksets=tasksets, engine=engine, evaluator=evaluator)


async def _try_drawing(config: GrpoConfig, files: _Files, engine: Engine) -> None:
    """Draw a token with top_p, top_k and min_p: servers may not tell what they draw from."""
    params = replace(config.drawing.params(group_size=1), max_tokens=1)
    if params.is_cut:
        prompt = files.template.encode(files.tasksets[0].tasks[0])
        await engine.sample([SampleRequest(model=engine.base, prompt=prompt, params=params)])


def _drawer(config: GrpoConfig, files: _Files, engine: Engine) -> GroupDrawer:
    params = config.drawing.params(group_size=config.group_size)
    if config.environment is not None:
        game = Game(config.environment, template=files.template)
        return GameSampler(game, engine=engine, params=params)
    return GroupSampler(engine, template=files.template, tasksets=files.tasksets, params=params)


def _evaluator(config: GrpoConfig, files: _Files, engine: Engine, log: RolloutLog) -> Evaluator:
    if config.environment is not None:
        game = Game(config.environment, template=files.template)
        return GameEvaluator(game, sampler=engine, tasksets=files.tasksets, log=log)
    return TasksetEvaluator(engine, template=files.template, tasksets=files.tasksets, log=log)


def _inputs(
    config: GrpoConfig,
    files: _Files,
    engine: Engine,
    start: Adapter,
    model: SlottedModel,
    run: Run,
) -> GrpoInputs:
    return GrpoInputs(
        config=config,
        start=start,
        tasksets=files.tasksets,
        engine=engine,
        trainer=LoraTrainer(model, config=config.trainer, publisher=AdapterPublisher(engine)),
        drawer=_drawer(config, files, engine),
        evaluator=_evaluator(config, files, engine, RolloutLog(run)),
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
