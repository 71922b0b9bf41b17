"""Reads a model folder into a slotted model, and finds out what the engine could not run."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rookery.errors import ModelError, boundary
from rookery.model_names import model_names
from rookery.slots.attention import ATTENTION, CausalAttend
from rookery.slots.model import SlottedModel
from rookery.slots.probe import agree, gap, probe_tokens

__all__ = ["load_model"]


def load_model(
    folder: Path, *, device: str = "cpu", dtype: str = "auto", names: frozenset[str] = frozenset()
) -> SlottedModel:
    """Read a model folder. `auto` is float32 on the CPU and the folder's own type elsewhere.

    `names` are further names the same weights go by, for matching adapters to their base.
    """
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"{folder} is not a model folder: it has no config.json. Give a folder written by "
            "save_pretrained, a Hugging Face id, or `smollm2`."
        )
    kind: Any = dtype
    if dtype == "auto":
        kind = torch.float32 if device == "cpu" else "auto"
    with boundary(ModelError, f"The model in {folder} cannot be loaded"):
        config = AutoConfig.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=kind, attn_implementation="eager"
        )
        model = model.to(device).eval().requires_grad_(requires_grad=False)
    _check_parts(model, folder)
    tokens = probe_tokens(vocab_size=config.get_text_config().vocab_size, device=model.device)
    with torch.inference_mode():
        expected = model(tokens[None]).logits[0].float()
    _check_finite(model, expected, folder)
    model.set_attn_implementation(ATTENTION)
    known = {str(folder), str(folder.resolve()), getattr(config, "_name_or_path", "") or "", *names}
    slotted = SlottedModel(model, names=model_names(*known))
    _check_probe(slotted, tokens, expected, folder)
    return slotted


def _check_parts(model: PreTrainedModel, folder: Path) -> None:
    decoder = model.get_decoder()
    parts = ("embed_tokens", "layers", "rotary_emb")
    missing = [part for part in parts if not hasattr(decoder, part)]
    if missing or not hasattr(model, "lm_head"):
        raise ModelError(
            f"{folder}: {type(model).__name__} has no {', '.join(missing) or 'lm_head'}; the "
            "embedded engine runs decoder models of the Llama, Qwen, Gemma, Mistral and Phi kind. "
            "Serve this one with vLLM."
        )


def _check_finite(model: PreTrainedModel, logits: torch.Tensor, folder: Path) -> None:
    if torch.isfinite(logits).all():
        return
    broken = [n for n, p in model.named_parameters() if not torch.isfinite(p).all()]
    where = f"{broken[0]} holds NaN or infinity" if broken else "its logits overflow"
    raise ModelError(
        f"The model in {folder} is broken: {where}. Fetch or convert it again"
        + ("." if broken else ", or load it with dtype float32.")
    )


def _check_probe(
    model: SlottedModel, tokens: torch.Tensor, expected: torch.Tensor, folder: Path
) -> None:
    attend = CausalAttend([len(tokens)], device=model.device)
    positions = torch.arange(len(tokens), device=model.device)
    with torch.inference_mode():
        got = model.logits(model.layers(model.embed(tokens), positions, attend=attend))
    if not agree(got, expected, dtype=model.dtype):
        raise ModelError(
            f"{folder}: this architecture's forward pass does more than the embedded engine "
            f"drives (probe logits differ by {gap(got, expected):.3g}). Serve this model with vLLM."
        )
