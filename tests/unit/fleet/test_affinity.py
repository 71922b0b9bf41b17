"""Requests of one affinity on real HTTP servers: one server each, and no answer depends on it."""

import asyncio
from dataclasses import replace

from fleet.stub import Stub, serve

from rookery.fleet import Fleet, FleetConfig, open_fleet
from rookery.types import ScoreRequest


def contexts(fleet: Fleet, chain: int, num: int = 16) -> list[ScoreRequest]:
    """As a chain asks: each context by itself, all of one length."""
    return [
        ScoreRequest(model=fleet.base, tokens=(chain, i), start=2, labels=(5, 6), affinity=chain)
        for i in range(num)
    ]


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
