"""The scripted model of the benchmarks as a server of its own, for tests of evolve."""

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SERVER = Path(__file__).parents[2] / "benchmarks" / "scripted_model.py"


@dataclass(frozen=True)
class Scripted:
    """A server that is up."""

    url: str

    @property
    def flags(self) -> tuple[str, ...]:
        return ("--api-base", self.url, "--primary-model", "scripted")

    def stats(self) -> dict[str, Any]:
        with urllib.request.urlopen(self.url.removesuffix("/v1") + "/stats", timeout=10) as answer:
            loaded: dict[str, Any] = json.load(answer)
        return loaded


@contextmanager
def serve_scripted(*flags: object) -> Iterator[Scripted]:
    """Serve until the block ends; the flags are those of benchmarks/scripted_model.py."""
    command = [sys.executable, str(SERVER), *map(str, flags)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield Scripted(server.stdout.readline().strip())
        finally:
            server.kill()
