"""The processes that torchrun started, as one of them sees them.

    torchrun --nproc-per-node 2 -m rookery grpo run mine.yaml

The first one owns the run and tells the others what it does; each does its part of it.

| who        | does                                                | waits for                  |
|------------|-----------------------------------------------------|----------------------------|
| the first  | tells a call, does its part, puts parts together    | the parts, STEP_S at most  |
| the others | receive a call, do their part                          | a call, CALL_S at most     |

A process that dies closes its connections: who waits for it is told at once.
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

# Tensors that are spread over processes (torch's DTensor) beside plain ones.
#
# `whole` and `fill` are called by all processes, in the same order.


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


STEP_S = 1800.0
"""The longest that one process may compute while the others wait for its part."""
CALL_S = 7 * 24 * 3600.0
"""The longest between two calls: answers are drawn and scored meanwhile."""
Part = TypeVar("Part")
Method = Literal[
    "add", "forward", "forward_backward", "load", "optim_step", "remove", "save", "weights_of"
]


@dataclass(frozen=True, slots=True)
class RankCall:
    """What the first process begins to do, for the others to do their part."""

    method: Method
    trainee: str
    argument: object = None
    """The request, the step, the path or the adapter."""


@dataclass(frozen=True, slots=True)
class Processes:
    """All of them; `ALONE` is a process without others, for which everything here is free."""

    rank: int
    size: int
    _calls: Any = None
    """The group that calls are told in: it waits longer than the one that computes."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def share(self, data: Sequence[Datum]) -> list[int]:
        """The places of the data that this process computes: each gets short and long ones."""
        by_length = sorted(range(len(data)), key=lambda place: len(data[place].tokens))
        return sorted(by_length[self.rank :: self.size])

    def broadcast(self, call: object) -> None:
        """Called by the first process: the others `receive` it."""
        if self.size == 1:
            return
        assert self.is_first
        with _lost():
            dist.broadcast_object_list([call], src=0, group=self._calls)

    def receive(self) -> object:
        """What the first process told."""
        told: list[object] = [None]
        with _lost(), boundary(TrainError, "reading a call", foreign=(pickle.UnpicklingError,)):
            dist.broadcast_object_list(told, src=0, group=self._calls)
        return told[0]

    def exchange(self, part: Part) -> list[Part]:
        """The parts of all, in the order of the processes, for each of them."""
        if self.size == 1:
            return [part]
        parts: list[Part | None] = [None] * self.size
        with _lost():
            dist.all_gather_object(parts, part)
        return [part for part in parts if part is not None]

    def add_up(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace each by the sum over all processes, which has the same bits in each of them."""
        if self.size == 1 or not tensors:
            return
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        with _lost():
            dist.all_reduce(flat)
        sizes = [tensor.numel() for tensor in tensors]
        for tensor, total in zip(tensors, torch.split(flat, sizes), strict=True):
            tensor.copy_(total.view_as(tensor))

    def leave(self) -> None:
        """Called by all of them, when no call is under way."""
        if self.size > 1:
            dist.destroy_process_group()


ALONE = Processes(rank=0, size=1)


def join_processes(device: str) -> Processes:
    """This process as one of those that torchrun started; `ALONE` without it."""
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
