"""The numbers in a program, and a search for better ones.

    constants = lift_constants(code)                  # the numbers of its EVOLVE blocks
    write_constants(code, constants, [0.31, 12.0])    # the same program with other numbers
    search = NumberSearch(constants, seed=7, score=0.3)
    for values in search.ask(): ...
    search.tell([0.4, None, ...])                     # None: the program failed

A tuning is an attempt: its parent is a new best program, its child the same program with better
numbers. Only the digits change, so names and layout are kept.
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

__all__ = [
    "MAX_CONSTANTS",
    "TUNE",
    "Constant",
    "NumberSearch",
    "lift_constants",
    "open_lines",
    "write_constants",
]

TUNE = "tune"
"""Operator name of a tuning's plan."""
MAX_CONSTANTS = 200
"""Maximum number of tuned constants, taken from the start. CMA-ES costs its square per program."""
STEP = 0.2
"""Initial step, relative to a number's size."""
SMALLEST_SIZE = 0.1
STRUCTURAL = frozenset({0, 1, 2})
"""Whole numbers that define structure rather than quantity."""
DIGITS = 9
FEW_POINTS, MOST_POINTS, PER_POINT = 4, 16, 40
"""Sparse phase: programs per generation, at first and at most, and the evaluations that raise it by
one. Small generations learn from every answer, large ones share a job."""
FEW_P = 0.35
"""Geometric distribution of the changed numbers of a program."""
FEW_PER_NUMBER, FEW_MORE = 40, 20
"""Evaluations of a sparse phase: per number, and in addition."""
CMAES_PER_NUMBER = 20
"""Evaluations per number without improvement that end a phase of CMA-ES."""
FIRST_SIGMA, MOST_HALVINGS = 0.25, 5
"""Step size of the first CMA-ES phase, halved for each later one up to this many times."""
FEWEST = 5
"""With fewer numbers the search begins with CMA-ES, at a step size of 1."""
WIDER, NARROWER = 1.7, 0.9
NARROWEST, WIDEST = 1e-4, 2.0
"""Bounds of the step size. These constants were chosen on functions that no report uses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """A number in a program, as the byte range of its text."""

    start: int
    end: int
    value: float
    is_whole: bool

    def at(self, steps: float) -> float:
        """Return the number moved by this many initial steps."""
        size = max(abs(self.value), SMALLEST_SIZE)
        moved = self.value + steps * (max(1.0, STEP * size) if self.is_whole else STEP * size)
        return float(round(moved)) if self.is_whole else moved

    def show(self, value: float) -> str:
        text = str(int(value)) if self.is_whole else f"{value:.{DIGITS}g}"
        if not self.is_whole and not {".", "e"} & set(text):
            text += ".0"
        return f"({text})" if value < 0 else text


def lift_constants(code: str) -> tuple[Constant, ...]:
    """Find the numbers in a Python program's EVOLVE blocks, or in all of it if it has none.

    Skips indices and the whole numbers 0, 1 and 2. Returns none if the code is not Python.
    """
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError):
        return ()
    starts = _line_starts(code)
    lines = open_lines(code)
    constants = [
        _constant(node, starts) for node in _numbers(tree) if lines is None or node.lineno in lines
    ]
    return tuple(sorted(constants, key=lambda one: one.start)[:MAX_CONSTANTS])


def write_constants(code: str, constants: Sequence[Constant], values: Sequence[float]) -> str:
    """Replace the constants of a program by other values."""
    # Offsets are in bytes, as in `ast`.
    text, end, pieces = code.encode(), 0, []
    for constant, value in zip(constants, values, strict=True):
        pieces += [text[end : constant.start], constant.show(value).encode()]
        end = constant.end
    return b"".join([*pieces, text[end:]]).decode()


class NumberSearch:
    """Alternates between sparse changes, which gain most in few evaluations, and CMA-ES from the
    best point, which gains in many. Steps are relative to each number's size."""

    def __init__(self, constants: Sequence[Constant], *, seed: int, score: float | None) -> None:
        """`score` is the program's own score."""
        self._constants = constants
        self._seed = seed
        # CMA-ES needs two dimensions: the second is a dummy.
        self._best = (0.0,) * max(2, len(constants))
        self._score = -math.inf if score is None else score
        self._few_s = 1.0
        self._num_left = FEW_PER_NUMBER * len(constants) + FEW_MORE
        """Evaluations left in this phase."""
        self._cmaes: Cmaes | None = None
        self._num_cmaes = 0
        self._num_told = self._num_scores = 0
        self._points: tuple[Point, ...] = ()
        self._joined: Point = ()
        if len(constants) < FEWEST:
            self._begin_cmaes(sigma=1.0)

    def ask(self) -> list[list[float]]:
        """Return the numbers of each program of this generation, the same until they are told."""
        if not self._points:
            self._points = self._cmaes.ask() if self._cmaes else self._change_sparsely()
        return [
            [one.at(steps) for one, steps in zip(self._constants, point, strict=False)]
            for point in self._points
        ]

    def tell(self, scores: Sequence[float | None]) -> None:
        """Take the scores in the order asked. A list cut short by the time limit is ignored."""
        if len(scores) < len(self._points):
            return
        values = [-math.inf if score is None else score for score in scores]
        best = max(values)
        is_better = best > self._score
        joined = () if self._cmaes else self._join(values)
        if best >= self._score and math.isfinite(best):
            self._score, self._best = best, self._points[values.index(best)]
        if self._cmaes:
            self._cmaes.tell([Fitness(score=score) for score in scores])
            if is_better:
                self._num_left = CMAES_PER_NUMBER * len(self._best)
        else:
            self._few_s *= WIDER if is_better else NARROWER
            self._few_s = min(WIDEST, max(NARROWEST, self._few_s))
        self._points, self._joined, self._num_told = (), joined, self._num_told + 1
        self._num_left -= len(scores)
        self._num_scores += len(scores)
        if self._num_left <= 0 or (self._cmaes and self._cmaes.sigma < NARROWEST):
            self._switch_phase()

    def _switch_phase(self) -> None:
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

    def _join(self, values: Sequence[float]) -> Point:
        """Return a point with all changes of this generation that were better, the best first, as
        far as they change different numbers; () if that is one."""
        order = sorted(range(len(values)), key=lambda place: -values[place])
        better = [self._points[place] for place in order if values[place] > self._score]
        old, joined = np.array(self._best), np.array(self._best)
        for point in map(np.array, better):
            if not np.any((point != old) & (joined != old)):
                joined += point - old
        return tuple(joined.tolist()) if len(better) > 1 else ()

    def _change_sparsely(self) -> tuple[Point, ...]:
        rng = stream(self._seed, "few", self._num_told)
        points = [self._joined] if self._joined else []
        num_points = min(MOST_POINTS, FEW_POINTS + self._num_scores // PER_POINT)
        while len(points) < num_points:
            point = np.array(self._best)
            count = min(len(self._constants), int(rng.geometric(FEW_P)))
            places = rng.choice(len(self._constants), count, replace=False)
            size = self._few_s * math.exp(rng.normal())
            point[places] += size * rng.normal(size=count)
            points.append(tuple(point.tolist()))
        return tuple(points)


def _numbers(tree: ast.AST) -> Iterator[ast.Constant]:
    nodes = [tree]  # not recursive: a sum of a thousand terms is a tree of this depth
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.JoinedStr | ast.match_case):
            continue  # ast gives no offsets in f-strings; patterns are structure
        if isinstance(node, ast.Subscript):
            nodes.append(node.value)
        elif not isinstance(node, ast.Constant):
            nodes += ast.iter_child_nodes(node)
        elif _is_tunable(node.value):
            yield node


def _is_tunable(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, bool) or not isinstance(value, int):
        return False
    return value not in STRUCTURAL and abs(value) < 2**53  # larger floats are not exact integers


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
    """Return the byte offset of each line, splitting lines as Python does."""
    starts = [0]
    for line in code.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    return starts


def open_lines(code: str) -> set[int] | None:
    """Return the line numbers inside EVOLVE blocks, or None for all lines."""
    blocks = () if find_marker_problem(code) else evolve_blocks(code)
    # Marker lines count from 0, lines of `ast` from 1.
    lines = {line for block in blocks for line in range(block.start_line + 2, block.end_line + 1)}
    return lines if blocks else None
