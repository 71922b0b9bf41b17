"""Which adapters are loaded, in flight or to be removed: counts and decisions, no server."""

from pathlib import Path

import pytest
from fleet.adapters import make_small

from rookery.errors import FleetError
from rookery.fleet.adapters.owner import Owner
from rookery.fleet.adapters.residency import Residency, ServedAdapters
from rookery.fleet.http.client import Client, ClientConfig, open_session
from rookery.types import ModelRef


def ref_of(version: str) -> ModelRef:
    return ModelRef(name="poet", version=version)


def test_an_adapter_is_removed_after_its_last_load_and_its_last_request() -> None:
    served, ref = ServedAdapters(), ref_of("1")
    assert not served.add_load(ref)
    served.add(ref, make_small("poet"))
    assert served.add_load(ref)
    served.begin([ref])
    assert not served.release(ref)
    assert not served.release(ref)
    with pytest.raises(FleetError, match="not loaded"):
        served.release(ref)
    assert not served.remove_unused(ref)
    assert served.end([ref]) == [ref]
    assert served.remove_unused(ref)
    assert served.refs == ()


def test_publishing_names_the_version_to_release() -> None:
    served = ServedAdapters()
    for version in "12":
        served.add(ref_of(version), make_small("poet"))
    assert served.publish(ref_of("1")) is None
    assert served.publish(ref_of("2")) == ref_of("1")
    assert served.release(ref_of("2"))
    assert served.publish(ref_of("1")) is None


async def test_the_least_recently_used_idle_adapters_make_space(tmp_path: Path) -> None:
    async with open_session() as session:
        client = Client("http://127.0.0.1:9", session=session, config=ClientConfig())
        residency = Residency(client, owner=Owner(tmp_path, "ab"), is_own=True)
    for version in "1234":
        residency.add(ref_of(version))
    assert residency.use(ref_of("1"))
    assert not residency.use(ref_of("5"))
    assert residency.surplus(5, active=()) == []
    assert residency.surplus(3, active={ref_of("2")}) == [ref_of("3"), ref_of("4")]
    assert not residency.is_idle(ref_of("2"), active={ref_of("2")})
