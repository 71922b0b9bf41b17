"""What the operator sees of queues and tenants."""

from pathlib import Path

from service.tenants import serve, train_body

from rookery.service.app import read_status
from rookery.ui.service import render_service_page


async def test_queues_and_tenants_are_counted(tmp_path: Path) -> None:
    async with serve(tmp_path / "run", key_file=tmp_path / "keys.json") as served:
        ada, bob = served.client("ada"), served.client("bob")
        model = await ada.model(await ada.session())
        await bob.session()
        await ada.outputs(await ada.train(train_body(model, 1)))
        await ada.train(train_body(model, 3))
        status = read_status(served.service)
        assert [queue.name for queue in status.queues] == ["training", "sampling"]
        assert status.queues[0].tokens_per_s > 0
        by_name = {tenant.name: tenant for tenant in status.tenants}
        assert by_name["ada"].num_pending == 1 and by_name["ada"].num_models == 1
        assert by_name["ada"].tokens["trained"] >= 3
        assert by_name["bob"].num_pending == 0
    page = render_service_page(status)
    assert "ada" in page and "bob" in page


async def test_the_root_names_routes_that_are_there(tmp_path: Path) -> None:
    """And no page loads anything from elsewhere."""
    async with serve(tmp_path / "run") as served:
        ada = served.client()
        index = (await ada.send("GET", "/")).json()
        assert index["name"] == "rookery" and index["version"]
        known = {path: (await ada.send("GET", path)).status_code for path in index["routes"]}
        assert known.pop("/status") == 404, "only this machine is shown it"
        assert set(known.values()) == {200}
        for path in ("/docs", "/redoc"):
            assert (await ada.send("GET", path)).status_code == 404


async def test_names_of_tenants_are_told_to_this_machine_alone(tmp_path: Path) -> None:
    async with serve(tmp_path / "run", key_file=tmp_path / "keys.json") as served:
        ada = served.client("ada")
        body = {"model": "fake", "prompt": [5], "max_tokens": 2}
        assert (await ada.send("POST", "/v1/completions", json=body)).status_code == 200
        here = await ada.send("GET", "/metrics")
        assert 'rookery_tokens_total{kind="sampled",tenant="ada"} 2.0' in here.text
        elsewhere = await ada.send("GET", "/metrics", headers={"x-forwarded-for": "192.0.2.1"})
        assert "rookery_requests_total" in elsewhere.text and "ada" not in elsewhere.text
