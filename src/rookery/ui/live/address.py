"""Address of the page that now serves a folder of runs, for a starting run to print.

    with served(folder, "http://127.0.0.1:7700/"):     # the server, while it serves
        run_address(folder / "demo")                   # "http://127.0.0.1:7700/#/run/demo"

The address has no token: the browser that opened the page before has a cookie.
"""

import hashlib
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote, urlsplit

from rookery.model_names import cache_folder

__all__ = ["run_address", "served"]

ANSWER_S = 0.3
"""Connection timeout in seconds; a server on this machine accepts at once."""


@contextmanager
def served(folder: Path, url: str) -> Iterator[None]:
    """Record the address meanwhile. If it cannot be written, runs do not print it."""
    file = _file(folder)
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(url, encoding="utf-8")
    try:
        yield
    finally:
        with suppress(OSError):
            if file.read_text(encoding="utf-8") == url:  # else a later page has replaced it
                file.unlink()


def run_address(run: Path) -> str:
    """Address of a run's page; empty if no page serves its folder."""
    try:
        url = _file(run.parent).read_text(encoding="utf-8")
        parts = urlsplit(url)
        socket.create_connection((parts.hostname or "", parts.port or 0), ANSWER_S).close()
    except (OSError, ValueError):
        return ""  # no page was served, or its server was killed
    return f"{url}#/run/{quote(run.name, safe='')}"


def _file(folder: Path) -> Path:
    name = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:32]
    return cache_folder() / "pages" / name
