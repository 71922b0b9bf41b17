"""The LoRA trainer: gradients and steps of any number of adapters over one slotted model.

    trainer = LoraTrainer(model, config=TrainerConfig())
    trainer.add("poet", initial_adapter(model, LoraConfig(), ...))
    [output] = await trainer.forward_backward([TrainRequest(trainee="poet", data=data)])
    [output] = await trainer.optim_step([OptimStep(trainee="poet", learning_rate=1e-3)])
    adapter = trainer.adapter("poet")

    tokens --trunk, no gradient, cached--> hidden at the cut --layers with gradient--> hidden
           --head, at positions with targets--> log-probabilities --loss--> gradients of A and B

Trainees are computed one after another: each gets the bits it gets alone.
"""

from pathlib import Path

import torch

from rookery.errors import TrainError
from rookery.ports import Publisher
from rookery.slots import SlottedModel
from rookery.slots.model import first_adapted_layer
from rookery.train.head import target_logprobs
from rookery.train.packing import PackedPass
from rookery.train.slotted_trainer import SlottedTrainer, TrainerConfig
from rookery.train.stacks import one_slot, slot_factors
from rookery.train.trainee import LoraTrainee
from rookery.train.trunk import Trunk
from rookery.types import Adapter
from rookery.weights import write_adapter

__all__ = ["LoraTrainer"]


class LoraTrainer(SlottedTrainer[LoraTrainee]):
    """A Trainer of adapters. Engines and other trainers may use the model at the same time."""

    folder_name = "adapter_step"

    def __init__(
        self, model: SlottedModel, *, config: TrainerConfig, publisher: Publisher | None = None
    ) -> None:
        super().__init__(model, config=config, publisher=publisher)
        self.trunk = Trunk(model, cache_bytes=int(config.trunk_cache_gib * 2**30))

    def add(self, trainee: str, start: Adapter) -> None:
        """Train this adapter, or a continuation of it that `load` restores, under that name.

        Its weights are published under that name too, whatever the name of the start.
        """
        if trainee in self.trainees:
            raise TrainError(f"There is a trainee {trainee!r} already: remove it, or name another.")
        self._model.bank.check(start, max_rank=max(start.rank, 1))
        self.trainees[trainee] = LoraTrainee(start, name=trainee, device=self._model.device)

    def remove(self, trainee: str) -> None:
        """Forget it with all it has learned. Calls that have begun are still done, on it."""
        self.trainee(trainee)
        del self.trainees[trainee]

    def adapter(self, trainee: str) -> Adapter:
        """Its weights after all calls so far; waits for them."""
        return self._worker.submit(self.trainee(trainee).adapter).result()

    def weights_of(self, trainee: LoraTrainee, *, name: str) -> Adapter:  # noqa: ARG002
        return trainee.adapter()

    def write_folder(self, trainee: LoraTrainee, folder: Path) -> None:
        """A PEFT folder."""
        write_adapter(trainee.adapter(), folder)

    def logprobs(self, packed: PackedPass, trainee: LoraTrainee) -> torch.Tensor:
        model = self._model
        cut = first_adapted_layer(list(trainee.factors), num_layers=model.shape.num_layers)
        factors = slot_factors(trainee.factors, model)
        rows = one_slot(packed.num_tokens, factors, device=model.device)
        hidden = self.run_layers(
            self.trunk.hidden(packed.sequences, cut=cut), packed, cut=cut, rows=rows
        )
        return target_logprobs(model, hidden, packed, factors)
