"""Answers with penalties: the gateway draws them, and does not take them for training."""

from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tiny import write_tiny_model

from rookery.compose.grpo.atropos import GatewayConfig, serving_gateway

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


@pytest.mark.parametrize("draw", [generate, generate_tokens, complete])
@pytest.mark.parametrize(
    "penalty",
    [{"repetition_penalty": 1.5}, {"presence_penalty": 1.0}, {"frequency_penalty": -2.0}],
)
async def test_what_was_drawn_with_a_penalty_is_not_trained_on(
    draw: Any, penalty: dict[str, float], tmp_path: Path
) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    engine = {"type": "embedded", "model": str(folder), "cache_gib": 0.01}
    config = GatewayConfig.model_validate(
        {"port": 0, "folder": tmp_path / "gateway", "vocab_size": 97, "engine": engine}
    )
    async with serving_gateway(config) as url, aiohttp.ClientSession(url) as session:
        plain, penalised = await draw(session, {}), await draw(session, penalty)
        assert plain[1] != penalised[1], "it was drawn with the penalty"
        sentence = "drawn with a repetition, presence or frequency penalty"
        for (tokens, logprobs), said in ((plain, "received"), (penalised, sentence)):
            group = {
                "tokens": [PROMPT + tokens] * 2,
                "masks": [[-100, -100, *tokens]] * 2,
                "inference_logprobs": [[1.0, 1.0, *logprobs]] * 2,
                "scores": [0.0, 1.0],
            }
            answer = await ask(session, "/scored_data", group)
            assert said in str(answer)
