"""The numbers of a program tuned by CMA-ES, without a model (`rookery.tune`).

    constants = lift_constants(code)                  # those of its EVOLVE blocks
    write_constants(code, constants, [0.31, 12.0])    # the same program with other numbers
    search = NumberSearch(constants, seed=7)
    for values in search.ask(): ...
    search.tell([0.4, None, ...])                     # None: the program failed

A tuning is an attempt of its own: its parent is a new best program, its child the same program with
better numbers. Constants stay where they are written, so that names and layout are kept.
"""

import ast
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rookery.loops.evolve.answers import evolve_blocks, find_marker_problem
from rookery.search.es import Cmaes, CmaesConfig
from rookery.search.fitness import Fitness

__all__ = ["TUNE", "Constant", "NumberSearch", "lift_constants", "write_constants"]

TUNE = "tune"
"""The operator of a tuning's plan."""
MAX_CONSTANTS = 40
"""The first ones: with more, a few dozen evaluations tell nothing."""
STEP = 0.2
"""The first steps, as a part of a number's size."""
SMALLEST_SIZE = 0.1
STRUCTURAL = frozenset({0, 1, 2})
"""Whole numbers that say how a program works rather than how much."""
DIGITS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """A number in a program: where its text begins and ends."""

    start: int
    end: int
    value: float
    is_whole: bool

    def at(self, steps: float) -> float:
        """The number so many first steps away."""
        size = max(abs(self.value), SMALLEST_SIZE)
        moved = self.value + steps * (max(1.0, STEP * size) if self.is_whole else STEP * size)
        return float(round(moved)) if self.is_whole else moved

    def show(self, value: float) -> str:
        text = str(int(value)) if self.is_whole else f"{value:.{DIGITS}g}"
        if not self.is_whole and not {".", "e"} & set(text):
            text += ".0"
        return f"({text})" if value < 0 else text


def lift_constants(code: str) -> tuple[Constant, ...]:
    """The numbers of a Python program's EVOLVE blocks, or of all of it where there are none.

    Indices, and whole numbers up to 2, stay as they are. None of a program that is no Python.
    """
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError):
        return ()
    starts = _line_starts(code)
    lines = _open_lines(code)
    constants = [
        _constant(node, starts) for node in _numbers(tree) if lines is None or node.lineno in lines
    ]
    return tuple(sorted(constants, key=lambda one: one.start)[:MAX_CONSTANTS])


def write_constants(code: str, constants: Sequence[Constant], values: Sequence[float]) -> str:
    """The program with other numbers."""
    # Offsets are bytes, as in `ast`.
    text, end, pieces = code.encode(), 0, []
    for constant, value in zip(constants, values, strict=True):
        pieces += [text[end : constant.start], constant.show(value).encode()]
        end = constant.end
    return b"".join([*pieces, text[end:]]).decode()


class NumberSearch:
    """CMA-ES over the numbers, each in steps of its own size."""

    def __init__(self, constants: Sequence[Constant], *, seed: int) -> None:
        self._constants = constants
        # The optimiser needs two dimensions: a second one that moves nothing.
        start = (0.0,) * max(2, len(constants))
        config = CmaesConfig(sigma=1.0, low=None, high=None)
        self._optimiser = Cmaes(config, seed=seed, start=start)

    def ask(self) -> list[list[float]]:
        """The numbers of each program of this generation."""
        return [
            [one.at(steps) for one, steps in zip(self._constants, point, strict=False)]
            for point in self._optimiser.ask()
        ]

    def tell(self, scores: Sequence[float | None]) -> None:
        """In the order asked for. Fewer of the last generation: it was cut short, and ends here."""
        if len(scores) == len(self._optimiser.ask()):
            self._optimiser.tell([Fitness(score=score) for score in scores])


def _numbers(tree: ast.AST) -> Iterator[ast.Constant]:
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.JoinedStr | ast.match_case):
            continue  # of an f-string, places are not known; patterns are structure
        if isinstance(child, ast.Subscript):
            yield from _numbers(child.value)
        elif isinstance(child, ast.Constant):
            if _is_tunable(child.value):
                yield child
        else:
            yield from _numbers(child)


def _is_tunable(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, bool) or not isinstance(value, int):
        return False
    return value not in STRUCTURAL and abs(value) < 2**53  # beyond, floats are no whole numbers


def _constant(node: ast.Constant, starts: Sequence[int]) -> Constant:
    assert node.end_lineno is not None and node.end_col_offset is not None
    assert isinstance(node.value, int | float)
    return Constant(
        start=starts[node.lineno - 1] + node.col_offset,
        end=starts[node.end_lineno - 1] + node.end_col_offset,
        value=float(node.value),
        is_whole=isinstance(node.value, int),
    )


def _line_starts(code: str) -> list[int]:
    """The byte at which each line begins; lines end as Python counts them."""
    starts = [0]
    for line in code.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    return starts


def _open_lines(code: str) -> set[int] | None:
    """The numbers of the lines inside of EVOLVE blocks; None: all of them."""
    blocks = () if find_marker_problem(code) else evolve_blocks(code)
    # Marker lines count from 0, those of `ast` from 1.
    lines = {line for block in blocks for line in range(block.start_line + 2, block.end_line + 1)}
    return lines if blocks else None
