"""An environment that asks for sums, by the Atropos API and a HTTP client alone.

python addition_environment.py GATEWAY ENGINE TASKS.jsonl
"""

import asyncio
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import aiohttp

GROUP_SIZE = 8
NUM_PLAYERS = 8


async def play(session: aiohttp.ClientSession, engine: str, row: dict[str, str]) -> Any:
    body = {
        "prompt": row["prompt"], "logprobs": 0, "n": GROUP_SIZE, "max_tokens": 4,
        "temperature": 1.0,
    }  # fmt: skip
    async with session.post(f"{engine}/generate", json=body) as response:
        response.raise_for_status()
        answer = await response.json()
    prompt, drawn = answer["prompt_token_ids"], answer["token_ids"]
    logprobs = [[next(iter(e[0].values())) for e in own] for own in answer["logprobs"]]
    scores = [float(text.strip(" .") == row["reference"]) for text in answer["text"]]
    if len(set(scores)) == 1:
        return None
    return {
        "tokens": [[*prompt, *own] for own in drawn],
        "masks": [[*[-100] * len(prompt), *own] for own in drawn],
        "inference_logprobs": [[*[1.0] * len(prompt), *own] for own in logprobs],
        "scores": scores,
    }


async def main(gateway: str, engine: str, tasks: list[dict[str, str]]) -> None:
    rows = itertools.cycle(tasks)
    engine = engine.removesuffix("/v1")
    async with aiohttp.ClientSession() as session:
        who = {"env_id": await register(session, gateway)}

        async def keep_playing() -> None:
            while True:
                async with session.get(f"{gateway}/status-env", json=who) as response:
                    if (await response.json())["queue_size"] >= 16:
                        await asyncio.sleep(0.02)
                        continue
                group = await play(session, engine, next(rows))
                if group is not None:
                    async with session.post(f"{gateway}/scored_data", json=group | who) as response:
                        response.raise_for_status()

        await asyncio.gather(*[keep_playing() for _ in range(NUM_PLAYERS)])


async def register(session: aiohttp.ClientSession, gateway: str) -> int:
    registration = {
        "max_token_length": 32, "desired_name": "addition", "weight": 1.0, "group_size": GROUP_SIZE,
    }  # fmt: skip
    while True:
        async with session.post(f"{gateway}/register-env", json=registration) as response:
            found = await response.json()
        if found["status"] == "success":
            return int(found["env_id"])
        await asyncio.sleep(0.05)


_, URL, ENGINE, FILE = sys.argv
ROWS = [json.loads(line) for line in Path(FILE).read_text().splitlines()]
asyncio.run(main(URL, ENGINE, ROWS))
