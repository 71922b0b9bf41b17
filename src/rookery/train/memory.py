"""The memory of a training step, measured without weights: the step runs on fake tensors, which
have shapes and no data.

    held = measure_step(folder, trained=LoraConfig(rank=8), trainer=TrainerConfig(), ...)
    held.weights, held.moments, held.one_pass

The trainer's own code runs, so the tensors it keeps for the backward pass are counted exactly, with
or without checkpointed layers.
"""

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from rookery.errors import TrainError, boundary
from rookery.slots.loading import make_empty_model
from rookery.slots.model import ModelShape, SlottedModel, first_adapted_layer
from rookery.train.full import FullConfig, FullTrainer
from rookery.train.lora_trainee import LoraConfig, LoraTrainee, target_layers
from rookery.train.lora_trainer import LoraTrainer
from rookery.train.packing import PackedPass, pack
from rookery.train.slotted_trainer import SlottedTrainer, TrainerConfig
from rookery.train.trainee import Trainee
from rookery.types import Adapter, Datum, LoraFactors

__all__ = ["Lengths", "ModelPlace", "StepMemory", "measure_step"]

MEASURED_TOKENS = 2**16
"""Larger passes are extrapolated: each further datum adds the same bytes."""
_8_BIT_LEAST = 4096
"""Smaller tensors keep 32-bit moments; torchao's threshold."""
_8_BIT_BLOCK = 256
"""Weights per shared scale; torchao's block size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """The longest prompt and answer in the data of a step."""

    prompt_tokens: int
    answer_tokens: int
    num_data: int

    def within(self, context_tokens: int) -> "Lengths":
        """Return the lengths cut to a model's context."""
        prompt = min(self.prompt_tokens, max(1, context_tokens - 1))
        room = max(1, context_tokens - prompt)
        answer = min(self.answer_tokens, room)
        return replace(self, prompt_tokens=prompt, answer_tokens=answer)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlace:
    """Device and arithmetic of the trainer's model; see `load_model`."""

    device: str = "cpu"
    dtype: str = "auto"
    is_exact: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """Bytes of each kind. `one_pass` and `one_step` are temporary, the others stay allocated."""

    shape: ModelShape
    dtype: torch.dtype
    weights: int
    """The model's weights, in its dtype."""
    tied_head: int
    """The part of `weights` that head and embeddings share; 0 if they share none."""
    trained: int
    """Number of trained parameters, not bytes."""
    masters: int
    """Float32 copies of the trained weights; for an adapter, the adapter."""
    gradients: int
    moments: int
    pass_tokens: int
    """Tokens per pass, not bytes."""
    one_pass: int
    """Peak of a pass: activations, and gradients before they are added."""
    one_step: int
    """Peak of the optimizer's temporary tensors."""
    trunk: int
    """Hidden states below the first trained layer, cached across steps."""


def measure_step(
    folder: Path,
    *,
    trained: "LoraConfig | Adapter | FullConfig",
    trainer: TrainerConfig,
    lengths: Lengths,
    place: ModelPlace,
) -> StepMemory:
    """Measure one step that trains a new adapter, a given adapter, or the model's weights."""
    device = place.device
    with FakeTensorMode(), boundary(TrainError, f"The memory of {folder} cannot be planned"):
        model = make_empty_model(folder, device=device, dtype=place.dtype, is_exact=place.is_exact)
        lengths = lengths.within(model.shape.context_tokens)
        measured, trainee = _make_trainer(model, trained, trainer)
        gradients = [torch.zeros_like(p) for p in trainee.parameters]
        one_pass = _largest_pass(measured, trainee, lengths)
        kind = trained.optimizer if isinstance(trained, FullConfig) else "adamw"
        weights = model.weights
        return StepMemory(
            shape=model.shape,
            dtype=model.dtype,
            weights=sum(weight.nbytes for weight in weights.values()),
            tied_head=0 if "lm_head.weight" in weights else _nbytes_of(weights, "embed_tokens"),
            trained=sum(p.numel() for p in trainee.parameters),
            masters=_masters(trainee),
            gradients=sum(gradient.nbytes for gradient in gradients),
            moments=sum(
                _moments(p.numel(), is_8_bit=kind == "adamw_8bit") for p in trainee.parameters
            ),
            pass_tokens=measured.pass_tokens,
            one_pass=one_pass,
            one_step=_step_bytes(trainee, device=device),
            trunk=_trunk_bytes(trainee, model, lengths, trainer),
        )


def adapter_shapes(model: SlottedModel, config: LoraConfig) -> dict[str, tuple[int, int, int]]:
    """Return (rank, in, out) of every layer that a new adapter adapts."""
    linears = model.linears
    return {
        name: (config.rank, linears[name].in_features, linears[name].out_features)
        for name in target_layers(model, config)
    }


def _make_trainer(
    model: SlottedModel, trained: "LoraConfig | Adapter | FullConfig", config: TrainerConfig
) -> tuple[SlottedTrainer[Any], Trainee]:
    if isinstance(trained, FullConfig):
        full = FullTrainer(model, name="policy", config=trained, like=Path())
        return full, full.trainee("policy")
    shapes = (
        adapter_shapes(model, trained)
        if isinstance(trained, LoraConfig)
        else {n: (len(f.a), f.a.shape[1], len(f.b)) for n, f in trained.factors.items()}
    )
    factors = {
        name: LoraFactors(a=torch.empty(rank, size), b=torch.empty(out, rank), scale=1.0)
        for name, (rank, size, out) in shapes.items()
    }
    start = Adapter(name="policy", base="", factors=factors, version="")
    trainer = LoraTrainer(model, config=config)
    trainer.trainees["policy"] = LoraTrainee(start, name="policy", device=model.device)
    return trainer, trainer.trainee("policy")


def _largest_pass(trainer: SlottedTrainer[Any], trainee: Trainee, lengths: Lengths) -> int:
    """Return the bytes of a full pass of the longest data."""
    size = lengths.prompt_tokens + lengths.answer_tokens - 1
    datum = Datum(
        tokens=(0,) * size,
        positions=tuple(range(lengths.prompt_tokens - 1, size)),
        targets=(0,) * lengths.answer_tokens,
        weights=(1.0,) * lengths.answer_tokens,
    )

    def measure(num: int) -> int:
        [packed] = pack([datum] * num, pass_tokens=num * size)
        return _measure_pass(trainer, trainee, packed)

    num = max(1, min(trainer.pass_tokens // size, lengths.num_data))
    most = max(2, MEASURED_TOKENS // size)
    if num <= most:
        return measure(num)
    half = most // 2
    most_bytes = measure(most)
    return most_bytes + (num - most) * (most_bytes - measure(half)) // (most - half)


def _measure_pass(trainer: SlottedTrainer[Any], trainee: Trainee, packed: PackedPass) -> int:
    with _Meter() as meter:
        held = trainer.probe(packed, trainee)
        del held
    return int(meter.peak_bytes)


class _Meter(TorchDispatchMode):
    """Counts the bytes of live tensors that are made under it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0
        self._held_bytes = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        made = func(*args, **(kwargs or {}))
        for tensor in tree_iter(made):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor.untyped_storage())
        return made

    def _add(self, storage: torch.UntypedStorage) -> None:
        """Views share a storage, which counts once."""
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        self._held_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self._held_bytes)
        weakref.finalize(storage, self._drop, key, storage.nbytes())

    def _drop(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self._held_bytes -= num_bytes


def _masters(trainee: Trainee) -> int:
    """Return the bytes of the masters; a float32 model is trained in place and has none."""
    if isinstance(trainee, LoraTrainee):
        return sum(int(p.nbytes) for p in trainee.parameters)
    pairs = zip(trainee.parameters, trainee.leaves, strict=True)
    return sum(int(master.nbytes) for master, leaf in pairs if master is not leaf)


def _moments(num_weights: int, *, is_8_bit: bool) -> int:
    if is_8_bit and num_weights >= _8_BIT_LEAST and num_weights % _8_BIT_BLOCK == 0:
        return 2 * (num_weights + 4 * num_weights // _8_BIT_BLOCK)
    return 8 * num_weights


def _step_bytes(trainee: Trainee, *, device: str) -> int:
    """AdamW's denominator: one tensor's on the CPU, all on a GPU; an adapter's counts as 0."""
    if isinstance(trainee, LoraTrainee):
        return 0
    sizes = [p.nbytes for p in trainee.parameters]
    return max(sizes) if device == "cpu" else sum(sizes)


def _trunk_bytes(
    trainee: Trainee, model: SlottedModel, lengths: Lengths, config: TrainerConfig
) -> int:
    """Only hidden states below the first trained layer are cached."""
    if isinstance(trainee, LoraTrainee):
        names = list(trainee.factors)
        cut = first_adapted_layer(names, num_layers=model.shape.num_layers)
    else:
        cut = 0 if len(trainee.parameters) == len(model.weights) else 1
    tokens = lengths.num_data * (lengths.prompt_tokens + lengths.answer_tokens - 1)
    needed = tokens * model.shape.hidden_size * model.dtype.itemsize
    return min(needed, int(config.trunk_cache_gib * 2**30)) if cut else 0


def _nbytes_of(weights: Mapping[str, torch.Tensor], part: str) -> int:
    return sum(weight.nbytes for name, weight in weights.items() if part in name)
