"""vLLM's worker for several servers on one GPU.

vLLM loads it by `--worker-cls`. It measures the GPU's free memory before and after a trial pass,
then takes its keys and values. If another server took its own in between, vLLM would count those as
part of the pass. Here servers do this one after another.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any, TextIO

from vllm.utils.mem_utils import MemorySnapshot
from vllm.v1.worker import gpu_worker

__all__ = ["Worker"]


class Worker(gpu_worker.Worker):  # type: ignore[misc]
    """A worker that waits for its turn to take memory."""

    init_snapshot: Any
    _turn: TextIO | None = None

    def determine_available_memory(self) -> int:
        gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "").replace("/", "-")  # MIG-GPU-.../1/0
        self._turn = Path(__file__).with_name(f"gpu-{gpu}.lock").open("w")
        fcntl.flock(self._turn, fcntl.LOCK_EX)
        # What others took since this worker began is not part of its trial pass.
        began, now = self.init_snapshot, MemorySnapshot(device=self.device)
        # Its own weights are: vLLM 0.32 finds them as free memory that is gone since `began`.
        now.free_memory += now.torch_memory - began.torch_memory
        self.init_snapshot = now
        return int(super().determine_available_memory())

    def initialize_from_config(self, *args: Any, **kwargs: Any) -> None:
        super().initialize_from_config(*args, **kwargs)
        if self._turn is not None:  # None for a model without keys and values
            # Closing is not enough: a child that was forked meanwhile has the file too.
            fcntl.flock(self._turn, fcntl.LOCK_UN)
            self._turn.close()
