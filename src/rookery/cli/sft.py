"""`rookery sft`: make an adapter from a taskset with known answers."""

import re
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from rookery.cli.terminal import check_flags, console, log_warnings, print_outcome
from rookery.config import load_config

__all__ = ["sft"]

_OWN = ("config", "split", "device", "name", "runs_dir")


def sft(
    model: str,
    taskset: str,
    out: Path | None = None,
    *overrides: Annotated[str, Parameter(allow_leading_hyphen=True, show=False)],
    config: Path | None = None,
    split: Literal["all", "search", "select", "report"] = "search",
    device: Literal["auto", "cpu", "cuda"] = "auto",
    name: str = "",
    runs_dir: Path = Path("runs"),
) -> None:
    """Train a LoRA adapter on the answers of a taskset and write it as a PEFT folder.

    The training is a run: its curves are on the page, and RUN/trained holds the adapter.

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
        A PEFT folder to write besides.
    config
        A YAML or TOML file with the training config.
    split
        Which part of the taskset to train on.
    device
        Where to compute; `auto` takes a GPU when there is one.
    name
        The run's name; by default the kind and the time.
    runs_dir
        Where runs are kept.
    """
    from rookery.compose.sft import start_sft
    from rookery.train.sft import SftConfig
    from rookery.weights import read_adapter

    check_flags(overrides, fields=SftConfig.model_fields, own=_OWN)
    settings = load_config(SftConfig, config, overrides=overrides)
    log_warnings()
    outcome = start_sft(
        model, taskset, out, config=settings, name=name, runs_dir=runs_dir, split=split,
        device=device,
    )  # fmt: skip
    adapter = read_adapter(outcome.path / "trained")
    shape = f"rank {adapter.rank}, {_describe(adapter.factors)}"
    line = f"{out or adapter.name}: {shape}, version {adapter.version}"
    console.print(line, highlight=False, markup=False, soft_wrap=True)
    print_outcome(outcome)


def _describe(modules: Collection[str]) -> str:
    """`16 modules in 4 layers`: names such as model.layers.3.self_attn.q_proj hold the layer."""
    layers = {found[1] for name in modules if (found := re.search(r"\blayers\.(\d+)\.", name))}
    return f"{len(modules)} modules in {len(layers)} layer{'s' * (len(layers) != 1)}"
