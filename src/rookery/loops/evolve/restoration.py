"""Names that a whole-program answer left out, restored from its parent.

    restore_names("def pack(): return grow(np.zeros(3))", parent=parent)
    # the parent's `grow`, and `import numpy as np`, above it

Small models often answer with the changed function alone, or without the imports.
"""

import ast
import builtins
import symtable
import sys
import typing
from collections.abc import Iterator

__all__ = ["restore_names"]

KNOWN = {"np": "import numpy as np"}
"""Names of imports that a program may use although its parent did not."""


def restore_names(code: str, *, parent: str) -> str:
    """Add what a Python program uses and does not define: the parent's imports, functions and
    constants, and modules of the standard library. Add the parent's functions that nothing in it
    calls too, for its evaluator does, if the program redefines any of the parent's."""
    try:
        tree, statements = ast.parse(code), _statements(parent)
        defined, used = _names(code)
    except (SyntaxError, ValueError, RecursionError):
        return code
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    if functions & statements.keys():
        used |= _entry_points(parent)
    lines: dict[str, str] = {}
    missing = used - defined
    while missing:
        name = missing.pop()
        text = statements.get(name) or _import_of(name)
        if text and name not in lines:
            lines[name] = text
            missing |= _names(text)[1] - defined - lines.keys()
    if not lines:
        return code
    order = [*statements, *sorted(lines.keys() - statements.keys())]
    added = dict.fromkeys(lines[name] for name in order if name in lines)
    imports = [text for text in added if text.startswith(("import ", "from "))]
    others = [text for text in added if text not in imports]
    before, after = _split_head(code, tree)
    return "\n".join([*before, *imports, *others, *after])


def _statements(code: str) -> dict[str, str]:
    """Return the text that defines each name of a program, in their order."""
    lines = code.split("\n")
    texts: dict[str, str] = {}
    for node in ast.parse(code).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                name = (alias.asname or alias.name).partition(".")[0]
                texts[name] = ast.unparse(_with_names(node, [alias]))
            continue
        decorators = getattr(node, "decorator_list", [])
        start = min([node.lineno, *(each.lineno for each in decorators)])
        for name in _bound(node):
            texts[name] = "\n".join(lines[start - 1 : node.end_lineno])
    texts.pop("annotations", None)  # of __future__
    return texts


def _with_names(node: ast.Import | ast.ImportFrom, names: list[ast.alias]) -> ast.stmt:
    if isinstance(node, ast.Import):
        return ast.Import(names=names)
    return ast.ImportFrom(module=node.module, names=names, level=node.level)


def _bound(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    targets = [node.target] if isinstance(node, ast.AnnAssign) else []
    for target in node.targets if isinstance(node, ast.Assign) else targets:
        if isinstance(target, ast.Name):
            yield target.id


def _names(code: str) -> tuple[set[str], set[str]]:
    """Return the global names that a program defines, and those that it uses."""
    defined = {*dir(builtins), "__name__", "__file__"}
    used: set[str] = set()
    tables = [symtable.symtable(code, "program", "exec")]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        for symbol in table.get_symbols():
            is_global = table.get_type() == "module" or symbol.is_global()
            if is_global and (symbol.is_assigned() or symbol.is_imported()):
                defined.add(symbol.get_name())
            if is_global and symbol.is_referenced():
                used.add(symbol.get_name())
    return defined, used


def _entry_points(code: str) -> set[str]:
    """Return the functions that no other function of the program refers to."""
    functions = [node for node in ast.parse(code).body if isinstance(node, ast.FunctionDef)]
    inner = {
        (function.name, node.id)
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, ast.Name)
    }
    called = {name for function, name in inner if name != function}
    return {function.name for function in functions} - called


def _import_of(name: str) -> str:
    if name in KNOWN:
        return KNOWN[name]
    if name in sys.stdlib_module_names:
        return f"import {name}"
    return f"from typing import {name}" if name in typing.__all__ else ""


def _split_head(code: str, tree: ast.Module) -> tuple[list[str], list[str]]:
    """Split the lines after the docstring and the imports from __future__."""
    end = 0
    for node in tree.body:
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        is_future = isinstance(node, ast.ImportFrom) and node.module == "__future__"
        if not (is_future or (is_docstring and node is tree.body[0])):
            break
        end = node.end_lineno or end
    lines = code.split("\n")
    return lines[:end], lines[end:]
