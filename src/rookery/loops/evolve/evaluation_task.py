"""The task of workers that evaluate programs: a warm sandbox around one evaluator.

    spec = evaluation_spec(config, evaluator=Path("evaluator.py"), first=first_program)
    async with open_local(spec, num_workers=8) as executor: ...

A payload is a line of settings and a program's text (`EvaluationRequest`), an output what
`decode_outcome` reads. A machine without a sandbox
refuses the task with the line that mends it, and its workers get no work.
"""

import json
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from pydantic import Field

from rookery.config import Config, parse_config
from rookery.errors import ConfigError
from rookery.executors import WorkerSpec, pack_folder
from rookery.executors.folder import IGNORED
from rookery.loops.evolve.config import EvolveConfig
from rookery.loops.evolve.first_program import FirstProgram
from rookery.loops.evolve.program import split_files
from rookery.runs.disk import decode
from rookery.sandbox import (
    EvaluatorConfig,
    Outcome,
    Sandbox,
    SandboxConfig,
    encode_outcome,
    open_sandbox,
)

__all__ = [
    "FORGEABLE",
    "EvaluationRequest",
    "EvaluationSettings",
    "EvaluationTask",
    "evaluation_spec",
    "open_evaluation",
    "say_not_isolated",
]

_MB = 2**20
FORGEABLE = (
    "This evaluator runs the program in its own process: a program can forge its score. "
    "docs/sandbox.md says what an evaluator must do without."
)


class EvaluationSettings(Config):
    """What every worker needs to know."""

    sandbox: SandboxConfig
    evaluator: EvaluatorConfig
    """Its file is relative to the folder that travels with the task."""
    other_files: dict[str, str] = Field(default_factory=dict)
    """Of a program that is a folder: files that are the same for all programs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRequest:
    """One evaluation of a program."""

    code: str
    seed: int = 0
    """What random generators start from."""
    isolate: bool = True
    """Whether the program runs in another process than its evaluator."""

    def encode(self) -> bytes:
        head = json.dumps({"seed": self.seed, "isolate": self.isolate}).encode()
        return head + b"\n" + self.code.encode("utf-8", "surrogatepass")

    @classmethod
    def decode(cls, payload: bytes) -> Self:
        head, _, code = payload.partition(b"\n")
        return cls(code=code.decode("utf-8", "surrogatepass"), **json.loads(head))


def evaluation_spec(
    config: EvolveConfig, *, evaluator: Path, first: FirstProgram, output: Path | None = None
) -> WorkerSpec:
    """What workers hold: the evaluator's folder as it is now, and the limits of the config.

    Hidden files, which may hold secrets, and the output of runs, `output` too, are left out.
    """
    if not evaluator.is_file():
        raise ConfigError(f"There is no evaluator {evaluator}: give a Python file.")
    settings = EvaluationSettings(
        sandbox=_sandbox_config(config),
        evaluator=EvaluatorConfig(
            file=Path(evaluator.name),
            timeout_s=config.evaluator.timeout,
            cascade=config.evaluator.cascade_evaluation,
            thresholds=config.evaluator.cascade_thresholds,
            suffix=first.suffix,
        ),
        other_files=dict(first.other_files),
    )
    return WorkerSpec(
        task=open_evaluation,
        settings=settings.model_dump_json().encode(),
        folder=pack_folder(
            evaluator.resolve().parent,
            ignored=(*IGNORED, ".*", "openevolve_output"),
            left_out=output.resolve() if output else None,
        ),
        startup_s=settings.sandbox.startup_s,
    )


def _sandbox_config(config: EvolveConfig) -> SandboxConfig:
    own = config.rookery.sandbox
    memory_mb = config.evaluator.memory_limit_mb or own.memory_mb
    backend = {"auto": None, "none": "unsafe"}.get(own.backend, own.backend)
    return SandboxConfig.model_validate(
        {
            "backend": backend,
            "memory_bytes": memory_mb * _MB,
            "max_processes": own.processes,
            "cpu_s": own.cpu_s,
            "scratch_bytes": own.scratch_mb * _MB,
            "output_bytes": own.output_mb * _MB,
            "startup_s": own.startup_s,
            "network": own.network,
            "devices": own.devices,
            "variables": own.variables,
            "readable": own.read_paths,
        }
    )


def say_not_isolated(outcome: Outcome) -> str:
    return (
        f"{outcome.unsupported} needs the program in the evaluator's process, and "
        "`rookery.sandbox.isolate` is `always`: write `auto`, and programs can forge their scores."
    )


class EvaluationTask:
    """One sandbox, for as long as its worker lives."""

    def __init__(
        self, sandbox: Sandbox, stack: AsyncExitStack, *, other_files: Mapping[str, str]
    ) -> None:
        self.about = f"sandbox {sandbox.backend}"
        self._sandbox = sandbox
        self._stack = stack
        self._other_files = other_files

    async def run(self, payload: bytes) -> bytes:
        request = EvaluationRequest.decode(payload)
        files = split_files(request.code)
        program = {**self._other_files, **files} if files else request.code
        outcome = await self._sandbox.evaluate(program, seed=request.seed, isolate=request.isolate)
        return encode_outcome(outcome)

    async def close(self) -> None:
        await self._stack.aclose()


async def open_evaluation(settings: bytes, folder: Path | None) -> EvaluationTask:
    """Open the sandbox. A SandboxError says what this machine lacks."""
    if folder is None:
        raise ConfigError("An evaluation needs the evaluator's folder.")
    document = decode(settings, what="The settings of the evaluation")
    parsed = parse_config(EvaluationSettings, document, origin="the settings of the evaluation")
    evaluator = parsed.evaluator.model_copy(update={"file": folder / parsed.evaluator.file})
    async with AsyncExitStack() as stack:
        sandbox = await stack.enter_async_context(open_sandbox(parsed.sandbox, evaluator))
        return EvaluationTask(sandbox, stack.pop_all(), other_files=parsed.other_files)
