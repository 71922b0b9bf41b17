"""Thousands of calls in a seeded disorder: every answer is the one of an undisturbed engine.

Workers sample, score, cancel, load, unload, reset the cache, ask for too much and plant memory
errors, at the same time, over a cache that holds less than one long prompt. In the end nothing is
in flight, every place of the cache is free, and whoever still waits is told.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

import pytest
from faults import Fault
from marks import long
from tiny import VOCAB, tiny_adapter

from rookery.embedded import EmbeddedEngine, EngineConfig, run_engine
from rookery.errors import EngineError
from rookery.slots import SlottedModel
from rookery.types import (
    Completion,
    ModelRef,
    SampleRequest,
    SamplingParams,
    Score,
    ScoreRequest,
)

NUM_OPERATIONS = 200
NUM_WORKERS = 24
CACHE_TOKENS = 90
LIMIT_S = 120.0

ADAPTERS = [
    tiny_adapter("wide", rank=8, seed=1),
    tiny_adapter("high", rank=2, seed=2, layers=range(2, 4)),
    tiny_adapter("top", rank=4, seed=3, layers=range(3, 4), targets=("mlp.down_proj",)),
    tiny_adapter("low", rank=3, seed=4, layers=range(1), targets=("self_attn.q_proj",)),
]
REFS = [ModelRef(name=a.name, version=a.version) for a in ADAPTERS]
Request = SampleRequest | ScoreRequest
Answer = tuple[Completion, ...] | Score


def make_requests(model: ModelRef, rng: random.Random) -> list[Request]:
    """Prompts that share beginnings, the longest longer than the cache."""
    stem = [rng.randrange(4, VOCAB) for _ in range(120)]
    requests: list[Request] = []
    for length in (1, 3, 9, 17, 30, 31, 60, 118):
        prompt = (*stem[:length], rng.randrange(4, VOCAB))
        params = SamplingParams(
            max_tokens=rng.randint(1, 7),
            n=rng.choice((1, 1, 1, 5)),
            temperature=rng.choice((0.0, 0.9)),
            top_p=rng.choice((1.0, 0.9)),
            seed=rng.randrange(100),
            ignore_eos=True,
        )
        requests.append(SampleRequest(model=model, prompt=prompt, params=params))
        requests.append(ScoreRequest(model=model, tokens=prompt, start=1, labels=(5, 6)))
    return requests


async def ask(engine: EmbeddedEngine, request: Request) -> Answer:
    if isinstance(request, SampleRequest):
        [completions] = await engine.sample([request])
        return completions
    [score] = await engine.score([request])
    return score


def run(model: SlottedModel, *, cache_tokens: int) -> AbstractAsyncContextManager[EmbeddedEngine]:
    cache_gib = (cache_tokens + 0.5) * model.shape.token_bytes(model.dtype) / 2**30
    config = EngineConfig(max_rows=10, prefill_tokens=24, cache_gib=cache_gib)
    return run_engine(model, config=config, detokenize=str, name="tiny")


async def undisturbed(model: SlottedModel) -> dict[Request, Answer]:
    async with run(model, cache_tokens=20_000) as engine:
        for adapter in ADAPTERS:
            await engine.load(adapter)
        rng = random.Random(7)
        requests = [r for ref in (engine.base, *REFS) for r in make_requests(ref, rng)]
        return {request: await ask(engine, request) for request in requests}


@dataclass
class Chaos:
    """The workers' common state."""

    engine: EmbeddedEngine
    expected: dict[Request, Answer]
    fault: Fault
    num_left: int = NUM_OPERATIONS
    seen: Counter[str] = field(default_factory=Counter)

    async def work(self, rng: random.Random) -> None:
        operations = (self.compare, self.cancel, self.churn, self.reset, self.ask_too_much,
                      self.lose_memory)  # fmt: skip
        weights = (60, 25, 25, 3, 3, 1)
        while self.num_left > 0:
            self.num_left -= 1
            if self.num_left == NUM_OPERATIONS // 2:  # once for sure, and so that answers are lost
                self.fault.error, self.fault.num = MemoryError("planted"), 2
            [operation] = rng.choices(operations, weights)
            await operation(rng)
            self.seen[operation.__name__] += 1

    def draw(self, rng: random.Random, refs: Sequence[ModelRef]) -> list[Request]:
        candidates = [request for request in self.expected if request.model in refs]
        return rng.sample(candidates, rng.randint(1, 4))

    async def compare(self, rng: random.Random, refs: Sequence[ModelRef] = ()) -> None:
        requests = self.draw(rng, refs or (self.engine.base,))
        waits = (ask(self.engine, request) for request in requests)
        answers = await asyncio.gather(*waits, return_exceptions=True)
        for request, answer in zip(requests, answers, strict=True):
            if isinstance(answer, EngineError) and "engine is out of memory" in str(answer):
                self.seen["lost"] += 1
                continue
            assert answer == self.expected[request]
            self.seen["answers"] += 1

    async def cancel(self, rng: random.Random, refs: Sequence[ModelRef] = ()) -> None:
        requests = self.draw(rng, refs or (self.engine.base,))
        tasks = [asyncio.create_task(ask(self.engine, request)) for request in requests]
        for _ in range(rng.randrange(40)):
            await asyncio.sleep(0)
        self.seen["cancelled"] += sum(task.cancel() for task in tasks)
        await asyncio.gather(*tasks, return_exceptions=True)

    async def churn(self, rng: random.Random) -> None:
        """Load an adapter, ask it or cancel, and unload it while others may use it too."""
        index = rng.randrange(len(ADAPTERS))
        ref = await self.engine.load(ADAPTERS[index])
        operation = rng.choice((self.compare, self.cancel))
        early = rng.random() < 0.3
        asking = asyncio.create_task(operation(rng, (ref,)))
        for _ in range(3 if early else 0):
            await asyncio.sleep(0)  # the requests name the adapter before it is unloaded
        if not early:
            await asking
        await self.engine.unload(ref)
        await asking

    async def reset(self, rng: random.Random) -> None:
        await self.engine.reset_prefix_cache()

    async def ask_too_much(self, rng: random.Random) -> None:
        with pytest.raises(EngineError, match="reads at most"):
            await self.engine.score([ScoreRequest(model=self.engine.base, tokens=(5,) * 200)])

    async def lose_memory(self, rng: random.Random) -> None:
        self.fault.error = MemoryError("planted")


async def drained(engine: EmbeddedEngine) -> None:
    async with asyncio.timeout(LIMIT_S):
        while engine.stats.num_in_flight:  # noqa: ASYNC110 (no event per request)
            await asyncio.sleep(0.001)
    await engine.reset_prefix_cache()
    assert engine.loaded == ()
    assert engine.stats.cached_tokens == 0


@pytest.mark.parametrize(("seed", "end"), [(0, "close"), pytest.param(1, "error", marks=long)])
async def test_chaos(
    tiny_model: SlottedModel, monkeypatch: pytest.MonkeyPatch, seed: int, end: str
) -> None:
    expected = await undisturbed(tiny_model)
    fault = Fault(tiny_model, monkeypatch)
    async with run(tiny_model, cache_tokens=CACHE_TOKENS) as engine:
        chaos = Chaos(engine, expected, fault)
        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
            for worker in range(NUM_WORKERS):
                group.create_task(chaos.work(random.Random(f"{seed}:{worker}")))
        fault.error = None
        await drained(engine)
        assert chaos.seen["answers"] > NUM_OPERATIONS // 2 and chaos.seen["cancelled"] > 20
        assert min(chaos.seen[name] for name in ("lost", "reset", "ask_too_much")) > 0
        requests = chaos.draw(random.Random(seed), (engine.base,)) * 20
        last = [asyncio.create_task(ask(engine, request)) for request in requests]
        await asyncio.sleep(0)
        if end == "error":
            fault.error = KeyError("planted")
            await asyncio.wait(last, timeout=LIMIT_S)
    async with asyncio.timeout(LIMIT_S):
        answers = await asyncio.gather(*last, return_exceptions=True)
    assert all(
        isinstance(answer, EngineError) or answer == expected[request]
        for request, answer in zip(requests, answers, strict=True)
    )
    assert any(isinstance(answer, EngineError) for answer in answers)
    with pytest.raises(EngineError, match="closed" if end == "close" else "unexpected error"):
        await ask(engine, requests[0])
