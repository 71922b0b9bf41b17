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

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch
from pydantic import Field

from rookery.config import Config
from rookery.errors import RookeryError, TrainError, boundary
from rookery.ports import Publisher
from rookery.slots import CausalAttend, SlottedModel
from rookery.slots.model import first_adapted_layer
from rookery.train.head import target_logprobs
from rookery.train.losses import Loss, Targets, make_loss
from rookery.train.packing import PackedPass, check_data, pack
from rookery.train.stacks import one_slot, slot_factors
from rookery.train.trainee import Trainee
from rookery.train.trunk import Trunk
from rookery.types import (
    Adapter,
    ModelRef,
    OptimStep,
    StepOutput,
    TrainOutput,
    TrainRequest,
)

__all__ = ["LoraTrainer", "TrainerConfig"]

Result = TypeVar("Result")
Asked = TypeVar("Asked", TrainRequest, OptimStep)


class TrainerConfig(Config):
    """Memory."""

    pass_tokens: int = Field(default=1024, ge=1)
    """How many tokens one pass takes: less memory when lower, the same gradients."""
    trunk_cache_gib: float = Field(default=1.0, ge=0.0, allow_inf_nan=False)
    """Memory for the hidden states below the first adapted layer; 0 computes them each time."""


class LoraTrainer:
    """A Trainer of adapters. What computes runs in one thread, in the order of the calls.

    A call that is cancelled may still run to its end there; the next waits for it. Engines and
    other trainers may use the model at the same time.
    """

    def __init__(
        self, model: SlottedModel, *, config: TrainerConfig, publisher: Publisher | None = None
    ) -> None:
        if any(linear.weight is None for linear in model.linears.values()):
            raise TrainError(
                "This model was packed for inference and gives no gradients: load it again with "
                "load_model for training."
            )
        self._model = model
        self._config = config
        self._publisher = publisher
        self._trainees: dict[str, Trainee] = {}
        self.trunk = Trunk(model, cache_bytes=int(config.trunk_cache_gib * 2**30))
        # Ends with this object; calls queue in it in their order.
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="trainer")

    def add(self, trainee: str, start: Adapter) -> None:
        """Train this adapter, or a continuation of it that `load` restores, under that name.

        Its weights are published under that name too, whatever the name of the start.
        """
        if trainee in self._trainees:
            raise TrainError(f"There is a trainee {trainee!r} already: remove it, or name another.")
        self._model.bank.check(start, max_rank=max(start.rank, 1))
        self._trainees[trainee] = Trainee(start, name=trainee, device=self._model.device)

    def remove(self, trainee: str) -> None:
        """Forget it with all it has learned. Calls that have begun are still done, on it."""
        self.trainee(trainee)
        del self._trainees[trainee]

    def trainee(self, name: str) -> Trainee:
        """Its state, to be read between calls."""
        if name not in self._trainees:
            known = ", ".join(map(repr, self._trainees)) or "none"
            raise TrainError(f"There is no trainee {name!r}. There are: {known}.")
        return self._trainees[name]

    def adapter(self, trainee: str) -> Adapter:
        """Its weights after all calls so far; waits for them."""
        return self._worker.submit(self.trainee(trainee).adapter).result()

    async def forward_backward(self, requests: Sequence[TrainRequest]) -> list[TrainOutput]:
        """Add gradients; a request that fails adds none.

        Reports `train/loss` (and what else the loss reports) per unit of weight, the plain sum as
        `train/loss_sum`, and `train/num_tokens`, the targets with a weight.
        """
        found = self._found(requests)
        return await self._in_turn(lambda: [self._train(*pair) for pair in found])

    async def forward(self, requests: Sequence[TrainRequest]) -> list[TrainOutput]:
        """The outputs of `forward_backward` without gradients."""
        found = self._found(requests)

        def run() -> list[TrainOutput]:
            with torch.no_grad():
                return [self._train(*pair) for pair in found]

        return await self._in_turn(run)

    async def optim_step(self, steps: Sequence[OptimStep]) -> list[StepOutput]:
        """AdamW; reports `train/grad_norm`, before clipping, and `train/learning_rate`."""
        found = self._found(steps)
        return await self._in_turn(lambda: [self._step(*pair) for pair in found])

    async def save(self, trainee: str, path: Path) -> None:
        state = self.trainee(trainee)
        await self._in_turn(lambda: state.save(path))

    async def load(self, trainee: str, path: Path) -> None:
        state = self.trainee(trainee)
        await self._in_turn(lambda: state.load(path))

    async def publish(self, trainee: str) -> ModelRef:
        if self._publisher is None:
            raise TrainError("This trainer has no publisher: give it one to publish its weights.")
        return await self._publisher.publish(await self._in_turn(self.trainee(trainee).adapter))

    async def _in_turn(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._worker, work)

    def _found(self, asked: Sequence[Asked]) -> list[tuple[Asked, Trainee | TrainError]]:
        """Each with its trainee of now: before its turn, another may have taken the name."""
        pairs: list[tuple[Asked, Trainee | TrainError]] = []
        for one in asked:
            try:
                pairs.append((one, self.trainee(one.trainee)))
            except TrainError as error:
                pairs.append((one, error))
        return pairs

    def _step(self, step: OptimStep, trainee: Trainee | TrainError) -> StepOutput:
        if isinstance(trainee, TrainError):
            return StepOutput(error=str(trainee))
        try:
            norm = trainee.step(step)
        except RookeryError as error:
            return StepOutput(error=str(error))
        metrics = {"train/grad_norm": norm, "train/learning_rate": step.learning_rate}
        return StepOutput(metrics=metrics)

    def _train(self, request: TrainRequest, trainee: Trainee | TrainError) -> TrainOutput:
        if isinstance(trainee, TrainError):
            return TrainOutput(error=str(trainee))
        try:
            with _any_error(trainee):
                loss = make_loss(request.loss, request.loss_options)
                check_data(request.data, shape=self._model.shape, needs=loss.needs)
                return self._run_passes(trainee, request, loss)
        except RookeryError as error:
            return TrainOutput(error=str(error))

    def _run_passes(self, trainee: Trainee, request: TrainRequest, loss: Loss) -> TrainOutput:
        passes = pack(request.data, pass_tokens=self._config.pass_tokens)
        logprobs: list[tuple[float, ...]] = [()] * len(request.data)
        gradients = [torch.zeros_like(p) for p in trainee.parameters]
        sums: Counter[str] = Counter()
        loss_sum = 0.0
        for packed in passes:
            logprobs_T = self._logprobs(packed, trainee)
            output = loss(logprobs_T, _targets(packed, self._model.device))
            trainee.require_finite("loss", output.loss)
            if torch.is_grad_enabled():
                found = torch.autograd.grad(output.loss, trainee.parameters)
                for total, gradient in zip(gradients, found, strict=True):
                    total += gradient
            loss_sum += output.loss.item()
            sums.update({key: value.item() for key, value in output.sums.items()})
            _put_by_datum(logprobs, packed, logprobs_T.tolist())
        if torch.is_grad_enabled():
            trainee.add_gradients(gradients)
        weight = sum(weight for packed in passes for weight in packed.weights)
        # Without weight, or with weights that cancel, there is no mean to report.
        means = {f"train/{key}": value / weight for key, value in sums.items() if weight}
        num_tokens = sum(weight != 0.0 for packed in passes for weight in packed.weights)
        counts = {"train/loss_sum": loss_sum, "train/num_tokens": float(num_tokens)}
        return TrainOutput(metrics={**means, **counts}, logprobs=tuple(logprobs))

    def _logprobs(self, packed: PackedPass, trainee: Trainee) -> torch.Tensor:
        """log p of every target: [T] float32."""
        model, device = self._model, self._model.device
        lengths, num_layers = packed.lengths, self._model.shape.num_layers
        cut = first_adapted_layer(list(trainee.factors), num_layers=num_layers)
        factors = slot_factors(trainee.factors, dtype=model.dtype)
        hidden = model.layers(
            self.trunk.hidden(packed.sequences, cut=cut),
            torch.cat([torch.arange(length, device=device) for length in lengths]),
            attend=CausalAttend(lengths, device=device),
            rows=one_slot(packed.num_tokens, factors, device=device),
            span=range(cut, num_layers),
        )
        return target_logprobs(model, hidden, packed, factors)


@contextmanager
def _any_error(trainee: Trainee) -> Iterator[None]:
    """Whatever goes wrong with a request ends that one; others of the call may have gradients."""
    remedy = "If memory is short lower pass_tokens or trunk_cache_gib."
    with boundary(
        TrainError,
        f"Step {trainee.num_steps + 1}: the request failed",
        remedy={RuntimeError: remedy, MemoryError: remedy},
    ):
        yield


def _targets(packed: PackedPass, device: torch.device) -> Targets:
    def column(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)

    return Targets(
        weights=column(packed.weights),
        datum=torch.tensor(packed.datum, device=device),
        sampled_logprobs=column(packed.columns.get("sampled_logprobs", [])),
        reference_logprobs=column(packed.columns.get("reference_logprobs", [])),
        advantages=column(packed.columns.get("advantages", [])),
    )


def _put_by_datum(
    logprobs: list[tuple[float, ...]], packed: PackedPass, values: list[float]
) -> None:
    """Log-probabilities of a pass to the places of their data in the request."""
    counts = Counter(packed.datum)
    start = 0
    for number, place in enumerate(packed.places):
        logprobs[place] = tuple(values[start : start + counts[number]])
        start += counts[number]
