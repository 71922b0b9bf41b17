"""What an evolution starts from: its files, read and checked, and where its programs are scored."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from rookery.compose.inputs_record import digest, join_digests
from rookery.config import Config
from rookery.errors import ConfigError
from rookery.executors import WorkerSpec, open_local, open_modal, open_ray
from rookery.loops.evolve.checkpoints import read_checkpoint
from rookery.loops.evolve.config import EvolveConfig, LoadedConfig
from rookery.loops.evolve.evaluation_task import evaluation_spec
from rookery.loops.evolve.first_program import FirstProgram, read_first_program
from rookery.loops.evolve.program import ProgramRecord
from rookery.ports import Executor
from rookery.ui.display import Display

__all__ = [
    "EvolveRunConfig",
    "Inputs",
    "Problem",
    "open_executor",
    "read_inputs",
    "run_config",
]

OUTPUT = "openevolve_output"
TELL_EVERY_S = 15.0
"""Between two lines while workers start."""


class EvolveRunConfig(Config):
    """All that an evolve run is made from."""

    program: Path
    evaluator: Path
    output: Path
    config_file: Path | None = None
    """Where the keys of models are read again: they are not written with the run."""
    warnings: tuple[str, ...] = ()
    """Of the config file."""
    extended_from: int = 0
    """Iterations of the run when it had last finished and more were asked for."""
    settings: EvolveConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What to evolve, and where to."""

    program: Path
    """A file or a folder."""
    evaluator: Path
    output: Path | None = None
    """None: `openevolve_output` beside the program."""
    config_file: Path | None = None

    @property
    def folder(self) -> Path:
        return (self.output or self.program.absolute().parent / OUTPUT).absolute()


def run_config(problem: Problem, loaded: LoadedConfig) -> EvolveRunConfig:
    """What the run is made from, with absolute paths."""
    file = problem.config_file
    return EvolveRunConfig(
        program=problem.program.absolute(),
        evaluator=problem.evaluator.absolute(),
        output=problem.folder,
        config_file=None if file is None else file.absolute(),
        warnings=loaded.warnings,
        settings=loaded.config,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Everything that can be refused before a worker starts or a model is asked."""

    programs: Sequence[FirstProgram | ProgramRecord]
    spec: WorkerSpec
    warnings: tuple[str, ...]
    digests: Mapping[str, str]
    """Of the program and the evaluator, by name: scores of another evaluator do not compare."""


def read_inputs(config: EvolveRunConfig, settings: EvolveConfig) -> Inputs:
    """Read the programs, the checkpoint and the evaluator's folder."""
    own = settings.rookery
    paths = (config.program, *map(Path, own.first_programs))
    firsts = [read_first_program(path, config=settings) for path in paths]
    if not settings.llm.ensemble:
        raise ConfigError(
            "No model is named: give --primary-model NAME, write llm.models, or rookery.engine for "
            "a model of your own."
        )
    programs: list[FirstProgram | ProgramRecord] = [*firsts]
    if own.checkpoint is not None:
        programs += read_checkpoint(Path(own.checkpoint)).programs
    spec = evaluation_spec(
        settings, evaluator=config.evaluator, first=firsts[0], output=config.output
    )
    warnings = [warning for first in firsts for warning in first.warnings]
    if own.sandbox.backend == "none":
        warnings.append("unsafe: generated programs ran without a sandbox, with all rights")
    first = digest([firsts[0].code, sorted(firsts[0].other_files.items())])
    evaluator = digest([config.evaluator.read_bytes()])
    digests = join_digests({config.program.name: first}, {config.evaluator.name: evaluator})
    warnings = [*config.warnings, *warnings]
    return Inputs(programs=programs, spec=spec, warnings=tuple(warnings), digests=digests)


@asynccontextmanager
async def open_executor(
    config: EvolveConfig, spec: WorkerSpec, display: Display
) -> AsyncIterator[Executor]:
    """Where evaluations run; one worker at least is ready. The wait for it is told."""
    display.say(f"starting workers ({config.executor})")
    loop, began = asyncio.get_running_loop(), time.monotonic()
    telling = loop.call_later(TELL_EVERY_S, lambda: tell())

    def tell() -> None:
        nonlocal telling
        display.say(
            f"starting workers: {time.monotonic() - began:.0f} s. The evaluator's imports may take "
            f"{spec.startup_s:g} s (rookery.sandbox.startup_s)"
        )
        telling = loop.call_later(TELL_EVERY_S, tell)

    try:
        async with _open_executor(config, spec) as executor:
            telling.cancel()
            yield executor
    finally:
        telling.cancel()


@asynccontextmanager
async def _open_executor(config: EvolveConfig, spec: WorkerSpec) -> AsyncIterator[Executor]:
    if config.executor == "ray":
        async with open_ray(
            spec, address=config.rookery.address, num_workers=config.workers
        ) as executor:
            yield executor
    elif config.executor == "modal":
        async with open_modal(spec, num_workers=config.workers) as executor:
            yield executor
    else:
        async with open_local(spec, num_workers=config.workers) as executor:
            yield executor
