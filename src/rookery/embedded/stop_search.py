"""Looks for stop strings in a text that grows token by token, at its end alone.

    search = StopSearch(("\\n\\n",), detokenize=detokenize)
    search.find(tokens)        # None, or the text before the first stop string

Decoding all tokens at every step costs the square of their number. What a token adds can complete
a stop string only at the end of the text, so the last tokens are decoded, and all of them only to
confirm a find. A text that is decoded from its middle on may begin with a broken character, or
without a space: `MARGIN` covers that.
"""

from collections.abc import Callable, Sequence

__all__ = ["StopSearch"]

MARGIN = 16
"""Characters before the longest stop string: a character has four bytes, a token each at most."""


class StopSearch:
    """The search of one sequence; `find` is called with every new token."""

    def __init__(self, stops: Sequence[str], *, detokenize: Callable[[Sequence[int]], str]) -> None:
        self._stops = tuple(stops)
        self._detokenize = detokenize
        self._least = MARGIN + max(map(len, self._stops), default=0)
        self._first = 0
        """The token from which on the text is decoded."""

    def find(self, tokens: Sequence[int]) -> str | None:
        """The text before the first stop string; None: there is none yet."""
        if not self._stops:
            return None
        end = self._detokenize(tokens[self._first :])
        if any(stop in end for stop in self._stops):
            text = self._detokenize(tokens)
            places = [at for stop in self._stops if (at := text.find(stop)) >= 0]
            return text[: min(places)] if places else None
        if len(end) > 2 * self._least:
            middle = (self._first + len(tokens)) // 2
            if len(self._detokenize(tokens[middle:])) >= self._least:
                self._first = middle
        return None
