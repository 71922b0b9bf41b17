"""Peers with an interpreter of their own, named by variables as `make test-real` sets them.

    ROOKERY_VLLM_PYTHON=/path/to/python-with-vllm pytest tests/real/test_fleet.py

A test without its peer is skipped with the name of the variable.
"""

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rookery.embedded import resolve_model

__all__ = [
    "ATROPOS",
    "TINKER",
    "VLLM",
    "engine_of",
    "needs_atropos",
    "needs_vllm",
    "printed_by",
    "served_on_cpu",
    "toy_training",
]

VLLM = os.environ.get("ROOKERY_VLLM_PYTHON", "")
ATROPOS = os.environ.get("ROOKERY_ATROPOS_PYTHON", "")
TINKER = os.environ.get("ROOKERY_TINKER_PYTHON", "")
needs_vllm = pytest.mark.skipif(not VLLM, reason="ROOKERY_VLLM_PYTHON names no Python with vLLM")
needs_atropos = pytest.mark.skipif(
    not ATROPOS, reason="ROOKERY_ATROPOS_PYTHON names no Python with atroposlib"
)


def served_on_cpu(model: Path | None = None, **changes: Any) -> dict[str, Any]:
    """The keys of `launch` for one server of vLLM on the CPU, in float32, of SmolLM2 by default."""
    path = resolve_model("smollm2").path if model is None else model
    return {
        "model": str(path), "python": VLLM, "replicas": 1, "device": "cpu", "dtype": "float32",
        "cpu_cache_gib": 1, "enforce_eager": True, "env": {"HF_HUB_OFFLINE": "1"}, **changes,
    }  # fmt: skip


def engine_of(server: int) -> int:
    """The process of vLLM's engine, a child of the server."""
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(line.split(":\t", 1) for line in status.read_text().splitlines())
        except (OSError, ValueError):  # it ended meanwhile
            continue
        if fields["PPid"] == str(server) and "Engine" in fields["Name"]:
            return int(fields["Pid"])
    raise AssertionError("the server has no engine process")


async def printed_by(
    *command: str, env: Mapping[str, str], limit_s: float, folder: Path | None = None
) -> str:
    """What a program writes to stdout, which must succeed; it ends with the test."""
    process = await asyncio.create_subprocess_exec(
        *command, env={**os.environ, **env}, cwd=folder, stdout=asyncio.subprocess.PIPE
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), limit_s)
        assert process.returncode == 0, output.decode()[-3000:]
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return output.decode()


def toy_training(folder: Path, environment: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """The keys of a training of a tiny model on groups of an Atropos environment."""
    return {
        "engine": {"type": "embedded", "model": str(folder), "cache_gib": 0.01},
        "environment": {"type": "atropos", "max_token_len": 64, "batch_s": 400, **environment},
        "steps": 3, "groups_per_step": 2, "group_size": 4, "drawing": {"max_tokens": 6},
        "learning_rate": 1e-2, "save_every": 3, "lora": {"rank": 4}, **changes,
    }  # fmt: skip
