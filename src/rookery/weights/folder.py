"""PEFT folders: `adapter_config.json` + `adapter_model.safetensors`, read and written exactly.

    adapter = read_adapter("adapters/poet")
    write_adapter(adapter, "out/poet")      # peft and vLLM load the folder unchanged

Only plain LoRA can be read. Anything else in the folder (DoRA, biases, whole modules, embeddings)
is refused with an error, because it would be lost silently.
"""

import hashlib
import json
import os
import re
import shutil
import struct
import tempfile
from collections.abc import Iterable, Mapping
from math import isfinite, sqrt
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from rookery.errors import AdapterError, boundary
from rookery.model_names import loadable_model
from rookery.paths import expanded
from rookery.types import Adapter, LoraFactors

__all__ = ["adapter_version", "make_adapter", "read_adapter", "write_adapter", "write_merged"]


_VERSION_BYTES = 8
"""16 hex characters: a million adapters contain a collision with probability 3e-8."""


def make_adapter(name: str, *, base: str, factors: Mapping[str, LoraFactors]) -> Adapter:
    """Build an adapter with layers sorted by name and the version of `adapter_version`."""
    ordered = {layer: factors[layer] for layer in sorted(factors)}
    return Adapter(name=name, base=base, factors=ordered, version=adapter_version(ordered))


def adapter_version(factors: Mapping[str, LoraFactors]) -> str:
    """Hash layer names, scales, shapes, dtypes and bytes to 16 hex characters.

    Mapping order, strides and device do not matter. The same delta with another rank or dtype is
    another version, because a server may round it differently.
    """
    digest = hashlib.blake2b(digest_size=_VERSION_BYTES)
    for layer in sorted(factors):
        lora = factors[layer]
        digest.update(layer.encode() + b"\0" + struct.pack("<d", lora.scale))
        for tensor in (lora.a, lora.b):
            digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
            digest.update(_bytes(tensor))
    return digest.hexdigest()


def _bytes(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return memoryview(flat.numpy())  # type: ignore[arg-type]


Value = TypeVar("Value", int, float)

_CONFIG = "adapter_config.json"
_TENSORS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_SCALES = "rookery_scales"
"""Metadata key of the safetensors file: scales that alpha / rank cannot express exactly."""
_RECORDED = TypeAdapter(dict[str, float])
_BASE = "rookery_base"
"""Metadata key of the safetensors file: the adapter's base, if the config has a loadable name."""
_SCALE_TOLERANCE = 1e-12
"""Largest difference at which a recorded scale counts; beyond it, lora_alpha was edited later."""
_KEY = re.compile(
    r"(?:base_model\.model\.)?(?P<layer>.+)\.lora_(?P<factor>[AB])(?:\.default)?\.weight"
)
_BASE_COPY = re.compile(r"(?:.*\.)?(?:lm_head|embed_tokens)\.base_layer\.weight")
"""Frozen copies of the base model's output layer or embeddings, which `save_pretrained` adds if the
output layer is adapted (`save_embedding_layers`). peft and vLLM take them from the base model."""
_PLAIN_INITS = frozenset({"gaussian", "eva", "orthogonal", "mica"})
"""Named initialisations that keep the base weights. The others (pissa, olora, corda, loftq,
lora_ga) change them, so their factors are useless on the original base."""


class _PeftConfig(BaseModel):
    """Fields of PEFT's LoraConfig that determine the meaning of the factors."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    peft_type: str = "LORA"
    base_model_name_or_path: str | None = None
    r: int = Field(default=8, ge=1)
    lora_alpha: float = 8
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    use_rslora: bool = False
    use_dora: bool = False
    lora_bias: bool = False
    bias: str = "none"
    modules_to_save: list[str] | None = None
    init_lora_weights: bool | str | None = True
    layer_replication: list[Any] | None = None
    alora_invocation_tokens: list[Any] | None = None
    trainable_token_indices: list[Any] | dict[str, Any] | None = None
    target_parameters: list[Any] | None = None
    use_qalora: bool = False
    use_bdlora: Any = None

    @field_validator("rank_pattern", "alpha_pattern")
    @classmethod
    def _are_patterns(cls, value: dict[str, Value] | None) -> dict[str, Value] | None:
        for key in value or {}:
            try:
                re.compile(key)
            except re.error as error:
                raise ValueError(f"{key!r} is not a regular expression: {error}") from None
        return value

    def rank_of(self, layer: str) -> int:
        return _match(self.rank_pattern, layer, self.r)

    def scale_of(self, layer: str) -> float:
        alpha, rank = _match(self.alpha_pattern, layer, self.lora_alpha), self.rank_of(layer)
        return alpha / sqrt(rank) if self.use_rslora else alpha / rank


def read_adapter(path: str | Path, *, name: str | None = None) -> Adapter:
    """Read a PEFT folder, on the CPU in its own dtype; `name` defaults to the folder's name.

    AdapterError unless the folder holds a plain, finite, complete LoRA.
    """
    folder = expanded(path)
    for file in (_CONFIG, _TENSORS):
        if not (folder / file).is_file():
            raise AdapterError(
                f"{folder} has no {file}; an adapter is a folder with {_CONFIG} and {_TENSORS}, "
                "as PeftModel.save_pretrained writes it."
            )
    config = _read_config(folder)
    tensors, recorded = _read_tensors(folder / _TENSORS)
    factors = {
        layer: _factors(folder, config, layer, pair, recorded)
        for layer, pair in _pair(folder, tensors).items()
    }
    base = _own_base_name(folder / _TENSORS, config.base_model_name_or_path or "")
    return make_adapter(name or folder.resolve().name, base=base, factors=factors)


def write_adapter(adapter: Adapter, path: str | Path) -> Path:
    """Write the folder atomically (built beside `path`, then renamed) and return it.

    An existing adapter folder is replaced; AdapterError for any other existing file or folder.
    Weights keep their dtype. Files get mode 0644, since a server may run as another user.
    """
    folder = Path(path)
    if not adapter.factors:
        raise AdapterError(
            f"The adapter {adapter.name!r} has no layers: there is nothing to write."
        )
    for layer, lora in adapter.factors.items():
        _require_finite(lora, layer=layer, where=f"The adapter {adapter.name!r}")
    if folder.exists() and not _is_replaceable(folder):
        raise AdapterError(
            f"{folder} exists and is not an adapter folder; give a new path, or remove it first."
        )
    foreign = (OSError, SafetensorError)
    with boundary(AdapterError, f"writing the adapter folder {folder}", foreign=foreign):
        folder.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            _write_files(adapter, staging)
            _swap(staging, folder)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return folder


def _read_config(folder: Path) -> _PeftConfig:
    where = folder / _CONFIG
    with boundary(AdapterError, f"{where} does not parse", foreign=(OSError, ValueError)):
        document = json.loads(where.read_text(encoding="utf-8"))
    if not isinstance(document, dict):
        raise AdapterError(f"{where} holds {type(document).__name__}; it must hold a JSON object.")
    try:
        config = _PeftConfig.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        raise AdapterError(f"{where}: {key} is {first['input']!r}; {first['msg']}.") from None
    for is_foreign, what, remedy in _foreign_features(config):
        if is_foreign:
            raise AdapterError(f"{where}: {what}; Rookery works on plain LoRA. {remedy}")
    return config


def _foreign_features(config: _PeftConfig) -> Iterable[tuple[bool, str, str]]:
    retrain = "Train the adapter again without it."
    init = config.init_lora_weights
    is_plain_init = not isinstance(init, str) or init.lower() in _PLAIN_INITS
    return [
        (config.peft_type != "LORA", f"peft_type is {config.peft_type!r}", "Give a LORA adapter."),
        (config.use_dora, "use_dora is true", "Train the adapter again with use_dora=False."),
        (config.lora_bias, "lora_bias is true", "Train it again with lora_bias=False."),
        (config.bias != "none", f"bias is {config.bias!r}", 'Train it again with bias="none".'),
        (
            bool(config.modules_to_save),
            f"modules_to_save holds {config.modules_to_save}",
            "Train the adapter again without modules_to_save.",
        ),
        (
            not is_plain_init,
            f"init_lora_weights is {init!r}, which changes the base weights",
            "Save it with path_initial_model_for_weight_conversion to make it a plain LoRA."
            if init != "loftq"
            else "Train it again with init_lora_weights=True.",
        ),
        (bool(config.layer_replication), "layer_replication is set", retrain),
        (bool(config.alora_invocation_tokens), "alora_invocation_tokens is set", retrain),
        (bool(config.trainable_token_indices), "trainable_token_indices is set", retrain),
        (bool(config.target_parameters), "target_parameters is set", retrain),
        (config.use_qalora, "use_qalora is true", retrain),
        (bool(config.use_bdlora), "use_bdlora is set", retrain),
    ]


def _read_tensors(file: Path) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Return the adapter's tensors, and the scales that `write_adapter` recorded."""
    foreign = (OSError, ValueError, SafetensorError)
    with (
        boundary(AdapterError, f"{file} is not a readable safetensors file", foreign=foreign),
        safe_open(str(file), framework="pt") as handle,
    ):
        keys = [key for key in handle.keys() if not _BASE_COPY.fullmatch(key)]  # noqa: SIM118
        tensors = {key: handle.get_tensor(key) for key in keys}
        recorded = _RECORDED.validate_json((handle.metadata() or {}).get(_SCALES, "{}"))
    return tensors, recorded


def _own_base_name(file: Path, named: str) -> str:
    """Return the recorded base name, unless the config was edited to name another base."""
    with safe_open(str(file), framework="pt") as handle:
        recorded = (handle.metadata() or {}).get(_BASE, "")
    return recorded if recorded and loadable_model(recorded) == named else named


def _pair(folder: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    pairs: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        match = _KEY.fullmatch(key)
        if match is None:
            raise AdapterError(
                f"{folder / _TENSORS}: the tensor {key!r} is not a LoRA factor of a linear layer; "
                f"allowed are {_PREFIX}<layer>.lora_A.weight and .lora_B.weight. {_reason(key)}"
            )
        pair = pairs.setdefault(match["layer"], {})
        if match["factor"] in pair:
            raise AdapterError(
                f"{folder / _TENSORS}: lora_{match['factor']} of {match['layer']} is repeated; "
                "keep one adapter per folder."
            )
        pair[match["factor"]] = tensor
    if not pairs:
        raise AdapterError(
            f"{folder / _TENSORS} holds no tensors; an adapter has at least one layer."
        )
    for layer, pair in pairs.items():
        for factor in "AB":
            if factor not in pair:
                raise AdapterError(
                    f"{folder / _TENSORS}: the layer {layer} has no lora_{factor}.weight; "
                    "both factors are needed, save the adapter again."
                )
    return pairs


def _reason(key: str) -> str:
    if "lora_magnitude_vector" in key:
        return "This is DoRA: train the adapter again with use_dora=False."
    if "lora_embedding_" in key:
        return "Adapted embeddings are not supported: target linear layers only."
    if key.endswith(".bias"):
        return (
            "Biases are not supported: train the adapter again with bias='none', lora_bias=False."
        )
    if key.endswith(("embed_tokens.weight", "lm_head.weight")):
        return (
            "It is a whole embedding or output layer, saved beside the LoRA factors. If it is the "
            "base model's own, save the adapter again with save_embedding_layers=False; "
            "resized or trained ones are not supported."
        )
    return "Save the adapter with PeftModel.save_pretrained and one adapter only."


def _factors(
    folder: Path,
    config: _PeftConfig,
    layer: str,
    pair: Mapping[str, torch.Tensor],
    recorded: Mapping[str, float],
) -> LoraFactors:
    rank, a, b = config.rank_of(layer), pair["A"], pair["B"]
    if a.dim() != 2 or b.dim() != 2 or a.shape[0] != rank or b.shape[1] != rank:
        raise AdapterError(
            f"{folder / _TENSORS}: {layer} has lora_A {list(a.shape)} and lora_B {list(b.shape)}; "
            f"for rank {rank} (r and rank_pattern of {_CONFIG}) they must be "
            f"[{rank}, in] and [out, {rank}]."
        )
    for factor, tensor in (("A", a), ("B", b)):
        if not tensor.is_floating_point():
            raise AdapterError(
                f"{folder / _TENSORS}: lora_{factor} of {layer} is {tensor.dtype}; "
                "factors are float32, float16 or bfloat16."
            )
    scale, exact = config.scale_of(layer), recorded.get(layer)
    if exact is not None and abs(exact - scale) <= _SCALE_TOLERANCE * abs(scale):
        scale = exact
    lora = LoraFactors(a=a, b=b, scale=scale)
    _require_finite(lora, layer=layer, where=str(folder / _TENSORS))
    return lora


def _require_finite(lora: LoraFactors, *, layer: str, where: str) -> None:
    for factor, tensor in (("A", lora.a), ("B", lora.b)):
        if not bool(torch.isfinite(tensor).all()):
            raise AdapterError(
                f"{where}: lora_{factor} of {layer} holds NaN or infinity; "
                "its training diverged. Use an earlier checkpoint."
            )
    if not isfinite(lora.scale):
        raise AdapterError(f"{where}: the scale of {layer} is {lora.scale}; it must be finite.")


def _match(pattern: Mapping[str, Value] | None, layer: str, default: Value) -> Value:
    """Return the value of the first pattern that is a dotted suffix of the name, as in peft."""
    for key, value in (pattern or {}).items():
        if re.match(rf"(.*\.)?({key})$", layer):
            return value
    return default


def _is_replaceable(folder: Path) -> bool:
    return folder.is_dir() and ((folder / _CONFIG).is_file() or not any(folder.iterdir()))


def _write_files(adapter: Adapter, folder: Path) -> None:
    tensors: dict[str, torch.Tensor] = {}
    for layer, lora in adapter.factors.items():
        # Clone: safetensors refuses tensors that share storage, such as views of a stack.
        tensors[f"{_PREFIX}{layer}.lora_A.weight"] = lora.a.detach().cpu().contiguous().clone()
        tensors[f"{_PREFIX}{layer}.lora_B.weight"] = lora.b.detach().cpu().contiguous().clone()
    config = _peft_config(adapter)
    parsed = _PeftConfig.model_validate(config)
    inexact = {k: f.scale for k, f in adapter.factors.items() if parsed.scale_of(k) != f.scale}
    metadata = {"format": "pt"} | ({_SCALES: json.dumps(inexact)} if inexact else {})
    if config["base_model_name_or_path"] != (adapter.base or None):
        metadata[_BASE] = adapter.base
    save_file(tensors, str(folder / _TENSORS), metadata=metadata)
    _sort_metadata(folder / _TENSORS)
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    (folder / _CONFIG).write_text(text, encoding="utf-8")
    _let_all_read(folder)


def _let_all_read(folder: Path) -> None:
    """Make files world-readable: safetensors writes 0600, but a server may run as another user."""
    folder.chmod(0o755)
    for file in folder.iterdir():
        file.chmod(0o644)


def _sort_metadata(file: Path) -> None:
    """Sort the metadata, which safetensors does not: equal adapters must give equal files."""
    with file.open("r+b") as handle:
        size = int.from_bytes(handle.read(8), "little")
        header = json.loads(handle.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        handle.seek(8)
        handle.write(text.ljust(size))


def _peft_config(adapter: Adapter) -> dict[str, Any]:
    """Build the config. Full layer names match exactly these layers in any base model.

    The layer of highest rank sets r and lora_alpha; patterns cover the others. If all layers share
    one rank and scale, a server that ignores alpha_pattern still applies the right scale.
    """
    factors = adapter.factors
    widest = max(factors.values(), key=lambda lora: lora.a.shape[0])
    rank, alpha = widest.a.shape[0], _alpha(widest)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": loadable_model(adapter.base) or None,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": list(factors),
        "rank_pattern": {
            _exactly(layer): lora.a.shape[0]
            for layer, lora in factors.items()
            if lora.a.shape[0] != rank
        },
        "alpha_pattern": {
            _exactly(layer): _alpha(lora)
            for layer, lora in factors.items()
            if _alpha(lora) != alpha
        },
        "use_rslora": False,
        "use_dora": False,
        "bias": "none",
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "init_lora_weights": True,
    }


def _alpha(lora: LoraFactors) -> float:
    """Return scale * rank, as an int if it is whole: older servers read lora_alpha as an int."""
    alpha = lora.scale * lora.a.shape[0]
    return int(alpha) if alpha == int(alpha) else alpha


def _exactly(layer: str) -> str:
    return "^" + re.escape(layer)


def _swap(staging: Path, folder: Path) -> None:
    if not folder.exists():
        staging.rename(folder)
        return
    retired = staging.with_name(staging.name + ".old")
    folder.rename(retired)
    os.rename(staging, folder)
    shutil.rmtree(retired, ignore_errors=True)


_HEAD, _EMBEDDINGS = "lm_head", "embed_tokens.weight"
_INDEX = "model.safetensors.index.json"


def write_merged(model: Path, adapter: Adapter, target: Path) -> None:
    """Write a copy of the model folder with the adapter merged in; `target` must not exist."""
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
        _let_all_read(target)
    if left:
        raise AdapterError(
            f"{adapter.name!r} adapts {min(left)}, which the weight files of {model} do not have."
        )


def _has_head(file: Path) -> bool:
    """Return whether the file has the output layer; a model without one uses its embeddings."""
    with safe_open(str(file), framework="pt") as handle:
        return f"{_HEAD}.weight" in handle.keys()  # noqa: SIM118


def _merge(tensors: dict[str, torch.Tensor], left: dict[str, LoraFactors]) -> None:
    """Merge the factors in `left` for these tensors, and remove them from `left`."""
    for name in [name for name in left if f"{name}.weight" in tensors]:
        tensors[f"{name}.weight"] = _sum(tensors[f"{name}.weight"], left.pop(name))


def _merge_head(tensors: dict[str, torch.Tensor], left: dict[str, LoraFactors]) -> bool:
    """Add an output layer to a tied model, if the adapter adapts it and `tensors` has the
    embeddings; return whether it was added."""
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
    """Record in the config and the index that the output layer has its own weights in `file`."""
    config: dict[str, Any] = json.loads((model / "config.json").read_text())
    config["tie_word_embeddings"] = False
    (target / "config.json").write_text(json.dumps(config, indent=2))
    if (model / _INDEX).exists():
        index: dict[str, Any] = json.loads((model / _INDEX).read_text())
        index["weight_map"][f"{_HEAD}.weight"] = file
        (target / _INDEX).write_text(json.dumps(index, indent=2))
