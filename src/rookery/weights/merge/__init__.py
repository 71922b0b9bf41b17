"""Operators that merge adapters into children, on delta W or on its two factors separately."""

from rookery.weights.merge.children import (
    adapted_blocks,
    block_names,
    change_rank,
    merge,
    merge_by_block,
    merge_stack,
)
from rookery.weights.merge.cross import Cross, Space
from rookery.weights.merge.methods import (
    DareConfig,
    DareTiesConfig,
    LayerwiseConfig,
    LinearConfig,
    MergeConfig,
    TiesConfig,
    is_dense,
)

__all__ = [
    "Cross",
    "DareConfig",
    "DareTiesConfig",
    "LayerwiseConfig",
    "LinearConfig",
    "MergeConfig",
    "Space",
    "TiesConfig",
    "adapted_blocks",
    "block_names",
    "change_rank",
    "is_dense",
    "merge",
    "merge_by_block",
    "merge_stack",
]
