"""Log-probabilities of targets, a chunk of rows at a time.

Logits are vocabulary times rows: 2,000 rows of 150,000 float32 are 1.2 GB, and a backward pass
holds several of them. Over one chunk, each is computed again in the backward pass and dropped.
"""

from bisect import bisect_left

import numpy as np
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from rookery.slots import SlotRows, SlottedModel
from rookery.slots.rows import SlotFactors
from rookery.train.packing import PackedPass
from rookery.train.stacks import one_slot

__all__ = ["CHUNK_BYTES", "target_logprobs"]

CHUNK_BYTES = 2**28
"""Float32 logits at a time: 1,365 rows of SmolLM2's 49,152 tokens."""


def target_logprobs(
    model: SlottedModel,
    hidden: torch.Tensor,
    packed: PackedPass,
    factors: dict[str, SlotFactors],
) -> torch.Tensor:
    """log p of every target of the pass, [targets] float32, from its packed rows [rows, hidden]."""
    predicting = hidden.index_select(0, _ids(packed.predicting, hidden))
    size = max(1, CHUNK_BYTES // (4 * model.shape.vocab_size))
    starts = range(0, len(predicting), size)
    parts = []
    for first in starts:
        chunk = _Chunk(model, packed, range(first, min(first + size, len(predicting))), factors)
        rows = predicting[first : first + size]
        parts.append(
            chunk(rows)
            if len(starts) == 1
            else checkpoint(chunk, rows, use_reentrant=False, preserve_rng_state=False)
        )
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class _Chunk:
    """Some of the predicting rows: hidden [rows, hidden] -> log p of their targets."""

    def __init__(
        self,
        model: SlottedModel,
        packed: PackedPass,
        rows: range,
        factors: dict[str, SlotFactors],
    ) -> None:
        device = model.device
        here = slice(*(bisect_left(packed.target_rows, end) for end in (rows.start, rows.stop)))
        self._model = model
        self._slots: SlotRows = one_slot(len(rows), factors, device=device)
        self._rows = torch.tensor(packed.target_rows[here], device=device) - rows.start
        self._targets = torch.tensor(packed.targets[here], device=device)
        self._kept = packed.kept[here]
        # Without the second array of the vocabulary that picking out of log-softmax makes backward.
        is_cut = any(map(len, self._kept))
        self._has_one_each = len(self._targets) == len(rows) and not is_cut
        temperatures = packed.temperatures[rows.start : rows.stop]
        self._temperatures = (
            None
            if all(temperature == 1.0 for temperature in temperatures)
            else torch.tensor(temperatures, device=device)[:, None]
        )

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self._model.logits(hidden, rows=self._slots)
        if self._temperatures is not None:
            logits = logits / self._temperatures
        if self._has_one_each:
            return -functional.cross_entropy(logits, self._targets, reduction="none")
        if not any(map(len, self._kept)):
            return torch.log_softmax(logits, dim=-1)[self._rows, self._targets]
        return logits[self._rows, self._targets] - self._normalisers(logits)

    def _normalisers(self, logits: torch.Tensor) -> torch.Tensor:
        """log of the sum of exp over the kept tokens of each target, over all where none are cut.

        Rows are as long as they are: one nucleus of a whole vocabulary pads no other row.
        """
        lengths = [len(kept) for kept in self._kept]
        flat = np.concatenate([np.asarray(kept, dtype=np.int64) for kept in self._kept])
        tokens = torch.from_numpy(flat).to(logits.device)
        owners = torch.arange(len(lengths), device=logits.device)
        owners = owners.repeat_interleave(_ids(lengths, logits))
        found = logits[self._rows[owners], tokens]
        floor = found.new_full((len(lengths),), float("-inf"))
        highest = floor.scatter_reduce(0, owners, found.detach(), "amax")
        cut = torch.isfinite(highest)
        highest = highest.where(cut, 0.0)
        sums = torch.zeros_like(highest).index_add(0, owners, (found - highest[owners]).exp())
        over_kept = sums.where(cut, 1.0).log() + highest
        if cut.all():
            return over_kept
        return over_kept.where(cut, torch.logsumexp(logits, dim=-1)[self._rows])


def _ids(values: list[int], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, device=like.device)
