"""Imported by vLLM's workers in tests: its weight transfer `nccl`, without NCCL.

What differs is the group alone: tensors go through the store at which its processes meet.
"""

from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine


class StoreEngine(NCCLWeightTransferEngine):  # type: ignore[misc]
    """Takes the tensors one by one, as the original does when they are not packed."""

    def init_transfer_engine(self, init_info: Any) -> None:
        assert not init_info.packed
        self._store = TCPStore(init_info.master_address, init_info.master_port, is_master=False)
        self._num = 0

    def update_weights(self, update_info: dict[str, Any]) -> None:
        info = self.parse_update_info(update_info)
        for name, dtype, shape in zip(info.names, info.dtype_names, info.shapes, strict=True):
            data = bytearray(self._store.get(f"tensor {self._num}"))
            self._num += 1
            weight = torch.frombuffer(data, dtype=getattr(torch, dtype)).view(shape)
            self.model.load_weights([(name, weight)])

    def shutdown(self) -> None:
        del self._store


WeightTransferEngineFactory._registry["nccl"] = lambda: StoreEngine


class WorkerExtension:
    """Nothing but a reason to import this file."""
