"""A resumed run repeats its search; what does not come out as before is refused by name.

check_repeated(run, "candidate", "g001-c03", {"version": adapter.version})
"""

import json
from collections.abc import Mapping

from rookery.errors import RunError
from rookery.runs import Run

__all__ = ["check_repeated"]


def check_repeated(run: Run, kind: str, key: str, values: Mapping[str, object]) -> None:
    """RunError unless these values are those that the run recorded, if it recorded any."""
    first = run.get(kind, key)
    if first is None:
        return
    for name, now in values.items():
        before = first.payload.get(name)
        if before != now:
            raise RunError(
                f"The run cannot be resumed here: {name} of {kind} {key} was {_show(before)} when "
                f"the run was made, and comes out as {_show(now)}. {_reason(first.payload)}"
            )


def _reason(payload: Mapping[str, object]) -> str:
    if payload.get("operator") == "founder":
        return "It is a founder: restore its files."
    return (
        "Children are computed again, and their last bits depend on the CPU, the version of torch "
        "and the number of threads: resume the run where it was made, or start a new one."
    )


def _show(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."
