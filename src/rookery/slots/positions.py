"""The rotary position encoding of a model, and how far it is a function of the position alone.

Some encodings (longrope, dynamic) look at the whole pass: with one position beyond a limit, all
positions of the pass are encoded in another way. Packed sequences, prefixes computed in parts and
rows decoded together have different lengths in one pass, and a token kept in a cache was encoded
for the length its sequence had then. So such models are read up to that limit only.
"""

import inspect
from typing import Any

import torch

__all__ = ["PositionEncoding"]


class PositionEncoding:
    """Encodes packed positions, once for each kind of layer that has an encoding of its own."""

    def __init__(self, decoder: Any) -> None:
        self._rotary = decoder.rotary_emb
        self._device = decoder.embed_tokens.weight.device
        takes_kind = "layer_type" in inspect.signature(self._rotary.forward).parameters
        self._kinds: list[str] | None = decoder.config.layer_types if takes_kind else None

    def __call__(self, states: torch.Tensor, positions: torch.Tensor) -> dict[str, Any]:
        """By kind of layer: what its attention takes; type and device are those of `states`."""
        if self._kinds is None:
            return {"": self._rotary(states, positions)}
        return {kind: self._rotary(states, positions, kind) for kind in set(self._kinds)}

    def kind(self, layer: int) -> str:
        return self._kinds[layer] if self._kinds else ""

    def fixed_tokens(self, declared: int) -> int:
        """The length up to which a position is encoded alike in every sequence.

        That is the `declared` length, unless the encoding changes before: then it is searched for.
        """
        alone = self._first_in(2)
        fixed, changed = 2, declared + 1
        if self._is_same(alone, self._first_in(declared)):
            return declared
        while changed - fixed > 1:
            middle = (fixed + changed) // 2
            if self._is_same(alone, self._first_in(middle)):
                fixed = middle
            else:
                changed = middle
        self._first_in(2)  # some encodings remember the longest they have seen
        return fixed

    def _first_in(self, length: int) -> list[torch.Tensor]:
        """How position 1 is encoded in a sequence of this length."""
        positions = torch.tensor([[1, length - 1]], device=self._device)
        encoded = self(torch.empty(1, 2, 1, device=self._device), positions).values()
        parts = [x if isinstance(x, tuple) else (x,) for x in encoded]
        return [part[:, :1].clone() for kind in parts for part in kind]

    @staticmethod
    def _is_same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
        return all(torch.equal(x, y) for x, y in zip(left, right, strict=True))
