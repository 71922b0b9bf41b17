"""Which values of a run's config changed, and whether they may: a finished run can be extended.

    find_changes({"steps": 100, "seed": 1}, {"steps": 200, "seed": 1})    {"steps": (100, 200)}
    check_changes(changes, may_change=["steps", "stages.*.generations"])

A run has one config, as its result is a function of it. The few values that only say how far to go,
which the loop names, may change when the run is opened again.
"""

import fnmatch
import json
from collections.abc import Collection, Mapping
from typing import Any

from rookery.errors import RunError

__all__ = ["Changes", "check_changes", "find_changes"]

Changes = dict[str, tuple[Any, Any]]
"""Dotted key -> (value of the run, value now)."""


def find_changes(old: Mapping[str, Any], new: Mapping[str, Any], *, prefix: str = "") -> Changes:
    """The values that differ. A key that one of them lacks counts as None there."""
    changes: Changes = {}
    for name in {**old, **new}:  # in their order
        key, before, after = f"{prefix}{name}", old.get(name), new.get(name)
        if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
            before, after = _by_index(before), _by_index(after)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            changes |= find_changes(before, after, prefix=f"{key}.")
        elif before != after or type(before) is not type(after):
            changes[key] = (before, after)
    return changes


def check_changes(changes: Changes, *, may_change: Collection[str]) -> None:
    """Raise a RunError that names the values that may not change; names may have a `*`."""
    refused = {
        key: pair
        for key, pair in changes.items()
        if not any(fnmatch.fnmatchcase(key, pattern) for pattern in may_change)
    }
    if refused:
        listed = "; ".join(
            f"{key} is {_show(old)} there, {_show(new)} here" for key, (old, new) in refused.items()
        )
        allowed = f"Only {', '.join(sorted(may_change))} may" if may_change else "None of it may"
        raise RunError(
            f"The run was made with another config: {listed}. {allowed} change when a run goes "
            "on: take the old values, or start a new run."
        )


def _by_index(values: list[Any]) -> dict[str, Any]:
    return {str(index): value for index, value in enumerate(values)}


def _show(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
