"""`rookery icm run`: label data that has no labels, as a config says."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import cyclopts
from cyclopts import Parameter

from rookery.cli.terminal import console, fail, quiet_libraries, run_async, token_progress
from rookery.config import load_config
from rookery.errors import ConfigError, RunError

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from rookery.loops.icm import IcmConfig, IcmResult
    from rookery.runs import Run

__all__ = ["icm", "resume_icm"]

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

        rookery icm run configs/icm_reviews.yaml
        rookery icm run mine.yaml --data.path claims.jsonl --batch-size 128 --num-chains 4

    Any value of the config is a flag with a dotted name. An interrupted run goes on with
    `--resume --name NAME` or `rookery runs resume NAME`; no score is computed twice.

    Parameters
    ----------
    config
        A YAML or TOML file; paths in it are relative to it.
    name
        The run's name; made of the time when empty.
    runs_dir
        Where runs are kept.
    resume
        Go on with the run of this name.
    """
    from rookery.loops.icm import IcmConfig
    from rookery.runs import Run

    quiet_libraries()
    if resume:
        if not name:
            raise RunError("--resume needs the run: add --name NAME, see `rookery runs list`.")
        with Run.open(runs_dir / name) as run:
            return resume_icm(run)
    loaded = load_config(IcmConfig, config, overrides=overrides).from_folder(config.parent)
    inputs = _read_inputs(loaded)
    document = loaded.model_dump(mode="json")
    with Run.create(runs_dir, kind="icm", config=document, name=name) as run:
        return _finish(run, loaded, inputs)


def resume_icm(run: "Run") -> int:
    """Go on with a labelling from where its event log ends."""
    from rookery.config import parse_config
    from rookery.loops.icm import IcmConfig

    quiet_libraries()
    config = parse_config(IcmConfig, run.config, origin=str(run.path / "config.json"))
    return _finish(run, config, _read_inputs(config))


def _read_inputs(config: "IcmConfig") -> dict[str, Any]:
    """Everything the loop reads, checked before a run is made; the true labels are not kept."""
    from rookery.loops.icm import load_encoder, read_gold, read_items

    items = read_items(config.data)
    read_gold(config.data, items)
    folder = _model_folder(config)
    return {
        "items": items,
        "encoder": load_encoder(folder),
        "context_tokens": _context_tokens(folder),
    }


def _model_folder(config: "IcmConfig") -> Path:
    """Where the tokenizer is."""
    from rookery.embedded import EngineConfig, resolve_model

    engine = config.engine
    if isinstance(engine, EngineConfig):
        return resolve_model(config.tokenizer or engine.model).path
    model = config.tokenizer or (engine.launch.model if engine.launch is not None else "")
    if not model:
        raise ConfigError(
            "Servers given by URL keep their tokenizer to themselves: write tokenizer, the model's "
            "folder or Hugging Face id."
        )
    return resolve_model(model).path


def _context_tokens(folder: Path) -> int | None:
    """The longest prompt, as the model's config says."""
    path = folder / "config.json"
    if not path.is_file():
        return None
    document = json.loads(path.read_text(encoding="utf-8"))
    found = document.get("text_config", document).get("max_position_embeddings")
    return found if isinstance(found, int) else None


def _finish(run: "Run", config: "IcmConfig", inputs: dict[str, Any]) -> int:
    from rookery.ui.icm import render_icm_page

    try:
        result = run_async(_label(run, config, inputs))
    except KeyboardInterrupt:
        fail(f"Interrupted. Go on with: rookery runs resume {run.path}")
        raise
    page = run.write_text("report.html", render_icm_page(result.report))
    run.finish("finished")
    _print_report(result.report)
    console.print(f"labels   {run.path / 'labels.jsonl'}", highlight=False, soft_wrap=True)
    console.print(
        f"exports  {run.path / 'sft.jsonl'}, pairs.jsonl, soft.jsonl",
        highlight=False,
        soft_wrap=True,
    )
    console.print(f"report   {page}", highlight=False, soft_wrap=True)
    return 0


def _open(config: "IcmConfig") -> "AbstractAsyncContextManager[Any]":
    from rookery.embedded import EngineConfig, open_engine
    from rookery.fleet import open_fleet

    engine = config.engine
    return open_engine(engine) if isinstance(engine, EngineConfig) else open_fleet(engine)


async def _label(run: "Run", config: "IcmConfig", inputs: dict[str, Any]) -> "IcmResult":
    from rookery.loops.icm import Bench, label, read_gold
    from rookery.loops.icm.loop import ChainStep

    items = inputs["items"]
    async with _open(config) as engine:
        bench = Bench(
            sampler=engine,
            model=engine.base,
            encoder=inputs["encoder"],
            context_tokens=inputs["context_tokens"],
        )
        with token_progress() as bar:
            line = bar.add_task("labelling", total=config.search.iterations, tokens=0)

            def stepped(now: ChainStep) -> None:
                stats = engine.stats.prompt_tokens if config.engine.type == "embedded" else 0
                step = now.step
                num_labelled = sum(x >= 0 for x in step.labels)
                text = (
                    f"batch {now.batch} chain {now.chain}: {num_labelled} of {now.num_items}, "
                    f"{step.num_frustrated} frustrated, U {step.utility:.1f}"
                )
                done = max(bar.tasks[line].completed, step.iteration + 1)
                bar.update(line, completed=done, tokens=stats, description=text)

            return await label(
                config,
                items=items,
                bench=bench,
                run=run,
                gold=lambda: read_gold(config.data, items),
                on_step=stepped,
            )


def _print_report(report: dict[str, Any]) -> None:
    from rich.table import Table

    from rookery.ui.icm import COLUMNS, icm_rows

    table = Table(title=f"{report['num_labelled']} of {report['num_items']} items labelled")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == COLUMNS[0] else "right")
    for row in icm_rows(report):
        table.add_row(*row)
    console.print(table)
    console.print(f"verdict  [bold]{report['verdict']}[/bold]")
    for warning in report["warnings"]:
        console.print(f"[yellow]{warning}[/yellow]")
    tokens = report["tokens"]
    console.print(
        f"search: {tokens['computed']:,} prompt tokens computed of {tokens['naive']:,} that a "
        f"plain loop computes; siblings {tokens['siblings']:,}; {report['seconds']:.0f} s",
        highlight=False,
    )
