"""Adapters on servers that others use too: no trace is left, and no name of others is trusted."""

import asyncio
import os
import random
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from fleet.adapters import make_small, write_model
from fleet.stub import Stub, serve, until
from forked import forked, run_code

from rookery.errors import AdapterError, FleetError
from rookery.fleet import Fleet, FleetConfig, open_fleet
from rookery.fleet.residency import claim_folder
from rookery.types import Adapter, ModelRef, ModelWeights, SampleRequest, SamplingParams

PARAMS = SamplingParams(max_tokens=1, temperature=0)
KILLED = """
import asyncio, sys
from fleet.adapters import make_small
from rookery.fleet import FleetConfig, open_fleet

async def main():
    async with open_fleet(FleetConfig(urls=(sys.argv[1],))) as fleet:
        await fleet.load(make_small("a"))
        print("loaded", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A place of this test's own instead of shared memory; nothing may be left in it."""
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setattr("rookery.fleet.staging.SHARED_MEMORY", folder)
    yield folder
    assert os.listdir(folder) == []


def staged(memory: Path) -> set[str]:
    """The adapters that wait there for servers to read them."""
    return {path.name for path in memory.glob("*/*~*")}


def ask(ref: ModelRef, num: int = 1) -> list[SampleRequest]:
    return [SampleRequest(model=ref, prompt=(1, i), params=PARAMS) for i in range(num)]


async def use(fleet: Fleet, adapter: Adapter) -> ModelRef:
    ref = await fleet.load(adapter)
    await fleet.sample(ask(ref))
    return ref


async def test_closing_unregisters_everything(memory: Path) -> None:
    stub = Stub()
    async with serve(stub):
        async with open_fleet(FleetConfig(urls=(stub.url,))) as fleet:
            for i in range(3):
                await use(fleet, make_small(f"a{i}", i))
            assert len(stub.adapters) == 3
            assert all(os.listdir(path) for path in stub.adapters.values())
        assert not stub.adapters and os.listdir(memory) == []
        with pytest.raises(RuntimeError, match="as planned"):
            async with open_fleet(FleetConfig(urls=(stub.url,))) as fleet:
                await use(fleet, make_small("a"))
                raise RuntimeError("as planned")
        assert not stub.adapters


async def test_what_a_killed_process_left_is_unregistered_by_the_next(tmp_path: Path) -> None:
    stub = Stub()
    async with serve(stub):
        with forked(run_code, KILLED, stub.url) as client:
            assert await asyncio.to_thread(client.lines.readline) == "loaded\n"
            [(left, path)] = stub.adapters.items()
            stub.adapters["theirs"] = str(tmp_path)
            async with open_fleet(FleetConfig(urls=(stub.url,))):
                assert left in stub.adapters, "its process lives"
            client.send(signal.SIGKILL)
            await asyncio.to_thread(client.wait)
        assert os.listdir(path)
        async with open_fleet(FleetConfig(urls=(stub.url,))) as fleet:
            assert list(stub.adapters) == ["theirs"]
            # Another process that looks for leftovers may be removing it right now.
            await until(lambda: not os.path.exists(path))
            await use(fleet, make_small("a"))


async def test_folders_of_the_dead_stay_until_their_server_can_be_asked(memory: Path) -> None:
    closed, open_ = Stub(), Stub()

    async def refuse(_: web.Request) -> web.Response:
        return web.Response(status=401)

    async with serve(open_):
        closed._models = refuse  # type: ignore[method-assign]
        await closed.start()
        with claim_folder(memory) as owner:
            owner.note_server(closed.url)
        name = f"a@1~{owner.token}"
        open_.adapters[name] = closed.adapters[name] = str(owner.folder)
        async with open_fleet(FleetConfig(urls=(open_.url,))):
            pass
        assert owner.folder.is_dir()
        await closed.stop()
        async with open_fleet(FleetConfig(urls=(open_.url,))):
            assert not owner.folder.exists(), "what it knew is gone with it"


@pytest.mark.parametrize("answer", ['{"data": null}', '{"data": [1]}', "[" * 100_000])
async def test_what_another_program_answers_stops_no_fleet(tmp_path: Path, answer: str) -> None:
    other, stub = Stub(), Stub()

    async def garbage(_: web.Request) -> web.Response:
        return web.Response(text=answer, content_type="application/json")

    other._models = garbage  # type: ignore[method-assign]
    async with serve(other, stub):
        with claim_folder(tmp_path) as owner:
            owner.note_server(other.url)
        async with open_fleet(FleetConfig(urls=(stub.url,), adapter_folder=tmp_path)):
            assert owner.folder.is_dir(), "it cannot be asked"


@pytest.mark.parametrize("servers", [b"not a url\nhttp://[::1\nftp://x\n", b"\xff\xfe\n"])
async def test_records_that_make_no_sense_stop_no_fleet(tmp_path: Path, servers: bytes) -> None:
    with claim_folder(tmp_path) as owner:
        owner.note_server("http://127.0.0.1:9")
    record = owner.folder / ".owner"
    record.write_bytes(record.read_bytes().partition(b"\n")[0] + b"\n" + servers)
    (tmp_path / "rookery-adapters-1a" / ".owner").mkdir(parents=True)
    async with (
        serve(Stub()) as [stub],
        open_fleet(FleetConfig(urls=(stub.url,), adapter_folder=tmp_path)),
    ):
        assert record.is_file()


async def test_servers_of_the_dead_are_asked_at_once_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rookery.fleet.residency.LEFT_S", 1.5)
    stub, shared = Stub(), Stub()
    asked: list[str] = []
    models = shared._models

    async def count(request: web.Request) -> web.Response:
        asked.append(request.path)
        return await models(request)

    monkeypatch.setattr(shared, "_models", count)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        async with serve(stub, shared):
            owners = []
            for i in range(8):
                with claim_folder(tmp_path) as owner:
                    silent_url = f"http://127.0.0.1:{silent.getsockname()[1]}"
                    owner.note_server(silent_url if i < 4 else shared.url)
                shared.adapters[f"a@1~{owner.token}"] = str(owner.folder)
                owners.append(owner)
            begin_s = time.monotonic()
            async with open_fleet(FleetConfig(urls=(stub.url,), adapter_folder=tmp_path)):
                assert time.monotonic() - begin_s < 5.9, "four times one limit is 6 s"
            assert [owner.folder.exists() for owner in owners] == [True] * 4 + [False] * 4
            assert len(asked) == 1 and not shared.adapters


async def test_a_folder_without_a_record_goes_when_it_is_old(tmp_path: Path) -> None:
    old, new, other = (tmp_path / f"rookery-adapters-{name}" for name in ("0a", "0b", "*"))
    for folder in (old, new, other):
        folder.mkdir()
        (folder / "weights").write_text("x")
    for folder in (old, other):
        os.utime(folder, (0, 0))
    async with (
        serve(Stub()) as [stub],
        open_fleet(FleetConfig(urls=(stub.url,), adapter_folder=tmp_path)),
    ):
        assert not old.exists() and new.exists() and other.exists()


def test_a_folder_that_cannot_be_made_gets_a_sentence(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(FleetError, match=f"No folder can be made in {file}"), claim_folder(file):
        pass


async def test_a_folder_stays_when_its_queue_was_never_seen_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unloaded, but a request that named it may wait there: closing asks again, or leaves it."""
    monkeypatch.setattr("rookery.fleet.residency.LEAVE_S", 0.2)
    stub = Stub()
    async with serve(stub):
        config = FleetConfig(urls=(stub.url,), adapter_folder=tmp_path)
        async with open_fleet(config) as fleet:
            ref = await use(fleet, make_small("a"))
            stub.hang = True
            cut = asyncio.create_task(fleet.sample(ask(ref)))
            await until(lambda: stub.in_flight[fleet.wire_name(ref)])
            cut.cancel()
            await asyncio.wait({cut})
            await fleet.unload(ref)
        assert len(staged(tmp_path)) == 1
        stub.hang = False
        async with open_fleet(config):
            assert not staged(tmp_path)
        stub.crash()


async def test_a_folder_outlives_requests_that_were_cut_off(memory: Path) -> None:
    """They may be in the server's queue, and be given the adapter once more: a later one waits."""
    stub = Stub()
    seen: list[tuple[str, bool]] = []
    complete = stub._complete

    async def watch(request: web.Request) -> web.StreamResponse:
        model = (await request.json())["model"]
        seen.append((model, bool(staged(memory))))
        return await complete(request)

    stub._complete = watch  # type: ignore[method-assign]
    async with serve(stub):
        async with open_fleet(FleetConfig(urls=(stub.url,))) as fleet:
            ref = await use(fleet, make_small("a"))
            name = fleet.wire_name(ref)
            stub.hang = True
            cut = asyncio.create_task(fleet.sample(ask(ref)))
            await until(lambda: stub.in_flight[name])
            cut.cancel()
            await asyncio.wait({cut})
            stub.hang = False
            await fleet.unload(ref)
            assert seen[-2:] == [(name, True), ("tiny", True)]
            assert not staged(memory)
            ref = await use(fleet, make_small("b"))
            stub.hang = True
            cut = asyncio.create_task(fleet.sample(ask(ref)))
            await until(lambda: stub.in_flight[fleet.wire_name(ref)])
            stub.hang = False
        assert seen[-1] == ("tiny", True) and not stub.adapters
        await asyncio.wait({cut}, timeout=0)
        cut.cancel()


async def test_a_server_that_dies_keeps_no_fleet_from_closing(memory: Path) -> None:
    stub = Stub()
    async with serve(stub):
        async with open_fleet(FleetConfig(urls=(stub.url,))) as fleet:
            ref = await use(fleet, make_small("a"))
            await stub.stop()
            async with asyncio.timeout(60):
                await fleet.unload(ref)
        assert os.listdir(memory) == []
        await stub.start()


@pytest.mark.parametrize("knows_shapes", [False, True])
async def test_loads_beside_unloads_of_one_adapter_never_fail(
    tmp_path: Path, knows_shapes: bool
) -> None:
    root = str(write_model(tmp_path / "tiny")) if knows_shapes else "tiny"
    stub = Stub(root=root, load_s=0.001, reads_folders=True)
    adapter = make_small("a")

    pauses = random.Random(0)

    async def turn(fleet: Fleet) -> None:
        for _ in range(12):
            ref = await fleet.load(adapter)
            await fleet.sample(ask(ref))
            await fleet.unload(ref)
            for _ in range(pauses.randrange(30)):
                await asyncio.sleep(0)

    async with serve(stub):
        async with open_fleet(FleetConfig(urls=(stub.url,))) as fleet:
            await asyncio.gather(*(turn(fleet) for _ in range(3)))
            assert fleet.loaded == () and fleet.pool.num_resent == 0
        assert not stub.adapters and not stub.num_dead_reads
    assert stub.loads.total() > 5, "it was retired and loaded again many times"


async def test_a_whole_model_is_not_published_as_an_adapter() -> None:
    stub = Stub()
    async with serve(stub), open_fleet(FleetConfig(urls=(stub.url,))) as fleet:
        with pytest.raises(AdapterError, match="policy is a whole model"):
            await fleet.publish(ModelWeights(name="policy", tensors={}, version="1"))
        assert fleet.loaded == () and not stub.adapters


async def test_a_publisher_retires_what_it_published_before(memory: Path) -> None:
    stub = Stub()
    async with serve(stub), open_fleet(FleetConfig(urls=(stub.url,))) as fleet:
        kept = await fleet.load(make_small("policy", 0))
        for seed in range(8):
            ref = await fleet.publish(make_small("policy", seed))
            assert await fleet.publish(make_small("policy", seed)) == ref
            await fleet.sample(ask(ref))
        other = await fleet.publish(make_small("critic", 99))
        assert list(fleet.loaded) == [kept, ref, other], "one that was loaded as well stays"
        names = {fleet.wire_name(one) for one in fleet.loaded}
        assert set(stub.adapters) == names
        assert staged(memory) == names
        stub.latency_s = 0.5
        last = asyncio.create_task(fleet.sample(ask(ref)))
        await until(lambda: stub.in_flight[fleet.wire_name(ref)])
        newest = await fleet.publish(make_small("policy", 40))
        assert ref in fleet.loaded, "a request is in flight"
        assert [c.model for [c] in await last] == [ref]
        assert list(fleet.loaded) == [kept, other, newest]
        await fleet.unload(newest)
        assert fleet.loaded == (kept, other)
        await fleet.publish(make_small("policy", 41))


def test_the_record_of_an_owner_is_removed_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rmtree, seen = shutil.rmtree, []
    with claim_folder(tmp_path) as owner:
        (owner.folder / "adapter").mkdir()

        def watch(path: Path, **options: Any) -> None:
            rmtree(path, **options)
            seen.append(os.listdir(owner.folder) if owner.folder.exists() else [])

        monkeypatch.setattr("shutil.rmtree", watch)
    assert seen == [[".owner"]] and os.listdir(tmp_path) == []
