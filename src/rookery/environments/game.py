"""A Python function as a game: it talks to the model and returns the reward.

    {type: python, function: 'game.py:play'}

    async def play(task: Task, chat: Chat) -> float: ...

The function returns the reward, or a mapping of `reward` and further metrics. A game that raises,
takes too long or returns anything else has failed, which costs only its rollout.
"""

import asyncio
import hashlib
import inspect
import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from statistics import fmean
from typing import Any, Literal

from pydantic import Field

from rookery.config import Config
from rookery.environments.chat import Chat, DrawReply, Seat, draw_reply
from rookery.errors import (
    EngineDownError,
    EngineError,
    FleetDownError,
    FleetError,
    RookeryError,
    TaskError,
    boundary,
)
from rookery.ports import Engine, Sampler
from rookery.rollout import RolloutLog
from rookery.runtime.concurrency import task_group, together
from rookery.seeding import stream_seed
from rookery.tasks.python_function import (
    LARGEST,
    FunctionName,
    exits_as_errors,
    find_function,
    finite_number,
    shown,
)
from rookery.tasks.taskset import Taskset
from rookery.tasks.template import Template
from rookery.types import (
    Completion,
    Draw,
    Evaluation,
    Group,
    ModelRef,
    Rollout,
    SampleRequest,
    SamplingParams,
    Task,
)

__all__ = ["Game", "GameConfig", "GameEvaluator", "GameSampler", "Rounds"]

_METRIC = re.compile(r"[^/]+(/[^/]+)*")
"""Names allowed after `game/` in the metrics of a run."""


class GameConfig(Config):
    """An async function of a task and a chat."""

    type: Literal["python"] = "python"
    function: FunctionName
    """`path/to/file.py:function`, or `package.module:function` if it is installed."""
    max_turns: int = Field(default=16, ge=1)
    """Replies per game."""
    max_tokens: int = Field(default=2048, ge=1)
    """Tokens drawn per game; `drawing.max_tokens` limits a single reply."""
    limit_s: float = Field(default=600.0, gt=0.0)
    """Seconds per game, without the time it waits for replies."""


class Game:
    """Plays with any replying model. Games may run concurrently."""

    def __init__(self, config: GameConfig, *, template: Template) -> None:
        self.config = config
        self._function = find_function(config.function, what="game")
        if not inspect.iscoroutinefunction(self._function):
            raise TaskError(
                f"The game {config.function} is no async function: write async def, and await "
                "chat(...) in it."
            )
        self._template = template

    async def play(
        self, task: Task, model: ModelRef, *, draw: DrawReply, params: SamplingParams, seed: int
    ) -> Rollout:
        """Play one game until it ends or fails. `draw` draws the replies."""
        seat = Seat(
            draw=draw,
            template=self._template,
            model=model,
            params=params,
            max_turns=self.config.max_turns,
            max_tokens=self.config.max_tokens,
        )
        chat = Chat(seat, seed=seed, affinity=task.id)
        outcome: dict[str, float] = {}
        error = ""
        try:
            outcome = await self._finish(task, chat)
        except (EngineDownError, FleetDownError):
            raise  # no engine answers: the run ends, and resumes once one does
        except RookeryError as failure:
            error = str(failure)
        finally:
            chat.close()
        if chat.down is not None:
            raise chat.down
        return Rollout(
            task=task,
            completion=_joined(chat) if chat.completions else None,
            reward=outcome.pop("reward", None),
            error=error,
            sequences=chat.conversation.sequences,
            metrics=outcome,
        )

    async def _finish(self, task: Task, chat: Chat) -> dict[str, float]:
        name = f"Task {task.id}: the game {self.config.function}"
        try:
            async with asyncio.timeout(self.config.limit_s) as chat.clock:
                with boundary(TaskError, f"{name} failed"), exits_as_errors(name):
                    returned = await self._function(task, chat)
        except TimeoutError:
            raise TaskError(
                f"{name} took longer than {self.config.limit_s:g} s: end it sooner, or raise "
                "environment.limit_s."
            ) from None
        if not chat.completions:
            raise TaskError(f"{name} ended without a reply of the model: it must await chat(...).")
        return _read(returned, name)


def _read(returned: Any, name: str) -> dict[str, float]:
    """Return the reward and other metrics, all finite numbers."""
    values = dict(returned) if isinstance(returned, Mapping) else {"reward": returned}
    if "reward" not in values:
        raise TaskError(f"{name} returned {list(values)}, and no reward among them: add `reward`.")
    return {_metric(key, name): _number(key, value, name) for key, value in values.items()}


def _metric(key: object, name: str) -> str:
    if not _METRIC.fullmatch(str(key)):
        raise TaskError(
            f"{name} returned a number named {key!r:.80}; names are texts such as `moves` or "
            "`moves/legal`."
        )
    return str(key)


def _number(key: object, value: object, name: str) -> float:
    number = finite_number(value)
    if number is None:
        raise TaskError(
            f"{name} returned {shown(value)} as {key}; return a finite number up to "
            f"{LARGEST:g}, or a mapping of names to such numbers with `reward`."
        )
    return number


def _joined(chat: Chat) -> Completion:
    """Join all drawn tokens, with the whole exchange as text."""
    replies: Sequence[Completion] = chat.completions
    return Completion(
        model=replies[-1].model,
        tokens=tuple(token for reply in replies for token in reply.tokens),
        logprobs=tuple(logprob for reply in replies for logprob in reply.logprobs),
        text=chat.conversation.text,
        finish_reason=replies[-1].finish_reason,
    )


# Groups of games to train on: each task is played several times.
#
#   sampler = GameSampler(game, engine=engine, params=SamplingParams(n=8))
#   groups = await sampler.draw(policy, [Draw(task=task, seed=7)])


# Games that wait for one another, so that their replies are drawn together.
#
#     rounds = Rounds(engine, num_games=2)
#     async with task_group() as tasks:
#         tasks.create_task(rounds.run())
#         ...     # each game: completion = await rounds.draw(place, request)
#         ...     # and at its end: rounds.leave()
#
# | stage | consumes               | produces         | waits for                   |
# |-------|------------------------|------------------|-----------------------------|
# | game  | a reply                | its next request | the round                   |
# | round | a request of each game | all replies      | every game to ask or to end |
#
# In an engine of this process, the last bits of a result depend on which requests are batched. In
# rounds, batches do not depend on the thinking time of games, and a repeated game has the same
# log-probabilities.


class Rounds:
    """Draws the replies of a fixed number of games, one reply per game at a time."""

    def __init__(self, sampler: Sampler, *, num_games: int) -> None:
        self._sampler = sampler
        self._num_playing = num_games
        # Filled by the games, drained by `run`; a cancelled game removes its own request.
        self._waiting: dict[int, tuple[SampleRequest, asyncio.Future[Completion]]] = {}
        # Set by the games, cleared by `run`.
        self._is_complete = asyncio.Event()

    async def draw(self, place: int, request: SampleRequest) -> Completion:
        """Return the reply to the game with this place."""
        reply: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting[place] = (request, reply)
        self._look()
        try:
            return await reply
        finally:
            if self._waiting.get(place, (None, None))[1] is reply:
                del self._waiting[place]

    def leave(self) -> None:
        """Remove a game that has ended, so that rounds no longer wait for it."""
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


class GameSampler:
    """A GroupDrawer of games. `params.n` games form a group, each with its own random numbers.

    An engine in this process gets the games' requests in rounds, so that a repeated game is
    identical to the last bit. Servers do not guarantee that, so there no game waits for another.
    """

    def __init__(self, game: Game, *, engine: Engine, params: SamplingParams) -> None:
        self._game = game
        self._engine = engine
        self._params = params

    async def draw(self, model: ModelRef, draws: Sequence[Draw]) -> list[Group]:
        """Return a group per draw, in order. A failed game is in its group, with the reason."""
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


# Evaluation of models by games; each game is played once per model and kept in the run.
#
#     evaluator = GameEvaluator(game, sampler=engine, tasksets=tasksets, log=RolloutLog(run))
#     evaluations = await evaluator.evaluate(models, tasks)
#
# The taskset's `sampling` applies to replies: greedy unless it has a temperature. All models get
# the same tasks and the same random numbers.


MAX_GAMES = 1024
"""Concurrent games: their replies fill any engine's batch."""


class GameEvaluator:
    """An Evaluator over one game. Games in the log, including failed ones, are not played again."""

    def __init__(
        self, game: Game, *, sampler: Sampler, tasksets: Sequence[Taskset], log: RolloutLog
    ) -> None:
        self._game = game
        self._reply = partial(draw_reply, sampler)
        self._params: Mapping[str, SamplingParams] = {t.name: t.sampling for t in tasksets}
        self._log = log
        # Filled and drained by the games; one that ends lets the next begin.
        self._places = asyncio.Semaphore(MAX_GAMES)

    async def evaluate(self, models: Sequence[ModelRef], tasks: Sequence[Task]) -> list[Evaluation]:
        """Return one evaluation per model, in order; a task's reward is its games' mean."""
        start = time.monotonic()
        # Models of equal weights play once.
        each = {model.version: model for model in models}
        played = await together(self._model(model, tasks) for model in each.values())
        by_version = dict(zip(each, played, strict=True))
        seconds = time.monotonic() - start
        return [_sum_up(model, by_version[model.version], seconds) for model in models]

    async def _model(self, model: ModelRef, tasks: Sequence[Task]) -> dict[str, list[Rollout]]:
        """Return the games of each task by its id."""
        played = await together(self._task(model, task) for task in tasks)
        return {task.id: rollouts for task, rollouts in zip(tasks, played, strict=True)}

    async def _task(self, model: ModelRef, task: Task) -> list[Rollout]:
        num = self._params[task.source].n
        return await together(self._rollout(model, task, index) for index in range(num))

    async def _rollout(self, model: ModelRef, task: Task, index: int) -> Rollout:
        params = self._params[task.source]
        key = self._key(model, task, index)
        async with self._places:
            known = await asyncio.to_thread(self._log.find, {key: (model, task)})
            if known:
                return known[key]
            seed = stream_seed(params.seed, "game", task.id, index)
            rollout = await self._game.play(task, model, draw=self._reply, params=params, seed=seed)
            num_tokens = len(rollout.completion.tokens) if rollout.completion is not None else 0
            await self._log.add([(key, model, rollout, num_tokens)])
            return rollout

    def _key(self, model: ModelRef, task: Task, index: int) -> str:
        """Name the game with these weights. The name covers the task's text: a row that was
        corrected under its id is another game."""
        settings = [self._game.config.model_dump(mode="json"), asdict(self._params[task.source])]
        task_text = repr((task.prompt, task.reference, task.choices))
        digest = hashlib.blake2b(digest_size=12)
        digest.update(json.dumps(settings).encode())
        digest.update(task_text.encode(errors="backslashreplace"))
        return f"{model.version}|{task.id}|{digest.hexdigest()}|{index}"


def _sum_up(
    model: ModelRef, rollouts: Mapping[str, Sequence[Rollout]], seconds: float
) -> Evaluation:
    failed = {id: [r.error for r in games if r.error] for id, games in rollouts.items()}
    return Evaluation(
        model=model,
        rewards={
            id: fmean(r.reward for r in games if r.reward is not None)
            for id, games in rollouts.items()
            if not failed[id]
        },
        errors={id: errors[0] for id, errors in failed.items() if errors},
        num_tokens=sum(
            len(r.completion.tokens)
            for games in rollouts.values()
            for r in games
            if r.completion is not None
        ),
        seconds=seconds,
    )
