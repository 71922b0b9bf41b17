"""The search package is pure: it computes, and all its randomness is keyed."""

import ast
from pathlib import Path

import rookery.search


def test_the_package_has_no_clock_no_io_and_no_global_random() -> None:
    allowed = {
        *(
            "ast",
            "bisect",
            "collections",
            "dataclasses",
            "functools",
            "hashlib",
            "itertools",
            "math",
        ),
        *("statistics", "sys", "typing", "warnings", "numpy", "pydantic", "cma", "rookery"),
    }
    layers = tuple(f"rookery.{part}" for part in ("config", "errors", "seeding", "types", "search"))
    for path in Path(rookery.search.__path__[0]).rglob("*.py"):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0
                names = [node.module or ""]
            for name in names:
                assert name.split(".")[0] in allowed, f"{path.name} imports {name}"
                assert not name.startswith("rookery") or name.startswith(layers)
        calls = {ast.unparse(n.func) for n in ast.walk(tree) if isinstance(n, ast.Call)}
        assert not {c for c in calls if c in {"open", "print", "input"}}
        assert not {c for c in calls if c.startswith("np.random.")}
