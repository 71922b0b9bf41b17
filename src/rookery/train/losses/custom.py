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
        sizes = torch.bincount(targets.datum, minlength=len(targets.num_rows)).tolist()
        losses: list[torch.Tensor] = []
        totals: dict[str, torch.Tensor] = {}
        for place, own in enumerate(torch.split(logprobs, sizes)):
            given = [self._logprobs(own, targets.num_rows[place])]
            given += [
                self._tensor(one, targets.inputs[place], device=logprobs.device)
                for one in self.inputs[1:]
            ]
            loss, metrics = self._run(*given)
            losses.append(loss)
            for key, value in metrics.items():
                totals[key] = totals.get(key, torch.zeros_like(value)) + value.detach()
        total = torch.stack(losses).sum()
        return LossOutput(loss=total, sums={"loss": total.detach()}, totals=totals)

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
