"""Which slot each token's adapter is in, worked out on the CPU and sent to the device in one piece.

vLLM works it out anew whenever the batch changes, in some forty small kernels and several waits for
the device, which end all overlap of one step with the next. `TokenIndex` has vLLM's
own code do the same on a twin of its tables in ordinary memory, then copies the twin over.
"""

from __future__ import annotations

import copy
import logging
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

__all__ = ["install_token_index"]

logger = logging.getLogger(__name__)
_ALIGNED = 16


def install_token_index(inner: Any, device: Any) -> bool:
    """Whether every table of this worker's adapter manager is now kept by a TokenIndex.

    A twin that differs from vLLM's own result in any number is not used.
    """
    if device.type != "cuda":
        return False
    try:
        tables = list(inner.punica_wrapper_mapping.values())
        indexes = [TokenIndex(table, device) for table in tables]
        is_equal = all(index.agrees(inner) for index in indexes)
    except Exception:  # whatever another version has there: its own way stays
        logger.warning("adapters' tables stay on the device", exc_info=True)
        return False
    finally:
        # The tables hold a test now: vLLM must not take it for its last batch.
        inner._last_mapping = None
    if is_equal:
        for table, index in zip(tables, indexes, strict=True):
            table.update_metadata = index.update
    return is_equal


class TokenIndex:
    """The twin of one `PunicaWrapper`, in one stretch of memory."""

    def __init__(self, table: Any, device: Any) -> None:
        import torch

        self._table, self._device = table, device
        self._stock = table.update_metadata
        on_device = [t for _, _, t in _tensors(table) if t.device.type == device.type]
        self._targets = [tensor.view(-1).view(torch.uint8) for tensor in on_device]
        self._sizes = []
        """Of every tensor and of the gap behind it, in bytes."""
        for target in self._targets:
            self._sizes += [len(target), -len(target) % _ALIGNED]
        self._flat = torch.zeros(sum(self._sizes), dtype=torch.uint8)
        self._twin = self._make_twin()

    def _make_twin(self) -> Any:
        """A copy whose tensors on the device are replaced by parts of `_flat`."""
        import torch

        parts = iter(torch.split(self._flat, self._sizes)[::2])
        twin = copy.copy(self._table)
        for name, value in vars(twin).items():
            if _holds_tensors(value):
                setattr(twin, name, copy.copy(value))
        for owner, name, tensor in list(_tensors(twin)):
            if tensor.device.type == self._device.type:
                setattr(owner, name, next(parts).view(tensor.dtype).view(tensor.shape))
        twin.device = torch.device("cpu")
        return twin

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Stands in for `update_metadata`."""
        import torch

        self._twin.update_metadata(*args, **kwargs)
        # A fresh page-locked copy each time: the device may not have read the last one yet.
        flat = self._flat.pin_memory() if self._device.type == "cuda" else self._flat.clone()
        sent = flat.to(self._device, non_blocking=True)
        sources = torch.split(sent, self._sizes)[::2]
        torch._foreach_copy_(self._targets, list(sources), non_blocking=True)
        for name, value in vars(self._twin).items():
            if isinstance(value, (bool, int)):
                setattr(self._table, name, value)

    def agrees(self, inner: Any) -> bool:
        """Whether both ways give the same numbers, for a batch with adapters and without."""
        import torch

        slots = [1, *[None] * (inner.lora_slots - 1)]
        for ids in ((1, 1, 0, 1), (0, 0)):
            mapping = SimpleNamespace(index_mapping=ids, prompt_mapping=ids[:2], is_prefill=True)
            results = []
            for update in (self._stock, self.update):
                for tensor in self._targets:
                    tensor.zero_()
                self._flat.zero_()
                update(mapping, slots, inner.lora_slots + 1, inner.vocab_size)
                tensors = [tensor.clone() for _, _, tensor in _tensors(self._table)]
                plain = [v for v in vars(self._table).values() if isinstance(v, (bool, int, list))]
                results.append((tensors, copy.deepcopy(plain)))
            (stock, stock_plain), (ours, own_plain) = results
            equal = [torch.equal(a, b) for a, b in zip(stock, ours, strict=True)]
            if not all(equal) or stock_plain != own_plain:
                return False
        return True


def _holds_tensors(value: Any) -> bool:
    """One of the tables' own parts, such as LoRAKernelMeta."""
    import torch

    parts = getattr(value, "__dict__", {})
    return not isinstance(value, torch.Tensor) and any(
        isinstance(part, torch.Tensor) for part in parts.values()
    )


def _tensors(table: Any) -> Iterator[tuple[Any, str, torch.Tensor]]:
    """Every tensor of a table and of its parts, with its owner and name, in a fixed order."""
    import torch

    for name, value in vars(table).items():
        if isinstance(value, torch.Tensor):
            yield table, name, value
        elif _holds_tensors(value):
            for field, part in vars(value).items():
                if isinstance(part, torch.Tensor):
                    yield value, field, part
