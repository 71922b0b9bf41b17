"""A service elsewhere as an Engine, and the connection to it: retries, results, the session.

Every request that changes something has a number: if its answer is lost, it is sent again and still
done once. The client waits for a service that restarts.
"""

import asyncio
import base64
import itertools
import json
import logging
import os
import re
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal
from uuid import uuid4
from weakref import WeakValueDictionary

import aiohttp
from pydantic import Field

from rookery.config import Config
from rookery.errors import AdapterError, EngineError, RookeryError, ServiceDownError, ServiceError
from rookery.remote.records import PROTOBUF, read_score
from rookery.runtime.concurrency import task_group, together
from rookery.runtime.retry import Backoff
from rookery.types import (
    Adapter,
    Completion,
    ModelRef,
    SampleRequest,
    SamplingParams,
    Score,
    ScoreRequest,
)

__all__ = [
    "Connection",
    "EngineFacts",
    "HttpReply",
    "Samplers",
    "ServiceClientConfig",
    "ServiceEngine",
    "ServiceRefusal",
    "open_connection",
    "read_facts",
    "upload",
]


logger = logging.getLogger(__name__)

HEARTBEAT_S = 10.0
POLL_S = 60.0
"""Longest silence of the service, which answers polls within 45 s; transfers may go on."""
_RETRY = Backoff(first_s=0.1, longest_s=5.0)
_AGAIN = frozenset({408, 429})
_NOBODY = frozenset({401, 403, 410})
"""The key or the session is unknown: no request will be answered."""


class ServiceClientConfig(Config):
    """A service (`rookery serve`) and one of its base models."""

    rounding: ClassVar[None] = None
    type: Literal["service"] = "service"
    url: str = "http://127.0.0.1:8000"
    """URL of the service."""
    api_key_env: str = "TINKER_API_KEY"
    """Environment variable that holds the key, as printed by `rookery keys add`."""
    model: str = ""
    """Name of the base model; by default the service's first."""
    away_s: float = Field(default=300.0, ge=0)
    """Seconds to wait for a service that does not answer."""
    in_flight: int = Field(default=256, ge=1)
    """Limit on samples that wait for their results at the same time."""


class ServiceRefusal(ServiceError):
    """The service understood the request and refused it."""

    def __init__(self, sentence: str, *, status: int) -> None:
        super().__init__(sentence)
        self.status = status


class Away(Exception):
    """The service did not answer, or is too busy now."""


@dataclass(frozen=True, slots=True)
class HttpReply:
    """An HTTP answer with a status below 400, or 408."""

    status: int
    content: bytes
    content_type: str

    def document(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.content) if self.content else {}
        return document


class Connection:
    """One session with a service; made by `open_connection`."""

    def __init__(self, http: aiohttp.ClientSession, config: ServiceClientConfig) -> None:
        self._http = http
        self._loop = asyncio.get_running_loop()
        self._config = config
        self.session_id = ""
        self._numbers = itertools.count()
        self.turns = asyncio.Semaphore(config.in_flight)
        """Filled by waiting samples, drained by their answers. Requests of models do not take part:
        they go in the order of their numbers, and must not wait for each other here."""

    def next_number(self) -> int:
        """Return a new number for a model, sampling session or sample of this session."""
        return next(self._numbers)

    async def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send a JSON request and return its answer."""
        return (await self.request("POST", path, json.dumps(body).encode())).document()

    async def submit(self, path: str, body: Mapping[str, Any], *, accept: str = "") -> HttpReply:
        """Send a request that is queued at the service, and return its result."""
        reply = await self.post(path, body)
        return await self._result(str(reply["request_id"]), accept=accept)

    async def request(
        self, method: str, path: str, body: bytes | None = None, *, accept: str = ""
    ) -> HttpReply:
        """Send a request, again and again while the service is away."""
        if self._http.closed:
            raise ServiceDownError("The client of the service is closed: open it with open_client.")
        if asyncio.get_running_loop() is not self._loop:
            raise ServiceError(
                "The client of the service answers on the event loop that opened it."
            )
        url = path if path.startswith("http") else f"{self._config.url.rstrip('/')}/api/v1/{path}"
        try:
            return await _RETRY.persist(
                lambda: self.send_once(method, url, body, accept),
                on=Away,
                limit_s=self._config.away_s,
            )
        except Away as away:
            raise ServiceDownError(
                f"The service at {self._config.url} did not take a request for "
                f"{self._config.away_s:g} s: {away}. Is it running?"
            ) from away

    async def delete(self, path: str) -> None:
        """Delete something; ignore that it is gone, as after a lost answer."""
        try:
            await self.request("DELETE", path)
        except ServiceRefusal as refusal:
            if refusal.status != 404:
                raise

    async def _result(self, request_id: str, *, accept: str) -> HttpReply:
        body = json.dumps({"request_id": request_id}).encode()
        while True:
            answer = await self.request("POST", "retrieve_future", body, accept=accept)
            if answer.status != 408:
                return answer

    async def send_once(self, method: str, url: str, body: bytes | None, accept: str) -> HttpReply:
        headers = {"content-type": "application/json", "accept": accept or "application/json"}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=POLL_S, sock_read=POLL_S)
        try:
            async with self._http.request(
                method, url, data=body, headers=headers, timeout=timeout
            ) as response:
                content = await response.read()
                status, kind = response.status, response.content_type
        except (aiohttp.ClientError, TimeoutError) as error:
            raise Away(" ".join(str(error).split()) or type(error).__name__) from error
        if status < 400 or (status == 408 and url.endswith("/retrieve_future")):
            return HttpReply(status, content, kind)
        sentence = _sentence(content)
        if status in _NOBODY:
            raise ServiceDownError(f"The service at {self._config.url} says: {sentence}")
        if status in _AGAIN or status >= 500:
            raise Away(f"{status}: {sentence}")
        raise ServiceRefusal(sentence, status=status)

    async def finish(self) -> None:
        """End the session. Tried once, as the service ends silent sessions itself."""
        url = f"{self._config.url.rstrip('/')}/api/v1/sessions/{self.session_id}/finish"
        try:
            await self.send_once("POST", url, b"{}", "")
        except (Away, ServiceError) as error:
            logger.info("The session was not finished: %s", error)

    async def beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            try:
                await self.post("session_heartbeat", {"session_id": self.session_id})
            except ServiceError as error:
                logger.warning("The heartbeat of the session failed: %s", error)


@asynccontextmanager
async def open_connection(config: ServiceClientConfig) -> AsyncIterator[Connection]:
    """Open a session with the service for the block."""
    key = os.environ.get(config.api_key_env, "")
    headers = {"x-api-key": key} if key else {}
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30.0)
    async with aiohttp.ClientSession(connector=connector, headers=headers) as http:
        connection = Connection(http, config)
        connection.session_id = (await connection.post("create_session", {}))["session_id"]
        async with task_group() as group:
            beating = group.create_task(connection.beat())
            try:
                yield connection
            finally:
                beating.cancel()
                await connection.finish()


def _sentence(content: bytes) -> str:
    text = content.decode("utf-8", "replace")
    try:
        document = json.loads(text)
        text = str(document["error"])
    except (ValueError, TypeError, LookupError):
        pass
    return " ".join(text.split())[:1000]


# The sampling session of the service for each ModelRef.


@dataclass(slots=True)
class _Sampler:
    id: str
    adapter_id: str = ""
    """Registered adapter that it draws from; empty for none."""
    num_holders: int = 1
    num_requests: int = 0


class Samplers:
    """Sampling sessions in use. A dropped one ends after its last request."""

    def __init__(self, connection: Connection, *, base: ModelRef, base_model: str) -> None:
        self._connection = connection
        self._base = base
        self._base_model = base_model
        self._samplers: dict[ModelRef, _Sampler] = {}
        self._creating = asyncio.Lock()
        """Held to create the base model's session, as many may ask for it at once."""

    @asynccontextmanager
    async def use(self, ref: ModelRef) -> AsyncIterator[str]:
        """Yield the id of its session, which stays during the block."""
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

    @property
    def loaded(self) -> tuple[ModelRef, ...]:
        """Adapters that requests can name, oldest first."""
        return tuple(ref for ref in self._samplers if ref != self._base)

    def hold(self, ref: ModelRef) -> bool:
        """Add a holder to a known session; False if there is none."""
        sampler = self._samplers.get(ref)
        if sampler is None:
            return False
        sampler.num_holders += 1
        return True

    async def add_path(self, ref: ModelRef, path: str, *, adapter_id: str) -> None:
        """Create a session for a checkpoint under this name."""
        sampler = _Sampler(await self._create({"model_path": path}), adapter_id=adapter_id)
        await self._add(ref, sampler)

    async def add(self, ref: ModelRef, sampler_id: str) -> None:
        """Add a session that was created with its weights."""
        await self._add(ref, _Sampler(sampler_id))

    async def _add(self, ref: ModelRef, sampler: _Sampler) -> None:
        known = self._samplers.setdefault(ref, sampler)
        if known is not sampler:  # equal weights: keep the existing session
            known.num_holders += 1
            await self._end(sampler)

    async def drop(self, ref: ModelRef) -> None:
        """Remove one holder; without holders, the session ends after its last request."""
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


FILES = ("adapter_config.json", "adapter_model.safetensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """One base model of a service, as the service describes it."""

    base_model: str
    """Name that clients use for it."""
    base: ModelRef
    linear_layers: Mapping[str, tuple[int, int]]
    max_rank: int
    context_tokens: int | None


async def read_facts(connection: Connection, base_model: str) -> EngineFacts:
    """Read the facts of a base model; "" names the service's first."""
    known = (await connection.request("GET", "engines")).document()
    name = base_model or next(iter(known), "")
    if name not in known:
        raise EngineError(f"The service has no base model {name!r}. It has: {', '.join(known)}.")
    facts = known[name]
    layers = {layer: (shape[0], shape[1]) for layer, shape in facts["linear_layers"].items()}
    return EngineFacts(
        base_model=name,
        base=ModelRef(name=facts["name"], version=facts["version"]),
        linear_layers=layers,
        max_rank=facts["max_rank"],
        context_tokens=facts["context_tokens"],
    )


class ServiceEngine:
    """An Engine over HTTP. Requests carry their seeds, so equal requests get equal answers."""

    is_remote = True
    is_batch_invariant = False
    token_counts: Mapping[str, int] = {}

    def __init__(self, connection: Connection, samplers: Samplers, facts: EngineFacts) -> None:
        self._connection = connection
        self._samplers = samplers
        self._facts = facts
        self._loading = WeakValueDictionary[ModelRef, asyncio.Lock]()
        """Held during the load of an adapter, so that a concurrent load finds it."""

    @property
    def base(self) -> ModelRef:
        return self._facts.base

    @property
    def linear_layers(self) -> Mapping[str, tuple[int, int]]:
        return self._facts.linear_layers

    @property
    def max_rank(self) -> int:
        return self._facts.max_rank

    @property
    def context_tokens(self) -> int | None:
        return self._facts.context_tokens

    @property
    def loaded(self) -> tuple[ModelRef, ...]:
        return self._samplers.loaded

    async def sample(self, requests: Sequence[SampleRequest]) -> list[tuple[Completion, ...]]:
        return await together(self._sample(request) for request in requests)

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        return await together(self._score(request) for request in requests)

    async def load(self, adapter: Adapter) -> ModelRef:
        ref = ModelRef(name=adapter.name, version=adapter.version)
        async with self._loading.setdefault(ref, asyncio.Lock()):
            if not self._samplers.hold(ref):
                await self._upload(adapter, ref)
        return ref

    async def _upload(self, adapter: Adapter, ref: ModelRef) -> None:
        with tempfile.TemporaryDirectory(prefix="rookery-adapter-") as scratch:
            folder = Path(scratch) / "adapter"
            await asyncio.to_thread(_write, adapter, folder)
            name = re.sub(r"[^A-Za-z0-9]", "-", adapter.name).strip("-")[:40]
            adapter_id = f"{name or 'adapter'}-{uuid4().hex}"
            with _refused(AdapterError):
                path = await upload(self._connection, folder, adapter_id, self._facts.base_model)
        await self._samplers.add_path(ref, path, adapter_id=adapter_id)

    async def unload(self, ref: ModelRef) -> None:
        if ref == self.base:
            raise EngineError("The base model cannot be unloaded.")
        await self._samplers.drop(ref)

    async def _sample(self, request: SampleRequest) -> tuple[Completion, ...]:
        if request.json_schema:
            raise EngineError("The service draws no answers to a JSON schema: leave it out.")
        async with self._connection.turns, self._samplers.use(request.model) as sampler_id:
            body = _sample_body(request, sampler_id, self._connection.next_number())
            with _refused(EngineError):
                answer = await self._connection.submit("asample", body, accept=PROTOBUF)
        if answer.content_type == PROTOBUF:
            # Imported here, as it needs the extra `serve`.
            from rookery.remote.messages import read_completions

            return read_completions(answer.content, model=request.model)
        raise _failure(answer)

    async def _score(self, request: ScoreRequest) -> Score:
        async with self._connection.turns, self._samplers.use(request.model) as sampler_id:
            body = {
                "sampling_session_id": sampler_id,
                "seq_id": self._connection.next_number(),
                "tokens": request.tokens,
                "start": request.start,
                "labels": request.labels,
                "top_logprobs": request.top_logprobs,
            }
            with _refused(EngineError):
                answer = await self._connection.submit("score", body)
        document = answer.document()
        if "error" in document:
            raise _failure(answer)
        return read_score(document, model=request.model)


async def upload(connection: Connection, folder: Path, adapter_id: str, base_model: str) -> str:
    """Register a PEFT folder; return its tinker:// path."""
    config, weights = [await asyncio.to_thread((folder / name).read_bytes) for name in FILES]
    body = {
        "adapter_id": adapter_id,
        "adapter_config": json.loads(config),
        "adapter_model": base64.b64encode(weights).decode(),
        "base_model": base_model,
        "session_id": connection.session_id,
    }
    return str((await connection.post("adapters", body))["tinker_path"])


def _sample_body(request: SampleRequest, sampler_id: str, seq: int) -> dict[str, Any]:
    params = request.params
    return {
        "sampling_session_id": sampler_id,
        "seq_id": seq,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": request.prompt}]},
        "num_samples": params.n,
        "topk_sample_logprobs": params.top_logprobs,
        "return_text": True,
        "return_kept": params.return_kept,
        "sampling_params": {
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "min_p": params.min_p,
            **_penalties(params),
            "stop": params.stop or None,
            "stop_tokens": params.stop_tokens,
            "ignore_eos": params.ignore_eos,
            "seed": params.seed,
        },
    }


def _penalties(params: SamplingParams) -> dict[str, float]:
    penalties = {} if params.penalties is None else asdict(params.penalties)
    return {f"{name}_penalty": value for name, value in penalties.items()}


@contextmanager
def _refused(kind: type[RookeryError]) -> Iterator[None]:
    """Raise refusals of the service as an engine's own error."""
    try:
        yield
    except ServiceRefusal as refusal:
        raise kind(str(refusal)) from refusal


def _failure(answer: HttpReply) -> EngineError:
    return EngineError(str(answer.document().get("error", "The service answered no sample.")))


def _write(adapter: Adapter, folder: Path) -> None:
    # Imported here, as only programs with an adapter's tensors have torch.
    from rookery.weights import write_adapter

    write_adapter(adapter, folder)
