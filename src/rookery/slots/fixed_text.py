"""Log-probabilities after one text, read again and again while the weights change in place.

    text = FixedText(model, tokens=(1, 3, 8), ids=(1, 2))
    text.logprobs()                                         # log p(1 | 1 3 8), log p(2 | 1 3 8)

On a GPU the first reading records its operations as a CUDA graph, and later ones start them at
once: one by one they take a large model longer to start than to compute.
"""

import torch

from rookery.slots.attention import CausalAttend
from rookery.slots.model import SlottedModel
from rookery.types import TokenIds

__all__ = ["FixedText"]


class FixedText:
    """For one thread at a time. The memory of the weights stays where it is."""

    def __init__(self, model: SlottedModel, *, tokens: TokenIds, ids: TokenIds) -> None:
        self._model = model
        self._tokens = torch.tensor(tokens, device=model.device)
        self._positions = torch.arange(len(tokens), device=model.device)
        self._ids = torch.tensor(ids, device=model.device)
        self._attend = CausalAttend([len(tokens)], device=model.device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._found = torch.empty(0)

    @torch.inference_mode()
    def logprobs(self) -> list[float]:
        """With the weights of now."""
        if self._model.device.type != "cuda":
            self._found = self._compute()
        elif self._graph is None:
            self._record()
        else:
            self._graph.replay()
        values: list[float] = self._found.tolist()
        return values

    def _compute(self) -> torch.Tensor:
        model = self._model
        hidden = model.layers(model.embed(self._tokens), self._positions, attend=self._attend)
        return torch.log_softmax(model.logits(hidden[-1:])[0].float(), dim=-1)[self._ids]

    def _record(self) -> None:
        """Other threads may use the GPU meanwhile. What is computed here first, outside of the
        graph, is what libraries set up when they are first called."""
        with torch.cuda.device(self._model.device):
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self._compute()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._found = self._compute()
            graph.replay()
            self._graph = graph
