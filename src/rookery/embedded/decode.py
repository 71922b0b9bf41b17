"""Decodes a compact batch of sequences, one token per step, over one pool of keys and values."""

from collections.abc import Sequence

import torch

from rookery.embedded.prefix import zero_pages
from rookery.slots import Segment, SlotRows, SlottedModel
from rookery.slots.attention import KEY_BLOCK, Heads, attend_alike, attend_heads

__all__ = ["DecodeBatch"]

SLOT_BLOCK = 4
"""Decoded rows per adapter block: usually there are one to a few sequences per adapter."""

_GROWTH = 128
"""Step, in tokens, by which the pool's length grows."""


class DecodeBatch:
    """Rows 0 .. n-1 hold one sequence each; removing a row moves the last row into its place."""

    def __init__(self, model: SlottedModel, *, max_rows: int) -> None:
        self._model = model
        self._max_rows = max_rows
        self._pool = self._make_pool(1, _GROWTH)
        self._lengths: list[int] = []
        self._slots: list[int | None] = []
        self._plan: SlotRows | None = None
        self._is_planned = False

    @property
    def num_rows(self) -> int:
        return len(self._lengths)

    def add(self, keys_and_values: torch.Tensor, *, slot: int | None) -> int:
        """Start a row from a prompt's [layers, 2, KV, tokens, D] and return its index."""
        length = keys_and_values.shape[3]
        row = len(self._lengths)
        self._reserve(row + 1, max(length, *self._lengths, 0) + 1)
        self._pool[:, :, row, :, :length] = keys_and_values
        self._lengths.append(length)
        self._slots.append(slot)
        self._is_planned = False
        return row

    def remove(self, row: int) -> int:
        """End a row and return the old index of the row now in its place (its own if last)."""
        last = len(self._lengths) - 1
        if row != last:
            length = self._lengths[last]
            self._pool[:, :, row, :, :length] = self._pool[:, :, last, :, :length]
            self._lengths[row], self._slots[row] = length, self._slots[last]
        # Masked keys are still read, so an ended row must leave nothing behind, above all no NaN.
        # A failed step may have written one token beyond the length.
        self._pool[:, :, last, :, : self._lengths[last] + 1] = 0
        self._lengths.pop()
        self._slots.pop()
        self._is_planned = False
        return last

    def step(self, tokens: Sequence[int]) -> torch.Tensor:
        """Feed one token to every row, in row order; return logits [rows, vocabulary]."""
        device = self._pool.device
        self._reserve(len(self._lengths), max(self._lengths) + 1)
        positions = torch.tensor(self._lengths, device=device)
        attend = _PoolAttend(self._pool, positions, is_exact=self._model.is_exact)
        rows = self._slot_rows()
        hidden = self._model.embed(torch.tensor(tokens, device=device))
        hidden = self._model.layers(hidden, positions, attend=attend, rows=rows)
        self._lengths = [length + 1 for length in self._lengths]
        return self._model.logits(hidden, rows=rows)

    def _slot_rows(self) -> SlotRows | None:
        if not self._is_planned:
            rows_by_slot: dict[int, list[int]] = {}
            for row, slot in enumerate(self._slots):
                if slot is not None:
                    rows_by_slot.setdefault(slot, []).append(row)
            segments = [
                Segment(slot=slot, rows=rows, block=SLOT_BLOCK)
                for slot, rows in rows_by_slot.items()
            ]
            self._plan = (
                SlotRows(segments, num_rows=len(self._slots), device=self._pool.device)
                if segments
                else None
            )
            self._is_planned = True
        return self._plan

    def _make_pool(self, num_rows: int, num_tokens: int) -> torch.Tensor:
        """Make zeros [layers, 2, rows, KV, tokens, D]: masked keys are read and must be finite."""
        shape = self._model.shape
        like = torch.empty(0, dtype=self._model.dtype, device=self._model.device)
        rows = (num_rows, shape.num_kv_heads, num_tokens, shape.head_dim)
        return zero_pages((shape.num_layers, 2, *rows), like=like)

    def _reserve(self, num_rows: int, num_tokens: int) -> None:
        """Grow the pool if needed. Its size follows the use: a single long row takes one row."""
        have_rows, have_tokens = self._pool.shape[2], self._pool.shape[4]
        if num_rows <= have_rows and num_tokens <= have_tokens:
            return
        if num_tokens > have_tokens:
            num_tokens = max(num_tokens, have_tokens * 3 // 2)
        pool = self._make_pool(
            min(1 << (num_rows - 1).bit_length(), self._max_rows),
            -(-num_tokens // _GROWTH) * _GROWTH,
        )
        rows, tokens = len(self._lengths), max(self._lengths, default=0)
        pool[:, :, :rows, :, :tokens] = self._pool[:, :, :rows, :, :tokens]
        self._pool = pool


class _PoolAttend:
    """Attention of one decoding step: append each row's key and value, then attend to its row.

    Rows of different lengths share one call under a mask. A row's result does not depend on other
    rows, because masked keys weigh exactly 0.
    """

    def __init__(self, pool: torch.Tensor, positions: torch.Tensor, *, is_exact: bool) -> None:
        self._attend = attend_alike if is_exact else attend_heads
        self._positions = positions
        self._num_keys = -(-(int(positions.max()) + 1) // KEY_BLOCK) * KEY_BLOCK
        self._masks: dict[int | None, torch.Tensor] = {}
        self._rows = torch.arange(len(positions), device=pool.device)
        # One call makes the views of all layers.
        self._new = pool.permute(0, 2, 4, 1, 3, 5).unbind()
        seen = pool[:, :, : len(positions), :, : self._num_keys]
        self._keys, self._values = seen[:, 0].unbind(), seen[:, 1].unbind()

    def __call__(self, q: torch.Tensor, kv: torch.Tensor, heads: Heads) -> torch.Tensor:
        layer = heads.layer
        self._new[layer].index_put_((self._rows, self._positions), kv)
        mixed = self._attend(
            q.unsqueeze(2),
            self._keys[layer],
            self._values[layer],
            self._mask(heads.window, q.dtype),
            heads,
        )
        return mixed.squeeze(2)

    def _mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        mask = self._masks.get(window)
        if mask is None:
            keys = torch.arange(self._num_keys, device=self._positions.device)
            distance = self._positions[:, None, None, None] - keys
            seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
            mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
            mask = self._masks[window] = mask.masked_fill_(~seen, float("-inf"))
        return mask
