"""Paths as users write them: with `~`, or relative to the file that names them.

expanded("~/tasks.jsonl"), expanded("data/tasks.jsonl", config_path.parent)
"""

import errno
import json
from pathlib import Path

from rookery.errors import ConfigError

__all__ = ["expanded"]


def expanded(name: str | Path, folder: Path = Path()) -> Path:
    """Resolve `~`, and a relative path from `folder`. Raises ConfigError if the text is no path, or
    if the file system denies to look at it."""
    try:
        path = folder / Path(name).expanduser()
        path.stat()
    except (RuntimeError, ValueError) as error:  # no such user, a null byte, half a character
        raise ConfigError(f"{_shortened(name)} is not a path: {error}") from None
    except OSError as error:
        if error.errno not in {errno.ENOENT, errno.ENOTDIR}:
            raise ConfigError(f"{_shortened(name)} cannot be read: {error.strerror}.") from None
    return path


def _shortened(name: str | Path) -> str:
    text = json.dumps(str(name))
    return text if len(text) <= 80 else text[:77] + "..."
