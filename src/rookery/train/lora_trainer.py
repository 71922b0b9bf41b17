"""The LoRA trainer: gradients and steps of any number of adapters over one slotted model.

    trainer = LoraTrainer(model, config=TrainerConfig())
    trainer.add("poet", initial_adapter(model, LoraConfig(), ...))
    [output] = await trainer.forward_backward([TrainRequest(trainee="poet", data=data)])
    [output] = await trainer.optim_step([OptimStep(trainee="poet", learning_rate=1e-3)])
    adapter = trainer.adapter("poet")

    tokens --trunk, no gradient, cached--> hidden at the cut --layers with gradient--> hidden
           --head, at positions with targets--> log-probabilities --loss--> gradients of A and B

Requests of one call are computed together, whatever their trainees, losses, ranks and lengths: base
weights are read once for all rows. Each gets the bits it gets alone on the CPU, see `stacks.py`.
"""

import shutil
import tempfile
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence, Set
from functools import partial
from pathlib import Path

import torch
from torch.nn import functional

from rookery.errors import RookeryError, TrainError, boundary
from rookery.ports import Publisher
from rookery.slots import FixedText, SlottedModel
from rookery.slots.model import first_adapted_layer
from rookery.train.head import target_logprobs
from rookery.train.lora_trainee import LoraTrainee
from rookery.train.packing import PackedPass
from rookery.train.processes import ALONE, Processes, RankCall
from rookery.train.running_request import MixedRows, RunningRequest, Turn, mixed_turns
from rookery.train.slotted_trainer import SlottedTrainer, TrainerConfig
from rookery.train.stacks import Stacks, Trunk, padding_rows, pads_alone
from rookery.types import Adapter, TrainOutput, TrainRequest
from rookery.weights import write_adapter

__all__ = ["LoraTrainer"]

# Where idle trainees are kept: on the model's device, in main memory, or in files.
#
#     cache = TraineeCache(device=model.device, device_bytes=2**30, memory_bytes=None)
#     cache.wake([ada, bob])        # now on the device; the least recently used made room
#
# A trainee is restored when it is needed, with the same bits.


MEMORY = torch.device("cpu")


class TraineeCache:
    """Keeps trainees within memory limits; None is no limit. Not thread-safe. If the device is the
    CPU, the lower of both limits holds. Trainees in use together are never moved away."""

    def __init__(
        self, *, device: torch.device, device_bytes: int | None, memory_bytes: int | None
    ) -> None:
        self._device = device
        self._device_bytes = device_bytes
        self._memory_bytes = memory_bytes
        self._used: OrderedDict[LoraTrainee, None] = OrderedDict()
        """Trainees in memory, least recently used first."""
        self._files: dict[LoraTrainee, Path] = {}
        self.folder: Path | None = None
        """Folder of the files, or None before the first. Removed with this object or at exit."""
        self._num_files = 0

    @property
    def num_parked(self) -> int:
        """Trainees in files."""
        return len(self._files)

    def wake(self, trainees: Sequence[LoraTrainee]) -> None:
        """Bring these trainees to the device, and move idle ones away as the limits demand."""
        for trainee in trainees:
            self._used[trainee] = None
            self._used.move_to_end(trainee)
        for trainee in trainees:
            self._bring(trainee)
        busy = set(trainees)
        idle = [trainee for trainee in self._used if trainee not in busy]
        if self._device != MEMORY:
            on_device = {trainee for trainee in self._used if trainee.device != MEMORY}
            for trainee in _beyond(on_device, idle, self._device_bytes):
                trainee.move(MEMORY)
        in_memory = {trainee for trainee in self._used if trainee.device == MEMORY}
        limits = [self._memory_bytes]
        if self._device == MEMORY:
            limits.append(self._device_bytes)
        lowest = min((limit for limit in limits if limit is not None), default=None)
        for trainee in _beyond(in_memory, idle, lowest):
            self._park(trainee)

    def slices(self, wanted: Sequence[LoraTrainee | None]) -> Iterator[slice]:
        """Yield slices of `wanted` in order, each as large as the device can hold at once. A
        trainee over the limit gets a slice of its own. None takes no room."""
        limit = self._device_bytes
        first, held = 0, set[LoraTrainee]()
        for place, trainee in enumerate(wanted):
            if trainee is None or trainee in held:
                continue
            if limit is not None and held and sum(t.nbytes for t in held) + trainee.nbytes > limit:
                yield slice(first, place)
                first, held = place, set()
            held.add(trainee)
        yield slice(first, len(wanted))

    def forget(self, trainee: LoraTrainee) -> None:
        """Drop a removed trainee. Idempotent."""
        self._used.pop(trainee, None)
        if (path := self._files.pop(trainee, None)) is not None:
            path.unlink(missing_ok=True)

    def _bring(self, trainee: LoraTrainee) -> None:
        path = self._files.get(trainee)
        if path is not None:
            trainee.unpark(path, device=self._device)
            del self._files[trainee]
            path.unlink(missing_ok=True)
        elif trainee.device != self._device:
            trainee.move(self._device)

    def _park(self, trainee: LoraTrainee) -> None:
        if self.folder is None:
            self.folder = Path(tempfile.mkdtemp(prefix="rookery-trainees-"))
            weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        self._num_files += 1
        path = self.folder / f"{self._num_files}.safetensors"
        trainee.park(path)
        self._files[trainee] = path
        del self._used[trainee]


def _beyond(
    held: Set[LoraTrainee], idle: Sequence[LoraTrainee], limit: int | None
) -> list[LoraTrainee]:
    """Return the least recently used idle trainees to move until the held ones fit the limit."""
    if limit is None:
        return []
    excess = sum(trainee.nbytes for trainee in held) - limit
    moved = []
    for trainee in idle:
        if excess <= 0:
            break
        if trainee in held:
            moved.append(trainee)
            excess -= trainee.nbytes
    return moved


class LoraTrainer(SlottedTrainer[LoraTrainee]):
    """A Trainer of adapters. Engines and other trainers may use the model at the same time."""

    folder_name = "adapter_step"

    def __init__(
        self,
        model: SlottedModel,
        *,
        config: TrainerConfig,
        publisher: Publisher | None = None,
        processes: Processes = ALONE,
    ) -> None:
        super().__init__(model, config=config, publisher=publisher, processes=processes)
        self._is_in_place = False
        self.trunk = Trunk(model, cache_bytes=int(config.trunk_cache_gib * 2**30))
        self.cache = TraineeCache(
            device=model.device,
            device_bytes=_num_bytes(config.trainees_gib),
            memory_bytes=_num_bytes(config.trainees_memory_gib),
        )

    def add(self, trainee: str, start: Adapter) -> None:
        """Train this adapter under the given name, or the continuation of it that `load` restores.

        Its weights are published under that name too. Blocks until the calls that have begun are
        done, because their thread makes room for it.
        """
        if trainee in self.trainees:
            raise TrainError(f"There is a trainee {trainee!r} already: remove it, or name another.")
        self._model.bank.check(start, max_rank=max(start.rank, 1))
        self._worker.submit(self.broadcast, "add", trainee, start).result()
        added = LoraTrainee(start, name=trainee, device=self._model.device)
        self._worker.submit(self.wake, [added]).result()
        self.trainees[trainee] = added

    def remove(self, trainee: str) -> None:
        """Forget a trainee without waiting; calls that have begun still run on it."""
        removed = self.trainee(trainee)
        # If another process is lost, the next call reports it too.
        self._worker.submit(self.broadcast, "remove", trainee)
        del self.trainees[trainee]
        self._worker.submit(self.cache.forget, removed)

    def do_part(self, call: RankCall) -> None:
        match call.method, call.argument:
            case "add", Adapter() as start:
                self.add(call.trainee, start)
            case "remove", _:
                self.remove(call.trainee)
            case _:
                super().do_part(call)

    def adapter(self, trainee: str) -> Adapter:
        """Return the trainee's weights after all calls so far; blocks until they are done."""
        return self._worker.submit(self._adapter, self.trainee(trainee)).result()

    def _adapter(self, trainee: LoraTrainee) -> Adapter:
        self.wake([trainee])
        return trainee.adapter()

    async def read_text(self, trainee: str, text: FixedText) -> Sequence[float]:
        """Return the text's log-probabilities under the weights after all calls so far."""
        state = self.trainee(trainee)
        return await self._in_turn(lambda: self._read_text(state, text))

    def _read_text(self, trainee: LoraTrainee, text: FixedText) -> Sequence[float]:
        self.wake([trainee])
        return text.logprobs(trainee.factors)

    def wake(self, trainees: Sequence[LoraTrainee]) -> None:
        self.cache.wake(trainees)

    def publish_in_place(self) -> None:
        """Publish copies on the model's device, versioned by step. Call before anything else."""
        self._is_in_place = True

    def weights_of(self, trainee: LoraTrainee, *, name: str) -> Adapter:  # noqa: ARG002
        return trainee.snapshot() if self._is_in_place else trainee.adapter()

    def write_folder(self, trainee: LoraTrainee, folder: Path) -> None:
        """Write a PEFT folder."""
        write_adapter(trainee.adapter(), folder)

    def train_all(
        self, pairs: Sequence[tuple[TrainRequest, LoraTrainee | TrainError]]
    ) -> list[TrainOutput]:
        """Compute the requests together; with several processes, one after another."""
        if len(pairs) == 1 or self._processes.size > 1:
            return super().train_all(pairs)
        wanted = [trainee if isinstance(trainee, LoraTrainee) else None for _, trainee in pairs]
        slices = self.cache.slices(wanted)
        return [output for part in slices for output in self._train_together(pairs[part])]

    def _train_together(
        self, pairs: Sequence[tuple[TrainRequest, LoraTrainee | TrainError]]
    ) -> list[TrainOutput]:
        self.wake([trainee for _, trainee in pairs if isinstance(trainee, LoraTrainee)])
        prepared = [
            trainee if isinstance(trainee, TrainError) else self.prepared(request, trainee)
            for request, trainee in pairs
        ]
        doable = [
            (running, self._cut(running.trainee))
            for running in prepared
            if isinstance(running, RunningRequest)
        ]
        for turns in mixed_turns(doable, pass_tokens=self.pass_tokens):
            self._compute_safely(turns)
        return [
            TrainOutput(error=str(running))
            if isinstance(running, TrainError)
            else self.finished(running)
            for running in prepared
        ]

    def _compute_safely(self, turns: list[Turn]) -> None:
        """Compute the passes together. If that fails, retry each alone to isolate the fault."""
        try:
            with boundary(TrainError, "A pass of several requests failed"):
                self.compute(turns)
        except RookeryError:
            for running, packed in turns:
                with running.guard():
                    self.compute([(running, packed)])

    def compute(self, turns: Sequence[Turn]) -> None:
        is_learned = any(packed.is_learned for _, packed in turns)
        with torch.set_grad_enabled(torch.is_grad_enabled() and is_learned):
            self._compute(turns)

    def _compute(self, turns: Sequence[Turn]) -> None:
        stacks, logprobs = self._logprobs([(running.trainee, packed) for running, packed in turns])
        outputs = [
            running.loss(packed, turn_logprobs)
            for (running, packed), turn_logprobs in zip(turns, logprobs, strict=True)
        ]
        losses = [output.loss for output in outputs if output is not None]
        if losses and torch.is_grad_enabled():
            gradients = torch.autograd.grad(losses, stacks.leaves, allow_unused=True)
            totals = [None if running.has_failed else running.gradients for running, _ in turns]
            stacks.add_gradients(gradients, totals)
        for (running, packed), turn_logprobs, output in zip(turns, logprobs, outputs, strict=True):
            if output is not None:
                running.add(packed, turn_logprobs, output)

    def shares_prompts(self, trainee: LoraTrainee) -> bool:
        """Only on a GPU, whose sums vary by rounding anyway, and only without layers below the cut,
        where each sequence runs alone."""
        return self._cut(trainee) == 0 and self._model.takes_varlen

    def probe(self, packed: PackedPass, trainee: LoraTrainee) -> object:
        stacks, [logprobs] = self._logprobs([(trainee, packed)])
        return torch.autograd.grad(logprobs.sum(), stacks.leaves, allow_unused=True)

    def _logprobs(
        self, members: Sequence[tuple[LoraTrainee, PackedPass]]
    ) -> tuple[Stacks, list[torch.Tensor]]:
        """Return the log p of every target of each pass, [T] float32, with gradients with respect
        to the stacks' leaves. All trainees start at the same layer."""
        model = self._model
        passes = [packed for _, packed in members]
        room = 0 if pads_alone(model.device) else self.pass_tokens
        rows = MixedRows(passes, room=room)
        stacks = Stacks(
            [trainee for trainee, _ in members],
            model,
            num_rows=[len(pass_rows) for pass_rows in rows.spans],
        )
        cut, lengths = self._cut(members[0][0]), rows.lengths
        hidden = rows.padded(self.trunk.hidden(rows.sequences, cut=cut))
        if padding := padding_rows(rows.num_rows, device=model.device):
            hidden = functional.pad(hidden, (0, 0, 0, padding))
            lengths.append(padding)
        slots = stacks.rows(rows.spans, len(hidden), block=rows.block)
        follows = [*rows.follows, None] if padding else rows.follows
        hidden = self.run_layers(hidden, lengths, cut=cut, rows=slots, follows=follows)
        parts = list(zip(passes, rows.unpadded, strict=True))
        head_rows = partial(stacks.rows, layer="lm_head")
        return stacks, target_logprobs(model, hidden, parts, rows_of=head_rows)

    def _cut(self, trainee: LoraTrainee) -> int:
        """Return the first layer that the trainee trains."""
        return first_adapted_layer(list(trainee.places), num_layers=self._model.shape.num_layers)


def _num_bytes(gib: float | None) -> int | None:
    return None if gib is None else int(gib * 2**30)
