"""The processes that torchrun started as tensor-parallel ranks: all compute every pass, each with
its part of every layer.

    torchrun --nproc-per-node 2 -m rookery.megatron --model FOLDER
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from rookery.errors import RookeryError, TrainError, boundary
from rookery.train.processes import STEP_S, Processes
from rookery.types import Datum

__all__ = ["Ranks", "join_ranks"]

IDLE_S = 365 * 24 * 3600.0
"""The longest between two calls. Ranks whose first one dies are told at once, by torchrun and by
the closed connection."""

Part = TypeVar("Part")


@dataclass(frozen=True, slots=True)
class Ranks(Processes):
    """Unlike processes that share data: each has all of it, and the same results."""

    def share(self, data: Sequence[Datum]) -> list[int]:
        return list(range(len(data)))

    def exchange(self, part: Part) -> list[Part]:
        return [part]

    @contextmanager
    def together(self) -> Iterator[None]:
        """A pass of all ranks. One that fails in some of them leaves the others waiting in the
        middle of it: the process ends, and torchrun ends the others."""
        try:
            yield
        except RookeryError:
            raise
        except Exception as error:
            if self.size == 1:
                raise
            detail = " ".join(str(error).split()) or type(error).__name__
            raise SystemExit(f"Rank {self.rank} failed in a pass of all ranks: {detail}") from error


def join_ranks(device: str) -> Ranks:
    """This process as one of those that torchrun started; without torchrun the only one."""
    backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
    limit = timedelta(seconds=STEP_S)
    with boundary(TrainError, "The processes of torchrun do not find each other"):
        if "WORLD_SIZE" in os.environ:
            dist.init_process_group(backend, timeout=limit)
        else:
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(backend, store=store, rank=0, world_size=1)
        calls = dist.new_group(backend="gloo", timeout=timedelta(seconds=IDLE_S))
    return Ranks(dist.get_rank(), dist.get_world_size(), calls)
