"""The first adapters of a population: from files, zero, or random.

init: {type: file, path: founders, use: both}     # a folder of PEFT folders, and pair merges
init: {type: zero, count: 8, rank: 8, layers: 4}  # delta W = 0, distinct by seed
init: {type: random, count: 8, size: 0.001}       # small random deltas
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from rookery.config import Config
from rookery.errors import AdapterError
from rookery.paths import expanded
from rookery.types import Adapter
from rookery.weights import read_adapter
from rookery.weights.stack import LayerShape, Layout, random_adapter, zero_adapter

__all__ = [
    "FileInit",
    "InitConfig",
    "RandomInit",
    "ZeroInit",
    "choose_layers",
    "make_founders",
    "read_founders",
]


class FileInit(Config):
    """Start from existing adapters."""

    type: Literal["file"] = "file"
    path: Path | Annotated[tuple[Path, ...], Field(min_length=1)]
    """A PEFT folder, a folder of PEFT folders, the `adapters` of a sweep's run, or a list of these.
    Relative to the config file."""
    use: Literal["adapters", "pairs", "both"] = "adapters"
    """Start from the adapters, from random pair merges of them, or from both."""
    num_pairs: int = Field(default=8, ge=1)
    """Number of pair merges, if `use` includes them."""

    @property
    def paths(self) -> tuple[Path, ...]:
        return self.path if isinstance(self.path, tuple) else (self.path,)


class _NewAdapters(Config):
    """Common keys of newly made adapters."""

    count: int = Field(default=8, ge=1)
    """Number of adapters."""
    rank: int = Field(default=8, ge=1)
    """Rank of the adapters."""
    alpha: float = Field(default=16.0, gt=0)
    """Updates are multiplied by alpha / rank."""
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    """Last parts of the names of adapted linear layers."""
    layers: int | None = Field(default=None, ge=1)
    """Adapt only the last so many decoder layers; null: all."""


class ZeroInit(_NewAdapters):
    """Start from adapters that change nothing yet."""

    type: Literal["zero"] = "zero"


class RandomInit(_NewAdapters):
    """Start from small random adapters."""

    type: Literal["random"] = "random"
    size: float = Field(default=1e-3, gt=0)
    """Standard deviation of the entries of delta W."""


InitConfig = Annotated[FileInit | ZeroInit | RandomInit, Field(discriminator="type")]


def read_founders(config: FileInit) -> dict[str, Adapter]:
    """Read every PEFT folder at or below the paths, by name. Skips hidden, half-written ones."""
    folders = sorted(folder for path in config.paths for folder in _peft_folders(expanded(path)))
    names = [folder.name for folder in folders]
    if len(set(names)) < len(names):  # adapters of several runs: add the run's name
        names = [f"{folder.parent.name}.{folder.name}" for folder in folders]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise AdapterError(f"init.path has two adapters called {twice}: give each once.")
    return {
        name: read_adapter(folder, name=name) for name, folder in zip(names, folders, strict=True)
    }


def _peft_folders(root: Path) -> list[Path]:
    if not root.is_dir():
        raise AdapterError(f"There is no folder {root}: init.path holds one PEFT folder each.")
    if (root / "adapter_config.json").is_file():
        return [root]
    below = ("[!.]*", "[!.]*/trained")  # adapters, or runs of a sweep
    folders = [path.parent for each in below for path in root.glob(f"{each}/adapter_config.json")]
    if not folders:
        raise AdapterError(
            f"{root} holds no adapters: each is a folder with adapter_config.json and "
            "adapter_model.safetensors."
        )
    return folders


def make_founders(
    config: ZeroInit | RandomInit, *, layers: Mapping[str, tuple[int, int]], base: str, seed: int
) -> dict[str, Adapter]:
    """Make `count` distinct adapters. `layers` maps the model's linear layers to (in, out)."""
    chosen = choose_layers(layers, targets=config.targets, last=config.layers)
    layout = Layout(
        base=base,
        layers=tuple(LayerShape(name, *layers[name]) for name in chosen),
        rank=config.rank,
        scale=config.alpha / config.rank,
    )
    founders = {}
    for index in range(config.count):
        name, key = f"{config.type}-{index:02d}", (seed, "founder", index)
        founders[name] = (
            zero_adapter(layout, name=name, seed=key)
            if isinstance(config, ZeroInit)
            else random_adapter(layout, name=name, seed=key, size=config.size)
        )
    return founders


def choose_layers(
    layers: Mapping[str, tuple[int, int]], *, targets: tuple[str, ...], last: int | None
) -> list[str]:
    """Return the linear layers named like a target, in the last so many decoder layers."""
    numbers = {name: _layer_number(name) for name in layers}
    top = max((n for n in numbers.values() if n is not None), default=0)
    chosen = []
    for name in layers:
        number = numbers[name]
        is_high = last is None or (number is not None and number > top - last)
        if name.rpartition(".")[2] in targets and is_high:
            chosen.append(name)
    if not chosen:
        kinds = sorted({name.rpartition(".")[2] for name in layers})
        raise AdapterError(
            f"No linear layer is called {' or '.join(targets)}; this model has {', '.join(kinds)}."
        )
    return chosen


def _layer_number(name: str) -> int | None:
    parts = name.split(".")
    return next((int(part) for part in parts if part.isdigit()), None)
