"""The pool over stub servers: ports, residency, failover, duplicates, balance. Real HTTP."""

import asyncio
import contextlib
import gc
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
from aiohttp import web
from fleet.adapters import K, Q, make_small, write_model
from fleet.stub import Stub, greedy, requests, serve, until

from rookery.errors import AdapterError, FleetError, RookeryError
from rookery.fleet import Client, Fleet, FleetConfig, open_fleet, open_session
from rookery.fleet.admin import down, status, verify
from rookery.fleet.fleet import OBJECTS, collected_rarely
from rookery.fleet.http.client import is_local
from rookery.fleet.http.probe import probe
from rookery.fleet.servers import launch as launching
from rookery.fleet.servers.settings import LaunchConfig
from rookery.types import (
    Adapter,
    Completion,
    CompletionDelta,
    LoraFactors,
    SampleRequest,
    SamplingParams,
)

GREEDY = SamplingParams(max_tokens=3, temperature=0)


@asynccontextmanager
async def pool(*stubs: Stub, **options: object) -> AsyncIterator[Fleet]:
    async with serve(*stubs):
        config = FleetConfig(urls=tuple(stub.url for stub in stubs), **options)  # type: ignore[arg-type]
        async with open_fleet(config) as fleet:
            yield fleet


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(write_model(tmp_path / "tiny"))


async def test_equal_requests_share_calls_and_different_seeds_do_not() -> None:
    stub = Stub()
    async with pool(stub, batch=8) as fleet:
        start = len(stub.bodies)
        await fleet.sample(
            [SampleRequest(model=fleet.base, prompt=(1, i % 50), params=GREEDY) for i in range(64)]
        )
        assert [len(b["prompt"]) for b in stub.bodies[start:]] == [8] * 8
        start = len(stub.bodies)
        await fleet.sample(requests(fleet.base, 6))
        assert sorted(b["seed"] for b in stub.bodies[start:]) == list(range(6))


async def test_small_batches_are_cut_only_if_no_others_keep_the_servers_busy() -> None:
    stub = Stub(latency_s=0.02)
    async with pool(stub) as fleet:
        small = [SampleRequest(model=fleet.base, prompt=(1, i), params=GREEDY) for i in range(8)]
        for _ in range(2):  # and again after others
            start = len(stub.bodies)
            await fleet.sample(small)
            assert [len(b["prompt"]) for b in stub.bodies[start:]] == [2] * 4
            start = len(stub.bodies)
            await asyncio.gather(*(fleet.sample(small) for _ in range(16)))
            sizes = [len(b["prompt"]) for b in stub.bodies[start:]]
            assert sizes == [2] * 4 + [4] * 2 + [6, 2] + [8] * 13


async def test_32_adapters_on_8_slots_load_once_each_and_none_starves(model: str) -> None:
    stub = Stub(root=model, max_loras=8, latency_s=0.01, capacity=16, load_s=0.01)
    async with pool(stub, batch=1) as fleet:
        refs = [await fleet.load(make_small(f"a{i}", i)) for i in range(32)]
        assert not stub.adapters, "nothing is loaded before it is used"
        prompts = [(1, i) for i in range(4)]
        wanted = [
            SampleRequest(model=ref, prompt=prompt, params=GREEDY)
            for prompt in prompts
            for ref in refs
        ]
        answers = await fleet.sample(wanted)
    assert all(
        list(c.tokens) == greedy(fleet.wire_name(r.model), r.prompt, 3)
        for r, [c] in zip(wanted, answers, strict=True)
    )
    assert stub.loads == {fleet.wire_name(ref): 1 for ref in refs}
    assert stub.most_adapters <= 8


async def test_a_killed_server_costs_its_calls_one_retry_and_none_is_answered_twice() -> None:
    stubs = [Stub(latency_s=0.02, capacity=8), Stub(latency_s=0.02, capacity=8)]
    async with pool(*stubs, max_in_flight=32) as fleet:
        ref = await fleet.load(make_small("a"))
        wanted = [*requests(ref, 100), *requests(fleet.base, 100)]
        async with asyncio.TaskGroup() as group:
            call = group.create_task(fleet.sample(wanted))
            await stubs[0].wait_in_flight(6)
            await stubs[0].stop()
        answers = call.result()
        assert len(answers) == 200 and all(len(a) == 1 for a in answers)
        assert fleet.pool.num_resent > 0
        for request, [completion] in zip(wanted, answers, strict=True):
            assert completion.model == request.model
        assert [r.load.is_open for r in fleet.pool.replicas] == [False, True]
        assert fleet.pool.replicas[0].load.num_sequences == 0
        # It comes back, knows no adapter, and takes work again.
        await stubs[0].start()
        stubs[0].bodies.clear()
        await until(lambda: fleet.pool.replicas[0].load.is_open)
        assert await fleet.sample(wanted) == answers
        assert stubs[0].bodies


async def test_a_call_that_dies_twice_is_an_error_that_names_the_server() -> None:
    stubs = [Stub(failures=[500] * 9), Stub(failures=[500] * 9)]
    for stub in stubs:
        stub.failures = []
    async with pool(*stubs) as fleet:
        for stub in stubs:
            stub.failures = [500] * 9
        with pytest.raises(FleetError, match=r"failed .500.: as asked"):
            await fleet.sample(requests(fleet.base, 1))
        assert sum(len(stub.failures) for stub in stubs) == 16, "sent twice, no more"
        for stub in stubs:
            stub.failures = []
        assert len(await fleet.sample(requests(fleet.base, 5))) == 5


async def test_a_slow_server_s_last_calls_are_taken_over_and_the_duplicate_dropped() -> None:
    stubs = [Stub(latency_s=0.01, capacity=4), Stub(latency_s=0.01, capacity=4)]
    async with pool(*stubs, max_in_flight=8) as fleet:
        await fleet.sample(requests(fleet.base, 40))
        stubs[0].hang = True
        async with asyncio.timeout(60):
            answers = await fleet.sample(requests(fleet.base, 24))
        assert len(answers) == 24 and fleet.pool.num_stolen > 0
        assert all(r.load.num_sequences == 0 for r in fleet.pool.replicas)
        await until(lambda: not sum(stubs[0].in_flight.values()))


async def test_cancelling_a_caller_frees_the_servers() -> None:
    stub = Stub(hang=True)
    async with serve(stub):
        stub.hang = False
        async with open_fleet(FleetConfig(urls=(stub.url,))) as fleet:
            stub.hang = True
            task = asyncio.create_task(fleet.sample(requests(fleet.base, 100)))
            await stub.wait_in_flight(10)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await until(lambda: not sum(stub.in_flight.values()))
            assert not fleet.pool.replicas[0].load.in_flight
            assert fleet.pool.router.num_waiting == 0


async def test_unloading_waits_for_requests_and_removes_everything() -> None:
    stub = Stub(latency_s=0.05)
    async with pool(stub) as fleet:
        ref = await fleet.load(make_small("a"))
        assert await fleet.load(make_small("a")) == ref
        await fleet.unload(ref)
        assert list(fleet.loaded) == [ref], "it was loaded twice"
        task = asyncio.create_task(fleet.sample(requests(ref, 3)))
        await stub.wait_in_flight(1)
        folder = stub.adapters[fleet.wire_name(ref)]
        assert "adapter_model.safetensors" in os.listdir(folder)
        await fleet.unload(ref)
        assert len(await task) == 3
        assert stub.unloads == [fleet.wire_name(ref)] and fleet.loaded == ()
        with pytest.raises(FileNotFoundError):
            os.listdir(folder)
        with pytest.raises(FleetError, match="not loaded"):
            await fleet.unload(ref)
        with pytest.raises(FleetError, match=f"{ref.served_name} is not loaded. Loaded: base@tiny"):
            await fleet.sample(requests(ref, 1))


async def test_adapters_that_do_not_fit_are_refused_before_anything_is_sent(model: str) -> None:
    stub = Stub(root=model)
    factors = make_small("x").factors
    cases = [
        (make_small("wide", rank=17), r"rank 17.*at most 16.*--max-lora-rank 17"),
        (make_small("other", base="llama"), r"made for 'llama', the servers run tiny"),
        (_made_of({Q.replace("q_proj", "q_prj"): factors[Q]}), r"q_prj.*nearest is .*q_proj"),
        (_made_of({K: factors[Q]}), "maps 32 to 32; this model's maps 32 to 16"),
        (_made_of({}), "adapts no layer"),
    ]
    async with pool(stub) as fleet:
        before = len(stub.bodies)
        for adapter, said in cases:
            with pytest.raises(AdapterError, match=said):
                await fleet.load(adapter)
        assert len(stub.bodies) == before and not stub.loads and fleet.loaded == ()
        await fleet.load(make_small("fits", base="org/Tiny"))


def _made_of(factors: dict[str, LoraFactors]) -> Adapter:
    return Adapter(name="x", base="", version="1", factors=factors)


async def test_with_unknown_shapes_the_server_judges_at_load() -> None:
    stub = Stub()
    async with pool(stub) as fleet:
        stub.refuse_load = "shape mismatch in q_proj"
        with pytest.raises(AdapterError, match="shape mismatch"):
            await fleet.load(make_small("a"))
        assert fleet.loaded == ()
        stub.refuse_load = ""
        await fleet.load(make_small("a"))
        assert stub.loads.total() == 1


async def test_a_server_that_forgot_its_adapters_gets_them_again() -> None:
    stub = Stub()
    async with pool(stub) as fleet:
        ref = await fleet.load(make_small("a"))
        first = await fleet.sample(requests(ref, 2))
        stub.adapters.clear()
        assert await fleet.sample(requests(ref, 2)) == first


async def test_least_recently_used_adapters_make_room(model: str) -> None:
    stub = Stub(root=model, max_cpu_loras=3)
    async with pool(stub) as fleet:
        refs = [await fleet.load(make_small(f"a{i}", i)) for i in range(5)]
        for ref in (refs[0], refs[1], refs[2], refs[0], refs[3], refs[4]):
            await fleet.sample(requests(ref, 1))
        assert stub.unloads == [fleet.wire_name(refs[1]), fleet.wire_name(refs[2])]
        assert set(stub.adapters) == {fleet.wire_name(refs[i]) for i in (0, 3, 4)}


async def test_a_server_that_searches_a_folder_needs_no_load(model: str, tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    stub = Stub(root=model, routes=("/v1/completions", "/server_info"), resolver=str(folder))
    async with pool(stub, adapter_folder=folder, resolver=True) as fleet:
        assert fleet.pool.replicas[0].route == "resolver"
        ref = await fleet.load(make_small("a/b"))
        [[completion]] = await fleet.sample(
            [SampleRequest(model=ref, prompt=(1, 2), params=GREEDY)]
        )
        assert list(completion.tokens) == greedy(fleet.wire_name(ref), (1, 2), 3)
        assert not stub.loads
        await fleet.unload(ref)
        assert fleet.wire_name(ref) not in os.listdir(folder)
    assert os.listdir(folder) == []


def test_files_of_this_machine_are_seen_by_its_own_servers_alone() -> None:
    assert all(is_local(f"http://{host}:1") for host in ("127.0.0.1", "localhost", "[::1]"))
    assert not any(is_local(f"http://{host}:1") for host in ("gpu1", "10.0.0.1", "0.0.0.0"))


async def test_one_fleet_has_one_model_and_needs_a_server() -> None:
    with pytest.raises(FleetError, match="different models, tiny and other"):
        async with pool(Stub(), Stub(root="other")):
            pass
    with pytest.raises(
        FleetError, match=r"can't be reached at http://127.0.0.1:9: Connection refused\. Is"
    ):
        async with open_fleet(FleetConfig(urls=("http://127.0.0.1:9",))):
            pass


def joined(deltas: Sequence[CompletionDelta], sample: int) -> tuple[object, ...]:
    """What the deltas of one completion are together."""
    own = [delta for delta in deltas if delta.sample == sample]
    assert [delta.finish_reason for delta in own[:-1]] == [None] * (len(own) - 1)
    return (
        tuple(token for delta in own for token in delta.tokens),
        tuple(value for delta in own for value in delta.logprobs),
        tuple(row for delta in own for row in delta.top_logprobs),
        "".join(delta.text for delta in own),
        own[-1].finish_reason,
    )


def whole(one: Completion) -> tuple[object, ...]:
    return (one.tokens, one.logprobs, one.top_logprobs, one.text, one.finish_reason)


def ignore(_: CompletionDelta) -> None: ...


STREAMED = SamplingParams(max_tokens=4, n=3, seed=5, top_logprobs=2)


@pytest.mark.parametrize("temperature", [1.0, 0.0])
async def test_streamed_answers_are_those_that_are_not(temperature: float) -> None:
    params = replace(STREAMED, temperature=temperature)
    async with pool(Stub(), Stub()) as fleet:
        ref = await fleet.load(make_small("a"))
        for model in (fleet.base, ref):
            deltas: list[CompletionDelta] = []
            request = SampleRequest(model=model, prompt=(1, 2), params=params)
            streamed = replace(request, on_delta=deltas.append)
            told, plain = await fleet.sample([streamed, request])
            assert told == plain
            assert len(deltas) == 12, "a delta for every token"
            assert [joined(deltas, i) for i in range(3)] == [whole(one) for one in plain]


async def test_a_stream_that_is_lost_goes_on_where_it_was() -> None:
    first, second = Stub(), Stub()
    async with pool(first, second) as fleet:
        deltas: list[CompletionDelta] = []
        request = SampleRequest(model=fleet.base, prompt=(1, 2), params=STREAMED)
        [plain] = await fleet.sample([request])
        first.cut_streams, second.cut_streams = [5], [5]
        with pytest.raises(FleetError):
            await fleet.sample([replace(request, on_delta=ignore)])
        first.cut_streams = second.cut_streams = [5]
        [told] = await fleet.sample([replace(request, on_delta=deltas.append)])
        assert told == plain
        assert [joined(deltas, i) for i in range(3)] == [whole(one) for one in plain]


async def test_a_lost_stream_is_not_continued_by_another_answer() -> None:
    first, second = Stub(), Stub()
    async with pool(first, second) as fleet:
        first.cut_streams = second.cut_streams = [5]
        first.weights, second.weights = "one", "other"
        request = SampleRequest(model=fleet.base, prompt=(1, 2), params=STREAMED)
        with pytest.raises(FleetError, match="another one began another answer"):
            await fleet.sample([replace(request, on_delta=ignore)])


@pytest.mark.parametrize("error", [ValueError, TimeoutError])
async def test_an_error_of_who_is_told_is_none_of_the_server(error: type[Exception]) -> None:
    def fail(_: object) -> None:
        raise error("full")

    stub = Stub()
    async with serve(stub), open_fleet(FleetConfig(urls=(stub.url,))) as fleet:
        request = SampleRequest(model=fleet.base, prompt=(1, 2), params=STREAMED, on_delta=fail)
        with pytest.raises(FleetError, match="on_delta of a request failed: full"):
            await fleet.sample([request])
        assert fleet.pool.num_resent == 0 and fleet.pool.replicas[0].load.is_open


async def test_a_cancelled_stream_ends_on_its_server() -> None:
    stub = Stub(stream_pause=asyncio.Event())
    async with pool(stub) as fleet:
        begun = asyncio.Event()
        request = SampleRequest(
            model=fleet.base, prompt=(1, 2), params=STREAMED, on_delta=lambda _: begun.set()
        )
        drawing = asyncio.create_task(fleet.sample([request]))
        await begun.wait()
        assert stub.in_flight["tiny"] == 1
        drawing.cancel()
        await until(lambda: stub.in_flight["tiny"] == 0)


async def test_a_schema_goes_to_servers_that_hold_answers_to_it() -> None:
    old = Stub(fields=("model", "prompt", "logprobs"))
    for stub in (Stub(), old):
        async with pool(stub) as fleet:
            request = SampleRequest(
                model=fleet.base, prompt=(1,), params=GREEDY, json_schema='{"type": "object"}'
            )
            if stub is old:
                with pytest.raises(FleetError, match="JSON schema"):
                    await fleet.sample([request])
            else:
                await fleet.sample([request])
                assert stub.bodies[-1]["structured_outputs"] == {"json": '{"type": "object"}'}


# `up`, `status`, `verify`, `down` as functions.


FAKE = Path(__file__).parent / "fake"


async def test_verifying_a_good_server(tmp_path: Path) -> None:
    stub = Stub(root=str(write_model(tmp_path / "tiny")))
    async with serve(stub):
        checks = {check.name: check for check in await verify(stub.url, adapter=make_small("a"))}
    assert all(check.is_fine for name, check in checks.items() if name != "prefix cache"), checks
    assert not checks["prefix cache"].is_fine, "the stub's counters stand still"
    assert stub.loads.total() == 1 and not stub.adapters
    assert "at most 8" in checks["adapters"].detail and "tiny" in checks["server"].detail
    assert "0.0-stub" in checks["version"].detail


async def test_verifying_a_poor_server_says_what_to_do() -> None:
    stub = Stub(processed=False, fields=("model", "prompt", "logprobs"), routes=())
    async with serve(stub):
        checks = {check.name: check for check in await verify(stub.url)}
    assert "--logprobs-mode processed_logprobs" in checks["log-probs"].detail
    assert "--max-logprobs" in checks["label log-probs"].detail
    assert "--enable-lora" in checks["adapters"].detail
    wrong = ("log-probs", "label log-probs", "prompt log-probs", "adapters")
    assert [checks[name].is_fine for name in wrong] == [False] * 4
    assert checks["completion"].is_fine


async def test_verifying_a_server_that_computes_prompts_wrongly() -> None:
    async with serve(Stub(prompts_off=1.5)) as (stub,):
        checks = {check.name: check for check in await verify(stub.url)}
    assert checks["completion"].is_fine and checks["label log-probs"].is_fine
    check = checks["prompt log-probs"]
    assert check.is_fine is False and "1.50 nats" in check.detail
    assert "cudagraph_mode FULL" in check.detail


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("models", '{"data": [1, null]}'),
        ("openapi", "[1]"),
        ("version", "null"),
        ("metrics", "[" * 200_000),
        ("complete", '{"choices": [{"logprobs": {"top_logprobs": [[1, 2]]}}]}'),
        ("complete", '{"choices": [{"logprobs": {"top_logprobs": [{"token_id:7": null}]}}]}'),
    ],
)
async def test_a_server_that_answers_garbage_gets_a_sentence(route: str, body: str) -> None:
    stub = Stub()

    async def garbage(_: web.Request) -> web.Response:
        return web.Response(text=body, content_type="application/json")

    assert hasattr(stub, f"_{route}")
    setattr(stub, f"_{route}", garbage)
    async with serve(stub), open_session() as session:
        [one] = await status([stub.url])
        assert one.is_up or one.error
        with contextlib.suppress(RookeryError):
            await probe(Client(stub.url, session=session))


async def test_down_leaves_the_servers_of_runs_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROOKERY_CACHE", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(FAKE))
    monkeypatch.setattr(launching, "POLL_S", 0.02)
    config = LaunchConfig(model="tiny", device="cpu", port=18700)
    async with launching.open_servers(config) as [server]:
        assert await asyncio.to_thread(down, tmp_path / "fleet") == []
        assert server.is_alive
    assert os.listdir(tmp_path / "fleet") == []


# How often Python collects garbage while a fleet is open.


@pytest.fixture
def own_threshold() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


@pytest.mark.usefixtures("own_threshold")
def test_it_is_rarer_inside_and_as_the_program_chose_afterwards() -> None:
    first, second = collected_rarely(), collected_rarely()
    first.__enter__()
    assert gc.get_threshold() == (OBJECTS, 10, 10)
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert gc.get_threshold() == (700, 10, 10)
    for own in (0, 10 * OBJECTS):
        gc.set_threshold(own, 5, 5)
        with pytest.raises(KeyError), collected_rarely():
            assert gc.get_threshold() == (own, 5, 5), "it collects as rarely already"
            raise KeyError
        assert gc.get_threshold() == (own, 5, 5)


# Servers given by URL.


NO_INFO = tuple(route for route in Stub().routes if route != "/server_info")


@pytest.mark.parametrize(
    ("stub", "device", "may_meet"),
    [
        (Stub(device="cuda"), None, True),
        (Stub(routes=NO_INFO), None, False),
        (Stub(routes=NO_INFO), "gpu", True),
        (Stub(device="cpu"), "gpu", False),
        (Stub(routes=NO_INFO, version="0.26.0+cu129"), None, True),
        (Stub(routes=NO_INFO, version="0.26.0+g1234567"), None, False),
        (Stub(routes=NO_INFO, cpu_space="None"), None, True),
        (Stub(routes=NO_INFO, cpu_space="4294967296"), "gpu", False),
    ],
    ids=[
        "gpu", "not told", "by the config", "the server knows better", "gpu build", "some build",
        "no cpu cache", "cpu cache",
    ],
)  # fmt: skip
async def test_the_base_and_adapters_take_turns_unless_on_a_gpu(
    stub: Stub, device: Literal["gpu", "cpu"] | None, may_meet: bool
) -> None:
    stub.latency_s = 0.02
    async with (
        serve(stub),
        open_fleet(FleetConfig(urls=(stub.url,), batch=1, device=device)) as fleet,
    ):
        ref = await fleet.load(make_small("a"))
        await fleet.sample(
            [
                SampleRequest(model=model, prompt=(1, i), params=SamplingParams(max_tokens=1))
                for i in range(8)
                for model in (fleet.base, ref)
            ]
        )
    assert stub.has_met == may_meet
