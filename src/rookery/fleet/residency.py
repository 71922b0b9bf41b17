"""Our adapters on one server: loaded there, and unregistered again however the fleet ends.

    residency = Residency(client, owner=staging.owner, is_own=False)
    await residency.load("poet@3fa9~7f3a", path=folder)
    await residency.unload("poet@3fa9~7f3a")     # True: nothing there reads its folder any more
    await residency.leave()                      # the server knows none of ours

vLLM reads an adapter's folder again if a request names it after its eviction, and its engine dies
if the folder is gone. So a folder is removed only after its name is unregistered and no request
that named it can be waiting there.
"""

import asyncio
import logging
import os
import platform
import re
import secrets
import shutil
import time
from collections import OrderedDict
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Container,
    Iterator,
    Sequence,
    Set,
)
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from weakref import WeakValueDictionary

from aiohttp import ClientConnectorError

from rookery.errors import AdapterError, FleetError, boundary
from rookery.fleet.http.capabilities import adapts_head
from rookery.fleet.http.client import Client, ClientConfig, ServerLost, ServerRefusal, open_session
from rookery.fleet.http.wire import Fields, encode_body
from rookery.runtime.file_lock import FileLock
from rookery.types import Adapter, ModelRef, Weights

__all__ = [
    "Owner",
    "Residency",
    "ServedAdapters",
    "claim_folder",
    "clear_left",
    "find_left",
    "list_names",
    "require_adapter",
]


# Records who put adapters where, so that other processes can clean up after a killed one.
#
#     /dev/shm/rookery-adapters-7f3a2b1c9d4e/     one fleet's folder
#         .owner                                  locked as long as the fleet is open:
#             4f1e6c0a-93a1-...                       id of this machine's last boot
#             http://127.0.0.1:8000                   a server that may know adapters of this fleet
#         poet@3fa9~7f3a2b1c9d4e/                 an adapter, by the name that servers know it by
#
# The token at the end of a name says who registered it: a name that another process left on a
# server is never taken for our own. An owner is alive while it holds its lock, which only processes
# of the same machine can see.


_PREFIX = "rookery-adapters-"
_RECORD = ".owner"
_TOKEN_BYTES = 6
_TOKEN = re.compile("[0-9a-f]+")
_OLD_S = 24 * 3600.0
"""Folders without a record are kept for this long: their owner may be starting."""


@dataclass(slots=True)
class Owner:
    """A folder under `parent`, its token, and the servers that may know names of this token."""

    parent: Path
    token: str
    lock: FileLock | None = None
    """Lock on the record; None if there is no record."""
    servers: set[str] = field(default_factory=set)

    @property
    def folder(self) -> Path:
        return self.parent / f"{_PREFIX}{self.token}"

    def note_server(self, url: str) -> None:
        """Record a server before the first load there, so that a crash leaves no unknown names."""
        if url not in self.servers:
            self.servers.add(url)
            self._write(url)

    def claim(self) -> None:
        """Make the folder and its record. The record is locked before it is written: a written
        record without a lock has a dead owner."""
        self.folder.mkdir()
        self.folder.chmod(0o755)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
        self.lock = FileLock(self.folder / _RECORD, flags=flags, mode=0o644)
        self.lock.wait()
        self._write(_machine())

    def close(self) -> None:
        if self.lock is not None:
            self.lock.close()

    def _write(self, line: str) -> None:
        assert self.lock is not None, "claimed before"
        os.write(self.lock.descriptor, f"{line}\n".encode())

    def remove(self) -> None:
        """Remove the folder and this owner's adapters beside it. The record goes last, so that what
        an interrupted removal leaves can be found again."""
        record = self.folder / _RECORD
        for path in (*self.parent.glob(f"*~{self.token}"), *self.folder.glob("*")):
            if path != record:
                _delete(path)
        with suppress(OSError):
            if os.listdir(self.folder) == [_RECORD]:
                record.unlink()
            self.folder.rmdir()


@contextmanager
def claim_folder(parent: Path) -> Iterator[Owner]:
    """Make a folder under `parent`. Remove it at the end, unless a server may still know names of
    it: `find_left` finds it then."""
    with boundary(FleetError, f"No folder can be made in {parent}", foreign=(OSError,)):
        owner = Owner(parent, secrets.token_hex(_TOKEN_BYTES))
        owner.claim()
    try:
        yield owner
    finally:
        if not owner.servers:
            owner.remove()
        owner.close()


@contextmanager
def find_left(parent: Path) -> Iterator[list[Owner]]:
    """Yield dead owners, locked inside the block; skip locked and unreadable records."""
    with ExitStack() as stack:
        owners = (_lock_left(folder, stack) for folder in sorted(parent.glob(f"{_PREFIX}*")))
        yield [owner for owner in owners if owner is not None]


def _lock_left(folder: Path, stack: ExitStack) -> Owner | None:
    """Return the owner of a folder if it is dead; the stack releases its lock."""
    owner = Owner(folder.parent, folder.name.removeprefix(_PREFIX))
    if not _TOKEN.fullmatch(owner.token):
        return None
    try:
        is_old = time.time() - folder.stat().st_mtime > _OLD_S
        owner.lock = FileLock(folder / _RECORD, flags=os.O_RDWR | os.O_NOFOLLOW)
        stack.callback(owner.close)
        if not owner.lock.take():
            return None
        machine, *servers = os.pread(owner.lock.descriptor, 2**20, 0).decode().split("\n")
    except FileNotFoundError:  # made just now, or all but removed
        return owner if folder.is_dir() and is_old else None
    except (OSError, ValueError):  # it is another user's, or no record
        return None
    # An incomplete last line was not acted on.
    owner.servers = set(servers[:-1])
    return owner if machine == _machine() or (is_old and not machine) else None


def _delete(path: Path) -> None:
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def _machine() -> str:
    """Return the id of this machine's boot: locks from before it have dead holders."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:  # not Linux
        return platform.node()


# The adapters that requests can name: how often each was loaded, and what is in flight on it.
#
#     served = ServedAdapters()
#     async with served.changing(ref):         # a load or a retirement, one at a time
#         if not served.add_load(ref):         # it is new: the caller checks it, then
#             served.add(ref, adapter)
#     async with served.using([ref], retire=retire):  # requests are in flight
#     is_unused = served.release(ref)          # True: retire it
#     async with served.changing(ref):
#         if served.remove_unused(ref): ...    # unused: the caller takes it off the servers
#
# Counts only, no I/O: `fleet.py` acts.


@dataclass(slots=True)
class _Served:
    adapter: Adapter
    has_head: bool
    num_loads: int = 1
    num_in_flight: int = 0

    @property
    def is_unused(self) -> bool:
        return self.num_loads <= 0 and self.num_in_flight <= 0


class ServedAdapters:
    """Counts of loads and of requests in flight, by adapter."""

    def __init__(self) -> None:
        self._served: dict[ModelRef, _Served] = {}
        self._published: dict[str, ModelRef] = {}
        self._changing: WeakValueDictionary[ModelRef, asyncio.Lock] = WeakValueDictionary()

    @property
    def refs(self) -> tuple[ModelRef, ...]:
        """Loaded adapters, oldest first."""
        return tuple(self._served)

    def find(self, ref: ModelRef) -> Adapter | None:
        served = self._served.get(ref)
        return None if served is None else served.adapter

    def has_head(self, ref: ModelRef) -> bool:
        """True if it is a loaded adapter that adapts the output layer."""
        served = self._served.get(ref)
        return served is not None and served.has_head

    def changing(self, ref: ModelRef) -> asyncio.Lock:
        """Return the lock of loads and retirements; a load waits for the latter, then restarts."""
        return self._changing.setdefault(ref, asyncio.Lock())

    def add_load(self, ref: ModelRef) -> bool:
        """Count one more load; False if the adapter is new and needs `add`."""
        served = self._served.get(ref)
        if served is not None:
            served.num_loads += 1
        return served is not None

    def add(self, ref: ModelRef, adapter: Adapter) -> None:
        """Record the first load; `adapter` is the form sent to servers."""
        self._served[ref] = _Served(adapter, has_head=adapts_head(adapter))

    def release(self, ref: ModelRef) -> bool:
        """Undo one load; True if nothing uses the adapter any more."""
        served = self._served.get(ref)
        if served is None or served.num_loads <= 0:
            raise FleetError(f"{ref.served_name} is not loaded.")
        served.num_loads -= 1
        if not served.num_loads and self._published.get(ref.name) == ref:
            del self._published[ref.name]
        return served.is_unused

    def publish(self, ref: ModelRef) -> ModelRef | None:
        """Make `ref` the published version of its name; return the previous one for release."""
        previous = self._published.get(ref.name)
        self._published[ref.name] = ref
        return previous

    @asynccontextmanager
    async def using(
        self, refs: Collection[ModelRef], *, retire: Callable[[ModelRef], Awaitable[None]]
    ) -> AsyncIterator[None]:
        """Count requests in flight for these adapters; retire those left unused at the end."""
        for ref in refs:
            self._served[ref].num_in_flight += 1
        try:
            yield
        finally:
            for ref in refs:
                self._served[ref].num_in_flight -= 1
            await asyncio.gather(*(retire(ref) for ref in refs if self._served[ref].is_unused))

    def remove_unused(self, ref: ModelRef) -> bool:
        """Forget the adapter if nothing uses it; call it under `changing`."""
        served = self._served.get(ref)
        if served is None or not served.is_unused:
            return False
        del self._served[ref]
        return True


def require_adapter(weights: Weights) -> Adapter:
    """Return the weights if they are an adapter; AdapterError for a whole model."""
    if isinstance(weights, Adapter):
        return weights
    raise AdapterError(
        f"{weights.name} is a whole model; a fleet publishes adapters: train an adapter."
    )


logger = logging.getLogger(__name__)
LEAVE_S = 10.0
"""Longest time for a server to unload adapters when a fleet closes, or after a request was cut off.
Folders of slower servers are left for the next fleet to remove."""
LEFT_S = 3.0
"""Longest time for all servers of dead owners, which are asked together."""


class Residency:
    """Adapters on one server: those that requests can name now (`resident`), and the names it may
    know, from before a load is sent until an unload is confirmed.

    A server that this fleet started ends with it, so nothing is unloaded there.
    """

    def __init__(self, client: Client, *, owner: Owner, is_own: bool) -> None:
        self.resident: OrderedDict[ModelRef, None] = OrderedDict()
        """Loaded adapters, least recently used first."""
        self._changing: WeakValueDictionary[ModelRef, asyncio.Lock] = WeakValueDictionary()
        self._client = client
        self._owner = owner
        self._is_own = is_own
        self._names: set[str] = set()
        self._cut: set[str] = set()
        self._loads: dict[str, asyncio.Task[None]] = {}
        self._has_left = False

    def changing(self, ref: ModelRef) -> asyncio.Lock:
        """Return the lock of one load or unload."""
        return self._changing.setdefault(ref, asyncio.Lock())

    def use(self, ref: ModelRef) -> bool:
        """True if it is resident; it then counts as most recently used."""
        if ref in self.resident:
            self.resident.move_to_end(ref)
        return ref in self.resident

    def add(self, ref: ModelRef) -> None:
        self.resident[ref] = None

    def discard(self, ref: ModelRef) -> None:
        self.resident.pop(ref, None)

    def surplus(self, limit: int, *, active: Container[ModelRef]) -> list[ModelRef]:
        """Return the least recently used idle adapters to unload before one more is loaded."""
        idle = [ref for ref in self.resident if ref not in active]
        return idle[: max(0, len(self.resident) + 1 - limit)]

    def is_idle(self, ref: ModelRef, *, active: Container[ModelRef]) -> bool:
        """True if it may still be unloaded: others may have unloaded it meanwhile."""
        return ref in self.resident and ref not in active

    def expect(self, name: str) -> None:
        """Record a name before the request that brings it to the server is sent."""
        if not self._is_own:
            self._owner.note_server(self._client.url)
        self._names.add(name)

    def note_cut(self, name: str) -> None:
        """Record that a request for this name was abandoned but may still be queued there."""
        self._cut.add(name)

    async def load(self, name: str, *, path: Path | str) -> None:
        """Load an adapter. A sent load is not cancelled with its caller: it could follow the
        unload."""
        if self._has_left:
            raise FleetError("The fleet was closed before this adapter was loaded.")
        self.expect(name)
        load = self._loads.get(name)
        if load is None:
            load = asyncio.create_task(self._client.load_adapter(name, path=str(path)))
            self._loads[name] = load
            load.add_done_callback(partial(self._end_load, name))
        try:
            await asyncio.shield(load)
        except AdapterError:
            self._names.discard(name)
            raise

    def _end_load(self, name: str, load: asyncio.Task[None]) -> None:
        del self._loads[name]
        if not load.cancelled():
            load.exception()  # retrieved: its caller may have been cancelled

    async def unload(self, name: str, *, model: str) -> bool:
        """Unload an adapter; False if the server may still read its folder.

        `model` is the server's base model.
        """
        if name not in self._names:
            return True
        return await self._let_go([name], model=model)

    async def leave(self, *, model: str) -> None:
        """Unload all adapters and refuse further loads. Never raises; the rest stays recorded."""
        self._has_left = True
        if self._is_own or await self._let_go(sorted(self._names), model=model):
            self._owner.servers.discard(self._client.url)

    async def _let_go(self, names: Sequence[str], *, model: str) -> bool:
        try:
            async with asyncio.timeout(LEAVE_S):
                # Names with pending loads come last: a load that hangs must not delay the others.
                for name in sorted(names, key=self._loads.__contains__):
                    if name in self._loads:
                        await asyncio.wait([self._loads[name]])
                    await self._client.unload_adapter(name)
                if not self._cut.isdisjoint(names):
                    await self._wait_for_queue(model)
        except (TimeoutError, ServerLost, ServerRefusal) as error:
            if not _is_gone(error):
                why = str(error) or f"it took longer than {LEAVE_S:g} s"
                logger.warning("%s did not unload %s: %s", self._client.url, names, why)
                return False
        # Only now: while a request may be waiting there, a later call must try again.
        self._names.difference_update(names)
        self._cut.difference_update(names)
        return True

    async def _wait_for_queue(self, model: str) -> None:
        """Wait for one request: the server learns of cut-off requests before it."""
        await self._client.complete(encode_body(model, Fields(max_tokens=1), [(1,)]))


async def clear_left(parent: Path, clients: Sequence[Client]) -> None:
    """Unload what dead owners left on servers, and remove their folders. Folders stay if a server
    cannot be asked. `clients` have the keys of the servers at hand."""
    by_url = {client.url: client for client in clients}
    limits = ClientConfig(connect_s=LEFT_S, control_s=LEFT_S)
    with find_left(parent) as dead:
        urls = sorted({url for owner in dead for url in owner.servers})
        async with open_session() as session:
            targets = [
                by_url.get(url) or Client(url, session=session, config=limits) for url in urls
            ]
            tokens = frozenset(owner.token for owner in dead)
            gone = await asyncio.gather(*(_clear(client, tokens) for client in targets))
        cleared = dict(zip(urls, gone, strict=True))
        for owner in dead:
            if all(owner.token in cleared[url] for url in owner.servers):
                await asyncio.to_thread(owner.remove)


async def list_names(client: Client, *tokens: str) -> list[str]:
    """Return the adapters of these owners that a server knows."""
    models = await client.get("/v1/models")
    with boundary(FleetError, f"{client.url}/v1/models answers no list of models"):
        names = [str(model["id"]) for model in models["data"]]
    return [name for name in names if _token(name) in tokens]


async def _clear(client: Client, tokens: Set[str]) -> Set[str]:
    """Unload these owners' adapters; return the tokens that have none left on the server."""
    known = set(tokens)
    try:
        with boundary(FleetError, f"{client.url} cannot be asked"):
            async with asyncio.timeout(LEFT_S):
                names = sorted(await list_names(client, *tokens), key=_token)
                known = {_token(name) for name in names}
                for token, group in groupby(names, key=_token):
                    for name in group:
                        await client.unload_adapter(name)
                        logger.info("%s: unregistered %s: its process died", client.url, name)
                    known.discard(token)
    except FleetError as error:
        is_other = isinstance(error, ServerRefusal) and error.status == 404
        if is_other or _is_gone(error):  # another program has the port now, or nothing listens
            return tokens
        logger.info("folders of dead processes stay: %s", error)
    return tokens - known


def _token(name: str) -> str:
    """Return the owner's token in a name; empty for other names."""
    return name.rpartition("~")[2] if "~" in name else ""


def _is_gone(error: Exception) -> bool:
    """True if nothing listens there: the server's adapters are gone with it."""
    cause = error.__cause__
    return isinstance(cause, ClientConnectorError) and isinstance(
        cause.os_error, ConnectionRefusedError
    )
