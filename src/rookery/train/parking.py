"""Where trainees are while they are not used: on the model's device, in main memory, in files.

    lot = ParkingLot(device=model.device, device_bytes=2**30, memory_bytes=None)
    lot.wake([ada, bob])        # on the device now; those used longest ago made room

A trainee that is needed comes back by itself, with the same bits.
"""

import shutil
import tempfile
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence, Set
from pathlib import Path

import torch

from rookery.train.lora_trainee import LoraTrainee

__all__ = ["ParkingLot"]

MEMORY = torch.device("cpu")


class ParkingLot:
    """For one thread. None is no limit; where the device is the CPU the two limits are one, the
    lower. What is used at the same time is never moved away, whatever the limits."""

    def __init__(
        self, *, device: torch.device, device_bytes: int | None, memory_bytes: int | None
    ) -> None:
        self._device = device
        self._device_bytes = device_bytes
        self._memory_bytes = memory_bytes
        self._used: OrderedDict[LoraTrainee, None] = OrderedDict()
        """Those with tensors in memory, used longest ago first."""
        self._files: dict[LoraTrainee, Path] = {}
        self.folder: Path | None = None
        """Of the files, once there was one; removed with this object, or at the end of Python."""
        self._num_files = 0

    @property
    def num_parked(self) -> int:
        """Trainees in files."""
        return len(self._files)

    def wake(self, trainees: Sequence[LoraTrainee]) -> None:
        """Bring them to the device, and others away as far as the limits ask for."""
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
        """The wanted ones in order, cut into runs that the device can hold at the same time; one
        that alone is over the limit is a run of its own. None takes no room."""
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
        """It was removed. Idempotent."""
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
    """Which of the held ones to move, the idle ones used longest ago first, to be within the
    limit."""
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
