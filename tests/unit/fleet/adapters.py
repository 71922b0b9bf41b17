"""Small adapters, and the folder of a model they fit, without importing transformers."""

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file

from rookery.types import Adapter, LoraFactors
from rookery.weights import make_adapter

Q, K = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"
SHAPES = {Q: (32, 32), K: (32, 16)}


def make_small(
    name: str, seed: int = 0, *, rank: int = 2, base: str = "tiny", scale: float = 2.0
) -> Adapter:
    generator = torch.Generator().manual_seed(seed)
    factors = {
        layer: LoraFactors(
            a=torch.randn(rank, size_in, generator=generator),
            b=torch.randn(size_out, rank, generator=generator),
            scale=scale,
        )
        for layer, (size_in, size_out) in SHAPES.items()
    }
    return make_adapter(name, base=base, factors=factors)


def write_model(folder: Path) -> Path:
    """What `read_shapes` reads of a model folder."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    tensors: dict[str, np.ndarray] = {
        f"{n}.weight": np.zeros((o, i), np.float32) for n, (i, o) in SHAPES.items()
    }
    tensors["model.norm.weight"] = np.zeros(32, np.float32)
    tensors["model.embed_tokens.weight"] = np.zeros((97, 32), np.float32)
    save_file(tensors, folder / "model.safetensors")
    return folder
