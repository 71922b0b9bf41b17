"""The LoRA trainer: gradients of one adapter over a slotted model, AdamW, exact save and load.

    trainer = LoraTrainer(model, initial_adapter(model, LoraConfig(), ...), config=TrainerConfig())
    metrics = await trainer.forward_backward(batch, loss="cross_entropy")
    metrics |= await trainer.optim_step(learning_rate=1e-3)
    adapter = trainer.adapter()

    tokens --trunk, no gradient, cached--> hidden at the cut --layers with gradient--> hidden
           --head, at weighted tokens alone--> log-probabilities --loss--> gradients of A and B

Weights, gradients and moments are float32 whatever the model's dtype. What computes is a plain
function in a thread; calls of one trainer take turns.
"""

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isfinite
from pathlib import Path

import torch
from pydantic import Field
from torch import nn
from torch.nn import functional

from rookery.config import Config
from rookery.errors import TrainError, boundary
from rookery.ports import Publisher
from rookery.slots import CausalAttend, SlottedModel
from rookery.slots.model import first_adapted_layer
from rookery.train.losses import Loss, Targets, find_loss
from rookery.train.mount import gradients, mounted, one_slot
from rookery.train.packing import PackedPass, check_batch, pack
from rookery.train.state import read_state, write_state
from rookery.train.trunk import Trunk
from rookery.types import Adapter, Datum, Json, LoraFactors, ModelRef
from rookery.weights import make_adapter

__all__ = ["LoraTrainer", "TrainerConfig"]

_MOMENTS = ("exp_avg", "exp_avg_sq")
"""What AdamW keeps per parameter, by torch's names, besides the step count."""


class TrainerConfig(Config):
    """AdamW and memory."""

    beta1: float = Field(default=0.9, ge=0.0, lt=1.0)
    """How much of the mean gradient is kept from step to step."""
    beta2: float = Field(default=0.999, ge=0.0, lt=1.0)
    """The same of the mean squared gradient."""
    epsilon: float = Field(default=1e-8, gt=0.0, allow_inf_nan=False)
    """Added to the root of the mean squared gradient."""
    weight_decay: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    """Per step the factors shrink by learning rate * this."""
    max_grad_norm: float = Field(default=1.0, ge=0.0, allow_inf_nan=False)
    """Longer gradients are scaled down to this norm; 0 leaves them as they are."""
    pass_tokens: int = Field(default=1024, ge=1)
    """How many tokens one pass takes: less memory when lower, the same gradients."""
    trunk_cache_gib: float = Field(default=1.0, ge=0.0, allow_inf_nan=False)
    """Memory for the hidden states below the first adapted layer; 0 computes them each time."""


class LoraTrainer:
    """A Trainer of one adapter. Starts from an adapter, whose ranks, scales and layers it keeps.

    A call that is cancelled may still run to its end in its thread; the next waits for it.
    """

    def __init__(
        self,
        model: SlottedModel,
        start: Adapter,
        *,
        config: TrainerConfig,
        publisher: Publisher | None = None,
    ) -> None:
        model.bank.check(start, max_rank=max(start.rank, 1))
        if any(linear.weight is None for linear in model.linears.values()):
            raise TrainError(
                "This model was packed for inference and gives no gradients: load it again with "
                "load_model for training."
            )
        self.num_steps = 0
        """Optimizer steps taken."""
        self._model = model
        self._name, self._base = start.name, start.base
        self._config = config
        self._publisher = publisher
        self._factors = {
            layer: LoraFactors(
                a=_leaf(lora.a, model.device), b=_leaf(lora.b, model.device), scale=lora.scale
            )
            for layer, lora in sorted(start.factors.items())
        }
        self._parameters = [t for lora in self._factors.values() for t in (lora.a, lora.b)]
        self._gradients: list[torch.Tensor] | None = None
        self._optimizer = torch.optim.AdamW(
            self._parameters,
            betas=(config.beta1, config.beta2),
            eps=config.epsilon,
            weight_decay=config.weight_decay,
        )
        cut = first_adapted_layer(list(self._factors), num_layers=model.shape.num_layers)
        self._span = range(cut, model.shape.num_layers)
        self.trunk = Trunk(model, cut=cut, cache_bytes=int(config.trunk_cache_gib * 2**30))
        # Held by the thread of the call in progress; waited for by the threads of later calls.
        self._turn = threading.Lock()

    def adapter(self) -> Adapter:
        """The current weights, copied: float32, on the CPU."""
        with self._turn:
            factors = {
                layer: LoraFactors(a=_copy(lora.a), b=_copy(lora.b), scale=lora.scale)
                for layer, lora in self._factors.items()
            }
        return make_adapter(self._name, base=self._base, factors=factors)

    async def forward_backward(self, batch: Sequence[Datum], *, loss: str) -> dict[str, float]:
        """Add the gradients of the batch; a batch that fails leaves none.

        Reports `train/loss` (and what else the loss reports) per unit of weight, the plain sum as
        `train/loss_sum`, and `train/num_tokens`, the weighted ones.
        """
        function = find_loss(loss)
        check_batch(batch, shape=self._model.shape)
        return await asyncio.to_thread(self._forward_backward, list(batch), function)

    async def optim_step(self, *, learning_rate: float) -> dict[str, float]:
        """AdamW over the gradients since the last step, clipped by their common norm.

        Reports `train/grad_norm`, before clipping, and `train/learning_rate`.
        """
        if not (isfinite(learning_rate) and learning_rate >= 0):
            raise TrainError(f"The learning rate is {learning_rate}; it must be 0 or more.")
        return await asyncio.to_thread(self._optim_step, learning_rate)

    async def save(self, path: Path) -> None:
        """Write weights, moments, step count and gradients not yet applied, as one file."""
        await asyncio.to_thread(self._save, path)

    async def load(self, path: Path) -> None:
        """Restore what `save` wrote, exactly; nothing changes when it does not fit."""
        await asyncio.to_thread(self._load, path)

    async def publish(self) -> ModelRef:
        if self._publisher is None:
            raise TrainError("This trainer has no publisher: give it one to publish its weights.")
        adapter = await asyncio.to_thread(self.adapter)
        return await self._publisher.publish(adapter)

    def _forward_backward(self, batch: list[Datum], loss: Loss) -> dict[str, float]:
        passes = pack(batch, pass_tokens=self._config.pass_tokens)
        sums: Counter[str] = Counter()
        loss_sum = 0.0
        with self._turn:
            total = self._gradients or [torch.zeros_like(p) for p in self._parameters]
            with self._torch_errors(), mounted(self._model, self._factors) as parameters:
                for packed in passes:
                    output = loss(self._logprobs(packed), _targets(packed, self._model.device))
                    self._require_finite("loss", output.loss)
                    found = gradients(output.loss, parameters, self._factors)
                    total = [before + more for before, more in zip(total, found, strict=True)]
                    loss_sum += output.loss.item()
                    sums.update({key: value.item() for key, value in output.sums.items()})
            self._gradients = total
        weight = sum(w for packed in passes for w in packed.weights)
        # Weights of both signs can cancel, and then there is no mean to report.
        means = {f"train/{key}": value / weight for key, value in sums.items() if weight}
        num_tokens = sum(len(packed.weights) for packed in passes)
        return {**means, "train/loss_sum": loss_sum, "train/num_tokens": float(num_tokens)}

    def _logprobs(self, packed: PackedPass) -> torch.Tensor:
        """log p of every target: [T] float32."""
        model, device = self._model, self._model.device
        lengths = packed.lengths
        hidden = model.layers(
            self.trunk.hidden(packed.sequences),
            torch.cat([torch.arange(length, device=device) for length in lengths]),
            attend=CausalAttend(lengths, device=device),
            rows=one_slot(sum(lengths), device=device),
            span=self._span,
        )
        predicting = hidden.index_select(0, torch.tensor(packed.target_rows, device=device))
        logits = model.logits(predicting, rows=one_slot(len(predicting), device=device))
        targets = torch.tensor(packed.target_tokens, device=device)
        return -functional.cross_entropy(logits, targets, reduction="none")

    def _optim_step(self, learning_rate: float) -> dict[str, float]:
        with self._turn:
            if self._gradients is None:
                raise TrainError(
                    "There are no gradients to apply: call forward_backward before optim_step."
                )
            norm = nn.utils.get_total_norm(self._gradients)
            self._require_finite("gradient", norm)
            for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
                parameter.grad = gradient
            if self._config.max_grad_norm:
                limit = self._config.max_grad_norm
                nn.utils.clip_grads_with_norm_(self._parameters, limit, norm)
            for group in self._optimizer.param_groups:
                group["lr"] = learning_rate
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
            self._gradients = None
            self.num_steps += 1
        return {"train/grad_norm": norm.item(), "train/learning_rate": learning_rate}

    def _require_finite(self, what: str, value: torch.Tensor) -> None:
        if not torch.isfinite(value):
            raise TrainError(
                f"Step {self.num_steps + 1}: the {what} is {value.item():g}. The training has "
                "diverged: lower the learning rate."
            )

    @contextmanager
    def _torch_errors(self) -> Iterator[None]:
        remedy = "If memory is short lower pass_tokens or trunk_cache_gib."
        with boundary(
            TrainError,
            f"Step {self.num_steps + 1}: a pass failed",
            foreign=(RuntimeError, MemoryError),
            remedy={RuntimeError: remedy, MemoryError: remedy},
        ):
            yield

    def _save(self, path: Path) -> None:
        with self._turn:
            tensors = dict(self._named("weights", self._parameters))
            for moment in _MOMENTS if self.num_steps else ():
                found = [self._optimizer.state[p][moment] for p in self._parameters]
                tensors |= self._named(moment, found)
            if self._gradients is not None:
                tensors |= self._named("gradients", self._gradients)
            scales: dict[str, Json] = {name: lora.scale for name, lora in self._factors.items()}
            document: dict[str, Json] = {"num_steps": self.num_steps, "scales": scales}
            write_state(path, tensors=tensors, document=document)

    def _load(self, path: Path) -> None:
        tensors, document = read_state(path)
        with self._turn:
            num_steps = self._check_fits(path, tensors, document)

            def saved(kind: str) -> list[torch.Tensor]:
                names = self._named(kind, self._parameters)
                return [tensors[name].to(self._model.device) for name in names]

            with torch.no_grad():
                for parameter, weights in zip(self._parameters, saved("weights"), strict=True):
                    parameter.copy_(weights)
            self._optimizer.state.clear()
            if num_steps:
                moments = [saved(moment) for moment in _MOMENTS]
                for parameter, *found in zip(self._parameters, *moments, strict=True):
                    self._optimizer.state[parameter] = {
                        "step": torch.tensor(float(num_steps)),
                        **dict(zip(_MOMENTS, found, strict=True)),
                    }
            has_gradients = any(name.startswith("gradients/") for name in tensors)
            self._gradients = saved("gradients") if has_gradients else None
            self.num_steps = num_steps

    def _named(self, kind: str, values: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Values of all parameters by their names in a state file."""
        names = [f"{kind}/{layer}/{factor}" for layer in self._factors for factor in ("a", "b")]
        return dict(zip(names, values, strict=True))

    def _check_fits(
        self, path: Path, tensors: Mapping[str, torch.Tensor], document: Mapping[str, Json]
    ) -> int:
        """Raise TrainError unless the state is complete and of this shape; its step count."""
        num_steps = document.get("num_steps")
        kinds = {name.partition("/")[0] for name in tensors}
        if not isinstance(num_steps, int) or kinds - {"gradients"} != {
            "weights",
            *(_MOMENTS if num_steps else ()),
        }:
            raise TrainError(f"{path} is not a whole trainer state: give a file that `save` wrote.")
        need = {
            k: t.shape for kind in kinds for k, t in self._named(kind, self._parameters).items()
        }
        have = {name: tensor.shape for name, tensor in tensors.items()}
        scales = {layer: lora.scale for layer, lora in self._factors.items()}
        if have != need or document.get("scales") != scales:
            raise TrainError(
                f"{path} is the state of a trainer with other layers, ranks or scales: make the "
                "trainer from an adapter of the same shape as the one that was saved."
            )
        return num_steps


def _targets(packed: PackedPass, device: torch.device) -> Targets:
    def column(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)

    return Targets(
        weights=column(packed.weights),
        datum=torch.tensor(packed.datum, device=device),
        sampled=None if packed.sampled is None else column(packed.sampled),
        advantages=None if packed.advantages is None else column(packed.advantages),
    )


def _leaf(tensor: torch.Tensor, device: torch.device) -> nn.Parameter:
    return nn.Parameter(tensor.detach().to(device=device, dtype=torch.float32, copy=True))


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to(device="cpu", copy=True)
