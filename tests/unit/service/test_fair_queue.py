"""Fair between tenants by tokens, and turns of limited width."""

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from executors.jobs import until
from service.tenants import FakeEngine, FakeFolders, fake_backend, serve

from rookery.service.config import Limits, ServiceConfig
from rookery.service.fair_queue import FairQueue, FairSemaphore
from rookery.service.training import ReorderBuffer, stages
from rookery.service.work import Command
from rookery.types import Completion, SampleRequest, Score, ScoreRequest


def drained(queue: FairQueue[str]) -> list[str]:
    taken = []
    while (item := queue.take()) is not None:
        taken.append(item)
    return taken


def test_tokens_count_and_not_requests() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(3):
        queue.put(f"long{number}", tenant="ada", tokens=100)
    for number in range(30):
        queue.put(f"short{number}", tenant="bob", tokens=10)
    order = drained(queue)
    assert order.index("long1") - order.index("long0") >= 10
    assert order.index("long2") < 33


def test_a_pause_saves_no_turns_up() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(50):
        queue.put(f"ada{number}", tenant="ada", tokens=10)
    for _ in range(40):
        queue.take()
    for number in range(10):
        queue.put(f"bob{number}", tenant="bob", tokens=10)
    order = drained(queue)
    assert [name[:3] for name in order[:6]].count("bob") <= 4


def test_place_and_removal() -> None:
    queue: FairQueue[str] = FairQueue()
    for name in ("a", "b", "c"):
        queue.put(name, tenant="ada", tokens=5)
    place = queue.place("c")
    assert place is not None
    assert (place.ahead, place.tokens_ahead) == (2, 10)
    assert queue.remove("b")
    assert drained(queue) == ["a", "c"]
    assert queue.place("c") is None


def test_thousands_of_tenants_cost_each_other_nothing() -> None:
    """20,000 items of 2,000 tenants: the time that a look at all of them for each takes, many
    times over, is not there."""
    queue: FairQueue[str] = FairQueue()
    for number in range(20_000):
        queue.put(f"i{number}", tenant=f"t{number % 2000}", tokens=5)
    started = time.process_time()
    for number in range(20_000):
        assert queue.place(f"i{number}") is not None
    order = drained(queue)
    assert time.process_time() - started < 3.0
    assert order == [f"i{number}" for number in range(20_000)]


def test_a_lane_releases_in_order() -> None:
    buffer: ReorderBuffer[str] = ReorderBuffer(next_seq=1)
    assert buffer.add(3, "c") == []
    assert buffer.add(2, "b") == []
    assert buffer.free_seq == 4
    assert buffer.add(1, "a") == ["a", "b", "c"]
    assert buffer.next_seq == 4


def work(owner: str, kind: str, number: int) -> Command:
    return Command(
        kind=kind, id=f"{owner}{number}", tenant=owner, time=0.0, body=b"", owner=owner, seq=number
    )


def test_stages_keep_the_order_of_each_model_and_share_calls() -> None:
    fb, step = "forward_backward", "optim_step"
    works = [
        work("a", fb, 1), work("a", fb, 2), work("a", step, 3), work("b", fb, 1),
        work("b", step, 2), work("c", step, 1), work("a", fb, 4),
    ]  # fmt: skip
    calls = [[one.id for one in stage] for stage in stages(works)]
    assert calls == [["a1", "a2", "b1"], ["a3", "b2", "c1"], ["a4"]]


async def test_turns_are_bounded_and_fair() -> None:
    turns = FairSemaphore(2)
    begun: list[str] = []
    release = asyncio.Event()

    async def hold(name: str, tenant: str) -> None:
        async with turns.take(tenant, tokens=1, width=1, id=name):
            begun.append(name)
            await release.wait()

    async with asyncio.TaskGroup() as group:
        for number in range(5):
            group.create_task(hold(f"ada{number}", "ada"))
        await asyncio.sleep(0)
        group.create_task(hold("bob", "bob"))
        await asyncio.sleep(0)
        assert begun == ["ada0", "ada1"]
        assert turns.num_waiting == 4
        release.set()
    assert begun.index("bob") <= 3
    assert turns.num_waiting == 0


async def test_a_cancelled_wait_leaves_nothing() -> None:
    turns = FairSemaphore(1)
    async with turns.take("ada", tokens=1, width=1, id="first"):
        waits = [
            asyncio.create_task(turns.take("bob", tokens=1, width=1, id=f"w{i}").__aenter__())
            for i in range(3)
        ]
        await asyncio.sleep(0)
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
        assert turns.num_waiting == 0
    async with turns.take("cyd", tokens=1, width=1, id="after"):
        pass


async def test_who_is_cancelled_while_a_turn_ends_harms_nobody() -> None:
    """Its wait is over, and it has not run since: the turn is not its own any more."""
    turns, release = FairSemaphore(1), asyncio.Event()

    async def hold(name: str) -> None:
        async with turns.take(name, tokens=1, width=1, id=name):
            await release.wait()

    first, second = asyncio.create_task(hold("ada")), asyncio.create_task(hold("bob"))
    await asyncio.sleep(0)
    release.set()
    second.cancel()
    await asyncio.gather(first, second, return_exceptions=True)
    assert first.exception() is None
    assert second.cancelled()
    async with asyncio.timeout(10):
        await hold("cyd")


# What one tenant asks of the engine leaves room for the others.


class NotedEngine(FakeEngine):
    """Notes how many samples and scores it is given at a time; can be made to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.widths: list[int] = []
        self.is_free = asyncio.Event()
        self.is_free.set()

    async def sample(self, requests: Sequence[SampleRequest]) -> list[tuple[Completion, ...]]:
        self.widths.append(sum(request.params.n for request in requests))
        await self.is_free.wait()
        return await super().sample(requests)

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        self.widths.append(len(requests))
        return await super().score(requests)


async def test_draws_at_every_position_are_given_in_slices(tmp_path: Path) -> None:
    engine = NotedEngine()
    backend = replace(fake_backend(), engine=engine, folders=FakeFolders(engine))
    config = ServiceConfig(samples_in_flight=8)
    async with serve(tmp_path / "run", backend=backend, config=config) as served:
        ada = served.client()
        tokens = list(range(5, 45))
        body = {
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": tokens}]},
            "sampling_session_id": await ada.sampler(),
            "seq_id": 0,
            "sampling_params": {"max_tokens": 1, "seed": 1},
            "prompt_alt_tokens_k": 4,
            "target_prompt_logprobs": {"data": [7] * 39, "dtype": "int64", "shape": [39, 1]},
        }
        drawn = await ada.samples(await ada.post("asample", body))
    assert len(drawn.prompt_alt_tokens.tokens.dense) == 39 * 4 * 4
    assert max(engine.widths) <= 8
    assert sum(engine.widths) == 1 + 39 * 4 + 39


async def test_plain_draws_of_a_tenant_are_bounded(tmp_path: Path) -> None:
    engine = NotedEngine()
    engine.is_free.clear()
    backend = replace(fake_backend(), engine=engine, folders=FakeFolders(engine))
    config = ServiceConfig(samples_in_flight=1, limits=Limits(waiting=4))
    async with serve(
        tmp_path / "run", backend=backend, config=config, key_file=tmp_path / "keys.json"
    ) as served:
        ada, bob = served.client("ada"), served.client("bob")
        body = {"prompts": [[5]] * 4, "sampling_params": {"max_tokens": 1}}
        first = asyncio.create_task(ada.post("sample", body))
        await until(lambda: served.service.drawing.turns.num_waiting == 3)
        full = await ada.post("sample", body, status=429)
        assert "of your samples are waiting" in full["error"]
        chat = {"model": "fake", "messages": [{"role": "user", "content": "5"}]}
        other = asyncio.create_task(bob.send("POST", "/v1/chat/completions", json=chat))
        await until(lambda: served.service.drawing.turns.num_waiting == 4)
        engine.is_free.set()
        assert len((await first)["sequences"]) == 4
        assert (await other).status_code == 200


class NotedRow(tuple[tuple[int, float], ...]):
    """The most likely tokens at a position; notes in which threads it is read."""

    threads: ClassVar[set[int]] = set()

    def __iter__(self) -> Iterator[tuple[int, float]]:
        self.threads.add(threading.get_ident())
        return super().__iter__()


class RankingEngine(FakeEngine):
    """Scores with many likely tokens at each position."""

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        scores = await super().score(requests)
        return [replace(one, top_logprobs=(NotedRow([(5, -0.5)]),) * 3) for one in scores]


async def test_long_scores_are_written_beside_the_event_loop(tmp_path: Path) -> None:
    """A thousand tokens at each position of a long prompt are seconds of writing."""
    engine = RankingEngine()
    backend = replace(fake_backend(), engine=engine, folders=FakeFolders(engine))
    async with serve(tmp_path / "run", backend=backend) as served:
        ada = served.client()
        asked = {"sampling_session_id": await ada.sampler(), "tokens": [5, 6, 7]}
        scored = await ada.result(await ada.post("score", {**asked, "top_logprobs": 1}))
    assert scored["top_logprobs"] == [[[5, -0.5]]] * 3
    assert NotedRow.threads and threading.get_ident() not in NotedRow.threads
