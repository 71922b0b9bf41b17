"""How a training gets its groups from an environment of `verifiers`."""

import json
from pathlib import Path
from typing import Literal

from pydantic import Field, JsonValue

from rookery.config import Config
from rookery.environments.atropos import AtroposConfig, EnvironmentCommand

__all__ = ["VerifiersConfig"]

PLAYER = Path(__file__).with_name("player.py")


class VerifiersConfig(Config):
    """A taskset of `verifiers` 0.4, with its own rewards."""

    type: Literal["verifiers"] = "verifiers"
    python: str
    """The interpreter that has verifiers 0.4 and the taskset."""
    taskset: str
    """The taskset's id: an installed package, or a module in `folder`."""
    options: dict[str, JsonValue] = Field(default_factory=dict)
    """Further values of the taskset's config."""
    folder: Path = Path()
    """Where it is played, and modules are found."""
    harness: str = "rookery_chat"
    """The harness's id; by default one chat without tools, in the same process."""
    groups_in_flight: int = Field(default=4, ge=1)
    """Tasks that are played at the same time."""
    max_token_len: int = Field(default=2048, ge=2)
    """The longest sequence, prompt and answers."""
    batch_s: float = Field(default=3600.0, gt=0)
    """How long a batch may take to come together."""

    def as_atropos(self, *, group_size: int, temperature: float, max_tokens: int) -> AtroposConfig:
        """The gateway, with the player as its environment."""
        told = {
            "taskset": {"id": self.taskset, **self.options},
            "harness": self.harness,
            "group_size": group_size,
            "groups_in_flight": self.groups_in_flight,
            "max_token_len": self.max_token_len,
            "sampling": {"temperature": temperature, "max_tokens": max_tokens},
        }
        words = (self.python, str(PLAYER), "{gateway}", "{engine}", "{model}", json.dumps(told))
        command = EnvironmentCommand(command=words, folder=self.folder)
        return AtroposConfig(
            port=0,
            max_token_len=self.max_token_len,
            batch_s=self.batch_s,
            environments=(command,),
        )

    def from_folder(self, folder: Path) -> "VerifiersConfig":
        """With its paths taken from the folder of its file."""
        return self.model_copy(update={"folder": (folder / self.folder).resolve()})
