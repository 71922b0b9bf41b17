"""The best candidates, without chance.

elites([0.2, None, 0.9], count=1) == (2,)
"""

from collections.abc import Sequence

__all__ = ["elites"]


def elites(scores: Sequence[float | None], *, count: int) -> tuple[int, ...]:
    """Indices of the best `count`, best first, the earlier one on a tie.

    Failed candidates are left out, unless every candidate failed: then the first ones stand in,
    so that a population never becomes empty.
    """
    alive = [index for index, score in enumerate(scores) if score is not None]
    if not alive:
        return tuple(range(min(count, len(scores))))
    return tuple(sorted(alive, key=lambda index: -_value(scores[index]))[:count])


def _value(score: float | None) -> float:
    assert score is not None
    return score
