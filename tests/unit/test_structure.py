"""The rules that a program can check: layers, names, sizes, light imports, configs."""

import ast
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import yaml

from rookery.compat.openevolve import read_config
from rookery.compose.serve import ServeConfig
from rookery.loops.genome import GenomeConfig
from rookery.loops.grpo import GrpoConfig
from rookery.loops.icm import IcmConfig, read_gold, read_items
from rookery.loops.icm.objective import build_constraints

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "rookery"
MODULES = sorted({*SOURCE.rglob("*.py")} - {*(SOURCE / "starters" / "projects").rglob("*.py")})
"""Without the files that `rookery new` copies: they are a user's."""

LAYERS = [
    {"types", "errors", "model_names", "seeding"},
    {"config", "paths", "runtime"},
    {"ports"},
    {"reports", "weights", "slots", "tasks", "search", "sandbox", "executors", "runs", "testing"}
    | {"starters"},
    {"fleet", "embedded", "remote", "train"},
    {"engines", "megatron", "rollout"},
    {"environments"},
    {"loops", "service", "ui"},
    {"compat"},
    {"compose"},
    {"cli"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
TORCH = {
    "starters",
    "weights",
    "slots",
    "embedded",
    "train",
    "megatron",
    "loops",
    "fleet",
    "compose",
    "cli",
}
"""Parts that may import torch; `cli` and `fleet` inside functions or behind an extra only."""


def _part(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def _imports(path: Path) -> list[tuple[str, int]]:
    """Every absolute import of a file, also those inside functions."""
    found: list[tuple[str, int]] = []
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            found.extend((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append((node.module, node.lineno))
    return found


def test_every_part_has_a_layer() -> None:
    parts = {_part(path) for path in MODULES} - {"__init__", "__main__"}
    assert parts <= set(LEVEL), f"give {parts - set(LEVEL)} a layer"


def test_the_tree_of_the_architecture_page_is_the_present_one() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    tree = page.split("src/rookery/\n")[1].split("```")[0].splitlines()
    shown = [line.split()[0].rstrip("/") for line in tree if re.match(r"  \w", line)]
    there = {path.name for path in SOURCE.iterdir() if not path.name.startswith(("__", "py."))}
    assert set(shown) == there
    levels = [LEVEL[name.removesuffix(".py")] for name in shown]
    assert levels == sorted(levels)


def test_imports_go_strictly_down() -> None:
    for path in MODULES:
        part = _part(path)
        if part in {"__init__", "__main__"}:
            continue
        for name, line in _imports(path):
            package, _, rest = name.partition(".")
            other = rest.partition(".")[0]
            if package == "rookery" and other and other != part:
                assert LEVEL[other] < LEVEL[part], (
                    f"{path}:{line} imports {name}, which is not lower"
                )


def test_peers_know_nothing_of_each_other() -> None:
    """But for Atropos environments, which are OpenAI clients too."""
    for path in (SOURCE / "compat").glob("*/**/*.py"):
        peer = path.relative_to(SOURCE / "compat").parts[0]
        known = {peer, "openai"} if peer == "atropos" else {peer}
        for name, line in _imports(path):
            if name.startswith("rookery.compat."):
                assert name.split(".")[2] in known, f"{path}:{line}: {name}"


def test_the_list_of_files_of_the_service_is_right() -> None:
    for folder in (SOURCE / "service", *(SOURCE / "service").glob("*/")):
        if (folder / "__init__.py").exists():
            text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
            lines = [line for line in text.splitlines() if re.match(r"[a-z_]+(\.py|/) ", line)]
            listed = {line.split()[0].rstrip("/") for line in lines}
            there = {path.name for path in folder.iterdir()} - {"__init__.py", "__pycache__"}
            assert listed == there, folder


def test_files_that_a_package_lists_are_there() -> None:
    for path in SOURCE.rglob("__init__.py"):
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        listed = set(re.findall(r"^([a-z_]+\.py)\b", text, re.MULTILINE))
        assert listed <= {own.name for own in path.parent.iterdir()}, path


def test_heavy_libraries_stay_in_their_parts() -> None:
    for path in MODULES:
        for name, line in _imports(path):
            if name.partition(".")[0] == "torch" and _part(path) != "types":
                assert _part(path) in TORCH, f"{path}:{line} imports torch"
            if name.partition(".")[0] == "vllm":
                assert _part(path) == "fleet", f"{path}:{line} imports vllm"


def test_every_module_opens_with_a_docstring_and_has_a_sorted_all() -> None:
    for path in MODULES:
        tree = _tree(path)
        assert ast.get_docstring(tree), f"{path} does not say what it is"
        if path.name == "__main__.py":
            continue
        names = [
            ast.literal_eval(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign | ast.AnnAssign)
            and node.value is not None
            and getattr(node.targets[0] if isinstance(node, ast.Assign) else node.target, "id", "")
            == "__all__"
        ]
        assert names, f"{path} has no __all__"
        ordered = sorted(names[0], key=lambda n: (not n.isupper(), not n[:1].isupper(), n))
        assert names[0] in (ordered, sorted(names[0])), f"{path}: sort __all__"


def test_functions_and_files_stay_small() -> None:
    for path in MODULES:
        text = path.read_text()
        assert text.count("\n") <= 600, f"{path} is over 600 lines"
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                assert length <= 60, f"{path}:{node.lineno} {node.name} has {length} lines"


def test_folders_stay_small() -> None:
    sizes = Counter(path.parent for path in MODULES)
    assert not {folder: size for folder, size in sizes.items() if size > 20}


def test_importing_the_package_is_light() -> None:
    code = "import sys, rookery; print(sorted({'torch', 'pydantic', 'rich'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_help_does_not_import_torch() -> None:
    code = (
        "import sys, rookery.cli; "
        "assert not {'torch', 'transformers', 'datasets'} & set(sys.modules), 'heavy'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    text = subprocess.run(
        [sys.executable, "-m", "rookery", "--help"], capture_output=True, text=True, check=True
    ).stdout
    assert "genome" in text


def _configs(kind: str) -> list[Path]:
    starters = SOURCE / "starters"
    folders = (ROOT / "configs", starters / "demos")
    found = [path for folder in folders for path in folder.glob(f"{kind}*.yaml")]
    return sorted([*found, *(starters / "projects" / kind).glob("config.yaml")])


@pytest.mark.parametrize("path", _configs("genome"), ids=str)
def test_every_genome_config_parses(path: Path) -> None:
    config = GenomeConfig.model_validate(yaml.safe_load(path.read_text()))
    assert config.from_folder(path.parent).init is not None


@pytest.mark.parametrize("path", _configs("grpo"), ids=str)
def test_every_grpo_config_parses(path: Path) -> None:
    config = GrpoConfig.model_validate(yaml.safe_load(path.read_text()))
    assert config.from_folder(path.parent).tasksets


@pytest.mark.parametrize("path", _configs("serve"), ids=str)
def test_every_serve_config_parses(path: Path) -> None:
    config = ServeConfig.model_validate(yaml.safe_load(path.read_text()))
    assert config.from_folder(path.parent).models


@pytest.mark.parametrize("path", _configs("icm"), ids=str)
def test_every_icm_config_parses_and_its_items_are_there(path: Path) -> None:
    config = IcmConfig.model_validate(yaml.safe_load(path.read_text())).from_folder(path.parent)
    items = read_items(config.data)
    assert len(read_gold(config.data, items)) == len(items)
    build_constraints(config.constraints, items=items, labels=config.data.labels)


@pytest.mark.parametrize("path", _configs("evolve"), ids=str)
def test_every_evolve_config_parses_without_a_warning(path: Path) -> None:
    assert read_config(path, environment={}).warnings == ()


def test_the_project_speaks_of_itself_alone() -> None:
    """No paths of anyone's machine in what is shipped."""
    files = [*MODULES, *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    for path in files:
        text = path.read_text()
        for word in ("/work/", "/root/", "/tmp/w"):
            assert word not in text, f"{path} names {word}"
