"""Tables of adversarial answers for the scorers that compare texts."""

import asyncio
import math
import re
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError
from tasks.drawn import completion, task

from rookery.errors import TaskError
from rookery.ports import Scorer
from rookery.tasks.scorers import (
    SCORERS,
    ChoiceConfig,
    ExactConfig,
    JsonSchemaConfig,
    JudgeConfig,
    MathConfig,
    NumericConfig,
    PythonConfig,
    RegexConfig,
    ScorerConfig,
    build_scorer,
)
from rookery.types import Json

LOOSE = ExactConfig(ignore_case=True, ignore_punctuation=True)


def test_every_scorer_of_the_dict_is_in_the_union_and_is_a_scorer(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def one(task, completion): return 1")
    needs: dict[str, dict[str, object]] = {
        "judge": {"model": "base@1"},
        "json_schema": {"match_reference": True},
        "python": {"function": f"{tmp_path}/mine.py:one"},
        "regex": {"pattern": "x"},
    }
    for name in SCORERS:
        config = TypeAdapter(ScorerConfig).validate_python({"type": name, **needs.get(name, {})})
        if not isinstance(config, JudgeConfig):
            scorer = build_scorer(config)
            assert isinstance(scorer, Scorer)
            assert scorer.answer == ("choose" if name == "choice" else "sample")


@pytest.mark.parametrize(
    ("config", "reference", "text", "reward"),
    [
        (ExactConfig(), "4", "4", 1),
        (ExactConfig(), "4", " 4\n", 1),
        (ExactConfig(), "4", "4.", 0),
        (ExactConfig(), "4", "", 0),
        (LOOSE, "4", "", 0),
        (ExactConfig(), "4", "44", 0),
        (ExactConfig(), 4, "4", 1),
        (ExactConfig(), 2.5, "2.5", 1),
        (ExactConfig(), True, "True", 1),
        (ExactConfig(), True, "true", 1),
        (ExactConfig(), True, "1", 0),
        (ExactConfig(), ["4", "four"], "four", 1),
        (ExactConfig(), ["4", "four"], "five", 0),
        (ExactConfig(), "New York", "New \n York", 1),
        (ExactConfig(), "Paris", "paris", 0),
        (ExactConfig(), "caf\u00e9", "cafe\u0301", 1),
        (ExactConfig(strip=False), "4", " 4", 0),
        (ExactConfig(strip=False), "4", "4", 1),
        (ExactConfig(ignore_case=True), "Straße", "STRASSE", 1),
        (LOOSE, "Paris", '"Paris".', 1),
        (LOOSE, "Paris", "**paris!**", 1),
        (LOOSE, "Paris", "paris texas", 0),
        (LOOSE, "3.5", "35", 0),
        (LOOSE, "1/2", "12", 0),
        (LOOSE, "-3", "3", 0),
        (LOOSE, "3", "(3)", 1),
        (LOOSE, "3", "3.", 1),
        (LOOSE, "don't", "dont", 1),
    ],
)
async def test_exact(config: Any, reference: Json, text: str, reward: float) -> None:
    assert await build_scorer(config).reward(task(reference), completion(text)) == reward


@pytest.mark.parametrize(
    ("config", "reference", "words"),
    [
        (ExactConfig(), None, "exact needs a text"),
        (ExactConfig(), {"a": 1}, "exact needs a text, a number or a list of them .* got dict"),
        (ExactConfig(), "  ", "nothing is left to compare"),
        (LOOSE, "?!", "nothing is left to compare"),
        (ExactConfig(), [], "exact needs a text"),
        (NumericConfig(), "many", "numeric needs a number"),
        (NumericConfig(), None, "numeric needs a number .* got none"),
        (NumericConfig(), "1/0", "numeric needs a number"),
        (MathConfig(), None, "math needs a formula"),
        (RegexConfig(pattern="(x)", group=1), None, "group 1 with the reference"),
        (JsonSchemaConfig(match_reference=True), "none", "needs a JSON object"),
        (ChoiceConfig(), "red", "choice needs at least two choices, got 0"),
    ],
)
async def test_a_task_that_cannot_be_judged_is_an_error_and_never_zero(
    config: Any, reference: Json, words: str
) -> None:
    with pytest.raises(TaskError, match=words):
        await build_scorer(config).reward(task(reference), completion("4"))


@pytest.mark.parametrize(
    ("choices", "reference", "right"),
    [
        (("red", "blue"), "blue", "blue"),
        (("red", "blue"), 1, "blue"),
        (("red", "blue"), "B", "blue"),
        (("A", "B"), "B", "B"),
        (("AB", "0", "B"), "AB", "AB"),
        (("O", "A", "B", "AB"), 2, "B"),
        (("red ", "blue"), "red", "red "),
        (("2", "1", "0"), 0, "2"),
        (("2", "1", "0"), "0", "0"),
        (("True", "False"), False, "False"),
        (("no", "yes"), "yes", "yes"),
    ],
)
async def test_choice(choices: tuple[str, ...], reference: Json, right: str) -> None:
    scorer = build_scorer(ChoiceConfig())
    for choice in choices:
        made = task(reference, choices=choices)
        assert await scorer.reward(made, completion(choice)) == float(choice == right)


@pytest.mark.parametrize(
    ("choices", "reference", "words"),
    [
        (("red", "blue"), 2, "reference 2, which is none of 2 choices"),
        (("red", "blue"), -1, "reference -1"),
        (("red", "blue"), "1", "its index from 0 as a number"),
        (("red", "blue"), "C", "reference 'C'"),
        (("red", "blue"), "", "reference ''"),
        (("red", "blue"), True, "reference True"),
        (("red", "blue"), None, "reference None"),
        (("O", "A", "B", "AB"), "B", "text of choice 2 and the letter of choice 1 .*2 or 1"),
        (("O", "A ", "B", "AB"), " A", "text of choice 1 and the letter of choice 0"),
        (("red", "red"), "red", "choices that differ"),
        (("red",), "red", "at least two"),
    ],
)
async def test_choice_refuses_a_reference_that_does_not_name_one(
    choices: tuple[str, ...], reference: Json, words: str
) -> None:
    with pytest.raises(TaskError, match=words):
        await build_scorer(ChoiceConfig()).reward(task(reference, choices=choices), completion("x"))


async def test_a_chosen_text_that_is_no_choice_is_the_callers_error() -> None:
    with pytest.raises(TaskError, match=r"' red' was chosen, which is none of the choices"):
        await build_scorer(ChoiceConfig()).reward(
            task("red", choices=("red", "blue")), completion(" red")
        )


@pytest.mark.parametrize(
    ("pattern", "group", "reference", "text", "reward"),
    [
        (r"\bred\b", None, None, "it is red.", 1),
        (r"\bred\b", None, None, "bored", 0),
        (r"answer is (\w+)", 1, "red", "The answer is red", 1),
        (r"answer is (\w+)", 1, "red", "answer is blue, no, the answer is red", 1),
        (r"answer is (\w+)", 1, "red", "answer is red, no, the answer is blue", 0),
        (r"answer is (\w+)", 1, "red", "no idea", 0),
        (r"(?i)answer: (?P<a>.*)", "a", "red", "ANSWER:  red \n", 1),
        (r"a(b)?", 1, "b", "a", 0),
        (r"\d+", 0, 42, "so 42", 1),
        (r"\d+", 0, ["41", "42"], "so 42", 1),
    ],
)
async def test_regex(
    pattern: str, group: str | int, reference: Json, text: str, reward: float
) -> None:
    scorer = build_scorer(RegexConfig(pattern=pattern, group=group))
    assert await scorer.reward(task(reference), completion(text)) == reward


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"pattern": "("}, "not a regular expression"),
        ({"pattern": "x", "group": 1}, "has no group 1; it has 0"),
        ({"pattern": "(?P<a>x)", "group": "b"}, "has no group 'b'; it has 0, 1, a"),
    ],
)
def test_a_wrong_pattern_is_refused_in_the_config(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        RegexConfig(**fields)


SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["a"],
    "properties": {"a": {"type": "integer"}},
}


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ('{"a": 1}', 1),
        ('Sure! {"a": 1} Anything else?', 1),
        ('```json\n{"a": 1}\n```', 1),
        ('Not {"b": 2} but\n```\n{"a": 1}\n```', 1),
        ('```python\nx = 1\n```\nthen {"a": 1}', 1),
        ('{"a": "1"}', 0),
        ('{"a": true}', 0),
        ('{"a": NaN}', 0),
        ("[1]", 0),
        ("{}", 0),
        ("", 0),
        ('{"a": 1', 0),
        ("{'a': 1}", 0),
        ("{not json} {" * 50, 0),
        ("[" * 100_000, 0),
        ('{"a":' * 20_000, 0),
    ],
)
async def test_json_schema(text: str, reward: float) -> None:
    scorer = build_scorer(JsonSchemaConfig(json_schema=SCHEMA))
    assert await scorer.reward(task(None), completion(text)) == reward


@pytest.mark.parametrize(
    ("reference", "text", "reward"),
    [
        ({"a": 1, "b": [2]}, '{"b": [2.0], "a": 1}', 1),
        ({"a": 1}, '{"a": true}', 0),
        ({"a": 1}, '{"a": 1, "b": 2}', 0),
        ([1, 2], "[2, 1]", 0),
        ([], "nothing: []", 1),
        ('{"a": 1}', '{"a": 1}', 1),
        ({"a": None}, '{"a": null}', 1),
    ],
)
async def test_json_that_must_equal_the_reference(
    reference: Json, text: str, reward: float
) -> None:
    scorer = build_scorer(JsonSchemaConfig(match_reference=True))
    assert await scorer.reward(task(reference), completion(text)) == reward


def test_a_schema_that_is_none_or_says_nothing_is_refused() -> None:
    with pytest.raises(TaskError, match="an invalid schema"):
        build_scorer(JsonSchemaConfig(json_schema={"type": "objekt"}))
    with pytest.raises(ValidationError, match="give json_schema, or match_reference"):
        JsonSchemaConfig()


async def test_a_schema_does_not_fetch_another() -> None:
    asked = []

    class Schemas(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(404)
            self.end_headers()

    with ThreadingHTTPServer(("127.0.0.1", 0), Schemas) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        config = JsonSchemaConfig(json_schema={"$ref": f"http://127.0.0.1:{server.server_port}/x"})
        try:
            with pytest.raises(TaskError, match="applying the JSON Schema: Unresolvable: http:"):
                await build_scorer(config).reward(task(None), completion("{}"))
        finally:
            server.shutdown()
            thread.join()
    assert asked == []


USER_FILE = """
import asyncio
from dataclasses import dataclass

@dataclass
class Opinion:
    value: float

def length(task, completion): return len(completion.text)
def is_right(task, completion): return completion.text == task.reference
async def later(task, completion):
    await asyncio.sleep(0)
    return 0.25
class Callable:
    async def __call__(self, task, completion): return 0.5
instance = Callable()
def nothing(task, completion): return None
def nan(task, completion): return float("nan")
def huge(task, completion): return 10**5000
def large(task, completion): return -1e308
def leaves(task, completion): raise SystemExit(3)
async def leaves_later(task, completion): raise SystemExit("stop")
def text(task, completion): return "1.0"
def fails(task, completion): raise KeyError("colour")
not_a_function = 3
"""


@pytest.fixture
def user_file(tmp_path: Path) -> Path:
    path = tmp_path / "my_rewards.py"
    path.write_text(USER_FILE)
    return path


@pytest.mark.parametrize(
    ("name", "reward"), [("length", 3.0), ("is_right", 1.0), ("later", 0.25), ("instance", 0.5)]
)
async def test_python(name: str, reward: float, user_file: Path) -> None:
    scorer = build_scorer(PythonConfig(function=f"{user_file}:{name}"))
    got = await scorer.reward(task("red"), completion("red"))
    assert got == reward
    assert type(got) is float


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nothing", r"my_rewards\.py:nothing returned None \(NoneType\); return a finite number"),
        ("nan", "returned nan"),
        ("leaves", r"called exit\(3\)"),
        ("leaves_later", r"called exit\(stop\)"),
        ("huge", r"a number of more than 300 digits \(int\)"),
        ("large", r"returned -1e\+308 \(float\); return a finite number up to 1e\+100"),
        ("text", r"returned '1\.0' \(str\)"),
        ("fails", "my_rewards.py:fails failed: 'colour'"),
    ],
)
async def test_python_that_does_not_return_a_number(name: str, words: str, user_file: Path) -> None:
    with pytest.raises(TaskError, match=words):
        await build_scorer(PythonConfig(function=f"{user_file}:{name}")).reward(
            task("red"), completion("red")
        )


async def test_python_of_an_installed_module() -> None:
    with pytest.raises(TaskError, match="the scorer math:isclose failed"):
        await build_scorer(PythonConfig(function="math:isclose")).reward(task(1), completion("1"))
    assert math.isclose(1, 1)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("nowhere_at_all:f", "Importing the scorer module nowhere_at_all.*Install it, or name"),
        ("nowhere.py:f", r"There is no scorer file nowhere\.py"),
        ("{file}:wrong", "has no wrong; its functions are fails, huge, is_right, large, later"),
        ("{file}:not_a_function", "has no not_a_function"),
    ],
)
def test_python_that_cannot_be_found(function: str, words: str, user_file: Path) -> None:
    with pytest.raises(TaskError, match=words):
        build_scorer(PythonConfig(function=function.format(file=user_file)))


def test_python_file_with_a_syntax_error_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def f(:")
    with pytest.raises(TaskError, match=r"Reading the scorer file .*broken\.py"):
        build_scorer(PythonConfig(function=f"{tmp_path}/broken.py:f"))


@pytest.mark.parametrize("function", ["f", "a:", ":f", "a:b c"])
def test_python_needs_a_file_and_a_function(function: str) -> None:
    with pytest.raises(ValidationError, match="does not name a function"):
        PythonConfig(function=function)


async def test_a_stop_iteration_of_python_is_an_error_of_its_task(tmp_path: Path) -> None:
    """asyncio cannot carry one out of a thread: whoever waited would wait for ever."""
    file = tmp_path / "scorer.py"
    file.write_text("def first(task, completion): return float(next(iter(())))")
    scorer = build_scorer(PythonConfig(function=f"{file}:first"))
    with pytest.raises(TaskError, match="raised StopIteration"):
        await asyncio.wait_for(scorer.reward(task("1"), completion("x")), 30)


async def test_a_call_of_python_that_does_not_end_costs_its_answer_alone(tmp_path: Path) -> None:
    """A plain function and an async one; the limit of a call begins when the one before ended. The
    end of the program does not wait for them."""
    file = tmp_path / "scorer.py"
    file.write_text(SLOW)
    gate, before = threading.Event(), set(threading.enumerate())
    for name in ("plain", "later"):
        scorer = build_scorer(PythonConfig(function=f"{file}:{name}", timeout_s=0.2))
        answers = [completion(text) for text in ("hangs", *"abcd")]
        found = await asyncio.gather(
            *(scorer.reward(task(gate), answer) for answer in answers), return_exceptions=True
        )
        assert found[1:] == [1.0] * 4
        assert isinstance(found[0], TaskError)
        assert re.search(f"{name} took longer than 0.2 s.*scorer.timeout_s", str(found[0]))
    with pytest.raises(TaskError, match="failed: its own limit"):
        await scorer.reward(task("1"), completion("own"))
    hung = set(threading.enumerate()) - before
    assert hung and all(thread.daemon for thread in hung)
    gate.set()


SLOW = """
import asyncio

def plain(task, completion):
    if completion.text == "hangs":
        task.reference.wait(300)
    return 1.0

async def later(task, completion):
    if completion.text == "own":
        raise TimeoutError("its own limit")
    if completion.text == "hangs":
        await asyncio.Event().wait()
    return 1.0
"""

READINGS = [
    (NumericConfig(), ["The answer is 12", "#### 12", "12.0"], "12"),
    (ExactConfig(ignore_case=True), ["Paris", " paris "], "paris"),
    (RegexConfig(pattern=r"is (\w+)", group=1), ["it is red", "is blue? it is red "], "red"),
    (MathConfig(), [r"so \boxed{\frac{1}{2}}", r"\boxed{ \frac{1}{2} }"], r"\frac{1}{2}"),
    (JsonSchemaConfig(match_reference=True), ['{"b": 1, "a": 2}', 'x {"a": 2, "b": 1}'],
     '{"a": 2, "b": 1}'),
]  # fmt: skip


@pytest.mark.parametrize(("config", "texts", "answer"), READINGS, ids=lambda v: str(v)[:20])
def test_texts_that_a_scorer_reads_alike_are_one_answer(
    config: Any, texts: Sequence[str], answer: str | None
) -> None:
    scorer = build_scorer(config)
    assert {scorer.read(completion(text)) for text in texts} == {answer}
    assert build_scorer(NumericConfig()).read(completion("none")) is None
