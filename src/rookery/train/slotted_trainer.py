"""What trainers over a slotted model share: trainees by name, requests in, outputs out.

| stage    | consumes           | produces            | waits for                        |
|----------|--------------------|---------------------|----------------------------------|
| callers  | requests, steps    | calls, in order     | their answer                     |
| a thread | one call at a time | gradients, outputs  | nothing                          |

A pass is data laid end to end; `compute` of a trainer gives it log-probabilities, the losses of
them and gradients.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

import torch
from pydantic import Field
from torch.utils.checkpoint import checkpoint

from rookery.config import Config
from rookery.errors import RookeryError, TrainError, boundary
from rookery.ports import Adapters, Publisher
from rookery.slots import CausalAttend, SlotRows, SlottedModel
from rookery.train.packing import PackedPass
from rookery.train.processes import ALONE, Method, Processes, RankCall
from rookery.train.running_request import RunningRequest, join_parts
from rookery.train.trainee import Trainee
from rookery.types import (
    Adapter,
    ModelRef,
    ModelWeights,
    OptimStep,
    StepOutput,
    TrainOutput,
    TrainRequest,
    Weights,
)

__all__ = [
    "CPU_TOKENS",
    "MOST_TOKENS",
    "PASS_PART",
    "AdapterPublisher",
    "ModelPublisher",
    "SlottedTrainer",
    "TrainerConfig",
]


Result = TypeVar("Result")
Trained = TypeVar("Trained", bound=Trainee)
Asked = TypeVar("Asked", TrainRequest, OptimStep)


class TrainerConfig(Config):
    """Memory."""

    pass_tokens: int | None = Field(default=None, ge=1)
    """How many tokens one pass takes: less memory when lower, the same gradients. null: 1,024 on
    the CPU, and on a GPU as many as fit into part of its memory."""
    trunk_cache_gib: float = Field(default=1.0, ge=0.0)
    """Memory for the hidden states below the first trained layer; 0 computes them each time."""
    trainees_gib: float | None = Field(default=None, ge=0.0)
    """Memory of the model's device for adapters in training, with gradients and moments. Those used
    longest ago go to main memory and come back when they are needed; none: no limit."""
    trainees_memory_gib: float | None = Field(default=None, ge=0.0)
    """The same of main memory, from where they go to files in a temporary folder."""
    checkpoint_layers: bool = False
    """Keep what enters each layer and compute the rest of it again in the backward pass: memory of
    one layer's activations in place of all, for a third more time."""


CPU_TOKENS = 1024
"""Of a pass on the CPU, unless a config says it."""
MOST_TOKENS = 16_384
"""Of a pass on a GPU: more do not make it faster."""
PASS_PART = 0.4
"""Of a GPU's memory, for the activations of one pass."""
_LAYER_VALUES = 34
"""Numbers that a layer keeps for the backward pass, times its width, per token."""


def default_pass_tokens(model: SlottedModel) -> int:
    """What `pass_tokens` is for this model on its device unless a config says it: a power of two,
    so that small differences between GPUs do not show in the last bits."""
    if model.device.type != "cuda":
        return CPU_TOKENS
    shape = model.shape
    token_bytes = shape.num_layers * shape.hidden_size * _LAYER_VALUES * model.dtype.itemsize
    room = PASS_PART * torch.cuda.get_device_properties(model.device).total_memory
    fitting = max(CPU_TOKENS, min(MOST_TOKENS, int(room / token_bytes)))
    return 1 << (fitting.bit_length() - 1)


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
        self.pass_tokens = config.pass_tokens or default_pass_tokens(model)
        self.publisher = publisher
        self._processes = processes
        # Ends with this object; calls queue in it in their order.
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="trainer")

    @abstractmethod
    def compute(self, turns: Sequence[tuple[RunningRequest[Trained], PackedPass]]) -> None:
        """One pass of each request: its loss, its log-probabilities and its gradients are added to
        the request when all is computed. Several requests only where `train_all` gives them."""

    @abstractmethod
    def probe(self, packed: PackedPass, trainee: Trained) -> object:
        """All tensors that a pass ends with, to measure what it holds."""

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
        return await self._in_turn(lambda: self.train_all(pairs))

    async def forward(self, requests: Sequence[TrainRequest]) -> list[TrainOutput]:
        """The outputs of `forward_backward` without gradients."""
        pairs = self._found(requests)

        def run() -> list[TrainOutput]:
            with torch.no_grad():
                return self.train_all(pairs)

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
        self.publisher = publisher

    async def publish(self, trainee: str) -> ModelRef:
        if self.publisher is None:
            raise TrainError("This trainer has no publisher: give it one to publish its weights.")
        state = self.trainee(trainee)
        weights = await self._in_turn(lambda: self._weights(state, trainee))
        return await self.publisher.publish(weights)

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
        self.broadcast("optim_step", step.trainee, step)
        self.wake([trainee])
        try:
            with boundary(TrainError, "The step failed"):
                norm = trainee.step(step)
        except RookeryError as error:
            return StepOutput(error=str(error))
        metrics = {"train/grad_norm": norm, "train/learning_rate": step.learning_rate}
        return StepOutput(metrics=metrics)

    def train_all(
        self, pairs: Sequence[tuple[TrainRequest, Trained | TrainError]]
    ) -> list[TrainOutput]:
        """An output for each request; here one after another."""
        return [self._train(*pair) for pair in pairs]

    def _train(self, request: TrainRequest, trainee: Trained | TrainError) -> TrainOutput:
        if isinstance(trainee, TrainError):
            return TrainOutput(error=str(trainee))
        method: Method = "forward_backward" if torch.is_grad_enabled() else "forward"
        self.broadcast(method, request.trainee, request)
        self.wake([trainee])
        running = self.prepared(request, trainee)
        if not running.has_failed:
            with running.guard():
                for packed in self.balanced(running.passes):
                    self.compute([(running, packed)])
                    if running.has_failed:
                        break
        return self.finished(running)

    def prepared(self, request: TrainRequest, trainee: Trained) -> RunningRequest[Trained]:
        running = RunningRequest(request, trainee)
        running.prepare(
            self._model.shape,
            pass_tokens=self.pass_tokens,
            shares_prompts=self.shares_prompts(trainee),
            processes=self._processes,
        )
        return running

    def shares_prompts(self, trainee: Trained) -> bool:  # noqa: ARG002
        """Whether what several data begin with is computed once for all of them in a pass."""
        return False

    def finished(self, running: RunningRequest[Trained]) -> TrainOutput:
        """The output, when all passes are done; the trainee gets the gradients."""
        if running.has_failed and self.is_joint:
            # The others may be waiting in the middle of a pass.
            raise TrainError(running.part.error)
        output = join_parts(self._processes.exchange(running.part))
        if not output.error and torch.is_grad_enabled():
            self.add_up(running.gradients)
            running.trainee.add_gradients(running.gradients)
        return output

    def wake(self, trainees: Sequence[Trained]) -> None:
        """Called before trainees are used, in the thread that computes."""

    def balanced(self, passes: list[PackedPass]) -> list[PackedPass]:
        """The passes of this process; where processes compute each pass together, as many as the
        others have, further ones being without places."""
        return passes

    def add_up(self, gradients: Sequence[torch.Tensor]) -> None:
        """Each becomes the sum over all processes."""
        self._processes.add_up(gradients)

    def _save(self, trainee: Trained, name: str, path: Path) -> None:
        self.broadcast("save", name, path)
        self.wake([trainee])
        trainee.save(path, is_writer=self._processes.is_first)

    def _load(self, trainee: Trained, name: str, path: Path) -> None:
        self.broadcast("load", name, path)
        self.wake([trainee])
        trainee.load(path)

    def _weights(self, trainee: Trained, name: str) -> Weights:
        self.broadcast("weights_of", name)
        self.wake([trainee])
        return self.weights_of(trainee, name=name)

    def _export(self, trainee: Trained, name: str, folder: Path) -> None:
        self.broadcast("weights_of", name)
        self.wake([trainee])
        self.write_folder(trainee, folder)

    def broadcast(self, method: Method, trainee: str, argument: object = None) -> None:
        """Let the other processes do their part of a call that this one, the first, begins."""
        if self._processes.is_first:
            self._processes.broadcast(RankCall(method, trainee, argument))

    def serve_rank(self) -> object:
        """In a process that is not the first: do its part of every call of that one. Blocks until
        it tells something else than a call, which is returned."""
        while isinstance(told := self._processes.receive(), RankCall):
            self.do_part(told)
        return told

    def do_part(self, call: RankCall) -> None:
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
                self.wake([trainee])
                self.weights_of(trainee, name=call.trainee)

    def run_layers(
        self,
        hidden: torch.Tensor,
        lengths: Sequence[int],
        *,
        cut: int,
        rows: Sequence[SlotRows] = (),
        follows: Sequence[int | None] = (),
    ) -> torch.Tensor:
        """The layers from the cut on, over what enters the first of them: sequences of these
        lengths end to end, of which some may follow others."""
        model, device = self._model, self._model.device
        starts = [0 if place is None else lengths[place] for place in follows] or [0] * len(lengths)
        spans = [range(start, start + num) for start, num in zip(starts, lengths, strict=True)]
        positions = torch.tensor(list(chain.from_iterable(spans)), device=device)
        attend = CausalAttend(lengths, device=device, is_exact=model.is_exact, follows=follows)

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


# Publishing: adapters are loaded beside the version before, whole models take its place.


class AdapterPublisher:
    """A Publisher over anything adapters can be loaded into, the embedded engine for one.

    Publications of one name follow one another: await one before the next.
    """

    def __init__(self, adapters: Adapters) -> None:
        self._adapters = adapters
        self._published: dict[str, ModelRef] = {}

    async def publish(self, weights: Weights) -> ModelRef:
        if not isinstance(weights, Adapter):
            raise TrainError(
                f"{weights.name} is a whole model; only adapters can be loaded here. Train an "
                "adapter, or publish to an engine that takes whole weights."
            )
        ref = await self._adapters.load(weights)
        before = self._published.get(weights.name)
        self._published[weights.name] = ref
        if before is not None:
            # Equal weights are the same version, loaded twice and now unloaded once.
            await self._adapters.unload(before)
        return ref


class ModelPublisher:
    """A Publisher of whole models to an engine that has one base model.

    `replace_base` is the embedded engine's, for one: it waits for requests in flight.
    """

    def __init__(self, replace_base: Callable[[ModelWeights], Awaitable[ModelRef]]) -> None:
        self._replace_base = replace_base

    async def publish(self, weights: Weights) -> ModelRef:
        if isinstance(weights, Adapter):
            raise TrainError(
                f"{weights.name} is an adapter; this publisher takes whole models. Use an "
                "AdapterPublisher."
            )
        return await self._replace_base(weights)
