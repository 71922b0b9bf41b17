"""A loss of the caller's own, as a graph in plain data: computed for each datum, and summed.

    {"inputs": [{"name": "logprobs", "rank": 1}, {"name": "weights", "rank": 1}], "graph": {...}}

The first input is the datum's log-probabilities in the shape of its targets, the others are in the
datum's `inputs`.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator

from rookery.config import Config
from rookery.errors import TrainError
from rookery.train.losses.graph import LossGraph
from rookery.train.losses.loss import Column, LossOutput, Targets
from rookery.types import Datum, Json

__all__ = ["Custom"]


class LossInput(Config):
    """One tensor that the loss reads."""

    name: str = Field(min_length=1, max_length=64)
    rank: Literal[0, 1, 2]


class Custom(Config):
    """What the graph gives for each datum, summed; its metrics by their own names."""

    type: Literal["custom"] = "custom"
    needs: ClassVar[tuple[Column, ...]] = ()
    inputs: tuple[LossInput, ...] = Field(min_length=1, max_length=16)
    graph: dict[str, Any]
    """See `graph.py`."""

    @cached_property
    def _run(self) -> LossGraph:
        return LossGraph(self.graph, names=[own.name for own in self.inputs])

    @model_validator(mode="after")
    def _check_graph(self) -> "Custom":
        if self.inputs[0].rank == 0:
            raise ValueError("log-probabilities have rank 1 ([T]) or 2 ([T, K])")
        assert self._run, "a TrainError says what is not allowed"
        return self

    def learns_from(self, datum: Datum) -> bool:  # noqa: ARG002
        return True

    def __call__(self, logprobs: torch.Tensor, targets: Targets) -> LossOutput:
        """Each datum's gradient is computed with its loss, so that the tensors of one graph are in
        memory at a time."""
        sizes = torch.bincount(targets.datum, minlength=len(targets.num_rows)).tolist()
        parts = [
            part.requires_grad_(logprobs.requires_grad)
            for part in torch.split(logprobs.detach(), sizes)
        ]
        given = [self._inputs(part, targets, place) for place, part in enumerate(parts)]
        self._run.check_pass(given, num_positions=sum(targets.num_rows))
        losses: list[torch.Tensor] = []
        gradients: list[torch.Tensor] = []
        totals: dict[str, torch.Tensor] = {}
        for part, inputs in zip(parts, given, strict=True):
            loss, metrics = self._run(*inputs)
            if loss.requires_grad:
                gradients += torch.autograd.grad(loss, [part])
            else:
                gradients.append(torch.zeros_like(part))
            losses.append(loss.detach())
            for key, value in metrics.items():
                totals[key] = totals.get(key, torch.zeros_like(value)) + value.detach()
        total = torch.stack(losses).sum()
        loss = _Differentiated.apply(logprobs, total, torch.cat(gradients))  # type: ignore[no-untyped-call]
        return LossOutput(loss=loss, sums={"loss": total}, totals=totals)

    def _inputs(
        self, logprobs: torch.Tensor, targets: Targets, place: int
    ) -> tuple[torch.Tensor, ...]:
        """What the graph reads of one datum."""
        rest = (
            self._tensor(one, targets.inputs[place], device=logprobs.device)
            for one in self.inputs[1:]
        )
        return self._logprobs(logprobs, targets.num_rows[place]), *rest

    def _logprobs(self, own: torch.Tensor, num_rows: int) -> torch.Tensor:
        return own if self.inputs[0].rank == 1 else own.view(num_rows, -1)

    def _tensor(
        self, own: LossInput, inputs: Mapping[str, Json], *, device: torch.device
    ) -> torch.Tensor:
        if own.name not in inputs:
            raise TrainError(f"A datum has no input {own.name!r}, which the loss reads.")
        tensor = torch.tensor(inputs[own.name], device=device)
        if tensor.ndim != own.rank:
            raise TrainError(
                f"The input {own.name!r} of a datum has {tensor.ndim} dimensions; the loss reads "
                f"{own.rank}."
            )
        return tensor


class _Differentiated(torch.autograd.Function):
    """A loss whose gradient is known: what it was computed from need not be kept."""

    @staticmethod
    def forward(
        ctx: Any,
        logprobs: torch.Tensor,  # noqa: ARG004
        loss: torch.Tensor,
        gradient: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(gradient)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, by_loss: torch.Tensor) -> Any:
        [gradient] = ctx.saved_tensors
        return by_loss * gradient, None, None
