"""The tutorials as a reader does them: every block in order in an empty folder, and what it shows.
Their notebooks and the examples run to their end, too.

    ROOKERY_LONG=1 pytest tests/real/test_tutorials.py

`tinker_laptop` installs the SDK: a package index must be in reach.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from evolve_command import require_sandbox
from marks import long
from notebooks import PAGES, is_shown, read_page

from rookery.starters.number_changer import NAME, serve_number_changer

ON_GPU = ("gsm8k",)
EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = sorted(page.stem for page in PAGES.glob("*.md") if page.name != "index.md")


def marked(name: str) -> object:
    marks = [pytest.mark.timeout(1800), long]
    if name in ON_GPU:
        marks.append(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))
    return pytest.param(name, marks=marks, id=name)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder; `python` and `rookery` are those of this environment, as after a pip. What
    a page left running, named by a .pid file, is ended."""
    (tmp_path / "bin").mkdir()
    for name, module in (("python", ""), ("rookery", "-m rookery")):
        script = tmp_path / "bin" / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {module} "$@"\n')
        script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("COLUMNS", "100")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    yield tmp_path / "work"
    for file in (tmp_path / "work").glob("*.pid"):
        with suppress(ProcessLookupError):
            os.kill(int(file.read_text()), signal.SIGTERM)


def require_parts(name: str) -> None:
    if name == "evolve_program":
        require_sandbox()


@pytest.mark.parametrize("name", [marked(name) for name in NAMES])
def test_a_tutorial_does_what_it_shows(name: str, place: Path) -> None:
    require_parts(name)
    for block in read_page((PAGES / f"{name}.md").read_text()):
        if block.title:
            (place / block.title).parent.mkdir(parents=True, exist_ok=True)
            (place / block.title).write_text(block.source)
        elif block.kind != "prose":
            program = {"bash": ("bash", "-e"), "python": ("python",)}[block.kind]
            ended = subprocess.run(
                [*program, "-c", block.source], capture_output=True, text=True, check=False
            )
            printed = ended.stdout + ended.stderr
            assert ended.returncode == 0, f"{block.source}\n{printed}"
            assert is_shown(block, printed), f"{block.shown}\nprinted:\n{printed}"


@pytest.mark.parametrize("name", [marked(name) for name in NAMES])
def test_a_notebook_does_what_its_page_shows(
    name: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_parts(name)
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    monkeypatch.setenv("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    document = nbformat.read(PAGES / f"{name}.ipynb", as_version=4)
    nbclient.NotebookClient(
        document, timeout=1800, resources={"metadata": {"path": place}}
    ).execute()
    cells = iter(cell for cell in document.cells if cell.cell_type == "code")
    for block in read_page((PAGES / f"{name}.md").read_text()):
        if block.kind != "prose":
            printed = "".join(part.get("text", "") for part in next(cells).outputs)
            assert block.title or is_shown(block, printed), f"{block.shown}\n{printed}"
    assert shutil.which("rookery") == str(place.parent / "bin" / "rookery")


@long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_runs(path: Path, place: Path) -> None:
    if path.name == "evolve.py":
        require_sandbox()
    with serve_number_changer() as url:
        environment = os.environ | {"OPENAI_API_BASE": url}
        command = [sys.executable, str(path), NAME]
        subprocess.run(command, cwd=place, env=environment, check=True)
