"""The configs that ship parse, and say what their comments say."""

from pathlib import Path

import pytest

from rookery.config import load_config, read_document
from rookery.errors import ConfigError
from rookery.fleet import FleetConfig
from rookery.fleet.http.external import ExternalConfig
from rookery.fleet.servers.settings import command_line
from rookery.types import Json

FOLDER = Path(__file__).parents[3] / "configs" / "fleet"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_preset_parses(path: Path) -> None:
    kinds: dict[Json, type[FleetConfig] | type[ExternalConfig]] = {
        "fleet": FleetConfig,
        "external": ExternalConfig,
    }
    config = load_config(kinds[read_document(path)["type"]], path)
    if isinstance(config, FleetConfig) and config.launch is not None:
        assert "--model" in command_line(config.launch, port=1)


def test_there_is_one_for_every_size() -> None:
    parallel = {}
    for name in ("small", "8b", "70b", "405b"):
        launch = load_config(FleetConfig, FOLDER / f"{name}.yaml").launch
        assert launch is not None
        parallel[name] = launch.tensor_parallel
    assert parallel == {"small": 1, "8b": 1, "70b": 4, "405b": 8}


def test_a_fleet_without_servers_or_with_wrong_ones_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    for text, said in [
        ("type: fleet", r"urls: \[http://host:8000\]"),
        ("urls: [http://a]\nresolver: true", "adapter_folder"),
        ("urls: [host:8000]", "write http://host:8000"),
        ("urls: [ftp://host:8000]", "write http://host:8000"),
        ("urls: ['http://']", "names no host"),
        ("urls: [http://a:8000, http://a:8000]", "names one server twice"),
        ("urls: [http://A:80, http://a/v1/]", "as http://A:80 and http://a/v1/"),
        ("urls: [http://localhost:8000, http://127.0.0.1:8000]", "names one server twice"),
        ("urls: [http://a]\nlaunch: {modl: x}", "Did you mean model"),
    ]:
        path.write_text(text)
        with pytest.raises(ConfigError, match=said):
            load_config(FleetConfig, path)
