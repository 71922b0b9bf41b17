"""What trainers over a slotted model share: trainees by name, requests in, outputs out.

| stage    | consumes           | produces            | waits for                        |
|----------|--------------------|---------------------|----------------------------------|
| callers  | requests, steps    | calls, in order     | their answer                     |
| a thread | one call at a time | gradients, outputs  | nothing                          |

A pass is data laid end to end; `logprobs` of a trainer computes it, the loss is made of that.
"""

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

import torch
from pydantic import Field
from torch.utils.checkpoint import checkpoint

from rookery.config import Config
from rookery.errors import RookeryError, TrainError, boundary
from rookery.ports import Publisher
from rookery.slots import CausalAttend, SlotRows, SlottedModel
from rookery.train.losses import Loss, Targets, make_loss
from rookery.train.packing import COLUMNS, PackedPass, check_data, pack
from rookery.train.part import Part, join_parts
from rookery.train.processes import ALONE, Call, Method, Processes
from rookery.train.trainee import Trainee
from rookery.types import (
    Datum,
    ModelRef,
    OptimStep,
    StepOutput,
    TrainOutput,
    TrainRequest,
    Weights,
)

__all__ = ["SlottedTrainer", "TrainerConfig"]

Result = TypeVar("Result")
Trained = TypeVar("Trained", bound=Trainee)
Asked = TypeVar("Asked", TrainRequest, OptimStep)


class TrainerConfig(Config):
    """Memory."""

    pass_tokens: int = Field(default=1024, ge=1)
    """How many tokens one pass takes: less memory when lower, the same gradients."""
    trunk_cache_gib: float = Field(default=1.0, ge=0.0, allow_inf_nan=False)
    """Memory for the hidden states below the first trained layer; 0 computes them each time."""
    checkpoint_layers: bool = False
    """Keep what enters each layer and compute the rest of it again in the backward pass: memory of
    one layer's activations in place of all, for a third more time."""


class SlottedTrainer(ABC, Generic[Trained]):
    """A Trainer. What computes runs in one thread, in the order of the calls.

    A call that is cancelled may still run to its end there; the next waits for it.
    """

    folder_name: ClassVar[str]
    """What its exports are named in checkpoints, before the step."""

    is_joint: ClassVar[bool] = False
    """All processes compute each pass together, so that none can leave one out."""

    def __init__(
        self,
        model: SlottedModel,
        *,
        config: TrainerConfig,
        publisher: Publisher | None = None,
        processes: Processes = ALONE,
    ) -> None:
        if any(linear.weight is None for linear in model.linears.values()):
            raise TrainError(
                "This model was packed for inference and gives no gradients: load it again with "
                "load_model for training."
            )
        self.trainees: dict[str, Trained] = {}
        """By name; what they hold is to be read between calls."""
        self._model = model
        self._config = config
        self._publisher = publisher
        self._processes = processes
        # Ends with this object; calls queue in it in their order.
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="trainer")

    @abstractmethod
    def logprobs(self, packed: PackedPass, trainee: Trained) -> torch.Tensor:
        """log p of every target: [T] float32, with gradients by the trainee's leaves."""

    @abstractmethod
    def weights_of(self, trainee: Trained, *, name: str) -> Weights:
        """A copy of its weights, to publish."""

    @abstractmethod
    def write_folder(self, trainee: Trained, folder: Path) -> None:
        """Write its weights as a folder that other programs load, in one move."""

    def trainee(self, name: str) -> Trained:
        """Its state, to be read between calls."""
        if name not in self.trainees:
            known = ", ".join(map(repr, self.trainees)) or "none"
            raise TrainError(f"There is no trainee {name!r}. There are: {known}.")
        return self.trainees[name]

    async def forward_backward(self, requests: Sequence[TrainRequest]) -> list[TrainOutput]:
        """Add gradients; a request that fails adds none.

        Reports `train/loss` (and what else the loss reports) per unit of weight, the plain sum as
        `train/loss_sum`, the largest of a value as `train/<key>_max`, and over what was summed:
        `train/weight_sum` and `train/num_tokens`, the targets with a weight. `merged_metrics` joins
        the reports of several calls.
        """
        pairs = self._found(requests)
        return await self._in_turn(lambda: [self._train(*pair) for pair in pairs])

    async def forward(self, requests: Sequence[TrainRequest]) -> list[TrainOutput]:
        """The outputs of `forward_backward` without gradients."""
        pairs = self._found(requests)

        def run() -> list[TrainOutput]:
            with torch.no_grad():
                return [self._train(*pair) for pair in pairs]

        return await self._in_turn(run)

    async def optim_step(self, steps: Sequence[OptimStep]) -> list[StepOutput]:
        """AdamW; reports `train/grad_norm`, before clipping, and `train/learning_rate`."""
        pairs = self._found(steps)
        return await self._in_turn(lambda: [self._step(*pair) for pair in pairs])

    async def save(self, trainee: str, path: Path) -> None:
        state = self.trainee(trainee)
        await self._in_turn(lambda: self._save(state, trainee, path))

    async def load(self, trainee: str, path: Path) -> None:
        """With several processes, each reads the file."""
        state = self.trainee(trainee)
        await self._in_turn(lambda: self._load(state, trainee, path))

    def publish_to(self, publisher: Publisher) -> None:
        """Where `publish` hands weights from now on. Call it before anything else."""
        self._publisher = publisher

    async def publish(self, trainee: str) -> ModelRef:
        if self._publisher is None:
            raise TrainError("This trainer has no publisher: give it one to publish its weights.")
        state = self.trainee(trainee)
        weights = await self._in_turn(lambda: self._weights(state, trainee))
        return await self._publisher.publish(weights)

    async def export(self, trainee: str, folder: Path) -> None:
        """Write its weights as a folder that other programs load."""
        state = self.trainee(trainee)
        await self._in_turn(lambda: self._export(state, trainee, folder))

    async def _in_turn(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._worker, work)

    def _found(self, asked: Sequence[Asked]) -> list[tuple[Asked, Trained | TrainError]]:
        """Each with its trainee of now: before its turn, another may have taken the name."""
        pairs: list[tuple[Asked, Trained | TrainError]] = []
        for one in asked:
            try:
                pairs.append((one, self.trainee(one.trainee)))
            except TrainError as error:
                pairs.append((one, error))
        return pairs

    def _step(self, step: OptimStep, trainee: Trained | TrainError) -> StepOutput:
        if isinstance(trainee, TrainError):
            return StepOutput(error=str(trainee))
        self.tell("optim_step", step.trainee, step)
        try:
            norm = trainee.step(step)
        except RookeryError as error:
            return StepOutput(error=str(error))
        metrics = {"train/grad_norm": norm, "train/learning_rate": step.learning_rate}
        return StepOutput(metrics=metrics)

    def _train(self, request: TrainRequest, trainee: Trained | TrainError) -> TrainOutput:
        if isinstance(trainee, TrainError):
            return TrainOutput(error=str(trainee))
        with_gradients = torch.is_grad_enabled()
        self.tell("forward_backward" if with_gradients else "forward", request.trainee, request)
        part, gradients = self._own_part(request, trainee)
        if part.error and self.is_joint:
            raise TrainError(part.error)  # the others may be waiting in the middle of a pass
        output = join_parts(self._processes.exchange(part))
        if not output.error and with_gradients:
            self.add_up(gradients)
            trainee.add_gradients(gradients)
        return output

    def _own_part(self, request: TrainRequest, trainee: Trained) -> tuple[Part, list[torch.Tensor]]:
        """What this process computes of the request, and its gradients."""
        try:
            with _any_error(trainee):
                loss = make_loss(request.loss, request.loss_options)
                check_data(request.data, shape=self._model.shape, needs=loss.needs)
                return self._run_passes(trainee, request.data, loss)
        except RookeryError as error:
            return Part(error=str(error)), []

    def _run_passes(
        self, trainee: Trained, data: Sequence[Datum], loss: Loss
    ) -> tuple[Part, list[torch.Tensor]]:
        own = self._processes.share(data)
        passes = pack([data[place] for place in own], pass_tokens=self._config.pass_tokens)
        part = Part(num_data=len(data))
        gradients = (
            [torch.zeros_like(p) for p in trainee.parameters] if torch.is_grad_enabled() else []
        )
        for packed in self.balanced(passes):
            logprobs_T = self.logprobs(packed, trainee)
            if not packed.places:
                self._add(gradients, 0.0 * logprobs_T.sum(), trainee)
                continue
            output = loss(logprobs_T, _targets(packed, self._model.device))
            trainee.require_finite("loss", output.loss)
            self._add(gradients, output.loss, trainee)
            part.loss_sum += output.loss.item()
            part.sums.update({key: value.item() for key, value in output.sums.items()})
            for key, value in output.maxima.items():
                part.maxima[key] = max(part.maxima.get(key, -inf), value.item())
            _put_by_datum(part.logprobs, packed, logprobs_T.tolist(), places=own)
        part.weight = sum(weight for packed in passes for weight in packed.weights)
        part.num_tokens = sum(weight != 0.0 for packed in passes for weight in packed.weights)
        return part, gradients

    def balanced(self, passes: list[PackedPass]) -> list[PackedPass]:
        """The passes of this process; where processes compute each pass together, as many as the
        others have, further ones being without places."""
        return passes

    def add_gradients(
        self, totals: Sequence[torch.Tensor], loss: torch.Tensor, leaves: Sequence[torch.Tensor]
    ) -> None:
        """In float32, whatever the leaves are; one that the loss does not depend on adds
        nothing."""
        found = torch.autograd.grad(loss, leaves, allow_unused=True)
        for total, gradient in zip(totals, found, strict=True):
            if gradient is not None:
                total += gradient

    def add_up(self, gradients: Sequence[torch.Tensor]) -> None:
        """Each becomes the sum over all processes."""
        self._processes.add_up(gradients)

    def _add(self, gradients: list[torch.Tensor], loss: torch.Tensor, trainee: Trained) -> None:
        if torch.is_grad_enabled():
            self.add_gradients(gradients, loss, trainee.leaves)

    def _save(self, trainee: Trained, name: str, path: Path) -> None:
        self.tell("save", name, path)
        trainee.save(path, is_writer=self._processes.is_first)

    def _load(self, trainee: Trained, name: str, path: Path) -> None:
        self.tell("load", name, path)
        trainee.load(path)

    def _weights(self, trainee: Trained, name: str) -> Weights:
        self.tell("weights_of", name)
        return self.weights_of(trainee, name=name)

    def _export(self, trainee: Trained, name: str, folder: Path) -> None:
        self.tell("weights_of", name)
        self.write_folder(trainee, folder)

    def tell(self, method: Method, trainee: str, argument: object = None) -> None:
        """Let the other processes do their part of a call that this one, the first, begins."""
        if self._processes.is_first:
            self._processes.tell(Call(method, trainee, argument))

    def help(self) -> object:
        """In a process that is not the first: do its part of every call of that one. Blocks until
        it tells something else than a call, which is returned."""
        while isinstance(told := self._processes.hear(), Call):
            self.do_part(told)
        return told

    def do_part(self, call: Call) -> None:
        """The part of this process of a call."""
        trainee = self.trainee(call.trainee)
        match call.method, call.argument:
            case "forward_backward", TrainRequest() as request:
                self._train(request, trainee)
            case "forward", TrainRequest() as request:
                with torch.no_grad():
                    self._train(request, trainee)
            case "optim_step", OptimStep() as step:
                self._step(step, trainee)
            case "save", Path() as path:
                self._save(trainee, call.trainee, path)
            case "load", Path() as path:
                self._load(trainee, call.trainee, path)
            case "weights_of", _:
                self.weights_of(trainee, name=call.trainee)

    def run_layers(
        self,
        hidden: torch.Tensor,
        packed: PackedPass,
        *,
        cut: int,
        rows: SlotRows | None = None,
    ) -> torch.Tensor:
        """The layers from the cut on, over what enters the first of them."""
        model, device = self._model, self._model.device
        positions = torch.cat([torch.arange(length, device=device) for length in packed.lengths])
        attend = CausalAttend(packed.lengths, device=device, is_exact=model.is_exact)

        def run(states: torch.Tensor, span: range) -> torch.Tensor:
            return model.layers(states, positions, attend=attend, rows=rows, span=span)

        num_layers = model.shape.num_layers
        if not (self._config.checkpoint_layers and torch.is_grad_enabled()):
            return run(hidden, range(cut, num_layers))
        for layer in range(cut, num_layers):
            hidden = checkpoint(
                run, hidden, range(layer, layer + 1), use_reentrant=False, preserve_rng_state=False
            )
        return hidden


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
        **{name: column(packed.columns.get(name, [])) for name in COLUMNS},
    )


def _put_by_datum(
    logprobs: dict[int, tuple[float, ...]],
    packed: PackedPass,
    values: list[float],
    *,
    places: Sequence[int],
) -> None:
    """Log-probabilities of a pass to the places of their data in the request."""
    counts = Counter(packed.datum)
    start = 0
    for number, place in enumerate(packed.places):
        logprobs[places[place]] = tuple(values[start : start + counts[number]])
        start += counts[number]
