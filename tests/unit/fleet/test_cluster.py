"""Placing servers on a Ray cluster; needs Ray, and is skipped without it."""

import importlib.util
import urllib.request
from pathlib import Path

import pytest

from rookery.config import parse_config
from rookery.errors import ConfigError
from rookery.fleet.cluster import place_on_ray
from rookery.fleet.ledger import process_start
from rookery.fleet.settings import LaunchConfig, command_line, environment

FAKE = Path(__file__).parent / "fake"
HAS_RAY = importlib.util.find_spec("ray") is not None


def test_servers_beyond_this_machine_need_a_key_and_lose_the_open_routes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1 only"):
        parse_config(LaunchConfig, {"model": "m", "host": "10.0.0.5"}, origin="x")
    config = LaunchConfig(model="m", device="cpu", host="10.0.0.5", api_key="secret")
    env = environment(config, index=0, num_servers=1, modules=tmp_path, adapters=None)
    assert env["VLLM_API_KEY"] == "secret" and env["VLLM_SERVER_DEV_MODE"] == "0"
    line = command_line(config, port=1)
    assert "--worker-extension-cls" not in line and "secret" not in " ".join(line)
    assert "secret" not in config.model_dump_json() and "secret" not in repr(config)
    with pytest.raises(ConfigError, match="needs replicas"):
        parse_config(LaunchConfig, {"model": "m", "placement": "ray"}, origin="x")


@pytest.mark.skipif(HAS_RAY, reason="Ray is installed")
async def test_without_ray_the_install_line_is_given() -> None:
    with pytest.raises(ConfigError, match=r"pip install 'rookery\[ray\]'"):
        async with place_on_ray(LaunchConfig(model="m"), num=1, address="auto"):
            pass


@pytest.mark.skipif(not HAS_RAY, reason="Ray is not installed")
@pytest.mark.filterwarnings("ignore")
async def test_servers_are_placed_and_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import json

    monkeypatch.setenv("ROOKERY_CACHE", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(FAKE))
    config = LaunchConfig(model="tiny", device="cpu", port=18800, placement="ray", replicas=2)
    async with place_on_ray(config, num=2, address="local") as placed:
        told = []
        for url in placed.urls:
            with urllib.request.urlopen(url + "/health") as answer:  # noqa: ASYNC210
                told.append(json.load(answer))
        assert len(set(placed.urls)) == 2 and len(placed.api_key) > 20
        assert all(process_start(t["pid"]) for t in told)
        assert {t["env"]["VLLM_API_KEY"] for t in told} == {placed.api_key}
    assert not any(process_start(t["pid"]) for t in told)
