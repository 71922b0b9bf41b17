"""A Python function as a game: it talks to the model and returns the reward.

    {type: python, function: 'game.py:play'}

    async def play(task: Task, chat: Chat) -> float: ...

A number is the reward; a mapping has `reward` and whatever else is to be measured. A game that
raises, takes too long or returns something else has failed: that costs its rollout, nothing more.
"""

import asyncio
import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from rookery.config import Config
from rookery.environments.chat import Chat, DrawReply, Seat
from rookery.errors import EngineDownError, FleetDownError, RookeryError, TaskError, boundary
from rookery.tasks.python_function import (
    LARGEST,
    FunctionName,
    exits_as_errors,
    find_function,
    finite_number,
    shown,
)
from rookery.tasks.template import Template
from rookery.types import Completion, ModelRef, Rollout, SamplingParams, Task

__all__ = ["Game", "GameConfig"]

_METRIC = re.compile(r"[^/]+(/[^/]+)*")
"""What may follow `game/` in the metrics of a run."""


class GameConfig(Config):
    """An async function of a task and a chat."""

    type: Literal["python"] = "python"
    function: FunctionName
    """`path/to/file.py:function`, or `package.module:function` of what is installed."""
    max_turns: int = Field(default=16, ge=1)
    """Replies of one game."""
    max_tokens: int = Field(default=2048, ge=1)
    """Tokens that are drawn in one game; `drawing.max_tokens` is the longest reply."""
    limit_s: float = Field(default=600.0, gt=0.0)
    """Seconds of one game, without those in which it waits for replies."""


class Game:
    """Plays with any model that replies. Games may run side by side."""

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
        """One game to its end, or to the reason why it has none. `draw` makes the replies."""
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
            raise  # nobody can answer anything: the run ends, and goes on when somebody can
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
    """The reward and what else was measured, all finite numbers."""
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
    """All that was drawn, and the whole exchange as its text."""
    replies: Sequence[Completion] = chat.completions
    return Completion(
        model=replies[-1].model,
        tokens=tuple(token for reply in replies for token in reply.tokens),
        logprobs=tuple(logprob for reply in replies for logprob in reply.logprobs),
        text=chat.conversation.text,
        finish_reason=replies[-1].finish_reason,
    )
