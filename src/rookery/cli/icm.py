"""`rookery icm run`: label data that has no labels, as a config says."""

import asyncio
import json
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import cyclopts
from cyclopts import Parameter

from rookery.cli.engine import model_folder, open_sampler
from rookery.cli.runs import OpenRun, new_run, open_again
from rookery.cli.terminal import (
    check_flags,
    console,
    paths_from_here,
    quiet_libraries,
    resumable,
    run_async,
    say,
    token_progress,
)
from rookery.config import load_config, parse_config
from rookery.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from contextlib import AbstractAsyncContextManager

    from rookery.loops.icm import Bench, IcmConfig, IcmResult
    from rookery.loops.icm.items import Item
    from rookery.loops.icm.prompts import Encoder
    from rookery.runs import Run
    from rookery.types import Datum, ModelRef

    Tuner = Callable[[Sequence[Datum]], Awaitable[ModelRef]]

__all__ = ["icm", "resume_icm"]

PATHS = ("data.path", "data.gold.path")
"""Flags that name files."""

icm = cyclopts.App(name="icm", help="Label data without labels, by internal coherence.")


@icm.command(name="run")
def run_command(
    config: Path,
    *overrides: Annotated[str, Parameter(allow_leading_hyphen=True, show=False)],
    name: str = "",
    runs_dir: Path = Path("runs"),
    resume: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Label the items of a file, and say honestly what the labels are worth.

    Any value of the config is a flag with a dotted name. An interrupted run goes on with
    `--resume --name NAME` or `rookery runs resume NAME`; no score is computed twice.

        rookery icm run configs/icm_reviews.yaml
        rookery icm run mine.yaml --data.path claims.jsonl --num-chains 4

    Parameters
    ----------
    config
        A YAML or TOML file; paths in it are relative to it, those of flags to where you are.
    name
        The run's name; made of the time when empty.
    runs_dir
        Where runs are kept.
    resume
        Go on with the run of this name.
    """
    from rookery.loops.icm import IcmConfig

    check_flags(overrides, fields=IcmConfig.model_fields, own=("name", "runs_dir", "resume"))
    if resume:
        with open_again(runs_dir, name=name, overrides=overrides) as run:
            return resume_icm(run)
    words = paths_from_here(overrides, paths=PATHS)
    loaded = load_config(IcmConfig, config, overrides=words).from_folder(config.parent)
    return _finish(loaded, new_run(loaded, kind="icm", name=name, runs_dir=runs_dir))


def resume_icm(run: "Run") -> int:
    """Go on with a labelling from where its event log ends."""
    from rookery.loops.icm import IcmConfig

    config = parse_config(IcmConfig, run.config, origin=str(run.path / "config.json"))
    return _finish(config, lambda: nullcontext(run))


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Everything the loop reads, checked before a run is made; the true labels are not kept."""

    items: "list[Item]"
    encoder: "Encoder"
    context_tokens: int | None


def _read_inputs(config: "IcmConfig") -> _Inputs:
    from rookery.loops.icm import load_encoder, read_gold, read_items

    items = read_items(config.data)
    read_gold(config.data, items)
    folder = _model_folder(config)
    return _Inputs(items, load_encoder(folder), _context_tokens(folder))


def _model_folder(config: "IcmConfig") -> Path:
    """Where the tokenizer is."""
    from rookery.embedded import resolve_model
    from rookery.fleet.external import ExternalConfig

    if not isinstance(config.engine, ExternalConfig):
        return model_folder(config.engine, tokenizer=config.tokenizer)
    if not config.tokenizer:
        raise ConfigError(
            "An external API keeps its tokenizer to itself: write tokenizer, a model's folder or "
            "Hugging Face id."
        )
    return resolve_model(config.tokenizer).path


def _context_of(config: "IcmConfig", engine: Any) -> int | None:
    """What the engine reads, which may be less than the model's config says; None if not told."""
    return None if config.engine.type == "external" else engine.context_tokens


def _context_tokens(folder: Path) -> int | None:
    """The longest prompt, as the model's config says."""
    path = folder / "config.json"
    if not path.is_file():
        return None
    document = json.loads(path.read_text(encoding="utf-8"))
    found = document.get("text_config", document).get("max_position_embeddings")
    return found if isinstance(found, int) else None


def _finish(config: "IcmConfig", open_run: OpenRun) -> int:
    quiet_libraries()
    report, path = run_async(_label(config, _read_inputs(config), open_run))
    _print_report(report)
    exports = f"{path / 'sft.jsonl'}, pairs.jsonl, soft.jsonl"
    for line in (
        f"labels   {path / 'labels.jsonl'}",
        f"exports  {exports}",
        f"report   {path / 'report.html'}",
    ):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return 0


def _open(config: "IcmConfig", encoder: "Encoder") -> "AbstractAsyncContextManager[Any]":
    from rookery.fleet.external import Codec, ExternalConfig, open_external
    from rookery.tasks.template import load_template

    engine = config.engine
    if not isinstance(engine, ExternalConfig):
        return open_sampler(engine)
    decode = load_template(_model_folder(config)).decode
    return open_external(engine, codec=Codec(encode=encoder.encode, decode=decode))


async def _label(
    config: "IcmConfig", inputs: _Inputs, open_run: OpenRun
) -> tuple[dict[str, Any], Path]:
    """What can be refused is refused before the run is made."""
    from rookery.loops.icm import Bench, check_batches
    from rookery.ui.icm import render_icm_page

    if config.engine.type == "embedded":
        say(f"loading {config.engine.model}")
    async with _open(config, inputs.encoder) as engine:
        bench = Bench(
            sampler=engine,
            model=engine.base,
            encoder=inputs.encoder,
            context_tokens=_context_of(config, engine) or inputs.context_tokens,
        )
        check_batches(config, inputs.items, bench=bench)
        with open_run() as run, resumable(run.path):
            if config.iterate is not None:
                bench = replace(bench, tune=_tuner(run, config, engine))
            result = await _search(run, config, inputs, bench)
            page = await asyncio.to_thread(render_icm_page, result.report)
            await asyncio.to_thread(run.write_text, "report.html", page)
            await asyncio.to_thread(run.finish, "finished")
    return result.report, run.path


async def _search(run: "Run", config: "IcmConfig", inputs: _Inputs, bench: "Bench") -> "IcmResult":
    from rookery.loops.icm import label, read_gold
    from rookery.loops.icm.loop import ChainStep

    with token_progress() as bar:
        line = bar.add_task("labelling", total=config.search.iterations, tokens=0)

        def stepped(now: ChainStep) -> None:
            step = now.step
            num_labelled = sum(x >= 0 for x in step.labels)
            text = (
                f"{num_labelled} of {now.num_items}, {step.num_frustrated} frustrated, "
                f"U {step.utility:.1f}"
            )
            done = max(bar.tasks[line].completed, step.iteration + 1)
            bar.update(line, completed=done, tokens=now.num_tokens, description=text)

        return await label(
            config,
            items=inputs.items,
            bench=bench,
            run=run,
            gold=lambda: read_gold(config.data, inputs.items),
            on_step=stepped,
        )


def _tuner(run: "Run", config: "IcmConfig", engine: Any) -> "Tuner":
    """Training in this process, beside the engine; a resumed run finds what it trained before."""
    import torch

    from rookery.slots import load_model
    from rookery.train.sft import sft

    assert config.iterate is not None
    settings = config.iterate.sft
    device = "cuda" if torch.cuda.is_available() else "cpu"

    async def tune(data: "Sequence[Datum]") -> "ModelRef":
        adapter = await sft(
            load_model(_model_folder(config), device=device),
            data,
            settings,
            name="icm",
            base=engine.base.version,
            checkpoints=run.path / "training",
        )
        ref: ModelRef = await engine.load(adapter)
        return ref

    return tune


def _print_report(report: dict[str, Any]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from rookery.ui.icm import COLUMNS, icm_rows

    title = f"{report['num_labelled']} of {report['num_items']} items labelled"
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 0), pad_edge=False)
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == COLUMNS[0] else "right")
    for row in icm_rows(report):
        table.add_row(*row)
    console.print(table)
    console.print(f"verdict  [bold]{report['verdict']}[/bold]")
    for warning in report["warnings"]:
        console.print(warning, style="yellow", markup=False)
    tokens = report["tokens"]
    console.print(
        f"search: {tokens['computed']:,} prompt tokens computed of {tokens['naive']:,} that a "
        f"plain loop computes; baselines {tokens['baselines']:,}; {report['seconds']:.0f} s",
        highlight=False,
    )
