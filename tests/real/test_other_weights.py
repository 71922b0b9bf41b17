"""Servers by URL with another model, or with weights that a trainer left there, on real vLLM.

ROOKERY_VLLM_PYTHON=/path/to/python-with-vllm pytest tests/real/test_other_weights.py
"""

import json
import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fleet.stub import until
from test_bridge_attach import fleet_up, train
from tiny import write_tiny_model

from rookery.fleet import Fleet, FleetConfig, open_fleet
from rookery.types import ScoreRequest

PYTHON = os.environ.get("ROOKERY_VLLM_PYTHON", "")
pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="ROOKERY_VLLM_PYTHON names no Python that has vLLM"),
    pytest.mark.timeout(1200),
]
NEAR = 1e-4


def write_config(folder: Path, model: Path, **changes: Any) -> Path:
    launch = {
        "model": str(model), "python": PYTHON, "replicas": 1, "device": "cpu", "dtype": "float32",
        "max_model_len": 256, "max_loras": 0, "cpu_cache_gib": 1, "enforce_eager": True,
        "env": {"HF_HUB_OFFLINE": "1"}, **changes,
    }  # fmt: skip
    config = folder / "fleet.yaml"
    config.write_text(json.dumps({"launch": launch}))
    return config


async def read(fleet: Fleet) -> Sequence[float]:
    request = ScoreRequest(model=fleet.base, tokens=(5, 6, 7), start=3, labels=(8, 9, 10))
    [score] = await fleet.score([request])
    return score.label_logprobs


async def test_another_model_under_the_same_name_is_not_used(tmp_path: Path) -> None:
    """The folder has the same name too."""
    model = write_tiny_model(tmp_path / "model")
    flags = {"port": 18930, "args": ["--served-model-name", "policy"]}
    config = write_config(tmp_path, model, **flags)
    with fleet_up(config) as server:
        url = server.url
        opening = open_fleet(FleetConfig(urls=(url,), all_down_timeout_s=600))
        fleet = await opening.__aenter__()
        first = await read(fleet)
    try:
        [replica] = fleet.pool.replicas
        await until(lambda: replica.breaker.is_open)
        kept = model.rename(tmp_path / "kept")
        write_tiny_model(model, intermediate_size=128)
        with fleet_up(config) as server:
            assert server.url == url
            await until(lambda: "with other weights" in replica.last_error, 60)
            assert not replica.load.is_open
        shutil.rmtree(model)
        kept.rename(model)
        with fleet_up(config):
            assert await read(fleet) == pytest.approx(first, abs=NEAR), "it is back"
    finally:
        await opening.__aexit__(None, None, None)


@pytest.mark.parametrize("is_killed", [False, True], ids=["ends", "is killed"])
async def test_a_training_leaves_the_base_model_to_the_next(
    tmp_path: Path, *, is_killed: bool
) -> None:
    model = write_tiny_model(tmp_path / "model")
    with fleet_up(write_config(tmp_path, model, live_weights=True)) as server:
        config = FleetConfig(urls=(server.url,))
        async with open_fleet(config) as fleet:
            first = await read(fleet)
        status, said = await train(server, model, "3", *(["killed"] if is_killed else []))
        assert status == (-signal.SIGKILL if is_killed else 0) and said[1]["step"] == 0
        async with open_fleet(config) as fleet:
            assert await read(fleet) == pytest.approx(first, abs=NEAR)
        status, said = await train(server, model, "2")
        assert status == 0 and all(line["gap"] < NEAR for line in said)
