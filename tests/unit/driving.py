"""What the tests of the command line share: how a command ended, and small files."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from rookery.runs import Run

NUM_TASKS = 40


@dataclass(frozen=True)
class Ended:
    """How a command ended and what it said."""

    code: int
    out: str
    err: str

    @property
    def words(self) -> str:
        """Both outputs with every run of white space as one space: tables and lines fold."""
        return " ".join((self.out + " " + self.err).split())

    @property
    def document(self) -> Any:
        return json.loads(self.out)


Command = Callable[..., Ended]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def change_weights(path: Path) -> None:
    """Other weights of the same names and shapes, in the file of a model or an adapter."""
    changed = {name: 1.01 * tensor for name, tensor in load_file(path).items()}
    save_file(changed, path, metadata={"format": "pt"})


def status_of(folder: Path) -> str:
    with Run.view(folder) as run:
        return run.status


def tree(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}
