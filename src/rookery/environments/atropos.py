"""How a training gets its groups from environments of Atropos, and of `verifiers` played so."""

import json
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, JsonValue, model_validator

from rookery.config import Config

__all__ = ["AtroposConfig", "EnvironmentCommand", "VerifiersConfig"]


class EnvironmentCommand(Config):
    """A program that plays: an Atropos environment, or anything that speaks its API."""

    command: tuple[str, ...] = Field(min_length=1)
    """As a list of words. `{gateway}`, `{engine}`, `{model}` and `{key}` become the gateway's URL
    (with the key, where it asks for one), the engine's URL with /v1, the model's folder, and the
    key."""
    folder: Path = Path()
    """Where it is started."""
    env: dict[str, str] = Field(default_factory=dict)
    """Further environment variables."""
    restarts: int = Field(default=3, ge=0)
    """How often it is started again when it ends with an error."""


class AtroposConfig(Config):
    """Groups of Atropos environments in place of tasksets and scorers."""

    type: Literal["atropos"] = "atropos"
    url: str = ""
    """A gateway or a `run-api` that runs elsewhere; empty: the gateway is started here."""
    host: str = "127.0.0.1"
    """The address to listen on; one beyond this machine needs a key."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Of the gateway; 0 takes a free one. The engine's routes are there too."""
    engine_ports: tuple[Annotated[int, Field(ge=0, le=65535)], ...] = ()
    """Further ports for the same routes: some environments ask 9001, others 9004 to 9007."""
    key_env: str = ""
    """The environment variable with the key that clients must send; beyond this machine's own
    address the gateway needs one."""
    environments: tuple[EnvironmentCommand, ...] = ()
    """Programs that are started with the run, watched, and stopped with it. When all have ended the
    run goes on as long as others play at its gateway."""
    max_token_len: int = Field(default=2048, ge=2)
    """The longest sequence, prompt and answers; at most what the model reads."""
    batch_s: float = Field(default=3600.0, gt=0)
    """How long a batch may take to come together."""
    body_mib: float = Field(default=64.0, gt=0)
    """The largest request, after decompression."""

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
        """With its paths taken from the folder of its file."""
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
