"""Keeps adapters of the output layer from tokens of the base model, on the CPU.

vLLM marks a token without an adapter by slot -1. Its GPU kernels skip those; its CPU code takes
the last slot for them, also in a batch without any adapter. An input of zeros adds nothing to the
logits, whichever slot it meets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["install_output_layer"]


def install_output_layer(inner: Any, device: Any) -> bool:
    """Whether requests for the base model are answered without the adapters' output layers."""
    if device.type != "cpu":
        return True
    tables = list(getattr(inner, "punica_wrapper_mapping", {}).values())
    if not tables or not all(hasattr(table, "sampler_indices") for table in tables):
        return False  # another version keeps them elsewhere
    for table in tables:
        table.add_lora_logits = _Logits(table)
    return True


class _Logits:
    """Stands in for `add_lora_logits` of one `PunicaWrapper`."""

    def __init__(self, table: Any) -> None:
        self._table = table
        self._stock = table.add_lora_logits

    def __call__(self, y: torch.Tensor, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        is_adapted = (self._table.sampler_indices >= 0).unsqueeze(-1)
        return self._stock(y, x.where(is_adapted, 0), *args, **kwargs)
