"""The layers below the first adapted one: they never change, so each sequence is run once.

    trunk = Trunk(model, cache_bytes=2**30)
    hidden = trunk.hidden(sequences, cut=26)      # [rows, hidden], what enters layer 26

Every sequence is computed by itself. Its hidden states are then a pure function of its tokens: they
do not depend on what it is packed with, nor on what the cache still holds, so a training that was
interrupted, or has less memory, gives the same bits.
"""

from collections import OrderedDict
from collections.abc import Sequence

import torch

from rookery.slots import CausalAttend, SlottedModel
from rookery.types import TokenIds

__all__ = ["Trunk"]


class Trunk:
    """Hidden states at cuts; the least recently used leave when `cache_bytes` are full.

    They do not depend on adapters: trainees that start at the same layer share them.

    4096 float32 tokens of a model of hidden size 576 take 9.4 MB.
    """

    def __init__(self, model: SlottedModel, *, cache_bytes: int) -> None:
        self._model = model
        self._cache_bytes = cache_bytes
        self._cache: OrderedDict[tuple[int, TokenIds], torch.Tensor] = OrderedDict()
        self.used_bytes = 0
        """What the cache holds."""
        self.num_computed_tokens = 0
        """Tokens run through the trunk since the start: what the cache did not have."""

    def hidden(self, sequences: Sequence[TokenIds], *, cut: int) -> torch.Tensor:
        """What enters the layer of the cut, sequences end to end; carries no gradient."""
        with torch.no_grad():
            if cut == 0:
                tokens = [token for sequence in sequences for token in sequence]
                return self._model.embed(torch.tensor(tokens, device=self._model.device))
            return torch.cat([self._hidden(sequence, cut) for sequence in sequences])

    def _hidden(self, sequence: TokenIds, cut: int) -> torch.Tensor:
        found = self._cache.get((cut, sequence))
        if found is None:
            found = self._compute(sequence, cut)
            self._keep((cut, sequence), found)
        else:
            self._cache.move_to_end((cut, sequence))
        return found

    def _compute(self, sequence: TokenIds, cut: int) -> torch.Tensor:
        device = self._model.device
        self.num_computed_tokens += len(sequence)
        return self._model.layers(
            self._model.embed(torch.tensor(sequence, device=device)),
            torch.arange(len(sequence), device=device),
            attend=CausalAttend([len(sequence)], device=device, is_exact=self._model.is_exact),
            span=range(cut),
        )

    def _keep(self, key: tuple[int, TokenIds], hidden: torch.Tensor) -> None:
        if hidden.nbytes > self._cache_bytes:
            return
        self._cache[key] = hidden
        self.used_bytes += hidden.nbytes
        while self.used_bytes > self._cache_bytes:
            _, dropped = self._cache.popitem(last=False)
            self.used_bytes -= dropped.nbytes
