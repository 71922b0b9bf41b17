"""The async client of one server: the fleet's only place for requests, time limits and retries.

    async with open_session() as session:
        client = Client("http://127.0.0.1:8000", session=session)
        answer = await client.complete(encode_body(model, fields, prompts))

| what goes wrong                              | is raised         | and then                      |
|----------------------------------------------|-------------------|-------------------------------|
| 429, 503: the server did not take it         | ServerBusy        | retried here, for `busy_s`    |
| no file descriptor is free in this process   | ServerBusy        | retried here, for `busy_s`    |
| no connection, it broke, no answer in time   | ServerLost        | the pool sends it elsewhere   |
| 500 to 599 otherwise                         | ServerLost        | the pool sends it elsewhere   |
| 300 to 499 otherwise                         | ServerRefusal     | it would be refused again     |
"""

import asyncio
import errno
import json
import os
import resource
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from pydantic import Field
from yarl import URL

from rookery.config import Config, check_url, is_loopback
from rookery.errors import AdapterError, FleetError
from rookery.fleet.vllm_plugin.token_route import FORMAT as ROUTE_FORMAT
from rookery.fleet.vllm_plugin.token_route import PATH as TOKEN_ROUTE
from rookery.runtime.retry import Backoff

__all__ = [
    "Client",
    "ClientConfig",
    "ServerBusy",
    "ServerLost",
    "ServerRefusal",
    "check_urls",
    "connection_limit",
    "is_local",
    "max_calls",
    "open_session",
]


def is_local(url: str) -> bool:
    """True if the URL is of this machine, so that the server sees our files."""
    return is_loopback(urlsplit(url).hostname or "")


_PORTS = {"http": 80, "https": 443}


def check_urls(urls: Sequence[str]) -> None:
    """ValueError unless the URLs are of different servers."""
    seen: dict[tuple[str, str, int, str], str] = {}
    for url in urls:
        place = _place(url)
        if place in seen:
            raise ValueError(
                f"urls names one server twice, as {seen[place]} and {url}: write it once; "
                "max_in_flight says how much it gets at a time."
            )
        seen[place] = url


def _place(url: str) -> tuple[str, str, int, str]:
    """Return scheme, host, port and path: equal for two spellings of one server."""
    parts = check_url(url, named="urls has")
    host = "127.0.0.1" if parts.hostname == "localhost" else parts.hostname or ""
    path = parts.path.rstrip("/").removesuffix("/v1")
    return parts.scheme, host, parts.port or _PORTS[parts.scheme], path


# How many connections this process may have: each takes a file descriptor.
#
#     connection_limit()      # 488 under `ulimit -n 1024` with 48 files open


WANTED = 32_768
"""Enough descriptors for 10,000 requests in flight and everything else. Shells start programs with
a limit of 1,024 and let them raise it."""


def connection_limit() -> int:
    """Return half of the free descriptors, after raising the limit towards `WANTED`. The other half
    is for files, processes, other clients, and servers in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = WANTED if hard == resource.RLIM_INFINITY else min(WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        soft = allowed
    total = WANTED if soft == resource.RLIM_INFINITY else soft
    return max(1, (total - len(os.listdir("/dev/fd"))) // 2)


KEEPALIVE_S = 2.0
"""vLLM closes idle connections after 5 s: closing ours earlier avoids reusing a dying one."""
_JSON = "application/json"
_STREAM_END = b"[DONE]"
_BUSY = frozenset({429, 503})
_NO_CREDIT = b"insufficient_quota"
"""OpenAI's code for an account without credit: also a 429, but waiting does not help."""
_NO_DESCRIPTOR = frozenset({errno.EMFILE, errno.ENFILE})
_FOR_CALLS = 7 / 8
"""Share of the connections for completions, so that health and metrics never wait for them."""
_FIRST_WAIT_S = 0.1
RETRY = Backoff(first_s=_FIRST_WAIT_S, longest_s=10.0)


class ServerLost(FleetError):
    """The server may be dead; the request may be sent again, to another one."""

    def __init__(
        self, message: str, *, is_broken: bool, was_sent: bool = True, status: int | None = None
    ) -> None:
        super().__init__(message)
        self.is_broken = is_broken
        """True if the connection failed; False for a late answer or an internal error."""
        self.was_sent = was_sent
        """False if the request certainly never reached the server."""
        self.status = status
        """HTTP status of the answer, if there was one."""


class ServerBusy(ServerLost):
    """The server took no request for `busy_s`."""


class ServerRefusal(FleetError):
    """The server understood the request and refused it; a repetition would be refused too."""

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


class _Busy(Exception):
    """The server did nothing, so it may be asked again."""

    def __init__(self, message: str, wait_s: float) -> None:
        super().__init__(message)
        self.wait_s = wait_s


class ClientConfig(Config):
    """Time limits of requests to a server."""

    connect_s: float = Field(default=5.0, gt=0)
    """Seconds for a connection to open."""
    request_s: float = Field(default=900.0, gt=0)
    """Seconds for a batch of completions."""
    control_s: float = Field(default=60.0, gt=0)
    """Seconds for any other request: health, adapters, metrics."""
    busy_s: float = Field(default=20.0, ge=0)
    """Seconds during which a server that answers 429 or 503 is asked again. If its Retry-After is
    longer, the request fails at once."""


@asynccontextmanager
async def open_session() -> AsyncIterator[aiohttp.ClientSession]:
    """Open a connection pool for any number of clients, as large as the file descriptors allow."""
    connector = aiohttp.TCPConnector(limit=connection_limit(), keepalive_timeout=KEEPALIVE_S)
    jar = aiohttp.DummyCookieJar()
    async with aiohttp.ClientSession(connector=connector, cookie_jar=jar) as session:
        yield session


def max_calls(session: aiohttp.ClientSession) -> int:
    """Return how many completions may be in flight together over this session."""
    limit = session.connector.limit if session.connector is not None else 0
    return max(1, int(_FOR_CALLS * limit))


class Client:
    """Client of one server, by its URL (with or without a trailing /v1)."""

    def __init__(
        self,
        url: str,
        *,
        session: aiohttp.ClientSession,
        config: ClientConfig | None = None,
        api_key: str = "",
        kind: str = "vLLM server",
    ) -> None:
        """`kind` is the word for the server in error messages."""
        self._kind = kind
        self.url = url.rstrip("/").removesuffix("/v1")
        self.config = config or ClientConfig()
        self._session = session
        self._known_limits: dict[float, aiohttp.ClientTimeout] = {}
        self._known_urls: dict[str, URL] = {}
        self._headers = {"Content-Type": _JSON}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    async def complete(self, body: bytes) -> Any:
        """Send one `/v1/completions` call. Safe to repeat: it changes nothing on the server."""
        return await self.post("/v1/completions", body, limit_s=self.config.request_s)

    async def stream(self, body: bytes, take: Callable[[Any], None]) -> None:
        """Send one `/v1/completions` call with `stream`; pass every chunk to `take` as it comes."""

        async def send() -> None:
            limit_s = self.config.request_s
            async with self._responding("POST", "/v1/completions", body, limit_s) as response:
                rest, is_whole = b"", False
                async for content in response.content.iter_any():
                    *lines, rest = (rest + content).split(b"\n")
                    for line in lines:
                        data = line.removeprefix(b"data:").strip()
                        is_whole = is_whole or data == _STREAM_END
                        if data and not is_whole:
                            take(self._chunk(data, response.url))
            if not is_whole:
                raise ServerLost(f"{self.url} ended a stream before its end.", is_broken=True)

        await self._persist(send)

    async def generate(self, body: bytes) -> Any:
        """Send one call of Rookery's own route, on servers that have it."""
        return await self.post(TOKEN_ROUTE, body, limit_s=self.config.request_s)

    async def has_token_route(self) -> bool:
        """True if the server has Rookery's own route and its vLLM supports it."""
        try:
            answer = await self.get(TOKEN_ROUTE)
        except (ServerLost, ServerRefusal):
            return False
        return isinstance(answer, dict) and answer.get("format") == ROUTE_FORMAT

    async def post(
        self,
        path: str,
        body: bytes,
        *,
        limit_s: float | None = None,
        admit: Callable[[], Awaitable[None]] | None = None,
    ) -> Any:
        """POST and decode. `admit` is awaited before every attempt."""

        async def send() -> Any:
            if admit is not None:
                await admit()
            return await self._request("POST", path, body, limit_s)

        return await self._persist(send)

    async def post_json(self, path: str, document: Mapping[str, Any]) -> Any:
        return await self.post(path, json.dumps(document).encode())

    async def get(self, path: str) -> Any:
        """GET and decode: JSON if the server declares it, else text."""
        return await self._persist(lambda: self._request("GET", path, None, None))

    async def is_healthy(self) -> bool:
        """True if `/health` answers 200, or `/v1/models` on servers without that route."""
        try:
            await self._request("GET", "/health", None, None)
        except ServerRefusal as refusal:
            return refusal.status == 404 and await self._lists_models()
        except (ServerLost, _Busy):
            return False
        return True

    async def load_adapter(self, name: str, *, path: str) -> None:
        """Load an adapter. Names stand for contents, so one that is already there is a success.
        AdapterError if the server cannot use it: vLLM answers 500 to an adapter that does not fit,
        and stays healthy."""
        try:
            await self.post_json("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})
        except ServerRefusal as refusal:
            if "already been loaded" not in str(refusal):
                raise AdapterError(f"The adapter {name} cannot be loaded: {refusal}") from refusal
        except ServerLost as loss:
            if loss.status == 500 and await self.is_healthy():
                raise AdapterError(f"The adapter {name} cannot be loaded: {loss}") from loss
            raise

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter; a name that is not there is a success."""
        try:
            await self.post_json("/v1/unload_lora_adapter", {"lora_name": name})
        except ServerRefusal as refusal:
            if refusal.status != 404:
                raise

    async def call_workers(self, method: str, **arguments: Any) -> list[Any]:
        """Call a method of the worker extension in every worker process; JSON in, JSON out."""
        answer = await self.post_json(
            "/collective_rpc",
            {"method": method, "kwargs": arguments, "timeout": self.config.control_s},
        )
        results = answer.get("results") if isinstance(answer, dict) else None
        if not isinstance(results, list) or not results:
            raise FleetError(f"{self.url} answered nothing to the worker call {method}.")
        return results

    async def reset_prefix_cache(self) -> None:
        """Forget cached prefixes, after the base weights changed. Running requests, also of other
        clients, are computed anew from their prompts; without that, vLLM forgets nothing."""
        await self.post_json("/reset_prefix_cache?reset_running_requests=true", {})

    async def _persist(self, send: Callable[[], Awaitable[Any]]) -> Any:
        """Send a request; retry on a busy server after its Retry-After, or with back-off."""
        try:
            return await send()
        except _Busy as busy:
            first = busy
        end_s = time.monotonic() + self.config.busy_s

        def next_wait(error: Exception) -> bool | float:
            """Return False to give up, True to leave the pause to the back-off."""
            if not isinstance(error, _Busy) or time.monotonic() + error.wait_s > end_s:
                return False
            return error.wait_s if error.wait_s > _FIRST_WAIT_S else True

        try:
            if next_wait(first) is False:
                raise first
            await asyncio.sleep(first.wait_s)
            return await RETRY.persist(send, on=next_wait)
        except _Busy as last:
            raise self._too_busy(last) from None

    def _too_busy(self, last: _Busy) -> ServerBusy:
        limit_s = self.config.busy_s
        is_told = last.wait_s > max(limit_s, _FIRST_WAIT_S)
        verb = "asks to wait for longer than" if is_told else "took no request for"
        said = f"{self.url} {verb} busy_s, {limit_s:g} s: {last}. Lower max_in_flight, add servers "
        return ServerBusy(said + "or raise busy_s.", is_broken=False)

    async def _lists_models(self) -> bool:
        try:
            await self._request("GET", "/v1/models", None, None)
        except (ServerLost, ServerRefusal, _Busy):
            return False
        return True

    async def _request(
        self, method: str, path: str, body: bytes | None, limit_s: float | None
    ) -> Any:
        async with self._responding(method, path, body, limit_s) as response:
            content = await response.read()
            # vLLM's exact value; parsing the header costs as much as this check saves.
            is_json = response.headers.get("Content-Type") == _JSON
            return _decode(content, _JSON if is_json else response.content_type, response.url)

    @asynccontextmanager
    async def _responding(
        self, method: str, path: str, body: bytes | None, limit_s: float | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield a response without an error status; map errors raised inside the block too."""
        limits = self._limits(limit_s or self.config.control_s)
        where = self._url(path)
        if self._session.closed:
            raise self._closed()
        try:
            async with self._session.request(
                method,
                where,
                data=body,
                headers=self._headers,
                timeout=limits,
                allow_redirects=False,
            ) as response:
                if response.status >= 300:
                    raise self._error(response, await response.read(), where)
                yield response
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._session.closed and task is not None and not task.cancelling():
                # aiohttp cancels the waiters for a connection, not the task.
                raise self._closed() from None
            raise
        except aiohttp.ClientConnectionError as error:
            was_sent = not isinstance(error, aiohttp.ClientConnectorError)
            if isinstance(error, aiohttp.ClientConnectorError) and error.errno in _NO_DESCRIPTOR:
                said = "this process has no file descriptor left: raise `ulimit -n`"
                raise _Busy(said, _FIRST_WAIT_S) from error
            raise ServerLost(
                _unreachable(self._kind, self.url, error), is_broken=True, was_sent=was_sent
            ) from error
        except (aiohttp.ClientError, ValueError) as error:
            raise ServerLost(f"{where} did not answer in HTTP: {error}", is_broken=True) from error
        except TimeoutError:
            raise ServerLost(
                f"{where} did not answer within {limits.total:g} s; if that is too short for this "
                "model, raise request_s (completions) or control_s (the rest).",
                is_broken=False,
            ) from None

    def _closed(self) -> ServerLost:
        return ServerLost(
            f"The connection to {self.url} was closed here, by the end of its fleet or client.",
            is_broken=True,
            was_sent=False,
        )

    def _limits(self, total_s: float) -> aiohttp.ClientTimeout:
        limits = self._known_limits.get(total_s)
        if limits is None:
            limits = aiohttp.ClientTimeout(total=total_s, sock_connect=self.config.connect_s)
            self._known_limits[total_s] = limits
        return limits

    def _url(self, path: str) -> URL:
        """Parse each URL once, as parsing costs as much as sending."""
        url = self._known_urls.get(path)
        if url is None:
            url = self._known_urls[path] = URL(self.url + path)
        return url

    def _chunk(self, data: bytes, where: URL) -> Any:
        """Decode a chunk of a stream; an error in it is the server's, which took the request."""
        chunk = _decode(data, _JSON, where)
        if isinstance(chunk, dict) and "error" in chunk:
            said = f"{where} failed while it answered: {_message(data)}"
            raise ServerLost(said, is_broken=False, status=500)
        return chunk

    def _error(self, response: aiohttp.ClientResponse, content: bytes, where: URL) -> Exception:
        said = _message(content)
        if response.status in _BUSY and _NO_CREDIT not in content:
            wait_s = _retry_after_s(response.headers.get("Retry-After", ""))
            wait_hint = f" (it asks to wait {wait_s:.0f} s)" if wait_s > _FIRST_WAIT_S else ""
            return _Busy(said + wait_hint, wait_s)
        if response.status >= 500:
            return ServerLost(
                f"{where} failed ({response.status}): {said}",
                is_broken=False,
                status=response.status,
            )
        if response.status < 400:
            said = _new_address(response.headers.get("Location", ""), where, self.url)
            return ServerRefusal(f"{where} {said}", status=response.status)
        hint = " Check the API key." if response.status in (401, 403) else ""
        return ServerRefusal(
            f"{where} refused ({response.status}): {said}{hint}", status=response.status
        )


def _new_address(location: str, where: URL, url: str) -> str:
    """Say what to write instead of a server's URL that redirects."""
    try:
        target = str(where.join(URL(location))) if location else ""
    except ValueError:
        target = ""
    if not target:
        return "redirects to nowhere: write the address of the server itself."
    root = target.removesuffix(str(where).removeprefix(url))
    return f"redirects to {target}, and requests go to the server itself: write {root}."


def _unreachable(what: str, url: str, error: Exception) -> str:
    reason = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, aiohttp.ClientConnectorError):
        number = error.os_error.errno or 0
        reason = os.strerror(number) if number > 0 else str(error.os_error.strerror or reason)
    return f"The {what} can't be reached at {url}: {reason}. Is it running?"


def _decode(content: bytes, content_type: str, where: URL) -> Any:
    if content_type != _JSON:
        return content.decode("utf-8", "replace")
    try:
        return json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise ServerLost(f"{where} answered broken JSON: {error}", is_broken=False) from error


def _message(content: bytes) -> str:
    """Return the message in an error answer of vLLM, FastAPI or OpenAI, else its first words."""
    text = content.decode("utf-8", "replace")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        document = None
    if isinstance(document, dict):
        inner = document.get("error", document)
        message = inner.get("message", inner.get("detail")) if isinstance(inner, dict) else inner
        text = message if isinstance(message, str) else text
    # JSON allows half of a surrogate pair, which cannot be written as UTF-8.
    return " ".join(text.split())[:500].encode(errors="replace").decode()


def _retry_after_s(header: str) -> float:
    """Return the seconds of a Retry-After header, a number or a date; the first wait if invalid."""
    try:
        is_number = header.strip().replace(".", "", 1).isdigit()
        wait_s = (
            float(header) if is_number else parsedate_to_datetime(header).timestamp() - time.time()
        )
    except (ValueError, OverflowError):
        return _FIRST_WAIT_S
    return max(wait_s, _FIRST_WAIT_S)
