"""A server on the loopback that speaks vLLM's routes, for tests: real HTTP, an invented model.

The log-probability of a token after a prompt is a fixed function of the model's name and both, so
that two servers agree and every answer can be checked.
"""

import asyncio
import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from rookery.fleet.routing.paused import WeightsMark
from rookery.types import Json, ModelRef, SampleRequest, SamplingParams

VOCABULARY = 97
FIELDS = (
    "model", "prompt", "logprobs", "logprob_token_ids", "prompt_logprobs", "structured_outputs",
)  # fmt: skip


def logprobs_after(model: str, prompt: Sequence[int], temperature: float = 1.0) -> list[float]:
    """A proper distribution over the vocabulary; whoever registered an adapter, it is the same."""
    model = model.rpartition("~")[0] or model
    digest = hashlib.shake_128(f"{model}|{list(prompt)}".encode()).digest(2 * VOCABULARY)
    logits = [
        int.from_bytes(digest[2 * i : 2 * i + 2], "big") / 8192 / temperature
        for i in range(VOCABULARY)
    ]
    normaliser = math.log(sum(math.exp(x) for x in logits))
    return [x - normaliser for x in logits]


def greedy(model: str, prompt: Sequence[int], num: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num):
        row = logprobs_after(model, tokens)
        tokens.append(row.index(max(row)))
    return tokens[len(prompt) :]


@dataclass
class Stub:
    """One server and what happened to it."""

    model: str = "tiny"
    root: str = "tiny"
    latency_s: float = 0.0
    capacity: int = 0
    """How many calls it serves at a time; 0 is any number."""
    load_s: float = 0.0
    max_loras: int = 8
    max_cpu_loras: int = 64
    max_model_len: int | None = 128
    fields: tuple[str, ...] = FIELDS
    processed: bool = True
    block: int = 16
    routes: tuple[str, ...] = (
        "/v1/completions", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/server_info",
        "/reset_prefix_cache",
    )  # fmt: skip
    failures: list[int] = field(default_factory=list)
    """Statuses to answer to the next completions, one each."""
    garbage: list[object] = field(default_factory=list)
    """Answers to give to the next completions instead of the right ones."""
    cut_streams: list[int] = field(default_factory=list)
    """After so many chunks the connection of the next streams is cut, one each."""
    stream_pause: asyncio.Event | None = None
    """Streams wait for this after their first chunk."""
    hang: bool = False
    is_silent: bool = False
    """It answers neither /health nor /metrics."""
    reads_folders: bool = False
    """Reads an adapter's folder when it is loaded and for every call: none stays in memory."""
    num_dead_reads: int = 0
    """Calls for which the folder was gone."""
    adapters: dict[str, str] = field(default_factory=dict)
    paths: set[str] = field(default_factory=set)
    """Of all adapters that were ever loaded."""
    num_loads_begun: int = 0
    dies_of_loads: bool = False
    """The connection of every load is cut; it is back at once."""
    num_resets: int = 0
    num_pauses: int = 0
    num_asked_whether_paused: int = 0
    pause_s: float = 0.0
    """How long it takes to say that it is paused."""
    weight_version: str = "default"
    """What it was told that its weights are called."""
    system: str | None = None
    """How it names its config in every answer, if it does."""
    is_up: bool = False
    loads: Counter[str] = field(default_factory=Counter)
    unloads: list[str] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    num_served: int = 0
    in_flight: Counter[str] = field(default_factory=Counter)
    has_met: bool = False
    """The base model and an adapter were in flight at once."""
    device: str = "cuda"
    dtype: str = "bfloat16"
    logprobs_off: float = 0.0
    """How far its log-probabilities of new tokens are from the right ones."""
    version: str = "0.0-stub"
    cpu_space: str = ""
    """What it reports of its cache on the CPU, if it does."""
    most_adapters: int = 0
    """The most distinct adapters that were in flight at once."""
    port: int = 0
    refuse_load: str = ""
    resolver: str = ""
    """A folder to search for adapters by name, as the filesystem resolver does."""
    healthy: bool = True
    tokenize_together: int = 0
    """Texts are not answered before so many have come."""
    num_tokenizing: int = 0
    has_crashed: bool = False
    """Its engine is dead: it answers 500, also to what it was serving, and 503 to /health."""
    weights: str = ""
    """What was written in the folder that its weights were updated from; empty: its first ones."""
    refuse_update: bool = False
    started_s: float | None = 1.0
    """When its process was started, if it tells."""
    prompts_off: float = 0.0
    """How far the log-probabilities inside prompts are from the right ones."""
    further: Sequence[web.RouteDef] = ()
    """Routes of a test's own."""
    together_off: float | None = 0.0
    """The same of tokens that several prompts of one call draw; None: they are no numbers."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def num_connections(self) -> int:
        server = self._runner.server
        return len(server.connections) if server else 0

    @property
    def is_paused(self) -> bool:
        return not self._running.is_set()

    async def wait_in_flight(self, num: int) -> None:
        """Until that many completions are being served."""
        async with self._changed:
            await self._changed.wait_for(lambda: sum(self.in_flight.values()) >= num)

    def crash(self) -> None:
        """Let the engine die and the API process live on for a while."""
        self.has_crashed = True
        self._crashed.set()

    async def start(self) -> None:
        self.has_crashed = False
        self._crashed = asyncio.Event()
        self._changed = asyncio.Condition()
        self._running = asyncio.Event()
        self._running.set()
        self._gate = asyncio.Semaphore(self.capacity or 10**6)
        app = web.Application(client_max_size=2**30)
        app.add_routes(self.further)
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/openapi.json", self._openapi),
                web.get("/version", self._version),
                web.get("/v1/models", self._models),
                web.get("/metrics", self._metrics),
                web.get("/server_info", self._info),
                web.post("/v1/completions", self._complete),
                web.post("/v1/load_lora_adapter", self._load),
                web.post("/v1/unload_lora_adapter", self._unload),
                web.post("/reset_prefix_cache", self._reset),
                web.post("/tokenize", self._tokenize),
                web.post("/collective_rpc", self._call_workers),
                web.get("/is_paused", self._tell_paused),
                web.post("/pause", self._pause),
                web.post("/resume", self._resume),
                web.post("/update_weight_version", self._name_weights),
                web.get("/weight_info", self._tell_weights),
            ]
        )
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.0)
        await self._runner.setup()
        self._site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await self._site.start()
        assert self._site._server is not None
        self.port = self._site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
        self.is_up = True

    async def stop(self) -> None:
        """Drop every connection at once, as a killed process does."""
        self.is_up = False
        assert self._site._server is not None
        for listener in self._site._server.sockets:  # type: ignore[attr-defined]
            asyncio.get_running_loop().remove_reader(listener.fileno())
        for _ in range(5):
            # Connections that were being accepted are there then; a closed server would leak them.
            await asyncio.sleep(0)
        server = self._runner.server
        for connection in list(server.connections) if server else []:
            if connection.transport is not None:
                connection.transport.abort()
        await self._runner.cleanup()
        self.adapters.clear()

    async def _be_silent(self) -> None:
        if self.is_silent:
            await asyncio.Event().wait()

    async def _health(self, _: web.Request) -> web.Response:
        await self._be_silent()
        return web.Response(status=200 if self.healthy and not self.has_crashed else 503)

    async def _openapi(self, _: web.Request) -> web.Response:
        properties: dict[str, Json] = {name: {} for name in self.fields}
        schema: Json = {"CompletionRequest": {"properties": properties}}
        paths: dict[str, Json] = {route: {} for route in self.routes}
        return web.json_response({"paths": paths, "components": {"schemas": schema}})

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": self.version})

    async def _models(self, _: web.Request) -> web.Response:
        base = {"id": self.model, "root": self.root, "parent": None}
        base["max_model_len"] = self.max_model_len  # type: ignore[assignment]
        adapters = [{"id": n, "root": p, "parent": self.model} for n, p in self.adapters.items()]
        return web.json_response({"data": [base, *adapters]})

    async def _metrics(self, _: web.Request) -> web.Response:
        await self._be_silent()
        space = f'cpu_kvcache_space_bytes="{self.cpu_space}",' if self.cpu_space else ""
        page = (
            f'vllm:num_requests_running{{engine="0"}} {sum(self.in_flight.values())}.0\n'
            'vllm:num_requests_waiting{engine="0"} 0.0\n'
            'vllm:prefix_cache_queries_total{engine="0"} 100.0\n'
            'vllm:prefix_cache_hits_total{engine="0"} 75.0\n'
            f'vllm:cache_config_info{{block_size="{self.block}",{space}'
            'enable_prefix_caching="True"} 1.0\n'
        )
        if self.started_s is not None:
            page += f"process_start_time_seconds {self.started_s}\n"
        return web.Response(text=page)

    async def _info(self, _: web.Request) -> web.Response:
        lora = {
            "max_loras": self.max_loras, "max_cpu_loras": self.max_cpu_loras, "max_lora_rank": 16,
            "lora_dtype": "torch.float32",
        }  # fmt: skip
        config = {
            "lora_config": lora, "scheduler_config": {"max_num_seqs": 64},
            "device_config": {"device": self.device},
        }  # fmt: skip
        model = {"max_logprobs": 20, "dtype": f"torch.{self.dtype}"}
        return web.json_response({"vllm_config": {**config, "model_config": model}})

    async def _reset(self, _: web.Request) -> web.Response:
        self.num_resets += 1
        return web.json_response({"success": True})

    async def _call_workers(self, request: web.Request) -> web.Response:
        document = await request.json()
        if document["method"] != "reload_weights" or self.refuse_update:
            return _error(500, "as asked")
        path = document["kwargs"]["weights_path"]
        is_own = path == self.root
        self.weights = "" if is_own else (Path(path) / "model.safetensors").read_text()
        return web.json_response({"results": [None]})

    async def _tell_paused(self, _: web.Request) -> web.Response:
        self.num_asked_whether_paused += 1
        return web.json_response({"is_paused": self.is_paused})

    async def _pause(self, request: web.Request) -> web.Response:
        self.num_pauses += 1
        assert request.query["mode"] == "keep"
        self._running.clear()
        await asyncio.sleep(self.pause_s)
        return web.json_response({"status": "paused"})

    async def _resume(self, _: web.Request) -> web.Response:
        self._running.set()
        return web.json_response({"status": "resumed"})

    async def _name_weights(self, request: web.Request) -> web.Response:
        assert not any(self.in_flight.values()) or not self._running.is_set(), "a wrong name"
        self.weight_version = (await request.json())["new_version"]
        return web.json_response({"success": True})

    async def _tell_weights(self, _: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.weight_version})

    @property
    def version_name(self) -> str:
        """Of its weights, without who put them there."""
        mark = WeightsMark.read(self.weight_version)
        return self.weight_version if mark is None else mark.version

    async def _tokenize(self, request: web.Request) -> web.Response:
        text = (await request.json())["prompt"]
        async with self._changed:
            self.num_tokenizing += 1
            self._changed.notify_all()
            await self._changed.wait_for(lambda: self.num_tokenizing >= self.tokenize_together)
        return web.json_response({"tokens": [int(word[1:]) for word in text.split()]})

    async def _load(self, request: web.Request) -> web.Response:
        if self.dies_of_loads and request.transport is not None:
            self.num_loads_begun += 1
            request.transport.abort()
            return web.Response()
        # As in vLLM, a load that has begun is done, whether or not its client is still there.
        return await asyncio.shield(self._do_load(await request.json(), self._runner))

    async def _do_load(self, document: dict[str, str], runner: web.AppRunner) -> web.Response:
        name = document["lora_name"]
        self.num_loads_begun += 1
        await asyncio.sleep(self.load_s)
        if runner is not self._runner or not self.is_up:
            return _error(500, "killed meanwhile")
        if self.refuse_load:
            return _error(500, self.refuse_load)
        if name in self.adapters:
            return _error(400, f"The lora adapter '{name}' has already been loaded.")
        if self.reads_folders and not _is_folder(document["lora_path"]):
            return _error(404, f"No adapter found for {name}")
        self.adapters[name] = document["lora_path"]
        self.paths.add(document["lora_path"])
        self.loads[name] += 1
        return web.Response(text="ok")

    async def _unload(self, request: web.Request) -> web.Response:
        name = (await request.json())["lora_name"]
        if self.adapters.pop(name, None) is None:
            return _error(404, f"The lora adapter '{name}' cannot be found.")
        self.unloads.append(name)
        return web.Response(text="ok")

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        self.bodies.append(body)
        if self.failures:
            return _error(self.failures.pop(0), "as asked")
        if self.has_crashed:
            return _error(500, "EngineDeadError")
        if self.garbage:
            return web.json_response(self.garbage.pop(0))
        if body.get("temperature", 1.0) > 2:
            return _error(400, "temperature must be in [0, 2]")
        name = body["model"]
        self._resolve(name)
        if name != self.model and name not in self.adapters:
            return _error(404, f"The model `{name}` does not exist.")
        if self.reads_folders and not _is_folder(self.adapters.get(name, "/")):
            self.num_dead_reads += 1
            return _error(500, "vLLM's engine would have died")
        self.in_flight[name] += 1
        async with self._changed:
            self._changed.notify_all()
        try:
            busy = [n for n, count in self.in_flight.items() if count and n != self.model]
            self.most_adapters = max(self.most_adapters, len(busy))
            self.has_met = self.has_met or bool(busy and self.in_flight[self.model])
            async with self._gate:
                if self.hang:
                    await self._crashed.wait()
                    return _error(500, "EngineDeadError")
                await asyncio.sleep(self.latency_s)
                await self._running.wait()
                self.num_served += 1
                if body.get("stream"):
                    return await self._stream(request, self._choices(body))
                answer = {"choices": self._choices(body), "system_fingerprint": self.system}
                return web.json_response(answer)
        finally:
            self.in_flight[name] -= 1

    async def _stream(
        self, request: web.Request, choices: list[dict[str, Any]]
    ) -> web.StreamResponse:
        """A token of every choice in turn."""
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        cut = self.cut_streams.pop(0) if self.cut_streams else None
        num_sent, size = 0, len(choices[0]["logprobs"]["tokens"])
        for at in range(size):
            for choice in choices:
                if num_sent == cut and request.transport is not None:
                    request.transport.abort()
                    return response
                logprobs = {key: rows[at : at + 1] for key, rows in choice["logprobs"].items()}
                part = {
                    "index": choice["index"],
                    "text": choice["text"].split(" ")[at] + (" " if at + 1 < size else ""),
                    "logprobs": logprobs,
                    "finish_reason": choice["finish_reason"] if at + 1 == size else None,
                }
                is_last = part["finish_reason"] is not None  # vLLM names its config there
                named = {"system_fingerprint": self.system} if is_last else {}
                chunk = json.dumps({"choices": [part], **named})
                await response.write(f"data: {chunk}\n\n".encode())
                num_sent += 1
                if self.stream_pause is not None:
                    await self.stream_pause.wait()
        await response.write(b"data: [DONE]\n\n")
        return response

    def _resolve(self, name: str) -> None:
        if self.resolver and name in os.listdir(self.resolver) and name not in self.adapters:
            config = json.loads(Path(self.resolver, name, "adapter_config.json").read_bytes())
            if config["base_model_name_or_path"] == self.root:
                self.adapters[name] = "resolved"

    def _choices(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for prompt in body["prompt"]:
            for sample in range(body.get("n", 1)):
                choice = self._choice(body, prompt, sample)
                if len(body["prompt"]) > 1:
                    own = choice["logprobs"]
                    own["token_logprobs"] = [self._together(p) for p in own["token_logprobs"]]
                found.append({"index": len(found), **choice})
        return found

    def _together(self, logprob: float) -> float | None:
        return None if self.together_off is None else logprob - self.together_off

    def _choice(self, body: dict[str, Any], prompt: list[int], sample: int) -> dict[str, Any]:
        temperature = body.get("temperature", 1.0)
        heat = temperature if temperature and self.processed else 1.0
        tokens: list[int] = []
        tops: list[dict[str, float]] = []
        for position in range(body["max_tokens"]):
            row = logprobs_after(body["model"] + self.weights, [*prompt, *tokens], heat)
            order = sorted(range(VOCABULARY), key=lambda t: -row[t])
            seed = f"{body.get('seed')}:{sample}:{position}"
            drawn = hashlib.blake2b(seed.encode(), digest_size=1).digest()[0] % 5
            token = order[drawn if temperature else 0]
            ids = body.get("logprob_token_ids") if "logprob_token_ids" in self.fields else None
            reported = [token, *(ids or order[: body.get("logprobs") or 0])]
            tops.append({f"token_id:{t}": row[t] - self.logprobs_off for t in reported})
            tokens.append(token)
        rows: list[dict[str, Any] | None] | None = None
        if body.get("prompt_logprobs") is not None:
            rows = [None]
            for at in range(1, len(prompt)):
                row = logprobs_after(body["model"], prompt[:at])
                order = sorted(range(VOCABULARY), key=lambda t: -row[t])
                shown = [prompt[at], *order[: body["prompt_logprobs"]]]
                rows.append({str(t): {"logprob": row[t] - self.prompts_off} for t in shown})
        return {
            "text": " ".join(f"w{t}" for t in tokens),
            "finish_reason": "length",
            "prompt_logprobs": rows,
            "logprobs": {
                "tokens": [f"token_id:{t}" for t in tokens],
                "token_logprobs": [tops[i][f"token_id:{t}"] for i, t in enumerate(tokens)],
                "top_logprobs": tops,
            },
        }


async def until(is_so: Callable[[], object], limit_s: float = 60.0) -> None:
    """Wait for what another party does in its own time."""
    async with asyncio.timeout(limit_s):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@asynccontextmanager
async def serve_routes(*routes: web.RouteDef) -> AsyncIterator[str]:
    """Another server on the loopback; its address."""
    app = web.Application()
    app.add_routes(routes)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def requests(ref: ModelRef, num: int, **params: object) -> list[SampleRequest]:
    wanted = {"max_tokens": 1, "temperature": 1.0} | params
    return [
        SampleRequest(model=ref, prompt=(1, 2, i % 50), params=SamplingParams(seed=i, **wanted))  # type: ignore[arg-type]
        for i in range(num)
    ]


def _is_folder(path: str) -> bool:
    return Path(path).is_dir()


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)


@asynccontextmanager
async def serve(*stubs: Stub) -> AsyncIterator[tuple[Stub, ...]]:
    for stub in stubs:
        await stub.start()
    try:
        yield stubs
    finally:
        for stub in stubs:
            await stub.stop()
