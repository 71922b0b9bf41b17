"""An external OpenAI-compatible API as a `TextModel`: messages in, text and token usage out.

    config = ExternalConfig(url="https://api.example.com/v1", model="big", requests_per_minute=60)
    async with open_text_model(config) as model:
        reply = await model.reply(TextRequest(messages=(Message(role="user", content="Hello"),)))

An API that nobody can be served by (unreachable, busy for long, no credit, failing or silent
whatever it is asked) is a FleetDownError: a loop waits, or ends to be resumed. One that refuses the
key, the model or all it is asked is a FleetSettingsError: a loop ends. Any other FleetError is of
one request.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from rookery.errors import ConfigError, FleetDownError, FleetError, FleetSettingsError
from rookery.fleet.http.api import CHECK_S, Api, ExternalConfig, open_api, read_usage
from rookery.fleet.http.client import ServerLost
from rookery.types import Message, TextReply, TextRequest, TokenUsage

__all__ = ["ExternalTextModel", "open_text_model"]

CHARACTERS_PER_TOKEN = 3
"""How prompts are counted for tokens_per_minute, as there is no tokenizer: English has four."""
SHORTEST = TextRequest(messages=(Message(role="user", content="Hello"),), max_tokens=1)
"""Answered by every API that serves anybody."""


class ExternalTextModel:
    """A TextModel over one API; `open_text_model` makes one."""

    def __init__(self, api: Api) -> None:
        self.config = api.config
        self._api = api

    @property
    def usage(self) -> TokenUsage:
        """All that was paid so far, as far as the API reports it."""
        return TokenUsage(
            prompt_tokens=self._api.num_prompt_tokens,
            completion_tokens=self._api.num_completion_tokens,
        )

    async def check(self) -> None:
        """Raise a FleetSettingsError if the API refuses the key or has no such model. A model that
        it lists is not called; an API that does not answer is left for later."""
        names = await self._api.list_models()
        if not names or self.config.model in names:
            return
        try:  # some list a part of what they serve
            async with asyncio.timeout(CHECK_S):
                await self._ask(SHORTEST)
        except FleetSettingsError:
            raise
        except (FleetError, TimeoutError):
            return

    async def reply(self, request: TextRequest) -> TextReply:
        """A server that failed is asked something short: a gateway whose model is gone answers
        neither, while a prompt that is too much for a model fails alone."""
        try:
            return await self._ask(request)
        except ServerLost as loss:
            if await self._serves_others():
                raise
            said = str(loss).rstrip(".")
            raise FleetDownError(f"{said}. A short request fails too.") from loss

    async def _serves_others(self) -> bool:
        try:
            await self._ask(SHORTEST)
        except FleetSettingsError:
            raise
        except (ServerLost, FleetDownError):
            return False
        except FleetError:
            return True  # a refusal is an answer
        return True

    async def _ask(self, request: TextRequest) -> TextReply:
        written = sum(len(message.content) for message in request.messages)
        cost = written // CHARACTERS_PER_TOKEN + request.max_tokens
        async with self._api.call():
            path = f"{self._api.root}/chat/completions"
            answer = await self._api.ask(path, self._body(request), cost=cost)
        choices = answer.get("choices")
        choice = choices[0] if isinstance(choices, list) and len(choices) == 1 else None
        message = choice.get("message") if isinstance(choice, dict) else None
        if not isinstance(choice, dict) or not isinstance(message, dict):
            raise FleetError(f"{self.config.model} answered {choices!r:.80}, not one message.")
        text, reason = message.get("content"), choice.get("finish_reason")
        if reason not in ("stop", "length") or not isinstance(text, str):
            why = message.get("refusal") or f"it ended as {reason!r}"
            raise FleetError(f"{self.config.model} gave no complete reply: {_clean(str(why))}.")
        return TextReply(
            text=_clean(text),
            finish_reason=reason,
            model=self.config.model,
            usage=read_usage(answer),
        )

    def _body(self, request: TextRequest) -> dict[str, Any]:
        """What is None is left out: the API's own default decides."""
        config = self.config
        optional: dict[str, Any] = {
            "seed": request.seed if config.takes_seed else None,
            "reasoning_effort": config.reasoning_effort,
        }
        if config.token_limit == "max_tokens":
            optional |= {"temperature": request.temperature, "top_p": request.top_p}
        return {
            "model": config.model,
            "messages": [{"role": m.role, "content": m.content} for m in request.messages],
            config.token_limit: request.max_tokens,
            **{name: value for name, value in optional.items() if value is not None},
        }


def _clean(text: str) -> str:
    """Text that can be written as UTF-8: JSON lets half of a surrogate pair through."""
    return text.encode(errors="replace").decode()


@asynccontextmanager
async def open_text_model(
    config: ExternalConfig, *, api_key: str | None = None, key_hint: str = ""
) -> AsyncIterator[ExternalTextModel]:
    """Connect to the API as `open_api` does. `url` is all that comes before /chat/completions."""
    if config.route != "chat" or config.logprobs:
        raise ConfigError(
            f"A model of texts needs route: chat and logprobs: false; given are {config.route} and "
            f"{str(config.logprobs).lower()}."
        )
    async with open_api(config, api_key=api_key, key_hint=key_hint) as api:
        yield ExternalTextModel(api)
