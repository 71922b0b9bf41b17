"""The command line in this process, over the tiny model, with small files to work on."""

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from driving import NUM_TASKS, Command, Ended, tree, write_rows
from safetensors.torch import load_file, save_file

from rookery.cli.app import main
from rookery.weights import write_adapter


@pytest.fixture(scope="session")
def files(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny, nan-model; adapters a, b, other, wide, nan-adapter; tasks, empty, long .jsonl."""
    from tiny import tiny_adapter

    folder = tmp_path_factory.mktemp("cli")
    shutil.copytree(tiny_folder, folder / "tiny")
    shutil.copytree(tiny_folder, folder / "nan-model")
    _break(folder / "nan-model" / "model.safetensors")
    for name, options in {
        "a": {"seed": 1},
        "b": {"seed": 2, "rank": 2},
        "other": {"base": "someone/llama-9000"},
        "wide": {"rank": 70},
    }.items():
        write_adapter(tiny_adapter(name, **options), folder / name)
        if name in ("a", "b"):
            write_adapter(tiny_adapter(name, **options), folder / "founders" / name)
    shutil.copytree(folder / "a", folder / "nan-adapter")
    _break(folder / "nan-adapter" / "adapter_model.safetensors")
    rows = [
        {"prompt": f"w{4 + i} w{5 + (i * 7) % 80}", "choices": ["w90", "w91"],
         "reference": f"w{90 + i % 2}"}
        for i in range(NUM_TASKS)
    ]  # fmt: skip
    write_rows(folder / "tasks.jsonl", rows)
    write_rows(folder / "empty.jsonl", [])
    write_rows(folder / "long.jsonl", [*rows[:3], rows[0] | {"prompt": "w5 " * 300}])
    return folder


def _break(path: Path) -> None:
    tensors = load_file(path)
    next(iter(tensors.values())).flatten()[0] = torch.nan
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.fixture
def place(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, where the files lie as links; it is the current folder."""
    for path in files.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def rookery(capsys: pytest.CaptureFixture[str]) -> Iterator[Command]:
    """Runs `rookery ...` in this process; no command may end in a traceback."""

    def run(*words: object) -> Ended:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(word) for word in words])
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return Ended(int(ended.value.code or 0), out, err)

    handlers = list(logging.getLogger().handlers)
    yield run
    logging.getLogger().handlers[:] = handlers


@pytest.fixture
def refused(rookery: Command, place: Path) -> Command:
    """Runs a command that must be refused: a sentence on stderr, code 2, nothing left behind."""

    def run(*words: object) -> Ended:
        before = tree(place)
        ended = rookery(*words)
        assert ended.code == 2 and ended.out == ""
        assert ended.err.splitlines()[-1].startswith("error: ")
        assert tree(place) == before
        return ended

    return run
