"""An environment that speaks the Atropos API with nothing but a HTTP client.

    python toy_environment.py GATEWAY_URL ENGINE_URL [TOP_P]

Asks for two answers of four tokens at a time; even tokens are worth a point each. With
TOY_REFERENCE in the environment every second group has log-probabilities of a reference.
"""

import asyncio
import gzip
import itertools
import json
import os
import sys
from typing import Any

import aiohttp

GROUP_SIZE, NUM_TOKENS = 4, 4
TOP_P = float(sys.argv[3]) if len(sys.argv) > 3 else 1.0


async def play(session: aiohttp.ClientSession, engine: str, number: int) -> dict[str, Any] | None:
    prompt = [5 + number % 40, 6]
    body = {
        "prompt": {"prompt_token_ids": prompt}, "logprobs": 0, "n": GROUP_SIZE,
        "max_tokens": NUM_TOKENS, "temperature": 1.0, "top_p": TOP_P, "ignore_eos": True,
    }  # fmt: skip
    async with session.post(f"{engine}/generate", json=body) as response:
        response.raise_for_status()
        answer = await response.json()
    tokens = [[int(next(iter(entry[0]))) for entry in own] for own in answer["logprobs"]]
    logprobs = [[next(iter(entry[0].values())) for entry in own] for own in answer["logprobs"]]
    scores = [sum(token % 2 == 0 for token in own) / NUM_TOKENS for own in tokens]
    if len(set(scores)) == 1:
        return None
    return {
        "tokens": [[*prompt, *own] for own in tokens],
        "masks": [[-100, -100, *own] for own in tokens],
        "inference_logprobs": [[1.0, 1.0, *own] for own in logprobs],
        "scores": scores,
    }


async def main(gateway: str, engine: str) -> None:
    engine = engine.removesuffix("/v1")
    async with aiohttp.ClientSession() as session:
        registration = {
            "max_token_length": 64, "desired_name": "toy", "weight": 1.0, "group_size": GROUP_SIZE,
        }  # fmt: skip
        while True:
            async with session.post(f"{gateway}/register-env", json=registration) as response:
                found = await response.json()
            if found["status"] == "success":
                break
            await asyncio.sleep(0.05)
        who = {"env_id": found["env_id"]}
        has_reference = False
        for number in itertools.count():
            async with session.get(f"{gateway}/status-env", json=who) as response:
                if (await response.json())["queue_size"] >= 4:
                    await asyncio.sleep(0.02)
                    continue
            group = await play(session, engine, number)
            if group is not None:
                if has_reference := "TOY_REFERENCE" in os.environ and not has_reference:
                    group["ref_logprobs"] = [[-4.0] * len(own) for own in group["tokens"]]
                body = gzip.compress(json.dumps(group | who).encode())
                headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
                async with session.post(
                    f"{gateway}/scored_data", data=body, headers=headers
                ) as response:
                    response.raise_for_status()


asyncio.run(main(*sys.argv[1:3]))
