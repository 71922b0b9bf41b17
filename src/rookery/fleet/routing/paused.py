"""A server given by URL as a trainer left it: paused during a weight change, or with new weights.

    await require_first_weights(client)      # reloads them if the trainer was killed
    await wait_until_running(client)

Before a server's weights change, it is told their version. It reports the version as long as its
process lives (`/weight_info`; vLLM before 0.32 has no such route).
"""

import asyncio
import contextlib
import errno
import logging
import os
import socket
import sys
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rookery.errors import FleetError
from rookery.fleet.http.client import Client, ServerLost, ServerRefusal, is_local
from rookery.fleet.http.probe import read_base
from rookery.runtime.guard import process_start

__all__ = [
    "VERSION",
    "CallExclusion",
    "TrainerLock",
    "WeightsMark",
    "is_trained",
    "load_first_weights",
    "name_first_weights",
    "read_mark",
    "require_first_weights",
    "require_left",
    "wait_until_running",
]


# Which process trains the weights of a server: at most one.
#
#     lock = TrainerLock.take(url)          # FleetError if another process holds it
#     is_trained(url)                       # True if any process of this machine trains it
#     lock.release()
#     str(WeightsMark.made_here("step-3"))  # sent to the server before its weights change
#
# The lock is a name of the kernel (an abstract socket): it is free as soon as the process that took
# it has ended, however it ended. Only Linux has such names; nothing is locked elsewhere.
#
# The server keeps the mark as long as its process lives. A client that reads it knows that these
# are not the server's first weights, and whether their trainer still runs.


ATTEMPTS = 20
"""`is_trained` in another process holds the name for microseconds: try again."""
PAUSE_S = 0.01


class TrainerLock:
    """Lock on training one server. Reentrant within this process: one `release` per `take`."""

    def __init__(self, name: str, descriptor: int) -> None:
        self._name = name
        self._descriptor = descriptor
        self._num_taken = 0

    def release(self) -> None:
        """Call once per `take`. Frees the name at once: the object may live on, and another process
        may need the same port for its server."""
        self._num_taken -= 1
        if self._num_taken == 0:
            del _locks[self._name]
            os.close(self._descriptor)

    @classmethod
    def take(cls, url: str) -> "TrainerLock | None":
        """Take the lock for the server at `url`; None on systems without such locks."""
        name = _name(url)
        if sys.platform != "linux":
            return None
        lock = _locks[name] = _locks.get(name) or cls(name, _bound(name, url))
        lock._num_taken += 1
        return lock


def _bound(name: str, url: str) -> int:
    """Bind the name and return its descriptor; FleetError if another process holds it."""
    for attempt in range(ATTEMPTS):
        descriptor = _bind(name)
        if descriptor is not None:
            return descriptor
        if attempt + 1 < ATTEMPTS:
            time.sleep(PAUSE_S)
    raise FleetError(
        f"Another process trains the weights of {url}, and the two would overwrite each other: "
        "stop it, or start a server for each (`rookery fleet up`, or launch)."
    )


def is_trained(url: str) -> bool:
    """True if a process of this machine trains the server's weights."""
    if sys.platform != "linux":
        return False
    descriptor = _bind(_name(url))
    if descriptor is not None:
        os.close(descriptor)
    return descriptor is None


_SIGN = "rookery"


@dataclass(frozen=True, slots=True)
class WeightsMark:
    """The version of weights that were put into a server, and the process that put them there.

    `rookery:3f2a91c04b77d1e8:4711:88112233:step-3` is step-3, by process 4711.
    """

    machine: str
    """Namespace of process ids on one boot of a machine; empty if the system does not report it."""
    pid: int
    start: str
    version: str

    def __str__(self) -> str:
        return f"{_SIGN}:{self.machine}:{self.pid}:{self.start}:{self.version}"

    @classmethod
    def made_here(cls, version: str) -> "WeightsMark":
        """Make the mark of this process for `version`."""
        return cls(_machine(), os.getpid(), process_start(os.getpid()), version)

    @classmethod
    def read(cls, text: str) -> "WeightsMark | None":
        """Parse a mark; None if the text is not a mark of Rookery."""
        sign, *words = text.split(":", 4)
        if sign != _SIGN or len(words) != 4 or not words[1].isdigit():
            return None
        return cls(words[0], int(words[1]), words[2], words[3])

    @property
    def is_own(self) -> bool:
        """True if this process put the weights there."""
        return self == WeightsMark.made_here(self.version)

    def is_left(self, url: str) -> bool:
        """True if nobody trains these weights any more: the process ran on this machine and has
        ended, or it is this process and no longer trains the server."""
        if not self.machine or self.machine != _machine():
            return False
        is_alive = process_start(self.pid) == self.start
        return not is_alive or (self.pid == os.getpid() and not is_trained(url))


@cache
def _machine() -> str:
    """Digest of the kernel's boot id and process id namespace; containers have their own."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
    return blake2b(f"{boot}{space}".encode(), digest_size=8).hexdigest()


def _name(url: str) -> str:
    return f"\0rookery-trainer-{urlsplit(url).port}"


def _bind(name: str) -> int | None:
    """Bind the name and return its descriptor; None if it is taken."""
    with socket.socket(socket.AF_UNIX) as bound:
        try:
            bound.bind(name)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return None
        return bound.detach()


_locks: dict[str, TrainerLock] = {}


# Keeps calls of two kinds from being in flight on one server at the same time.
#
#     async with exclusion.take("labels"): ...      # waits while "likeliest" calls are in flight
#
# vLLM's older model runner, which the CPU also uses, reports one kind of log-probabilities per
# step. If a request for the likeliest tokens is computed beside a request for given tokens, it gets
# its sampled token and zeros. On the CPU, if a request for the base model is computed beside one
# for an adapter, it gets the adapter of the last slot, once that slot was filled.


class CallExclusion:
    """Lets calls of one kind run together while calls of other kinds wait. When they have ended,
    the kind of the call that has waited longest is next, with all its waiting calls."""

    def __init__(self) -> None:
        self._kind = ""
        self._num = 0
        # Filled by `take`, drained by the last call of a kind; a cancelled waiter removes itself.
        self._waiting: deque[tuple[str, asyncio.Future[None]]] = deque()

    @property
    def is_idle(self) -> bool:
        """True if no call is in flight or waiting."""
        return not self._num and not self._waiting

    @asynccontextmanager
    async def take(self, kind: str) -> AsyncIterator[None]:
        """Run the block as one of the calls of this kind. An empty kind runs beside any."""
        if not kind:
            yield
            return
        if self._num and (self._kind != kind or self._waiting):
            await self._wait(kind)
        else:
            self._kind, self._num = kind, self._num + 1
        try:
            yield
        finally:
            self._leave()

    async def _wait(self, kind: str) -> None:
        place = asyncio.get_running_loop().create_future()
        self._waiting.append((kind, place))
        try:
            await place
        except asyncio.CancelledError:
            if not place.cancelled():
                self._leave()
            elif (kind, place) in self._waiting:
                self._waiting.remove((kind, place))
            raise

    def _leave(self) -> None:
        self._num -= 1
        if self._num or not self._waiting:
            return
        self._kind = self._waiting[0][0]
        admitted = [place for kind, place in self._waiting if kind == self._kind]
        self._waiting = deque(other for other in self._waiting if other[0] != self._kind)
        for place in admitted:
            if not place.cancelled():
                place.set_result(None)
                self._num += 1
        if not self._num and self._waiting:
            self._num = 1
            self._leave()


logger = logging.getLogger(__name__)
IS_PAUSED, RESUME = "/is_paused", "/resume"
CHANGE_S = 60.0
"""Longest time that weights may take to change; waiting clients get an error after it."""
LOOK_S = 0.1
VERSION = "/update_weight_version"
"""Route that names the weights, on servers that report which weights drew a token."""
_WEIGHT_INFO = "/weight_info"
_FIRST = "default"
"""vLLM's name for the weights it was started with."""


async def wait_until_running(client: Client) -> None:
    """Wait until the server is no longer paused; FleetError after `CHANGE_S`. Resume a server of
    this machine that nobody trains: its trainer was killed during a change."""
    end_s = time.monotonic() + CHANGE_S
    while await _is_paused(client):
        if is_local(client.url) and not is_trained(client.url):
            logger.warning("%s was left paused, and goes on now", client.url)
            await client.post(RESUME, b"")
            return
        if time.monotonic() >= end_s:
            raise FleetError(
                f"{client.url} has been paused for {CHANGE_S:g} s, and answers no requests: wait "
                f"until its weights are changed, or resume it (`curl -X POST {client.url}/resume`)."
            )
        await asyncio.sleep(LOOK_S)


async def require_first_weights(client: Client) -> None:
    """Reload the first weights of a server that a dead process of this machine left with others.
    FleetError if their trainer may still run. No training can start meanwhile."""
    end_s = time.monotonic() + CHANGE_S
    while (mark := await read_mark(client)) is not None:
        require_left(client, mark)
        try:
            lock = TrainerLock.take(client.url) if is_local(client.url) else None
        except FleetError:  # another process does the same, or is about to train
            if time.monotonic() >= end_s:
                raise
            await asyncio.sleep(LOOK_S)
            continue
        try:
            if await read_mark(client) == mark:
                await _replace(client, mark)
                return
        finally:
            if lock is not None:
                lock.release()


async def read_mark(client: Client) -> WeightsMark | None:
    """Return the mark of whoever changed the server's weights; None if they are its first."""
    info = await _get_object(client, _WEIGHT_INFO)
    return WeightsMark.read(str(info.get("weight_version", "")))


def require_left(client: Client, mark: WeightsMark) -> None:
    """FleetError if the trainer of these weights may still run."""
    if not mark.is_left(client.url):
        raise FleetError(
            f"{client.url} has the weights {mark.version} of a training by process {mark.pid} of "
            f"{'this' if WeightsMark.made_here('').machine == mark.machine else 'another'} "
            "machine, not its first weights: wait for the end of the training. If it was killed, "
            f"write `rookery fleet restore {client.url}`, or restart the server."
        )


async def _replace(client: Client, mark: WeightsMark) -> None:
    logger.warning(
        "%s has the weights %s, which process %d left there: loading its first weights again",
        client.url,
        mark.version,
        mark.pid,
    )
    await load_first_weights(client)
    await name_first_weights(client)


async def load_first_weights(client: Client) -> None:
    """Make a server reload the weights it was started with, and resume it."""
    _, root = await read_base(client)
    # Without a path vLLM reloads from the last one it was given.
    await client.call_workers("reload_weights", weights_path=root)
    await client.reset_prefix_cache()
    with contextlib.suppress(ServerRefusal):  # it cannot be paused
        await client.post(RESUME, b"")


async def name_first_weights(client: Client) -> None:
    """Remove the mark, as the server has its first weights."""
    await client.post_json(VERSION, {"new_version": _FIRST})


async def _is_paused(client: Client) -> bool:
    return (await _get_object(client, IS_PAUSED)).get("is_paused") is True


async def _get_object(client: Client, path: str) -> dict[str, Any]:
    """GET a JSON object; empty if the server has no such route."""
    try:
        answer: Any = await client.get(path)
    except ServerRefusal:
        return {}
    except ServerLost as loss:
        if loss.is_broken:
            raise
        return {}
    return answer if isinstance(answer, dict) else {}
