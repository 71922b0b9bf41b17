"""A document: JSON text that every parser reads, and that reads back as what was written.

    encode({"score": 0.5}, what="the report")     '{"score": 0.5}'
    encode({"score": math.nan}, what="the report")
    RunError: the report: ["score"] is nan; JSON has only finite numbers: write null, or say in ...

Python's own encoder writes NaN and turns the key 1 into "1" without a word; both are refused here.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

from rookery.errors import RunError

__all__ = ["canonical", "decode", "encode", "is_utf8"]


def encode(value: object, *, what: str, indent: int | None = None) -> str:
    """JSON text of dicts, lists, tuples (read back as lists), text, numbers, booleans and None."""
    try:
        _check(value, what, "")
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


def _check(value: object, what: str, where: str) -> None:
    """Refuse, by place, what JSON cannot hold: `where` is '["scores"][3]'."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise RunError(
                    f"{what}: the key {key!r}{_inside(where)} is {type(key).__name__}; "
                    f"keys are text: write str(key)."
                )
            _check(item, what, f'{where}["{key}"]')
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check(item, what, f"{where}[{index}]")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise RunError(
                f"{what}: {where or 'it'} is {value}; JSON has only finite numbers: "
                "write null, or say in text why there is no number."
            )
    elif value is not None and not isinstance(value, str | int):
        raise RunError(f"{what}: {where or 'it'} is {_type_name(value)}; {_remedy(value)}.")


def _inside(where: str) -> str:
    return f" of {where}" if where else ""


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
