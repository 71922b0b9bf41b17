"""Weights in training published to real vLLM servers on the CPU: every bridge, proved.

ROOKERY_VLLM_PYTHON=/path/to/python-with-vllm pytest tests/real/test_bridges.py
"""

import os
from pathlib import Path
from typing import Any

import bridge_training
import pytest
import torch
from bridge_training import training
from fleet.stub import until
from tiny import write_tiny_model

from rookery.errors import FleetError
from rookery.fleet.bridges import alias
from rookery.loops.grpo import GrpoConfig
from rookery.loops.grpo.policy_weights import POLICY

PYTHON = os.environ.get("ROOKERY_VLLM_PYTHON", "")
pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="ROOKERY_VLLM_PYTHON names no Python that has vLLM"),
    pytest.mark.timeout(1200),
]
NEAR = 1e-4
"""Between a float32 trainer and a float32 server, in nats."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes: dict[str, Any] = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "max_position_embeddings": 512,
    }
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", **sizes)


def config_of(folder: Path, bridge: str, **launch: Any) -> GrpoConfig:
    own = {
        "model": str(folder), "python": PYTHON, "device": "cpu", "dtype": "float32",
        "max_model_len": 512, "cpu_cache_gib": 1, "enforce_eager": True,
    }  # fmt: skip
    return bridge_training.config_of(bridge, **{**own, **launch})


@pytest.mark.parametrize("bridge", ["auto", "copy", "reload", "restart"])
async def test_servers_have_the_trainers_weights_after_every_step(
    bridge: str, folder: Path, tmp_path: Path
) -> None:
    config = config_of(folder, bridge)
    async with training(config, tmp_path) as trained:
        assert trained.bridge.name == ("alias" if bridge == "auto" else bridge)
        await trained.trainer.publish(POLICY)
        assert await trained.gap() < NEAR
        first = {name: w.detach().clone() for name, w in trained.model.weights.items()}
        for _ in range(1 if bridge == "restart" else 5):
            await trained.step()
            assert await trained.gap() < NEAR
        moved = [not torch.equal(first[n], w) for n, w in trained.model.weights.items()]
        assert all(moved), "every weight was trained"


async def test_two_servers_and_a_trainer_have_one_copy(folder: Path, tmp_path: Path) -> None:
    config = config_of(folder, "alias", replicas=2, restarts=1)
    async with training(config, tmp_path) as trained:
        await trained.trainer.publish(POLICY)
        for _ in range(2):
            await trained.step()
        assert await trained.gap() < NEAR
        replica = trained.fleet.pool.replicas[1]
        local = replica.local
        assert local is not None
        local.kill()  # it comes back with the weights of its folder
        await local.wait_ended()
        trained.fleet.pool.suspect(replica, "killed")
        await until(lambda: local.is_alive and replica.load.is_open, limit_s=600)
        assert await trained.gap() < NEAR
        await trained.step()
        assert await trained.gap() < NEAR


async def test_weights_that_are_spread_over_workers_are_copied(
    folder: Path, tmp_path: Path
) -> None:
    bind = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "HF_HUB_OFFLINE": "1"}
    with pytest.raises(FleetError, match="each of 2 workers has a part"):
        async with training(config_of(folder, "alias", tensor_parallel=2, env=bind), tmp_path):
            pass
    async with training(config_of(folder, "auto", tensor_parallel=2, env=bind), tmp_path) as own:
        assert own.bridge.name == "copy" and "2 workers" in own.bridge.why
        await own.trainer.publish(POLICY)
        assert await own.gap() < NEAR
        await own.step()
        assert await own.gap() < NEAR


async def test_prefixes_of_older_weights_are_found_out(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with training(config_of(folder, "alias"), tmp_path) as trained:
        await trained.trainer.publish(POLICY)
        await trained.step()
        monkeypatch.setattr(alias, "PAUSE", "/pause?mode=keep&clear_cache=false")
        with pytest.raises(FleetError, match="cached for older weights"):
            await trained.step()


async def test_an_old_output_layer_is_found_out(tmp_path: Path) -> None:
    """vLLM on the CPU packs it, and keeps the packed one of tied embeddings."""
    sizes: dict[str, Any] = {"hidden_size": 128, "tie_word_embeddings": True}
    folder = write_tiny_model(tmp_path / "tied", **sizes)
    config = config_of(folder, "reload", max_loras=0, max_model_len=128)
    async with training(config, tmp_path, is_as_configured=True) as trained:
        await trained.trainer.publish(POLICY)
        with pytest.raises(FleetError, match="live_weights"):
            await trained.step()
