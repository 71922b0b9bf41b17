"""The processes that torchrun started, seen from one of them.

    torchrun --nproc-per-node 2 -m rookery grpo run mine.yaml

The first process owns the run and broadcasts its calls; each process does its part of them.

| process    | does                                        | waits for                 |
|------------|---------------------------------------------|---------------------------|
| the first  | broadcasts a call, does its part, joins all | the parts, STEP_S at most |
| the others | receive a call, do their part               | a call, CALL_S at most    |

If a process dies, its connections close, and those waiting for it fail at once.
"""

import os
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

from rookery.errors import TrainError, boundary
from rookery.types import Datum

__all__ = [
    "ALONE",
    "Method",
    "Processes",
    "RankCall",
    "fill",
    "join_processes",
    "own_part",
    "whole",
]

# Tensors spread over processes (torch's DTensor) beside plain ones.
#
# All processes call `whole` and `fill`, in the same order.


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Gather the whole tensor in each process; a plain tensor is returned as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's shard as a view; a plain tensor is returned as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def fill(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Write the values of the whole tensor, which each process has, into this process's shard."""
    if isinstance(tensor, DTensor):
        values = distribute_tensor(
            values.to(tensor.device), tensor.device_mesh, tensor.placements, src_data_rank=None
        )
    tensor.copy_(values)


STEP_S = 1800.0
"""Most seconds that one process may compute while the others wait for its part."""
CALL_S = 7 * 24 * 3600.0
"""Most seconds between two calls, while answers are drawn and scored."""
Part = TypeVar("Part")
Method = Literal[
    "add", "forward", "forward_backward", "load", "optim_step", "remove", "save", "weights_of"
]


@dataclass(frozen=True, slots=True)
class RankCall:
    """A call that the first process begins, for the others to do their part."""

    method: Method
    trainee: str
    argument: object = None
    """The call's request, step, path or adapter."""


@dataclass(frozen=True, slots=True)
class Processes:
    """All processes of the training. `ALONE` is a single one, for which every method is free."""

    rank: int
    size: int
    _calls: Any = None
    """Process group for calls: its timeout is longer than that of the computing group."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def share(self, data: Sequence[Datum]) -> list[int]:
        """Return the places of this process's data; each process gets short and long ones."""
        by_length = sorted(range(len(data)), key=lambda place: len(data[place].tokens))
        return sorted(by_length[self.rank :: self.size])

    def broadcast(self, call: object) -> None:
        """Send a call from the first process; the others `receive` it."""
        if self.size == 1:
            return
        assert self.is_first
        with _lost():
            dist.broadcast_object_list([call], src=0, group=self._calls)

    def receive(self) -> object:
        received: list[object] = [None]
        with _lost(), boundary(TrainError, "reading a call", foreign=(pickle.UnpicklingError,)):
            dist.broadcast_object_list(received, src=0, group=self._calls)
        return received[0]

    def exchange(self, part: Part) -> list[Part]:
        """Return the parts of all processes, in rank order, in each process."""
        if self.size == 1:
            return [part]
        parts: list[Part | None] = [None] * self.size
        with _lost():
            dist.all_gather_object(parts, part)
        return [part for part in parts if part is not None]

    def add_up(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace each tensor by its sum over all processes, with the same bits in each process."""
        if self.size == 1 or not tensors:
            return
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        with _lost():
            dist.all_reduce(flat)
        sizes = [tensor.numel() for tensor in tensors]
        for tensor, total in zip(tensors, torch.split(flat, sizes), strict=True):
            tensor.copy_(total.view_as(tensor))

    def leave(self) -> None:
        """Close the group. All processes call this, when no call is under way."""
        if self.size > 1:
            dist.destroy_process_group()


ALONE = Processes(rank=0, size=1)


def join_processes(device: str) -> Processes:
    """Join the processes that torchrun started; `ALONE` without torchrun."""
    if int(os.environ.get("WORLD_SIZE") or 1) == 1:
        return ALONE
    with boundary(TrainError, "The processes of torchrun do not find each other"):
        backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=STEP_S))
        calls = dist.new_group(backend="gloo", timeout=timedelta(seconds=CALL_S))
    return Processes(dist.get_rank(), dist.get_world_size(), calls)


def _lost() -> Any:
    return boundary(
        TrainError,
        "Another process of the training has ended or does not answer",
        remedy={RuntimeError: "Read what it printed, then resume the run."},
    )
