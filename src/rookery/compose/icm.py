"""`run_icm`: runs a labelling, from its config to its labels, report and page."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from rookery.compose.elsewhere import forget_states, sft_elsewhere
from rookery.compose.inputs import IsMade, RunInputs, digest
from rookery.compose.running import ConfigSource, Outcome, RunKind, RunOpener, RunPlan, finisher
from rookery.engines import model_folder, open_sampler
from rookery.fleet.http.external import TextCodec
from rookery.loops.comparison import warn_of_batches, warn_of_precision
from rookery.loops.icm import (
    IcmConfig,
    IcmInputs,
    Labeller,
    check_batches,
    label,
    load_encoder,
    read_gold,
    read_items,
)
from rookery.loops.icm.items import Item
from rookery.loops.icm.loop import ChainStep
from rookery.loops.icm.prompts import Encoder
from rookery.ports import Engine, Observer, Sampler
from rookery.reports import IcmReport
from rookery.runs import Run
from rookery.runtime.concurrency import run_in_thread
from rookery.slots import find_device, load_model
from rookery.tasks.template import load_template
from rookery.train.sft import sft
from rookery.types import Adapter, Datum, ModelRef
from rookery.ui.display import Bar, Display
from rookery.weights import read_adapter

__all__ = ["ICM", "run_icm"]

TRAINING = "training"
Tuner = Callable[[Sequence[Datum]], Awaitable[ModelRef]]


def run_icm(
    config: ConfigSource | IcmConfig,
    *,
    name: str = "",
    runs_dir: str | Path = "runs",
    progress: bool = True,
    **values: Any,
) -> Outcome[IcmReport]:
    """Label items without labels, and measure the result against baselines.

    `run_icm("mine.yaml", num_chains=4)`; `values` are keys of the config. The folder of the
    outcome holds `labels.jsonl`, the exports for training, the report and its page.
    """
    return ICM.start(config, values, name=name, runs_dir=runs_dir, progress=progress)


@dataclass(frozen=True, slots=True)
class _Inputs:
    """All inputs of the loop, checked before the run is created. True labels are not kept."""

    items: list[Item]
    folder: Path
    """The model's folder, for its tokenizer."""
    encoder: Encoder
    init: Adapter | None
    """Adapter that training starts from; None: a new one."""


def _read_inputs(config: IcmConfig) -> _Inputs:
    items = read_items(config.data)
    read_gold(config.data, items)
    folder = model_folder(config.engine, tokenizer=config.tokenizer)
    start = None if config.iterate is None else config.iterate.sft.init_from
    init = None if start is None else read_adapter(start)
    return _Inputs(items, folder, load_encoder(folder), init)


def _plan(config: IcmConfig, open_run: RunOpener, display: Display) -> RunPlan[IcmReport]:
    del open_run
    inputs = _read_inputs(config)
    digests = {"items": digest(inputs.items)}
    if inputs.init is not None:
        digests["init_from"] = inputs.init.version
    read = RunInputs(digests=digests, models={"the model": inputs.folder})
    return RunPlan(inputs=read, opened=_open(config, inputs, display))


def _read_step_inputs(config: IcmConfig, is_made: IsMade) -> RunInputs:
    digests, models = {}, {}
    if not is_made("data.path"):
        items = read_items(config.data)
        if not is_made("data.gold"):
            read_gold(config.data, items)
        digests["items"] = digest(items)
    start = None if config.iterate is None else config.iterate.sft.init_from
    if start is not None and not is_made("iterate"):
        digests["init_from"] = read_adapter(start).version
    if not is_made("engine", "tokenizer"):
        models["the model"] = model_folder(config.engine, tokenizer=config.tokenizer)
    return RunInputs(digests=digests, models=models)


ICM = RunKind(
    "icm",
    config=IcmConfig,
    finish=finisher(_plan, track=lambda config: config.track),
    inputs=_read_step_inputs,
)


@asynccontextmanager
async def _open(
    config: IcmConfig, inputs: _Inputs, display: Display
) -> AsyncIterator[Callable[[Run], Awaitable[IcmReport]]]:
    if config.engine.type == "embedded":
        display.say(f"loading {config.engine.model}")
    codec = TextCodec(encode=inputs.encoder.encode, decode=load_template(inputs.folder).decode)
    with display.launching() as show:
        async with open_sampler(config.engine, codec=codec, on_launch=show) as sampler:
            labeller = Labeller(
                sampler=sampler,
                model=sampler.base,
                encoder=inputs.encoder,
                context_tokens=sampler.context_tokens or _context_tokens(inputs.folder),
                is_remote=config.engine.type != "embedded",
                notes=_notes(config, sampler),
            )
            await run_in_thread(check_batches, config, inputs.items, labeller=labeller)
            if inputs.init is not None:
                engine = cast(Engine, sampler)  # the config refuses to iterate on an API
                await engine.unload(await engine.load(inputs.init))  # refuses a misfit
            yield partial(_search, config=config, inputs=inputs, labeller=labeller, display=display)


def _notes(config: IcmConfig, sampler: Sampler) -> tuple[str, ...]:
    if config.engine.type == "external":
        return ()
    return (*warn_of_batches(cast(Engine, sampler)), *warn_of_precision(config.engine))


def _context_tokens(folder: Path) -> int | None:
    """Return the maximum prompt length in tokens, from the model's config."""
    path = folder / "config.json"
    if not path.is_file():
        return None
    document = json.loads(path.read_text(encoding="utf-8"))
    num_tokens = document.get("text_config", document).get("max_position_embeddings")
    return num_tokens if isinstance(num_tokens, int) else None


async def _search(
    run: Run, *, config: IcmConfig, inputs: _Inputs, labeller: Labeller, display: Display
) -> IcmReport:
    if config.iterate is not None:
        tune = _tuner(run, config, cast(Engine, labeller.sampler), inputs)
        labeller = replace(labeller, tune=tune)
    with display.bar("labelling", total=None, noun="prompt token", run=run) as bar:
        loop_inputs = IcmInputs(
            config=config,
            items=inputs.items,
            gold=lambda: read_gold(config.data, inputs.items),
        )
        report = await label(loop_inputs, engine=labeller, run=run, observer=_LabelBar(bar))
    if config.engine.type == "service" and config.iterate is not None:
        await forget_states(config.engine, run.path / TRAINING)
    return report


class _LabelBar(Observer[ChainStep]):
    """Shows all chains on one progress bar."""

    def __init__(self, bar: Bar) -> None:
        self._bar = bar

    def on_step(self, step: ChainStep) -> None:
        decision = step.step
        num_labelled = sum(x >= 0 for x in decision.labels)
        text = (
            f"{num_labelled} of {step.num_items}, {decision.num_frustrated} frustrated, "
            f"U {decision.utility:.1f}"
        )
        self._bar.update(tokens=step.num_tokens, name=text)

    def on_progress(self, done: float, expected: float) -> None:
        """Show the computed prompt tokens."""
        self._bar.update(done=done, total=expected)


def _tuner(run: Run, config: IcmConfig, engine: Engine, inputs: _Inputs) -> Tuner:
    """Return the training: on the service if that is the engine, else in this process. A resumed
    run continues from its checkpoints."""
    assert config.iterate is not None
    settings, service = config.iterate.sft, config.engine

    async def tune(data: Sequence[Datum]) -> ModelRef:
        base, place = engine.base.version, run.path / TRAINING
        adapter = (
            await sft_elsewhere(
                service, data, settings, name="icm", base=base, init=inputs.init, checkpoints=place
            )
            if service.type == "service"
            else await sft(
                await run_in_thread(load_model, inputs.folder, device=find_device("auto")),
                data,
                settings,
                name="icm",
                base=base,
                init=inputs.init,
                checkpoints=place,
            )
        )
        return await engine.load(adapter)

    return tune
