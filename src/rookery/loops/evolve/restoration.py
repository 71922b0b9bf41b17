"""Names that a whole-program answer left out, restored from its parent.

    restore_names("def pack(): return grow(np.zeros(3))", parent=parent)
    # the parent's `grow`, and `import numpy as np`, above it

Small models often answer with the changed function alone, or without the imports, or with the
imports at the end.
"""

import ast
import builtins
import symtable
import sys
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["restore_names"]

KNOWN = {"np": "import numpy as np"}
"""Names of imports that a program may use although its parent did not."""
MARKER = "EVOLVE-BLOCK-"
BUILT_IN = frozenset({*dir(builtins), "__name__", "__file__"})


@dataclass(frozen=True, slots=True)
class _Statement:
    """A statement at the top of a program, or one name of an import."""

    text: str
    names: frozenset[str]
    """Names that it binds."""
    node: ast.stmt

    @property
    def is_import(self) -> bool:
        return isinstance(self.node, ast.Import | ast.ImportFrom)


def restore_names(code: str, *, parent: str, in_block: bool = False) -> str:
    """Add what a Python program uses and does not define: the parent's imports, functions and
    constants, and modules of the standard library. Add the parent's functions that nothing in it
    calls too, for its evaluator does, if the program redefines any of the parent's. Repeat imports
    on top that come after their first use. With `in_block`, all of this goes into the first marked
    block: the lines around are not the model's. Else it stays out of it, and is not tuned."""
    try:
        restored = _repeat_imports(_restore(code, parent, in_block), in_block)
        ast.parse(restored)
        return restored
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return code


def _restore(code: str, parent: str, in_block: bool) -> str:
    tree, statements = ast.parse(code), _statements(parent)
    defined, used = _names(code)
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    if any(functions & each.names for each in statements):
        used |= _entry_points(parent)
    texts = {each.text for each in _statements(code)}
    stars = "\n".join(
        each.text for each in statements if "*" in each.names and each.text not in texts
    )
    chosen: set[int] = set()
    imports: set[str] = set()
    missing, known = used - defined - _undefined(parent, statements), defined
    while missing:
        known |= missing
        places = {place for name in missing for place in _places(name, statements)} - chosen
        imports |= {text for name in missing if (text := _import_of(name, statements, stars))}
        chosen |= places
        missing = {name for place in places for name in _names(statements[place].text)[1]} - known
    if not chosen and not imports:
        return code
    restored = [statements[place] for place in sorted(chosen)]
    own = {name for each in _statements(code) if not each.is_import for name in each.names}
    needed: dict[str, set[str]] = {}
    for each in restored:
        uses = _names(each.text)[1]
        for name in each.names:
            needed[name] = needed.get(name, set()) | uses
    late = [each for each in restored if not each.is_import and _needs_at_once(each, needed) & own]
    imports_of_parent = [each.text for each in restored if each.is_import]
    early = [each.text for each in restored if not each.is_import and each not in late]
    lines = code.split("\n")
    top, middle, end = _split_places(tree, lines, in_block)
    return "\n".join(
        [
            *lines[:top],
            *dict.fromkeys([*imports_of_parent, *sorted(imports)]),
            *lines[top:middle],
            *early,
            *lines[middle:end],
            *(each.text for each in late),
            *lines[end:],
        ]
    )


def _repeat_imports(code: str, in_block: bool) -> str:
    """Repeat imports on top if a name is used before them, as the program is loaded."""
    tree = ast.parse(code)
    statements = _statements(code)
    bound = set(BUILT_IN)
    early: set[str] = set()
    for each in statements:
        if "*" not in bound:
            early |= set(_names_at_once(each.node)) - bound
        bound |= each.names
    bound = set(BUILT_IN)
    repeated: list[str] = []
    for each in statements:
        if each.is_import and each.names & early - bound:
            repeated.append(each.text)
        bound |= each.names
    lines = code.split("\n")
    top, _, _ = _split_places(tree, lines, in_block)
    return "\n".join([*lines[:top], *repeated, *lines[top:]])


def _statements(code: str) -> list[_Statement]:
    """Return the statements at the top of a program, but imports from __future__."""
    lines = code.split("\n")
    statements = []
    for node in ast.parse(code).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            if isinstance(node, ast.Import) or node.module != "__future__":
                for alias in node.names:
                    text = ast.unparse(_with_names(node, [alias]))
                    statements.append(_Statement(text, frozenset({_name_of(alias)}), node))
            continue
        start = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))])
        text = "\n".join(lines[start - 1 : node.end_lineno])
        if node.col_offset or MARKER in text:  # it shares a line with another statement or a marker
            text = ast.unparse(node)
        statements.append(_Statement(text, frozenset(_bound(node)), node))
    return statements


def _with_names(node: ast.Import | ast.ImportFrom, names: list[ast.alias]) -> ast.stmt:
    if isinstance(node, ast.Import):
        return ast.Import(names=names)
    return ast.ImportFrom(module=node.module, names=names, level=node.level)


def _name_of(alias: ast.alias) -> str:
    return (alias.asname or alias.name).partition(".")[0]


def _bound(node: ast.stmt) -> Iterator[str]:
    """Return the names that a statement binds. Reads no compound statement but `try`, which may
    hold imports."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    targets: Sequence[ast.AST] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign | ast.AugAssign):
        targets = [node.target]
    elif isinstance(node, ast.Try):
        targets = [node]
    for each in [inner for target in targets for inner in ast.walk(target)]:
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
            yield each.id
        elif isinstance(each, ast.alias):
            yield _name_of(each)


def _places(name: str, statements: Sequence[_Statement]) -> list[int]:
    """Return the statements that bind a name: the last one if it replaces the earlier ones."""
    places = [place for place, each in enumerate(statements) if name in each.names]
    is_whole = places and not isinstance(
        statements[places[-1]].node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Try
    )
    return places[-1:] if is_whole else places


def _names(code: str) -> tuple[set[str], set[str]]:
    """Return the names that a program binds as it is loaded, and those that it uses globally."""
    defined = set(BUILT_IN)
    used: set[str] = set()
    tables = [symtable.symtable(code, "program", "exec")]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        is_module = table.get_type() == "module"
        for symbol in table.get_symbols():
            if is_module and (symbol.is_assigned() or symbol.is_imported()):
                defined.add(symbol.get_name())
            if (is_module or symbol.is_global()) and symbol.is_referenced():
                used.add(symbol.get_name())
    return defined, used


def _undefined(code: str, statements: Sequence[_Statement]) -> set[str]:
    """Return the names that a program uses and does not define: its evaluator may."""
    if any("*" in each.names for each in statements):
        return set()
    defined, used = _names(code)
    return used - defined


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


def _import_of(name: str, statements: Sequence[_Statement], stars: str) -> str:
    """Return an import for a name that no statement binds, or an empty text. `stars` are the
    parent's imports of all names that the program lacks."""
    if any(name in each.names for each in statements):
        return ""
    if name in KNOWN:
        return KNOWN[name]
    if stars:
        return stars
    if name in sys.stdlib_module_names:
        return f"import {name}"
    return f"from typing import {name}" if name in typing.__all__ else ""


def _needs_at_once(statement: _Statement, needed: Mapping[str, set[str]]) -> set[str]:
    """Return the names that a statement needs as the program is loaded, with those that the
    restored functions need which it may call. `needed` has the latter by the functions' names."""
    needs: set[str] = set()
    missing = set(_names_at_once(statement.node))
    while missing:
        needs |= missing
        missing = {each for name in missing for each in needed.get(name, ())} - needs
    return needs


def _names_at_once(tree: ast.AST) -> Iterator[str]:
    """Return the names that are evaluated as the program is loaded: not those in functions."""
    nodes = [tree]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            nodes += [*node.decorator_list, node.args, *([node.returns] if node.returns else [])]
        elif isinstance(node, ast.Lambda):
            nodes.append(node.args)
        else:
            nodes += ast.iter_child_nodes(node)


def _split_places(tree: ast.Module, lines: Sequence[str], in_block: bool) -> tuple[int, int, int]:
    """Return the numbers of lines above which restored imports, statements, and statements that
    need the program's own go. Statements go below the imports."""
    top = middle = 0
    is_open = True
    for number, node in enumerate(tree.body):
        is_docstring = not number and isinstance(node, ast.Expr)
        is_future = isinstance(node, ast.ImportFrom) and node.module == "__future__"
        if is_docstring or is_future:
            top = node.end_lineno or top
        is_open = is_open and (is_docstring or isinstance(node, ast.Import | ast.ImportFrom))
        if is_open:
            middle = node.end_lineno or middle
    start, end = _first_block(tree, lines)
    if start and not in_block:
        middle = min(middle, start - 1)
        start, end = 0, len(lines)
    top = max(top, start)
    guards = [
        node.lineno - 1
        for node in tree.body
        if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test) and node.lineno > top
    ]
    middle = max(top, min(middle, end))
    return top, middle, max(middle, min([*guards, end]))


def _first_block(tree: ast.Module, lines: Sequence[str]) -> tuple[int, int]:
    """Return the numbers of lines between the first two markers that are outside of statements, or
    of all lines."""
    inside = {
        number for node in tree.body for number in range(node.lineno, (node.end_lineno or 0) + 1)
    }
    marked = [
        number
        for number, line in enumerate(lines, start=1)
        if line.lstrip().startswith("#") and MARKER in line and number not in inside
    ]
    if len(marked) < 2 or "START" not in lines[marked[0] - 1]:
        return 0, len(lines)
    return marked[0], marked[1] - 1
