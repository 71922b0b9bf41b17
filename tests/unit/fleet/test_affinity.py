"""Requests of one affinity on real HTTP servers: one server each, and no answer depends on it."""

import asyncio
from dataclasses import replace

from fleet.stub import Stub, serve

from rookery.fleet import Fleet, FleetConfig, open_fleet
from rookery.types import Score, ScoreRequest

NUM_STEPS = 6


def contexts(fleet: Fleet, chain: int, num: int = 16) -> list[ScoreRequest]:
    """As a chain asks: each context by itself, all of one length."""
    return [
        ScoreRequest(model=fleet.base, tokens=(chain, i), start=2, labels=(5, 6), affinity=chain)
        for i in range(num)
    ]


async def ask_in_steps(fleet: Fleet, num_chains: int) -> list[list[Score]]:
    """All chains at a time, step by step."""
    found: list[list[Score]] = []
    for _ in range(NUM_STEPS):
        steps = (fleet.score(contexts(fleet, chain)) for chain in range(num_chains))
        found += await asyncio.gather(*steps)
    return found


def chains_of(stub: Stub, since: int) -> set[int]:
    return {prompt[0] for body in stub.bodies[since:] for prompt in body["prompt"]}


async def test_each_chain_has_a_server_of_its_own() -> None:
    stubs = [Stub() for _ in range(4)]
    async with serve(*stubs), open_fleet(FleetConfig(urls=tuple(s.url for s in stubs))) as fleet:
        since = [len(stub.bodies) for stub in stubs]
        await ask_in_steps(fleet, 4)
        asked = [chains_of(s, first) for s, first in zip(stubs, since, strict=True)]
        calls = [len(s.bodies) - first for s, first in zip(stubs, since, strict=True)]
    assert sorted(map(sorted, asked)) == [[0], [1], [2], [3]]
    # The first step is asked before it is known how many chains there are.
    assert all(num <= NUM_STEPS + 3 for num in calls), "a step of a chain is one call"


async def test_fewer_chains_than_servers_use_all_servers() -> None:
    stubs = [Stub(latency_s=0.01) for _ in range(8)]
    async with serve(*stubs), open_fleet(FleetConfig(urls=tuple(s.url for s in stubs))) as fleet:
        since = [len(stub.bodies) for stub in stubs]
        await ask_in_steps(fleet, 3)
        assert all(len(s.bodies) > first for s, first in zip(stubs, since, strict=True))


async def test_answers_do_not_depend_on_affinity_nor_on_losses() -> None:
    stubs = [Stub() for _ in range(3)]
    async with serve(*stubs), open_fleet(FleetConfig(urls=tuple(s.url for s in stubs))) as fleet:
        plain = [replace(r, affinity=None) for c in range(3) for r in contexts(fleet, c)]
        expected = await fleet.score(plain)
        assert [s for c in range(3) for s in await fleet.score(contexts(fleet, c))] == expected
        await stubs[0].stop()
        found = await asyncio.gather(*(fleet.score(contexts(fleet, c)) for c in range(3)))
        assert [score for scores in found for score in scores] == expected
        await stubs[0].start()
