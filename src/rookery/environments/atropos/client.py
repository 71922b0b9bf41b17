"""A gateway or a `run-api` elsewhere, asked by a trainer.

    async with open_client(url) as client:
        await client.register(registration)
        number, groups = await client.batch(after=3)

A gateway of Rookery gives a batch until the next question names it; a `run-api` gives it once.
"""

import asyncio
import contextlib
import mmap
import os
import struct
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import aiohttp
import stamina
from pydantic import TypeAdapter, ValidationError

from rookery.environments.atropos.registry import TrainerRegistration
from rookery.environments.atropos.scored_group import ScoredGroup
from rookery.errors import TaskError
from rookery.runs.disk import disk_boundary

__all__ = [
    "GatewayClient",
    "PostReceipts",
    "open_client",
]

# Groups that are kept while their sender was not told so, and sends them again.
#
#     async with answers.in_turn(digests):
#         known = answers.find(digests)
#         ... keep those that are not known ...
#         answers.settle(digests, seqs, is_told=True)
#
# An environment whose connection ended before the answer sends the same group again, and nothing in
# the Atropos API tells that from another group that is equal. Whether the first was answered does:
# a group that is equal to a kept one, of the same environment, whose sender was never told, is that
# one. So for every post that was answered there is a group, and equal groups are all trained on.
#
# What was told also survives a kill: the numbers of the newest groups that were told are in a file
# that is mapped into memory, which takes no wait for the disk. After the machine itself went down
# they are not known, and then all count as told.


MAX_UNTOLD = 100_000
"""Contents whose sender was not told: older ones are forgotten, and count as new when they come
again."""
NUM_NUMBERS = 4096
"""In the file: more than are ever on their way at the same time."""
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_BOOT_BYTES = 40
_FILE_BYTES = _BOOT_BYTES + 8 * NUM_NUMBERS


class PostReceipts:
    """Who was told, of one queue."""

    def __init__(self, file: mmap.mmap, *, last: int) -> None:
        self._file = file
        self._oldest = last - NUM_NUMBERS
        """Groups up to this number count as told."""
        self._untold: OrderedDict[bytes, list[int]] = OrderedDict()
        """The numbers of groups that nobody was told of, by their content."""
        self._turns: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()

    @classmethod
    def open(cls, path: Path, *, last: int) -> "PostReceipts":
        """`last` is the number of the newest group. Waits for the disk."""
        boot = _BOOT.read_bytes().strip() if _BOOT.exists() else b""
        boot = boot[:_BOOT_BYTES].ljust(_BOOT_BYTES, b"\0")
        with disk_boundary(f"Opening {path}"):
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                if os.fstat(handle).st_size != _FILE_BYTES:
                    os.ftruncate(handle, 0)
                    os.pwrite(handle, bytes(_FILE_BYTES), 0)  # a full disk is an error here
                file = mmap.mmap(handle, _FILE_BYTES)
            finally:
                os.close(handle)
        answers = cls(file, last=last)
        if file[:_BOOT_BYTES] != boot or not boot.strip(b"\0"):
            # The numbers first: a kill in between leaves some that do not count.
            for seq in range(max(1, answers._oldest), last + 1):
                answers._tell(seq)
            file[:_BOOT_BYTES] = boot
        return answers

    def is_told(self, seq: int) -> bool:
        """Whether somebody may have been told of a group."""
        return seq <= self._oldest or self._file[self._place(seq)] == struct.pack("<Q", seq)

    def miss(self, digest: bytes, seq: int) -> None:
        """A group with this content is kept, and nobody was told."""
        numbers = self._untold.setdefault(digest, [])
        if seq not in numbers:
            numbers.append(seq)
        self._untold.move_to_end(digest)
        while len(self._untold) > MAX_UNTOLD:
            self._untold.popitem(last=False)

    @asynccontextmanager
    async def in_turn(self, digests: Sequence[bytes]) -> AsyncIterator[None]:
        """Equal groups one after the other: the first may still be written when its sender, who
        waited long enough, sends it again."""
        async with AsyncExitStack() as stack:
            for digest in sorted(set(digests)):
                turn = self._turns.setdefault(digest, asyncio.Lock())
                await stack.enter_async_context(turn)
            yield

    def find(self, digests: Sequence[bytes]) -> list[int | None]:
        """The number of each that is a group that is kept already."""
        counted: Counter[bytes] = Counter()
        found: list[int | None] = []
        for digest in digests:
            numbers = self._untold.get(digest, [])
            place = counted[digest]
            found.append(numbers[place] if place < len(numbers) else None)
            counted[digest] += 1
        return found

    def settle(self, digests: Sequence[bytes], seqs: Sequence[int], *, is_told: bool) -> None:
        """They are kept under these numbers, and their sender is told now; or has gone."""
        for digest, seq in zip(digests, seqs, strict=True):
            if not is_told:
                self.miss(digest, seq)
                continue
            self._tell(seq)
            left = [own for own in self._untold.pop(digest, []) if own != seq]
            if left:
                self._untold[digest] = left

    def _tell(self, seq: int) -> None:
        self._file[self._place(seq)] = struct.pack("<Q", seq)

    def _place(self, seq: int) -> slice:
        begin = _BOOT_BYTES + 8 * (seq % NUM_NUMBERS)
        return slice(begin, begin + 8)


REQUEST_S = 120.0
RETRY_S = 60.0
"""How long a gateway that does not answer is asked again: it may be started anew."""
POLL_S = 0.2
ALIVE_S = 5.0
"""How often a gateway hears of a trainer, whose steps may take long: it refuses a second one."""
_LOST = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError)
"""What a gateway that is killed leaves of a question, before its answer or in the middle of it."""
_GROUPS = TypeAdapter(list[ScoredGroup])


class _Busy(TaskError):
    """Another trainer is at work there."""


class GatewayClient:
    """One gateway by its URL."""

    def __init__(self, url: str, session: aiohttp.ClientSession, *, key: str) -> None:
        self._url = url.rstrip("/")
        self._session = session
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._registration: TrainerRegistration | None = None
        self._number = ""
        """Which trainer this is."""

    async def register(self, registration: TrainerRegistration) -> None:
        """TaskError when another trainer is at work there, and still is after a while: the one that
        this one goes on for may have been killed just now."""
        self._registration = registration
        document = registration.model_dump(mode="json")
        async for attempt in stamina.retry_context(on=_Busy, attempts=None, timeout=RETRY_S):
            with attempt:
                answer = await self._ask("POST", "/register", document)
        self._number = str(answer.get("uuid", ""))

    async def stay_known(self) -> None:
        """Let the gateway hear of this trainer, until cancelled. What it says to that, it says to
        the next question too."""
        while True:
            await asyncio.sleep(ALIVE_S)
            if self._number:
                with contextlib.suppress(TaskError, aiohttp.ClientError, TimeoutError):
                    await self._once("GET", f"/status?trainer={self._number}", None)

    async def batch(self, *, after: int) -> tuple[int, Sequence[ScoredGroup]]:
        """The batch that follows number `after`, waited for."""
        while True:
            answer = await self._next(after)
            if answer.get("status") == "error" and self._registration is not None:
                # It was started anew, and does not know its trainer.
                await self.register(self._registration)
                answer = await self._next(after)
            if answer.get("status") == "error":
                raise TaskError(f"{self._url} gives no batches: {answer.get('message')}")
            if answer.get("batch"):
                break
            await asyncio.sleep(POLL_S)
        try:
            groups = await asyncio.to_thread(_GROUPS.validate_python, answer["batch"])
        except ValidationError as error:
            raise TaskError(f"{self._url} gave a batch that is none: {error}") from error
        return int(answer.get("batch_id", after + 1)), groups

    async def _next(self, after: int) -> dict[str, Any]:
        return await self._ask("GET", f"/batch?after={after}&trainer={self._number}", None)

    async def _ask(self, method: str, path: str, document: Any) -> dict[str, Any]:
        async for attempt in stamina.retry_context(on=_LOST, attempts=None, timeout=RETRY_S):
            with attempt:
                return await self._once(method, path, document)
        raise AssertionError("the retry loop ends by returning or raising")

    async def _once(self, method: str, path: str, document: Any) -> dict[str, Any]:
        async with self._session.request(
            method,
            self._url + path,
            json=document,
            headers=self._headers,
            allow_redirects=False,
        ) as response:
            if response.status >= 300:
                said = response.headers.get("Location", "") or (await response.text())[:500]
                kind = _Busy if response.status == HTTPStatus.CONFLICT else TaskError
                raise kind(f"{self._url}{path} refused ({response.status}): {said}")
            answer: dict[str, Any] = await response.json()
            return answer


@asynccontextmanager
async def open_client(url: str, *, key: str = "") -> AsyncIterator[GatewayClient]:
    limits = aiohttp.ClientTimeout(total=REQUEST_S)
    async with aiohttp.ClientSession(timeout=limits) as session:
        client = GatewayClient(url, session, key=key)
        known = asyncio.create_task(client.stay_known())
        try:
            yield client
        except (aiohttp.ClientError, TimeoutError) as error:
            why = str(error) or f"nothing came in {REQUEST_S:g} s"
            raise TaskError(
                f"The gateway at {url} does not answer: {why}. Start it with `rookery grpo "
                "gateway` or `run-api`, or correct environment.url."
            ) from error
        finally:
            known.cancel()
            await asyncio.gather(known, return_exceptions=True)
