"""API keys and their tenants. Only hashes are stored.

    key = add_key(path, name="ada")           # printed once, `tml-...`
    keys = Keys(path)
    keys.tenant(key)                          # "ada", even if added a moment ago

A key has 256 random bits, so a plain SHA-256 cannot be reversed by search.
"""

import hashlib
import json
import os
import re
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TypedDict

from rookery.errors import ConfigError
from rookery.runtime.file_lock import FileLock

__all__ = ["Keys", "add_key", "default_key_file", "list_keys", "remove_key"]

PREFIX = "tml-"
"""Prefix that the SDK requires of keys."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class KeyRecord(TypedDict):
    """One key of a tenant."""

    name: str
    sha256: str
    created: str


_FIELDS = ("name", "sha256", "created")


def default_key_file() -> Path:
    """Return `$ROOKERY_KEYS`, else `rookery/keys.json` under the user's config folder."""
    path = os.environ.get("ROOKERY_KEYS")
    if path:
        return Path(path).expanduser()
    home = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(home).expanduser() / "rookery" / "keys.json"


def add_key(path: Path, *, name: str) -> str:
    """Make a key for a tenant and return it; a tenant may have several."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"Got the name {name!r}: letters, digits, `.`, `_` and `-`, at most 64, such as ada."
        )
    key = PREFIX + secrets.token_urlsafe(32)
    created = datetime.now(UTC).isoformat(timespec="seconds")
    with _locked(path):
        _write(path, [*list_keys(path), KeyRecord(name=name, sha256=_hash(key), created=created)])
    return key


def remove_key(path: Path, *, name: str) -> int:
    """Remove all keys of a tenant; return their number."""
    with _locked(path):
        records = list_keys(path)
        kept = [record for record in records if record["name"] != name]
        if len(kept) == len(records):
            known = ", ".join(sorted({record["name"] for record in records})) or "none"
            raise ConfigError(f"There is no key of {name!r} in {path}. Keys: {known}.")
        _write(path, kept)
    return len(records) - len(kept)


def list_keys(path: Path) -> list[KeyRecord]:
    """Return the stored records, oldest first."""
    try:
        document = json.loads(path.read_text())
        return [KeyRecord(**{key: str(row[key]) for key in _FIELDS}) for row in document]  # type: ignore[typeddict-item]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"The key file {path} cannot be read: {error}") from error


class Keys:
    """The keys of a file, read again when it has changed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, int] | None = None
        self._tenants: dict[str, str] = {}

    def tenant(self, key: str) -> str | None:
        """Return the tenant of a key; None if the key is unknown."""
        self._refresh()
        return self._tenants.get(_hash(key))

    def _refresh(self) -> None:
        try:
            status = self._path.stat()
        except FileNotFoundError:
            self._stamp, self._tenants = None, {}
            return
        except OSError as error:
            raise ConfigError(f"The key file {self._path} cannot be read: {error}") from error
        stamp = (status.st_mtime_ns, status.st_ino)
        if stamp != self._stamp:
            self._tenants = {record["sha256"]: record["name"] for record in list_keys(self._path)}
            self._stamp = stamp


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lock the file inside the block, so that concurrent changes are not lost."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path.with_name(f"{path.name}.lock"))
    except OSError as error:
        raise ConfigError(f"The key file {path} cannot be written: {error}") from error
    with lock:
        lock.wait()
        yield


def _write(path: Path, records: list[KeyRecord]) -> None:
    """Replace the whole file, readable by its owner only."""
    try:
        handle, scratch = tempfile.mkstemp(prefix=path.name, dir=path.parent)  # mode 0600
        with os.fdopen(handle, "w") as file:
            json.dump(records, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    except OSError as error:
        raise ConfigError(f"The key file {path} cannot be written: {error}") from error
