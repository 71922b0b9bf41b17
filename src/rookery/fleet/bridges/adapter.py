"""The `slot` and `adapter` bridges: an adapter in training, published under a new name each time.

With `slot`, a server reads it from memory into an idle slot (see `vllm_plugin`); with `adapter`, it
reads a PEFT folder. Requests in flight keep their version, and nothing pauses.
"""

import json
from typing import TYPE_CHECKING, Any

from rookery.fleet.bridges.update import BaseUpdate, Canary, CanaryRead, Give, Logprobs
from rookery.fleet.fleet import Fleet
from rookery.fleet.routing.replica import Replica
from rookery.fleet.vllm_plugin.shared_memory import SharedFile, lay_out, view
from rookery.runtime.concurrency import run_in_thread
from rookery.types import ModelRef, ModelWeights

if TYPE_CHECKING:
    import torch
import asyncio
import logging
import shutil
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rookery.errors import FleetError, RookeryError
from rookery.fleet.http.client import ServerLost
from rookery.fleet.residency import require_adapter
from rookery.runtime.concurrency import task_group
from rookery.types import Weights

__all__ = ["AdapterBridge", "CopyBridge", "FolderBridge"]

# The `copy` bridge: the trainer's weights reach the servers of this machine through memory.
#
# vLLM loads them like a model folder, so that it serves every layout: weights spread over several
# workers, quantised weights, experts.


class CopyBridge:
    """Gives whole models to servers with the worker extension."""

    def __init__(self, fleet: Fleet, *, canary: Canary) -> None:
        self._fleet = fleet
        self._update = BaseUpdate(fleet, canary)
        self._file: SharedFile | None = None

    async def replace_base(self, weights: ModelWeights, logprobs: Logprobs) -> ModelRef:
        """Serve these weights as the base model; `logprobs` computes with them."""
        ref = ModelRef(name=weights.name, version=weights.version)
        async with self._fleet.updating(), self._update.lock:
            # Under the lock: a server that restarts meanwhile is given this file.
            manifest = await run_in_thread(self._write, weights)

            async def give(replica: Replica) -> None:
                await replica.client.call_workers("rookery_load", manifest=manifest)
                await replica.client.reset_prefix_cache()

            await self._update.publish(give, logprobs, ref, again=give)
        return self._fleet.base

    def _write(self, weights: ModelWeights) -> str:
        """Write the weights to a file and return its manifest. The file is reused for later
        weights, and kept for servers that restart."""
        tensors: dict[str, torch.Tensor] = dict(weights.tensors)
        manifest: dict[str, Any] = lay_out(tensors)
        if self._file is None or self._file.memory.numel() != manifest["bytes"]:
            self._file = SharedFile(num_bytes=manifest["bytes"])
        for name, tensor in tensors.items():
            view(self._file.memory, manifest["tensors"][name]).copy_(tensor)
        return json.dumps(manifest | {"path": self._file.path})


# Whole models through a folder: `reload` and `restart` differ in what a server does with it.


WriteFolder = Callable[[Path, Mapping[str, "torch.Tensor"]], None]
"""Writes a new folder that vLLM can load."""


class FolderBridge:
    """Gives whole models to servers that see a folder of this machine."""

    def __init__(
        self,
        fleet: Fleet,
        *,
        canary: Canary,
        write: WriteFolder,
        folder: Path,
        give_from: Callable[[Path], Give],
    ) -> None:
        """`folder` needs room for two models: the newest stays for servers that restart."""
        self._fleet = fleet
        self._update = BaseUpdate(fleet, canary)
        self._write = write
        self._folder = folder
        self._give_from = give_from
        self._newest: Path | None = None

    async def replace_base(self, weights: ModelWeights, logprobs: Logprobs) -> ModelRef:
        """Serve these weights as the base model; `logprobs` computes with them."""
        folder = self._folder / f"served-{weights.version}"
        if folder != self._newest:
            await run_in_thread(self._write_new, folder, weights)
        ref = ModelRef(name=weights.name, version=weights.version)
        give = self._give_from(folder)
        async with self._fleet.updating(), self._update.lock:
            await self._update.publish(give, logprobs, ref, again=give)
        before, self._newest = self._newest, folder
        if before is not None and before != folder:
            await asyncio.to_thread(shutil.rmtree, before, ignore_errors=True)
        return self._fleet.base

    def _write_new(self, folder: Path, weights: ModelWeights) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        self._write(folder, weights.tensors)


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Newest:
    ref: ModelRef
    expected: Sequence[float]


class AdapterBridge:
    """A Publisher: every server proves that it has the new weights before the old ones are retired.

    Await one publication of a name before the next; publications of several names run concurrently.
    """

    def __init__(self, fleet: Fleet, *, canary: Canary, logprobs: Logprobs | None = None) -> None:
        """`logprobs` computes with the weights of the next `publish`."""
        self._fleet = fleet
        self._canary = canary
        self._logprobs = logprobs
        self._published: dict[str, ModelRef] = {}
        self._newest: dict[str, _Newest] = {}
        self._leaving: dict[str, asyncio.Task[None]] = {}
        """Tasks that unload the version before the newest, by name; awaited before the next."""
        self._lock = asyncio.Lock()
        """Held while a restarted server proves what it has."""
        self._num_showing = 0
        """Publications being proved now, for which a server that comes back waits."""
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        for replica in fleet.pool.replicas:
            replica.renew = self._renew

    async def publish(self, weights: Weights) -> ModelRef:
        assert self._logprobs is not None, "else `publish_with` is called"
        return await self.publish_with(weights, self._logprobs)

    async def publish_with(self, weights: Weights, logprobs: Logprobs) -> ModelRef:
        """Run `publish` with a `logprobs` that computes with these weights."""
        adapter = require_adapter(weights)
        await self._retire_leaving(weights.name)
        async with task_group() as group:
            # The trainer computes while the adapter is sent.
            computing = group.create_task(self._compute(logprobs))
            ref = await self._fleet.load(adapter)
            try:
                async with self._showing():
                    await self._prove(ref, computing)
            except BaseException:  # on any failure nobody will name this version
                await self._fleet.unload(ref)
                raise
        before = self._published.get(weights.name)
        self._published[weights.name] = ref
        if before is not None:
            self._leaving[weights.name] = asyncio.create_task(self._fleet.unload(before))
            await asyncio.sleep(0)  # now the old version is refused
        return ref

    async def _prove(self, ref: ModelRef, computing: asyncio.Task[Sequence[float]]) -> None:
        """Prove that every running server computes with this version as the trainer does."""
        replicas = self._fleet.pool.replicas
        async with task_group() as group:
            reading = [group.create_task(self._read_if_open(r, ref)) for r in replicas]
        newest = self._newest[ref.name] = _Newest(ref, await computing)
        for replica, task in zip(replicas, reading, strict=True):
            read = task.result()
            if read is not None:
                self._judge(replica, read, newest)

    @asynccontextmanager
    async def _showing(self) -> AsyncIterator[None]:
        """Run several proofs at a time, but none while a restarted server is checked."""
        async with self._lock:
            self._num_showing += 1
            self._is_idle.clear()
        try:
            yield
        finally:
            self._num_showing -= 1
            if not self._num_showing:
                self._is_idle.set()

    async def _compute(self, logprobs: Logprobs) -> Sequence[float]:
        return await logprobs(self._canary)

    async def _retire_leaving(self, name: str) -> None:
        """Wait until the version before the last one has left the servers."""
        leaving = self._leaving.pop(name, None)
        if leaving is not None:
            await asyncio.wait([leaving])
            leaving.result()

    async def _read_if_open(self, replica: Replica, ref: ModelRef) -> CanaryRead | None:
        """Return the reading of a running server; None if it must prove the version later."""
        replica.proof.withdraw()
        if not replica.load.is_open:
            return None
        try:
            return await self._read(replica, ref)
        except ServerLost as error:
            self._fleet.pool.suspect(replica, str(error))
            return None

    async def _read(self, replica: Replica, ref: ModelRef) -> CanaryRead:
        process = await replica.proof.running()
        return CanaryRead(process, await self._canary.read(replica, ref, self._fleet.find(ref)))

    async def _renew(self, replica: Replica) -> None:
        """Let a restarted server take requests once it computes with the newest versions."""
        async with self._lock:
            await self._is_idle.wait()
            try:
                for newest in self._newest.values():
                    self._judge(replica, await self._read(replica, newest.ref), newest)
            except ServerLost:
                raise
            except RookeryError as error:
                replica.exclude(str(error))
                logger.warning("%s takes no requests: %s", replica.url, error)
            else:
                replica.include()

    def _judge(self, replica: Replica, read: CanaryRead, newest: _Newest) -> None:
        gap = self._canary.gap(read.logprobs, newest.expected)
        if self._canary.is_far(read.logprobs, newest.expected):
            raise FleetError(
                f"{replica.url} was given {newest.ref.served_name} and computes with other "
                f"weights: log-probabilities are off by {gap:.2g} nats, more than "
                f"{self._canary.limit_nats:g}. Check that server and trainer load the same base "
                "model in the same dtype."
            )
        replica.proof.note(read.process)
