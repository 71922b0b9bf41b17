"""The programs that an evolution starts from: scored once, then told.

    await tell_first_programs(programs, parts=parts, state=state)

They are an event each, so that a resumed run scores none again. A first program that fails is a
mistake of the user: nothing could be compared with it, so no model is asked.
"""

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import replace

from rookery.concurrency import run_in_thread, together
from rookery.errors import ConfigError
from rookery.loops.evolve.first_program import FirstProgram
from rookery.loops.evolve.novelty import UNCOMPARED, Comparison
from rookery.loops.evolve.parts import Parts
from rookery.loops.evolve.program import ProgramRecord, has_large
from rookery.loops.evolve.program_evaluator import Lease
from rookery.loops.evolve.proposer import make_child
from rookery.loops.evolve.search_state import SearchState
from rookery.loops.evolve.stages import Evaluated, from_data, to_data
from rookery.search.programs.program import COMBINED, numeric_metrics, score_of

__all__ = [
    "FIRST_PROGRAM",
    "first_id",
    "leave_out_failed",
    "prepare_first_programs",
    "tell_first_programs",
]

FIRST_PROGRAM = "first_program"
"""The kind of their events; the key is the number."""


def first_id(number: int) -> str:
    """The id of a first program; they count from 1."""
    return f"first{number}"


def leave_out_failed(
    programs: Sequence[FirstProgram | ProgramRecord], *, features: Collection[str]
) -> list[FirstProgram | ProgramRecord]:
    """Without the programs of a checkpoint that have no score, or only OpenEvolve's marks of a
    failed evaluation: it keeps those as programs of score 0."""
    return [
        program
        for program in programs
        if isinstance(program, FirstProgram) or not _has_failed(program, features)
    ]


def _has_failed(program: ProgramRecord, features: Collection[str]) -> bool:
    metrics = numeric_metrics(program.metrics)
    is_marked = metrics.get("error") == 0.0 and COMBINED not in metrics
    return is_marked or score_of(metrics, features=features) is None


async def prepare_first_programs(
    programs: Sequence[FirstProgram | ProgramRecord], *, parts: Parts, state: SearchState
) -> list[Evaluated]:
    """What was measured of each, by this session or an earlier one."""
    credits = asyncio.Semaphore(parts.config.workers)
    return await together(
        _prepare(number, program, parts, state, credits)
        for number, program in enumerate(programs, start=1)
    )


def tell_first_programs(
    measured: Sequence[Evaluated],
    programs: Sequence[FirstProgram | ProgramRecord],
    *,
    parts: Parts,
    state: SearchState,
) -> None:
    """In their order: each on its own island, or on the one that it was on before. Where they run
    is where all programs do."""
    if any(evaluated.is_forgeable for evaluated in measured):
        parts.evaluator.isolate = False
    num_islands = parts.config.database.num_islands
    for number, (evaluated, program) in enumerate(zip(measured, programs, strict=True), start=1):
        parts.store.add(first_id(number), evaluated.program)
        earlier = program.island if isinstance(program, ProgramRecord) else None
        island = number - 1 if earlier is None else earlier
        state.tell_first(first_id(number), evaluated, island=island % num_islands)


async def _prepare(
    number: int,
    program: FirstProgram | ProgramRecord,
    parts: Parts,
    state: SearchState,
    credits: asyncio.Semaphore,
) -> Evaluated:
    known = parts.run.get(FIRST_PROGRAM, str(number))
    if known is not None:
        return from_data(Evaluated, known.payload)
    comparison = await parts.novelty.embed(program.code) if parts.novelty else UNCOMPARED
    async with credits:
        if isinstance(program, ProgramRecord):
            evaluated = await run_in_thread(_take, number, program, comparison, parts)
        else:
            evaluated = await _score(number, program, comparison, parts)
    evaluated = comparison.note_in(evaluated)
    problem = evaluated.failure.message if evaluated.failure else None
    problem = problem or state.database.problem_with(evaluated.metrics)
    if problem is not None:
        kind = f" ({evaluated.failure.kind})" if evaluated.failure else ""
        which = f"The first program {number}" if number > 1 else "The first program"
        raise ConfigError(
            f"{which} gets no score{kind}: {problem.rstrip('.')}. An evolution starts from a "
            "program that the evaluator can score: mend the program or the evaluator."
        )
    event = await parts.run.append(FIRST_PROGRAM, to_data(evaluated), key=str(number))
    return from_data(Evaluated, event.payload)


async def _score(
    number: int, program: FirstProgram, comparison: Comparison, parts: Parts
) -> Evaluated:
    record = ProgramRecord(
        id=first_id(number),
        code=program.code,
        language=program.language,
        island=(number - 1) % parts.config.database.num_islands,
        changes_description=parts.config.prompt.initial_changes_description,
    )
    child = await run_in_thread(make_child, record)
    # Attempts count from 1: the jobs of first programs are numbered below.
    lease = Lease(1 - number, _note_nothing)
    child = comparison.note_on(child)
    return await parts.evaluator.evaluate(child, lease=lease, best_score=None)


async def _note_nothing(_: Lease) -> None:
    """A first program that was not scored yet is scored again when the run resumes."""


def _take(number: int, program: ProgramRecord, comparison: Comparison, parts: Parts) -> Evaluated:
    """A program with the metrics that it was found with."""
    record = replace(program, id=first_id(number), parent_id=None, iteration=0, prompts={})
    child = comparison.note_on(make_child(replace(record, embedding=None)))
    return Evaluated(
        program=parts.store.put(child.program),
        metrics=numeric_metrics(record.metrics),
        code=child.summary,
        code_hash=child.code_hash,
        has_large_artifacts=has_large(
            record.artifacts, max_bytes=parts.config.database.artifact_size_threshold
        ),
    )
