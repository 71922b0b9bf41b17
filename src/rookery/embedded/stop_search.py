"""A text that grows token by token: stop strings are looked for at its end alone, and what it
gained is told as it becomes certain.

    search = StopSearch(("\\n\\n",), detokenize=detokenize)
    search.find(tokens)        # None, or the text before the first stop string
    deltas = TextDeltas(("\\n\\n",), detokenize=detokenize)
    deltas.add(tokens)         # the text that is certain since the last call

Decoding all tokens at every step costs the square of their number. What a token adds can complete
a stop string only at the end of the text, so the last tokens are decoded, and all of them only to
confirm a find. A text that is decoded from its middle on may begin with a broken character, or
without a space: `MARGIN` covers that.
"""

from collections.abc import Callable, Sequence

__all__ = ["StopSearch", "TextDeltas"]

MARGIN = 16
"""Characters before the longest stop string: a character has four bytes, a token each at most."""
_BROKEN = "\N{REPLACEMENT CHARACTER}"
_MOST_HELD = 32
"""Tokens that are waited for to make a whole character: more are no character."""


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


class TextDeltas:
    """What one sequence may tell of its text; `add` is called with every new token.

    Held back: an incomplete character, and the beginning of what may become a stop string.
    """

    def __init__(self, stops: Sequence[str], *, detokenize: Callable[[Sequence[int]], str]) -> None:
        self.num_tokens = 0
        """Tokens that were added: a sequence that begins anew adds them again."""
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=1) - 1
        self._detokenize = detokenize
        self._first = self._last = 0
        """The tokens in between were decoded last: what follows is decoded after them."""
        self._held = ""
        self._num_told = 0

    def add(self, tokens: Sequence[int], *, ended: str | None = None) -> str:
        """The text that is certain since the last call; all of it when it `ended` as this."""
        self.num_tokens = len(tokens)
        if ended is not None:
            return ended[self._num_told :]
        before = self._detokenize(tokens[self._first : self._last])
        after = self._detokenize(tokens[self._first :])
        is_whole = len(after) > len(before) and not after.endswith(_BROKEN)
        if not is_whole and len(tokens) - self._last < _MOST_HELD:
            return ""
        self._first, self._last = self._last, len(tokens)
        text = self._held + after[len(before) :]
        num = len(text) - self._num_held(text)
        self._held = text[num:]
        self._num_told += num
        return text[:num]

    def _num_held(self, text: str) -> int:
        """How many of the last characters may begin a stop string."""
        sizes = range(min(len(text), self._longest), 0, -1)
        starts = (n for n in sizes if any(stop.startswith(text[-n:]) for stop in self._stops))
        return next(starts, 0)
