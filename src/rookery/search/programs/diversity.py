"""How far a program is from a few reference programs: the built-in feature `diversity`.

    references = References(size=20)
    diversity = references.measure(summary)
    references.add(summary)

The references are the first programs with different texts that were told, so the cost of a
measurement does not grow with the number of programs, and a value never changes afterwards.
"""

from collections.abc import Iterable

from rookery.search.programs.program import CodeSummary

__all__ = ["References"]


class References:
    """The programs that diversity is measured against, at most `size`."""

    def __init__(self, *, size: int, summaries: Iterable[CodeSummary] = ()) -> None:
        self._size = size
        self._characters: dict[str, frozenset[str]] = {}
        self._summaries: list[CodeSummary] = []
        for summary in summaries:
            self.add(summary)

    @property
    def summaries(self) -> tuple[CodeSummary, ...]:
        return tuple(self._summaries)

    def add(self, summary: CodeSummary) -> None:
        """Make it a reference, unless there are enough or it is one already."""
        if len(self._summaries) < self._size and summary.digest not in self._characters:
            self._summaries.append(summary)
            self._characters[summary.digest] = frozenset(summary.characters)

    def measure(self, summary: CodeSummary) -> float:
        """The mean distance to the references with another text; 0 when there are none."""
        characters = frozenset(summary.characters)
        distances = [
            _distance(summary, characters, other, self._characters[other.digest])
            for other in self._summaries
            if other.digest != summary.digest
        ]
        return sum(distances) / len(distances) if distances else 0.0


def _distance(
    a: CodeSummary, a_characters: frozenset[str], b: CodeSummary, b_characters: frozenset[str]
) -> float:
    """OpenEvolve's estimate of an edit distance: differences of length, lines and characters."""
    return (
        0.1 * abs(a.num_chars - b.num_chars)
        + 10 * abs(a.num_newlines - b.num_newlines)
        + 0.5 * len(a_characters ^ b_characters)
    )
