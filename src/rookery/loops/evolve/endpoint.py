"""One model of the ensemble as the loop asks it: waits while it is down, retries what failed.

    endpoint = Endpoint(model, ModelConfig(name="small"), down_s=3600, on_waiting=print)
    reply = await endpoint.reply(request)

| what the model raises              | then                                                     |
|------------------------------------|----------------------------------------------------------|
| it refuses everybody               | the error ends the run: waiting does not help            |
| (FleetSettingsError)               |                                                          |
| it serves nobody (`...DownError`)  | one caller tries again, all others wait for it; no limit |
|                                    | but `down_s`, after which the error ends the run         |
| any other error of the request     | asked again, `retries` times; then ModelFailed           |
"""

import asyncio
import time
from collections.abc import Callable
from typing import NoReturn

from rookery.errors import (
    EngineDownError,
    EngineError,
    FleetDownError,
    FleetError,
    FleetSettingsError,
)
from rookery.loops.evolve.config import ModelConfig
from rookery.ports import TextModel
from rookery.types import Message, TextReply, TextRequest

__all__ = ["Endpoint", "ModelFailed"]

FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 60.0
"""Between two tries of a model that is down; doubles from the first to the longest."""
DEFAULT_MAX_TOKENS = 4096


class ModelFailed(Exception):
    """A request that the model did not answer, however often it was asked."""


class Endpoint:
    """Used by many callers at a time."""

    def __init__(
        self,
        model: TextModel,
        config: ModelConfig,
        *,
        down_s: float,
        on_waiting: Callable[[str], None],
    ) -> None:
        self._model = model
        self._config = config
        self._down_s = down_s
        self._on_waiting = on_waiting
        # Cleared by the caller that finds the model down, set again when that caller got a reply
        # or ended; all others wait for it.
        self._is_up = asyncio.Event()
        self._is_up.set()

    @property
    def is_down(self) -> bool:
        return not self._is_up.is_set()

    def request(self, *, system: str, user: str, seed: int) -> TextRequest:
        """A request with what the config says of this model."""
        messages = (Message(role="system", content=system), Message(role="user", content=user))
        return TextRequest(
            messages=messages,
            max_tokens=self._config.max_tokens or DEFAULT_MAX_TOKENS,
            temperature=self._config.temperature,
            top_p=self._config.top_p,
            seed=seed,
        )

    async def reply(self, request: TextRequest) -> TextReply:
        """One reply. Raises ModelFailed, or what the model raised when it was down too long."""
        num_tries = 0
        while True:
            await self._is_up.wait()
            try:
                return await self._model.reply(request)
            except FleetSettingsError:
                raise
            except (EngineDownError, FleetDownError) as error:
                if self._is_up.is_set():
                    reply = await self._wait_until_up(request, error)
                    if reply is not None:
                        return reply
            except (EngineError, FleetError) as error:
                num_tries += 1
                if num_tries > (self._config.retries or 0):
                    raise ModelFailed(str(error)) from error
                await asyncio.sleep(self._config.retry_delay or 0)

    async def _wait_until_up(
        self, request: TextRequest, error: EngineError | FleetError
    ) -> TextReply | None:
        """Ask again until the model serves. None: it does, but not this request."""
        self._is_up.clear()
        name = self._config.name or "The model"
        started, wait_s = time.monotonic(), FIRST_WAIT_S
        try:
            while True:
                if time.monotonic() - started > self._down_s:
                    _give_up(error, self._down_s)
                self._on_waiting(f"{name} is down, asked again in {wait_s:g} s: {error}")
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)
                try:
                    return await self._model.reply(request)
                except FleetSettingsError:
                    raise
                except (EngineDownError, FleetDownError) as again:
                    error = again
                except (EngineError, FleetError):
                    return None
        finally:
            self._is_up.set()


def _give_up(error: EngineError | FleetError, down_s: float) -> NoReturn:
    raise type(error)(
        f"The model was down for {down_s:g} s (rookery.model_down_s), the run can be resumed: "
        f"{error}"
    ) from error
