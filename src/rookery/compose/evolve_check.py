"""`check_evolve`: whether an evolution would start, found out without starting one."""

import os
import time
from collections.abc import Mapping
from functools import partial

from rookery.compat.openevolve import LoadedConfig
from rookery.compose.evolve import open_executor
from rookery.compose.evolve_inputs import EvolveProblem, read_inputs, run_config
from rookery.compose.proposers import open_config_embedder, open_models
from rookery.compose.running import run_async
from rookery.errors import SandboxError
from rookery.fleet.http.external import ExternalEmbedder
from rookery.loops.evolve.problem import (
    FORGEABLE,
    EvaluationRequest,
    FirstProgram,
    say_not_isolated,
)
from rookery.loops.evolve.search_state import search_config
from rookery.ports import Executor, TextModel
from rookery.sandbox import EvaluationOutcome, decode_outcome
from rookery.search.programs.program import numeric_metrics
from rookery.types import Job, JobDone, Message, TextRequest
from rookery.ui.display import Display

__all__ = ["check_evolve"]

ASKED = "Reply with the one word: ready"
INSTEAD = (
    "It needs {needed} on an object of the program. Take plain values from the program (numbers, "
    "text, lists, dicts, numpy arrays), and compute with those."
)
"""What an evaluator does that cannot be done from another process than the program's."""
MAX_STAGES = 3
MARGIN_S = 60.0
"""Beyond the evaluator's own limits: then its worker is lost."""


def check_evolve(problem: EvolveProblem, loaded: LoadedConfig, display: Display) -> list[str]:
    """A line for the sandbox, each first program and each model. The first thing that does not
    work is a RookeryError that says so."""
    return run_async(_check(problem, loaded, display))


async def _check(problem: EvolveProblem, loaded: LoadedConfig, display: Display) -> list[str]:
    config = loaded.config
    config = config.model_copy(update={"rookery": config.rookery.model_copy(update={"workers": 1})})
    inputs = read_inputs(run_config(problem, loaded), config)
    limit_s = MAX_STAGES * config.evaluator.timeout + MARGIN_S
    display.note(inputs.warnings)
    assert inputs.spec is not None, "an evaluator is named"
    async with open_executor(config, inputs.spec, display) as executor:
        lines = [f"workers: {worker.name} {worker.about}" for worker in executor.workers]
        firsts = [each for each in inputs.programs if isinstance(each, FirstProgram)]
        for number, program in enumerate(firsts):
            isolate = config.rookery.sandbox.isolate
            score = partial(_score, program, number, executor, limit_s=limit_s)
            outcome = await score(isolate=isolate != "never")
            needed = outcome.unsupported
            if needed and isolate == "auto":
                outcome = await score(isolate=False)
            _require_score(outcome)
            problem_with = search_config(config).problem_with(numeric_metrics(outcome.metrics))
            if problem_with is not None:
                raise SandboxError(f"The first program cannot be used. {problem_with}")
            lines.append(_describe(outcome))
            if outcome.is_forgeable:
                display.note([FORGEABLE, *([INSTEAD.format(needed=needed)] if needed else [])])
        async with open_models(config, display) as opened:
            lines += await _ask(opened.models)
            if config.rookery.learn is not None:
                lines.append(
                    f"learn: the engine takes adapters of rank {config.rookery.learn.rank}"
                )
        async with open_config_embedder(config, environment=os.environ) as embedder:
            if embedder is not None:
                lines.append(await _embed(embedder))
    return lines


async def _score(
    program: FirstProgram, number: int, executor: Executor, *, limit_s: float, isolate: bool
) -> EvaluationOutcome:
    payload = EvaluationRequest(code=program.code, isolate=isolate).encode()
    job = Job(attempt=number, epoch=int(not isolate), payload=payload, limit_s=limit_s)
    ended = await executor.submit(job)
    if not isinstance(ended, JobDone):
        raise SandboxError(f"The first program could not be scored: {ended}.")
    return decode_outcome(ended.output)


def _require_score(outcome: EvaluationOutcome) -> None:
    if outcome.unsupported:
        raise SandboxError(say_not_isolated(outcome))
    if outcome.failure is not None:
        failure = outcome.failure
        told = f"\n{outcome.output_tail}" if outcome.output_tail.strip() else ""
        raise SandboxError(
            f"The first program fails ({failure.kind}): {failure.reason} An evolution starts from "
            f"a program that the evaluator can score.{told}"
        )


def _describe(outcome: EvaluationOutcome) -> str:
    metrics = ", ".join(f"{name} {value}" for name, value in outcome.metrics.items())
    return f"first program: {metrics} ({outcome.seconds:.1f} s)"


async def _embed(embedder: ExternalEmbedder) -> str:
    begin = time.perf_counter()
    vector = await embedder.embed(ASKED)
    seconds = time.perf_counter() - begin
    return f"embedding model {embedder.config.model}: {len(vector)} numbers ({seconds:.1f} s)"


async def _ask(models: Mapping[str, TextModel]) -> list[str]:
    lines = []
    request = TextRequest(messages=(Message(role="user", content=ASKED),), max_tokens=256)
    for name, model in models.items():
        begin = time.perf_counter()
        reply = await model.reply(request)
        seconds = time.perf_counter() - begin
        lines.append(f"model {name}: {' '.join(reply.text.split())[:60]!r} ({seconds:.1f} s)")
    return lines
