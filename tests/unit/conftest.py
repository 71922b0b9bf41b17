"""A tiny model, its tokenizer and adapters of it, made once per test run."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama-shaped model of 4 layers with random weights and a word tokenizer."""
    from tiny import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
