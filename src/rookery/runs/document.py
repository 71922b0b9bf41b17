"""A document: JSON text that every parser reads, and that reads back as what was written.

    encode({"score": 0.5}, what="the report")     '{"score": 0.5}'
    encode({"score": math.nan}, what="the report")
    RunError: the report: ["score"] is nan; JSON has only finite numbers: write null, or say in ...

Python's own encoder writes NaN and silently turns the key 1 into "1"; both are refused here.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

from rookery.errors import RunError

__all__ = ["canonical", "decode", "encode", "is_utf8"]

PLAIN = frozenset({str, int, bool, type(None)})
"""Types that need no look: payloads are mostly these, and the look is on every append."""


def encode(value: object, *, what: str, indent: int | None = None) -> str:
    """JSON text of dicts, lists, tuples (read back as lists), text, numbers, booleans and None."""
    try:
        if found := _problem(value):
            raise RunError(f"{what}: {found[0] or 'it'} {found[1]}.")
        text = json.dumps(value, allow_nan=False, ensure_ascii=False, indent=indent)
    except RecursionError:
        raise RunError(f"{what}: it is nested too deeply or contains itself.") from None
    except ValueError as error:
        raise RunError(f"{what}: {error}. Write the number as text.") from None
    # Half a surrogate pair, as in text decoded with "surrogateescape", has no UTF-8: escape it.
    return text if is_utf8(text) else json.dumps(value, allow_nan=False, indent=indent)


def decode(text: str | bytes, *, what: str) -> Any:
    """The value of a document. Text that does not parse is a RunError, as `what` is damaged."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RunError(
            f"{what} is damaged ({error}): restore it from a copy, or start a new run."
        ) from error


def canonical(text: str) -> str:
    """One spelling per value: {"a": 1, "b": 2} equals {"b": 2, "a": 1}; 1 and 1.0 differ."""
    return json.dumps(json.loads(text), sort_keys=True)


def is_utf8(text: str) -> bool:
    """Whether every character can be stored: half of a surrogate pair cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _problem(value: object) -> tuple[str, str] | None:
    """What JSON cannot hold, and where: ('["scores"][3]', "is nan; ..."). None if all is well."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                kind = type(key).__name__
                return "", f"has the key {key!r} ({kind}); keys are text: write str(key)"
            if type(item) not in PLAIN and (problem := _problem(item)):
                return f'["{key}"]{problem[0]}', problem[1]
    elif isinstance(value, list | tuple):
        if _is_plain(value):
            return None
        for index, item in enumerate(value):
            if type(item) not in PLAIN and (problem := _problem(item)):
                return f"[{index}]{problem[0]}", problem[1]
    elif isinstance(value, float):
        if not math.isfinite(value):
            remedy = "write null, or say in text why there is no number"
            return "", f"is {value}; JSON has only finite numbers: {remedy}"
    elif value is not None and not isinstance(value, str | int):
        return "", f"is {_type_name(value)}; {_remedy(value)}"
    return None


def _is_plain(values: list[Any] | tuple[Any, ...]) -> bool:
    """Whether all is well at a glance, as with the long lists of numbers that most of it is."""
    kinds = set(map(type, values))
    # A sum of floats is finite only if all of them are.
    return kinds <= PLAIN or (kinds == {float} and math.isfinite(sum(values)))


def _type_name(value: object) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def _remedy(value: object) -> str:
    if isinstance(value, bytes | bytearray):
        return "store bytes with blobs.put_bytes and write their digest"
    if isinstance(value, Mapping):
        return "write dict(...)"
    return (
        "allowed are dict, list, text, numbers, booleans and None: write float(...), list(...) or "
        "dataclasses.asdict(...)"
    )
