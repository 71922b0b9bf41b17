"""What a training step holds in memory, found without weights: the step is run on tensors that have
shapes and no data.

    held = measure_step(folder, weights=LoraConfig(rank=8), trainer=TrainerConfig(), tokens=...)
    held.weights, held.moments, held.one_pass

The code that is run is the trainer's own, so that what it keeps for the backward pass is counted as
it is, with or without checkpointed layers.
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
"""Passes of more are not run: each further datum adds the same."""
_8_BIT_LEAST = 4096
"""Smaller tensors keep moments of 32 bit; torchao's number."""
_8_BIT_BLOCK = 256
"""Weights that share a scale; torchao's number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """The data of a step at their longest."""

    prompt_tokens: int
    answer_tokens: int
    num_data: int

    def within(self, context_tokens: int) -> "Lengths":
        """As far as a model reads."""
        prompt = min(self.prompt_tokens, max(1, context_tokens - 1))
        room = max(1, context_tokens - prompt)
        answer = min(self.answer_tokens, room)
        return replace(self, prompt_tokens=prompt, answer_tokens=answer)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlace:
    """Where the trainer's model is, and how it computes; see `load_model`."""

    device: str = "cpu"
    dtype: str = "auto"
    is_exact: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """Bytes, each kind by itself. `one_pass` and `one_step` come and go, the others stay."""

    shape: ModelShape
    dtype: torch.dtype
    weights: int
    """Of the model, as it computes."""
    tied_head: int
    """Of the weights: the part that head and embeddings share; 0 when they share none."""
    trained: int
    """Numbers that are trained."""
    masters: int
    """Float32 copies of what is trained; for an adapter, the adapter."""
    gradients: int
    moments: int
    pass_tokens: int
    """Tokens of a pass."""
    one_pass: int
    """The most that a pass holds: activations, and gradients before they are added."""
    one_step: int
    """The most that the optimizer takes for itself."""
    trunk: int
    """Hidden states below the first trained layer, kept from step to step."""


def measure_step(
    folder: Path,
    *,
    trained: "LoraConfig | Adapter | FullConfig",
    trainer: TrainerConfig,
    lengths: Lengths,
    place: ModelPlace,
) -> StepMemory:
    """`trained` is a new adapter, one that is read, or the model's own weights."""
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
    """(rank, in, out) of every layer that a new adapter adapts."""
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
    """The bytes of a pass of as many of the longest data as one takes."""
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
    """Counts the bytes of tensors that are made under it, and when they go."""

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
        """Views share a storage; it counts once."""
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
    """A float32 model is trained in place."""
    if isinstance(trainee, LoraTrainee):
        return sum(int(p.nbytes) for p in trainee.parameters)
    pairs = zip(trainee.parameters, trainee.leaves, strict=True)
    return sum(int(master.nbytes) for master, leaf in pairs if master is not leaf)


def _moments(num_weights: int, *, is_8_bit: bool) -> int:
    if is_8_bit and num_weights >= _8_BIT_LEAST and num_weights % _8_BIT_BLOCK == 0:
        return 2 * (num_weights + 4 * num_weights // _8_BIT_BLOCK)
    return 8 * num_weights


def _step_bytes(trainee: Trainee, *, device: str) -> int:
    """AdamW keeps a denominator: of one tensor at a time on the CPU, of all on a GPU; that of an
    adapter does not."""
    if isinstance(trainee, LoraTrainee):
        return 0
    sizes = [p.nbytes for p in trainee.parameters]
    return max(sizes) if device == "cpu" else sum(sizes)


def _trunk_bytes(
    trainee: Trainee, model: SlottedModel, lengths: Lengths, config: TrainerConfig
) -> int:
    """Only what lies below the first trained layer is kept."""
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
