"""Which backends work on this machine, found out by running a program in each."""

import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from rookery.errors import SandboxError
from rookery.sandbox.backends import REMEDIES, SAFE_BACKENDS
from rookery.sandbox.config import BackendName, EvaluatorConfig, SandboxConfig
from rookery.sandbox.sandbox import Sandbox

__all__ = ["Probe", "choose_backend", "open_sandbox", "probe", "probe_backend"]

_EVALUATOR = """
def evaluate(path):
    try:
        open(open(path).read()).close()
    except OSError:
        return {"hidden": True}
    return {"hidden": False}
"""
"""Reads the file that the program names: it lies outside, and must not be seen."""


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
    """Evaluate a program in the backend that tries to read a file outside."""
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
            return Probe(backend=backend, works=False, reason=str(error), remedy=REMEDIES[backend])
    if outcome.failure is not None:
        return Probe(backend=backend, works=False, reason=outcome.failure.reason)
    if outcome.metrics != {"hidden": True} and backend in SAFE_BACKENDS:
        return Probe(backend=backend, works=False, reason="A file outside can be read inside.")
    return Probe(backend=backend, works=True)


async def choose_backend(config: SandboxConfig) -> SandboxConfig:
    """The config with a backend that works here; a named backend is tried too."""
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
    """A sandbox on the first backend that works."""
    async with Sandbox(await choose_backend(config), evaluator) as sandbox:
        yield sandbox
