"""Weights to download: files of a checkpoint, encrypted for given recipients where asked for."""

import tarfile
from collections.abc import Sequence
from pathlib import Path

import pyrage

from rookery.service.refusals import bad

__all__ = ["encrypt_folder", "read_recipient", "write_archive"]


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
