"""Server of the page: routes, access control and content security policy.

    page = open_page(Path("runs"))
    page.url                        # http://127.0.0.1:7700/?token=..., to open in a browser
    page.close()

All requests only read, except those that ask a service for models or a sample. The token in the
printed address is exchanged for a cookie. Run names in an address are looked up among the known
runs and never become paths.
"""

import asyncio
import gzip
import hashlib
import hmac
import json
import logging
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import ExitStack
from functools import cache
from html import escape
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, Self
from urllib.parse import urlsplit

import uvicorn
from fastapi import FastAPI, Query, Request
from fastapi import Path as PathValue
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from pydantic import BaseModel, Field
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import StreamingResponse

from rookery.config import is_loopback
from rookery.errors import ConfigError, RookeryError, RunError
from rookery.runs.summary import find_runs
from rookery.runtime.concurrency import task_group
from rookery.ui.live.address import served
from rookery.ui.live.export import join_modules, read_file, to_json
from rookery.ui.live.folder import MALFORMED, RunsFolder, malformed
from rookery.ui.live.reading import OpenRun, OpenRuns

if TYPE_CHECKING:
    from rookery.ui.live.fleets import ServiceLink

__all__ = ["FILES", "LivePage", "make_app", "open_page"]

logger = logging.getLogger(__name__)

PORT = 7700
LOOK_S = 0.4
"""Seconds between two checks of a run that a page shows."""
FIRST_S = 0.15
"""Seconds that the first response may spend on reading runs."""
NEXT_S = 0.5
"""Seconds that each later response may spend on reading runs."""
VIEW_S = 0.4
"""Seconds that one response may spend on reading events; the page requests the rest."""
VIEW_ROWS = 20_000
"""Rows of the first response; the page requests the rest."""
NEXT_ROWS = 200_000
START_S = 20.0
KEY_CHARACTERS = 16
YEAR_S = 31_536_000
TYPES = {"css": "text/css", "js": "text/javascript"}
FILES: dict[str, Callable[[], str]] = {
    "closed.js": lambda: read_file("closed.js"),
    "echarts.js": lambda: read_file("vendor/echarts.min.js"),
    "live.css": lambda: read_file("live.css"),
    "page.css": lambda: read_file("page.css"),
    "page.js": join_modules,
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'"
)
Answer = Callable[[Request], Awaitable[Response]]
MOST_SEQ = (1 << 63) - 1


class Json(JSONResponse):
    """JSON that browsers can read, whatever values a run holds."""

    def render(self, content: Any) -> bytes:
        return to_json(content).encode()


class LivePage:
    """A page served from a thread of this process."""

    def __init__(
        self, server: uvicorn.Server, thread: threading.Thread, url: str, notes: ExitStack
    ) -> None:
        self._server = server
        self._thread = thread
        self.url = url
        self._notes = notes

    def wait(self) -> None:
        """Block until the server ends, as after Ctrl-C."""
        while self._thread.is_alive():
            self._thread.join(0.5)

    def close(self) -> None:
        """Stop the server. Idempotent."""
        self._server.should_exit = True
        self._thread.join(START_S)
        self._notes.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<the page of runs at {self.url}>"

    def _repr_html_(self) -> str:
        link = escape(self.url)
        return f'<a href="{link}" target="_blank" rel="noopener">{link}</a>'


def open_page(
    runs_dir: str | Path = "runs",
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    key: str = "",
    fleet: Sequence[str] = (),
    service: str = "",
) -> LivePage:
    """Serve the page of a folder of runs; the server accepts requests when this returns.

    Open the `url` of the result in a browser. A `host` beyond this machine needs a `key`. `fleet`
    has the URLs of servers to show instead of those that this user started. `service` is the URL
    of a service to show.
    """
    if not is_loopback(host) and len(key) < KEY_CHARACTERS:
        raise ConfigError(
            f"The page would be open to everyone who reaches {host}: give a key of at least "
            f"{KEY_CHARACTERS} characters (--key, or ROOKERY_UI_KEY), or leave --host out."
        )
    _check_addresses([*fleet, service])
    find_runs(Path(runs_dir))  # raises unless it is a folder
    listener = _listen(host, port)
    token = key or secrets.token_urlsafe(18)
    number = listener.getsockname()[1]
    app = make_app(RunsFolder(Path(runs_dir)), token=token, cookie=f"rookery_ui_{number}")
    _add_fleets(app, fleet, service)
    settings = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_graceful_shutdown=3, lifespan="off"
    )
    server = uvicorn.Server(settings)
    app.state.is_over = lambda: server.should_exit
    thread = threading.Thread(
        target=server.run, kwargs={"sockets": [listener]}, name="rookery-ui", daemon=True
    )
    thread.start()
    until = time.monotonic() + START_S
    while not server.started and thread.is_alive() and time.monotonic() < until:
        time.sleep(0.01)
    if not server.started:
        raise ConfigError(f"The page could not be served on {host}:{number}.")
    shown = f"[{host}]" if ":" in host else host
    address, notes = f"http://{shown}:{number}/", ExitStack()
    notes.enter_context(served(Path(runs_dir), address))
    query = "" if key else f"?token={token}"
    return LivePage(server, thread, f"{address}{query}", notes)


def make_app(folder: RunsFolder, *, token: str, cookie: str) -> FastAPI:
    """Make the application. `token` gives access; `cookie` is the name of the session cookie."""
    app = FastAPI(title="rookery ui", docs_url=None, redoc_url=None, openapi_url=None)
    app.state.is_over = lambda: False
    runs = OpenRuns(folder)
    app.add_middleware(GZipMiddleware, minimum_size=2048, compresslevel=4)
    app.middleware("http")(_gate(token, cookie))
    for kind in (RookeryError, OSError, *MALFORMED):
        app.exception_handler(kind)(_refuse(folder))
    _add_pages(app)
    _add_runs(app, folder)
    _add_run(app, runs)
    return app


def _gate(token: str, cookie: str) -> Callable[[Request, Answer], Awaitable[Response]]:
    """Middleware that admits requests with the token or its session cookie."""
    session = secrets.token_urlsafe(24)

    async def gate(request: Request, answer: Answer) -> Response:
        sent = request.query_params.get("token")
        is_code = _path(request).startswith("/static/")  # the same for all users
        if request.method not in {"GET", "HEAD"} and not _asks_service(request):
            response: Response = Json({"error": "The page only reads."}, status_code=405)
        elif sent is not None and _is_equal(sent, token):
            response = RedirectResponse("/", status_code=303)  # there is only one page
            response.set_cookie(cookie, session, httponly=True, samesite="lax")
        elif is_code or _is_equal(request.cookies.get(cookie, ""), session):
            response = await answer(request)
        else:
            response = HTMLResponse(_closed(is_wrong=sent is not None), status_code=401)
        response.headers.setdefault("Content-Security-Policy", POLICY)
        response.headers.setdefault("Cache-Control", "no-store")
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["Referrer-Policy"] = "no-referrer"
        response.headers["Cross-Origin-Resource-Policy"] = "same-origin"
        return response

    return gate


def _asks_service(request: Request) -> bool:
    """Whether a script asks the service. Forms of other sites cannot send JSON."""
    kind = request.headers.get("content-type", "")
    asks = request.method == "POST" and _path(request).startswith("/api/service/")
    return asks and kind.partition(";")[0] == "application/json"


def _path(request: Request) -> str:
    """Path used for routing; `request.url` depends on the Host header, which clients choose."""
    path: str = request.scope["path"]
    return path


def _is_equal(sent: str, wanted: str) -> bool:
    """Compare in constant time, without revealing even the length."""
    digests = [hashlib.sha256(text.encode(errors="replace")).digest() for text in (sent, wanted)]
    return hmac.compare_digest(*digests)


def _refuse(folder: RunsFolder) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def refuse(request: Request, error: Exception) -> Response:
        path = folder.root / request.path_params.get("name", "")
        refusal: Exception = error
        if isinstance(error, MALFORMED):
            refusal = malformed(path, error)
            # A bug of ours raises the same errors: log the traceback.
            logger.debug("%s", _path(request), exc_info=error)
        return Json({"error": str(refusal)}, status_code=404)

    return refuse


def _add_pages(app: FastAPI) -> None:
    @app.get("/")
    def index() -> Response:
        return HTMLResponse(_versioned("index.html"))

    @app.get("/static/{name}")
    def static(name: str) -> Response:
        if name not in FILES:
            return Json({"error": "There is no such file."}, status_code=404)
        headers = {"Content-Encoding": "gzip", "Vary": "Accept-Encoding"}
        headers["Cache-Control"] = f"max-age={YEAR_S}, immutable"  # the address has the version
        kind = TYPES[name.rpartition(".")[2]]
        return Response(_packed(name), media_type=kind, headers=headers)


@cache
def _packed(name: str) -> bytes:
    """A file of the page, compressed once, because compressing takes longer than sending."""
    return gzip.compress(FILES[name]().encode(), 6, mtime=0)


@cache
def _versioned(name: str) -> str:
    """A page whose links carry the version (content hash) of all files."""
    version = hashlib.sha256(b"".join(map(_packed, FILES))).hexdigest()[:12]
    return read_file(name).replace("VERSION", version)


def _add_runs(app: FastAPI, folder: RunsFolder) -> None:
    @app.get("/api/runs")
    def runs(since: int = 0) -> Response:
        folder.refresh(seconds=NEXT_S if since else FIRST_S)
        return Json(folder.changes(since=since))

    @app.get("/api/stream")
    async def stream() -> Response:
        def look() -> dict[str, Any]:
            folder.refresh(seconds=FIRST_S)
            seen = folder.changes(since=1 << 62)
            return {"version": seen["version"], "pending": seen["pending"]}

        return _events(look, app)


def _add_run(app: FastAPI, runs: OpenRuns) -> None:
    def add(route: str, answer: Callable[..., Any]) -> None:
        app.get(f"/api/runs/{{name}}{route}")(answer)

    add("", lambda name: Json(runs.get(name).overview()))
    add("/report", lambda name: Json(runs.get(name).report()))
    add("/labels", lambda name: Json(runs.get(name).labels()))

    @app.get("/api/runs/{name}/view")
    def view(name: str, after: int = 0) -> Response:
        most = NEXT_ROWS if after else VIEW_ROWS
        return Json(runs.get(name).view(after=after, seconds=VIEW_S, most=most))

    @app.get("/api/runs/{name}/curves")
    def curves(
        name: str,
        points: Annotated[int, Query(ge=2, le=20_000)] = 600,
        first: int = 0,
        last: int | None = None,
        names: Annotated[list[str] | None, Query()] = None,
        after: int = 0,
    ) -> Response:
        run = runs.get(name)
        return Json(
            run.curves(points=points, first=first, last=last, names=names or [], after=after)
        )

    @app.get("/api/runs/{name}/events")
    def events(
        name: str,
        kind: str = "",
        text: str = "",
        offset: Annotated[int, Query(ge=0, le=1 << 40)] = 0,
        limit: Annotated[int, Query(ge=1, le=500)] = 100,
    ) -> Response:
        run = runs.get(name)
        return Json(run.events(kind=kind, text=text, offset=offset, limit=limit))

    @app.get("/api/runs/{name}/event/{seq}")
    def event(name: str, seq: Annotated[int, PathValue(le=MOST_SEQ)]) -> Response:
        return Json(runs.get(name).event(seq))

    @app.get("/api/runs/{name}/duel")
    def duel(name: str, candidate: str = "") -> Response:
        return Json(runs.get(name).duel(candidate))

    @app.get("/api/runs/{name}/program/{program}")
    def program(name: str, program: str) -> Response:
        return Json(runs.get(name).program(program))

    @app.get("/api/runs/{name}/step/{number}")
    def step(name: str, number: int) -> Response:
        return Json(runs.get(name).step(number))

    @app.get("/api/runs/{name}/stream")
    async def stream(name: str) -> Response:
        run: OpenRun = await asyncio.to_thread(runs.get, name)
        return _events(run.pulse, app)


class SampleForm(BaseModel):
    key: str = ""
    model: str
    prompt: str = Field(max_length=200_000)
    max_tokens: int = Field(default=128, ge=1, le=4096)
    temperature: float = Field(default=0.0, ge=0.0, le=5.0)


class KeyRequest(BaseModel):
    key: str = ""


def _add_fleets(app: FastAPI, fleet: Sequence[str], service: str) -> None:
    """Add the routes of servers and service. Their module takes a second to import: do it late."""

    def link() -> "ServiceLink":
        if not service:
            raise RunError("No service is named: start `rookery ui --service URL` to see one.")
        opened: ServiceLink = _fleets().ServiceLink(service)
        return opened

    @app.get("/api/fleet")
    async def servers() -> Response:
        fleets = await asyncio.to_thread(_fleets)
        return Json(await _until_over(app, fleets.read_fleet(fleet)))

    @app.get("/api/service")
    async def status() -> Response:
        if not service:
            return Json({"url": ""})
        return Json(await _until_over(app, (await asyncio.to_thread(link)).status()))

    @app.post("/api/service/models")
    async def models(body: KeyRequest) -> Response:
        asked = (await asyncio.to_thread(link)).models(key=body.key)
        return Json(await _until_over(app, asked))

    @app.post("/api/service/sample")
    async def sample(body: SampleForm) -> Response:
        asked = (await asyncio.to_thread(link)).sample(**body.model_dump())
        return Json(await _until_over(app, asked))


async def _until_over(app: FastAPI, asked: Coroutine[Any, Any, Any]) -> Any:
    """Await another server's response; raise RunError if the page closes first."""
    async with task_group() as tasks:
        task = tasks.create_task(asked)
        while not (await asyncio.wait([task], timeout=LOOK_S))[0]:
            if app.state.is_over():
                raise RunError("The page was closed.")
        return task.result()


def _fleets() -> ModuleType:
    from rookery.ui.live import fleets

    return fleets


def _events(look: Callable[[], dict[str, Any]], app: FastAPI) -> Response:
    """Server-sent events: the result of `look`, each time that it changes."""

    async def stream() -> AsyncIterator[str]:
        sent = None
        quiet_s = 0.0
        while not app.state.is_over():
            try:
                seen = json.dumps(await asyncio.to_thread(look))
            except (RookeryError, OSError, *MALFORMED):
                return  # the run is gone; the next request of the page gets the error
            if seen != sent:
                sent, quiet_s = seen, 0.0
                yield f"data: {seen}\n\n"
            elif quiet_s > 15:
                quiet_s = 0.0
                yield ": still here\n\n"  # detects closed connections
            await asyncio.sleep(LOOK_S)
            quiet_s += LOOK_S

    headers = {"X-Accel-Buffering": "no"}  # a proxy would buffer the events
    return StreamingResponse(stream(), media_type="text/event-stream", headers=headers)


def _closed(*, is_wrong: bool) -> str:
    sentence = "That key is not right." if is_wrong else "This page needs the key of its server."
    return _versioned("closed.html").replace("SENTENCE", sentence)


def _check_addresses(urls: Sequence[str]) -> None:
    for url in urls:
        try:
            parts = urlsplit(url)
            _ = parts.port
            problem = "it does not begin with http://"
        except ValueError as error:
            parts, problem = None, str(error)
        if url and (parts is None or parts.scheme not in {"http", "https"} or not parts.hostname):
            raise ConfigError(
                f"Got the address {url}: {problem}. Write one such as http://127.0.0.1:8000."
            )


def _listen(host: str, port: int | None) -> socket.socket:
    """Listen on the given port; without one, on PORT, or on any free port if PORT is taken."""
    if port is not None and not 0 <= port <= 65_535:
        raise ConfigError(f"--port is {port}; ports are 0, for any that is free, to 65535.")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for number in [port] if port is not None else [PORT, 0]:
        try:
            return socket.create_server((host, number), family=family)
        except OSError as error:
            reason = error.strerror or str(error)
    place, remedy = (host, "--host") if port is None else (f"{host}:{port}", "--port")
    raise ConfigError(f"{place} cannot be used: {reason}. Give another {remedy}, or leave it out.")
