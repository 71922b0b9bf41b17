"""The full-weight trainer: gradients and steps of a model's own weights.

    trainer = FullTrainer(load_model(folder), name="policy", config=FullConfig(), like=folder)
    [output] = await trainer.forward_backward([TrainRequest(trainee="policy", data=data)])
    [output] = await trainer.optim_step([OptimStep(trainee="policy", learning_rate=1e-5)])
    await trainer.export("policy", Path("checkpoints/step_1"))

Weights change in place. By default the trainer owns the model and publishes copies. If an engine
shares the model (`share_with`), a step waits for the engine's answers in flight, and publishing
only gives the same memory a new name.
"""

import hashlib
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Protocol

import torch
from pydantic import Field
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from rookery.config import Config
from rookery.errors import TrainError, boundary
from rookery.ports import Publisher
from rookery.slots import SlottedModel, load_model
from rookery.slots.model import decoder_layer
from rookery.train.head import target_logprobs
from rookery.train.packing import PackedPass, pack
from rookery.train.processes import ALONE, Processes, own_part, whole
from rookery.train.running_request import RunningRequest
from rookery.train.schedule import OptimizerKind
from rookery.train.slotted_trainer import SlottedTrainer, TrainerConfig
from rookery.train.stacks import Trunk
from rookery.train.trainee import Trainee
from rookery.types import Datum, ModelRef, ModelWeights, OptimStep, StepOutput

__all__ = [
    "FullConfig",
    "FullTrainee",
    "FullTrainer",
    "FullWeights",
    "ShardedTrainer",
    "read_model_weights",
    "write_model_folder",
]

_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.gguf")
"""Weight files of a model folder, as opposed to its config, tokenizer and templates."""


class FullWeights(Config):
    """Which weights of a model are trained, and by which optimizer."""

    layers: Literal["all"] | Annotated[int, Field(ge=1)] = "all"
    """`all` weights, or only those of this many last decoder layers."""
    optimizer: OptimizerKind = "adamw"
    """AdamW with 32-bit moments, or with 8-bit moments (`adamw_8bit`, extra `optim`)."""


class FullConfig(TrainerConfig, FullWeights):
    """The trained weights, and memory."""


class SharingEngine(Protocol):
    """An engine that computes with the trainer's own memory."""

    def changing_base(self) -> AbstractAsyncContextManager[Callable[[ModelRef], None]]:
        """Compute nothing inside the block. Yields a function that renames the base model."""
        ...


class FullTrainee(Trainee):
    """Weights of a model in training: float32 masters, which float32 weights are themselves."""

    def __init__(self, weights: Mapping[str, nn.Parameter], *, optimizer: OptimizerKind) -> None:
        self._leaves = list(weights.values())
        masters = {
            name: weight
            if weight.dtype == torch.float32
            else nn.Parameter(weight.detach().to(torch.float32))
            for name, weight in weights.items()
        }
        for leaf in self._leaves:
            leaf.requires_grad_()
        super().__init__(masters, fixed={}, optimizer=optimizer)
        self.is_apart = all(w is not masters[name] for name, w in weights.items())
        """Whether the leaves change only through `write_leaves`."""
        self.waits_to_write = False
        """Whether an engine computes with the leaves, so that writing them waits for a pause."""

    @property
    def leaves(self) -> Sequence[torch.Tensor]:
        return self._leaves

    def refresh_leaves(self) -> None:
        if not self.waits_to_write:
            self.write_leaves()

    @torch.no_grad()
    def write_leaves(self) -> None:
        """Copy the parameters into the leaves in one call, since an engine may be waiting."""
        pairs = zip(self._leaves, self.parameters, strict=True)
        apart = [(own_part(leaf), own_part(m)) for leaf, m in pairs if leaf is not m]
        if apart:
            torch._foreach_copy_([leaf for leaf, _ in apart], [master for _, master in apart])


class FullTrainer(SlottedTrainer[FullTrainee]):
    """A Trainer of one trainee: the weights of a model that nobody else changes."""

    folder_name = "step"

    def __init__(
        self,
        model: SlottedModel,
        *,
        name: str,
        config: FullConfig,
        like: Path,
        publisher: Publisher | None = None,
        processes: Processes = ALONE,
    ) -> None:
        """`like` is the model's source folder: exports copy its tokenizer and templates."""
        super().__init__(model, config=config, publisher=publisher, processes=processes)
        self._like = like
        self._name = name
        self._sharing: SharingEngine | None = None
        self._shared_as: ModelRef | None = None
        """Name of the shared weights in the engine; None if its name is out of date."""
        self._publish_s = 0.0
        """Seconds that the sharing engine needed for the last weights."""
        self._cut = _first_layer(config, num_layers=model.shape.num_layers)
        self._trains_all = config.layers == "all"
        self.trunk = Trunk(model, cache_bytes=int(config.trunk_cache_gib * 2**30))
        self.trainees[name] = FullTrainee(
            {
                n: w
                for n, w in model.weights.items()
                if self._trains_all or decoder_layer(n, default=-1) >= self._cut
            },
            optimizer=config.optimizer,
        )

    def share_with(self, engine: SharingEngine) -> None:
        """Let the engine compute with this model. Call it before anything else."""
        self._sharing = engine
        trainee = self.trainees[self._name]
        trainee.waits_to_write = trainee.is_apart

    async def optim_step(self, steps: Sequence[OptimStep]) -> list[StepOutput]:
        """Step AdamW. `train/publish_s` is the time to hand the weights to a sharing engine."""
        if self._sharing is None:
            return await super().optim_step(steps)
        if not self.trainees[self._name].waits_to_write:
            async with self._changing():
                outputs = await super().optim_step(steps)
        else:
            # The engine goes on while the float32 masters change, and waits only for the cast.
            self._shared_as = None
            outputs = await super().optim_step(steps)
            async with self._changing():
                pass
        spent = {"train/publish_s": self._publish_s}
        return [replace(output, metrics={**output.metrics, **spent}) for output in outputs]

    async def load(self, trainee: str, path: Path) -> None:
        async with self._changing():
            await super().load(trainee, path)

    async def publish(self, trainee: str) -> ModelRef:
        if self._sharing is None:
            return await super().publish(trainee)
        self.trainee(trainee)
        if self._shared_as != self._ref():  # else the engine has had them since the last step
            async with self._changing():
                pass
        return self._ref()

    @asynccontextmanager
    async def _changing(self) -> AsyncIterator[None]:
        """Change weights inside the block. A sharing engine names the new ones by the step, since
        a hash would read all of them at every step."""
        if self._sharing is None:
            yield
            return
        self._shared_as = None
        began = time.perf_counter()
        async with self._sharing.changing_base() as rename:
            entered = time.perf_counter()
            try:
                yield
            finally:
                inside_s = time.perf_counter() - entered
                # A cancelled call still runs to its end in the worker.
                rename(await self._in_turn(self._write_shared))
        self._publish_s = time.perf_counter() - began - inside_s
        self._shared_as = self._ref()

    def _write_shared(self) -> ModelRef:
        """Write the current weights into the engine's memory and return their name."""
        trainee = self.trainees[self._name]
        if trainee.waits_to_write:
            trainee.write_leaves()
            if self._model.device.type == "cuda":
                torch.cuda.synchronize(self._model.device)
        return self._ref()

    def _ref(self) -> ModelRef:
        return ModelRef(name=self._name, version=f"step-{self.trainees[self._name].num_steps}")

    async def version(self) -> str:
        """Hash all current weights of the model."""
        return await self._in_turn(self._version)

    def _version(self) -> str:
        self.broadcast("weights_of", self._name)
        return _content_hash(self._whole_weights())

    def compute(self, turns: Sequence[tuple[RunningRequest[FullTrainee], PackedPass]]) -> None:
        [(running, packed)] = turns
        logprobs = self.logprobs(packed)
        output = running.loss(packed, logprobs) if packed.places else None
        if running.has_failed:
            return
        if torch.is_grad_enabled():
            loss = 0.0 * logprobs.sum() if output is None else output.loss
            self.add_gradients(running.gradients, loss, running.trainee.leaves)
        if output is not None:
            running.add(packed, logprobs, output)

    def probe(self, packed: PackedPass, trainee: FullTrainee) -> object:
        loss = self.logprobs(packed).sum()
        return torch.autograd.grad(loss, list(trainee.leaves), allow_unused=True)

    def add_gradients(
        self, totals: Sequence[torch.Tensor], loss: torch.Tensor, leaves: Sequence[torch.Tensor]
    ) -> None:
        """Add to the float32 `totals`. A leaf without influence on the loss adds nothing."""
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
        for total, gradient in zip(totals, gradients, strict=True):
            if gradient is not None:
                total += gradient

    def logprobs(self, packed: PackedPass) -> torch.Tensor:
        """Return log p of every target: [T] float32, differentiable by the trainee's leaves."""
        model = self._model
        if self._trains_all:
            tokens = [token for sequence in packed.sequences for token in sequence]
            entering = model.embed(torch.tensor(tokens, device=model.device))
        else:
            entering = self.trunk.hidden(packed.sequences, cut=self._cut)
        hidden = self.run_layers(entering, packed.lengths, cut=self._cut)
        [logprobs] = target_logprobs(model, hidden, [(packed, range(packed.num_tokens))])
        return logprobs

    def weights_of(self, trainee: FullTrainee, *, name: str) -> ModelWeights:  # noqa: ARG002
        """Return all weights of the model, untrained ones included, in the model's dtype."""
        tensors = {n: w.to("cpu", copy=True) for n, w in self._whole_weights().items()}
        return ModelWeights(name=name, tensors=tensors, version=_content_hash(tensors))

    def _whole_weights(self) -> dict[str, torch.Tensor]:
        return {name: whole(weight.detach()) for name, weight in self._model.weights.items()}

    def write_folder(self, trainee: FullTrainee, folder: Path) -> None:  # noqa: ARG002
        """Write a folder that transformers and vLLM load: weights, config, tokenizer."""
        write_model_folder(self._model, folder, like=self._like, tensors=self._whole_weights())


def write_model_folder(
    model: SlottedModel, folder: Path, *, like: Path, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Write weights as a new model folder, in one move; all other files are copied from `like`."""
    if folder.exists():
        raise TrainError(f"{folder} exists: give a new path, or remove it first.")
    with boundary(TrainError, f"writing {folder}", foreign=(OSError,)):
        folder.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            ignore = shutil.ignore_patterns(*_WEIGHT_FILES, ".*")
            shutil.copytree(like, staging, ignore=ignore, dirs_exist_ok=True)
            model.write(staging, tensors=tensors)
            staging.rename(folder)
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def read_model_weights(folder: Path, *, name: str, dtype: torch.dtype) -> ModelWeights:
    """Read a model folder's weights, named and versioned as this model's trainer does."""
    kind = str(dtype).removeprefix("torch.")
    tensors = {n: w.detach() for n, w in load_model(folder, dtype=kind).weights.items()}
    return ModelWeights(name=name, tensors=tensors, version=_content_hash(tensors))


def _first_layer(config: FullConfig, *, num_layers: int) -> int:
    if config.layers == "all":
        return 0
    if config.layers > num_layers:
        raise TrainError(
            f"layers is {config.layers}; this model has {num_layers}: write 1 to {num_layers}, "
            "or all."
        )
    return num_layers - config.layers


def _content_hash(tensors: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode())
        plain = tensor.detach().cpu().reshape(-1)
        digest.update(plain.view(torch.uint8).numpy().data)
    return digest.hexdigest()


# The full-weight trainer over several processes: each keeps a shard of weights, gradients and
# moments (torch's FSDP2).
#
#     trainer = ShardedTrainer(load_model(folder), name="policy", config=FullConfig(), like=folder,
#                              processes=join_processes("cpu"))
#
# FSDP gathers a layer's weights to compute it, then sums its gradients over the processes and
# shards them again. Weights, gradients and moments take the memory of one process divided by the
# number of processes, plus one whole layer and the embeddings.


_NOTHING = Datum(tokens=(0,), positions=(0,), targets=(0,), weights=(0.0,))


class ShardedTrainer(FullTrainer):
    """A FullTrainer with weights spread over processes; it trains all weights."""

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
        logprobs: torch.Tensor = self._pass(packed)  # type: ignore[operator]
        if not torch.is_grad_enabled():
            self._pass.reshard()  # else the next pass would compute with the old weights
        return logprobs

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
        """Nothing to do: FSDP sums gradients in the backward pass."""


class _Pass(nn.Module):
    """A whole pass as one module: FSDP gathers weights at its start and shards them at its end."""

    def __init__(self, model: nn.Module, run: Callable[[PackedPass], torch.Tensor]) -> None:
        super().__init__()
        self.model = model
        self._run = run

    def forward(self, packed: PackedPass) -> torch.Tensor:
        return self._run(packed)


def _shard(
    model: SlottedModel, run: Callable[[PackedPass], torch.Tensor], *, num_processes: int
) -> FSDPModule:
    """Shard each layer, and all weights outside of layers together, as they may be tied."""
    for weight in model.weights.values():
        weight.requires_grad_()
    mesh = init_device_mesh(model.device.type, (num_processes,))
    parts = [fully_shard(layer, mesh=mesh) for layer in model.decoder_layers]
    whole_pass = fully_shard(_Pass(model.module, run), mesh=mesh)
    for part in (*parts, whole_pass):
        part.set_gradient_divide_factor(1.0)  # weights are already divided over all data of a step
        part.set_force_sum_reduction_for_comms(True)  # gloo supports no other
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
