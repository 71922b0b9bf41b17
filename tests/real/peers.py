"""Peers with an interpreter of their own, named by variables as `make test-real` sets them.

    ROOKERY_VLLM_PYTHON=/path/to/python-with-vllm pytest tests/real/test_fleet.py

A test without its peer is skipped with the name of the variable.
"""

import os
from pathlib import Path
from typing import Any

import pytest

from rookery.embedded import resolve_model

__all__ = ["ATROPOS", "TINKER", "VLLM", "needs_atropos", "needs_vllm", "served_on_cpu"]

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
