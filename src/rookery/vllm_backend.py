"""A vLLM server from plain synchronous code: sampling, LoRA adapters, weight updates.

    import vllm_backend     # or: from rookery import vllm_backend

    vllm_backend.register_lora_adapter(adapter_id="poet", lora_path="/adapters/poet")
    [answer] = vllm_backend.generate_with_vllm(["Once upon a time"], adapter_id="poet")
    answer["text"]

The server is found by VLLM_BASE_URL, or VLLM_HOST and VLLM_PORT; VLLM_TIMEOUT (seconds to wait for
it), VLLM_REQUEST_S (seconds to wait for an answer), VLLM_ENABLE_LORA, VLLM_MAX_LORAS,
VLLM_MAX_LORA_RANK and VLLM_ADAPTER_FOLDER are read too.
The server may be a Rookery service too: what is registered there is served to all programs of the
same key. New weights go through files, in shared memory or, for a server on another machine, in
VLLM_ADAPTER_FOLDER, which both must see; without one from GPU to GPU, by VLLM_GROUP_PORT.

Every function is thin over `rookery.fleet`, which async code should use itself. They may be called
from any thread. A forked process has no connection: it calls `initialize_vllm_client` itself.
"""

import atexit
import os
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from rookery.concurrency import LoopThread
from rookery.config import parse_config
from rookery.errors import FleetDownError, FleetError, RookeryError
from rookery.fleet import Fleet, ServerLost
from rookery.fleet.adapters.staging import as_safetensors
from rookery.fleet.bridges.reload import (
    Model,
    reload_from,
    require_torch,
    require_updates,
    sees_folder,
    update_weights,
)
from rookery.fleet.bridges.transfer import WeightTransfer, open_transfer
from rookery.fleet.http.api import tokenize
from rookery.fleet.http.service import ServiceServer
from rookery.fleet.server import BackendConfig, open_server
from rookery.seeding import stream_seed
from rookery.types import Completion, ModelRef, SampleRequest, SamplingParams

__all__ = [
    "BackendConfig",
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

Result = TypeVar("Result")


@dataclass(slots=True)
class _Backend:
    """The server's client in its thread, and what was registered."""

    config: BackendConfig
    client: LoopThread[Fleet | ServiceServer]
    server: Fleet | ServiceServer
    adapters: dict[str, tuple[str, ModelRef]] = field(default_factory=dict)
    is_communicating: bool = False
    transfer: WeightTransfer | None = None
    """To a server that does not see this machine's files."""

    @property
    def fleet(self) -> Fleet:
        """FleetError when the server is a Rookery service, which cannot do what is asked."""
        if isinstance(self.server, ServiceServer):
            raise self.server.refuse_update()
        return self.server

    def run(self, work: Callable[[Fleet], Awaitable[Result]]) -> Result:
        """Do something with the fleet, as `call`."""
        fleet = self.fleet
        return self.call(lambda: work(fleet))

    def call(self, work: Callable[[], Awaitable[Result]]) -> Result:
        """Run on the client's loop; a server that is gone is a ConnectionError, as documented."""
        try:
            return self.client.run(work)
        except (ServerLost, FleetDownError) as lost:
            if self.client.is_closed:  # by the program itself, not by the server
                raise
            raise ConnectionError(str(lost)) from lost


_backend: _Backend | None = None
_opening: LoopThread[Fleet | ServiceServer] | None = None
_inherited: list[_Backend] = []
"""Copies of a parent process's backend: of no use, but not to be destroyed in working order."""
_lock = threading.RLock()


def initialize_vllm_client(config: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Connect to the server that `config` or the environment names; what `get_client_info` says.

    Called by the other functions when it was not called before. ConnectionError when the server
    cannot be reached within the timeout.
    """
    global _backend, _opening
    with _lock:
        shutdown_vllm_client()
        given = _settings(config or {})
        parsed = parse_config(BackendConfig, given, origin="the vLLM client's config")
        _opening = LoopThread(open_server(parsed), name="rookery-vllm")
        try:
            _backend = _Backend(parsed, _opening, _opening.wait_open())
        except ServerLost as error:
            raise ConnectionError(str(error)) from error
        finally:
            _opening = None
        return get_client_info()


def shutdown_vllm_client() -> None:
    """Disconnect; adapters registered here are unloaded. Nothing when not connected.

    Calls that wait in other threads end with a FleetError. Called when the program ends.
    """
    global _backend
    if (opening := _opening) is not None:
        # Without the lock: the thread that waits for the server holds it.
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
    """`n` answers per prompt, in order, each with text, token_ids, logprobs and finish_reason.

    Prompts are texts or token ids; `adapter_id` is one that was registered. Equal prompts get
    different answers, and the same ones when the call is repeated with its seed.
    """
    _check_prompts(prompts)
    backend = _connected()
    params = SamplingParams(
        n=n,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        # -1 keeps every token in vLLM's own interface, 0 here.
        top_k=max(top_k, 0),
        min_p=min_p,
        stop=tuple(stop),
        seed=seed,
    )
    if isinstance(service := backend.server, ServiceServer):
        answers = backend.call(lambda: service.generate(prompts, adapter_id, params))
        named = [prompt for prompt in prompts for _ in range(n)]
        return [_answer(*one) for one in zip(named, answers, strict=True)]
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
    """Make a PEFT folder servable as `adapter_id`. Registering an id again replaces its weights.

    ValueError when there is no such folder, AdapterError when it does not fit the model,
    ImportError when torch is not installed, which reads the weights.
    """
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
    # Imported here: only adapters need torch.
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
    """Forget an adapter after its last request; False when it was not registered."""
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
    """`[{"adapter_id": "poet", "lora_path": "/adapters/poet"}]`, in order of registration."""
    backend = _connected()
    if isinstance(service := backend.server, ServiceServer):
        return backend.call(service.adapters)
    adapters = backend.adapters
    return [{"adapter_id": name, "lora_path": path} for name, (path, _) in adapters.items()]


def init_communicator(device: str = "cuda") -> None:
    """Make sure that the server's weights can be updated from here; needed before an update.

    The device is where the trained model is. A server on this machine, or one that sees
    VLLM_ADAPTER_FOLDER, reads files, and any device will do. Any other one takes them through a
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
    """The end of weight updates."""
    backend = _connected()
    backend.is_communicating = False
    transfer, backend.transfer = backend.transfer, None
    if transfer is not None:
        backend.call(transfer.close)


def update_model_weights(model: Model) -> None:
    """Give the server the weights of a transformers model of the same architecture.

    FleetError when the server's log-probabilities differ from the model's afterwards.
    """
    backend = _connected()
    if not backend.is_communicating:
        raise RuntimeError("Call init_communicator(device) before update_model_weights(model).")
    transfer = backend.transfer
    give_from = reload_from if transfer is None else transfer.send_from
    backend.run(lambda fleet: update_weights(fleet, model, give_from=give_from))


def reset_prefix_cache() -> None:
    """Make the server forget its cached prefixes. A Rookery service has none that are stale."""
    backend = _connected()
    if not isinstance(backend.server, ServiceServer):
        backend.run(lambda fleet: fleet.reset_prefix_cache())


def get_client_info() -> dict[str, Any]:
    """Whether there is a client, and what it talks to."""
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
    """The config over what environment variables give, by config key."""
    found = {name: os.environ.get(f"VLLM_{name.upper()}") for name in BackendConfig.model_fields}
    known = {name: value for name, value in found.items() if value}
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
    """The child has neither the thread of the loop nor whoever held the lock."""
    global _backend, _lock, _opening
    _lock = threading.RLock()
    _opening = None
    if _backend is not None:
        _inherited.append(_backend)
        _backend = None


os.register_at_fork(after_in_child=_forget_after_fork)
atexit.register(shutdown_vllm_client)
