"""A harness of verifiers: one chat without tools, in this process."""

from __future__ import annotations

from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI
from verifiers.v1.runtimes import ProgramResult

__all__ = ["ChatHarness"]


class ChatConfig(vf.HarnessConfig):  # type: ignore[misc]
    """No settings."""


class ChatHarness(vf.Harness[ChatConfig]):  # type: ignore[misc]
    """Asks the model once with the task's prompt."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx: Any, *args: Any, **named: Any) -> Any:
        """verifiers passes (trace, runtime, endpoint, secret, mcp_urls, data, ...)."""
        names = ("trace", "runtime", "endpoint", "secret", "mcp_urls", "data")
        arguments = dict(zip(names, args, strict=False)) | named
        system, prompt = self.resolve_prompt(arguments["data"])
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": prompt})
        async with AsyncOpenAI(
            base_url=arguments["endpoint"], api_key=arguments["secret"], max_retries=0
        ) as client:
            answer = await client.chat.completions.create(model=ctx.model, messages=messages)
        text = answer.choices[0].message.content or ""
        return ProgramResult(exit_code=0, stdout=text, stderr="")
