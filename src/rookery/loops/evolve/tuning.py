"""The numbers of a program tuned without a model (`rookery.tune`).

    constants = lift_constants(code)                  # those of its EVOLVE blocks
    write_constants(code, constants, [0.31, 12.0])    # the same program with other numbers
    search = NumberSearch(constants, seed=7, score=0.3)
    for values in search.ask(): ...
    search.tell([0.4, None, ...])                     # None: the program failed

A tuning is an attempt of its own: its parent is a new best program, its child the same program with
better numbers. Constants stay where they are written, so that names and layout are kept.
"""

import ast
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rookery.loops.evolve.answers import evolve_blocks, find_marker_problem
from rookery.search.candidate import Fitness
from rookery.search.es import Cmaes, CmaesConfig, Point
from rookery.seeding import stream

__all__ = ["TUNE", "Constant", "NumberSearch", "lift_constants", "write_constants"]

TUNE = "tune"
"""The operator of a tuning's plan."""
MAX_CONSTANTS = 200
"""The first ones: CMA-ES costs the square of them for each program."""
STEP = 0.2
"""The first steps, as a part of a number's size."""
SMALLEST_SIZE = 0.1
STRUCTURAL = frozenset({0, 1, 2})
"""Whole numbers that say how a program works rather than how much."""
DIGITS = 9
FEW_POINTS, FEW_P = 4, 0.35
"""Programs of a generation that changes a few numbers, and the chance that no further one is."""
FEW_PER_NUMBER, FEW_MORE = 8, 20
"""Evaluations of a turn that changes few."""
CMAES_PER_NUMBER = 60
"""Evaluations without a better program that end a turn of CMA-ES."""
FIRST_SIGMA, MOST_HALVINGS = 0.25, 5
"""Of CMA-ES's first turn; each later one begins with half as much."""
FEWEST = 5
"""With fewer numbers CMA-ES begins, with whole steps."""
WIDER, NARROWER = 1.7, 0.9
NARROWEST, WIDEST = 1e-4, 2.0
"""Bounds of a step. All of these were chosen on other functions than are reported."""


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
    """Changes of a few numbers at a time, then CMA-ES from the best, and so on: the first gain most
    from few evaluations, CMA-ES from many. Each number moves in steps of its own size."""

    def __init__(self, constants: Sequence[Constant], *, seed: int, score: float | None) -> None:
        """`score` is the program's own."""
        self._constants = constants
        self._seed = seed
        # The optimiser needs two dimensions: a second one that moves nothing.
        self._best = (0.0,) * max(2, len(constants))
        self._score = -math.inf if score is None else score
        self._few_s = 1.0
        self._num_left = FEW_PER_NUMBER * len(constants) + FEW_MORE
        """Evaluations before the other method's turn."""
        self._cmaes: Cmaes | None = None
        self._num_cmaes = 0
        self._num_told = 0
        self._points: tuple[Point, ...] = ()
        if len(constants) < FEWEST:
            self._begin_cmaes(sigma=1.0)

    def ask(self) -> list[list[float]]:
        """The numbers of each program of this generation; the same ones until they are told."""
        if not self._points:
            self._points = self._cmaes.ask() if self._cmaes else self._change_few()
        return [
            [one.at(steps) for one, steps in zip(self._constants, point, strict=False)]
            for point in self._points
        ]

    def tell(self, scores: Sequence[float | None]) -> None:
        """In the order asked for. Fewer of the last generation: it was cut short, and ends here."""
        if len(scores) < len(self._points):
            return
        values = [-math.inf if score is None else score for score in scores]
        best = max(values)
        is_better = best > self._score
        if best >= self._score and math.isfinite(best):
            self._score, self._best = best, self._points[values.index(best)]
        if self._cmaes:
            self._cmaes.tell([Fitness(score=score) for score in scores])
            if is_better:
                self._num_left = CMAES_PER_NUMBER * len(self._best)
        else:
            self._few_s *= WIDER if is_better else NARROWER
            self._few_s = min(WIDEST, max(NARROWEST, self._few_s))
        self._points, self._num_told = (), self._num_told + 1
        self._num_left -= len(scores)
        if self._num_left <= 0 or (self._cmaes and self._cmaes.sigma < NARROWEST):
            self._take_turns()

    def _take_turns(self) -> None:
        size = FIRST_SIGMA * 0.5**self._num_cmaes
        if self._cmaes is None:
            self._begin_cmaes(sigma=size)
            return
        self._cmaes, self._few_s = None, size
        self._num_cmaes = min(self._num_cmaes + 1, MOST_HALVINGS)
        self._num_left = FEW_PER_NUMBER * len(self._constants) + FEW_MORE

    def _begin_cmaes(self, *, sigma: float) -> None:
        config = CmaesConfig(sigma=sigma, low=None, high=None)
        seed = self._seed + self._num_told
        self._cmaes = Cmaes(config, seed=seed, start=self._best)
        self._num_left = CMAES_PER_NUMBER * len(self._best)

    def _change_few(self) -> tuple[Point, ...]:
        rng = stream(self._seed, "few", self._num_told)
        points = []
        for _ in range(FEW_POINTS):
            point = np.array(self._best)
            count = min(len(self._constants), int(rng.geometric(FEW_P)))
            places = rng.choice(len(self._constants), count, replace=False)
            size = self._few_s * math.exp(rng.normal())
            point[places] += size * rng.normal(size=count)
            points.append(tuple(point.tolist()))
        return tuple(points)


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
