"""Posts to the gateway whose answer is lost, through HTTP."""

import asyncio
import gzip
import json
from collections.abc import Awaitable, Callable, Sequence
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


# Answers with penalties.


Draw = Callable[[aiohttp.ClientSession, dict[str, float]], Awaitable[tuple[list[int], list[float]]]]
PROMPT = [5, 6]
HOW = {"max_tokens": 6, "seed": 3, "ignore_eos": True}


async def ask(session: aiohttp.ClientSession, path: str, body: Any) -> dict[str, Any]:
    async with session.post(path, json=body) as response:
        answer: dict[str, Any] = await response.json()
        return answer


async def generate(
    session: aiohttp.ClientSession, penalty: dict[str, float]
) -> tuple[list[int], list[float]]:
    body = {"prompt": {"prompt_token_ids": PROMPT}, "logprobs": 0, **HOW, **penalty}
    answer = await ask(session, "/generate", body)
    [entries] = answer["logprobs"]
    return answer["token_ids"][0], [next(iter(entry[0].values())) for entry in entries]


async def generate_tokens(
    session: aiohttp.ClientSession, penalty: dict[str, float]
) -> tuple[list[int], list[float]]:
    body = {"token_ids": PROMPT, "sampling_params": HOW | penalty}
    [choice] = (await ask(session, "/inference/v1/generate", body))["choices"]
    return choice["token_ids"], [entry["logprob"] for entry in choice["logprobs"]["content"]]


async def complete(
    session: aiohttp.ClientSession, penalty: dict[str, float]
) -> tuple[list[int], list[float]]:
    body = {"model": "any", "prompt": PROMPT, "logprobs": 0, **HOW, **penalty}
    [choice] = (await ask(session, "/v1/completions", body))["choices"]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


PENALTIES: list[tuple[Draw, dict[str, float]]] = [
    (generate, {"repetition_penalty": 1.5}),
    (generate_tokens, {"presence_penalty": 1.0}),
    (complete, {"frequency_penalty": -2.0}),
]


async def test_what_was_drawn_with_a_penalty_is_not_trained_on(
    tiny_folder: Path, tmp_path: Path
) -> None:
    engine = {"type": "embedded", "model": str(tiny_folder), "cache_gib": 0.01}
    config = GatewayConfig.model_validate(
        {"port": 0, "folder": tmp_path / "gateway", "vocab_size": 97, "engine": engine}
    )
    sentence = "drawn with a repetition, presence or frequency penalty"
    async with serving_gateway(config) as url, aiohttp.ClientSession(url) as session:
        for draw, penalty in PENALTIES:
            plain, penalised = await draw(session, {}), await draw(session, penalty)
            assert plain[1] != penalised[1], "it was drawn with the penalty"
            for (tokens, logprobs), said in ((plain, "received"), (penalised, sentence)):
                group = {
                    "tokens": [PROMPT + tokens] * 2,
                    "masks": [[-100, -100, *tokens]] * 2,
                    "inference_logprobs": [[1.0, 1.0, *logprobs]] * 2,
                    "scores": [0.0, 1.0],
                }
                assert said in str(await ask(session, "/scored_data", group))
