"""Accepted groups that were not trained on yet, durable in the run.

    await queue.add(group)                   # durable when this returns
    batch = await queue.take(16)             # waits for 16 sequences
    ... a batch that names its groups is durable ...
    await queue.acknowledge(batch)           # never given again

After a restart, a batch that was taken and not acknowledged is given again. No group is given twice
otherwise: the caller knows which were trained on, and passes them to `GroupQueue.open`.

Also the registry: the trainer with its batches, and the environments with their weights.
"""

import asyncio
import base64
import contextlib
import json
import math
import mmap
import os
import struct
import time
import uuid
from collections import Counter, OrderedDict, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, fields, replace
from hashlib import blake2b
from itertools import count
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from pydantic import BaseModel, ConfigDict, Field

from rookery.compat.atropos.engine_side import Drawn
from rookery.compat.atropos.scored_group import ScoredGroup, complete_groups, pick_batch
from rookery.errors import TaskError
from rookery.runs import Run
from rookery.runs.disk import disk_boundary
from rookery.runs.journal import Journal
from rookery.types import KeptTokens

__all__ = [
    "Environment",
    "GroupQueue",
    "IsGone",
    "PostReceipts",
    "QueuedGroup",
    "Registration",
    "Registry",
    "TrainerRegistration",
    "stays",
]


SILENT_S = 120.0
"""An environment silent for this long is gone: live ones keep asking for their status."""
ACTIVE_S = 20.0
"""A trainer heard from within this time is active, and a second one is refused."""
MAX_NUMBER = 10**9
"""Limit on registered numbers, so that their products are finite."""
MAX_NAME = 1000
MIN_WEIGHT = 0.01
"""Lower bound, so that no environment gets no groups at all."""


class TrainerRegistration(BaseModel):
    """A trainer's description of itself."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    wandb_group: str = ""
    wandb_project: str = ""
    batch_size: int = Field(ge=1, le=MAX_NUMBER)
    """Sequences per step."""
    max_token_len: int
    """Longest sequence in tokens; 0 or less for any."""
    checkpoint_dir: str = ""
    save_checkpoint_interval: int = -1
    starting_step: int = Field(default=0, ge=0)
    num_steps: int = -1


class Registration(BaseModel):
    """An environment's description of itself."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    max_token_length: int = Field(ge=0, le=MAX_NUMBER)
    desired_name: str = Field(max_length=MAX_NAME)
    weight: float = Field(default=1.0, ge=0, le=MAX_NUMBER, allow_inf_nan=False)
    group_size: int = Field(ge=1, le=MAX_NUMBER)
    min_batch_allocation: float | None = Field(default=None, ge=0, le=1)


@dataclass(frozen=True, slots=True)
class Environment:
    """One environment, connected or gone."""

    id: int
    name: str
    registration: Registration
    group_size: int
    is_connected: bool = True

    @property
    def share(self) -> float:
        """Weight times longest sequence, which decides its part of all groups."""
        return self.registration.max_token_length * self.registration.weight


class Registry:
    """Trainer and environments of one gateway."""

    def __init__(
        self,
        trainer: TrainerRegistration | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.trainer = trainer
        self.environments: list[Environment] = []
        self._clock = clock
        self._trainer_id = ""
        self._heard_s = -math.inf
        self._seen_s: dict[int, float] = {}

    def enter(self, trainer: TrainerRegistration) -> str:
        """Register a trainer and return its number; TaskError while another one is active."""
        silent_s = self._clock() - self._heard_s
        if self.trainer is not None and silent_s < ACTIVE_S:
            raise TaskError(
                f"A trainer with batch_size {self.trainer.batch_size} asked {silent_s:.0f} s "
                f"ago, and a gateway serves one trainer: stop it and register again after "
                f"{ACTIVE_S:g} s, or start another gateway."
            )
        self.trainer, self._trainer_id = trainer, str(uuid.uuid4().int)
        self._heard_s = self._clock()
        return self._trainer_id

    def hear_trainer(self, trainer_id: str) -> None:
        """Note a sign of life; TaskError unless the trainer registered last or gives no number."""
        if trainer_id and trainer_id != self._trainer_id:
            raise TaskError(
                "Another trainer has registered since, and gets the batches: stop one of them."
            )
        self._heard_s = self._clock()

    def leave(self) -> None:
        self.trainer, self._heard_s = None, -math.inf

    def note_seen(self, env_id: int) -> Environment:
        """Note a sign of life from an environment."""
        environment = self.find(env_id)
        self._seen_s[env_id] = self._clock()
        return environment

    def is_live(self, environment: Environment) -> bool:
        """True if it is connected and was heard from within `SILENT_S`."""
        silent_s = self._clock() - self._seen_s.get(environment.id, self._clock())
        return environment.is_connected and silent_s < SILENT_S

    @property
    def minimums(self) -> dict[int, float]:
        """`min_batch_allocation` of live environments that set it."""
        return {
            environment.id: environment.registration.min_batch_allocation
            for environment in self.environments
            if self.is_live(environment)
            and environment.registration.min_batch_allocation is not None
        }

    def add(self, registration: Registration) -> Environment:
        same = sum(
            e.registration.desired_name == registration.desired_name for e in self.environments
        )
        environment = Environment(
            id=len(self.environments),
            name=f"{registration.desired_name}_{same}",
            registration=registration,
            group_size=registration.group_size,
        )
        self.environments.append(environment)
        return self.note_seen(environment.id)

    def find(self, env_id: int) -> Environment:
        if not 0 <= env_id < len(self.environments):
            known = ", ".join(f"{e.id} ({e.name})" for e in self.environments) or "none"
            raise TaskError(
                f"There is no environment {env_id}; there are: {known}. Register it first with "
                "/register-env, again after a restart of the gateway."
            )
        return self.environments[env_id]

    def disconnect(self, env_id: int) -> None:
        self.environments[env_id] = replace(self.find(env_id), is_connected=False)

    def weight(self, environment: Environment) -> float:
        """Return its part of all groups."""
        total = sum(e.share for e in self.environments if self.is_live(e))
        return max(MIN_WEIGHT, environment.share / total if total else 1.0)

    def status(self, env_id: int, queue: Sequence[ScoredGroup], *, step: int) -> dict[str, object]:
        """Return the answer of `/status-env`, with sizes in groups of this environment."""
        environment = self.note_seen(env_id)
        sizes = [group.size for group in queue if group.env_id == env_id]
        size = max([environment.group_size, *sizes])
        self.environments[env_id] = replace(environment, group_size=size)
        largest = max([1, *(group.size for group in queue)])
        return {
            "current_step": step,
            "queue_size": (sum(sizes) + self._from_others(env_id, queue, largest)) // size,
            "unallocated_fraction": 1.0 - min(sum(self.minimums.values()), 1.0),
            "self_queue_size": sum(sizes) // size,
            "max_group_size": largest,
            "env_weight": self.weight(environment),
        }

    def _from_others(self, env_id: int, queue: Sequence[ScoredGroup], largest: int) -> int:
        """Return other environments' sequences beyond their minimum allocations."""
        if largest == 1 or self.trainer is None:
            return 0
        totals: dict[int | None, int] = {}
        for group in queue:
            if group.env_id != env_id:
                totals[group.env_id] = totals.get(group.env_id, 0) + group.size
        minimums = self.minimums
        free = 0
        for other, total in totals.items():
            least = 0.0 if other is None else minimums.get(other, 0.0)
            packed = -(-total // largest) * largest
            free += max(0, packed - int(self.trainer.batch_size * least))
        return free


# Groups that are kept although their sender got no answer, and will send them again.
#
#     async with answers.in_turn(digests):
#         known = answers.find(digests)
#         ... keep those that are not known ...
#         answers.settle(digests, seqs, is_told=True)
#
# If the connection ends before the answer, an environment sends its group again. The Atropos API
# does not distinguish that from another, equal group. The receipts do: a group that equals a kept
# one of the same environment, whose sender never got an answer, is that one. So there is one group
# per answered post, and equal groups are all trained on.
#
# Receipts survive a kill: the numbers of the newest answered groups are in a file that is mapped
# into memory, which needs no wait for the disk. They do not survive a crash of the machine, after
# which all groups count as answered.


MAX_UNTOLD = 100_000
"""Limit on contents without an answer; the oldest are forgotten, and count as new when resent."""
NUM_NUMBERS = 4096
"""Numbers in the file: more groups are never in flight at once."""
BOOT = Path("/proc/sys/kernel/random/boot_id")
_BOOT_BYTES = 40
_FILE_BYTES = _BOOT_BYTES + 8 * NUM_NUMBERS


class PostReceipts:
    """Records whose senders got an answer, for one queue."""

    def __init__(self, file: mmap.mmap, *, last: int) -> None:
        self._file = file
        self._oldest = last - NUM_NUMBERS
        """Groups up to this number count as answered."""
        self._untold: OrderedDict[bytes, list[int]] = OrderedDict()
        """Numbers of unanswered groups, by content."""
        self._turns: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()

    @classmethod
    def open(cls, path: Path, *, last: int) -> "PostReceipts":
        """Open the file; `last` is the number of the newest group. Blocks on the disk."""
        boot = BOOT.read_bytes().strip() if BOOT.exists() else b""
        boot = boot[:_BOOT_BYTES].ljust(_BOOT_BYTES, b"\0")
        with disk_boundary(f"Opening {path}"):
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                if os.fstat(handle).st_size != _FILE_BYTES:
                    os.ftruncate(handle, 0)
                    os.pwrite(handle, bytes(_FILE_BYTES), 0)  # raises on a full disk
                file = mmap.mmap(handle, _FILE_BYTES)
            finally:
                os.close(handle)
        answers = cls(file, last=last)
        if file[:_BOOT_BYTES] != boot or not boot.strip(b"\0"):
            # The numbers first: if killed in between, they do not count.
            for seq in range(max(1, answers._oldest), last + 1):
                answers._mark_told(seq)
            file[:_BOOT_BYTES] = boot
        return answers

    def is_told(self, seq: int) -> bool:
        """True if a sender may have got an answer for the group."""
        return seq <= self._oldest or self._file[self._place(seq)] == struct.pack("<Q", seq)

    def miss(self, digest: bytes, seq: int) -> None:
        """Note a kept group whose sender got no answer."""
        numbers = self._untold.setdefault(digest, [])
        if seq not in numbers:
            numbers.append(seq)
        self._untold.move_to_end(digest)
        while len(self._untold) > MAX_UNTOLD:
            self._untold.popitem(last=False)

    @asynccontextmanager
    async def in_turn(self, digests: Sequence[bytes]) -> AsyncIterator[None]:
        """Take equal groups in turn: a sender may time out and resend one that is being written."""
        async with AsyncExitStack() as stack:
            for digest in sorted(set(digests)):
                turn = self._turns.setdefault(digest, asyncio.Lock())
                await stack.enter_async_context(turn)
            yield

    def find(self, digests: Sequence[bytes]) -> list[int | None]:
        """Return the number of each group that is kept already, else None."""
        counted: Counter[bytes] = Counter()
        known: list[int | None] = []
        for digest in digests:
            numbers = self._untold.get(digest, [])
            place = counted[digest]
            known.append(numbers[place] if place < len(numbers) else None)
            counted[digest] += 1
        return known

    def settle(self, digests: Sequence[bytes], seqs: Sequence[int], *, is_told: bool) -> None:
        """Record that these groups are kept, and whether their sender gets the answer."""
        for digest, seq in zip(digests, seqs, strict=True):
            if not is_told:
                self.miss(digest, seq)
                continue
            self._mark_told(seq)
            remaining = [number for number in self._untold.pop(digest, []) if number != seq]
            if remaining:
                self._untold[digest] = remaining

    def _mark_told(self, seq: int) -> None:
        self._file[self._place(seq)] = struct.pack("<Q", seq)

    def _place(self, seq: int) -> slice:
        begin = _BOOT_BYTES + 8 * (seq % NUM_NUMBERS)
        return slice(begin, begin + 8)


IsGone = Callable[[], Awaitable[bool]]
"""True if the sender of a group has gone and gets no answer."""

LOOK_S = 1.0
"""Seconds between tries to form a batch when no group arrives: environments that left or fell
silent stop holding up the others without a signal."""


@dataclass(frozen=True, slots=True)
class QueuedGroup:
    """A group with its number, unique in the run."""

    seq: int
    group: ScoredGroup
    draws: tuple[Drawn | None, ...]
    """How each sequence was drawn; None if unknown."""


class GroupQueue:
    """Filled by environments, drained by one trainer."""

    def __init__(self, journal: Journal, registry: Registry, receipts: PostReceipts) -> None:
        self._journal = journal
        self._receipts = receipts
        self._registry = registry
        self._waiting: list[QueuedGroup] = []
        self._buffered: defaultdict[int, list[QueuedGroup]] = defaultdict(list)
        """Groups whose size differs from their environment's, until some of them add up to it."""
        self._taken: set[int] = set()
        self._changed = asyncio.Event()

    @classmethod
    async def open(cls, run: Run, registry: Registry, *, trained: Collection[int]) -> "GroupQueue":
        """Open the queue of a run; `trained` are the numbers of groups in durable batches."""
        journal = await asyncio.to_thread(run.open_journal)
        receipts = await asyncio.to_thread(
            lambda: PostReceipts.open(run.path / "answered", last=journal.last_seq)
        )
        queue = cls(journal, registry, receipts)
        done = set(trained)
        # The journal was cut only after groups in `done`.
        first = next(seq for seq in count(1) if seq not in done)

        def read() -> list[QueuedGroup]:
            entries = (e for e in journal.entries(after=first - 1) if e.seq not in done)
            return [_decode(entry.seq, entry.data) for entry in entries]

        for queued in await asyncio.to_thread(read):
            if not receipts.is_told(queued.seq):
                receipts.miss(_digest(_text(queued.group)), queued.seq)
            queue._place(queued)
        return queue

    @property
    def groups(self) -> Sequence[ScoredGroup]:
        """Waiting groups, oldest first."""
        return [queued.group for queued in self._waiting]

    @property
    def buffered_sizes(self) -> Sequence[int]:
        """Sizes of groups that wait for others to add up to their environment's group size."""
        return [queued.group.size for buffer in self._buffered.values() for queued in buffer]

    async def add_all(
        self,
        groups: Sequence[ScoredGroup],
        draws: Sequence[Sequence[Drawn | None]],
        *,
        is_gone: IsGone,
    ) -> list[int | None]:
        """Accept groups, all or none; they are durable on return. Per group, return None if it
        waits for a batch or came before, else its environment's buffered sequences."""
        encoded = await asyncio.to_thread(lambda: list(map(_encode, groups, draws)))
        digests = [digest for digest, _ in encoded]
        async with self._receipts.in_turn(digests):
            seqs = self._receipts.find(digests)
            new = [place for place, known in enumerate(seqs) if known is None]
            data = [encoded[place][1] for place in new]
            waiting: list[int | None] = [None] * len(groups)
            for seq, place in zip(
                await self._journal.append_many(data) if data else (), new, strict=True
            ):
                seqs[place] = seq
                waiting[place] = self._waiting_for(
                    QueuedGroup(seq, groups[place], tuple(draws[place]))
                )
            kept = [seq for seq in seqs if seq is not None]
            self._receipts.settle(digests, kept, is_told=not await is_gone())
        return waiting

    def _waiting_for(self, queued: QueuedGroup) -> int | None:
        if self._place(queued):
            return None
        assert queued.group.env_id is not None
        return sum(other.group.size for other in self._buffered[queued.group.env_id])

    def _place(self, queued: QueuedGroup) -> bool:
        """Queue a group; False if its size differs from its environment's, and it is buffered."""
        env_id = queued.group.env_id
        size = None if env_id is None else self._registry.find(env_id).group_size
        if env_id is None or size == queued.group.size:
            self._waiting.append(queued)
            self._changed.set()
            return True
        buffer = self._buffered[env_id]
        buffer.append(queued)
        places = complete_groups([other.group.size for other in buffer], size or 1)
        self._waiting += [buffer[place] for place in places]
        self._buffered[env_id] = [q for place, q in enumerate(buffer) if place not in places]
        self._changed.set()
        return False

    async def take(self, num_sequences: int) -> list[QueuedGroup]:
        """Wait for the next batch; it stays in the journal until it is acknowledged."""
        while not (batch := self.take_now(num_sequences)):
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._changed.wait()
        return batch

    def take_now(self, num_sequences: int) -> list[QueuedGroup]:
        """Return the next batch; empty if there is none."""
        sized = [(queued.group.env_id, queued.group.size) for queued in self._waiting]
        minimums = self._registry.minimums
        places = pick_batch(sized, num_sequences=num_sequences, minimums=minimums)
        batch = [self._waiting[place] for place in places]
        taken = set(places)
        self._waiting = [q for place, q in enumerate(self._waiting) if place not in taken]
        self._taken.update(queued.seq for queued in batch)
        return batch

    def put_back(self, batch: Sequence[QueuedGroup]) -> None:
        """Queue a taken batch again that no trainer got."""
        self._taken.difference_update(queued.seq for queued in batch)
        self._waiting = sorted([*self._waiting, *batch], key=lambda queued: queued.seq)
        self._changed.set()

    def take_these(self, seqs: Sequence[int]) -> list[QueuedGroup]:
        """Take waiting groups by number: a batch that was given before a restart."""
        wanted = set(seqs)
        buffers = [self._waiting, *self._buffered.values()]
        by_seq = {q.seq: q for buffer in buffers for q in buffer if q.seq in wanted}
        for buffer in buffers:
            buffer[:] = [queued for queued in buffer if queued.seq not in wanted]
        self._taken.update(by_seq)
        return [by_seq[seq] for seq in seqs if seq in by_seq]

    def take_rest(self) -> list[QueuedGroup]:
        """Take all waiting groups, whether or not they make a batch."""
        buffered = [queued for buffer in self._buffered.values() for queued in buffer]
        rest, self._waiting = [*self._waiting, *buffered], []
        self._buffered.clear()
        self._taken.update(queued.seq for queued in rest)
        return rest

    async def acknowledge(self, batch: Sequence[QueuedGroup]) -> None:
        """Forget groups in a durable batch, and free their space in the journal. Their numbers stay
        while an older group waits, perhaps forever if its size never adds up."""
        self._taken.difference_update(queued.seq for queued in batch)
        buffered = [queued for buffer in self._buffered.values() for queued in buffer]
        remaining = [*self._taken, *(queued.seq for queued in [*self._waiting, *buffered])]
        newest = max((queued.seq for queued in batch), default=0)
        through = min(remaining, default=newest + 1) - 1
        if through > 0:
            await self._journal.cut(through=through)
        if kept := [queued.seq for queued in batch if queued.seq > through]:
            await self._journal.empty(kept)


async def stays() -> bool:
    """`IsGone` of a sender that always gets its answer."""
    return False


def _encode(group: ScoredGroup, draws: Sequence[Drawn | None]) -> tuple[bytes, bytes]:
    """Return the digest of the group, and the bytes to store."""
    known = [None if drawn is None else _drawn_document(drawn) for drawn in draws]
    text = _text(group)
    if "NaN" in text or "Infinity" in text:  # a number, or words of a message
        _check_numbers(group)
    return _digest(text), f'{{"group":{text},"draws":{json.dumps(known)}}}'.encode()


def _text(group: ScoredGroup) -> str:
    return group.model_dump_json(exclude_none=True)


def _digest(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=16).digest()


def _check_numbers(group: ScoredGroup) -> None:
    try:
        json.dumps(group.model_dump(mode="json"), allow_nan=False)
    except ValueError as error:
        raise TaskError(
            "A group has a NaN or infinite number, which JSON cannot hold: send finite numbers, "
            "also at tokens that were not drawn."
        ) from error


def _decode(seq: int, data: bytes) -> QueuedGroup:
    document = json.loads(data)
    draws = tuple(None if drawn is None else _read_drawn(drawn) for drawn in document["draws"])
    return QueuedGroup(seq, ScoredGroup.model_validate(document["group"]), draws)


def _drawn_document(drawn: Drawn) -> dict[str, Any]:
    document = {field.name: getattr(drawn, field.name) for field in fields(drawn)}
    kept = drawn.kept
    return document | {"kept": [kept.ends, base64.b64encode(kept.data).decode()]}


def _read_drawn(document: dict[str, Any]) -> Drawn:
    ends, data = document.get("kept") or ((), "")
    kept = KeptTokens(ends=tuple(ends), data=base64.b64decode(data))
    return Drawn(**document | {"kept": kept})
