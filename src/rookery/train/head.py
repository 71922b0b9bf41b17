"""Log-probabilities of targets, a chunk of rows at a time.

Logits are rows times vocabulary: 2,000 rows of 150,000 float32 are 1.2 GB, and a backward pass
holds several such arrays. If there are several chunks, the backward pass recomputes each and drops
it.

Passes of several trainees share chunks. Each is cut into the ranges it would have alone, and from
the logits on each is computed separately.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from rookery.slots import SlotRows, SlottedModel
from rookery.train.packing import PackedPass
from rookery.train.stacks import padding_rows

__all__ = ["CHUNK_BYTES", "target_logprobs"]

CHUNK_BYTES = 2**28
"""Bytes of float32 logits per chunk: 1,365 rows of SmolLM2's 49,152 tokens."""

RowsOf = Callable[[Sequence[Sequence[int]], int], Sequence[SlotRows]]
"""(rows of each part of a batch, rows of the batch) -> slots of the head."""


def target_logprobs(
    model: SlottedModel,
    hidden: torch.Tensor,
    parts: Sequence[tuple[PackedPass, Sequence[int]]],
    *,
    rows_of: RowsOf = lambda _own, _num: (),
) -> list[torch.Tensor]:
    """Return log p of every target of each part, [targets] float32. `hidden` is [rows, hidden];
    each part names the rows of its pass in it."""
    size = max(1, CHUNK_BYTES // (4 * model.shape.vocab_size))
    chunks = _chunks([len(packed.predicting) for packed, _ in parts], size)
    pieces: list[list[torch.Tensor]] = [[] for _ in parts]
    for chunk in chunks:
        run = _Chunk(model, parts, chunk, rows_of)
        logprobs = (
            run(hidden)
            if len(chunks) == 1
            else checkpoint(run, hidden, use_reentrant=False, preserve_rng_state=False)
        )
        for (part, _), piece in zip(chunk, logprobs, strict=True):
            pieces[part].append(piece)
    return [row[0] if len(row) == 1 else torch.cat(row) for row in pieces]


def _chunks(counts: Sequence[int], size: int) -> list[list[tuple[int, range]]]:
    """Cut each part into ranges of at most `size` rows, and pack the ranges into chunks."""
    chunks: list[list[tuple[int, range]]] = []
    room = 0
    for part, count in enumerate(counts):
        for first in range(0, count, size):
            rows = range(first, min(first + size, count))
            if len(rows) > room:
                chunks.append([])
                room = size
            chunks[-1].append((part, rows))
            room -= len(rows)
    return chunks


class _Chunk:
    """Predicting rows of one or more parts: hidden [rows, hidden] -> log p of their targets."""

    def __init__(
        self,
        model: SlottedModel,
        parts: Sequence[tuple[PackedPass, Sequence[int]]],
        chunk: Sequence[tuple[int, range]],
        rows_of: RowsOf,
    ) -> None:
        device = model.device
        self._model = model
        self._pieces = [_Piece(parts[part][0], rows, device=device) for part, rows in chunk]
        ids = [
            parts[part][1][row]
            for part, rows in chunk
            for row in parts[part][0].predicting[rows.start : rows.stop]
        ]
        self._padding = padding_rows(len(ids), device=device)
        self._rows = torch.tensor(ids, device=device)
        self._sizes = [len(rows) for _, rows in chunk] + [self._padding] * bool(self._padding)
        part_rows: list[Sequence[int]] = [range(0)] * len(parts)
        ends = accumulate(self._sizes)
        for (part, rows), end in zip(chunk, ends, strict=False):
            part_rows[part] = range(end - len(rows), end)
        self._slots = rows_of(part_rows, len(ids) + self._padding)

    def __call__(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = hidden.index_select(0, self._rows)
        if self._padding:
            rows = functional.pad(rows, (0, 0, 0, self._padding))
        logits = self._model.logits(rows, rows=self._slots)
        parts = [logits] if len(self._sizes) == 1 else torch.split(logits, self._sizes)
        return tuple(piece(part) for piece, part in zip(self._pieces, parts, strict=False))


class _Piece:
    """Predicting rows of one pass: logits [rows, vocabulary] -> log p of targets."""

    def __init__(self, packed: PackedPass, rows: range, *, device: torch.device) -> None:
        here = slice(*(bisect_left(packed.target_rows, end) for end in (rows.start, rows.stop)))
        self._rows = torch.tensor(packed.target_rows[here], device=device) - rows.start
        self._targets = torch.tensor(packed.targets[here], device=device)
        self._kept = packed.kept[here]
        # Cross-entropy avoids a second array of logits in the backward pass, which indexing
        # log-softmax needs.
        is_cut = any(map(len, self._kept))
        self._has_one_each = len(self._targets) == len(rows) and not is_cut
        temperatures = packed.temperatures[rows.start : rows.stop]
        self._temperatures = (
            None
            if all(temperature == 1.0 for temperature in temperatures)
            else torch.tensor(temperatures, device=device)[:, None]
        )

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        if self._temperatures is not None:
            logits = logits / self._temperatures
        if self._has_one_each:
            return -functional.cross_entropy(logits, self._targets, reduction="none")
        if not any(map(len, self._kept)):
            return torch.log_softmax(logits, dim=-1)[self._rows, self._targets]
        return logits[self._rows, self._targets] - self._normalisers(logits)

    def _normalisers(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logsumexp over each target's kept tokens; over the vocabulary without any.
        Rows are not padded: one nucleus of a whole vocabulary would enlarge all of them."""
        lengths = [len(kept) for kept in self._kept]
        flat = np.concatenate([np.asarray(kept, dtype=np.int64) for kept in self._kept])
        tokens = torch.from_numpy(flat).to(logits.device)
        owners = torch.arange(len(lengths), device=logits.device)
        owners = owners.repeat_interleave(torch.tensor(lengths, device=logits.device))
        kept_logits = logits[self._rows[owners], tokens]
        floor = kept_logits.new_full((len(lengths),), float("-inf"))
        highest = floor.scatter_reduce(0, owners, kept_logits.detach(), "amax")
        cut = torch.isfinite(highest)
        highest = highest.where(cut, 0.0)
        sums = torch.zeros_like(highest).index_add(0, owners, (kept_logits - highest[owners]).exp())
        over_kept = sums.where(cut, 1.0).log() + highest
        if cut.all():
            return over_kept
        return over_kept.where(cut, torch.logsumexp(logits, dim=-1)[self._rows])
