"""The answers of a run that improved a program, as rows that `rookery sft` takes.

    text = export_training_data(run, features=config.database.feature_dimensions)

A row is a chat: the prompt with the parent and its metrics, then the answer whose child scored
higher than the parent. An adapter trained on it proposes as the model did when it was right.
"""

import json
from collections.abc import Collection
from typing import Any

from rookery.loops.evolve.search_state import program_id
from rookery.loops.evolve.stages import Stages, read_stages
from rookery.runs import RunView
from rookery.search.programs.program import score_of

__all__ = ["export_training_data"]


def export_training_data(run: RunView, *, features: Collection[str]) -> str:
    """A line of JSON per answer, in the order of decisions. Reads files: call it in a thread."""
    known, decided = read_stages(run)
    rows = (_row(run, number, known[number], features) for number in decided)
    return "".join(json.dumps(row) + "\n" for row in rows if row is not None)


def _row(
    run: RunView, number: int, stages: Stages, features: Collection[str]
) -> dict[str, Any] | None:
    """None for an attempt that failed or is no better than its parent."""
    planned, generated, evaluated = stages.planned, stages.generated, stages.evaluated
    assert planned is not None and generated is not None and stages.decision is not None
    if stages.decision.failure is not None or evaluated is None:
        return None
    score = score_of(evaluated.metrics, features=features)
    if score is None or score <= planned.plan.parent_score:
        return None
    exchange = json.loads(run.blobs.read_bytes(generated.answer))
    roles = {"system": "system", "user": "user", "answer": "assistant"}
    return {
        "id": f"{run.name}-{program_id(number)}",
        "messages": [{"role": role, "content": exchange[name]} for name, role in roles.items()],
        "score": score,
        "parent_score": planned.plan.parent_score,
        "model": planned.plan.arm,
    }
