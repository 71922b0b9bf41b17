"""Tensors that are spread over processes (torch's DTensor) beside plain ones.

`whole` and `fill` are called by all processes, in the same order.
"""

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

__all__ = ["fill", "own_part", "whole"]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of it, in each process; a plain tensor is returned as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this process keeps of it, as a view; a plain tensor is returned as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def fill(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Write the values of the whole tensor, which each process has, into the part it keeps."""
    if isinstance(tensor, DTensor):
        values = distribute_tensor(
            values.to(tensor.device), tensor.device_mesh, tensor.placements, src_data_rank=None
        )
    tensor.copy_(values)
