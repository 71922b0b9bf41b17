"""The trainer and the embedded engine over tensor-parallel ranks.

| who        | does                                             | waits for                  |
|------------|--------------------------------------------------|----------------------------|
| first rank | sends a call, then computes it                   | the other ranks, in a pass |
| the others | receive a call, then compute it (`follow`)       | a call                     |

Calls of both go through one thread, as ranks that computed them in different orders would wait for
each other. All ranks see the same logits, so they draw the same tokens.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch.distributed as dist

from rookery.embedded import EmbeddedEngine, EngineConfig
from rookery.embedded.batcher import Batcher, Job
from rookery.errors import RookeryError, TrainError, boundary
from rookery.slots import SlottedModel
from rookery.train import LoraTrainer
from rookery.train.processes import STEP_S, Processes, RankCall
from rookery.train.running_request import Turn
from rookery.types import Adapter, Datum

__all__ = ["Ranks", "RanksEngine", "RanksTrainer", "follow", "join_ranks"]

# The processes that torchrun started as tensor-parallel ranks: all compute every pass, each with
# its part of every layer.
#
#     torchrun --nproc-per-node 2 -m rookery.megatron --model FOLDER


IDLE_S = 365 * 24 * 3600.0
"""Longest pause between calls. If the first rank dies, torchrun ends the others at once."""

Part = TypeVar("Part")


@dataclass(frozen=True, slots=True)
class Ranks(Processes):
    """Processes that do not share data: each has all of it, and the same results."""

    def share(self, data: Sequence[Datum]) -> list[int]:
        return list(range(len(data)))

    def exchange(self, part: Part) -> list[Part]:
        return [part]

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run a pass of all ranks. If it fails in some ranks, the others wait inside it forever, so
        this process ends, and torchrun ends the others."""
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
    """Join the ranks that torchrun started; without torchrun, this process is the only one."""
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


class RanksTrainer(LoraTrainer):
    """A LoraTrainer in which every rank computes every pass."""

    @property
    def thread(self) -> Executor:
        """Executor of its computations."""
        return self._worker

    def compute(self, turns: Sequence[Turn]) -> None:
        assert isinstance(self._processes, Ranks)
        with self._processes.together():
            super().compute(turns)

    def do_part(self, call: RankCall) -> None:
        with suppress(RookeryError):  # it fails in all ranks alike, and the first one reports it
            super().do_part(call)


@dataclass(frozen=True, slots=True)
class _EngineCall:
    """A computation that the first rank's engine starts."""

    method: Literal["put", "free", "step"]
    arguments: tuple[Any, ...] = ()
    added: dict[int, Job] = field(default_factory=dict)
    """New jobs by their id() in the first rank."""
    dropped: tuple[int, ...] = ()


class _RanksBatcher(Batcher):
    """Broadcasts its steps. All other changes are part of the engine's calls, or follow a memory
    shortage, which ends the process if there are several ranks."""

    ranks: Ranks

    def step(self, added: Sequence[Job], dropped: Sequence[Job]) -> list[Job]:
        if self.ranks.is_first:
            numbered = {id(job): job for job in added}
            self.ranks.broadcast(
                _EngineCall("step", added=numbered, dropped=tuple(map(id, dropped)))
            )
        with self.ranks.together():
            return super().step(added, dropped)


class RanksEngine(EmbeddedEngine):
    """The embedded engine, which shares its thread with the trainer of the same model."""

    batcher_type = _RanksBatcher
    _batcher: _RanksBatcher

    def __init__(
        self,
        model: SlottedModel,
        *,
        ranks: Ranks,
        detokenize: Callable[[Sequence[int]], str],
        name: str,
        thread: Executor,
    ) -> None:
        config = EngineConfig(model=name)
        super().__init__(model, config=config, detokenize=detokenize, name=name, thread=thread)
        self._batcher.ranks = ranks
        self._ranks = ranks
        self._jobs: dict[int, Job] = {}

    @property
    def num_jobs(self) -> int:
        """Number of unanswered jobs, in a rank other than the first."""
        return len(self._jobs)

    def do_part(self, call: _EngineCall) -> None:
        """Compute a call, in a rank other than the first."""
        match call.method:
            case "put":
                self._put(*call.arguments)
            case "free":
                self._free(*call.arguments)
            case "step":
                self._jobs |= call.added
                dropped = [self._jobs[n] for n in call.dropped if n in self._jobs]
                answered = self._batcher.step(list(call.added.values()), dropped)
                if gone := {id(job) for job in (*answered, *dropped)}:
                    self._jobs = {n: job for n, job in self._jobs.items() if id(job) not in gone}

    def _put(self, slot: int, adapter: Adapter, cut: int) -> None:
        self._model.bank.check(adapter, max_rank=self.config.max_rank)
        if self._ranks.is_first:
            self._ranks.broadcast(_EngineCall("put", (slot, adapter, cut)))
        super()._put(slot, adapter, cut)

    def _free(self, slot: int) -> None:
        if self._ranks.is_first:
            self._ranks.broadcast(_EngineCall("free", (slot,)))
        super()._free(slot)


def follow(trainer: RanksTrainer, engine: RanksEngine) -> None:
    """Compute the first rank's calls until it ends, in any other rank."""
    while isinstance(call := trainer.serve_rank(), _EngineCall):
        engine.do_part(call)
