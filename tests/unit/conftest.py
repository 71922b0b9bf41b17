"""A tiny model, its tokenizer and adapters of it, made once per test run."""

import gc
import os
import shutil
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if os.access("/dev/shm", os.W_OK) and shutil.disk_usage("/dev/shm").free > 3 << 30:
    # Where pytest makes its folders. Runs force to disk what they store, thousands of times over
    # all tests: on a disk that is half of their time, in memory it is nothing.
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/dev/shm")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts background jobs so, and programs under test would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from rookery.slots import SlottedModel

# A busy machine is not a failure, and a check of a change must not depend on luck.
is_long = bool(os.environ.get("ROOKERY_LONG"))
settings.register_profile(
    "unit",
    deadline=None,
    derandomize="CI" in os.environ,
    max_examples=100 if is_long else 25,
)
settings.load_profile("unit")


def pytest_collection_finish() -> None:
    """What tests import stays. Each collection of the garbage of a test looked at all of it, which
    took longer than most tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama-shaped model of 4 layers with random weights and a word tokenizer."""
    from tiny import write_tiny_model

    folder = write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
    gc.freeze()  # what transformers imports as it is used
    return folder


@pytest.fixture(scope="session")
def tiny_model(tiny_folder: Path) -> "SlottedModel":
    """Loaded once; every engine over it unloads its adapters."""
    from rookery.slots import load_model

    model = load_model(tiny_folder)
    model.pack()
    return model
