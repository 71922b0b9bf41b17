"""Where Rookery keeps what outlives a run: models, the registry of its servers."""

import os
from pathlib import Path

__all__ = ["cache_folder"]


def cache_folder() -> Path:
    """`$ROOKERY_CACHE`, else `rookery` under the user's cache folder."""
    if chosen := os.environ.get("ROOKERY_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "rookery"
