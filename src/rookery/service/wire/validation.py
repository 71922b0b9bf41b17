"""Long lists of requests, validated in slices with room for other threads between them.

    tokens: Annotated[list[int], IN_SLICES] = []

Pydantic holds the interpreter while it validates a list, in whatever thread it is called, and makes
an error of every wrong item: of some millions of items, for half a minute.
"""

from itertools import chain
from typing import Any

from pydantic import ValidationError, ValidatorFunctionWrapHandler, WrapValidator

__all__ = ["IN_SLICES"]

SLICE = 1024


def _validate(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    """Ends at the first slice that has something wrong."""
    if not isinstance(value, list | tuple) or len(value) <= SLICE:
        return handler(value)
    parts = []
    for start in range(0, len(value), SLICE):
        try:
            parts.append(handler(value[start : start + SLICE]))
        except ValidationError as error:
            first = error.errors()[0]
            place, *inner = first["loc"] or (0,)
            where = ".".join(map(str, (start + int(place), *inner)))
            raise ValueError(f"item {where}: {first['msg']}") from error
    return type(parts[0])(chain.from_iterable(parts))


IN_SLICES = WrapValidator(_validate)
"""Of a list or a tuple."""
