"""A folder to work in: a tiny model, adapters of it, tasks; for tests of commands and runs."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from driving import NUM_TASKS, write_rows
from safetensors.torch import load_file, save_file
from tiny import tiny_adapter, write_chat_model

from rookery.weights import write_adapter

__all__ = ["files", "place"]


@pytest.fixture(scope="session")
def files(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny, chat, nan-model; adapters a, b, other, wide, nan-adapter; tasks, empty, long .jsonl."""
    folder = tmp_path_factory.mktemp("cli")
    shutil.copytree(tiny_folder, folder / "tiny")
    write_chat_model(folder / "chat", max_position_embeddings=8192)
    shutil.copytree(tiny_folder, folder / "nan-model")
    _break(folder / "nan-model" / "model.safetensors")
    adapters: dict[str, dict[str, Any]] = {
        "a": {"seed": 1},
        "b": {"seed": 2, "rank": 2},
        "other": {"base": "someone/llama-9000"},
        "wide": {"rank": 70},
    }
    for name, options in adapters.items():
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
