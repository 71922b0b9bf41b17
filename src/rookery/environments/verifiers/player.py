"""Plays the tasks of a verifiers taskset, and sends each group to a gateway.

    python player.py GATEWAY ENGINE MODEL '{"taskset": {"id": "mine"}, "group_size": 8, ...}'

Runs in an interpreter with verifiers. ENGINE answers `/inference/v1/generate`, and MODEL is a
folder with the tokenizer. After the last task it starts again from the first.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import verifiers.v1 as vf
from verifiers.v1.utils.loaders import harness_class, taskset_class

__all__ = ["main"]

logger = logging.getLogger(__name__)
MASKED, NOT_DRAWN = -100, 1.0
"""Values of the Atropos API for tokens that the model did not draw."""
POLL_S = 0.2
FULL_BATCHES = 2
"""Playing pauses while this many batches wait to be trained on."""
KEY = "ROOKERY_ENGINE_KEY"


def make_agent(engine: str, model: str, options: dict[str, Any]) -> Any:
    os.environ.setdefault(KEY, "none")
    harness = harness_class(options["harness"])
    client = vf.TrainClientConfig(base_url=engine, api_key_var=KEY, renderer_model_name=model)
    return vf.make_agent(
        vf.AgentConfig(
            model=model,
            harness=_config_of(harness)(id=options["harness"]),
            runtime=vf.SubprocessConfig(),
            client=client,
            sampling=vf.SamplingConfig(**options["sampling"]),
        )
    )


def _config_of(plugin: type) -> Any:
    """Return the class of a plugin's config, the last argument of its generic base."""
    for base in getattr(plugin, "__orig_bases__", ()):
        arguments = getattr(base, "__args__", ())
        if arguments:
            return arguments[-1]
    raise TypeError(f"{plugin.__name__} does not say what its config is")


def all_tasks(options: dict[str, Any]) -> Iterator[Any]:
    """Yield the tasks in an endless cycle."""
    kind = taskset_class(options["taskset"]["id"])
    taskset = kind(_config_of(kind)(**options["taskset"]))
    while True:
        num = 0
        for task in taskset:
            num += 1
            yield task
        if not num:
            raise SystemExit(f"The taskset {options['taskset']['id']} has no tasks.")


async def draw_rollouts(agent: Any, task: Any, size: int) -> list[tuple[Any, float]]:
    """Return branches with their rewards. Failed ones are drawn once more: if a group is smaller
    than its environment's size, the gateway waits for others to complete it."""
    rows: list[tuple[Any, float]] = []
    for _ in range(2):
        traces = await asyncio.gather(*[agent.run(task) for _ in range(size - len(rows))])
        for trace in traces:
            branches = [branch for branch in trace.branches if branch.trainable]
            if trace.ok and len(branches) == 1 and any(branches[0].sampled_mask):
                rows.append((branches[0], float(trace.reward)))
            else:
                logger.warning("a rollout is left out: %s", trace.errors[:1] or "no single branch")
    return rows


def scored_group(rows: list[tuple[Any, float]]) -> dict[str, Any]:
    group: dict[str, Any] = {"tokens": [], "masks": [], "inference_logprobs": [], "scores": []}
    for branch, reward in rows:
        drawn = branch.sampled_mask
        tokens, logprobs = branch.token_ids, branch.logprobs
        group["tokens"].append(tokens)
        group["masks"].append([t if d else MASKED for t, d in zip(tokens, drawn, strict=True)])
        group["inference_logprobs"].append(
            [p if d else NOT_DRAWN for p, d in zip(logprobs, drawn, strict=True)]
        )
        group["scores"].append(reward)
    return group


async def play(
    http: httpx.AsyncClient, agent: Any, tasks: Iterator[Any], options: dict[str, Any], env_id: int
) -> None:
    """Play one task after another."""
    size = options["group_size"]
    while True:
        status = await http.request("GET", "/status-env", json={"env_id": env_id})
        if status.json()["queue_size"] * size >= FULL_BATCHES * options["batch_size"]:
            await asyncio.sleep(POLL_S)
            continue
        task = next(tasks)
        rows = await draw_rollouts(agent, task, size)
        has_signal = len({reward for _, reward in rows}) > 1
        if has_signal and len(rows) == size:
            group = await asyncio.to_thread(scored_group, rows)
            answer = await http.post("/scored_data", json={**group, "env_id": env_id})
            if answer.status_code >= 400:
                logger.warning("the gateway refused a group: %s", answer.text)


async def register(http: httpx.AsyncClient, options: dict[str, Any]) -> int:
    """Return the number of this environment once the trainer has started."""
    registration = {
        "max_token_length": options["max_token_len"],
        "desired_name": options["taskset"]["id"],
        "weight": 1.0,
        "group_size": options["group_size"],
    }
    while True:
        answer = (await http.post("/register-env", json=registration)).json()
        if answer["status"] == "success":
            return int(answer["env_id"])
        await asyncio.sleep(POLL_S)


async def main(gateway: str, engine: str, model: str, options: dict[str, Any]) -> None:
    tasks = all_tasks(options)
    async with (
        httpx.AsyncClient(base_url=gateway, timeout=600) as http,
        make_agent(engine, model, options) as agent,
    ):
        env_id = await register(http, options)
        options["batch_size"] = (await http.get("/info")).json()["batch_size"]
        players = [
            play(http, agent, tasks, options, env_id) for _ in range(options["groups_in_flight"])
        ]
        await asyncio.gather(*players)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    sys.path[:0] = [str(Path.cwd()), str(Path(__file__).parent)]
    gateway, engine, model, options = sys.argv[1:]
    asyncio.run(main(gateway, engine, model, json.loads(options)))
