"""Loads a model folder as a SlottedModel, and refuses models that the engine cannot run."""

import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
import transformers
from torch import nn

from rookery.errors import ModelError, boundary
from rookery.model_names import model_names
from rookery.slots.attention import (
    ATTENTION,
    CausalAttend,
    Heads,
    HeadsSeen,
    PositionProbe,
    agree,
    gap,
    register,
)
from rookery.slots.linear import EvenActivation, drop_pages
from rookery.slots.model import SlottedModel
from rookery.slots.rows import PositionEncoding

__all__ = [
    "attach_model",
    "find_device",
    "load_model",
    "make_empty_model",
    "read_weights",
    "require_decoder",
    "weight_shapes",
]

_LAYER_TYPES = ("full_attention", "sliding_attention")
_BUILDING = threading.RLock()
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def _one_at_a_time(build: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Serialise the building of models: transformers changes torch's default dtype during it, and
    accelerate patches how modules register parameters, both for all threads."""

    @functools.wraps(build)
    def locked(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with _BUILDING:
            return build(*args, **kwargs)

    return locked


def find_device(name: str) -> str:
    """Resolve `auto` to the GPU if there is one, else the CPU; ModelError for a missing GPU."""
    has_gpu = torch.cuda.is_available()
    if name == "auto":
        return "cuda" if has_gpu else "cpu"
    if name.startswith("cuda") and not has_gpu:
        raise ModelError(f"device is {name}, but torch sees no GPU here: write cpu or auto.")
    return name


@_one_at_a_time
def load_model(
    folder: Path,
    *,
    device: str = "cpu",
    dtype: str = "auto",
    names: frozenset[str] = frozenset(),
    is_exact: bool = False,
) -> SlottedModel:
    """Load a model folder. dtype `auto` is float32 on the CPU and the folder's own type elsewhere.

    `names` are other names of the same weights, for matching adapters to their base. `is_exact` is
    for an engine and a trainer that share an unpacked model on the CPU: a row then has equal bits
    in a prompt, in decoding and in training, but attention takes longer.
    """
    require_config(folder)
    kind: Any = dtype
    if dtype == "auto":
        kind = torch.float32 if device == "cpu" else "auto"
    with boundary(ModelError, f"The model in {folder} cannot be loaded"):
        require_decoder(folder)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=kind, attn_implementation="eager"
        )
        model = model.to(device).eval().requires_grad_(requires_grad=False)
    _even_activations(model, is_exact=is_exact)
    slotted = finish_model(model, folder=folder, names=names)
    slotted.is_exact = is_exact and slotted.device.type == "cpu"
    if slotted.is_exact and slotted.has_experts:
        raise ModelError(
            f"{folder} is a mixture of experts: how many rows an expert gets depends on the batch, "
            "and the last bits with it, so that engine and trainer cannot agree exactly. Write "
            "share: false."
        )
    return slotted


@_one_at_a_time
def finish_model(
    model: "transformers.PreTrainedModel", *, folder: Path, names: frozenset[str] = frozenset()
) -> SlottedModel:
    """Add slots to a model with weights; ModelError if its layers cannot be driven from here."""
    _check_parts(model, folder)
    configured = getattr(model.config, "_name_or_path", "") or ""
    known = {str(folder), str(folder.resolve()), configured, *names}
    with boundary(
        ModelError,
        f"{folder}: the embedded engine cannot drive the layers of {type(model).__name__}",
        remedy={Exception: "Serve this model with vLLM."},
    ):
        return _slotted(model, names=model_names(*known), folder=folder)


@_one_at_a_time
def make_empty_model(
    folder: Path, *, device: str = "cpu", dtype: str = "auto", is_exact: bool = False
) -> SlottedModel:
    """Make the model of a folder from its config, without its weights. Call it under torch's
    FakeTensorMode, where it takes no memory and computes only shapes."""
    require_config(folder)
    with boundary(ModelError, f"The model in {folder} cannot be described"):
        config = require_decoder(folder)
        stored = getattr(config, "dtype", None) or torch.float32
        kind = getattr(torch, dtype) if dtype != "auto" else stored
        kind = torch.float32 if dtype == "auto" and device == "cpu" else kind
        register()
        with torch.device(device):
            model = transformers.AutoModelForCausalLM.from_config(
                config, dtype=kind, attn_implementation=ATTENTION
            )
        model = model.eval().requires_grad_(requires_grad=False)
    _even_activations(model, is_exact=is_exact)
    _check_parts(model, folder)
    declared: int = model.config.get_text_config().max_position_embeddings
    slotted = SlottedModel(model, names=frozenset(), context_tokens=declared)
    slotted.is_exact = is_exact and device == "cpu"
    return slotted


def _even_activations(model: "transformers.PreTrainedModel", *, is_exact: bool) -> None:
    """Install `EvenActivation` on the CPU if a row's bits would depend on other rows: with threads
    that share a pass (`is_exact`), or a width that is not a multiple of the vector width."""
    if model.device.type != "cpu":
        return
    width = getattr(model.config.get_text_config(), "intermediate_size", 0)
    for module in list(model.modules()) if is_exact or width % 32 else []:
        plain = getattr(module, "act_fn", None)
        if isinstance(plain, nn.Module):
            module.act_fn = EvenActivation(plain)


def require_config(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"{folder} is not a model folder: it has no config.json. Give a folder written by "
            "save_pretrained, a Hugging Face id, or `smollm2`."
        )


def require_decoder(folder: Path) -> "transformers.PreTrainedConfig":
    """Return the config of a causal language model; ModelError for any other model.

    transformers' own error would list all its decoders. It also has causal heads for encoders such
    as BERT, which are decoders only if their config says so.
    """
    require_config(folder)
    with boundary(ModelError, f"The model in {folder} cannot be loaded"):
        config = transformers.AutoConfig.from_pretrained(folder)
    is_decoder = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING and (
        type(config) not in transformers.MODEL_FOR_MASKED_LM_MAPPING
        or getattr(config, "is_decoder", False)
    )
    if getattr(config, "is_encoder_decoder", False) or not is_decoder:
        raise ModelError(
            f"{folder} is a model of the type {config.model_type}, which does not continue texts: "
            "take a decoder model, such as one of the Llama, Qwen, Gemma, Mistral or Phi kind."
        )
    return config


def _slotted(
    model: "transformers.PreTrainedModel", *, names: frozenset[str], folder: Path
) -> SlottedModel:
    """Add slots, and check with a probe that the logits equal those of transformers."""
    text = model.config.get_text_config()
    context_tokens = PositionEncoding(model.get_decoder()).fixed_tokens(
        text.max_position_embeddings
    )
    probe = PositionProbe(text.vocab_size, context_tokens, device=model.device)
    with torch.inference_mode(), _reading_by_layers(model):
        expected = model(probe.tokens, position_ids=probe.positions).logits.flatten(0, 1).float()
    _check_finite(model, expected, folder)
    register()
    model.set_attn_implementation(ATTENTION)
    if model.device.type == "cuda":
        from rookery.slots.gpu import fuse_modules  # needs Triton

        fuse_modules(model)
    slotted = SlottedModel(model, names=names)
    with _reading_by_layers(model):
        heads = _check_probe(slotted, probe, expected, folder)
    _check_windows(model, heads, folder)
    return slotted


@contextmanager
def _reading_by_layers(model: "transformers.PreTrainedModel") -> Iterator[None]:
    """On the CPU, release each layer's pages after its use, so that a pass holds one layer of a
    mapped file and not the whole file."""
    layers = model.get_decoder().layers if model.device.type == "cpu" else ()
    hooks = [
        layer.register_forward_hook(lambda done, *_: drop_pages(done.parameters()))
        for layer in layers
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _check_parts(model: "transformers.PreTrainedModel", folder: Path) -> None:
    decoder = model.get_decoder()
    parts = ("embed_tokens", "layers", "rotary_emb")
    missing = [part for part in parts if not hasattr(decoder, part)]
    if missing or not hasattr(model, "lm_head"):
        raise ModelError(
            f"{folder}: {type(model).__name__} has no {', '.join(missing) or 'lm_head'}; the "
            "embedded engine runs decoder models of the Llama, Qwen, Gemma, Mistral and Phi kind. "
            "Serve this one with vLLM."
        )


def _check_finite(
    model: "transformers.PreTrainedModel", logits: torch.Tensor, folder: Path
) -> None:
    if torch.isfinite(logits).all():
        return
    broken = [n for n, p in model.named_parameters() if not torch.isfinite(p).all()]
    where = f"{broken[0]} holds NaN or infinity" if broken else "its logits overflow"
    raise ModelError(
        f"The model in {folder} is broken: {where}. Fetch or convert it again"
        + ("." if broken else ", or load it with dtype float32.")
    )


def _check_probe(
    model: SlottedModel, probe: PositionProbe, expected: torch.Tensor, folder: Path
) -> list[Heads]:
    attend = HeadsSeen(CausalAttend(probe.lengths, device=model.device))
    with torch.inference_mode():
        hidden = model.embed(probe.tokens.flatten())
        hidden = model.layers(hidden, probe.positions.flatten(), attend=attend)
        got = model.logits(hidden)
    if not agree(got, expected, dtype=model.dtype):
        off = gap(got, expected, dtype=model.dtype)
        raise ModelError(
            f"{folder}: this architecture's forward pass does more than the embedded engine "
            f"drives (probe logits differ by {off:.3g}). Serve this model with vLLM."
        )
    return attend.heads


def _check_windows(model: "transformers.PreTrainedModel", heads: list[Heads], folder: Path) -> None:
    """Compare each layer's window with the config: the probe is shorter than most windows."""
    text = model.config.get_text_config()
    for index, kind in enumerate(getattr(text, "layer_types", None) or ()):
        window = text.sliding_window if kind == "sliding_attention" else None
        if kind not in _LAYER_TYPES or heads[index].window != window:
            raise ModelError(
                f"{folder}: layer {index} is of the type {kind}, which the embedded engine would "
                f"run with a window of {heads[index].window} tokens. Serve this model with vLLM."
            )


FindWeights = Callable[[Mapping[str, tuple[int, ...]]], Mapping[str, torch.Tensor]]
"""Returns the weights with the given names and shapes, or raises if one is missing."""


@_one_at_a_time
def attach_model(
    folder: Path, find: FindWeights, *, names: frozenset[str] = frozenset()
) -> SlottedModel:
    """Make the model of a folder over weights from `find`, such as an inference server's memory.

    The weights in the folder are not read. Tied weights are requested once. The model's own code
    makes its other tensors, such as the frequencies of the position encoding.
    """
    model = _empty_model(folder)
    weights = find(_shapes(model))
    _set_weights(model, weights)
    device = next(iter(weights.values())).device
    model = model.to(device).eval().requires_grad_(requires_grad=False)
    if (folder / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    return finish_model(model, folder=folder, names=names)


def weight_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the weights that `attach_model` requests."""
    return _shapes(_empty_model(folder))


@_one_at_a_time
def read_weights(folder: Path, *, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Read the weights in a model folder, by the names of `weight_shapes`."""
    require_config(folder)
    with boundary(ModelError, f"The model in {folder} cannot be loaded"):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@_one_at_a_time
def _empty_model(folder: Path) -> "transformers.PreTrainedModel":
    require_config(folder)
    with boundary(ModelError, f"The model in {folder} cannot be described"):
        config = transformers.AutoConfig.from_pretrained(folder)
        from accelerate import init_empty_weights  # takes a second

        with init_empty_weights(include_buffers=False):
            model: transformers.PreTrainedModel = transformers.AutoModelForCausalLM.from_config(
                config, attn_implementation="eager"
            )
    model.tie_weights()  # init_empty_weights untied them
    return model


def _shapes(model: "transformers.PreTrainedModel") -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


def _set_weights(
    model: "transformers.PreTrainedModel", weights: Mapping[str, torch.Tensor]
) -> None:
    for name, tensor in weights.items():
        module_name, _, leaf = name.rpartition(".")
        module = model.get_submodule(module_name)
        setattr(module, leaf, nn.Parameter(tensor, requires_grad=False))
    model.tie_weights()
    empty = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if empty:
        raise ModelError(f"No weights were given for {empty[0]}.")
