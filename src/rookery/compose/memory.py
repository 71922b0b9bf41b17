"""How much memory this process has taken at most."""

import resource
import sys

import torch

__all__ = ["peak_memory"]


def peak_memory() -> dict[str, int]:
    """Bytes by device: this process's own memory, and each GPU's."""
    unit = 1 if sys.platform == "darwin" else 1024
    peaks = {"this process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    for index in range(torch.cuda.device_count()):
        peaks[f"GPU {index}"] = torch.cuda.max_memory_reserved(index)
    return peaks
