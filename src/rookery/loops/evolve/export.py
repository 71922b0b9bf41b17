"""The population of a run as text without clocks: equal for runs that found the same.

    text = export(run)

One line of JSON per attempt in the order of decisions, with the program or the failure, after the
first programs. Two deterministic runs of one config give the same bytes, whatever the number of
workers and however often they were killed.
"""

import json
from collections.abc import Iterator
from typing import Any

from rookery.loops.evolve.first_programs import FIRST_PROGRAM, first_id
from rookery.loops.evolve.search_state import program_id
from rookery.loops.evolve.stages import Evaluated, Stages, from_data, read_stages
from rookery.runs import RunView

__all__ = ["export"]


def export(run: RunView) -> str:
    """Reads all programs: call it in a thread."""
    lines = [*_first_programs(run), *_attempts(run)]
    return "".join(json.dumps(line, sort_keys=True) + "\n" for line in lines)


def _first_programs(run: RunView) -> Iterator[dict[str, Any]]:
    events = sorted(run.events(FIRST_PROGRAM), key=lambda event: int(event.key))
    for event in events:
        evaluated = from_data(Evaluated, event.payload)
        yield {"id": first_id(int(event.key)), **_program(run, evaluated)}


def _attempts(run: RunView) -> Iterator[dict[str, Any]]:
    known, decided = read_stages(run)
    for number in decided:
        yield _line(run, number, known[number])


def _line(run: RunView, number: int, stages: Stages) -> dict[str, Any]:
    planned, evaluated, decision = stages.planned, stages.evaluated, stages.decision
    assert planned is not None and decision is not None
    plan = planned.plan
    line: dict[str, Any] = {
        "iteration": number,
        "island": plan.island,
        "parent": plan.parent,
        "inspirations": plan.inspirations,
        "top": plan.top,
        "model": plan.arm,
        "generation": plan.generation,
    }
    if decision.failure is not None:
        failure = {"kind": decision.failure.kind, "message": decision.failure.message}
        return line | {"failure": failure}
    assert evaluated is not None
    return line | {"id": program_id(number), **_program(run, evaluated)}


def _program(run: RunView, evaluated: Evaluated) -> dict[str, Any]:
    document = json.loads(run.blobs.read_bytes(evaluated.program))
    names = ("code", "metrics", "changes_description")
    return {name: document[name] for name in names}
