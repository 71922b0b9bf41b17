"""The real OpenEvolve 0.4 beside ours: `openevolve(code, data)` runs code in its environment."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

OpenEvolve = Callable[[str, Any], Any]

_FRAME = """
import json, logging, sys
logging.disable(logging.CRITICAL)
DATA = json.loads(sys.stdin.read())
def answer(value):
    with open(sys.argv[1], "w") as file:
        json.dump(value, file)
"""


@pytest.fixture(scope="session")
def openevolve_python() -> str:
    python = os.environ.get("ROOKERY_OPENEVOLVE_PYTHON", "")
    if not python:
        pytest.skip("ROOKERY_OPENEVOLVE_PYTHON names no Python with openevolve 0.4.0")
    return python


@pytest.fixture
def openevolve(openevolve_python: str, tmp_path: Path) -> OpenEvolve:
    """Runs `code` with DATA in the other Python, and gives back what it hands to `answer`."""

    def run(code: str, data: Any) -> Any:
        out = tmp_path / "openevolve-answer.json"
        done = subprocess.run(
            [openevolve_python, "-c", _FRAME + code, str(out)],
            input=json.dumps(data),
            capture_output=True,
            text=True,
            timeout=120,
            env={"PATH": os.environ.get("PATH", ""), "HOME": str(tmp_path)},
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(out.read_text())

    return run
