"""`rookery evolve run | prompt | check | export`: evolves programs and prompts with a model."""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import cyclopts
from cyclopts import Parameter

from rookery.cli.terminal import check_flags, console, display, log_warnings, print_outcome
from rookery.errors import ConfigError, RunError
from rookery.paths import expanded
from rookery.runs.run_folder import in_folder

if TYPE_CHECKING:
    from rookery.compat.openevolve import LoadedConfig
    from rookery.compose.evolve_inputs import EvolveRunConfig

__all__ = ["evolve"]

evolve = cyclopts.App(name="evolve", help="Evolve programs with a language model.")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ModelFlags:
    """The config file, and the models to ask."""

    config: Annotated[Path | None, Parameter(name=("--config", "-c"))] = None
    """A YAML file in OpenEvolve's format."""
    api_base: str | None = None
    """The URL of a server with OpenAI's API, up to /v1, for all models."""
    primary_model: str | None = None
    """The model to ask, in place of those in the config."""
    secondary_model: str | None = None
    """A second model, asked one time in six."""
    log_level: Annotated[
        Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"] | None,
        Parameter(name=("--log-level", "-l")),
    ] = None
    """The lowest level in the run's log file."""
    unsafe: Annotated[bool, Parameter(negative="")] = False
    """Run generated programs without a sandbox, with all your rights."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class RunFlags:
    """The length of the run, and its folder."""

    output: Annotated[Path | None, Parameter(name=("--output", "-o"))] = None
    """The folder of the run; by default `openevolve_output` beside the program, or
    `prompt_output` beside a prompt."""
    iterations: Annotated[int | None, Parameter(name=("--iterations", "-i"))] = None
    """How many programs to try. A finished run tries this many more."""
    target_score: Annotated[float | None, Parameter(name=("--target-score", "-t"))] = None
    """End the run when a program reaches this score."""
    checkpoint: Path | None = None
    """A checkpoint folder, of OpenEvolve or Rookery, with the first population."""
    resume: Annotated[bool, Parameter(negative="")] = False
    """Resume the run in the output folder."""
    max_tokens: int | None = None
    """Maximum tokens of prompts and answers."""
    max_usd: float | None = None
    """Maximum cost in US dollars, by the prices in rookery.budget."""
    max_hours: float | None = None
    """Maximum hours. Earlier sessions count up to their last decision."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class PlaceFlags:
    """The executor, and its concurrency."""

    executor: Literal["local", "ray", "modal"] | None = None
    """Where programs are scored: local processes, a Ray cluster, or Modal."""
    distributed: Annotated[bool, Parameter(negative="")] = False
    """The same as --executor ray."""
    address: str | None = None
    """The address of the Ray cluster; by default one is started here."""
    in_flight: int | None = None
    """Maximum concurrent model calls."""
    workers: int | None = None
    """Maximum concurrent evaluations."""
    mode: Literal["steady", "deterministic"] | None = None
    """deterministic: the population does not depend on the number of workers."""


_OWN = (
    "config", "output", "iterations", "target_score", "log_level", "checkpoint", "api_base",
    "primary_model", "secondary_model", "distributed", "executor", "address", "in_flight",
    "workers", "mode", "resume", "unsafe", "max_tokens", "max_usd", "max_hours", "taskset", "model",
    "fleet",
)  # fmt: skip
_MODEL, _RUN, _PLACE = ModelFlags(), RunFlags(), PlaceFlags()
Words = Annotated[str, Parameter(allow_leading_hyphen=True, show=False)]


@evolve.command
def run(
    program: Path,
    evaluator: Path,
    *overrides: Words,
    models: ModelFlags = _MODEL,
    length: RunFlags = _RUN,
    place: PlaceFlags = _PLACE,
) -> int:
    """Evolve a program under an evaluator, both in OpenEvolve's format.

    Any value of the config is a flag with a dotted name. OUTPUT/best always holds the best program
    so far. To resume an interrupted run, repeat the command with --resume.

        rookery evolve run initial_program.py evaluator.py -c config.yaml -i 100
        rookery evolve run program/ evaluator.py --primary-model big --api-base http://gpu1:8000/v1
        rookery evolve run initial_program.py evaluator.py --distributed --workers 64

    Parameters
    ----------
    program
        A file, or a folder whose files with EVOLVE-BLOCK markers, or all files, are evolved.
    evaluator
        A Python file with `evaluate(program_path)`. Its folder is visible in the sandbox.
    """
    log_warnings()
    loaded = _load(overrides, models, length, place)
    return _run(_config(loaded, models, program, evaluator, output=length.output), length)


@evolve.command
def prompt(
    prompt: Path,
    *overrides: Words,
    taskset: str | None = None,
    model: str | None = None,
    fleet: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    models: ModelFlags = _MODEL,
    length: RunFlags = _RUN,
    place: PlaceFlags = _PLACE,
) -> int:
    """Evolve a prompt on a taskset, with separate tasks for search, selection and report.

    The model answers the tasks, and proposes prompts too unless --primary-model names another. A
    `{{ field }}` in the prompt is replaced by the task's value. A prompt without one is the system
    message. OUTPUT/best holds the selected prompt.

        rookery evolve prompt prompt.txt --taskset tasks.jsonl --model smollm2 -i 50
        rookery evolve prompt prompt.txt --taskset tasks.jsonl --model Qwen/Qwen3-8B \
            --fleet http://gpu1:8000 --primary-model big --api-base https://api.openai.com/v1

    Parameters
    ----------
    prompt
        A text file.
    taskset
        A file of rows (FILE?KEY=VALUE), a .yaml or .toml taskset, hf://datasets/ID, generated:NAME.
    model
        The model that answers: a Hugging Face id, a local folder, or `smollm2`.
    fleet
        URLs of vLLM servers with this model, each with its own --fleet.
    """
    log_warnings()
    words = list(_task_words(taskset, model, fleet))
    loaded = _load([*overrides, *words], models, length, place)
    if loaded.config.rookery.tasks is None:
        raise ConfigError(
            "No tasks are named: give --taskset FILE, or rookery.tasks in the config."
        )
    return _run(_config(loaded, models, prompt, output=length.output), length)


def _task_words(taskset: str | None, model: str | None, fleet: Sequence[str]) -> Iterator[str]:
    """Return config flags for the arguments of `evolve prompt`."""
    if taskset is not None:
        file = expanded(taskset.partition("?")[0])
        here = f"{Path.cwd()}/" if file.exists() and not file.is_absolute() else ""
        yield f"--rookery.tasks.taskset={here}{taskset}"
    if fleet:
        yield "--rookery.engine.type=fleet"
        yield f"--rookery.engine.urls={json.dumps(list(fleet))}"
    if model is not None:
        yield f"--rookery.tokenizer={model}" if fleet else f"--rookery.engine.model={model}"


@evolve.command
def check(
    program: Path,
    evaluator: Path,
    *overrides: Words,
    models: ModelFlags = _MODEL,
    place: PlaceFlags = _PLACE,
) -> int:
    """Score the first program in the sandbox, and ask every model once. Nothing is stored.

        rookery evolve check initial_program.py evaluator.py -c config.yaml

    Parameters
    ----------
    program
        As for `evolve run`.
    evaluator
        As for `evolve run`.
    """
    from rookery.compose.evolve import check_evolve

    log_warnings()
    loaded = _load(overrides, models, _RUN, place)
    display.note(loaded.warnings)
    for line in check_evolve(_config(loaded, models, program, evaluator), display):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return 0


@evolve.command
def export(path: Path, out: Path | None = None, *, training_data: Path | None = None) -> None:
    """Write a run's population, its training data, or both as JSON lines.

    The population has every program and failure, without timestamps: two deterministic runs of one
    config give the same bytes. `rookery sft` takes the training data.

        rookery evolve export openevolve_output population.jsonl
        rookery evolve export openevolve_output --training-data wins.jsonl

    Parameters
    ----------
    path
        The run's folder.
    out
        The .jsonl file for the population.
    training_data
        The .jsonl file for prompts and the answers that improved a program.
    """
    from rookery.loops.evolve.report import export_population, export_training_data
    from rookery.runs import Run

    if out is None and training_data is None:
        raise ConfigError(
            "No file is named: write `evolve export RUN FILE.jsonl`, or --training-data FILE."
        )
    with Run.view(path) as view:
        if view.kind != "evolve":
            raise RunError(f"{path} is a run of kind {view.kind!r}, not of evolve.")
        if out is not None:
            _write_lines(out, export_population(view), what="programs and failures")
        if training_data is not None:
            features = view.config["settings"]["database"]["feature_dimensions"]
            rows = export_training_data(view, features=features)
            if not rows:
                raise RunError(
                    f"No answer of {path} improved a program: there is nothing to learn."
                )
            _write_lines(training_data, rows, what="answers that improved a program")


def _write_lines(out: Path, text: str, *, what: str) -> None:
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunError(f"{out} cannot be written: {error}") from error
    num_lines = text.count("\n")
    console.print(f"{num_lines} {what} written to {out}", markup=False)


def _load(
    overrides: Sequence[str], models: ModelFlags, length: RunFlags, place: PlaceFlags
) -> "LoadedConfig":
    """Read the config file with the flags and the environment applied."""
    from rookery.compat.openevolve import Flags, read_config
    from rookery.loops.evolve.config import EvolveConfig

    check_flags(overrides, fields=EvolveConfig.model_fields, own_flags=_OWN)
    if place.distributed and place.executor not in (None, "ray"):
        raise ConfigError(f"--distributed is --executor ray, and {place.executor} is named too.")
    checkpoint = length.checkpoint
    section = {
        "executor": "ray" if place.distributed else place.executor,
        "address": place.address,
        "in_flight": place.in_flight,
        "workers": place.workers,
        "mode": place.mode,
        "checkpoint": None if checkpoint is None else expanded(checkpoint).absolute(),
        "sandbox.backend": "none" if models.unsafe else None,
        "budget.max_tokens": length.max_tokens,
        "budget.max_usd": length.max_usd,
        "budget.max_hours": length.max_hours,
    }
    words = [f"--rookery.{key}={value}" for key, value in section.items() if value is not None]
    flags = Flags(
        iterations=length.iterations,
        target_score=length.target_score,
        log_level=models.log_level,
        api_base=models.api_base,
        primary_model=models.primary_model,
        secondary_model=models.secondary_model,
        overrides=[*overrides, *words],
    )
    return read_config(
        models.config, environment=os.environ, flags=flags, find=in_folder(Path("runs"))
    )


def _config(
    loaded: "LoadedConfig",
    models: ModelFlags,
    program: Path,
    evaluator: Path | None = None,
    *,
    output: Path | None = None,
) -> "EvolveRunConfig":
    from rookery.compose.evolve_inputs import run_config

    return run_config(
        loaded, program=program, evaluator=evaluator, output=output, config_file=models.config,
        find=in_folder(Path("runs")),
    )  # fmt: skip


def _run(config: "EvolveRunConfig", length: RunFlags) -> int:
    """Start a run, or resume it: with --resume, or with -i if it has finished."""
    from rookery.compose.evolve import read_status, resume, start

    is_longer = length.iterations is not None and read_status(config.output) == "finished"
    if not (length.resume or is_longer):
        return print_outcome(start(config, display))
    if length.checkpoint is not None and config.evaluator is not None:
        raise ConfigError("--checkpoint begins a new run: leave it out, or give another -o.")
    return print_outcome(resume(config, display, iterations=length.iterations))
