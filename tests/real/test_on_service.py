"""A loop against `rookery serve` with SmolLM2 in a process of its own. Half a minute.

`tests/unit/compose/test_on_service.py` compares all loops on a service with those in one process.
"""

import asyncio
import json
from pathlib import Path

import pytest
from service.server_process import ServerProcess

import rookery


@pytest.mark.timeout(900)
async def test_answers_are_learned(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path, {"smollm2": "smollm2"})
    async with server.running():
        adapter = await asyncio.to_thread(
            rookery.run_sft, "smollm2", "generated:mark-kind", name="taught", steps=4, batch_size=4,
            engine={"type": "service", "url": server.url}, layers=2, learning_rate=1e-2,
            runs_dir=tmp_path / "runs", progress=False,
        )  # fmt: skip
    lines = (tmp_path / "runs/taught/metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["train/loss"] for line in lines]
    assert adapter.rank == 8 and losses[-1] < losses[0]
