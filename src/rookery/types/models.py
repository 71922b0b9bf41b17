"""Models and weights: what a request names, and what makes it another model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = [
    "Adapter",
    "Json",
    "LoraFactors",
    "ModelRef",
    "ModelWeights",
    "TokenIds",
    "Weights",
]

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]


TokenIds = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRef:
    """What a request names: one version of one set of weights. New weights are a new version.

    `ModelRef(name="base", version="smollm2")`, `ModelRef(name="poet", version="3fa94c01")`.
    """

    name: str
    version: str

    @property
    def served_name(self) -> str:
        """The one string a server knows these weights by; never reused for other weights."""
        return f"{self.name}@{self.version}"


@dataclass(frozen=True, slots=True)
class LoraFactors:
    """The two factors of one adapted linear layer: delta W = scale * b @ a."""

    a: torch.Tensor
    """[rank, in]"""
    b: torch.Tensor
    """[out, rank]"""
    scale: float
    """alpha / rank, or alpha / sqrt(rank) for rank-stabilised adapters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """LoRA weights of one base model.

    `factors` is keyed by the linear layer's name in the base model, for example
    "model.layers.0.self_attn.q_proj". Layers may have different ranks.
    """

    name: str
    base: str
    """`base_model_name_or_path` of the PEFT config; "" when it is not known."""
    factors: Mapping[str, LoraFactors]
    version: str
    """Content hash of the factors: equal weights, equal version."""

    @property
    def rank(self) -> int:
        """The largest rank of any layer."""
        return max((f.a.shape[0] for f in self.factors.values()), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWeights:
    """All weights of one model, by their names in its folder."""

    name: str
    tensors: Mapping[str, torch.Tensor]
    version: str
    """Content hash or step: other weights, another version."""


Weights = Adapter | ModelWeights
"""What a trainer makes and a publisher hands on."""
