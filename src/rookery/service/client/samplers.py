"""Which sampling session of a service each ModelRef stands for."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from rookery.errors import EngineError
from rookery.service.client.connection import Connection
from rookery.types import ModelRef

__all__ = ["Samplers"]


@dataclass(slots=True)
class _Sampler:
    id: str
    adapter_id: str = ""
    """The registered adapter that it draws from, if any."""
    num_holders: int = 1
    num_requests: int = 0


class Samplers:
    """Sampling sessions in use. One that is dropped ends after its last request."""

    def __init__(self, connection: Connection, *, base: ModelRef, base_model: str) -> None:
        self._connection = connection
        self._base = base
        self._base_model = base_model
        self._samplers: dict[ModelRef, _Sampler] = {}
        self._creating = asyncio.Lock()
        """Held to make the base's session, which many ask for at the same time."""

    @asynccontextmanager
    async def use(self, ref: ModelRef) -> AsyncIterator[str]:
        """The id of its session, which stays inside the block."""
        if ref == self._base and ref not in self._samplers:
            async with self._creating:
                if ref not in self._samplers:
                    created = await self._create({"base_model": self._base_model})
                    self._samplers[ref] = _Sampler(created)
        sampler = self._samplers.get(ref)
        if sampler is None:
            raise EngineError(f"{ref.served_name} is not in the service: load or publish it.")
        sampler.num_requests += 1
        try:
            yield sampler.id
        finally:
            sampler.num_requests -= 1
            if not sampler.num_holders and not sampler.num_requests:
                await self._end(sampler)

    def hold(self, ref: ModelRef) -> bool:
        """Use one that is there once more; False when it is not there."""
        sampler = self._samplers.get(ref)
        if sampler is None:
            return False
        sampler.num_holders += 1
        return True

    async def add_path(self, ref: ModelRef, path: str, *, adapter_id: str) -> None:
        """Draw from a checkpoint under this name."""
        created = await self._create({"model_path": path})
        self._samplers[ref] = _Sampler(created, adapter_id=adapter_id)

    async def add(self, ref: ModelRef, sampler_id: str) -> None:
        """A session that was made with its weights."""
        known = self._samplers.get(ref)
        if known is None:
            self._samplers[ref] = _Sampler(sampler_id)
        else:  # equal weights: the session that is there does as well
            known.num_holders += 1
            await self._end(_Sampler(sampler_id))

    async def drop(self, ref: ModelRef) -> None:
        """Let it go once, for good after the last holder's last request."""
        sampler = self._samplers.get(ref)
        if sampler is None:
            raise EngineError(f"{ref.served_name} is not loaded.")
        sampler.num_holders -= 1
        if sampler.num_holders:
            return
        del self._samplers[ref]
        if not sampler.num_requests:
            await self._end(sampler)

    async def _create(self, source: dict[str, str]) -> str:
        body = {
            "session_id": self._connection.session_id,
            "sampling_session_seq_id": self._connection.next_number(),
            **source,
        }
        reply = await self._connection.post("create_sampling_session", body)
        return str(reply["sampling_session_id"])

    async def _end(self, sampler: _Sampler) -> None:
        paths = [f"samplers/{sampler.id}"]
        if sampler.adapter_id:
            paths.append(f"adapters/{sampler.adapter_id}")
        for path in paths:
            await self._connection.delete(path)
