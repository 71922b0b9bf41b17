"""Saving and reloading search state: any frozen dataclass of this package as plain JSON values.

    document = dump(population)             # dicts, lists, numbers, strings
    population = load(Population, document)  # equal to what was dumped

Floats survive `json.dumps` and `json.loads` exactly; a state never holds a NaN or an infinity.
"""

from collections.abc import Hashable, Mapping
from functools import cache
from typing import Any, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

from rookery.errors import RunError, boundary
from rookery.types import Json

__all__ = ["dump", "load"]

State = TypeVar("State")


def dump(state: object) -> dict[str, Json]:
    """The state as values that `json.dumps` takes."""
    adapter = _adapter(cast(Hashable, type(state)))
    return cast(dict[str, Json], adapter.dump_python(state, mode="json"))


def load(kind: type[State], document: Mapping[str, Json]) -> State:
    """The state that `dump` wrote; a RunError when the document is not one of this kind."""
    what = f"reading the saved search state {kind.__name__}"
    with boundary(RunError, what, foreign=(ValidationError, ValueError)):
        return cast(State, _adapter(cast(Hashable, kind)).validate_python(document))


@cache
def _adapter(kind: Hashable) -> TypeAdapter[Any]:
    """Kept per class: building one takes longer than using it."""
    return TypeAdapter(cast(type[Any], kind))
