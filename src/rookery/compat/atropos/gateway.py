"""The Atropos API without HTTP: a trainer, environments, and the groups between them.

    gateway = await Gateway.open(run, trainer=registration, vocab_size=49152)
    gateway.register_env(registration)
    await gateway.accept(group)
    batch = await gateway.queue.take(16)

The run records accepted groups and registrations, so environments keep working across a restart of
the gateway.
"""

import asyncio
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from rookery.compat.atropos.engine_side import Drawn, SampleIndex
from rookery.compat.atropos.group_queue import (
    Environment,
    GroupQueue,
    IsGone,
    QueuedGroup,
    Registration,
    Registry,
    TrainerRegistration,
    stays,
)
from rookery.compat.atropos.scored_group import (
    ScoredGroup,
    check_group,
    drawn_sequences,
)
from rookery.errors import TaskError
from rookery.runs import NewEvent, Run

__all__ = ["Delivery", "Gateway", "trained_groups"]

logger = logging.getLogger(__name__)
ENVIRONMENT, GONE = "environment", "environment_gone"


@dataclass(slots=True)
class Gateway:
    """State of one gateway: one trainer, its environments and their groups."""

    run: Run
    registry: Registry
    queue: GroupQueue
    samples: SampleIndex
    vocab_size: int
    step: int = 0
    """Number of steps that the trainer has begun."""
    is_started: bool = False
    """True once the trainer has asked for a batch, for which environments wait."""
    latest: ScoredGroup | None = None
    num_accepted: int = 0
    num_refused: int = 0
    """Number of requests whose groups were refused."""
    last_refusal: str = ""
    _registering: asyncio.Lock = field(default_factory=asyncio.Lock)

    @classmethod
    async def open(
        cls,
        run: Run,
        *,
        trainer: TrainerRegistration | None,
        vocab_size: int,
        trained: Collection[int] = (),
    ) -> "Gateway":
        """Open the gateway of a run; `trained` are the groups in durable batches."""
        registry = Registry(trainer)
        for event in run.events(ENVIRONMENT):
            registry.add(Registration.model_validate(event.payload))
        for event in run.events(GONE):
            registry.disconnect(int(event.payload["env_id"]))
        queue = await GroupQueue.open(run, registry, trained=trained)
        return cls(run, registry, queue, SampleIndex(), vocab_size)

    async def register_env(self, registration: Registration) -> Environment | None:
        """Register an environment; None if the trainer has not started yet."""
        if not self.is_started:
            return None
        payload = registration.model_dump(mode="json")
        async with self._registering:
            # Its number is its place in the run: stored there first, one at a time.
            key = str(len(self.registry.environments))
            await self.run.append(ENVIRONMENT, payload, key=key)
            return self.registry.add(registration)

    async def disconnect_env(self, env_id: int) -> None:
        self.registry.disconnect(env_id)
        new = NewEvent(kind=GONE, key=str(env_id), payload={"env_id": env_id}, first_wins=True)
        await self.run.append_many([new])

    async def accept(self, group: ScoredGroup, *, is_gone: IsGone = stays) -> int | None:
        """Keep a group until it is trained on; returns like `GroupQueue.add_all`."""
        [buffered] = await self.accept_all([group], is_gone=is_gone)
        return buffered

    async def accept_all(
        self, groups: Sequence[ScoredGroup], *, is_gone: IsGone = stays
    ) -> list[int | None]:
        """Accept all or none: a refused sender sends all again."""
        try:
            for group in groups:
                if group.env_id is not None:
                    self.registry.note_seen(group.env_id)
            draws = await asyncio.to_thread(lambda: [self._check(group) for group in groups])
            buffered = await self.queue.add_all(groups, draws, is_gone=is_gone)
        except TaskError as error:
            self.note_refusal(str(error))
            raise
        if groups:
            self.latest = groups[-1]
            self.num_accepted += len(groups)
        return buffered

    def note_refusal(self, sentence: str) -> None:
        """Log a refusal, ever less often: environments of atroposlib drop such groups silently."""
        self.num_refused += 1
        self.last_refusal = sentence
        if self.num_refused.bit_count() == 1:
            logger.warning(
                "refused %d times what environments sent: %s", self.num_refused, sentence
            )

    def _check(self, group: ScoredGroup) -> list[Drawn | None]:
        """Check a group; return how each sequence was drawn, or None if unknown."""
        trainer = self.registry.trainer
        longest = 0 if trainer is None else trainer.max_token_len
        check_group(group, vocab_size=self.vocab_size, max_tokens=max(longest, 0))
        if trainer is not None and group.size > trainer.batch_size:
            raise TaskError(
                f"A group has {group.size} sequences, and a batch of the trainer has "
                f"{trainer.batch_size}: send smaller groups, or raise groups_per_step."
            )
        draws = [
            self.samples.find(sequence.tokens, drawn=sequence.drawn, logprobs=sequence.logprobs)
            for sequence in drawn_sequences(group)
        ]
        if any(drawn is not None and drawn.is_cut and not drawn.kept for drawn in draws):
            raise TaskError(
                "A sequence of this group was drawn with top_p, top_k or min_p, and the tokens "
                "that these left are not known. Draw through the gateway of the run that trains on "
                "it, on vLLM servers with top_k of at most launch.max_logprobs. Or write top_p 1, "
                "top_k off and min_p 0."
            )
        if any(drawn is not None and drawn.is_penalised for drawn in draws):
            raise TaskError(
                "A sequence of this group was drawn with a repetition, presence or frequency "
                "penalty, which the trainer cannot repeat. For training, draw with "
                "repetition_penalty 1, presence_penalty 0 and frequency_penalty 0."
            )
        return draws


# Batches for a trainer elsewhere: each is sent until it is acknowledged.
#
# The Atropos API has no acknowledgement. A trainer of that API acknowledges a batch by asking for
# the next; Rookery's own names the last batch that it has (`/batch?after=3`). The first question of
# a newly registered trainer acknowledges nothing: its predecessor may have lost its batch. A
# batch's contents are durable before it is sent, as the trainer may acknowledge it to a restarted
# gateway.


BATCH, GIVEN = "batch", "given"
"""Kinds of events: a batch was acknowledged, or given to a trainer."""


def trained_groups(run: Run) -> set[int]:
    """Return the numbers of all groups in durable batches of the run."""
    return {int(seq) for event in run.events(BATCH) for seq in event.payload.get("groups", ())}


class Delivery:
    """Hands the batches of one gateway to a trainer, one at a time."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        last = gateway.run.last(BATCH)
        self._number = 0 if last is None else int(last.key)
        """Number of the newest acknowledged batch."""
        self._given: Sequence[QueuedGroup] = []
        last_given = gateway.run.last(GIVEN)
        if last_given is not None and int(last_given.key) == self._number + 1:
            self._given = gateway.queue.take_these(last_given.payload["groups"])
        gateway.step = self._number + bool(self._given)
        self._is_new = False
        """True if a trainer has registered and not asked yet."""
        self._lock = asyncio.Lock()

    def begin(self) -> None:
        """Note that a trainer has registered."""
        self._is_new = True

    async def next(self, after: int | None) -> tuple[int, Sequence[QueuedGroup]]:
        """Return the batch after number `after`, with its number; empty if there is none yet.
        Without `after`, the one after the batch given last."""
        trainer = self._gateway.registry.trainer
        assert trainer is not None, "a trainer registers before it asks for batches"
        async with self._lock:
            is_new, self._is_new = self._is_new, False
            has_given = not is_new if after is None else after == self._number + 1
            if self._given and has_given:
                await self._acknowledge()
            if not self._given:
                await self._give(self._gateway.queue.take_now(trainer.batch_size))
            return self._number + 1, self._given

    async def _give(self, batch: list[QueuedGroup]) -> None:
        if not batch:
            return
        groups = [queued.seq for queued in batch]
        try:
            await self._gateway.run.append(GIVEN, {"groups": groups}, key=str(self._number + 1))
        except BaseException:  # on any failure no trainer was given it
            self._gateway.queue.put_back(batch)
            raise
        self._gateway.step += 1
        self._given = batch

    async def _acknowledge(self) -> None:
        groups = [queued.seq for queued in self._given]
        await self._gateway.run.append(BATCH, {"groups": groups}, key=str(self._number + 1))
        # Only now: a batch without a durable acknowledgement is given again under its number.
        self._number += 1
        done, self._given = self._given, []
        await self._gateway.queue.acknowledge(done)

    async def drop_all(self) -> None:
        """Acknowledge all waiting groups, trained or not."""
        async with self._lock:
            if self._given:
                await self._acknowledge()
            while rest := self._gateway.queue.take_rest():
                self._given = rest
                await self._acknowledge()
