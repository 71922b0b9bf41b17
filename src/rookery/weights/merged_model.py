"""A model folder with an adapter merged into its weights, for programs that know no adapters.

    write_merged(Path("models/smollm2"), read_adapter("adapters/poet"), Path("out/poet-merged"))

Weight files are read and written one at a time, in their own precision; the other files are copied.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from rookery.errors import AdapterError, boundary
from rookery.types import Adapter, LoraFactors

__all__ = ["write_merged"]

_HEAD, _EMBEDDINGS = "lm_head", "embed_tokens.weight"
_INDEX = "model.safetensors.index.json"


def write_merged(model: Path, adapter: Adapter, target: Path) -> None:
    """Write the model folder anew with the adapter in its weights; `target` must not exist."""
    files = sorted(model.glob("*.safetensors"))
    if not files:
        raise AdapterError(f"{model} has no .safetensors files to merge {adapter.name!r} into.")
    left = dict(adapter.factors)
    with boundary(AdapterError, f"Merging {adapter.name!r} into {model}"):
        target.mkdir(parents=True)
        is_tied = not any(_has_head(file) for file in files)
        for file in files:
            tensors = load_file(file)
            _merge(tensors, left)
            if is_tied and _merge_head(tensors, left):
                _untie(model, target, file.name)
            save_file(tensors, target / file.name, metadata={"format": "pt"})
        for path in model.iterdir():
            if path.is_file() and not (target / path.name).exists():
                shutil.copyfile(path, target / path.name)
    if left:
        raise AdapterError(
            f"{adapter.name!r} adapts {min(left)}, which the weight files of {model} do not have."
        )


def _has_head(file: Path) -> bool:
    """Whether the output layer is in it; a model without one in any file uses its embeddings."""
    with safe_open(str(file), framework="pt") as handle:
        return f"{_HEAD}.weight" in handle.keys()  # noqa: SIM118


def _merge(tensors: dict[str, torch.Tensor], left: dict[str, LoraFactors]) -> None:
    """Add what is left to these tensors, and take it out."""
    for name in [name for name in left if f"{name}.weight" in tensors]:
        tensors[f"{name}.weight"] = _sum(tensors[f"{name}.weight"], left.pop(name))


def _merge_head(tensors: dict[str, torch.Tensor], left: dict[str, LoraFactors]) -> bool:
    """Give a model that has none an output layer of its own, if the adapter has one and the
    embeddings are here."""
    embeddings = next((name for name in tensors if name.endswith(_EMBEDDINGS)), None)
    if _HEAD not in left or embeddings is None or tensors[embeddings].ndim != 2:
        return False
    tensors[f"{_HEAD}.weight"] = _sum(tensors[embeddings], left.pop(_HEAD))
    return True


def _sum(weight: torch.Tensor, factors: LoraFactors) -> torch.Tensor:
    if weight.shape != (factors.b.shape[0], factors.a.shape[1]):
        raise AdapterError(
            f"The weights are {tuple(weight.shape)}, and the adapter's are for "
            f"{(factors.b.shape[0], factors.a.shape[1])}: it was made for another model."
        )
    delta = factors.b.float() @ factors.a.float() * factors.scale
    return (weight.float() + delta).to(weight.dtype).contiguous()


def _untie(model: Path, target: Path, file: str) -> None:
    """Tell that the output layer has weights of its own, and where they are."""
    config: dict[str, Any] = json.loads((model / "config.json").read_text())
    config["tie_word_embeddings"] = False
    (target / "config.json").write_text(json.dumps(config, indent=2))
    if (model / _INDEX).exists():
        index: dict[str, Any] = json.loads((model / _INDEX).read_text())
        index["weight_map"][f"{_HEAD}.weight"] = file
        (target / _INDEX).write_text(json.dumps(index, indent=2))
