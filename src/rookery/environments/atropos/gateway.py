"""The Atropos API without HTTP: a trainer, environments, and the groups between them.

    gateway = await Gateway.open(run, trainer=registration, vocab_size=49152)
    gateway.register_env(registration)
    await gateway.accept(group)
    batch = await gateway.queue.take(16)

What was accepted, and who registered, is in the run: environments that were started before a
restart of the gateway go on after it.
"""

import asyncio
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from rookery.environments.atropos.engine_side import Drawn, SampleIndex
from rookery.environments.atropos.group_queue import GroupQueue, IsGone, stays
from rookery.environments.atropos.registry import (
    Environment,
    Registration,
    Registry,
    TrainerRegistration,
)
from rookery.environments.atropos.scored_group import (
    ScoredGroup,
    check_group,
    drawn_sequences,
)
from rookery.errors import TaskError
from rookery.runs import NewEvent, Run

__all__ = ["Gateway"]

logger = logging.getLogger(__name__)
ENVIRONMENT, GONE = "environment", "environment_gone"


@dataclass(slots=True)
class Gateway:
    """One trainer's groups."""

    run: Run
    registry: Registry
    queue: GroupQueue
    samples: SampleIndex
    vocab_size: int
    step: int = 0
    """Steps that the trainer has begun."""
    is_started: bool = False
    """Whether the trainer has asked for a batch: environments wait for that."""
    latest: ScoredGroup | None = None
    num_accepted: int = 0
    num_refused: int = 0
    """Requests with groups that were refused."""
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
        """With what the run remembers; `trained` are groups that durable batches hold."""
        registry = Registry(trainer)
        for event in run.events(ENVIRONMENT):
            registry.add(Registration.model_validate(event.payload))
        for event in run.events(GONE):
            registry.disconnect(int(event.payload["env_id"]))
        queue = await GroupQueue.open(run, registry, trained=trained)
        return cls(run, registry, queue, SampleIndex(), vocab_size)

    async def register_env(self, registration: Registration) -> Environment | None:
        """The environment; None: the trainer has not started yet."""
        if not self.is_started:
            return None
        payload = registration.model_dump(mode="json")
        async with self._registering:
            # Its number is its place in the run: first there, one after the other.
            key = str(len(self.registry.environments))
            await self.run.append(ENVIRONMENT, payload, key=key)
            return self.registry.add(registration)

    async def disconnect_env(self, env_id: int) -> None:
        self.registry.disconnect(env_id)
        new = NewEvent(kind=GONE, key=str(env_id), payload={"env_id": env_id}, first_wins=True)
        await self.run.append_many([new])

    async def accept(self, group: ScoredGroup, *, is_gone: IsGone = stays) -> int | None:
        """Keep a group until it was trained on; TaskError when it cannot be. Returns as
        `GroupQueue.add_all`."""
        [buffered] = await self.accept_all([group], is_gone=is_gone)
        return buffered

    async def accept_all(
        self, groups: Sequence[ScoredGroup], *, is_gone: IsGone = stays
    ) -> list[int | None]:
        """All or none of them: who is refused sends all again."""
        try:
            for group in groups:
                if group.env_id is not None:
                    self.registry.hear(group.env_id)
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
        """Environments of atroposlib drop what is refused and do not say why: the log does, the
        more seldom the more there are."""
        self.num_refused += 1
        self.last_refusal = sentence
        if self.num_refused.bit_count() == 1:
            logger.warning(
                "refused %d times what environments sent: %s", self.num_refused, sentence
            )

    def _check(self, group: ScoredGroup) -> list[Drawn | None]:
        """How its sequences were drawn, where that is known."""
        trainer = self.registry.trainer
        longest = 0 if trainer is None else trainer.max_token_len
        check_group(group, vocab_size=self.vocab_size, max_tokens=max(longest, 0))
        if trainer is not None and group.size > trainer.batch_size:
            raise TaskError(
                f"A group has {group.size} sequences, and a batch of the trainer has "
                f"{trainer.batch_size}: send smaller groups, or raise groups_per_step."
            )
        draws = [
            self.samples.find(own.tokens, drawn=own.drawn, logprobs=own.logprobs)
            for own in drawn_sequences(group)
        ]
        if any(drawn is not None and drawn.is_cut and not drawn.kept for drawn in draws):
            raise TaskError(
                "A sequence of this group was drawn with top_p, top_k or min_p, and from which "
                "tokens is not known: draw it through the gateway of the run that trains on it, "
                "on vLLM servers with top_k of at most launch.max_logprobs, or with top_p 1, top_k "
                "off and min_p 0."
            )
        if any(drawn is not None and drawn.is_penalised for drawn in draws):
            raise TaskError(
                "A sequence of this group was drawn with a repetition, presence or frequency "
                "penalty, and the trainer knows the model's distribution without: draw what is to "
                "be trained on with repetition_penalty 1, presence_penalty 0 and frequency_penalty "
                "0."
            )
        return draws
