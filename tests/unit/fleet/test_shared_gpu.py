"""The worker for several servers on one GPU, against a stand-in of vLLM's and of the GPU."""

import fcntl
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

import pytest

PLUGIN = "rookery.fleet.vllm_plugin.shared_gpu"
TOTAL, WEIGHTS, PASS, CACHE = 100, 20, 3, 17


@dataclass
class Gpu:
    """A GPU that a worker shares with others."""

    others: int = 10
    own: int = 0
    on_pass: Callable[[], object] = lambda: None


GPU = Gpu()


class MemorySnapshot:
    def __init__(self, device: str) -> None:
        self.device = device
        self.torch_memory = GPU.own
        self.free_memory = TOTAL - GPU.others - GPU.own
        self.non_torch_memory = GPU.others


class StockWorker:
    """Its trial pass keeps a part of its memory."""

    device = "cuda:0"

    def __init__(self) -> None:
        self.init_snapshot = MemorySnapshot(self.device)
        GPU.own += WEIGHTS

    def determine_available_memory(self) -> int:
        before, weights = self.init_snapshot, GPU.own
        GPU.on_pass()
        GPU.own += PASS
        after = MemorySnapshot(self.device)
        old = after.non_torch_memory - before.non_torch_memory + PASS + weights  # vLLM 0.26
        new = before.free_memory - after.free_memory  # vLLM 0.32
        assert old == new, "both versions see the same"
        return new

    def initialize_from_config(self, num_bytes: int) -> None:
        GPU.own += num_bytes


@pytest.fixture
def make_worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[], Any]]:
    names = ("vllm", "vllm.utils", "vllm.utils.mem_utils", "vllm.v1", "vllm.v1.worker")
    modules = {name: ModuleType(name) for name in (*names, "vllm.v1.worker.gpu_worker")}
    modules["vllm.utils.mem_utils"].__dict__["MemorySnapshot"] = MemorySnapshot
    modules["vllm.v1.worker"].__dict__["gpu_worker"] = modules["vllm.v1.worker.gpu_worker"]
    modules["vllm.v1.worker.gpu_worker"].__dict__["Worker"] = StockWorker
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, PLUGIN, raising=False)
    plugin = import_module(PLUGIN)
    monkeypatch.setattr(plugin, "__file__", str(tmp_path / "shared_gpu.py"))
    monkeypatch.setattr(sys.modules[__name__], "GPU", Gpu())
    yield plugin.Worker
    sys.modules.pop(PLUGIN, None)


def can_lock(path: Path) -> bool:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


@pytest.mark.parametrize("gpu", ["0", "GPU-2b6b1a2c-5c2e-4b7e-9c53-0f6e1f0a9a11", "MIG-GPU-2b/7/0"])
def test_a_worker_counts_its_weights_and_nothing_of_others(
    make_worker: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gpu: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpu)
    worker = make_worker()
    GPU.others += 40  # the other server took its own since this one began
    states: list[bool] = []
    GPU.on_pass = lambda: states.append(can_lock(next(tmp_path.glob("*.lock"))))
    assert worker.determine_available_memory() == WEIGHTS + PASS
    worker.initialize_from_config(CACHE)
    assert states == [False] and can_lock(next(tmp_path.glob("*.lock")))


def test_a_child_of_a_worker_does_not_keep_its_turn(
    make_worker: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    worker, lock, copies = make_worker(), fcntl.flock, list[int]()

    def lock_and_fork(file: TextIO, operation: int) -> None:
        lock(file, operation)
        copies.append(os.dup(file.fileno()))  # what a child has that compiles kernels

    monkeypatch.setattr(fcntl, "flock", lock_and_fork)
    worker.determine_available_memory()
    worker.initialize_from_config(CACHE)
    monkeypatch.undo()
    assert can_lock(next(tmp_path.glob("*.lock")))
    for copy in copies:
        os.close(copy)


def test_a_model_without_keys_and_values_takes_no_turn(make_worker: Callable[[], Any]) -> None:
    make_worker().initialize_from_config(0)
