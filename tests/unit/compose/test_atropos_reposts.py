"""Posts to the gateway whose answer is lost, through HTTP."""

import asyncio
import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from environments.groups import make_document

from rookery.compose.grpo.atropos import GatewayConfig, serving_gateway
from rookery.runs.journal import Journal


def body_of(document: Any) -> bytes:
    """As atroposlib sends it; what is compressed at another time has other bytes."""
    return gzip.compress(json.dumps(document).encode())


async def post(session: aiohttp.ClientSession, document: Any) -> dict[str, Any]:
    headers = {"Content-Encoding": "gzip"}
    path = "/scored_data_list" if isinstance(document, list) else "/scored_data"
    async with session.post(path, data=body_of(document), headers=headers) as response:
        answer: dict[str, Any] = await response.json()
        return answer


async def queue_size(session: aiohttp.ClientSession) -> int:
    async with session.get("/status") as response:
        return int((await response.json())["queue_size"])


@pytest.mark.parametrize("document", [make_document(), [make_document(), make_document(3)]])
async def test_a_post_whose_sender_gave_up_counts_once(
    document: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_end = asyncio.Event(), asyncio.Event()
    append_many = Journal.append_many

    async def slow(self: Journal, data: Sequence[bytes]) -> list[int]:
        begun.set()
        await may_end.wait()
        return await append_many(self, data)

    monkeypatch.setattr(Journal, "append_many", slow)
    config = GatewayConfig(port=0, folder=tmp_path / "gateway", vocab_size=97)
    num = len(document) if isinstance(document, list) else 1
    async with serving_gateway(config) as url, aiohttp.ClientSession(url) as session:
        async with aiohttp.ClientSession(url) as impatient:
            first = asyncio.create_task(post(impatient, document))
            await begun.wait()
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
        second = asyncio.create_task(post(session, document))
        await queue_size(session)  # the gateway has read that the first has gone
        may_end.set()
        assert (await second)["status"] == "received"
        assert await queue_size(session) == num
        await post(session, document)
        assert await queue_size(session) == 2 * num, "an equal one of who was told"
