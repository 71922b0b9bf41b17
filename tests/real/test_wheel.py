"""The wheel in an empty environment, away from the clone: what a user of pip has.

    ROOKERY_LONG=1 pytest tests/real/test_wheel.py
    ROOKERY_WHEEL=dist/rookery-0.1.0-py3-none-any.whl pytest tests/real/test_wheel.py

The wheel is built here, or is the one of ROOKERY_WHEEL. Everything of `rookery[demo]` is installed
with it, and the demos and projects run to their end: most of an hour on two cores. A package index
must be in reach.
"""

import os
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path
from typing import get_args

import pytest
from evolve_command import require_sandbox

from rookery.cli.demo import Kind

ROOT = Path(__file__).parents[2]
GIVEN = os.environ.get("ROOKERY_WHEEL")
pytestmark = [
    pytest.mark.timeout(3600),
    pytest.mark.skipif(
        not (GIVEN or os.environ.get("ROOKERY_LONG")), reason="set ROOKERY_LONG, or make test-real"
    ),
]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if GIVEN:
        return Path(GIVEN).resolve()
    folder = tmp_path_factory.mktemp("dist")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir"]
    subprocess.run([*pip, str(folder), str(ROOT)], check=True, cwd=folder)
    [built] = folder.glob("rookery-*.whl")
    return built


@pytest.fixture(scope="module")
def bin_folder(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment that holds the wheel."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, f"{wheel}[demo]"], check=True)
    return folder / "bin"


def rookery(bin_folder: Path, place: Path, *words: str) -> str:
    """What a command prints; it must succeed, without a path of this clone in sight."""
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    ended = subprocess.run(
        [bin_folder / "rookery", *words], cwd=place, env=clean, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_the_wheel_holds_what_demo_and_new_need(wheel: Path) -> None:
    files = set(zipfile.ZipFile(wheel).namelist())
    source = ROOT / "src"
    data = [path for path in (source / "rookery/starters").rglob("*") if path.is_file()]
    wanted = {str(path.relative_to(source)) for path in data if "__pycache__" not in path.parts}
    assert len(wanted) > 25 and wanted <= files
    assert wheel.stat().st_size < 4 << 20


def test_the_package_is_the_one_in_the_wheel(bin_folder: Path, tmp_path: Path) -> None:
    code = "import rookery; print(rookery.__file__)"
    clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    found = subprocess.run(
        [bin_folder / "python", "-c", code], cwd=tmp_path, env=clean, capture_output=True,
        text=True, check=True,
    ).stdout  # fmt: skip
    assert found.startswith(str(bin_folder.parent))


def test_help_teaches(bin_folder: Path, tmp_path: Path) -> None:
    assert "rookery demo --seed 1" in rookery(bin_folder, tmp_path, "demo", "--help")
    assert "genome" in rookery(bin_folder, tmp_path, "new", "--help")


@pytest.mark.parametrize("kind", get_args(Kind))
def test_a_project_runs_as_it_is(kind: str, bin_folder: Path, tmp_path: Path) -> None:
    """The command that `rookery new` names, with the model that the config names."""
    if kind == "evolve":
        require_sandbox()
    written = rookery(bin_folder, tmp_path, "new", kind, kind)
    [command] = re.findall(r"^Next: rookery (.+)$", written, re.MULTILINE)
    assert "report.html" in rookery(bin_folder, tmp_path, *command.split())


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("", r"evolved [\d.]+ [\d.]+ to [\d.]+ \S+ \(\+"),
        ("grpo", r"trained [\d.]+ [\d.]+ to [\d.]+ \S+ \(\+"),
        ("icm", "verdict coherent"),
        ("evolve", r"no choice depended on.*95 % interval \+"),
        ("serve", r"95 % interval \+"),
    ],
)
def test_a_demo_gains_what_it_says(kind: str, said: str, bin_folder: Path, tmp_path: Path) -> None:
    """Up to five minutes each on two idle cores: the intervals of all gains are above 0."""
    if kind == "evolve":
        require_sandbox()
    printed = rookery(bin_folder, tmp_path, *f"demo {kind}".split())
    assert re.search(said, " ".join(printed.split())), printed
    assert "Next:" in printed
