"""Log-probabilities after a fixed text, computed repeatedly while the weights change in place.

    text = FixedText(model, tokens=(1, 3, 8), ids=(1, 2))
    text.logprobs()                                         # log p(1 | 1 3 8), log p(2 | 1 3 8)
    text.logprobs(adapter.factors)                          # with an adapter

On a GPU the first call records its operations as a CUDA graph, which later calls replay: launching
the operations one by one takes a large model longer than computing them.
"""

from collections.abc import Callable, Mapping

import torch

from rookery.slots.attention import CausalAttend
from rookery.slots.model import SlottedModel
from rookery.slots.rows import Segment, SlotFactors, SlotRows
from rookery.types import LoraFactors, TokenIds

__all__ = ["FixedText"]


class FixedText:
    """Not thread-safe. The weights must stay at the same addresses."""

    def __init__(self, model: SlottedModel, *, tokens: TokenIds, ids: TokenIds) -> None:
        self._model = model
        self._tokens = torch.tensor(tokens, device=model.device)
        self._positions = torch.arange(len(tokens), device=model.device)
        self._ids = torch.tensor(ids, device=model.device)
        self._attend = CausalAttend([len(tokens)], device=model.device)
        self._slot = _Slot({}, model)
        self._recording: _Recording | None = None

    @torch.no_grad()
    def logprobs(self, factors: Mapping[str, LoraFactors] | None = None) -> list[float]:
        """Return the log-probabilities under the present weights and an adapter's factors."""
        factors = factors or {}
        if not self._slot.fits(factors):
            self._slot, self._recording = _Slot(factors, self._model), None
        if self._model.device.type != "cuda":
            self._slot.put(factors)
            values: list[float] = self._compute().tolist()
            return values
        with torch.cuda.device(self._model.device):
            if self._recording is None:
                self._recording = _Recording(self._compute)
            return self._recording.read(lambda: self._slot.put(factors))

    def _compute(self) -> torch.Tensor:
        model, slot = self._model, self._slot
        hidden = model.layers(
            model.embed(self._tokens),
            self._positions,
            attend=self._attend,
            rows=slot.rows(len(self._tokens)),
        )
        logits = model.logits(hidden[-1:], rows=slot.rows(1))[0]
        return torch.log_softmax(logits.float(), dim=-1)[self._ids]


class _Slot:
    """Fixed memory for one adapter's factors; without factors, the base model."""

    def __init__(self, factors: Mapping[str, LoraFactors], model: SlottedModel) -> None:
        self._shapes = _shapes(factors)
        self._device = model.device
        self._banks: dict[str, list[SlotFactors]] = {
            layer: [(_room(lora.a, model), _room(lora.b, model))] for layer, lora in factors.items()
        }

    def fits(self, factors: Mapping[str, LoraFactors]) -> bool:
        return self._shapes == _shapes(factors)

    def put(self, factors: Mapping[str, LoraFactors]) -> None:
        if not self._banks:
            return
        loras = [factors[layer] for layer in self._banks]
        scaled = torch._foreach_mul([lora.b for lora in loras], [lora.scale for lora in loras])
        torch._foreach_copy_([bank[0][0] for [bank] in self._banks.values()], [x.a for x in loras])
        torch._foreach_copy_([bank[1][0] for [bank] in self._banks.values()], list(scaled))

    def rows(self, num_rows: int) -> SlotRows | None:
        """Return a plan in which all rows use this slot; None without factors."""
        if not self._banks:
            return None
        every_row = Segment(slot=0, rows=range(num_rows), block=num_rows)
        return SlotRows([every_row], num_rows=num_rows, device=self._device, factors=self._banks)


class _Recording:
    """A CUDA graph of one computation. Its own stream keeps it out of waits for other GPU work."""

    def __init__(self, compute: Callable[[], torch.Tensor]) -> None:
        """Other threads may use the GPU meanwhile. The first computation runs outside the graph,
        because libraries initialise themselves on their first call."""
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            compute()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=self._stream, capture_error_mode="thread_local"):
            self._logprobs = compute()

    def read(self, put: Callable[[], None]) -> list[float]:
        """Call `put`, which changes the graph's inputs, then replay the graph."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            put()
            self._graph.replay()
            values: list[float] = self._logprobs.tolist()
        return values


def _shapes(factors: Mapping[str, LoraFactors]) -> dict[str, tuple[torch.Size, torch.Size]]:
    return {layer: (lora.a.shape, lora.b.shape) for layer, lora in factors.items()}


def _room(factor: torch.Tensor, model: SlottedModel) -> torch.Tensor:
    return torch.zeros((1, *factor.shape), dtype=model.dtype, device=model.device)
