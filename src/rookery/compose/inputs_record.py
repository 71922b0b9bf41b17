"""What a run was started on: it does not go on with other tasks or another model under the same
names."""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from rookery.errors import RunError
from rookery.runs import Run, RunView

__all__ = ["check_inputs", "digest", "digest_model", "require_same_inputs"]

FILE = "inputs.json"
MODEL_FILES = ("*.safetensors", "*.bin", "config.json", "tokenizer*.json", "*.jinja")
"""What a model computes with, and how it reads texts."""


def digest(records: Iterable[object]) -> str:
    """Of records whose `repr` says all they hold, in their order."""
    hashed = hashlib.blake2b(digest_size=16)
    for record in records:
        hashed.update(repr(record).encode("utf-8", "surrogatepass"))
        hashed.update(b"\n")
    return hashed.hexdigest()


def digest_model(folder: Path) -> str:
    """Of the files of a model folder. Reads all of its weights."""
    hashed = hashlib.blake2b(digest_size=16)
    for path in sorted({path for pattern in MODEL_FILES for path in folder.glob(pattern)}):
        with path.open("rb") as file:
            own = hashlib.file_digest(file, "blake2b").digest()
        hashed.update(path.name.encode() + b"\0" + own)
    return hashed.hexdigest()


def require_same_inputs(run: Run, digests: Mapping[str, str]) -> None:
    """Record the digests of a new run's data, by name; refuse a resume where they are others.

    The recorded answers are known by the ids of their tasks: a task that changed under its id would
    be reported with the answers to another question. Weights that changed under their path would be
    trained on, and reported with the answers of the former ones.
    """
    if not (run.path / FILE).exists():
        run.write_json(FILE, dict(digests))
        return
    _compare(run, digests)


def check_inputs(folder: Path, digests: Mapping[str, str]) -> None:
    """The same for a run that is not open yet, if there is one: a refusal leaves it as it was."""
    if (folder / FILE).exists():
        with Run.view(folder) as run:
            _compare(run, digests)


def _compare(run: RunView, digests: Mapping[str, str]) -> None:
    known: dict[str, str] = run.read_json(FILE)
    changed = sorted(name for name in known | dict(digests) if known.get(name) != digests.get(name))
    if changed:
        raise RunError(
            f"The data of {', '.join(changed)} changed since {run.path} was started, and what it "
            "recorded belongs to the former: put the former data back, or start a new run."
        )
