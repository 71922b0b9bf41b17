"""An environment whose groups do not depend on what the engine answers, though it asks each time.

    python recorded_environment.py GATEWAY_URL ENGINE_URL

Group n is the same in every run: trainings on it end with the same weights.
"""

import asyncio
import itertools
import random
import sys
from typing import Any

import aiohttp

GROUP_SIZE, NUM_TOKENS = 4, 6


def make_group(number: int) -> dict[str, Any]:
    numbers = random.Random(number)
    prompt = [numbers.randrange(4, 97) for _ in range(2)]
    answers = [[numbers.randrange(4, 97) for _ in range(NUM_TOKENS)] for _ in range(GROUP_SIZE)]
    return {
        "tokens": [[*prompt, *own] for own in answers],
        "masks": [[-100, -100, *own] for own in answers],
        "inference_logprobs": [[1.0, 1.0, *[-4.5] * NUM_TOKENS]] * GROUP_SIZE,
        "scores": [numbers.random() for _ in answers],
    }


async def ask(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> dict[str, Any]:
    async with session.post(url, json=body) as response:
        response.raise_for_status()
        answer: dict[str, Any] = await response.json()
        return answer


async def main(gateway: str, engine: str) -> None:
    async with aiohttp.ClientSession() as session:
        registration = {
            "max_token_length": 64, "desired_name": "recorded", "weight": 1.0,
            "group_size": GROUP_SIZE,
        }  # fmt: skip
        while True:
            found = await ask(session, f"{gateway}/register-env", registration)
            if found["status"] == "success":
                break
            await asyncio.sleep(0.05)
        who = {"env_id": found["env_id"]}
        for number in itertools.count():
            while True:
                async with session.get(f"{gateway}/status-env", json=who) as response:
                    if (await response.json())["queue_size"] < 4:
                        break
                await asyncio.sleep(0.02)
            body = {"prompt": {"prompt_token_ids": [5, 6]}, "max_tokens": 32, "ignore_eos": True}
            await ask(session, f"{engine.removesuffix('/v1')}/generate", body)
            await ask(session, f"{gateway}/scored_data", make_group(number) | who)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
