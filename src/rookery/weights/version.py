"""The content hash of LoRA weights, and the one way to build an Adapter that carries it.

adapter = make_adapter("poet", base="smollm2", factors={"model.layers.0.mlp.up_proj": factors})
adapter.version  # "3fa94c01d2e8b7a6"
"""

import hashlib
import struct
from collections.abc import Mapping

import torch

from rookery.types import Adapter, LoraFactors

__all__ = ["adapter_version", "make_adapter"]

_VERSION_BYTES = 8
"""16 hex characters: among a million adapters two agree by chance with probability 3e-8."""


def make_adapter(name: str, *, base: str, factors: Mapping[str, LoraFactors]) -> Adapter:
    """An adapter whose layers are in sorted order and whose version is the hash of its weights."""
    ordered = {layer: factors[layer] for layer in sorted(factors)}
    return Adapter(name=name, base=base, factors=ordered, version=adapter_version(ordered))


def adapter_version(factors: Mapping[str, LoraFactors]) -> str:
    """16 hex characters over layer names, scales, shapes, dtypes and bytes.

    The order of the mapping, strides and the device do not matter. The same delta written with
    another rank or dtype is another version: a server may round it otherwise.
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
