"""A vLLM server from plain synchronous code: sampling, LoRA adapters, weight updates.

    import vllm_backend

    vllm_backend.register_lora_adapter(adapter_id="poet", lora_path="/adapters/poet")
    [answer] = vllm_backend.generate_with_vllm(["Once upon a time"], adapter_id="poet")
    answer["text"]

VLLM_BASE_URL, or VLLM_HOST and VLLM_PORT, name the server. VLLM_TIMEOUT (seconds to wait for it),
VLLM_REQUEST_S (seconds to wait for an answer), VLLM_ENABLE_LORA, VLLM_MAX_LORAS, VLLM_MAX_LORA_RANK
and VLLM_ADAPTER_FOLDER are read too. The server may also be a Rookery service: adapters registered
there serve all programs with its key. New weights go through files, in shared memory or, for a
server on another machine, in VLLM_ADAPTER_FOLDER, which both must see. Without that they go from
GPU to GPU, by VLLM_GROUP_PORT.

The functions wrap `rookery.fleet`, which async code should use directly. Call them from any thread.
A forked process has no connection: it must call `initialize_vllm_client` itself.
"""

import asyncio
import atexit
import base64
import json
import os
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field

from rookery.config import Config, parse_config
from rookery.errors import AdapterError, FleetDownError, FleetError, RookeryError
from rookery.fleet.bridges.reload import (
    Model,
    reload_from,
    require_torch,
    require_updates,
    sees_folder,
    update_weights,
)
from rookery.fleet.bridges.transfer import WeightTransfer, open_transfer
from rookery.fleet.fleet import Fleet, open_fleet
from rookery.fleet.http.api import tokenize
from rookery.fleet.http.client import (
    Client,
    ClientConfig,
    ServerLost,
    ServerRefusal,
    open_session,
)
from rookery.fleet.servers.settings import FleetConfig
from rookery.fleet.staging import as_safetensors
from rookery.runtime.concurrency import LoopThread
from rookery.seeding import stream_seed
from rookery.types import Completion, ModelRef, SampleRequest, SamplingParams

__all__ = [
    "close_communicator",
    "generate_with_vllm",
    "get_client_info",
    "init_communicator",
    "initialize_vllm_client",
    "list_lora_adapters",
    "register_lora_adapter",
    "reset_prefix_cache",
    "shutdown_vllm_client",
    "unregister_lora_adapter",
    "update_model_weights",
]


RETRY_S = 0.25
LEAST_S = 0.5
"""Minimum time for a server's answer, in seconds, however short the timeout."""


class BackendConfig(Config):
    """The server, as configured by the environment."""

    base_url: str = ""
    """Overrides host and port, unless only those are given explicitly."""
    host: str = "localhost"
    port: int = Field(default=8000, ge=1, le=65535)
    group_port: int = 51216
    timeout: float = Field(default=5.0, ge=0)
    """Seconds to wait for the server to be reachable."""
    request_s: float = Field(default=900.0, gt=0)
    """Seconds for one request for completions. An unanswered request is sent once more, then the
    call ends with a ConnectionError."""
    enable_lora: bool = True
    max_loras: int = Field(default=4, ge=1)
    max_lora_rank: int = Field(default=64, ge=1)
    adapter_folder: Path | None = None
    """Folder that both machines see at the same path, for adapters for a remote server."""
    resolver: bool = False
    """The server searches adapter_folder by name (lora_filesystem_resolver)."""

    @property
    def url(self) -> str:
        # A server on all interfaces is reached on the loopback interface.
        host = "127.0.0.1" if self.host == "0.0.0.0" else self.host
        return self.base_url or f"http://{host}:{self.port}"


@asynccontextmanager
async def open_server(config: BackendConfig) -> AsyncIterator["Fleet | ServiceServer"]:
    """Connect to a vLLM server or a Rookery service; ConnectionError after the timeout."""
    await _wait_reachable(config)
    async with open_session() as session:
        limits = ClientConfig(request_s=config.request_s)
        key = os.environ.get("VLLM_API_KEY", "")
        client = Client(config.url, session=session, config=limits, api_key=key)
        if await _is_service(client):
            yield await ServiceServer.connect(client)
            return
    settings = FleetConfig(
        urls=(config.url,),
        adapter_folder=config.adapter_folder,
        resolver=config.resolver,
        max_loras=config.max_loras,
        max_lora_rank=config.max_lora_rank,
        all_down_timeout_s=config.timeout,
        client=limits,
    )
    async with open_fleet(settings) as fleet:
        yield fleet


async def _wait_reachable(config: BackendConfig) -> None:
    deadline = time.monotonic() + config.timeout
    async with open_session() as session:
        while True:
            # A server that accepts and never answers gets no more time than an absent one.
            left_s = max(deadline - time.monotonic(), LEAST_S)
            limits = ClientConfig(connect_s=left_s, control_s=left_s)
            if await Client(config.url, session=session, config=limits).is_healthy():
                return
            if time.monotonic() >= deadline:
                raise ConnectionError(
                    f"The vLLM server can't be reached at {config.url}. Is it running? Start it "
                    "with `rookery fleet up`, or `vllm serve MODEL --enable-lora` and "
                    "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1."
                )
            await asyncio.sleep(RETRY_S)


# A Rookery service in place of a vLLM server. Adapters are uploaded, as the service reads no paths
# of others. They belong to the tenant of the key, whose other programs may name them too.


_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


async def _is_service(client: Client) -> bool:
    try:
        answer = await client.get("/version")
    except (ServerLost, ServerRefusal):
        return False
    return isinstance(answer, dict) and answer.get("server") == "rookery"


class ServiceServer:
    """The Rookery service at the other end of a client."""

    def __init__(self, client: Client, info: Mapping[str, Any]) -> None:
        self._client = client
        self.info = info
        """Fields that `get_client_info` returns."""

    @classmethod
    async def connect(cls, client: Client) -> "ServiceServer":
        """Read what its first base model can do; ServerRefusal if it does not know the key."""
        engines = await client.get("/api/v1/engines")
        name, facts = next(iter(engines.items()))
        info = {
            "is_up": True,
            "model": name,
            "version": "rookery",
            "max_model_len": facts["context_tokens"],
            "enable_lora": True,
            "max_loras": None,
            "max_lora_rank": facts["max_rank"],
            "adapters": [],
            "communicator": False,
        }
        return cls(client, info)

    async def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        adapter_id: str | None,
        params: SamplingParams,
    ) -> list[tuple[str, list[int], list[float], str]]:
        """Return text, tokens, log-probabilities and finish reason, `params.n` per prompt."""
        body = {
            "prompts": [p if isinstance(p, str) else list(p) for p in prompts],
            "model_id": adapter_id,
            "sampling_params": {
                "n": params.n,
                "max_tokens": params.max_tokens,
                "temperature": params.temperature,
                "top_p": params.top_p,
                "top_k": params.top_k or -1,
                "min_p": params.min_p,
                "stop": list(params.stop),
                "seed": params.seed,
            },
        }
        data = json.dumps(body).encode()
        limit_s = self._client.config.request_s
        answer = await self._client.post("/api/v1/sample", data, limit_s=limit_s)
        rows = zip(answer["completions"], answer["sequences"], strict=True)
        return [(text, one["tokens"], one["logprobs"], one["stop_reason"]) for text, one in rows]

    async def register(self, adapter_id: str, folder: Path) -> None:
        """Upload a PEFT folder with safetensors; AdapterError if the service cannot use it."""
        config, weights = await asyncio.to_thread(_read, folder)
        body = {
            "adapter_id": adapter_id,
            "adapter_config": config,
            "adapter_model": base64.b64encode(weights).decode(),
        }
        try:
            await self._client.post_json("/api/v1/adapters", body)
        except ServerRefusal as refusal:
            raise AdapterError(
                f"The adapter {adapter_id} cannot be registered: {refusal}"
            ) from refusal

    async def unregister(self, adapter_id: str) -> bool:
        """Remove an adapter; False if there was none."""
        try:
            body = json.dumps({"lora_name": adapter_id}).encode()
            await self._client.post("/v1/unload_lora_adapter", body)
        except ServerRefusal as refusal:
            if refusal.status != 404:
                raise
            return False
        return True

    async def adapters(self) -> list[dict[str, str]]:
        adapters = await self._client.get("/api/v1/adapters")
        return [{key: row[key] for key in ("adapter_id", "lora_path")} for row in adapters]

    def refuse_update(self) -> FleetError:
        return FleetError(
            f"{self._client.url} is a Rookery service, whose base weights are not replaced: train "
            "an adapter there, or connect to a vLLM server."
        )


def _read(folder: Path) -> tuple[dict[str, Any], bytes]:
    try:
        return json.loads((folder / _CONFIG).read_text()), (folder / _WEIGHTS).read_bytes()
    except (OSError, ValueError) as error:
        raise AdapterError(f"{folder} is no PEFT folder: {error}") from error


Result = TypeVar("Result")


@dataclass(slots=True)
class _Backend:
    """The server's client in its thread, and the registered adapters."""

    config: BackendConfig
    client: LoopThread[Fleet | ServiceServer]
    server: Fleet | ServiceServer
    adapters: dict[str, tuple[str, ModelRef]] = field(default_factory=dict)
    is_communicating: bool = False
    transfer: WeightTransfer | None = None
    """Connection to a server that does not see this machine's files."""

    @property
    def fleet(self) -> Fleet:
        """The fleet; FleetError if the server is a Rookery service, which lacks the function."""
        if isinstance(self.server, ServiceServer):
            raise self.server.refuse_update()
        return self.server

    def run(self, work: Callable[[Fleet], Awaitable[Result]]) -> Result:
        """Run work on the fleet, with the errors of `call`."""
        fleet = self.fleet
        return self.call(lambda: work(fleet))

    def call(self, work: Callable[[], Awaitable[Result]]) -> Result:
        """Run on the client's loop; raise ConnectionError if the server is lost."""
        try:
            return self.client.run(work)
        except (ServerLost, FleetDownError) as lost:
            if self.client.is_closed:  # closed by this program, not by the server
                raise
            raise ConnectionError(str(lost)) from lost


_backend: _Backend | None = None
_opening: LoopThread[Fleet | ServiceServer] | None = None
_inherited: list[_Backend] = []
"""Backends of a parent process: useless here, but destroying them could break the parent's."""
_lock = threading.RLock()


def initialize_vllm_client(config: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Connect to the server that `config` or the environment names; return `get_client_info()`.
    Other functions call it if needed. ConnectionError if the server cannot be reached within the
    timeout."""
    global _backend, _opening
    with _lock:
        shutdown_vllm_client()
        settings = _settings(config or {})
        parsed = parse_config(BackendConfig, settings, origin="the vLLM client's config")
        _opening = LoopThread(open_server(parsed), name="rookery-vllm")
        try:
            _backend = _Backend(parsed, _opening, _opening.wait_open())
        except ServerLost as error:
            raise ConnectionError(str(error)) from error
        finally:
            _opening = None
        return get_client_info()


def shutdown_vllm_client() -> None:
    """Disconnect, and unload adapters registered here. Does nothing when not connected. Calls that
    wait in other threads end with a FleetError. Runs at exit."""
    global _backend
    if (opening := _opening) is not None:
        # Without the lock, which the thread that waits for the server holds.
        opening.close()
    with _lock:
        if _backend is not None:
            with suppress(RookeryError, ConnectionError):
                close_communicator()
            backend, _backend = _backend, None
            backend.client.close()


def generate_with_vllm(
    prompts: Sequence[str | Sequence[int]],
    adapter_id: str | None = None,
    *,
    n: int = 1,
    max_tokens: int = 16,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    stop: Sequence[str] = (),
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Return `n` answers per prompt, in order: text, token_ids, logprobs and finish_reason each.
    Prompts are texts or token ids; `adapter_id` is a registered one. Equal prompts get different
    answers; a repeated call with the same seed gets the same answers."""
    _check_prompts(prompts)
    backend = _connected()
    params = SamplingParams(
        n=n,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        # vLLM's own interface keeps every token with -1, this one with 0.
        top_k=max(top_k, 0),
        min_p=min_p,
        stop=tuple(stop),
        seed=seed,
    )
    if isinstance(service := backend.server, ServiceServer):
        answers = backend.call(lambda: service.generate(prompts, adapter_id, params))
        repeated = [prompt for prompt in prompts for _ in range(n)]
        return [_answer(*one) for one in zip(repeated, answers, strict=True)]
    ref = backend.fleet.base if adapter_id is None else _registered(backend, adapter_id)

    async def generate(fleet: Fleet) -> list[tuple[Completion, ...]]:
        tokens = await tokenize(fleet.pool.replicas[0].client, prompts)
        return await fleet.sample(
            [
                SampleRequest(
                    model=ref, prompt=prompt, params=replace(params, seed=stream_seed(seed, index))
                )
                for index, prompt in enumerate(tokens)
            ]
        )

    return [
        _answer(prompt, (one.text, list(one.tokens), list(one.logprobs), one.finish_reason))
        for prompt, completions in zip(prompts, backend.run(generate), strict=True)
        for one in completions
    ]


def _answer(
    prompt: str | Sequence[int], drawn: tuple[str, list[int], list[float], str]
) -> dict[str, Any]:
    names = ("text", "token_ids", "logprobs", "finish_reason")
    return {"prompt": prompt, **dict(zip(names, drawn, strict=True))}


def register_lora_adapter(adapter_id: str, lora_path: str | os.PathLike[str]) -> bool:
    """Make a PEFT folder available as `adapter_id`. Registering an id again replaces its weights.
    ValueError if the folder does not exist, AdapterError if it does not fit the model, ImportError
    without torch, which reads the weights."""
    path = Path(lora_path)
    if not path.exists():
        raise ValueError(f"LoRA path does not exist: {lora_path}")
    backend = _connected()
    if not backend.config.enable_lora:
        raise ValueError("LoRA adapters are switched off: set VLLM_ENABLE_LORA=true.")
    if isinstance(service := backend.server, ServiceServer):
        with as_safetensors(path) as folder:
            backend.call(lambda: service.register(adapter_id, folder))
        return True
    require_torch("cpu")
    # Imported here, as only adapters need torch.
    from rookery.weights import read_adapter

    with as_safetensors(path) as folder:
        adapter = read_adapter(folder, name=adapter_id)
    ref = backend.run(lambda fleet: fleet.load(adapter))
    with _lock:
        previous = backend.adapters.get(adapter_id)
        backend.adapters[adapter_id] = (str(lora_path), ref)
    if previous is not None:
        backend.run(lambda fleet: fleet.unload(previous[1]))
    return True


def unregister_lora_adapter(adapter_id: str) -> bool:
    """Remove an adapter after its last request; False if it was not registered."""
    backend = _connected()
    if isinstance(service := backend.server, ServiceServer):
        return backend.call(lambda: service.unregister(adapter_id))
    with _lock:
        known = backend.adapters.pop(adapter_id, None)
    if known is None:
        return False
    backend.run(lambda fleet: fleet.unload(known[1]))
    return True


def list_lora_adapters() -> list[dict[str, str]]:
    """Return `[{"adapter_id": "poet", "lora_path": "/adapters/poet"}]`, oldest first."""
    backend = _connected()
    if isinstance(service := backend.server, ServiceServer):
        return backend.call(service.adapters)
    adapters = backend.adapters
    return [{"adapter_id": name, "lora_path": path} for name, (path, _) in adapters.items()]


def init_communicator(device: str = "cuda") -> None:
    """Prepare weight updates from here; call it before `update_model_weights`.

    `device` holds the trained model. A server on this machine, or one that sees
    VLLM_ADAPTER_FOLDER, reads files, and any device will do. Other servers get weights through a
    group of GPU processes that meets at VLLM_GROUP_PORT of this machine.
    """
    close_communicator()
    backend = _connected()
    require_torch(device)
    [replica] = backend.fleet.pool.replicas
    if sees_folder(backend.fleet, replica):
        require_updates(backend.fleet)
    elif not device.startswith("cuda"):
        raise RuntimeError(
            f"device is {device}; {replica.url} is on another machine and takes weights from GPU "
            "to GPU: write cuda, or set VLLM_ADAPTER_FOLDER to a folder that both machines see."
        )
    else:
        port = backend.config.group_port
        backend.transfer = backend.call(lambda: open_transfer(replica, port=port, device=device))
    backend.is_communicating = True


def close_communicator() -> None:
    """End weight updates."""
    backend = _connected()
    backend.is_communicating = False
    transfer, backend.transfer = backend.transfer, None
    if transfer is not None:
        backend.call(transfer.close)


def update_model_weights(model: Model) -> None:
    """Give the server the weights of a transformers model of the same architecture. FleetError if
    the server's log-probabilities then differ from the model's."""
    backend = _connected()
    if not backend.is_communicating:
        raise RuntimeError("Call init_communicator(device) before update_model_weights(model).")
    transfer = backend.transfer
    give_from = reload_from if transfer is None else transfer.send_from
    backend.run(lambda fleet: update_weights(fleet, model, give_from=give_from))


def reset_prefix_cache() -> None:
    """Make the server forget cached prefixes. A Rookery service has no stale ones."""
    backend = _connected()
    if not isinstance(backend.server, ServiceServer):
        backend.run(lambda fleet: fleet.reset_prefix_cache())


def get_client_info() -> dict[str, Any]:
    """Return whether there is a client, and facts about its server."""
    with _lock:
        backend = _backend
    if backend is None:
        return {"initialized": False}
    if isinstance(service := backend.server, ServiceServer):
        return {"initialized": True, "base_url": backend.config.url, **service.info}
    capabilities = backend.fleet.capabilities
    return {
        "initialized": True,
        "base_url": backend.config.url,
        "is_up": any(replica.load.is_open for replica in backend.fleet.pool.replicas),
        "model": capabilities.model,
        "version": capabilities.version,
        "max_model_len": capabilities.max_model_len,
        "enable_lora": backend.config.enable_lora and capabilities.has_lora_loading,
        "max_loras": capabilities.max_loras or backend.config.max_loras,
        "max_lora_rank": capabilities.max_lora_rank or backend.config.max_lora_rank,
        "adapters": list(backend.adapters),
        "communicator": backend.is_communicating,
    }


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the config over environment variables, by config key."""
    variables = {
        name: os.environ.get(f"VLLM_{name.upper()}") for name in BackendConfig.model_fields
    }
    known = {name: value for name, value in variables.items() if value}
    if config.keys() & {"host", "port"}:
        known.pop("base_url", None)
    return {**known, **config}


def _check_prompts(prompts: Sequence[str | Sequence[int]]) -> None:
    if isinstance(prompts, str) or any(isinstance(prompt, int) for prompt in prompts):
        raise ValueError(
            f"prompts is {prompts!r:.60}, one prompt; give a list of them: [{prompts!r:.20}]."
        )


def _connected() -> _Backend:
    with _lock:
        if _backend is None and _inherited:
            raise FleetError(
                "This process was forked from one that had a vLLM client, and cannot use its "
                "connection: call initialize_vllm_client(config) here and register adapters again."
            )
        if _backend is None:
            initialize_vllm_client()
        assert _backend is not None
        return _backend


def _registered(backend: _Backend, adapter_id: str) -> ModelRef:
    known = backend.adapters.get(adapter_id)
    if known is None:
        names = ", ".join(backend.adapters) or "none"
        raise ValueError(
            f"LoRA adapter {adapter_id!r} is not registered (registered: {names}): call "
            "register_lora_adapter(adapter_id, lora_path) first."
        )
    return known[1]


def _forget_after_fork() -> None:
    """Reset the state in a forked child, which lacks the loop's thread and the lock's holder."""
    global _backend, _lock, _opening
    _lock = threading.RLock()
    _opening = None
    if _backend is not None:
        _inherited.append(_backend)
        _backend = None


os.register_at_fork(after_in_child=_forget_after_fork)
atexit.register(shutdown_vllm_client)
