"""`rookery sft`: make an adapter from a taskset with known answers."""

import re
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter
from rich.markup import escape

from rookery.cli.terminal import (
    check_flags,
    console,
    fail,
    quiet_libraries,
    run_async,
    say,
    show_notes,
    token_progress,
)
from rookery.config import load_config
from rookery.errors import AdapterError
from rookery.model_names import loadable_model

__all__ = ["sft"]


def sft(
    model: str,
    taskset: str,
    out: Path,
    *overrides: Annotated[str, Parameter(allow_leading_hyphen=True, show=False)],
    config: Path | None = None,
    split: Literal["all", "search", "select", "report"] = "search",
    device: Literal["auto", "cpu", "cuda"] = "auto",
) -> None:
    """Train a LoRA adapter on the answers of a taskset and write it as a PEFT folder.

    Any value of the training config is a flag: --rank, --alpha, --targets, --layers, --epochs,
    --steps, --batch-size, --learning-rate, --schedule, --warmup, --seed, --init-from.
    An interrupted training goes on when the same command is given again.

        rookery sft smollm2 generated:label-kind out/kind --steps 40 --layers 4
        rookery sft smollm2 gsm8k.jsonl out/gsm8k --learning-rate 0.0005

    Parameters
    ----------
    model
        A Hugging Face id, a local folder, or `smollm2`.
    taskset
        A file of rows, a .yaml or .toml taskset, hf://datasets/ID, or generated:NAME; values of
        its config may follow, FILE?bad_rows=skip.
    out
        The PEFT folder to write.
    config
        A YAML or TOML file with the training config.
    split
        Which part of the taskset to train on.
    device
        Where to compute; `auto` takes a GPU when there is one.
    """
    from rookery.train.sft import SftConfig

    check_flags(overrides, fields=SftConfig.model_fields, own=("config", "split", "device"))
    settings = load_config(SftConfig, config, overrides=overrides)
    _require_place(out)
    quiet_libraries()
    try:
        adapter = run_async(_train(model, taskset, out, settings, split=split, device=device))
    except KeyboardInterrupt:
        fail("Interrupted. Give the same command again to go on from the last checkpoint.")
        raise
    console.print(
        f"{out}: rank {adapter.rank}, {_describe(adapter.factors)}, version {adapter.version}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def _describe(modules: Collection[str]) -> str:
    """`16 modules in 4 layers`: names such as model.layers.3.self_attn.q_proj hold the layer."""
    layers = {found[1] for name in modules if (found := re.search(r"\blayers\.(\d+)\.", name))}
    return f"{len(modules)} modules in {len(layers)} layer{'s' * (len(layers) != 1)}"


def _loadable(model: str) -> str:
    """A folder as an absolute path, by which other programs find the base from anywhere."""
    path = Path(model).expanduser()
    is_folder = loadable_model(model) == model and path.is_dir()
    return str(path.absolute()) if is_folder else model


def _require_place(out: Path) -> None:
    """Refuse a path that `write_adapter` would refuse after the training."""
    nearest = next(folder for folder in out.absolute().parents if folder.exists())
    if not nearest.is_dir():
        raise AdapterError(f"{out} cannot be made: {nearest} is a file. Give another path.")
    if out.is_dir() and ((out / "adapter_config.json").is_file() or not any(out.iterdir())):
        return
    if out.exists():
        raise AdapterError(
            f"{out} exists and is not an adapter folder; give a new path, or remove it first."
        )


async def _train(
    model_name: str, taskset_name: str, out: Path, config: Any, *, split: Any, device: str
) -> Any:
    import torch

    from rookery.embedded import resolve_model
    from rookery.slots import load_model
    from rookery.tasks.taskset import load_taskset_file
    from rookery.tasks.template import load_template
    from rookery.train.sft import SftStep, sft_data
    from rookery.train.sft import sft as train
    from rookery.weights import read_adapter, write_adapter

    taskset = load_taskset_file(taskset_name)
    show_notes(taskset.notes)
    say(f"loading {model_name}")
    folder = resolve_model(model_name)
    init = read_adapter(config.init_from) if config.init_from is not None else None
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_model(folder.path, device=device, names=folder.names)
    eos = model.shape.eos_tokens
    data = sft_data(
        taskset.split(split), load_template(folder.path), end_token=eos[0] if eos else None
    )
    checkpoints = out.with_name(f".{out.name}.checkpoints")
    with token_progress() as bar:
        name = escape(taskset.name)
        line = bar.add_task(name, total=None, tokens=0)

        def stepped(step: SftStep) -> None:
            tokens = bar.tasks[line].fields["tokens"] + step.num_tokens
            text = f"{name}  loss {step.loss:.3f}"
            bar.update(
                line, total=step.num_steps, completed=step.step, tokens=tokens, description=text
            )

        adapter = await train(
            model, data, config, name=out.name, base=_loadable(model_name), init=init,
            checkpoints=checkpoints, on_step=stepped,
        )  # fmt: skip
    write_adapter(adapter, out)
    shutil.rmtree(checkpoints, ignore_errors=True)
    return adapter
