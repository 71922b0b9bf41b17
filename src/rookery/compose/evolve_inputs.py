"""Inputs of an evolution: its files, read and checked before anything starts.

config = run_config(read_config(...), program=Path("first.py"), evaluator=Path("evaluator.py"))
inputs = read_inputs(config)
inputs.programs, inputs.spec or inputs.tasks      # programs have an evaluator, prompts tasks
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rookery.compat.openevolve import LoadedConfig, read_checkpoint
from rookery.compose.inputs import (
    IsMade,
    RunInputs,
    digest,
    digest_adapters,
    digest_models,
    digest_scorers,
    join_digests,
)
from rookery.compose.proposers import list_models
from rookery.config import Config
from rookery.errors import ConfigError
from rookery.executors import WorkerSpec
from rookery.loops.evolve.config import EvolveConfig, RookeryConfig
from rookery.loops.evolve.config_sections import TasksConfig
from rookery.loops.evolve.problem import FirstProgram, evaluation_spec, read_first_program
from rookery.loops.evolve.program import ProgramRecord, read_program
from rookery.loops.evolve.prompt_tasks import PromptTasks, find_form
from rookery.paths import expanded
from rookery.runs.run_folder import Find, resolve_text
from rookery.tasks.splits import SPLITS
from rookery.tasks.taskset import Taskset, load_taskset_file

if TYPE_CHECKING:
    from rookery.compose.engine_models import OwnEngine

__all__ = ["EvolveRunConfig", "Inputs", "read_inputs", "read_step_inputs", "run_config"]

OUTPUT, PROMPT_OUTPUT = "openevolve_output", "prompt_output"


class EvolveRunConfig(Config):
    """Everything an evolve run is made from."""

    program: Path
    """The first program, a file or a folder; or the first prompt, a file."""
    evaluator: Path | None = None
    """The file that scores programs. null: `settings.rookery.tasks` score a prompt."""
    output: Path
    config_file: Path | None = None
    """The file to read API keys from again: they are not stored with the run."""
    warnings: tuple[str, ...] = ()
    """Warnings about the config file."""
    extended_from: int = 0
    """Number of iterations at the run's last finish before it was extended."""
    settings: EvolveConfig


def run_config(
    loaded: LoadedConfig,
    *,
    program: Path,
    evaluator: Path | None,
    output: Path | None = None,
    config_file: Path | None = None,
    find: Find | None = None,
) -> EvolveRunConfig:
    """Return the config of a run, with absolute paths. If `find` is given, `program` and
    `evaluator` may be outputs of other runs (`run:NAME/PART`). The default output is
    `openevolve_output` beside a program, `prompt_output` beside a prompt."""
    if find is not None:
        program = Path(resolve_text(str(program), find=find, key="program"))
    if find is not None and evaluator is not None:
        evaluator = Path(resolve_text(str(evaluator), find=find, key="evaluator"))
    name = OUTPUT if evaluator is not None else PROMPT_OUTPUT
    return EvolveRunConfig(
        program=program.absolute(),
        evaluator=None if evaluator is None else evaluator.absolute(),
        output=(output or program.absolute().parent / name).absolute(),
        config_file=None if config_file is None else config_file.absolute(),
        warnings=loaded.warnings,
        settings=loaded.config,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """All inputs, checked before a worker starts or a model is asked."""

    programs: Sequence[FirstProgram | ProgramRecord]
    spec: WorkerSpec | None
    """How workers start; None for prompts."""
    tasks: PromptTasks | None = None
    """Set for prompts only."""
    engine: "OwnEngine | None"
    """Our own engine; None if none of its models is used."""
    warnings: tuple[str, ...]
    digests: Mapping[str, str]
    """Digests by name, with the evaluator's: scores of different evaluators do not compare."""


def read_inputs(config: EvolveRunConfig) -> Inputs:
    settings, section = config.settings, config.settings.rookery
    if section.tasks is not None:
        return _read_prompt_inputs(config, section.tasks)
    if config.evaluator is None:
        raise ConfigError(
            "No evaluator is named: give a Python file, or rookery.tasks to evolve a prompt."
        )
    paths = (config.program, *map(Path, section.first_programs))
    firsts = [read_first_program(path, config=settings) for path in paths]
    if not settings.llm.ensemble:
        raise ConfigError(
            "No model is named: give --primary-model NAME, write llm.models, or rookery.engine for "
            "a model of your own."
        )
    programs: list[FirstProgram | ProgramRecord] = [*firsts]
    if section.checkpoint is not None:
        programs += read_checkpoint(Path(section.checkpoint)).programs
    runs = config.output.parent
    is_inside = runs != config.evaluator.parent and runs.is_relative_to(config.evaluator.parent)
    spec = evaluation_spec(
        settings,
        evaluator=config.evaluator,
        first=firsts[0],
        output=runs if is_inside else config.output,
    )
    warnings = [warning for first in firsts for warning in first.warnings]
    if section.sandbox.backend == "none":
        warnings.append("unsafe: generated programs ran without a sandbox, with all rights")
    digests = join_digests(
        {config.program.name: _digest_program(firsts[0])},
        {config.evaluator.name: _digest_evaluator(config.evaluator)},
    )
    uses_engine = section.learn is not None or set(section.engine_models) & set(
        list_models(settings)
    )
    return Inputs(
        programs=programs,
        spec=spec,
        engine=_read_engine(section) if uses_engine else None,
        warnings=(*config.warnings, *warnings),
        digests=digests,
    )


def _read_engine(section: RookeryConfig) -> "OwnEngine":
    from rookery.compose.engine_models import read_engine  # programs need no torch

    return read_engine(section)


def _read_prompt_inputs(config: EvolveRunConfig, tasks: TasksConfig) -> Inputs:
    """Read the prompts and the taskset. Refuses prompts and tasks that do not fit."""
    from rookery.compose.engine_models import (
        read_engine,
    )  # first: its error names the missing extra

    settings, section = config.settings, config.settings.rookery
    if config.evaluator is not None:
        raise ConfigError(
            f"An evaluator is named, {config.evaluator}, and rookery.tasks scores prompts: leave "
            "one of them out."
        )
    if settings.evaluator.use_llm_feedback or section.checkpoint is not None:
        key = "rookery.checkpoint" if section.checkpoint else "evaluator.use_llm_feedback"
        raise ConfigError(f"{key} is for programs, and rookery.tasks is set: leave {key} out.")
    firsts = _read_prompts(config, settings)
    taskset = _read_prompt_taskset(tasks.taskset)
    form, warnings = find_form(firsts[0].code, taskset)
    for first in firsts:
        if problem := form.find_problem(first.code):
            raise ConfigError(f"{problem} Every first prompt names the same fields.")
    engine = read_engine(section)
    adapters, models = _list_weights(engine)
    digests = join_digests(
        {config.program.name: _digest_prompts(firsts)},
        _digest_prompt_taskset(taskset),
        adapters,
        digest_models(models),
    )
    return Inputs(
        programs=firsts,
        spec=None,
        tasks=PromptTasks(taskset=taskset, form=form),
        engine=engine,
        warnings=(*config.warnings, *warnings, *taskset.notes),
        digests=digests,
    )


def _read_prompts(config: EvolveRunConfig, settings: EvolveConfig) -> list[FirstProgram]:
    paths = (config.program, *map(Path, settings.rookery.first_programs))
    return [_read_prompt(path, settings) for path in paths]


def _read_prompt_taskset(name: str) -> Taskset:
    """Load the taskset that scores prompts. Raises TaskError for an empty required split."""
    taskset = load_taskset_file(name, with_fields=True)
    for split in SPLITS:
        taskset.split(split)
    return taskset


def read_step_inputs(config: EvolveRunConfig, is_made: IsMade) -> RunInputs:
    settings, section = config.settings, config.settings.rookery
    digests: list[Mapping[str, str]] = []
    models: Mapping[str, Path] = {}
    program, tasks = config.program, section.tasks
    if not is_made("program", "settings.rookery.first_programs"):
        first = (
            _digest_program(read_first_program(program, config=settings))
            if tasks is None
            else _digest_prompts(_read_prompts(config, settings))
        )
        digests.append({program.name: first})
    if config.evaluator is not None and not is_made("evaluator"):
        digests.append({config.evaluator.name: _digest_evaluator(config.evaluator)})
    if tasks is not None and not is_made("settings.rookery.tasks"):
        digests.append(_digest_prompt_taskset(_read_prompt_taskset(tasks.taskset)))
    parts = (f"settings.rookery.{part}" for part in ("adapters", "engine", "tokenizer"))
    if section.engine is not None and not is_made(*parts):
        adapters, folders = _list_weights(_read_engine(section))
        if tasks is not None:  # a run on programs may change its models
            digests.append(adapters)
            models = folders
    return RunInputs(digests=join_digests(*digests), models=models)


def _digest_program(first: FirstProgram) -> str:
    return digest([first.code, sorted(first.other_files.items())])


def _digest_evaluator(path: Path) -> str:
    if not path.is_file():
        raise ConfigError(f"There is no evaluator {path}: give a Python file.")
    return digest([path.read_bytes()])


def _list_weights(engine: "OwnEngine") -> tuple[dict[str, str], dict[str, Path]]:
    """Return the digest of the adapters, if any, and the model's folder."""
    adapters = engine.adapters.values()
    digests = {"adapters": digest_adapters(adapters)} if adapters else {}
    return digests, {"the model": engine.folder.path}


def _digest_prompts(firsts: Iterable[FirstProgram]) -> str:
    return digest(first.code for first in firsts)


def _digest_prompt_taskset(taskset: Taskset) -> dict[str, str]:
    rows = {taskset.name: digest([*taskset.tasks, sorted(taskset.fields.items())])}
    return join_digests(rows, digest_scorers([taskset]))


def _read_prompt(path: Path, settings: EvolveConfig) -> FirstProgram:
    if expanded(path).is_dir():
        raise ConfigError(f"{path} is a folder: a prompt is a file.")
    code = read_program(path).strip()
    if not code:
        raise ConfigError(f"The prompt {path} is empty: write what the model is told.")
    if len(code) > settings.max_code_length:
        raise ConfigError(
            f"The prompt {path} has {len(code)} characters and max_code_length is "
            f"{settings.max_code_length}: its children would be refused. Raise it."
        )
    return FirstProgram(code=code, language="text", suffix=path.suffix or ".txt")
