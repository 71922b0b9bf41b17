"""Texts as token ids, by a server's own tokenizer.

[tokens] = await tokenize(client, ["Once upon a time"])
"""

import asyncio
from collections.abc import Sequence

from rookery.concurrency import together
from rookery.errors import FleetError
from rookery.fleet.http.client import Client
from rookery.types import TokenIds

__all__ = ["tokenize"]

NUM_CALLS = 32
"""Texts on their way at the same time: `/tokenize` takes one a call, and most of it is waiting."""


async def tokenize(client: Client, prompts: Sequence[str | Sequence[int]]) -> list[TokenIds]:
    """Each prompt's tokens, in order; those that are token ids already stay as they are."""
    places = asyncio.Semaphore(NUM_CALLS)  # filled by every text, drained by its answer

    async def ask(text: str) -> TokenIds:
        async with places:
            answer = await client.post_json("/tokenize", {"prompt": text})
        tokens = answer.get("tokens") if isinstance(answer, dict) else None
        if not isinstance(tokens, list):
            raise FleetError(f"{client.url}/tokenize answered no tokens: give token ids instead.")
        return tuple(tokens)

    texts = list(dict.fromkeys(prompt for prompt in prompts if isinstance(prompt, str)))
    known = dict(zip(texts, await together(map(ask, texts)), strict=True))
    return [known[p] if isinstance(p, str) else tuple(p) for p in prompts]
