"""API keys: which tenant a key belongs to. Only hashes are stored.

    key = add_key(path, name="ada")           # printed once, `tml-...`
    keys = Keys(path)
    keys.tenant(key)                          # "ada", also when it was added a moment ago

A key has 256 random bits, so a plain SHA-256 cannot be searched back.
"""

import fcntl
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

__all__ = ["Keys", "add_key", "default_key_file", "list_keys", "remove_key"]

PREFIX = "tml-"
"""The SDK refuses keys that do not begin so."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class KeyRecord(TypedDict):
    """One key of a tenant."""

    name: str
    sha256: str
    created: str


def default_key_file() -> Path:
    """`$ROOKERY_KEYS`, else `rookery/keys.json` under the user's config folder."""
    own = os.environ.get("ROOKERY_KEYS")
    if own:
        return Path(own).expanduser()
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
    with _alone(path):
        _write(path, [*list_keys(path), KeyRecord(name=name, sha256=_hash(key), created=created)])
    return key


def remove_key(path: Path, *, name: str) -> int:
    """Forget all keys of a tenant; how many there were."""
    with _alone(path):
        records = list_keys(path)
        kept = [record for record in records if record["name"] != name]
        if len(kept) == len(records):
            known = ", ".join(sorted({record["name"] for record in records})) or "none"
            raise ConfigError(f"There is no key of {name!r} in {path}. Keys: {known}.")
        _write(path, kept)
    return len(records) - len(kept)


def list_keys(path: Path) -> list[KeyRecord]:
    """What is stored of the keys, in order of their making."""
    try:
        records: list[KeyRecord] = json.loads(path.read_text())
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise ConfigError(f"The key file {path} cannot be read: {error}") from error
    return records


class Keys:
    """The keys of a file, read again when it has changed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, int] | None = None
        self._tenants: dict[str, str] = {}

    def tenant(self, key: str) -> str | None:
        """Whose key it is; None when it is nobody's."""
        self._refresh()
        return self._tenants.get(_hash(key))

    def _refresh(self) -> None:
        try:
            status = self._path.stat()
        except FileNotFoundError:
            self._stamp, self._tenants = None, {}
            return
        stamp = (status.st_mtime_ns, status.st_ino)
        if stamp != self._stamp:
            self._tenants = {record["sha256"]: record["name"] for record in list_keys(self._path)}
            self._stamp = stamp


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """No other process changes the file inside the block: it would lose what this one adds."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise ConfigError(f"The key file {path} cannot be written: {error}") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _write(path: Path, records: list[KeyRecord]) -> None:
    """Replace the file whole, readable by its owner alone."""
    try:
        handle, scratch = tempfile.mkstemp(prefix=path.name, dir=path.parent)  # mode 0600
        with os.fdopen(handle, "w") as file:
            json.dump(records, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    except OSError as error:
        raise ConfigError(f"The key file {path} cannot be written: {error}") from error
