"""Sums over the targets of each datum, given back to each of those targets.

Values (1, 2, 5) of data (0, 0, 1): sums (3, 3, 5).
"""

import torch

__all__ = ["sequence_means", "sequence_sums"]


def sequence_sums(values: torch.Tensor, datum: torch.Tensor) -> torch.Tensor:
    """[T]: for each target the sum over its datum."""
    num_data = int(datum.max()) + 1
    return values.new_zeros(num_data).index_add(0, datum, values)[datum]


def sequence_means(
    values: torch.Tensor, datum: torch.Tensor, *, is_learned: torch.Tensor
) -> torch.Tensor:
    """[T]: for each target the mean over the learned targets of its datum; 0 if there are none."""
    counts = sequence_sums(is_learned.to(values.dtype), datum)
    return sequence_sums(values * is_learned, datum) / counts.clamp_min(1)
