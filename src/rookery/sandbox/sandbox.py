"""A sandbox for one evaluator: runs candidates one at a time and returns their outcomes.

    config = SandboxConfig(memory_bytes=2**30)
    async with Sandbox(config, EvaluatorConfig(file=Path("evaluator.py"))) as sandbox:
        outcome = await sandbox.evaluate("def solve(): return 42")

The evaluator is imported once, inside the jail; each candidate is a fork. A failed candidate gives
an outcome with a failure; SandboxError means that the sandbox or the evaluator is unusable.
"""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Self

from rookery.errors import SandboxError
from rookery.sandbox.box import SandboxPaths, open_box
from rookery.sandbox.jail import (
    BACKENDS,
    SAFE_BACKENDS,
    BackendName,
    EvaluatorConfig,
    SandboxConfig,
    find_remedy,
)
from rookery.sandbox.outcome import EvaluationOutcome
from rookery.sandbox.server import ForkServer, Program

__all__ = ["Probe", "Sandbox", "choose_backend", "open_sandbox", "probe", "probe_backend"]


class Sandbox:
    """Cancelling `evaluate` kills the candidate; closing kills everything.

    The config must name a backend: `choose_backend` finds one that works.
    """

    def __init__(self, config: SandboxConfig, evaluator: EvaluatorConfig) -> None:
        if config.backend is None:
            raise SandboxError("No backend is named: open_sandbox chooses one.")
        self.backend: BackendName = config.backend
        self._config = config
        self._evaluator = evaluator
        self._stack = AsyncExitStack()
        self._server: ForkServer | None = None
        self._box: SandboxPaths | None = None
        # Callers of `evaluate` queue here. Every wait of the holder has a time limit.
        self._turn = asyncio.Lock()

    async def __aenter__(self) -> Self:
        manager = open_box(self._evaluator.file)
        self._box = await asyncio.to_thread(manager.__enter__)
        self._stack.push_async_callback(asyncio.to_thread, manager.__exit__, None, None, None)
        self._stack.push_async_callback(self._close_server)
        try:
            await self._running_server(self._box)
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._box = None
        await self._stack.aclose()

    async def evaluate(
        self,
        program: Program,
        *,
        seed: int = 0,
        isolate: bool = True,
        variants: Sequence[str] = (),
    ) -> EvaluationOutcome:
        """Run the evaluator on a program: the text of one file, or file texts by relative path.

        `seed` seeds the random generators. Without `isolate` the program runs in the evaluator's
        process, where it can forge its score.

        `variants` are programs to run in its place, one after another in the same processes and
        within the limits of one program. `read_variants` returns their outcomes.
        """
        _check(program)
        async with self._turn:
            if self._box is None:
                raise SandboxError("The sandbox is closed.")
            server = await self._running_server(self._box)
            is_clean = False
            try:
                outcome = await server.evaluate(
                    program,
                    self._config,
                    self._evaluator,
                    seed=seed,
                    isolate=isolate,
                    variants=variants,
                )
                is_clean = server.is_alive and server.is_isolated
            finally:
                if not is_clean:
                    await self._close_server()
            return outcome

    async def _running_server(self, box: SandboxPaths) -> ForkServer:
        if self._server is not None and not self._server.is_alive:
            await self._close_server()
        if self._server is None:
            await asyncio.to_thread(box.clear_scratch)
            jail = BACKENDS[self.backend](self._config, box)
            self._server = await ForkServer.start(jail, self._config, box.log)
        return self._server

    async def _close_server(self) -> None:
        """Close the server. If cancelled, keep it, so that the next caller waits for its end."""
        server = self._server
        if server is not None:
            await server.close()
            if self._server is server:
                self._server = None


def _check(program: Program) -> None:
    for name in program if isinstance(program, Mapping) else ():
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
            raise SandboxError(
                f"A program's file is named {name!r}: write a path inside its folder."
            )


_EVALUATOR = """
def evaluate(path):
    try:
        open(open(path).read()).close()
    except OSError:
        return {"hidden": True}
    return {"hidden": False}
"""
"""Tries to read the file that the program names, which is outside and must not be visible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Whether a backend works, why not, and the command that may fix it."""

    backend: BackendName
    works: bool
    reason: str = ""
    remedy: str = ""


async def probe(config: SandboxConfig | None = None) -> tuple[Probe, ...]:
    """Try every safe backend. Takes a fraction of a second each."""
    return tuple([await probe_backend(name, config) for name in SAFE_BACKENDS])


async def probe_backend(backend: BackendName, config: SandboxConfig | None = None) -> Probe:
    """Try a backend on an evaluation that reads a file outside the jail, which must fail."""
    named = (config or SandboxConfig()).model_copy(update={"backend": backend})
    with tempfile.TemporaryDirectory() as folder:
        file, secret = Path(folder) / "evaluator.py", Path(folder) / "secret"
        file.write_text(_EVALUATOR)
        secret.write_text("secret")
        try:
            evaluator = EvaluatorConfig(file=file, timeout_s=named.startup_s)
            async with Sandbox(named, evaluator) as sandbox:
                outcome = await sandbox.evaluate(str(secret))
        except SandboxError as error:
            remedy = find_remedy(backend)
            return Probe(backend=backend, works=False, reason=str(error), remedy=remedy)
    if outcome.failure is not None:
        return Probe(backend=backend, works=False, reason=outcome.failure.reason)
    if outcome.metrics != {"hidden": True} and backend in SAFE_BACKENDS:
        return Probe(backend=backend, works=False, reason="A file outside can be read inside.")
    return Probe(backend=backend, works=True)


async def choose_backend(config: SandboxConfig) -> SandboxConfig:
    """Return the config with a backend that was tried and works here; SandboxError if none does."""
    names = SAFE_BACKENDS if config.backend is None else (config.backend,)
    failed = []
    for name in names:
        tried = await probe_backend(name, config)
        if tried.works:
            return config.model_copy(update={"backend": name})
        remedy = f" Try: {tried.remedy}." if tried.remedy else ""
        failed.append(f"{name}: {tried.reason.rstrip('.')}.{remedy}")
    raise SandboxError(
        "Generated programs cannot be run safely on this machine. "
        + " ".join(failed)
        + " Or choose the backend `unsafe`, which protects nothing."
    )


@asynccontextmanager
async def open_sandbox(config: SandboxConfig, evaluator: EvaluatorConfig) -> AsyncIterator[Sandbox]:
    """Open a sandbox on the first backend that works."""
    async with Sandbox(await choose_backend(config), evaluator) as sandbox:
        yield sandbox
