"""What clients leave behind in a service that runs for long: bounded, or refused with words."""

import asyncio
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest
from service.tenants import Client, crashed_copy, serve

from rookery.service import request_context as json_route
from rookery.service.config import Limits, ServiceConfig
from rookery.service.request_context import SLICE_BYTES

SAMPLE = {
    "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5]}]},
    "sampling_params": {"max_tokens": 1},
}


async def sampler(ada: Client, session: str, seq: int, *, status: int = 200) -> dict[str, str]:
    body = {"session_id": session, "sampling_session_seq_id": seq, "base_model": "fake"}
    return await ada.post("create_sampling_session", body, status=status)


async def test_sampling_sessions_of_a_tenant_are_bounded(tmp_path: Path) -> None:
    config = ServiceConfig(limits=Limits(samplers=4))
    async with serve(tmp_path / "run", config=config, key_file=tmp_path / "keys.json") as served:
        ada, service = served.client("ada"), served.service
        session = await ada.session()
        model = await ada.model(session)
        names = [(await sampler(ada, session, seq))["sampling_session_id"] for seq in range(4)]
        full = await sampler(ada, session, 4, status=429)
        assert "4 sampling sessions" in full["error"]
        save = {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 5}
        await ada.post("save_weights_for_sampler", save, status=429)
        assert (await sampler(ada, session, 3))["sampling_session_id"] == names[3], "sent again"
        bob = served.client("bob")
        await sampler(bob, await bob.session(), 0)
        for name in names:
            service.last_seen[name] = time.monotonic() - config.session_s - 1
        await ada.samples(await ada.post("asample", {**SAMPLE, "sampling_session_id": names[0]}))
        await service.clean_up()
        assert [name for name in names if name in service.context.state.samplers] == [
            names[0], *names[2:]
        ]  # fmt: skip
        await sampler(ada, session, 4)


@pytest.mark.parametrize("limits", [Limits(results=2), Limits(results_mib=1e-5)])
async def test_results_that_nobody_fetches_are_bounded(tmp_path: Path, limits: Limits) -> None:
    config = ServiceConfig(limits=limits)
    async with serve(tmp_path / "run", config=config, key_file=tmp_path / "keys.json") as served:
        ada, futures = served.client("ada"), served.service.context.futures
        owner = (await sampler(ada, await ada.session(), 0))["sampling_session_id"]
        body = {**SAMPLE, "sampling_session_id": owner}
        turns = served.service.drawing.turns
        async with turns.take("bob", tokens=1, width=config.samples_in_flight, id="other"):
            replies = [await ada.post("asample", {**body, "seq_id": seq}) for seq in range(2)]
        for reply in replies:
            future = futures.known(reply["request_id"])
            assert future is not None
            await future.done.wait()
        full = await ada.post("asample", {**body, "seq_id": 2}, status=429)
        assert "2 results of yours" in full["error"]
        assert await ada.post("asample", {**body, "seq_id": 1}) == replies[1], "sent again"
        bob = served.client("bob")
        other = (await sampler(bob, await bob.session(), 0))["sampling_session_id"]
        await bob.samples(await bob.post("asample", {**SAMPLE, "sampling_session_id": other}))
        for reply in replies:
            await ada.samples(reply)
        await ada.samples(await ada.post("asample", {**body, "seq_id": 2}))
        assert futures.num_unfetched("ada") == futures.bytes_unfetched("ada") == 0


@pytest.mark.parametrize("path", ["/v1/completions", "/detokenize"])
async def test_answers_that_nobody_reads_are_bounded(tmp_path: Path, path: str) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"model": "fake", "prompt": [5]},
        "/detokenize": {"tokens": [5] * 200_000},
    }
    body = bodies[path]
    config = ServiceConfig(limits=Limits(results_mib=1e-4))
    async with serve(tmp_path / "run", config=config, key_file=tmp_path / "keys.json") as served:
        ada, parts, is_left = served.client("ada"), list[bytes](), asyncio.Event()
        may_read = asyncio.Event()

        async def slow_app(scope: Any, receive: Any, send: Any) -> None:
            async def slow_send(message: Any) -> None:
                parts.append(message.get("body", b""))
                is_left.set()
                await may_read.wait()
                await send(message)

            await served.app(scope, receive, slow_send)

        transport = httpx2.ASGITransport(app=slow_app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://tink") as http:
            slow = asyncio.create_task(Client(http, ada.key).send("POST", path, json=body))
            await is_left.wait()
            full = await ada.send("POST", path, json=body)
            assert full.status_code == 429 and "MiB" in full.text, full.text
            other = await served.client("bob").send("POST", path, json=body)
            assert other.status_code == 200
            may_read.set()
            assert (await slow).status_code == 200
        assert max(map(len, parts)) <= SLICE_BYTES
        assert (await ada.send("POST", path, json=body)).status_code == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/api/v1/sample"])
async def test_an_answer_has_a_largest_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(json_route, "ANSWER_MIB", 1e-4)
    told = {"model": "fake", "messages": [{"role": "user", "content": "5"}], "prompt": [5]}
    body = {"prompts": [[5]]} if path == "/api/v1/sample" else told
    async with serve(tmp_path / "run") as served:
        answer = await served.client().send("POST", path, json=body)
        assert answer.status_code == 400 and "fewer samples" in answer.json()["error"]


async def test_a_result_that_nobody_fetches_expires(tmp_path: Path) -> None:
    async with serve(tmp_path / "run") as served:
        ada, service = served.client(), served.service
        owner = (await sampler(ada, await ada.session(), 0))["sampling_session_id"]
        reply = await ada.post("asample", {**SAMPLE, "sampling_session_id": owner})
        future = service.context.futures.known(reply["request_id"])
        assert future is not None
        await future.done.wait()
        future.finished -= service.context.config.unfetched_s
        await service.clean_up()
        assert service.context.futures.num_unfetched(future.tenant) == 0
        assert future.fetched is not None
        future.fetched -= service.context.config.result_s
        await service.clean_up()
        assert (await ada.retrieve(future.id)).status_code == 404


async def test_a_sample_that_was_given_up_is_not_waited_for_to_be_fetched(tmp_path: Path) -> None:
    config = ServiceConfig(limits=Limits(results=1), samples_in_flight=1)
    async with serve(tmp_path / "run", config=config) as served:
        ada, futures = served.client(), served.service.context.futures
        owner = (await sampler(ada, await ada.session(), 0))["sampling_session_id"]
        body = {**SAMPLE, "sampling_session_id": owner}
        async with served.service.drawing.turns.take("bob", tokens=1, width=1, id="other"):
            reply = await ada.post("asample", body)
            await ada.send(
                "POST", "/api/v1/cancel_future", json={"request_id": reply["request_id"]}
            )
        assert futures.num_unfetched("local") == 0
        assert "cancelled" in (await ada.result(reply))["error"]


@pytest.mark.parametrize("is_killed", [False, True])
async def test_a_refused_number_stays_taken_while_it_waits(tmp_path: Path, is_killed: bool) -> None:
    """Two requests of one number would wait, and the first of them for ever."""
    async with serve(tmp_path / "run") as served:
        ada, service = served.client(), served.service
        model = await ada.model(await ada.session())
        wrong = {"model_id": model, "seq_id": 2, "adam_params": {"learning_rate": -1}}
        await ada.post("optim_step", wrong, status=422)
        [work] = service.context.pending
        future = service.context.futures.known(work.id)
        assert future is not None and future.fetched is not None
        future.fetched -= service.context.config.result_s + 1
        await service.clean_up()
        if is_killed:
            await service.snapshot()
        else:
            await ada.post("optim_step", wrong, status=422)
            assert [one.id for one in service.context.pending] == [work.id]
        killed = crashed_copy(tmp_path / "run", tmp_path / "killed")
    async with serve(killed) as served:
        ada, service = served.client(), served.service
        await ada.post("optim_step", wrong, status=422)
        assert [one.id for one in service.context.pending] == [work.id]
        await ada.result(await ada.step(model, 1))
        await ada.result(await ada.step(model, 3))
        assert not len(service.context.pending)
