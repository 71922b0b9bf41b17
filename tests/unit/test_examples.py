"""What README, docs and examples show: it compiles, its imports exist, and what is marked runs.

A block after the line `<!-- example: runs -->` is run in a folder with a tiny model in place of
`smollm2`, adapters, a config and tasks under the names that the pages use.
"""

import ast
import asyncio
import importlib
import importlib.util
import inspect
import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from tiny import tiny_adapter

from rookery.config import Config, load_config
from rookery.loops.genome import GenomeConfig
from rookery.loops.grpo import GrpoConfig
from rookery.loops.icm import IcmConfig
from rookery.weights import write_adapter

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += sorted((ROOT / "docs/reference").glob("*.md"))
BLOCK = re.compile(r"^(<!-- example: runs -->\n)?```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
CONFIGS: dict[str, type[Config]] = {
    "genome": GenomeConfig,
    "grpo": GrpoConfig,
    "icm": IcmConfig,
}
DEMO = """\
engine: {model: MODEL}
init: {type: file, path: ../adapters}
tasksets: [{type: jsonl, path: ../gsm8k.jsonl, splits: {search: 0.4, select: 0.3, report: 0.3}}]
stages: [{type: ga, generations: 1, population: {size: 2, children: {count: 2}}}]
finals: {num_finalists: 2, num_voters: 2, random_search: false}
"""


@dataclass(frozen=True)
class Example:
    """One Python block of a page."""

    name: str
    source: str
    is_run: bool


def find_examples() -> list[Example]:
    examples = []
    for page in PAGES:
        text = page.read_text()
        for match in BLOCK.finditer(text):
            line = text[: match.start()].count("\n") + 1
            examples.append(Example(f"{page.name}:{line}", match[2], bool(match[1])))
    return examples


BLOCKS = find_examples()
RUNNABLE = [example for example in BLOCKS if example.is_run]


def imports_of(source: str) -> list[tuple[str, list[str]]]:
    """The modules of Rookery that a source imports, with the names taken from each."""
    imports = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module:
            imports.append((node.module, [alias.name for alias in node.names]))
        elif isinstance(node, ast.Import):
            imports.extend((alias.name, []) for alias in node.names)
    return [(module, names) for module, names in imports if module.startswith("rookery")]


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with everything that the runnable blocks name."""
    shutil.copytree(tiny_folder, tmp_path / "tiny")
    tokenizer = tmp_path / "tiny/tokenizer.json"  # the answers of the generated tasks are words
    words = tokenizer.read_text().replace('"w94"', '"red"').replace('"w95"', '"blue"')
    tokenizer.write_text(words)
    for seed, place in enumerate(["adapters/poet", "adapters/clerk", "out/poet"]):
        name = Path(place).name
        write_adapter(tiny_adapter(name, seed=seed), tmp_path / place)
    rows = [
        {"prompt": f"w{4 + i} w{5 + i}", "choices": ["w90", "w91"], "reference": f"w{90 + i % 2}"}
        for i in range(40)
    ]
    (tmp_path / "gsm8k.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "demos").mkdir()
    (tmp_path / "demos/genome.yaml").write_text(DEMO.replace("MODEL", str(tmp_path / "tiny")))
    monkeypatch.setattr("rookery.starters.DEMOS", tmp_path / "demos")
    (tmp_path / "problem").mkdir()
    (tmp_path / "problem/data.txt").write_text("1\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_source(source: str) -> dict[str, object]:
    """Run a block as a script, or as a notebook cell when it awaits; the names it defines."""
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    code = compile(source, "<example>", "exec", flags=flags, dont_inherit=True)
    names: dict[str, object] = {"__name__": "__main__"}
    if code.co_flags & inspect.CO_COROUTINE:

        async def cell() -> None:
            await eval(code, names)

        asyncio.run(cell())
    else:
        exec(code, names)
    return names


def test_the_pages_have_examples_of_both_kinds() -> None:
    pages = {example.name.partition(":")[0] for example in BLOCKS}
    assert {"README.md", "index.md", "fleet.md", "train.md"} <= pages
    assert len(RUNNABLE) >= 13 and len(BLOCKS) > len(RUNNABLE)


@pytest.mark.parametrize("example", BLOCKS, ids=lambda example: example.name)
def test_examples_compile_and_their_imports_exist(example: Example) -> None:
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    compile(example.source, example.name, "exec", flags=flags, dont_inherit=True)
    for module, names in imports_of(example.source):
        found = importlib.import_module(module)
        missing = [name for name in names if not hasattr(found, name)]
        assert not missing, f"{example.name}: {module} has no {missing}"


@pytest.mark.parametrize("example", RUNNABLE, ids=lambda example: example.name)
def test_marked_examples_run(example: Example, folder: Path) -> None:
    model = json.dumps(str(folder / "tiny"))
    run_source(example.source.replace('"smollm2"', model))


def test_a_block_that_fails_is_seen() -> None:
    with pytest.raises(NameError):
        run_source("await missing()")
    assert run_source("import asyncio\nx = await asyncio.sleep(0, 3)")["x"] == 3


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_scripts_import_and_their_configs_parse(path: Path) -> None:
    spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    for name in re.findall(r"configs/\w+\.yaml", path.read_text()):
        load_config(CONFIGS[path.stem.partition("_")[0]], ROOT / name)


@pytest.mark.parametrize("name", ["genome.py", "icm.py"])
def test_library_examples_are_short(name: str) -> None:
    tree = ast.parse((ROOT / "examples" / name).read_text())
    body = tree.body[1:]  # without the docstring
    num_lines = sum((node.end_lineno or node.lineno) - node.lineno + 1 for node in body)
    assert num_lines < 15


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"])
def test_links_of_root_pages_exist(name: str) -> None:
    text = (ROOT / name).read_text()
    links = re.findall(r"\]\(([^)#\s]+)|src=\"([^\"]+)\"", text)
    local = [a or b for a, b in links if not (a or b).startswith("http")]
    missing = [link for link in local if not (ROOT / link).exists()]
    assert not missing, f"{name} links to {missing}"
    assert name != "README.md" or len(local) > 10
