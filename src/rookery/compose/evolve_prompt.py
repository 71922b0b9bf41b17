"""`evolve_prompt`: a prompt evolved on tasks, and measured on tasks that the search never saw.

    outcome = evolve_prompt("prompt.txt", "tasks.jsonl", "smollm2", max_iterations=50)
    outcome.report.tasks.rows[0].gain, outcome.path / "best"

A run of kind evolve, with a prompt as its program: the folder, resuming, the report and the page
are those of an evolution of programs.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rookery.compat.openevolve import Flags, read_config
from rookery.compose.engine_models import digest_engine
from rookery.compose.evolve import (
    RUNS,
    EvolveProblem,
    EvolveRunConfig,
    Inputs,
    resolve_problem,
    start,
)
from rookery.compose.running import Outcome, digest, digest_scorers, join_digests, merge
from rookery.errors import ConfigError
from rookery.loops.evolve.config import EvolveConfig
from rookery.loops.evolve.problem import FirstProgram
from rookery.loops.evolve.program import read_program
from rookery.loops.evolve.prompt_tasks import PromptTasks, find_form
from rookery.paths import expanded
from rookery.reports import EvolveReport
from rookery.runs.run_folder import in_folder
from rookery.tasks.splits import SPLITS
from rookery.tasks.taskset import load_taskset_file
from rookery.ui.display import Display

__all__ = ["evolve_prompt", "read_prompt_inputs"]


def evolve_prompt(
    prompt: str | Path,
    taskset: str | Path,
    model: str | Path,
    config: str | Path | Mapping[str, Any] | None = None,
    *,
    output: str | Path | None = None,
    progress: bool = True,
    **values: Any,
) -> Outcome[EvolveReport]:
    """Evolve the prompt of a file on a taskset, with the model that answers, and proposes too
    unless `llm` names another.

    `values` are keys of the config: `max_iterations=50, rookery={"tasks": {"minibatch": 8}}`.
    """
    section = {"engine": {"model": str(model)}, "tasks": {"taskset": str(taskset)}}
    file = Path(config) if isinstance(config, str | Path) else None
    source = file if file is not None or not isinstance(config, Mapping) else config
    values = merge({"rookery": section}, values)
    if values["rookery"]["engine"].get("type") == "service":
        values["rookery"].setdefault("tokenizer", str(model))
    find = in_folder(RUNS)
    loaded = read_config(source, environment=os.environ, flags=Flags(values=values), find=find)
    problem = EvolveProblem(
        program=Path(prompt),
        evaluator=None,
        output=None if output is None else Path(output),
        config_file=file,
    )
    return start(resolve_problem(problem, find=find), loaded, Display(is_quiet=not progress))


def read_prompt_inputs(config: EvolveRunConfig, settings: EvolveConfig) -> Inputs:
    """Read the prompts and the taskset, and refuse what cannot be asked."""
    section = settings.rookery
    assert section.tasks is not None
    if config.evaluator is not None:
        raise ConfigError(
            f"An evaluator is named, {config.evaluator}, and rookery.tasks scores prompts: leave "
            "one of them out."
        )
    if settings.evaluator.use_llm_feedback or section.checkpoint is not None:
        key = "rookery.checkpoint" if section.checkpoint else "evaluator.use_llm_feedback"
        raise ConfigError(f"{key} is for programs, and rookery.tasks is set: leave {key} out.")
    firsts = [
        _read_prompt(path, settings)
        for path in (config.program, *map(Path, section.first_programs))
    ]
    taskset = load_taskset_file(section.tasks.taskset, with_fields=True)
    for split in SPLITS:
        taskset.split(split)
    form, warnings = find_form(firsts[0].code, taskset)
    for first in firsts:
        if problem := form.find_problem(first.code):
            raise ConfigError(f"{problem} Every first prompt names the same fields.")
    digests = join_digests(
        {config.program.name: digest(first.code for first in firsts)},
        {taskset.name: digest([*taskset.tasks, sorted(taskset.fields.items())])},
        digest_scorers([taskset]),
        digest_engine(section),
    )
    return Inputs(
        programs=firsts,
        spec=None,
        tasks=PromptTasks(taskset=taskset, form=form),
        warnings=(*config.warnings, *warnings, *taskset.notes),
        digests=digests,
    )


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
