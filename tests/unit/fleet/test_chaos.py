"""Random closes, kills, cancels, loads, unloads and restarts: nothing waits, nothing is left.

A seed is a schedule. What fails under one is repeated with `-k "chaos and <seed>"`.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from random import Random

import pytest
from fleet.adapters import make_small
from fleet.stub import Stub, greedy, serve, until
from marks import long

from rookery.errors import RookeryError
from rookery.fleet import Fleet, FleetConfig, open_fleet
from rookery.fleet.http.client import ClientConfig
from rookery.types import Completion, ModelRef, SampleRequest, SamplingParams, ScoreRequest

NUM_FLEETS = 3
NUM_STEPS = 60
MAX_CALLERS = 24
ADAPTERS = [make_small(f"a{i}", i) for i in range(12)]
THEIRS = "theirs@1"
LIMITS = ClientConfig(connect_s=1.0, request_s=0.5, control_s=1.0)


class Chaos:
    """One fleet and what is done to it and to its servers."""

    def __init__(self, fleet: Fleet, stubs: list[Stub], random: Random) -> None:
        self.fleet = fleet
        self.callers: set[asyncio.Task[None]] = set()
        self.num_begun = 0
        self.outcomes: Counter[str] = Counter()
        self.defects: list[str] = []
        self._stubs = stubs
        self._random = random
        self._steps = {
            self._sample: 10, self._score: 3, self._load: 5, self._unload: 3, self._cancel: 3,
            self._kill: 1, self._crash: 1, self._fail: 1, self._hang: 1, self._restart: 5,
        }  # fmt: skip

    async def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            [step] = self._random.choices(list(self._steps), list(self._steps.values()))
            await step()
            while len(self.callers) > MAX_CALLERS:
                await asyncio.wait(self.callers, return_when=asyncio.FIRST_COMPLETED)

    async def _sample(self) -> None:
        ref = self._any_model()
        n = self._random.choice([1, 1, 1, 8])
        params = SamplingParams(max_tokens=1, temperature=float(n > 1), n=n)
        prompts = [(1, self._random.randrange(50)) for _ in range(self._random.randrange(1, 12))]
        wanted = [SampleRequest(model=ref, prompt=p, params=params) for p in prompts]

        async def sample() -> None:
            for request, found in zip(wanted, await self.fleet.sample(wanted), strict=True):
                _check(request, found, is_base=ref == self.fleet.base)

        self._call(sample)

    async def _score(self) -> None:
        request = ScoreRequest(model=self._any_model(), tokens=(1, 2, 3), start=3, labels=(4,))

        async def score() -> None:
            [found] = await self.fleet.score([request])
            assert len(found.label_logprobs) == 1

        self._call(score)

    async def _load(self) -> None:
        adapter = self._random.choice(ADAPTERS)

        async def load() -> None:
            await self.fleet.load(adapter)

        self._call(load)

    async def _unload(self) -> None:
        if self.fleet.loaded:
            self._call(partial(self.fleet.unload, self._random.choice(self.fleet.loaded)))

    async def _cancel(self) -> None:
        if self.callers:
            # In the order they were made: a set has none.
            callers = sorted(self.callers, key=lambda task: int(task.get_name()))
            self._random.choice(callers).cancel()

    async def _kill(self) -> None:
        stub = self._random.choice(self._stubs)
        if stub.is_up:
            await stub.stop()

    async def _crash(self) -> None:
        stub = self._random.choice(self._stubs)
        if stub.is_up:
            stub.crash()

    async def _fail(self) -> None:
        self._random.choice(self._stubs).failures.append(self._random.choice([400, 500, 502]))

    async def _hang(self) -> None:
        self._random.choice(self._stubs).hang = True

    async def _restart(self) -> None:
        await revive(self._random.choice(self._stubs))

    def _any_model(self) -> ModelRef:
        return self._random.choice([self.fleet.base, *self.fleet.loaded])

    def _call(self, work: Callable[[], Awaitable[None]]) -> None:
        task = asyncio.create_task(self._note(work), name=str(self.num_begun))
        self.num_begun += 1
        self.callers.add(task)
        task.add_done_callback(self._end)

    async def _note(self, work: Callable[[], Awaitable[None]]) -> None:
        """Every caller gets an answer, a sentence or its own cancellation; all else is a defect."""
        try:
            await work()
        except RookeryError as error:
            assert str(error)
            self.outcomes["told"] += 1
        else:
            self.outcomes["answered"] += 1

    def _end(self, task: asyncio.Task[None]) -> None:
        self.callers.discard(task)
        if task.cancelled():
            self.outcomes["cancelled"] += 1
        elif task.exception() is not None:
            self.defects.append(repr(task.exception()))


def _check(request: SampleRequest, found: tuple[Completion, ...], *, is_base: bool) -> None:
    assert len(found) == request.params.n
    assert all(completion.model == request.model for completion in found)
    if is_base and request.params.n == 1:
        assert list(found[0].tokens) == greedy("tiny", request.prompt, 1)


async def revive(stub: Stub) -> None:
    if stub.is_up and stub.has_crashed:
        await stub.stop()
    if not stub.is_up:
        await stub.start()
    stub.failures.clear()
    stub.hang, stub.adapters[THEIRS] = False, "/theirs"


async def live(config: FleetConfig, stubs: list[Stub], random: Random) -> Counter[str]:
    """One fleet from its opening to its end, with callers that still wait then."""
    with contextlib.suppress(RuntimeError):
        async with open_fleet(config) as fleet:
            chaos = Chaos(fleet, stubs, random)
            await chaos.run(NUM_STEPS)
            waiting = set(chaos.callers)
            if random.random() < 0.5:
                raise RuntimeError("the block ends by an error")
    if waiting:
        _, pending = await asyncio.wait(waiting, timeout=60.0)
        assert not pending, "callers of a closed fleet wait"
    assert chaos.num_begun == chaos.outcomes.total() and not chaos.defects, chaos.defects
    assert not any(r.load.in_flight for r in fleet.pool.replicas) and not fleet.pool.router.waiting
    return chaos.outcomes


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=long)])
async def test_nothing_waits_and_nothing_is_left(seed: int) -> None:
    random, outcomes = Random(seed), Counter[str]()
    stubs = [
        Stub(latency_s=0.002, load_s=0.005, max_loras=2, max_cpu_loras=4),
        Stub(max_loras=3),
        Stub(routes=("/v1/completions",)),
    ]
    before = asyncio.all_tasks()
    async with asyncio.timeout(120), serve(*stubs):
        urls = tuple(stub.url for stub in stubs)
        config = FleetConfig(urls=urls, all_down_timeout_s=0.3, max_in_flight=16, client=LIMITS)
        for _ in range(NUM_FLEETS):
            outcomes += await live(config, stubs, random)
            for stub in stubs:
                await revive(stub)
        # What a fleet could not take back from a server that was ill, the next one does.
        async with open_fleet(config):
            pass
        await until(lambda: not any(stub.num_connections for stub in stubs))
        assert all(set(stub.adapters) == {THEIRS} for stub in stubs[:2])
    await until(lambda: asyncio.all_tasks() == before)
    folders = {Path(path).parent for stub in stubs for path in stub.paths}
    assert folders and not [folder for folder in folders if folder.exists()]
    assert min(outcomes[kind] for kind in ("answered", "told", "cancelled")) > 10
