"""What a run was started on: it does not go on with other tasks or another model under the same
names."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from rookery.compose.running import OpenRun
from rookery.errors import ModelError, RunError, boundary
from rookery.runs import Run
from rookery.types import Adapter

__all__ = ["digest", "digest_adapters", "digest_models", "on_same_inputs"]

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


def digest_adapters(adapters: Iterable[Adapter]) -> str:
    return digest((adapter.name, adapter.version) for adapter in adapters)


def digest_models(folders: Mapping[str, Path]) -> dict[str, str]:
    """Of the files of model folders, by name. Reads all of their weights."""
    with boundary(ModelError, "Reading the model's files", foreign=(OSError,)):
        return {name: _digest_model(folder) for name, folder in folders.items()}


def _digest_model(folder: Path) -> str:
    hashed = hashlib.blake2b(digest_size=16)
    paths = sorted({path for pattern in MODEL_FILES for path in folder.glob(pattern)})
    with ThreadPoolExecutor() as threads:  # a thread hashes about a gigabyte a second
        for path, own in zip(paths, threads.map(_digest_file, paths), strict=True):
            hashed.update(path.name.encode() + b"\0" + own)
    return hashed.hexdigest()


def _digest_file(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").digest()


def on_same_inputs(open_run: OpenRun, digests: Mapping[str, str]) -> OpenRun:
    """The run with the digests of its data, by name. One that was started on other data is refused
    now, and stays as it is.

    The recorded answers are known by the ids of their tasks: a task that changed under its id would
    be reported with the answers to another question. Weights that changed under their path would be
    trained on, and reported with the answers of the former ones.
    """
    if open_run.folder is not None:
        _compare(open_run.folder, digests)

    @contextmanager
    def opened() -> Iterator[Run]:
        with open_run() as run:
            if not (run.path / FILE).exists():
                run.write_json(FILE, dict(digests))
            yield run

    return OpenRun(opened, folder=open_run.folder)


def _compare(folder: Path, digests: Mapping[str, str]) -> None:
    """A run that was killed before it had a record has no answers either."""
    if not (folder / FILE).exists():
        return
    with Run.view(folder) as run:
        known: dict[str, str] = run.read_json(FILE)
    changed = sorted(name for name in known | dict(digests) if known.get(name) != digests.get(name))
    if changed:
        raise RunError(
            f"The data of {', '.join(changed)} changed since {folder} was started, and what it "
            "recorded belongs to the former: put the former data back, or start a new run."
        )
