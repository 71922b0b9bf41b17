"""Groups of games to train on: each task is played several times.

sampler = GameSampler(game, params=SamplingParams(n=8))
groups = await sampler.draw(policy, [Draw(task=task, seed=7)])
"""

import asyncio
from collections.abc import Sequence

from rookery.concurrency import together
from rookery.environments.game import Game
from rookery.seeding import stream_seed
from rookery.types import Draw, Group, ModelRef, Rollout, SamplingParams

__all__ = ["MAX_GAMES", "GameSampler"]

MAX_GAMES = 1024
"""Games at a time: their replies fill any engine's batch, and their chats no memory to speak of."""


class GameSampler:
    """A GroupDrawer of games. `params.n` games make a group, each with its own random numbers."""

    def __init__(self, game: Game, *, params: SamplingParams) -> None:
        self._game = game
        self._params = params
        # Filled and drained by the games; one that ends lets the next begin.
        self._places = asyncio.Semaphore(MAX_GAMES)

    async def draw(self, model: ModelRef, draws: Sequence[Draw]) -> list[Group]:
        """A group for each draw, in their order. What fails is in its group, with the reason."""
        num = self._params.n
        rollouts = await together(
            self._play(model, draw, index) for draw in draws for index in range(num)
        )
        return [
            Group(task=draw.task, model=model, rollouts=tuple(rollouts[i * num : (i + 1) * num]))
            for i, draw in enumerate(draws)
        ]

    async def _play(self, model: ModelRef, draw: Draw, index: int) -> Rollout:
        seed = stream_seed(draw.seed, "game", index)
        async with self._places:
            return await self._game.play(draw.task, model, params=self._params, seed=seed)
