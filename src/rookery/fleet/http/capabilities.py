"""Capabilities of one server, read from its own description and from tiny requests, not its
version; and the check that an adapter fits it.

Built by `probe.py`; `wire.py` and `replica.py` choose routes and fields by it.
"""

import difflib
import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from rookery.errors import AdapterError, FleetError
from rookery.model_names import is_named, model_names
from rookery.types import Adapter, LoraFactors

__all__ = [
    "LOGPROB_IDS_LIMIT",
    "Capabilities",
    "Fit",
    "Route",
    "adapts_head",
    "base_names",
    "check_fit",
    "common_capabilities",
    "read_head",
    "read_shapes",
]


# Checks before sending that an adapter fits the model: its base, rank, layers and shapes.
#
# Programs name the layers of one model differently: transformers 5 calls a layer of Gemma 3
# `model.language_model.layers.0.mlp.up_proj`, its weight files `language_model.model.layers.0...`.
# An adapter is sent with the names of the weight files, which every server of the model knows.


_HEADER_LIMIT = 100 * 2**20
"""Longest header that the safetensors format allows."""

_WRAPPERS = frozenset({"model", "language_model", "vision_model"})
"""Parts of a layer's name that say which object holds it; they differ between programs."""
_HEAD = "lm_head"

Shapes = Mapping[str, tuple[int, int]]
"""(in, out) of linear layers by name: `{"model.layers.0.self_attn.q_proj": (576, 576)}`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Requirements on adapters. Empty shapes and a rank of None are unknown and not checked."""

    base_names: frozenset[str]
    max_rank: int | None
    shapes: Shapes
    targets: tuple[str, ...] = ()
    """Only kinds of layers that the servers adapt, such as q_proj; empty: all."""
    head: Shapes | None = None
    """Output layer of a model whose weight files hold none because it shares the embeddings. None
    if unknown: the servers then check it when they load the adapter."""
    has_wrong_head: bool = False
    """True for vLLM's CPU code: base tokens get the output layer of the last slot's adapter."""


def check_fit(adapter: Adapter, fit: Fit) -> Adapter:
    """Return the adapter with layers named as in `fit.shapes`; AdapterError if it does not fit."""
    label = f"adapter {adapter.name!r}"
    if not adapter.factors:
        raise AdapterError(f"{label} adapts no layer.")
    if adapter.base and not is_named(adapter.base, fit.base_names):
        raise AdapterError(
            f"{label} was made for {adapter.base!r}, the servers run "
            f"{' or '.join(sorted(fit.base_names))}: load it on its own base model, or correct "
            "base_model_name_or_path in its adapter_config.json if they are the same."
        )
    if fit.max_rank is not None and adapter.rank > fit.max_rank:
        raise AdapterError(
            f"{label} has rank {adapter.rank}, the servers take at most {fit.max_rank}: start them "
            f"with --max-lora-rank {adapter.rank} (launch.max_lora_rank), or reduce its rank."
        )
    known = {**fit.shapes, **(fit.head or {})} if fit.shapes else {}
    names = _by_plain_name(known)
    named: dict[str, LoraFactors] = {}
    for name, factors in adapter.factors.items():
        layer = name if name in known else names.get(_plain_name(name), name)
        if layer in named:
            raise AdapterError(f"{label} adapts {layer} twice, under two names: keep one.")
        named[layer] = factors
        a, b = tuple(factors.a.shape), tuple(factors.b.shape)
        if len(a) != 2 or len(b) != 2 or a[0] != b[1]:
            raise AdapterError(f"{label}: {layer} has A {a} and B {b}; they need one common rank.")
        if fit.targets and layer.rpartition(".")[2] not in fit.targets:
            raise AdapterError(
                f"{label} adapts {layer}, the servers adapt only {', '.join(fit.targets)}: add its "
                "kind to launch.lora_targets, or leave that empty."
            )
        is_head = _is_head(layer)
        if is_head and fit.has_wrong_head:
            raise AdapterError(
                f"{label} adapts {layer}: vLLM on the CPU applies an adapted output layer to "
                "requests for the base model too, unless Rookery starts it (launch). Do that, use "
                "servers on GPUs or the embedded engine, or train the adapter without it."
            )
        if known and not (is_head and fit.head is None):
            _check_layer(label, layer, (a[1], b[0]), known)
    return adapter if named.keys() == adapter.factors.keys() else replace(adapter, factors=named)


def adapts_head(adapter: Adapter) -> bool:
    """True if it adapts the output layer."""
    return any(map(_is_head, adapter.factors))


def _is_head(layer: str) -> bool:
    return layer.rpartition(".")[2] == _HEAD


def _check_layer(label: str, layer: str, got: tuple[int, int], shapes: Shapes) -> None:
    expected = shapes.get(layer)
    if expected is None:
        near = difflib.get_close_matches(layer, shapes, n=1)
        hint = f" The nearest is {near[0]}." if near else ""
        raise AdapterError(f"{label} adapts {layer}, which is not a linear layer here.{hint}")
    if got != expected:
        raise AdapterError(
            f"{label}: {layer} maps {got[0]} to {got[1]}; this model's maps {expected[0]} to "
            f"{expected[1]}: it was made for another model."
        )


def _plain_name(layer: str) -> str:
    """Return `layers.0.mlp.up_proj` for all names that programs give this layer."""
    return ".".join(part for part in layer.split(".") if part not in _WRAPPERS)


def _by_plain_name(shapes: Shapes) -> dict[str, str]:
    """Return layers by their plain names, without ambiguous ones."""
    layers_by_plain: dict[str, list[str]] = {}
    for layer in shapes:
        layers_by_plain.setdefault(_plain_name(layer), []).append(layer)
    return {plain: layers[0] for plain, layers in layers_by_plain.items() if len(layers) == 1}


def base_names(*names: str) -> frozenset[str]:
    """Return the names by which adapters may know the base model; folder links are resolved."""
    folders = [str(Path(name).resolve()) for name in names if name and Path(name).is_dir()]
    return model_names(*names, *folders)


def read_shapes(folder: Path) -> dict[str, tuple[int, int]]:
    """Read the shapes of a model's linear layers from the headers of its weight files. Empty if
    there are none, and for quantised models, whose tensors are packed."""
    return {name: size for name, size in _read_matrices(folder).items() if "embed" not in name}


def read_head(folder: Path) -> dict[str, tuple[int, int]]:
    """Return the output layer of a model whose weight files hold none: it shares the embeddings.
    Empty for other models, whose output layer is in `read_shapes`."""
    matrices = _read_matrices(folder)
    if any(name.endswith(_HEAD) for name in matrices):
        return {}
    sizes = [size for name, size in matrices.items() if name.endswith("embed_tokens")]
    return {_HEAD: sizes[0]} if len(sizes) == 1 else {}


def _read_matrices(folder: Path) -> dict[str, tuple[int, int]]:
    """Return (in, out) of all weights with two axes, by layer name."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if "quantization_config" in config:
            return {}
        files = sorted(folder.glob("*.safetensors"))
        headers = [_header(file) for file in files]
    except (OSError, ValueError, struct.error):
        return {}
    return {
        name.removesuffix(".weight"): (tensor["shape"][1], tensor["shape"][0])
        for header in headers
        for name, tensor in header.items()
        if name.endswith(".weight") and len(tensor.get("shape", ())) == 2
    }


def _header(file: Path) -> dict[str, dict[str, list[int]]]:
    with file.open("rb") as handle:
        (size,) = struct.unpack("<Q", handle.read(8))
        if size > _HEADER_LIMIT:
            raise ValueError(f"{file} is not a safetensors file")
        header: dict[str, dict[str, list[int]]] = json.loads(handle.read(size))
    header.pop("__metadata__", None)
    return header


Route = Literal["extension", "http", "resolver", "none"]
"""How adapters reach a server, fastest first: tensors through the worker extension; a PEFT folder
and `load_lora_adapter`; a shared folder that the server searches by name; not at all."""

LOGPROB_IDS_LIMIT = 128
"""Most ids that vLLM takes in `logprob_token_ids`; longer lists are split over several prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Capabilities of one server, as probed. Sizes it does not report are None."""

    model: str
    """Name under which it serves its base model."""
    root: str
    """Folder or id it loaded the base model from, for which adapters must be made."""
    version: str
    """For people to read; nothing depends on it."""
    max_model_len: int | None
    max_num_seqs: int | None
    max_logprobs: int
    """Limit on the likeliest tokens it reports; vLLM's default is 20."""
    has_token_ids: bool
    """True if it reports tokens as `token_id:17`, which gives the ids it drew."""
    has_label_logprobs: bool
    """True if `logprob_token_ids` works: exact log-probabilities of any given tokens."""
    has_prompt_logprobs: bool
    """True if it reports the tokens of a prompt without crashing: vLLM with adapters on the CPU
    dies if it computes anything else in the same step."""
    has_processed_logprobs: bool
    """True if log-probabilities are of the distribution drawn from (temperature, top-p applied)."""
    has_prefix_cache: bool
    block_tokens: int
    """Block size of its prefix cache."""
    routes: frozenset[str]
    """Paths of its HTTP interface."""
    max_loras: int | None
    max_cpu_loras: int | None
    max_lora_rank: int | None
    lora_dtype: str | None
    has_json_schemas: bool = False
    """True if `structured_outputs` exists: answers that match a JSON schema."""
    has_wrong_head: bool = False
    """True if adapters of the output layer change requests for the base model: vLLM on the CPU
    without the worker extension."""
    is_on_cpu: bool | None = None
    """As reported, as launched, or from the config; None if unknown."""
    dtype: str | None = None
    """Type it computes in, such as `float32`, as reported or launched; None if unknown."""

    @property
    def is_float32(self) -> bool:
        """True if it is known to compute in float32, adapters included."""
        return self.dtype == "float32" and self.lora_dtype in (None, "float32")

    @property
    def has_lora_loading(self) -> bool:
        return "/v1/load_lora_adapter" in self.routes

    @property
    def has_worker_calls(self) -> bool:
        return "/collective_rpc" in self.routes


def common_capabilities(capabilities: Sequence[Capabilities]) -> Capabilities:
    """Combine what all servers can do; FleetError if they serve different models."""
    first = capabilities[0]
    for other in capabilities[1:]:
        if base_names(other.root) != base_names(first.root):
            raise FleetError(
                f"The servers serve different models, {first.root} and {other.root}: one fleet "
                "has one base model."
            )
    return replace(
        first,
        max_model_len=_least(c.max_model_len for c in capabilities),
        max_logprobs=min(c.max_logprobs for c in capabilities),
        has_label_logprobs=all(c.has_label_logprobs for c in capabilities),
        has_prompt_logprobs=all(c.has_prompt_logprobs for c in capabilities),
        has_json_schemas=all(c.has_json_schemas for c in capabilities),
        has_processed_logprobs=all(c.has_processed_logprobs for c in capabilities),
        has_prefix_cache=all(c.has_prefix_cache for c in capabilities),
        block_tokens=max(c.block_tokens for c in capabilities),
        max_lora_rank=_least(c.max_lora_rank for c in capabilities),
        dtype=first.dtype if all(c.dtype == first.dtype for c in capabilities) else None,
    )


def _least(values: Iterable[int | None]) -> int | None:
    return min((value for value in values if value is not None), default=None)
