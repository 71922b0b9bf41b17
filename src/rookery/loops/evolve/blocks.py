"""EVOLVE-BLOCK markers: which lines of a program the model may change, in any language.

    # EVOLVE-BLOCK-START
    ...
    # EVOLVE-BLOCK-END

A marker line begins with any comment sign (`//`, `--`, `%`, `<!--`), or ends in a comment
`# EVOLVE-BLOCK-START`. Without `enforce_evolve_blocks` markers only advise the model.
"""

import re
from dataclasses import dataclass
from itertools import chain

from rookery.loops.evolve.failures import AnswerError, FailureKind

__all__ = ["EvolveBlock", "enforce_blocks", "evolve_blocks", "find_marker_problem"]

_MARKER = re.compile(r"^\W*EVOLVE-BLOCK-(START|END)\b")
_TRAILING = re.compile(r"# EVOLVE-BLOCK-(START|END)")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvolveBlock:
    """Lines between two markers. Lines count from 0 and are those of the markers themselves."""

    start_line: int
    end_line: int
    text: str


def evolve_blocks(code: str) -> tuple[EvolveBlock, ...]:
    """The blocks of a program whose markers are in order."""
    lines = code.split("\n")
    marked = [number for number, line in enumerate(lines) if _marker(line)]
    pairs = zip(marked[::2], marked[1::2], strict=True)
    return tuple(
        EvolveBlock(start_line=start, end_line=end, text="\n".join(lines[start + 1 : end]))
        for start, end in pairs
    )


def find_marker_problem(code: str) -> str | None:
    """What is wrong with the markers, with the line number counted from 1; None if nothing is."""
    opened: int | None = None
    for number, line in enumerate(code.split("\n"), start=1):
        match _marker(line):
            case "START" if opened is not None:
                return (
                    f"line {number} has EVOLVE-BLOCK-START inside the block that line {opened} "
                    "began: end that block first."
                )
            case "START":
                opened = number
            case "END" if opened is None:
                return f"line {number} has EVOLVE-BLOCK-END, but no EVOLVE-BLOCK-START before it."
            case "END":
                opened = None
    if opened is not None:
        return f"line {opened} has EVOLVE-BLOCK-START, but no EVOLVE-BLOCK-END follows it."
    return None


def enforce_blocks(original: str, child: str) -> str:
    """The original with the contents of the child's blocks: edits outside of them are undone.

    An original without blocks in order limits nothing. A child with broken markers, or another
    number of blocks, is an AnswerError.
    """
    if find_marker_problem(original) or not (kept := evolve_blocks(original)):
        return child
    if problem := find_marker_problem(child):
        raise AnswerError(FailureKind.MARKERS_BROKEN, f"The child's markers are broken: {problem}")
    if len(new := evolve_blocks(child)) != len(kept):
        raise AnswerError(
            FailureKind.MARKERS_BROKEN,
            f"The child has {len(new)} EVOLVE-BLOCKs, its parent has {len(kept)}.",
        )
    lines = original.split("\n")
    starts = [0, *(block.end_line for block in kept)]
    ends = [*(block.start_line + 1 for block in kept), len(lines)]
    outside = [lines[start:end] for start, end in zip(starts, ends, strict=True)]
    inside = [*(_content(child, block) for block in new), []]
    pieces = zip(outside, inside, strict=True)
    return "\n".join(chain.from_iterable(before + within for before, within in pieces))


def _content(code: str, block: EvolveBlock) -> list[str]:
    return code.split("\n")[block.start_line + 1 : block.end_line]


def _marker(line: str) -> str | None:
    """START, END, or None. A line with both trailing markers counts as START."""
    if match := _MARKER.match(line):
        return match[1]
    trailing = set(_TRAILING.findall(line))
    return max(trailing, default=None)
