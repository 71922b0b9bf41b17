"""Imports that a whole-program answer left out, or wrote below their first use.

    add_imports("def pack(): return np.zeros(3)", parent=parent)      # import numpy as np, on top

Small models often answer without the imports, or with the imports at the end.
"""

import ast
import builtins
import sys
import typing
from collections.abc import Iterator

__all__ = ["add_imports"]

KNOWN = {"np": "import numpy as np"}
"""Names of imports that a program may use although its parent did not."""


def add_imports(code: str, *, parent: str) -> str:
    """Add imports of what a Python program uses and does not define, on top: its own late ones, the
    parent's, and those of the standard library."""
    try:
        tree, parent_tree = ast.parse(code), ast.parse(parent)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return code
    own, taken = _imports(tree), _imports(parent_tree)
    if "*" in own or "*" in taken:  # which may bind any name
        return code
    missing = _used(tree) - _bound(tree) - _head(tree)
    given = _used(parent_tree) - _bound(parent_tree) - taken.keys()  # by the evaluator
    texts = [own.get(name) or taken.get(name) or _known(name) for name in sorted(missing - given)]
    top = max([0, *(node.end_lineno or 0 for node in tree.body if _comes_first(node, tree))])
    lines = code.split("\n")
    return "\n".join([*lines[:top], *dict.fromkeys(filter(None, texts)), *lines[top:]])


def _imports(tree: ast.Module) -> dict[str, str]:
    """Return the imports at the top of a program, by the names that they bind."""
    return {name: text for node in tree.body for name, text in _bindings(node)}


def _bindings(node: ast.stmt) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            name = (alias.asname or alias.name).partition(".")[0]
            yield name, ast.unparse(ast.Import(names=[alias]))
    elif isinstance(node, ast.ImportFrom) and node.module != "__future__":
        for alias in node.names:
            text = ast.unparse(ast.ImportFrom(node.module, names=[alias], level=node.level))
            yield alias.asname or alias.name, text


def _head(tree: ast.Module) -> set[str]:
    """Return the names of imports that come before any other statement but the docstring."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {name for name, _ in _bindings(node)}
        elif not _comes_first(node, tree):
            break
    return names


def _comes_first(node: ast.stmt, tree: ast.Module) -> bool:
    """Return True for the docstring and imports from __future__."""
    is_docstring = node is tree.body[0] and isinstance(node, ast.Expr)
    return is_docstring or (isinstance(node, ast.ImportFrom) and node.module == "__future__")


def _used(tree: ast.Module) -> set[str]:
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    return {node.id for node in names if isinstance(node.ctx, ast.Load)} - set(dir(builtins))


def _bound(tree: ast.Module) -> set[str]:
    """Return the names that a program binds anywhere, but not by an import at its top."""
    names: set[str] = set()
    tops = {id(alias) for node in tree.body for alias in getattr(node, "names", ())}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.alias) and id(node) not in tops:
            names.add((node.asname or node.name).partition(".")[0])
    return names


def _known(name: str) -> str:
    if name in KNOWN:
        return KNOWN[name]
    if name in sys.stdlib_module_names:
        return f"import {name}"
    return f"from typing import {name}" if name in typing.__all__ else ""
