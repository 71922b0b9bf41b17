"""Python's garbage collection while thousands of answers wait for the last one.

By default it looks for cycles after every 700 new objects, which a few answers are, and through all
that wait in the end: a fifth of what a request costs here.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["OBJECTS", "collected_rarely"]

OBJECTS = 50_000
"""New objects between two collections."""


@contextmanager
def collected_rarely() -> Iterator[None]:
    """Collect less often inside the block, unless it is rarer already or off."""
    before = gc.get_threshold()
    if before[0] == 0 or before[0] >= OBJECTS:
        yield
        return
    gc.set_threshold(OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
