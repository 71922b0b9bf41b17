"""Functions of a program, written out as the numbers that they return.

    names = find_functions(code)              # they compute, take nothing, and others call them
    text = add_reports(code, names)           # the program, which also prints what they return
    tables = read_reports(output, code, names)          # {"layout": "[(0.5, 0.5), (0.2, 0.8)]"}
    write_tables(code, tables)                # def layout(): return [(0.5, 0.5), (0.2, 0.8)]

The numbers can then be tuned one by one. A function that nothing in the program calls is left as it
is: it is what the evaluator asks for.
"""

import ast
from collections.abc import Mapping, Sequence

from rookery.loops.evolve.tuning.constants import MAX_CONSTANTS, open_lines

__all__ = ["add_reports", "find_functions", "read_reports", "write_tables"]

MARK = "rookery-table"
MAX_CHARS = 6000
"""Limit of one table's text: the end of a program's output that is kept has 8192 bytes."""
REPORTER = """
def _rookery_report(function):
    def plain(value):
        if type(value).__name__ == "ndarray":
            return f"{ARRAY}({plain(value.tolist())})"
        if isinstance(value, (list, tuple)):
            text = ", ".join(map(plain, value))
            if isinstance(value, list):
                return f"[{text}]"
            return f"({text},)" if len(value) == 1 else f"({text})"
        if isinstance(value, bool):
            return "bool"
        return repr(int(value)) if isinstance(value, int) else repr(float(f"{float(value):.9g}"))

    told = []

    def reporting():
        value = function()
        try:
            text = plain(value)
        except (TypeError, ValueError, RecursionError):
            text = "other"
        if text not in told and len(told) < 2:
            told.append(text)
            text = "other" if len(told) > 1 else text
            print(f"\\nMARK {function.__name__} {text[:LIMIT]}", flush=True)
        return value

    return reporting


"""
"""Prints what a function returns, and `other` if another call returns something else."""


def find_functions(code: str) -> tuple[str, ...]:
    """Find the functions that can be written out: without arguments, in the open blocks, called by
    another function, and calling none of these themselves."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError):
        return ()
    opened, lines, array = open_lines(code), _split(code), _array(tree)
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    calls = {name: _calls(node) for name, node in functions.items()}
    called = {each for name, names in calls.items() for each in names if each != name}
    candidates = {
        name
        for name, node in functions.items()
        if name in called
        and _computes_alone(node, lines, array)
        and (opened is None or opened.issuperset(range(node.lineno, _end(node) + 1)))
    }
    return tuple(name for name in functions if name in candidates and not calls[name] & candidates)


def add_reports(code: str, names: Sequence[str]) -> str:
    """Return the program with prints of what these functions return."""
    lines, functions = _split(code), _functions(code)
    starts = sorted(functions[name].lineno - 1 for name in names)
    for start in reversed(starts):
        lines.insert(start, "@_rookery_report\n")
    reporter = REPORTER.replace("MARK", MARK).replace("LIMIT", str(MAX_CHARS))
    lines.insert(starts[0], reporter.replace("{ARRAY}", _array(ast.parse(code))))
    return "".join(lines)


def read_reports(output: str, code: str, names: Sequence[str]) -> dict[str, str]:
    """Read the tables: of functions that returned numbers, in every call the same ones."""
    reports: dict[str, set[str]] = {name: set() for name in names}
    array = _array(ast.parse(code))
    for line in output.splitlines():
        mark, _, report = line.partition(" ")
        name, _, text = report.partition(" ")
        if mark == MARK and name in reports:
            reports[name].add(text)
    return {
        name: text
        for name, texts in reports.items()
        if len(texts) == 1 and _is_table_text(text := next(iter(texts)), array=array)
    }


def write_tables(code: str, tables: Mapping[str, str]) -> str:
    """Replace the bodies of functions by their tables. Docstrings stay."""
    lines, functions = _split(code), _functions(code)
    for name in sorted(tables, key=lambda name: functions[name].lineno, reverse=True):
        node = functions[name]
        start, indent = _start(_body(node)[0], lines)
        text = (
            tables[name].replace("), (", f"),\n{indent}    (").replace("], [", f"],\n{indent}    [")
        )
        lines[start - 1 : node.end_lineno] = [f"{indent}return {text}\n"]
    return "".join(lines)


def _functions(code: str) -> dict[str, ast.FunctionDef]:
    """Return the last definition of each name, which is the one that counts."""
    return {node.name: node for node in ast.parse(code).body if isinstance(node, ast.FunctionDef)}


def _calls(function: ast.FunctionDef) -> set[str]:
    return {
        node.func.id
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }


def _body(function: ast.FunctionDef) -> list[ast.stmt]:
    """Return the statements after the docstring."""
    has_docstring = ast.get_docstring(function, clean=False) is not None
    return function.body[1 if has_docstring else 0 :]


def _computes_alone(function: ast.FunctionDef, lines: Sequence[str], array: str) -> bool:
    """Return True for a plain function without arguments that is not a table already."""
    body, args = _body(function), function.args
    named = [*args.posonlyargs, *args.args, *args.kwonlyargs]
    if named or args.vararg or args.kwarg or function.decorator_list or not body:
        return False
    if any(isinstance(node, ast.Yield | ast.YieldFrom) for node in ast.walk(function)):
        return False
    first = body[0]
    begins_line = not _start(first, lines)[1].strip()
    is_table = isinstance(first, ast.Return) and _is_table(first.value, array=array)
    return begins_line and not is_table


def _start(statement: ast.stmt, lines: Sequence[str]) -> tuple[int, str]:
    """Return the number of a statement's first line, and what is before it on this line."""
    decorators = getattr(statement, "decorator_list", [])
    start = min([statement.lineno, *(each.lineno for each in decorators)])
    return start, lines[start - 1].encode()[: statement.col_offset].decode()


def _end(function: ast.FunctionDef) -> int:
    return function.end_lineno or function.lineno


def _split(code: str) -> list[str]:
    """Split into lines as Python does."""
    return [line.decode() for line in code.encode().splitlines(keepends=True)]


def _array(tree: ast.Module) -> str:
    """Return how the program calls `numpy.array`, or an empty text if it has no numpy."""
    for node in tree.body:
        for alias in node.names if isinstance(node, ast.Import) else ():
            if alias.name == "numpy":
                return f"{alias.asname or alias.name}.array"
    return ""


def _is_table_text(text: str, *, array: str) -> bool:
    """Return True if a program's output is a table, without a comment: it could be a marker."""
    try:
        return "#" not in text and _is_table(ast.parse(text, mode="eval").body, array=array)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def _is_table(node: ast.expr | None, *, array: str) -> bool:
    """Return True for lists, tuples and arrays of finite numbers, few enough to be tuned."""
    num_numbers, nodes = 0, [node]
    while nodes:
        match nodes.pop():
            case ast.List(elts=elements) | ast.Tuple(elts=elements):
                nodes += elements
            case ast.Call(func=ast.Attribute() as function, args=[inner], keywords=[]) if (
                isinstance(function.value, ast.Name)
                and f"{function.value.id}.{function.attr}" == array
            ):
                nodes.append(inner)
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant() as inner):
                nodes.append(inner)
            case ast.Constant(value=number) if type(number) in (int, float):
                num_numbers += 1
            case _:
                return False
    return 0 < num_numbers <= MAX_CONSTANTS
