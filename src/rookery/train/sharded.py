"""The full-weight trainer over several processes: each keeps a part of weights, gradients and
moments (torch's FSDP2).

    trainer = ShardedTrainer(load_model(folder), name="policy", config=FullConfig(), like=folder,
                             processes=join_processes("cpu"))

A layer's weights are put together when it is computed, and its gradients summed over the processes
and cut again right after. The memory of weights, gradients and moments is that of one process,
divided by their number, besides one whole layer and the embeddings.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from rookery.errors import TrainError
from rookery.ports import Publisher
from rookery.slots import SlottedModel
from rookery.train.full import FullConfig, FullTrainer
from rookery.train.packing import PackedPass, pack
from rookery.train.processes import Processes
from rookery.types import Datum

__all__ = ["ShardedTrainer"]

_NOTHING = Datum(tokens=(0,), positions=(0,), targets=(0,), weights=(0.0,))


class ShardedTrainer(FullTrainer):
    """A FullTrainer whose weights are spread over processes. All weights are trained."""

    is_joint: ClassVar[bool] = True

    def __init__(
        self,
        model: SlottedModel,
        *,
        name: str,
        config: FullConfig,
        like: Path,
        processes: Processes,
        publisher: Publisher | None = None,
    ) -> None:
        _check(config)
        self._pass = _shard(model, super().logprobs, num_processes=processes.size)
        super().__init__(
            model, name=name, config=config, like=like, publisher=publisher, processes=processes
        )

    def logprobs(self, packed: PackedPass) -> torch.Tensor:
        found: torch.Tensor = self._pass(packed)  # type: ignore[operator]
        if not torch.is_grad_enabled():
            self._pass.reshard()  # else the next pass would compute with these weights again
        return found

    def balanced(self, passes: list[PackedPass]) -> list[PackedPass]:
        most = max(self._processes.exchange(len(passes)))
        return [*passes, *[_empty_pass() for _ in range(most - len(passes))]]

    def add_gradients(
        self, totals: Sequence[torch.Tensor], loss: torch.Tensor, leaves: Sequence[torch.Tensor]
    ) -> None:
        loss.backward()  # type: ignore[no-untyped-call]
        for total, leaf in zip(totals, leaves, strict=True):
            if leaf.grad is not None:
                total += leaf.grad
                leaf.grad = None

    def add_up(self, gradients: Sequence[torch.Tensor]) -> None:
        """They are summed in the backward pass."""


class _Pass(nn.Module):
    """A whole pass as one module: FSDP puts weights together and cuts them at its ends."""

    def __init__(self, model: nn.Module, run: Callable[[PackedPass], torch.Tensor]) -> None:
        super().__init__()
        self.model = model
        self._run = run

    def forward(self, packed: PackedPass) -> torch.Tensor:
        return self._run(packed)


def _shard(
    model: SlottedModel, run: Callable[[PackedPass], torch.Tensor], *, num_processes: int
) -> FSDPModule:
    """Cut the weights of each layer, and those outside of layers together as they may be tied."""
    for weight in model.weights.values():
        weight.requires_grad_()
    mesh = init_device_mesh(model.device.type, (num_processes,))
    parts = [fully_shard(layer, mesh=mesh) for layer in model.decoder_layers]
    whole_pass = fully_shard(_Pass(model.module, run), mesh=mesh)
    for part in (*parts, whole_pass):
        part.set_gradient_divide_factor(1.0)  # weights are divided for all data of a step
        part.set_force_sum_reduction_for_comms(True)  # gloo has no other
    return whole_pass


def _empty_pass() -> PackedPass:
    [packed] = pack([_NOTHING], pass_tokens=1)
    packed.places.clear()
    return packed


def _check(config: FullConfig) -> None:
    if config.layers != "all":
        raise TrainError(
            f"layers is {config.layers}, and weights that are spread over processes are trained as "
            "a whole: write layers: all, or train in one process."
        )
    if config.optimizer == "adamw_8bit":
        raise TrainError(
            "The optimizer adamw_8bit is for one process; several divide the moments among them: "
            "write adamw."
        )
