"""`run_icm`: a labelling from its config to its labels, report and page."""

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from rookery.compose.running import (
    ConfigSource,
    OpenRun,
    Outcome,
    RunKind,
    digest,
    digest_models,
    on_same_inputs,
    quiet_libraries,
    resumable,
    run_async,
    tracked,
    write_page,
)
from rookery.concurrency import run_in_thread
from rookery.embedded import EngineConfig
from rookery.engines import model_folder, open_sampler
from rookery.fleet.http.external import Codec
from rookery.loops.icm import (
    IcmConfig,
    IcmResult,
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
from rookery.ports import Engine
from rookery.reports import IcmReport
from rookery.runs import Run
from rookery.slots import find_device, load_model
from rookery.tasks.template import load_template
from rookery.train.sft import sft
from rookery.types import Adapter, Datum, ModelRef
from rookery.ui.display import Display
from rookery.ui.icm import render_icm_page
from rookery.weights import read_adapter

__all__ = ["ICM", "run_icm"]

Tuner = Callable[[Sequence[Datum]], Awaitable[ModelRef]]


def run_icm(
    config: ConfigSource | IcmConfig,
    *,
    name: str = "",
    runs_dir: str | Path = "runs",
    progress: bool = True,
    **values: Any,
) -> Outcome[IcmReport]:
    """Label items as a config says, and say honestly what the labels are worth.

    `run_icm("mine.yaml", num_chains=4)`; `values` are keys of the config. The
    folder of the outcome holds `labels.jsonl`, the exports for training, the report and its page.
    """
    return ICM.start(config, values, name=name, runs_dir=runs_dir, progress=progress)


def _finish(config: IcmConfig, open_run: OpenRun, display: Display) -> Outcome[IcmReport]:
    open_run = tracked(open_run, config.track)
    quiet_libraries()
    inputs = _read_inputs(config)
    open_run = on_same_inputs(open_run, _digests(inputs))
    return run_async(_label(config, inputs, open_run, display))


ICM = RunKind("icm", config=IcmConfig, finish=_finish)


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Everything the loop reads, checked before a run is made; the true labels are not kept."""

    items: list[Item]
    folder: Path
    """Of the model: its tokenizer."""
    encoder: Encoder
    init: Adapter | None
    """What training starts from; None: a new adapter."""


def _read_inputs(config: IcmConfig) -> _Inputs:
    items = read_items(config.data)
    read_gold(config.data, items)
    folder = model_folder(config.engine, tokenizer=config.tokenizer)
    start = None if config.iterate is None else config.iterate.sft.init_from
    init = None if start is None else read_adapter(start)
    return _Inputs(items, folder, load_encoder(folder), init)


def _digests(inputs: _Inputs) -> dict[str, str]:
    digests = {"items": digest(inputs.items)}
    if inputs.init is not None:
        digests["init_from"] = inputs.init.version
    return digests | digest_models({"the model": inputs.folder})


async def _label(
    config: IcmConfig, inputs: _Inputs, open_run: OpenRun, display: Display
) -> Outcome[IcmReport]:
    """What can be refused is refused before the run is made."""
    if isinstance(config.engine, EngineConfig):
        display.say(f"loading {config.engine.model}")
    codec = Codec(encode=inputs.encoder.encode, decode=load_template(inputs.folder).decode)
    with display.launching() as show:
        async with open_sampler(config.engine, codec=codec, on_launch=show) as sampler:
            labeller = Labeller(
                sampler=sampler,
                model=sampler.base,
                encoder=inputs.encoder,
                context_tokens=sampler.context_tokens or _context_tokens(inputs.folder),
            )
            await run_in_thread(check_batches, config, inputs.items, labeller=labeller)
            if inputs.init is not None:
                engine = cast(Engine, sampler)  # the config refuses to iterate on an API
                await engine.unload(await engine.load(inputs.init))  # refuses one of another model
            with open_run() as run, resumable(run.path, display):
                if config.iterate is not None:
                    tune = _tuner(run, config, cast(Engine, sampler), inputs)
                    labeller = replace(labeller, tune=tune)
                result = await _search(run, config, inputs, labeller, display)
                await write_page(run, render_icm_page, result.report)
    return Outcome(result.report, run.path)


def _context_tokens(folder: Path) -> int | None:
    """The longest prompt, as the model's config says."""
    path = folder / "config.json"
    if not path.is_file():
        return None
    document = json.loads(path.read_text(encoding="utf-8"))
    num_tokens = document.get("text_config", document).get("max_position_embeddings")
    return num_tokens if isinstance(num_tokens, int) else None


async def _search(
    run: Run, config: IcmConfig, inputs: _Inputs, labeller: Labeller, display: Display
) -> IcmResult:
    with display.bar("labelling", total=config.search.iterations) as bar:

        def stepped(now: ChainStep) -> None:
            step = now.step
            num_labelled = sum(x >= 0 for x in step.labels)
            text = (
                f"{num_labelled} of {now.num_items}, {step.num_frustrated} frustrated, "
                f"U {step.utility:.1f}"
            )
            bar.update(done=now.num_done, total=now.num_expected, tokens=now.num_tokens, name=text)

        return await label(
            config,
            items=inputs.items,
            labeller=labeller,
            run=run,
            gold=lambda: read_gold(config.data, inputs.items),
            on_step=stepped,
        )


def _tuner(run: Run, config: IcmConfig, engine: Engine, inputs: _Inputs) -> Tuner:
    """Training in this process, beside the engine; a resumed run finds what it trained before."""
    assert config.iterate is not None
    settings = config.iterate.sft

    async def tune(data: Sequence[Datum]) -> ModelRef:
        adapter = await sft(
            await run_in_thread(load_model, inputs.folder, device=find_device("auto")),
            data,
            settings,
            name="icm",
            base=engine.base.version,
            init=inputs.init,
            checkpoints=run.path / "training",
        )
        return await engine.load(adapter)

    return tune
