"""Limits, times and sizes of the service."""

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
    """Limits on one tenant or one request."""

    body_mib: float = Field(default=64.0, gt=0, le=400)
    """Largest request body in MiB, decompressed. The journal takes no entry of over 500 MB."""
    waiting: int = Field(default=4096, ge=1)
    """Requests of one tenant that wait or run; further ones get 429."""
    waiting_mib: float = Field(default=512.0, gt=0)
    """Size in MiB of all waiting request bodies together. A tenant below its equal share is never
    refused because others queue: at worst all bodies take twice as much."""
    sessions: int = Field(default=1000, ge=1)
    """Open sessions of one tenant; further ones get 429."""
    samplers: int = Field(default=4096, ge=2)
    """Sampling sessions of one tenant; further ones get 429. The newest half stays even if unused;
    older ones end `session_s` after their last sample."""
    results: int = Field(default=16_384, ge=1)
    """Results of one tenant that were not fetched; beyond this, new requests get 429."""
    results_mib: float = Field(default=1024.0, gt=0)
    """The same in MiB, including written answers that the client has not read yet."""
    models: int = Field(default=64, ge=1)
    """Models of one tenant in training."""
    rank: int = Field(default=64, ge=1)
    """Highest rank of a model in training."""
    samples: int = Field(default=4096, ge=1)
    """Samples of one request, over all its prompts."""
    checkpoints: int = Field(default=10_000, ge=1)
    """Checkpoints and adapters of one tenant."""
    requests_per_s: float = Field(default=2000.0, gt=0)
    """Requests of one tenant per second, without heartbeats and polls."""


class ServiceConfig(Config):
    """Times and sizes of the service."""

    limits: Limits = Field(default_factory=Limits)
    poll_s: float = Field(default=25.0, gt=0, lt=45)
    """Seconds that a poll for a result waits; the SDK gives up after 45 s."""
    session_s: float = Field(default=1800.0, ge=60)
    """Seconds without a heartbeat after which a session and its models end."""
    gap_s: float = Field(default=900.0, gt=0)
    """Seconds to wait for a missing earlier request of a model; the SDK resends for 300 s."""
    result_s: float = Field(default=600.0, ge=60)
    """Seconds that a fetched result is kept, as a client may ask again."""
    unfetched_s: float = Field(default=21_600.0, ge=60)
    """Seconds that an unfetched result is kept."""
    pass_s: float = Field(default=0.5, gt=0)
    """Target seconds of one pass of the trainer: as many requests as fit share it, and new requests
    wait for its end. A request that takes longer gets a pass of its own."""
    pass_tokens: int = Field(default=65_536, ge=1)
    """Limit on the tokens of a pass, over all tenants."""
    samples_in_flight: int = Field(default=64, ge=1)
    """Samples given to the engine at the same time."""
    loaded_adapters: int = Field(default=64, ge=1)
    """Sampler weights held in the engine; beyond this, the least recently used are unloaded."""
    snapshot_s: float = Field(default=60.0, gt=0)
    """Seconds of training between snapshots: the most that a restart repeats."""
    journal_mib: float = Field(default=256.0, gt=0)
    """Journal size in MiB that also triggers a snapshot; half the snapshots' size, if smaller."""
    adapter_folders: tuple[Path, ...] = ()
    """Folders on this machine from which tenants may register adapters by path."""
    keep_last: int | None = Field(default=None, ge=1)
    """Number of training checkpoints per model to keep, and likewise of sampler checkpoints; by
    default all, until they are deleted or expire."""


# Weights to download: the files of a checkpoint, encrypted for recipients on request.


def read_recipient(text: str) -> pyrage.x25519.Recipient:
    """Parse an age recipient, `age1...`."""
    try:
        return pyrage.x25519.Recipient.from_str(text)
    except pyrage.RecipientError as error:
        raise bad(f"{text!r:.100} is not an age recipient: it begins with age1. {error}") from error


def encrypt_folder(folder: Path, recipients: Sequence[str]) -> None:
    """Replace every file by `NAME.age`, which only the recipients can decrypt."""
    keys = [read_recipient(text) for text in recipients]
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        pyrage.encrypt_file(str(path), str(path.with_name(f"{path.name}.age")), keys)
        path.unlink()


def write_archive(folder: Path, target: Path) -> None:
    with tarfile.open(target, "w") as archive:
        for path in sorted(folder.rglob("*")):
            archive.add(path, arcname=str(path.relative_to(folder)), recursive=False)
