"""A service over fakes, and clients that speak its protocol over HTTP in this process."""

import asyncio
import base64
import hashlib
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from functools import cache, reduce
from pathlib import Path
from typing import Any, cast

import httpx2
import numpy as np
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from rookery.compat.serving import ROUTES, open_service
from rookery.compat.tinker.session_routes import fill_gap
from rookery.remote.messages import (
    DTYPES,
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    SampleResponse,
)
from rookery.runs import Run
from rookery.service.app import make_app
from rookery.service.config import ServiceConfig
from rookery.service.keys import Keys, add_key
from rookery.service.request_context import RequestContext
from rookery.service.service import Service
from rookery.service.work import Backend
from rookery.testing import BASE, FakeAdapters, FakeSampler, FakeTrainer
from rookery.types import (
    Adapter,
    Json,
    Message,
    ModelRef,
    OptimStep,
    StepOutput,
    TokenIds,
    TrainOutput,
    TrainRequest,
)

PROTO = {"content-type": "application/x-protobuf"}
UPLOAD = {
    "adapter_id": "poet",
    "adapter_config": {"r": 4},
    "adapter_model": base64.b64encode(b"weights").decode(),
}


class FakeEngine(FakeSampler, FakeAdapters):
    """A sampler that adapters can be loaded into."""

    base = BASE
    linear_layers: dict[str, tuple[int, int]] = {}  # noqa: RUF012
    max_rank = 64
    context_tokens = 256
    is_remote = False
    is_batch_invariant = True
    token_counts: dict[str, int] = {}  # noqa: RUF012

    def __init__(self) -> None:
        FakeSampler.__init__(self)
        FakeAdapters.__init__(self)


class FakeFolders:
    """Folders into the engine: the version is the hash of the files."""

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine

    async def load(self, folder: Path, *, name: str) -> ModelRef:
        version = _hash(folder)
        return await self._engine.load(Adapter(name=name, base="", factors={}, version=version))

    async def unload(self, ref: ModelRef) -> None:
        await self._engine.unload(ref)


def _hash(folder: Path) -> str:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:8]


class WordCodec:
    """Words are numbers."""

    def encode(self, text: str) -> TokenIds:
        return tuple(int(word) for word in text.split())

    def encode_chat(
        self, messages: tuple[Message, ...], *, tools: Sequence[Mapping[str, Json]] = ()
    ) -> TokenIds:
        """A tool is the number of its characters."""
        told = [str(len(str(tool))) for tool in tools]
        return self.encode(" ".join([*told, *(message.content for message in messages)]))

    def decode(self, tokens: TokenIds) -> str:
        return " ".join(map(str, tokens))


class HeldTrainer(FakeTrainer):
    """Gradients and steps, but for the first ones, wait until they may go; `calls` has whom each is
    for."""

    def __init__(self, *, num_free: int = 0) -> None:
        super().__init__("unused")
        self.entered, self.may_go = asyncio.Event(), asyncio.Event()
        self._num_free = num_free
        self.calls: list[list[str]] = []

    async def forward(self, requests: Sequence[TrainRequest]) -> list[TrainOutput]:
        await self._wait([request.trainee for request in requests])
        return await super().forward(requests)

    async def optim_step(self, steps: Sequence[OptimStep]) -> list[StepOutput]:
        await self._wait([step.trainee for step in steps])
        return await super().optim_step(steps)

    async def _wait(self, trainees: list[str]) -> None:
        self.calls.append(trainees)
        if len(self.calls) > self._num_free:
            self.entered.set()
            await self.may_go.wait()


def fake_backend(trainer: FakeTrainer | None = None) -> Backend:
    engine, trainer = FakeEngine(), trainer or FakeTrainer("unused")
    return Backend(
        engine=engine,
        trainer=trainer,
        trainees=trainer,
        folders=FakeFolders(engine),
        codec=WordCodec(),
        tokenizer="fake/tokenizer",
        merge=shutil.copytree,
    )


class Client:
    """One tenant's HTTP client, with the few calls that the tests share."""

    def __init__(self, http: httpx2.AsyncClient, key: str = "tml-any") -> None:
        self._http = http
        self.key = key

    async def send(self, method: str, path: str, **rest: Any) -> httpx2.Response:
        headers = {"x-api-key": self.key, **rest.pop("headers", {})}
        return await self._http.request(method, path, headers=headers, **rest)

    async def post(self, path: str, body: dict[str, Any], *, status: int = 200) -> dict[str, Any]:
        response = await self.send("POST", f"/api/v1/{path}", json=body)
        assert response.status_code == status, response.text
        document: dict[str, Any] = response.json() if response.content else {}
        return document

    async def session(self) -> str:
        return str((await self.post("create_session", {}))["session_id"])

    async def model(self, session_id: str, seq: int = 0, **lora: Any) -> str:
        body = {
            "session_id": session_id,
            "model_seq_id": seq,
            "base_model": "fake",
            "lora_config": {"rank": 4, "seed": 1, **lora},
        }
        reply = await self.post("create_model", body)
        result = await self.result(reply)
        assert result == {"type": "create_model", "model_id": reply["model_id"]}
        return str(reply["model_id"])

    async def sampler(self, session_id: str = "") -> str:
        """A sampling session of the base model."""
        session_id = session_id or await self.session()
        body = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": "fake"}
        return str((await self.post("create_sampling_session", body))["sampling_session_id"])

    async def save(self, model_id: str, seq: int, name: str, **more: Any) -> str:
        """A checkpoint's path."""
        body = {"model_id": model_id, "seq_id": seq, "path": name, **more}
        return str((await self.result(await self.post("save_weights", body)))["path"])

    async def train(self, body: bytes, *, status: int = 200, **headers: str) -> dict[str, Any]:
        response = await self.send(
            "POST", "/api/v1/forward_backward", content=body, headers={**PROTO, **headers}
        )
        assert response.status_code == status, response.text
        document: dict[str, Any] = response.json()
        return document

    async def step(self, model_id: str, seq: int, rate: float = 1.0) -> dict[str, Any]:
        body = {"model_id": model_id, "seq_id": seq, "adam_params": {"learning_rate": rate}}
        return await self.post("optim_step", body)

    async def retrieve(self, request_id: str, accept: str = "application/json") -> httpx2.Response:
        return await self.send(
            "POST",
            "/api/v1/retrieve_future",
            json={"request_id": request_id},
            headers={"accept": accept},
        )

    async def result(self, reply: dict[str, Any]) -> dict[str, Any]:
        response = await self.retrieve(reply["request_id"])
        assert response.status_code == 200, response.text
        document: dict[str, Any] = response.json()
        return document

    async def proto_result(self, reply: dict[str, Any], kind: Any) -> Any:
        response = await self.retrieve(reply["request_id"], "application/x-protobuf")
        assert response.status_code == 200, response.text
        assert response.headers["content-type"] == "application/x-protobuf", response.text
        return kind.FromString(response.content)

    async def outputs(self, reply: dict[str, Any]) -> Any:
        return await self.proto_result(reply, ForwardBackwardOutput)

    async def samples(self, reply: dict[str, Any]) -> Any:
        return await self.proto_result(reply, SampleResponse)


def train_body(
    model_id: str,
    seq: int,
    tokens: Sequence[int] = (5, 6, 7),
    *,
    weights: Sequence[float] | None = None,
    forward_only: bool = False,
    loss: str = "cross_entropy",
) -> bytes:
    """A forward_backward of one datum, each token predicting the next number."""
    message = ForwardBackwardRequest(
        model_id=model_id, seq_id=seq, loss_fn=loss, forward_only=forward_only
    )
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.asarray(tokens, dtype="<i4").tobytes()
    targets = np.asarray(tokens, dtype="<i8") + 1
    _put(datum.loss_fn_inputs["target_tokens"], targets, "int64")
    columns = np.asarray(weights if weights is not None else [1.0] * len(tokens), dtype="<f4")
    _put(datum.loss_fn_inputs["weights"], columns, "float32")
    data: bytes = message.SerializeToString(deterministic=True)
    return data


def loss_body(
    model_id: str,
    seq: int,
    loss: str,
    arrays: Mapping[str, Any],
    **options: float | str,
) -> bytes:
    """A forward_backward of one datum with these arrays; `tokens` is what is read."""
    message = ForwardBackwardRequest(model_id=model_id, seq_id=seq, loss_fn=loss)
    for key, value in options.items():
        if isinstance(value, str):
            message.loss_fn_config_v2[key].text = value
        else:
            message.loss_fn_config_v2[key].number = value
    datum = message.data.add()
    tokens = np.asarray(arrays["tokens"], dtype="<i4")
    datum.model_input.add().encoded_text.tokens = tokens.tobytes()
    for name, values in arrays.items():
        if name == "tokens":
            continue
        array = np.asarray(values)
        is_whole = array.dtype.kind == "i"
        array = array.astype("<i8" if is_whole else "<f4")
        _put(datum.loss_fn_inputs[name], array, "int64" if is_whole else "float32")
    data: bytes = message.SerializeToString(deterministic=True)
    return data


def as_sparse(body: bytes) -> bytes:
    """The same request with its tables as CSR, zeros left out."""
    message = ForwardBackwardRequest.FromString(body)
    for tensor in message.data[0].loss_fn_inputs.values():
        form = "<i8" if tensor.dtype == DTYPES["int64"] else "<f4"
        table = np.frombuffer(tensor.dense, dtype=form).reshape(tuple(tensor.shape))
        rows, columns = np.nonzero(table)
        counts = np.bincount(rows, minlength=len(table))
        tensor.sparse_csr.values = table[rows, columns].tobytes()
        tensor.sparse_csr.crow_indices = np.cumsum([0, *counts], dtype="<i8").tobytes()
        tensor.sparse_csr.col_indices = columns.astype("<i8").tobytes()
    data: bytes = message.SerializeToString(deterministic=True)
    return data


def _put(tensor: Any, array: Any, dtype: str) -> None:
    tensor.dense, tensor.dtype = array.tobytes(), DTYPES[dtype]
    tensor.shape.extend(array.shape)


_context: ContextVar[RequestContext | None] = ContextVar("context", default=None)


class OfRequest:
    """The context of the service that a request is for, or a part of it. What is read of it before
    there is a request is looked up when one comes."""

    def __init__(self, *path: str) -> None:
        self._path = path

    def __getattr__(self, name: str) -> Any:
        if _context.get() is None:
            return OfRequest(*self._path, name)
        return getattr(self._found(), name)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._found()(*args, **options)

    def _found(self) -> Any:
        return reduce(getattr, self._path, _context.get())


@cache
def shared_routes() -> tuple[BaseRoute, ...]:
    """The routes of all services of a test run: to make them takes longer than most tests."""
    api = cast(RequestContext, OfRequest())
    return tuple(route for make_router in ROUTES for route in make_router(api).routes)


def shared_app(service: Service, keys: Keys | None) -> ASGIApp:
    """What `rookery.compat.serving.make_app` makes, of the shared routes."""
    app = make_app(service, keys=keys, routes=(), before=fill_gap)
    app.router.routes.extend(shared_routes())

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        _context.set(app.state.api)
        await app(scope, receive, send)

    return answer


class Served:
    """A running service and its clients."""

    def __init__(
        self, service: Service, app: ASGIApp, http: httpx2.AsyncClient, key_file: Path | None
    ) -> None:
        self.service = service
        self.app = app
        self._http = http
        self._key_file = key_file

    def client(self, name: str = "ada") -> Client:
        """A new key for a tenant; without a key file everybody is one tenant."""
        if self._key_file is None:
            return Client(self._http)
        return Client(self._http, add_key(self._key_file, name=name))


@asynccontextmanager
async def serve(
    folder: Path,
    *,
    backend: Backend | None = None,
    config: ServiceConfig | None = None,
    key_file: Path | None = None,
) -> AsyncIterator[Served]:
    """The service on a run in this folder, new or as it was left."""
    is_new = not (folder / "events.db").exists()
    run = (
        Run.create(folder.parent, kind="serve", name=folder.name, config={})
        if is_new
        else Run.open(folder)
    )
    config = config or ServiceConfig(poll_s=20.0)
    with run:
        async with open_service(run, {"fake": backend or fake_backend()}, config) as service:
            app = shared_app(service, None if key_file is None else Keys(key_file))
            transport = httpx2.ASGITransport(app=app)
            async with httpx2.AsyncClient(transport=transport, base_url="http://tink") as http:
                yield Served(service, app, http, key_file)


def crashed_copy(folder: Path, target: Path) -> Path:
    """What a process that is killed now leaves on the disk."""
    shutil.copytree(folder, target)
    (target / "run.lock").unlink()
    return target
