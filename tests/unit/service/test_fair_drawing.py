"""What one tenant asks of the engine leaves room for the others."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from executors.jobs import until
from service.tenants import FakeEngine, FakeFolders, fake_backend, serve

from rookery.service.config import Limits, ServiceConfig
from rookery.types import Completion, SampleRequest, Score, ScoreRequest


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
