"""What the service allows, and how long it waits."""

import tarfile
from collections.abc import Sequence
from pathlib import Path

import pyrage
from pydantic import Field

from rookery.config import Config
from rookery.service.work import bad

__all__ = [
    "Limits",
    "ServiceConfig",
    "encrypt_folder",
    "read_recipient",
    "write_archive",
]


class Limits(Config):
    """What one tenant, or one request, may take."""

    body_mib: float = Field(default=64.0, gt=0, le=400)
    """The largest request body, after decompression. The journal takes no entry of over 500 MB."""
    waiting: int = Field(default=4096, ge=1)
    """Requests of one tenant that wait or run; more are answered with 429."""
    waiting_mib: float = Field(default=512.0, gt=0)
    """Bodies of all waiting requests together. A tenant that has less than its share of this is
    never refused for what others have waiting: at worst all hold twice as much."""
    sessions: int = Field(default=1000, ge=1)
    """Open sessions of one tenant; more are answered with 429."""
    samplers: int = Field(default=4096, ge=2)
    """Sampling sessions of one tenant; more are answered with 429. The newest half stays however
    long nobody draws from it, the older ones while they are drawn from (`session_s`)."""
    results: int = Field(default=16_384, ge=1)
    """Results of one tenant that wait to be fetched; with more, requests are answered with 429."""
    results_mib: float = Field(default=1024.0, gt=0)
    """The same in bytes, with answers that were written and are not read yet."""
    models: int = Field(default=64, ge=1)
    """Models in training of one tenant."""
    rank: int = Field(default=64, ge=1)
    """The highest rank of a model in training."""
    samples: int = Field(default=4096, ge=1)
    """Samples of one request, of all its prompts together."""
    checkpoints: int = Field(default=10_000, ge=1)
    """Checkpoints and adapters of one tenant."""
    requests_per_s: float = Field(default=2000.0, gt=0)
    """Requests of one tenant per second, heartbeats and polls not counted."""


class ServiceConfig(Config):
    """Times and sizes of the service."""

    limits: Limits = Field(default_factory=Limits)
    poll_s: float = Field(default=25.0, gt=0, lt=45)
    """How long a poll for a result waits; the SDK gives up after 45 s."""
    session_s: float = Field(default=1800.0, ge=60)
    """A session without a heartbeat for this long ends, and its models with it."""
    gap_s: float = Field(default=900.0, gt=0)
    """How long a request waits for an earlier one of its model that has not come. The SDK sends one
    again for five minutes."""
    result_s: float = Field(default=600.0, ge=60)
    """How long a result is kept after it was fetched: a client may ask again."""
    unfetched_s: float = Field(default=21_600.0, ge=60)
    """How long a result is kept that nobody fetches."""
    pass_s: float = Field(default=0.5, gt=0)
    """How long a pass of the trainer is meant to take: as many requests as fit share it, and who
    comes meanwhile waits for its end. A request that is longer alone has a pass of its own."""
    pass_tokens: int = Field(default=65_536, ge=1)
    """Tokens of all tenants in a pass at most."""
    samples_in_flight: int = Field(default=64, ge=1)
    """Samples that the engine is given at the same time."""
    loaded_adapters: int = Field(default=64, ge=1)
    """Sampler weights held in the engine; the least recently used of more are unloaded."""
    snapshot_s: float = Field(default=60.0, gt=0)
    """Snapshots are taken after this much training, which is what a restart repeats at most."""
    journal_mib: float = Field(default=256.0, gt=0)
    """Or when this much was written since the last one, or half as much as the snapshots hold."""
    adapter_folders: tuple[Path, ...] = ()
    """Folders on this machine from which tenants may register adapters by path."""
    keep_last: int | None = Field(default=None, ge=1)
    """Of the training checkpoints of a model, and of its sampler checkpoints, only the newest;
    by default all are kept until they are deleted or expire."""


# Weights to download: files of a checkpoint, encrypted for given recipients where asked for.


def read_recipient(text: str) -> pyrage.x25519.Recipient:
    """An age recipient, `age1...`."""
    try:
        return pyrage.x25519.Recipient.from_str(text)
    except pyrage.RecipientError as error:
        raise bad(f"{text!r:.100} is not an age recipient: it begins with age1. {error}") from error


def encrypt_folder(folder: Path, recipients: Sequence[str]) -> None:
    """Replace every file by `NAME.age`, which only the holders of the keys can read."""
    keys = [read_recipient(text) for text in recipients]
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        pyrage.encrypt_file(str(path), str(path.with_name(f"{path.name}.age")), keys)
        path.unlink()


def write_archive(folder: Path, target: Path) -> None:
    """The files of a folder as a tar."""
    with tarfile.open(target, "w") as archive:
        for path in sorted(folder.rglob("*")):
            archive.add(path, arcname=str(path.relative_to(folder)), recursive=False)
