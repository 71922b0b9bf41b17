"""Configs of trainings on environments of Atropos, and of `verifiers` through the same gateway."""

import json
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, JsonValue, model_validator

from rookery.config import Config

__all__ = ["AtroposConfig", "EnvironmentCommand", "VerifiersConfig"]


class EnvironmentCommand(Config):
    """A program that plays: an Atropos environment, or any program that speaks its API."""

    command: tuple[str, ...] = Field(min_length=1)
    """Words of the command. Replaced are `{gateway}` and `{engine}` by URLs (the gateway's with its
    key, if it needs one; the engine's with /v1), `{model}` by the model's folder, and `{key}`."""
    folder: Path = Path()
    """Working directory of the command."""
    env: dict[str, str] = Field(default_factory=dict)
    """Further environment variables."""
    restarts: int = Field(default=3, ge=0)
    """Restarts after it ends with an error."""


class AtroposConfig(Config):
    """Groups of Atropos environments instead of tasksets and scorers."""

    type: Literal["atropos"] = "atropos"
    url: str = ""
    """URL of a gateway or a `run-api` that runs elsewhere; empty starts a gateway here."""
    host: str = "127.0.0.1"
    """Address to listen on; an address beyond this machine needs a key."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port of the gateway, which also serves the engine's routes; 0 takes a free one."""
    engine_ports: tuple[Annotated[int, Field(ge=0, le=65535)], ...] = ()
    """Further ports for the same routes: some environments use 9001, others 9004 to 9007."""
    key_env: str = ""
    """Environment variable with the key that clients must send; needed beyond this machine."""
    environments: tuple[EnvironmentCommand, ...] = ()
    """Programs that the run starts, watches and stops. The run outlives them while others play."""
    max_token_len: int = Field(default=2048, ge=2)
    """Longest sequence, prompt and answers, in tokens; at most the model's context."""
    batch_s: float = Field(default=3600.0, gt=0)
    """Most seconds to collect a batch."""
    body_mib: float = Field(default=64.0, gt=0)
    """Largest request in MiB, after decompression."""

    @model_validator(mode="after")
    def _check(self) -> "AtroposConfig":
        if self.host not in ("127.0.0.1", "localhost", "::1") and not self.key_env:
            raise ValueError(
                f"host is {self.host}, which others reach: write key_env with the name of a "
                "variable that holds a key, or listen on 127.0.0.1"
            )
        if self.url and (self.environments or self.engine_ports):
            raise ValueError(
                "url names a gateway that runs elsewhere, and its environments are started there: "
                "leave out environments and engine_ports, or url"
            )
        return self

    def from_folder(self, folder: Path) -> "AtroposConfig":
        """Resolve its paths against the folder of its file."""
        return self.model_copy(
            update={
                "environments": tuple(
                    one.model_copy(update={"folder": (folder / one.folder).resolve()})
                    for one in self.environments
                )
            }
        )


PLAYER = Path(__file__).parent / "verifiers" / "player.py"


class VerifiersConfig(Config):
    """A taskset of `verifiers` 0.4, with its own rewards."""

    type: Literal["verifiers"] = "verifiers"
    python: str
    """Interpreter with verifiers 0.4 and the taskset installed."""
    taskset: str
    """Id of the taskset: an installed package, or a module in `folder`."""
    options: dict[str, JsonValue] = Field(default_factory=dict)
    """Further values of the taskset's config."""
    folder: Path = Path()
    """Working directory of the player, where modules are found."""
    harness: str = "rookery_chat"
    """Id of the harness; by default one chat without tools, in the same process."""
    groups_in_flight: int = Field(default=4, ge=1)
    """Tasks played at the same time."""
    max_token_len: int = Field(default=2048, ge=2)
    """Longest sequence, prompt and answers, in tokens."""
    batch_s: float = Field(default=3600.0, gt=0)
    """Most seconds to collect a batch."""

    def as_atropos(self, *, group_size: int, temperature: float, max_tokens: int) -> AtroposConfig:
        """Return the gateway's config, with the player as its environment."""
        player_options = {
            "taskset": {"id": self.taskset, **self.options},
            "harness": self.harness,
            "group_size": group_size,
            "groups_in_flight": self.groups_in_flight,
            "max_token_len": self.max_token_len,
            "sampling": {"temperature": temperature, "max_tokens": max_tokens},
        }
        words = (
            self.python,
            str(PLAYER),
            "{gateway}",
            "{engine}",
            "{model}",
            json.dumps(player_options),
        )
        command = EnvironmentCommand(command=words, folder=self.folder)
        return AtroposConfig(
            port=0,
            max_token_len=self.max_token_len,
            batch_s=self.batch_s,
            environments=(command,),
        )

    def from_folder(self, folder: Path) -> "VerifiersConfig":
        """Resolve its paths against the folder of its file."""
        return self.model_copy(update={"folder": (folder / self.folder).resolve()})
