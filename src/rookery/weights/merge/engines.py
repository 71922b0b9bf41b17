"""What runs the passes where the rows are."""

from typing import Any

import torch

from rookery.weights.merge.blend import Engine
from rookery.weights.merge.compiled import load_engine
from rookery.weights.merge.rows import Rows
from rookery.weights.merge.tensors import Tensors

__all__ = ["open_rows"]


def open_rows(rows: Rows, out: torch.Tensor) -> tuple[Engine[Any], Any, Any]:
    """An engine, and the rows [P, M] and the result as it takes them."""
    compiled = load_engine() if rows.data.device.type == "cpu" else None
    if compiled is not None:
        return compiled, rows.data.numpy(), out.numpy()
    return Tensors(), rows.data, out
