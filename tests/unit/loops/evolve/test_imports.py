"""Imports that a whole-program answer left out, or wrote below their first use."""

import pytest

from rookery.loops.evolve.answers import AnswerRules, ChildProgram, read_answer
from rookery.loops.evolve.imports import add_imports
from rookery.loops.evolve.program import ProgramRecord

PARENT = '''"""Numbers."""

from __future__ import annotations

import functools, math
from collections.abc import Callable as Function

LIMIT: int = 4


def top() -> list[float]:
    return [math.sqrt(x) for x in given(LIMIT)]
'''


def added(code: str, parent: str = PARENT) -> list[str]:
    """The lines that were added, all in one place."""
    lines, after = code.split("\n"), add_imports(code, parent=parent).split("\n")
    num = len(after) - len(lines)
    places = [i for i in range(len(lines) + 1) if after[:i] + after[i + num :] == lines]
    return after[places[0] : places[0] + num]


def test_imports_that_are_used_are_added_below_the_docstring() -> None:
    code = '"""New."""\nfrom __future__ import annotations\nimport os\n\nclass A:\n    '
    code += "def f(self) -> Function:\n        return Function(List, np.ones(os.n), random, any)\n"
    assert added(code) == [
        "from collections.abc import Callable as Function",
        "from typing import List",
        "import numpy as np",
        "import random",
    ]
    assert add_imports(code, parent=PARENT).split("\n")[:2] == code.split("\n")[:2]


def test_imports_below_their_first_use_are_repeated_on_top() -> None:
    code = "def top(f: Callable) -> float:\n    return f()\n\nfrom collections.abc import Callable"
    assert added(code, parent="x = 1") == ["from collections.abc import Callable"]
    exec(add_imports(code, parent="x = 1"), {})  # the program of this test


@pytest.mark.parametrize(
    "code",
    [
        PARENT,
        "def (",
        "\0",
        "x = " + "-" * 5000 + "y",
        "def top(math):\n    return [given(math)]",
        "math = 3\nx = math",
        "from math import *\nx = [functools, pi]",
        "x = given + abs(1)",
        "import math\nx = math.pi",
        "def f():\n    import math\n    return math.pi",
        "try:\n    import math\nexcept ImportError:\n    pass\nx = math",
        "x = [functools for functools in range(3)]",
        "",
    ],
)
def test_a_program_that_lacks_none_stays(code: str) -> None:
    assert add_imports(code, parent=PARENT) == code
    assert add_imports(code, parent="def (") == code


def test_imports_are_added_to_an_answer() -> None:
    rules = AnswerRules(language="python", is_diff=False)
    answer = "```python\ndef top():\n    return [math.pi]\n```"
    child = read_answer(answer, parent=ProgramRecord(id="p1", code=PARENT), rules=rules)
    assert isinstance(child, ChildProgram)
    assert child.code == "import math\ndef top():\n    return [math.pi]"
