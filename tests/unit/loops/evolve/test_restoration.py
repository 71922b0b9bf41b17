"""What a whole-program answer left out, restored from its parent."""

import pytest

from rookery.loops.evolve.answers import AnswerRules, ChildProgram, read_answer
from rookery.loops.evolve.program import ProgramRecord
from rookery.loops.evolve.restoration import restore_names

PARENT = '''"""Numbers."""

from __future__ import annotations

import functools, math
from collections.abc import Callable as Function

LIMIT: int = 4


# EVOLVE-BLOCK-START
@functools.cache
def double(x):
    return 2 * x  # twice


def place():
    return [double(x) for x in range(LIMIT)]


def top() -> list[float]:
    return [math.sqrt(x) for x in place()]


# EVOLVE-BLOCK-END
'''


def run(code: str) -> list[float]:
    names: dict[str, object] = {}
    exec(code, names)  # the program of this test
    top = names["top"]
    assert callable(top)
    result: list[float] = top()
    return result


def test_a_function_alone_replaces_the_one_of_its_parent() -> None:
    child = restore_names("def place():\n    return [1, double(2)]", parent=PARENT)
    assert run(child) == [1.0, 2.0]
    assert child.startswith("import functools\nimport math\n@functools.cache\ndef double(x):")
    assert "LIMIT" not in child and "Callable" not in child, "nothing uses them"


def test_imports_that_are_used_are_added_below_the_docstring() -> None:
    code = '"""New."""\nfrom __future__ import annotations\nimport os\n\nclass A:\n    '
    code += (
        "def f(self) -> Function:\n        return Function(List, np.ones(LIMIT), random, no_one)\n"
    )
    lines = restore_names(code, parent=PARENT).split("\n")
    assert lines[:2] == code.split("\n")[:2]
    assert lines[2:7] == [
        "from collections.abc import Callable as Function",
        "from typing import List",
        "import numpy as np",
        "import random",
        "LIMIT: int = 4",
    ]
    assert lines[7:] == code.split("\n")[2:]


@pytest.mark.parametrize(
    "code",
    [
        PARENT,
        "def (",
        "\0",
        "def other():\n    return [1]",
        "x = 3",
        "def top():\n    global seen\n    seen = 1\n    return [len([y for y in [seen]])]",
    ],
)
def test_what_lacks_nothing_of_its_parent_stays(code: str) -> None:
    assert restore_names(code, parent=PARENT) == code
    assert restore_names(code, parent="def (") == code


def test_an_answer_is_restored() -> None:
    rules = AnswerRules(language="python", is_diff=False)
    answer = "```python\ndef place():\n    return [4]\n```"
    child = read_answer(answer, parent=ProgramRecord(id="p1", code=PARENT), rules=rules)
    assert isinstance(child, ChildProgram) and run(child.code) == [2.0]
