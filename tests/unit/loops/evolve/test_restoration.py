"""What a whole-program answer left out, restored from its parent."""

import pytest

from rookery.loops.evolve.answers import AnswerRules, ChildProgram, read_answer
from rookery.loops.evolve.program import ProgramRecord
from rookery.loops.evolve.restoration import restore_names
from rookery.loops.evolve.tuning import lift_constants

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
    assert lines[2:8] == [
        "from collections.abc import Callable as Function",
        "from typing import List",
        "import numpy as np",
        "import random",
        "import os",
        "LIMIT: int = 4",
    ]
    assert lines[8:] == code.split("\n")[3:]


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


@pytest.mark.parametrize(
    ("parent", "answer", "value"),
    [
        ("x = [1,\n 2]; y = 3", "def top(): return [y]", [3]),
        ("def f(): return 1\ny = f()", "def f(): return 2\ndef top(): return [y]", [2]),
        (
            "y = 1",
            "def top(): return [y]\nif __name__ != '__main__':\n    assert top()",
            [1],
        ),
        (
            "import math\ny = math.floor(2.5)",
            "import math\ndef top(): return [y]",
            [2],
        ),
        ("y = 4", "def top():\n    global y\n    y += 1\n    return [y]", [5]),
        ("x, y = 1, 2", "def top(): return [y]", [2]),
        ("y = 1\ny += 2\ny = y + 1", "def top(): return [y]", [4]),
        ("def y(): return 1\ndef y(): return 2", "def top(): return [y()]", [2]),
        (
            "try:\n    import no_such as y\nexcept ImportError:\n    y = 7",
            "def top(): return [y]",
            [7],
        ),
        ("from math import *\nfrom cmath import *", "def top(): return [floor(2.5)]", [2]),
        ("annotations = 8", "def top(): return [annotations]", [8]),
        ("", "def top(x: List = ()) -> Callable: return [1]\nfrom typing import *", [1]),
        ("", "def top(x: Deque = ()): return [1]\nfrom collections import deque as Deque", [1]),
        ("", "class A:\n    y = os.sep\ndef top(): return [1]\nimport os.path\nimport os", [1]),
    ],
)
def test_what_is_restored_can_run(parent: str, answer: str, value: list[float]) -> None:
    assert run(restore_names(answer, parent=parent)) == value


@pytest.mark.parametrize(
    "answer",
    [
        "def top(): return [signal]",
        "import math\ndef top(): return [math.pi]\nimport os\nprint(os)",
        "total = sum([1])\nfrom numpy import sum",
        "from math import *\nhalf = pi / 2\nfrom numpy import pi",
        "x = " + "-" * 5000 + "y",
    ],
)
def test_what_an_evaluator_gives_and_imports_in_time_stay(answer: str) -> None:
    assert restore_names(answer, parent="def top(): return [signal, 1]") == answer
    assert restore_names(answer, parent=answer) == answer


def test_long_sums_and_chains_of_constants_are_restored() -> None:
    parent = "import math\nx0 = math.pi\n" + "".join(f"x{i + 1} = x{i}\n" for i in range(800))
    answer = "def top(): return [x800]\ny = " + " + ".join(["0.5"] * 900)
    assert run(restore_names(answer, parent=parent))[0] > 3


def test_marked_blocks_hold_what_is_restored() -> None:
    """The lines around them are not the model's."""
    parent = """import math
FROZEN = 1
# EVOLVE-BLOCK-START
def half(): return 0.5
def top(): return [half()]
y = top()  # last
# EVOLVE-BLOCK-END
if __name__ == "__main__":
    print(top())
"""
    answer = parent.replace("def half(): return 0.5\n", "").replace("y = top()  # last\n", "")
    answer = answer.replace("half()]", "half(), len(y) if 'y' in globals() else 0]")
    rules = AnswerRules(language="python", is_diff=False, enforce_blocks=True)
    child = read_answer(
        f"```python\n{answer}```", parent=ProgramRecord(id="p1", code=parent), rules=rules
    )
    assert isinstance(child, ChildProgram) and run(child.code) == [0.5, 2]
    for part in (parent.split("# EVOLVE")[0], "# EVOLVE" + parent.split("# EVOLVE")[2]):
        assert part in child.code


def test_what_is_restored_stays_out_of_blocks_that_are_not_enforced() -> None:
    """A tuning changes the numbers in them."""
    answer = "# EVOLVE-BLOCK-START\nimport math\ndef top(): return [y]\n# EVOLVE-BLOCK-END"
    code = restore_names(answer, parent="y = 1.5\n")
    assert run(code) == [1.5] and lift_constants(code) == ()


def test_a_marker_of_the_parent_is_not_restored() -> None:
    parent = "# EVOLVE-BLOCK-START\ndef f(): return 3  # EVOLVE-BLOCK-END"
    assert "EVOLVE" not in restore_names("def top(): return [f()]", parent=parent)


def test_an_answer_is_restored() -> None:
    rules = AnswerRules(language="python", is_diff=False)
    answer = "```python\ndef place():\n    return [4]\n```"
    child = read_answer(answer, parent=ProgramRecord(id="p1", code=PARENT), rules=rules)
    assert isinstance(child, ChildProgram) and run(child.code) == [2.0]
