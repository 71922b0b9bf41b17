"""Whether an adapter fits the servers' model (base, rank, layers, shapes), before it is sent."""

import difflib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rookery.errors import AdapterError
from rookery.model_names import is_named, model_names
from rookery.types import Adapter

__all__ = ["Fit", "base_names", "check_fit", "read_shapes"]

_HEADER_LIMIT = 100 * 2**20
"""The safetensors format allows no longer header."""

Shapes = Mapping[str, tuple[int, int]]
"""(in, out) of linear layers by name: `{"model.layers.0.self_attn.q_proj": (576, 576)}`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What adapters must agree with. Empty shapes and a rank of None are not known: not checked."""

    base_names: frozenset[str]
    max_rank: int | None
    shapes: Shapes
    targets: tuple[str, ...] = ()
    """The only kinds of layers that the servers adapt, such as q_proj; empty: all."""


def check_fit(adapter: Adapter, fit: Fit) -> None:
    """AdapterError unless the adapter can be served."""
    who = f"adapter {adapter.name!r}"
    if not adapter.factors:
        raise AdapterError(f"{who} adapts no layer.")
    if adapter.base and not is_named(adapter.base, fit.base_names):
        raise AdapterError(
            f"{who} was made for {adapter.base!r}, the servers run "
            f"{' or '.join(sorted(fit.base_names))}: load it on its own base model, or correct "
            "base_model_name_or_path in its adapter_config.json if they are the same."
        )
    if fit.max_rank is not None and adapter.rank > fit.max_rank:
        raise AdapterError(
            f"{who} has rank {adapter.rank}, the servers take at most {fit.max_rank}: start them "
            f"with --max-lora-rank {adapter.rank} (launch.max_lora_rank), or reduce its rank."
        )
    for layer, factors in adapter.factors.items():
        a, b = tuple(factors.a.shape), tuple(factors.b.shape)
        if len(a) != 2 or len(b) != 2 or a[0] != b[1]:
            raise AdapterError(f"{who}: {layer} has A {a} and B {b}; they need one common rank.")
        if fit.targets and layer.rpartition(".")[2] not in fit.targets:
            raise AdapterError(
                f"{who} adapts {layer}, the servers adapt only {', '.join(fit.targets)}: add its "
                "kind to launch.lora_targets, or leave that empty."
            )
        if fit.shapes:
            _check_layer(who, layer, (a[1], b[0]), fit.shapes)


def _check_layer(who: str, layer: str, got: tuple[int, int], shapes: Shapes) -> None:
    expected = shapes.get(layer)
    if expected is None:
        near = difflib.get_close_matches(layer, shapes, n=1)
        hint = f" The nearest is {near[0]}." if near else ""
        raise AdapterError(f"{who} adapts {layer}, which is not a linear layer here.{hint}")
    if got != expected:
        raise AdapterError(
            f"{who}: {layer} maps {got[0]} to {got[1]}; this model's maps {expected[0]} to "
            f"{expected[1]}: it was made for another model."
        )


def base_names(*names: str) -> frozenset[str]:
    """The names that an adapter may know the base model by; a folder's own name too, where a link
    leads to it."""
    folders = [str(Path(name).resolve()) for name in names if name and Path(name).is_dir()]
    return model_names(*names, *folders)


def read_shapes(folder: Path) -> dict[str, tuple[int, int]]:
    """Shapes of the linear layers in a model folder, from the headers of its weight files.

    Empty when there are none to read, and for quantised models, whose tensors are packed.
    """
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if "quantization_config" in config:
            return {}
        files = sorted(folder.glob("*.safetensors"))
        headers = [_header(file) for file in files]
    except (OSError, ValueError, struct.error):
        return {}
    shapes: dict[str, tuple[int, int]] = {}
    for header in headers:
        for name, tensor in header.items():
            shape = tensor.get("shape", ())
            if name.endswith(".weight") and len(shape) == 2 and "embed" not in name:
                shapes[name.removesuffix(".weight")] = (shape[1], shape[0])
    return shapes


def _header(file: Path) -> dict[str, dict[str, list[int]]]:
    with file.open("rb") as handle:
        (size,) = struct.unpack("<Q", handle.read(8))
        if size > _HEADER_LIMIT:
            raise ValueError(f"{file} is not a safetensors file")
        header: dict[str, dict[str, list[int]]] = json.loads(handle.read(size))
    header.pop("__metadata__", None)
    return header
