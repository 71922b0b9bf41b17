"""The base of trainers over a slotted model: trainees by name, requests in, outputs out.

| stage    | consumes           | produces            | waits for                        |
|----------|--------------------|---------------------|----------------------------------|
| callers  | requests, steps    | calls, in order     | their answer                     |
| a thread | one call at a time | gradients, outputs  | nothing                          |

A pass is data laid end to end. A trainer's `compute` turns it into log-probabilities, losses and
gradients.
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
    """Memory of the trainer."""

    pass_tokens: int | None = Field(default=None, ge=1)
    """Tokens per pass; fewer take less memory and give the same gradients. null: 1,024 on the CPU,
    and on a GPU as many as fit into part of its memory."""
    trunk_cache_gib: float = Field(default=1.0, ge=0.0)
    """GiB for the hidden states below the first trained layer; 0 computes them each time."""
    trainees_gib: float | None = Field(default=None, ge=0.0)
    """GiB on the model's device for adapters in training, with gradients and moments. The least
    recently used move to main memory until they are needed; null: no limit."""
    trainees_memory_gib: float | None = Field(default=None, ge=0.0)
    """GiB of main memory for adapters in training. The least recently used move to files in a
    temporary folder; null: no limit."""
    checkpoint_layers: bool = False
    """Keep only the input of each layer and recompute the rest in the backward pass. Activations
    take the memory of one layer instead of all, and a step takes a third longer."""


CPU_TOKENS = 1024
"""Default tokens per pass on the CPU."""
MOST_TOKENS = 16_384
"""Most tokens per pass on a GPU; larger passes are no faster."""
PASS_PART = 0.4
"""Share of a GPU's memory for the activations of one pass."""
_LAYER_VALUES = 34
"""Numbers that a layer keeps for the backward pass, per token and unit of width."""


def default_pass_tokens(model: SlottedModel) -> int:
    """Return the default of `pass_tokens` for this model on its device. It is a power of two, so
    that small differences between GPUs do not change the last bits."""
    if model.device.type != "cuda":
        return CPU_TOKENS
    shape = model.shape
    token_bytes = shape.num_layers * shape.hidden_size * _LAYER_VALUES * model.dtype.itemsize
    room = PASS_PART * torch.cuda.get_device_properties(model.device).total_memory
    fitting = max(CPU_TOKENS, min(MOST_TOKENS, int(room / token_bytes)))
    return 1 << (fitting.bit_length() - 1)


class SlottedTrainer(ABC, Generic[Trained]):
    """A Trainer that computes in one thread, in the order of the calls. A cancelled call may still
    run to its end there; the next call waits for it."""

    folder_name: ClassVar[str]
    """Prefix of its exports' folder names in checkpoints, before the step."""

    is_joint: ClassVar[bool] = False
    """Whether all processes compute each pass together, so that none can skip one."""

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
        """By name; read their contents only between calls."""
        self._model = model
        self._config = config
        self.pass_tokens = config.pass_tokens or default_pass_tokens(model)
        self.publisher = publisher
        self._processes = processes
        # The thread ends with this object; calls queue in it in their order.
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="trainer")

    @abstractmethod
    def compute(self, turns: Sequence[tuple[RunningRequest[Trained], PackedPass]]) -> None:
        """Compute one pass of each request, then add its loss, log-probabilities and gradients to
        the request. Only `train_all` passes several requests."""

    @abstractmethod
    def probe(self, packed: PackedPass, trainee: Trained) -> object:
        """Run a pass and return all tensors it ends with, to measure its memory."""

    @abstractmethod
    def weights_of(self, trainee: Trained, *, name: str) -> Weights:
        """Return a copy of the trainee's weights, to publish."""

    @abstractmethod
    def write_folder(self, trainee: Trained, folder: Path) -> None:
        """Write the trainee's weights as a folder that other programs load, in one atomic move."""

    def trainee(self, name: str) -> Trained:
        """Return the trainee of this name; read it only between calls."""
        if name not in self.trainees:
            known = ", ".join(map(repr, self.trainees)) or "none"
            raise TrainError(f"There is no trainee {name!r}. There are: {known}.")
        return self.trainees[name]

    async def forward_backward(self, requests: Sequence[TrainRequest]) -> list[TrainOutput]:
        """Add gradients; a request that fails adds none.

        Reports `train/loss` and the loss's other values per unit of weight, the plain sum as
        `train/loss_sum`, maxima as `train/<key>_max`, and the divisors `train/weight_sum` and
        `train/num_tokens` (targets with a weight). `merged_metrics` joins several reports.
        """
        pairs = self._with_trainees(requests)
        return await self._in_turn(lambda: self.train_all(pairs))

    async def forward(self, requests: Sequence[TrainRequest]) -> list[TrainOutput]:
        """Return the outputs of `forward_backward`, without computing gradients."""
        pairs = self._with_trainees(requests)

        def run() -> list[TrainOutput]:
            with torch.no_grad():
                return self.train_all(pairs)

        return await self._in_turn(run)

    async def optim_step(self, steps: Sequence[OptimStep]) -> list[StepOutput]:
        """Step AdamW; reports `train/grad_norm`, before clipping, and `train/learning_rate`."""
        pairs = self._with_trainees(steps)
        return await self._in_turn(lambda: [self._step(*pair) for pair in pairs])

    async def save(self, trainee: str, path: Path) -> None:
        state = self.trainee(trainee)
        await self._in_turn(lambda: self._save(state, trainee, path))

    async def load(self, trainee: str, path: Path) -> None:
        """Restore what `save` wrote. With several processes, each reads the file."""
        state = self.trainee(trainee)
        await self._in_turn(lambda: self._load(state, trainee, path))

    def publish_to(self, publisher: Publisher) -> None:
        """Make `publish` hand weights to this publisher. Call it before anything else."""
        self.publisher = publisher

    async def publish(self, trainee: str) -> ModelRef:
        if self.publisher is None:
            raise TrainError("This trainer has no publisher: give it one to publish its weights.")
        state = self.trainee(trainee)
        weights = await self._in_turn(lambda: self._weights(state, trainee))
        return await self.publisher.publish(weights)

    async def export(self, trainee: str, folder: Path) -> None:
        """Write the trainee's weights as a folder that other programs load."""
        state = self.trainee(trainee)
        await self._in_turn(lambda: self._export(state, trainee, folder))

    async def _in_turn(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._worker, work)

    def _with_trainees(self, requests: Sequence[Asked]) -> list[tuple[Asked, Trained | TrainError]]:
        """Pair each request with its trainee now: later, another may have taken the name."""
        pairs: list[tuple[Asked, Trained | TrainError]] = []
        for one in requests:
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
        """Return an output for each request; here one after another."""
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
        """Whether a pass computes a prefix shared by several data only once."""
        return False

    def finished(self, running: RunningRequest[Trained]) -> TrainOutput:
        """Return the output once all passes are done, and add the gradients to the trainee."""
        if running.has_failed and self.is_joint:
            # The other processes may be waiting in the middle of a pass.
            raise TrainError(running.part.error)
        output = join_parts(self._processes.exchange(running.part))
        if not output.error and torch.is_grad_enabled():
            self.add_up(running.gradients)
            running.trainee.add_gradients(running.gradients)
        return output

    def wake(self, trainees: Sequence[Trained]) -> None:
        """Bring trainees to the device. Called in the computing thread before they are used."""

    def balanced(self, passes: list[PackedPass]) -> list[PackedPass]:
        """Return this process's passes. If processes compute each pass together, add passes without
        places until all have equally many."""
        return passes

    def add_up(self, gradients: Sequence[torch.Tensor]) -> None:
        """Replace each gradient by its sum over all processes."""
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
        """In the first process, make the others do their part of the call that it begins."""
        if self._processes.is_first:
            self._processes.broadcast(RankCall(method, trainee, argument))

    def serve_rank(self) -> object:
        """In any other process, do its part of every call of the first. Blocks until it receives
        anything but a call, and returns that."""
        while isinstance(received := self._processes.receive(), RankCall):
            self.do_part(received)
        return received

    def do_part(self, call: RankCall) -> None:
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
        """Run the layers from the cut on. `hidden` is the input of the first: sequences of these
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


# Publishing: adapters are loaded beside the previous version, whole models replace it.


class AdapterPublisher:
    """A Publisher into any `Adapters`, such as the embedded engine. Publish one version of a name
    at a time: await it before the next."""

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
            # Equal weights have the same version: loaded twice, it is now unloaded once.
            await self._adapters.unload(before)
        return ref


class ModelPublisher:
    """A Publisher of whole models to an engine that has one base model.

    `replace_base` is for example the embedded engine's method, which waits for requests in flight.
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
