"""The problem of an evolution: its first program, and its evaluator as a task of workers.

    first = read_first_program(Path("initial_program.py"), config=config)
    first.code, first.language, first.suffix, first.warnings

    spec = evaluation_spec(config, evaluator=Path("evaluator.py"), first=first)
    async with open_local(spec, num_workers=8) as executor: ...

The program is checked before any model is asked. A job's payload is an encoded `EvaluationRequest`,
its output is read by `decode_outcome`. Workers keep a warm sandbox. A machine without a sandbox
refuses the task, names the remedy, and gets no work.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Self

from pydantic import Field

from rookery.config import Config, parse_config
from rookery.errors import ConfigError
from rookery.executors import WorkerSpec, pack_folder
from rookery.executors.folder import IGNORED
from rookery.loops.evolve.answers import evolve_blocks, find_marker_problem
from rookery.loops.evolve.config import EvolveConfig
from rookery.loops.evolve.program import read_other_files, read_program, split_files
from rookery.runs.disk import decode
from rookery.sandbox import (
    EvaluationOutcome,
    EvaluatorConfig,
    Sandbox,
    SandboxConfig,
    encode_outcome,
    open_sandbox,
)

__all__ = [
    "FORGEABLE",
    "SUFFIXES",
    "UNKNOWN",
    "EvaluationRequest",
    "EvaluationSettings",
    "EvaluationTask",
    "FirstProgram",
    "detect_language",
    "evaluation_spec",
    "file_suffix",
    "normalise",
    "open_evaluation",
    "read_first_program",
    "say_not_isolated",
    "suffix_of",
]


UNKNOWN = "unknown"

SUFFIXES = {
    ".bash": "bash",
    ".c": "c",
    ".cc": "cpp",
    ".cpp": "cpp",
    ".cu": "cuda",
    ".cxx": "cpp",
    ".go": "go",
    ".h": "c",
    ".hpp": "cpp",
    ".hs": "haskell",
    ".java": "java",
    ".jl": "julia",
    ".js": "javascript",
    ".kt": "kotlin",
    ".lua": "lua",
    ".m": "matlab",
    ".md": "markdown",
    ".metal": "metal",
    ".ml": "ocaml",
    ".mlir": "mlir",
    ".php": "php",
    ".py": "python",
    ".r": "r",
    ".rb": "ruby",
    ".rs": "rust",
    ".scala": "scala",
    ".sh": "bash",
    ".sql": "sql",
    ".swift": "swift",
    ".ts": "typescript",
    ".txt": "text",
    ".yaml": "yaml",
    ".yml": "yaml",
}
"""Lower-case file suffix to language tag of a fenced block."""

SIGNATURES = (
    ("python", r"^(import|from|def|class)\s"),
    ("java", r"^(package|import java|public class)"),
    ("cpp", r"^(#include|int main|void main)"),
    ("javascript", r"^(function|var|let|const|console\.log)"),
    ("rust", r"^(module|fn|let mut|impl)"),
    ("sql", r"^(SELECT|CREATE TABLE|INSERT INTO)"),
)
"""Line beginnings of each language. The first match wins, in OpenEvolve's order."""


def detect_language(code: str, *, suffix: str = "") -> str:
    r"""Detect a language by a known suffix, else by line beginnings, else return "unknown".

    detect_language("x = 1", suffix=".py")      "python"
    detect_language("#include <vector>\n")      "cpp"
    """
    if suffix.lower() in SUFFIXES:
        return SUFFIXES[suffix.lower()]
    fits = (name for name, regex in SIGNATURES if re.search(regex, code, re.MULTILINE))
    return next(fits, UNKNOWN)


def file_suffix(name: str, *, configured: str = ".py") -> str:
    """Return the suffix of program files: the config's, or the program's own if that is `.py`.

    A first program without a suffix counts as `.py`.
    """
    if configured != ".py":
        return configured
    _, dot, end = name.rpartition("/")[2].lstrip(".").rpartition(".")
    return f".{end}" if dot and end else ".py"


def normalise(code: str) -> str:
    """Unify line ends and drop trailing blanks and outer blank lines.

    Equal results mean the same program. Different results do not mean different programs.
    """
    lines = [line.rstrip() for line in code.splitlines()]
    return "\n".join(lines).strip("\n")


def suffix_of(language: str) -> str:
    """Return the usual file suffix of a language, or `.py`."""
    return next((suffix for suffix, name in SUFFIXES.items() if name == language), ".py")


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstProgram:
    """A first program as text, with settings for its children."""

    code: str
    language: str
    suffix: str
    """Suffix of program files; for a folder, its most common one."""
    warnings: tuple[str, ...] = ()
    other_files: Mapping[str, str] = field(default_factory=dict)
    """Files of a folder that have no markers while others do. No model changes them."""


def read_first_program(path: Path, *, config: EvolveConfig) -> FirstProgram:
    """Read a file or a folder. Raises ConfigError if it is empty or has unpaired markers."""
    code = read_program(path)
    texts = split_files(code) or {path.name: code}
    if not any(text.strip() for text in texts.values()):
        raise ConfigError(f"The program {path} is empty.")
    for name, text in texts.items():
        if problem := find_marker_problem(text):
            raise ConfigError(f"The program's file {name}: {problem}")
    suffixes = Counter(PurePosixPath(name).suffix for name in texts)
    name = f"program{suffixes.most_common(1)[0][0]}"
    suffix = file_suffix(name, configured=config.file_suffix)
    seen_suffix = PurePosixPath(name).suffix
    return FirstProgram(
        code=code,
        language=config.language or detect_language(code, suffix=seen_suffix),
        suffix=suffix,
        warnings=tuple(_warnings(texts, config)),
        other_files=read_other_files(path),
    )


def _warnings(texts: dict[str, str], config: EvolveConfig) -> list[str]:
    warnings = []
    if config.enforce_evolve_blocks and not any(map(evolve_blocks, texts.values())):
        warnings.append("enforce_evolve_blocks changes nothing: the program has no EVOLVE-BLOCK")
    num_chars = sum(map(len, texts.values()))
    if num_chars > config.max_code_length:
        warnings.append(
            f"the program has {num_chars} characters and max_code_length is "
            f"{config.max_code_length}: children as long as it are refused"
        )
    return warnings


_MB = 2**20
FORGEABLE = (
    "This evaluator runs the program in its own process: a program can forge its score. "
    "docs/isolation.md says what an evaluator must do without."
)


class EvaluationSettings(Config):
    """The settings of every worker."""

    sandbox: SandboxConfig
    evaluator: EvaluatorConfig
    """The evaluator. Its file is relative to the folder that is sent with the task."""
    other_files: dict[str, str] = Field(default_factory=dict)
    """Files that are the same for all programs of a folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRequest:
    """One evaluation of a program."""

    code: str
    seed: int = 0
    """Seed of the random generators."""
    isolate: bool = True
    """True to run the program in a separate process from its evaluator."""
    variants: Sequence[str] = ()
    """Programs of one file to run in its place, with one result (`sandbox.read_variants`)."""

    def encode(self) -> bytes:
        settings = {"seed": self.seed, "isolate": self.isolate, "variants": self.variants}
        head = json.dumps(settings).encode()
        return head + b"\n" + self.code.encode("utf-8", "surrogatepass")

    @classmethod
    def decode(cls, payload: bytes) -> Self:
        head, _, code = payload.partition(b"\n")
        return cls(code=code.decode("utf-8", "surrogatepass"), **json.loads(head))


def evaluation_spec(
    config: EvolveConfig, *, evaluator: Path, first: FirstProgram, output: Path | None = None
) -> WorkerSpec:
    """Describe the workers: the evaluator's folder as it is now, and the config's limits.

    Leaves out `output`, other runs' output, and hidden files, which may hold secrets.
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
    sandbox = config.rookery.sandbox
    memory_mb = config.evaluator.memory_limit_mb or sandbox.memory_mb
    backend = {"auto": None, "none": "unsafe"}.get(sandbox.backend, sandbox.backend)
    return SandboxConfig.model_validate(
        {
            "backend": backend,
            "memory_bytes": memory_mb * _MB,
            "max_processes": sandbox.processes,
            "cpu_s": sandbox.cpu_s,
            "scratch_bytes": sandbox.scratch_mb * _MB,
            "output_bytes": sandbox.output_mb * _MB,
            "startup_s": sandbox.startup_s,
            "network": sandbox.network,
            "devices": sandbox.devices,
            "variables": sandbox.variables,
            "readable": sandbox.read_paths,
        }
    )


def say_not_isolated(outcome: EvaluationOutcome) -> str:
    return (
        f"{outcome.unsupported} needs the program in the evaluator's process, and "
        "`rookery.sandbox.isolate` is `always`: write `auto`, and programs can forge their scores."
    )


class EvaluationTask:
    """A sandbox that lives as long as its worker."""

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
        outcome = await self._sandbox.evaluate(
            program, seed=request.seed, isolate=request.isolate, variants=request.variants
        )
        return encode_outcome(outcome)

    async def close(self) -> None:
        await self._stack.aclose()


async def open_evaluation(settings: bytes, folder: Path | None) -> EvaluationTask:
    """Open the sandbox. Raises SandboxError with what this machine lacks."""
    if folder is None:
        raise ConfigError("An evaluation needs the evaluator's folder.")
    document = decode(settings, what="The settings of the evaluation")
    parsed = parse_config(EvaluationSettings, document, origin="the settings of the evaluation")
    evaluator = parsed.evaluator.model_copy(update={"file": folder / parsed.evaluator.file})
    async with AsyncExitStack() as stack:
        sandbox = await stack.enter_async_context(open_sandbox(parsed.sandbox, evaluator))
        return EvaluationTask(sandbox, stack.pop_all(), other_files=parsed.other_files)
