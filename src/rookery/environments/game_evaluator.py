"""Models measured by games, each game played once per model and kept in the run.

    evaluator = GameEvaluator(game, sampler=engine, tasksets=tasksets, log=RolloutLog(run))
    evaluations = await evaluator.evaluate(models, tasks)

Replies are drawn as the taskset's `sampling` says: greedy unless it has a temperature. All models
get the same tasks and the same random numbers.
"""

import asyncio
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from statistics import fmean

from rookery.concurrency import run_in_thread, together
from rookery.environments.chat import draw_reply
from rookery.environments.game import Game
from rookery.ports import Sampler
from rookery.rollout import RolloutLog
from rookery.seeding import stream_seed
from rookery.tasks.taskset import Taskset
from rookery.types import Evaluation, ModelRef, Rollout, SamplingParams, Task

__all__ = ["GameEvaluator"]

MAX_GAMES = 1024
"""Games at a time: their replies fill any engine's batch."""


class GameEvaluator:
    """An Evaluator over one game. Games that the log holds, failed ones included, are not played
    again."""

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
        """One evaluation per model, in their order; a task's reward is the mean of its games."""
        start = time.monotonic()
        # Models of equal weights play once.
        each = {model.version: model for model in models}
        played = await together(self._model(model, tasks) for model in each.values())
        by_version = dict(zip(each, played, strict=True))
        seconds = time.monotonic() - start
        return [_sum_up(model, by_version[model.version], seconds) for model in models]

    async def _model(self, model: ModelRef, tasks: Sequence[Task]) -> dict[str, list[Rollout]]:
        """The games of each task, by its id."""
        played = await together(self._task(model, task) for task in tasks)
        return {task.id: own for task, own in zip(tasks, played, strict=True)}

    async def _task(self, model: ModelRef, task: Task) -> list[Rollout]:
        num = self._params[task.source].n
        return await together(self._rollout(model, task, index) for index in range(num))

    async def _rollout(self, model: ModelRef, task: Task, index: int) -> Rollout:
        params = self._params[task.source]
        key = self._key(model, task, index)
        async with self._places:
            known = await asyncio.to_thread(self._log.find, key, task, model)
            if known is not None:
                return known
            seed = stream_seed(params.seed, "game", task.id, index)
            rollout = await self._game.play(task, model, draw=self._reply, params=params, seed=seed)
            num_tokens = len(rollout.completion.tokens) if rollout.completion is not None else 0
            await run_in_thread(self._log.add, [(key, model, rollout, num_tokens)])
            return rollout

    def _key(self, model: ModelRef, task: Task, index: int) -> str:
        """Names the game with these weights. It holds what the task says: a row that was corrected
        under its id is another game."""
        how = [self._game.config.model_dump(mode="json"), asdict(self._params[task.source])]
        said = repr((task.prompt, task.reference, task.choices))
        digest = hashlib.blake2b(digest_size=12)
        digest.update(json.dumps(how).encode())
        digest.update(said.encode(errors="backslashreplace"))
        return f"{model.version}|{task.id}|{digest.hexdigest()}|{index}"


def _sum_up(
    model: ModelRef, rollouts: Mapping[str, Sequence[Rollout]], seconds: float
) -> Evaluation:
    failed = {id: [r.error for r in own if r.error] for id, own in rollouts.items()}
    return Evaluation(
        model=model,
        rewards={
            id: fmean(r.reward for r in own if r.reward is not None)
            for id, own in rollouts.items()
            if not failed[id]
        },
        errors={id: errors[0] for id, errors in failed.items() if errors},
        num_tokens=sum(
            len(r.completion.tokens)
            for own in rollouts.values()
            for r in own
            if r.completion is not None
        ),
        seconds=seconds,
    )
