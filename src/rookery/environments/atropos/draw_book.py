"""What is known of the completions that environments got: which policy drew them, and how.

The Atropos API has no field for it, so that a sequence is found again by its tokens.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

__all__ = ["DrawBook", "Drawn"]

MAX_DRAWS = 200_000
"""Completions that are remembered, about 40 MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """How a completion was drawn."""

    step: int
    """Of the policy when it was asked for: its oldest tokens are of that one."""
    temperature: float
    is_cut: bool
    """By top_p, top_k or min_p."""


class DrawBook:
    """The newest completions by prompt and answer."""

    def __init__(self) -> None:
        self._draws: OrderedDict[bytes, Drawn] = OrderedDict()

    def note(self, tokens: Sequence[int], drawn: Drawn) -> None:
        """`tokens` are the prompt with the answer."""
        self._draws[_key(tokens)] = drawn
        while len(self._draws) > MAX_DRAWS:
            self._draws.popitem(last=False)

    def find(self, tokens: Sequence[int], *, last_drawn: int) -> Drawn | None:
        """How a sequence was drawn whose last drawn token is at this place; None: elsewhere."""
        return self._draws.get(_key(tokens)) or self._draws.get(_key(tokens[: last_drawn + 1]))


def _key(tokens: Sequence[int]) -> bytes:
    text = b"".join(token.to_bytes(8, "little") for token in tokens)
    return blake2b(text, digest_size=16).digest()
