"""Groups of games to train on: each task is played several times.

sampler = GameSampler(game, engine=engine, params=SamplingParams(n=8))
groups = await sampler.draw(policy, [Draw(task=task, seed=7)])
"""

from collections.abc import Sequence
from functools import partial

from rookery.concurrency import task_group, together
from rookery.environments.chat import DrawReply, draw_reply
from rookery.environments.game import Game
from rookery.environments.rounds import Rounds
from rookery.ports import Engine
from rookery.seeding import stream_seed
from rookery.types import Draw, Group, ModelRef, Rollout, SamplingParams

__all__ = ["GameSampler"]


class GameSampler:
    """A GroupDrawer of games. `params.n` games make a group, each with its own random numbers.

    An engine in this process gets the games' requests in rounds, so that a game that is played
    again is the same to the last bit. Servers do not promise that: there no game waits for another.
    """

    def __init__(self, game: Game, *, engine: Engine, params: SamplingParams) -> None:
        self._game = game
        self._engine = engine
        self._params = params

    async def draw(self, model: ModelRef, draws: Sequence[Draw]) -> list[Group]:
        """A group for each draw, in their order. What fails is in its group, with the reason."""
        num = self._params.n
        games = [(draw, index) for draw in draws for index in range(num)]
        rollouts = await (
            together(self._play(model, *game, partial(draw_reply, self._engine)) for game in games)
            if self._engine.is_remote
            else self._play_in_rounds(model, games)
        )
        return [
            Group(task=draw.task, model=model, rollouts=tuple(rollouts[i * num : (i + 1) * num]))
            for i, draw in enumerate(draws)
        ]

    async def _play_in_rounds(
        self, model: ModelRef, games: Sequence[tuple[Draw, int]]
    ) -> list[Rollout]:
        rounds = Rounds(self._engine, num_games=len(games))

        async def play(place: int) -> Rollout:
            try:
                return await self._play(model, *games[place], partial(rounds.draw, place))
            finally:
                rounds.leave()

        async with task_group() as tasks:
            tasks.create_task(rounds.run())
            played = [tasks.create_task(play(place)) for place in range(len(games))]
        return [game.result() for game in played]

    async def _play(self, model: ModelRef, draw: Draw, index: int, reply: DrawReply) -> Rollout:
        seed = stream_seed(draw.seed, "game", index)
        return await self._game.play(draw.task, model, draw=reply, params=self._params, seed=seed)
