"""Games that wait for one another, so that their replies are drawn together.

    rounds = Rounds(engine, num_games=2)
    async with task_group() as tasks:
        tasks.create_task(rounds.run())
        ...     # each game: completion = await rounds.draw(place, request)
        ...     # and at its end: rounds.leave()

| stage | consumes               | produces         | waits for                   |
|-------|------------------------|------------------|-----------------------------|
| game  | a reply                | its next request | the round                   |
| round | a request of each game | all replies      | every game to ask or to end |

An engine in this process computes the same numbers for the same requests together, and in the last
bits others for each by itself. With rounds, what is computed together does not depend on how long
each game thinks, and a game that is played again has the same log-probabilities.
"""

import asyncio
from collections.abc import Sequence

from rookery.errors import EngineDownError, EngineError, FleetDownError, FleetError, RookeryError
from rookery.ports import Sampler
from rookery.types import Completion, SampleRequest

__all__ = ["Rounds"]


class Rounds:
    """Draws the replies of a fixed number of games, a reply of each at a time."""

    def __init__(self, sampler: Sampler, *, num_games: int) -> None:
        self._sampler = sampler
        self._num_playing = num_games
        # Filled by the games, emptied by `run`; a game that is cancelled takes its own out.
        self._waiting: dict[int, tuple[SampleRequest, asyncio.Future[Completion]]] = {}
        # Set by the games; `run` clears it.
        self._is_complete = asyncio.Event()

    async def draw(self, place: int, request: SampleRequest) -> Completion:
        """The reply to a game, by its place among them."""
        reply: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting[place] = (request, reply)
        self._look()
        try:
            return await reply
        finally:
            if self._waiting.get(place, (None, None))[1] is reply:
                del self._waiting[place]

    def leave(self) -> None:
        """A game has ended: nobody waits for it any more."""
        self._num_playing -= 1
        self._look()

    async def run(self) -> None:
        """Play rounds until all games have ended."""
        while self._num_playing:
            await self._is_complete.wait()
            self._is_complete.clear()
            if self._waiting and len(self._waiting) == self._num_playing:
                waiting, self._waiting = self._waiting, {}
                ordered = [waiting[place] for place in sorted(waiting)]
                await self._round([request for request, _ in ordered], [r for _, r in ordered])

    def _look(self) -> None:
        if len(self._waiting) == self._num_playing:
            self._is_complete.set()

    async def _round(
        self, requests: Sequence[SampleRequest], replies: Sequence[asyncio.Future[Completion]]
    ) -> None:
        try:
            drawn = await self._sampler.sample(requests)
        except (EngineDownError, FleetDownError) as error:
            _fail(replies, error)
            return
        except (EngineError, FleetError) as error:
            if len(requests) == 1:
                _fail(replies, error)
                return
            for request, reply in zip(requests, replies, strict=True):
                await self._round([request], [reply])
            return
        for [completion], reply in zip(drawn, replies, strict=True):
            if not reply.done():  # its game may have ended meanwhile
                reply.set_result(completion)


def _fail(replies: Sequence[asyncio.Future[Completion]], error: RookeryError) -> None:
    for reply in replies:
        if not reply.done():
            reply.set_exception(error)
