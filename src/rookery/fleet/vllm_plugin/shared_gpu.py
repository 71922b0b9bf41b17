"""vLLM's worker for several servers on one GPU.

vLLM loads it by `--worker-cls`. It measures the GPU's free memory before and after a trial pass,
then takes its keys and values. If another server took its own in between, vLLM would count those as
part of the pass. Here servers do this one after another.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

from vllm.utils.mem_utils import MemorySnapshot
from vllm.v1.worker import gpu_worker

__all__ = ["Worker"]


class Worker(gpu_worker.Worker):  # type: ignore[misc]
    """A worker that waits for its turn to take memory."""

    def determine_available_memory(self) -> int:
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        self._turn = Path(__file__).with_name(f"gpu-{gpus}.lock").open("w")
        fcntl.flock(self._turn, fcntl.LOCK_EX)
        # What others took since this worker began is not part of its trial pass.
        self.init_snapshot = MemorySnapshot(device=self.device)
        return int(super().determine_available_memory())

    def initialize_from_config(self, *args: Any, **kwargs: Any) -> None:
        super().initialize_from_config(*args, **kwargs)
        self._turn.close()
