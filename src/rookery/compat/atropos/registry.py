"""Who takes part: the trainer with its batches, and the environments with their weights."""

import math
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pydantic import BaseModel, ConfigDict, Field

from rookery.compat.atropos.scored_group import ScoredGroup
from rookery.errors import TaskError

__all__ = [
    "Environment",
    "Registration",
    "Registry",
    "TrainerRegistration",
]

SILENT_S = 120.0
"""An environment that says nothing for so long is gone: they ask for their status all the time."""
ACTIVE_S = 20.0
"""A trainer that was heard of this lately is at work: a second one is refused."""
MAX_NUMBER = 10**9
"""Of all that is registered: products of such numbers are finite, for this environment and the
others whose parts are computed with it."""
MAX_NAME = 1000
MIN_WEIGHT = 0.01
"""So that no environment is left without any groups."""


class TrainerRegistration(BaseModel):
    """What a trainer tells about itself."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    wandb_group: str = ""
    wandb_project: str = ""
    batch_size: int = Field(ge=1, le=MAX_NUMBER)
    """Sequences of one step."""
    max_token_len: int
    """The longest sequence; 0 or less: any."""
    checkpoint_dir: str = ""
    save_checkpoint_interval: int = -1
    starting_step: int = Field(default=0, ge=0)
    num_steps: int = -1


class Registration(BaseModel):
    """What an environment tells about itself."""

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
        """What its weight counts for."""
        return self.registration.max_token_length * self.registration.weight


class Registry:
    """The trainer and the environments of one gateway."""

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
        """A trainer registers, and is given its number; TaskError while another one is at work."""
        silent_s = self._clock() - self._heard_s
        if self.trainer is not None and silent_s < ACTIVE_S:
            raise TaskError(
                f"A trainer with batch_size {self.trainer.batch_size} was heard of "
                f"{silent_s:.0f} s ago, and a gateway has one: stop it and register again after "
                f"{ACTIVE_S:g} s, or start another gateway."
            )
        self.trainer, self._trainer_id = trainer, str(uuid.uuid4().int)
        self._heard_s = self._clock()
        return self._trainer_id

    def hear_trainer(self, trainer_id: str) -> None:
        """A trainer asks for a batch, or says that it is at work; one that tells its number must be
        the one that registered last."""
        if trainer_id and trainer_id != self._trainer_id:
            raise TaskError(
                "Another trainer has registered since, and gets the batches: stop one of them."
            )
        self._heard_s = self._clock()

    def leave(self) -> None:
        """The trainer is forgotten."""
        self.trainer, self._heard_s = None, -math.inf

    def hear(self, env_id: int) -> Environment:
        """An environment says something."""
        environment = self.find(env_id)
        self._seen_s[env_id] = self._clock()
        return environment

    def is_live(self, environment: Environment) -> bool:
        """Whether it is connected, and was heard of lately."""
        silent_s = self._clock() - self._seen_s.get(environment.id, self._clock())
        return environment.is_connected and silent_s < SILENT_S

    @property
    def minimums(self) -> dict[int, float]:
        """`min_batch_allocation` of those that are connected and have one."""
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
        return self.hear(environment.id)

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
        """Its part of all groups."""
        total = sum(e.share for e in self.environments if self.is_live(e))
        return max(MIN_WEIGHT, environment.share / total if total else 1.0)

    def status(self, env_id: int, queue: Sequence[ScoredGroup], *, step: int) -> dict[str, object]:
        """What `/status-env` answers: sizes in groups of this environment."""
        environment = self.hear(env_id)
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
        """Sequences of other environments beyond the least that each must have."""
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
