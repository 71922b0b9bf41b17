import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from rookery.config import Config, load_config
from rookery.errors import ConfigError, RookeryError, TaskError
from rookery.tasks.scorers import (
    ChoiceConfig,
    ExactConfig,
    JudgeConfig,
    NumericConfig,
    PythonConfig,
    RegexConfig,
)
from rookery.tasks.splits import SPLITS
from rookery.tasks.taskset import (
    GeneratedConfig,
    HfConfig,
    JsonlConfig,
    Taskset,
    TasksetConfig,
    join_splits,
    load_taskset,
    load_taskset_file,
)
from rookery.types import Json, Message, SamplingParams


def write(path: Path, rows: Iterable[object]) -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def load(tmp_path: Path, rows: Iterable[object], **fields: Any) -> Taskset:
    return load_taskset(JsonlConfig(path=write(tmp_path / "data.jsonl", rows), **fields))


def test_rows_become_tasks_in_file_order(tmp_path: Path) -> None:
    made = load(
        tmp_path,
        [
            {"id": 7, "prompt": "2+2=", "answer": "4"},
            "",
            {"id": "b", "prompt": "1+1=", "answer": 2},
        ],
    )
    assert [task.id for task in made.tasks] == ["data/7", "data/b"]
    assert [task.prompt for task in made.tasks] == ["2+2=", "1+1="]
    assert [task.reference for task in made.tasks] == ["4", 2]
    assert {task.source for task in made.tasks} == {made.name} == {"data"}
    assert made.scorer == ExactConfig()
    assert made.sampling == SamplingParams(max_tokens=256, temperature=0.0)
    assert made.weight == 1.0


@pytest.mark.parametrize(
    ("row", "prompt", "reference"),
    [
        ({"prompt": "Q", "completion": "A"}, "Q", "A"),
        ({"question": "Q", "reference": "A"}, "Q", "A"),
        ({"problem": "Q", "answer": ["A", "B"]}, "Q", ["A", "B"]),
        (
            {"messages": [{"role": "user", "content": "Q"}], "answer": "A"},
            (Message(role="user", content="Q"),),
            "A",
        ),
        (
            {
                "messages": [
                    {"role": "system", "content": "S"},
                    {"role": "user", "content": "Q"},
                    {"role": "assistant", "content": "A"},
                ]
            },
            (Message(role="system", content="S"), Message(role="user", content="Q")),
            "A",
        ),
        (
            {
                "prompt": [{"role": "user", "content": "Q"}],
                "completion": [{"role": "assistant", "content": "A"}],
            },
            (Message(role="user", content="Q"),),
            "A",
        ),
    ],
)
def test_the_usual_shapes_of_a_row(
    row: dict[str, Any], prompt: object, reference: Json, tmp_path: Path
) -> None:
    [task] = load(tmp_path, [row]).tasks
    assert (task.prompt, task.reference) == (prompt, reference)


def test_fields_and_template_of_the_config(tmp_path: Path) -> None:
    made = load(
        tmp_path,
        [{"q": "2+2", "a": "4", "key": "one", "prompt": "unused", "question": "unused"}],
        name="sums",
        fields={"reference": "a", "id": "key"},
        prompt_template="Q: {{ q }}\nA: ",
        scorer={"type": "numeric"},
        sampling={"max_tokens": 5, "stop": ["\n"], "top_p": 0.9},
        weight=2,
    )
    [task] = made.tasks
    assert (task.id, task.prompt, task.reference) == ("sums/one", "Q: 2+2\nA: ", "4")
    assert made.scorer == NumericConfig()
    assert made.sampling == SamplingParams(max_tokens=5, temperature=0.0, stop=("\n",), top_p=0.9)
    assert made.weight == 2.0


@pytest.mark.parametrize(
    ("row", "scorer"),
    [
        ({"prompt": "Q", "answer": "A"}, ExactConfig()),
        ({"prompt": "Q", "answer": 1, "choices": ["x", "y"]}, ChoiceConfig()),
        ({"prompt": "Q", "answer": "so\n#### 4"}, NumericConfig()),
    ],
)
def test_the_scorer_is_guessed_from_the_rows(
    row: dict[str, Any], scorer: object, tmp_path: Path
) -> None:
    assert load(tmp_path, [row]).scorer == scorer


@pytest.mark.parametrize(
    ("choices", "answer", "text", "reference"),
    [
        (["x", "y"], 1, ("x", "y"), 1),
        ({"text": ["x", "y"], "label": ["A", "B"]}, "B", ("x", "y"), 1),
        ({"text": ["x", "y"], "label": ["1", "2"]}, "1", ("x", "y"), 0),
        ({"text": ["x", "y"]}, "y", ("x", "y"), "y"),
        ({"A": "x", "B": "y"}, "B", ("x", "y"), 1),
        ({"A": "x", "B": "y"}, "y", ("x", "y"), "y"),
        ({"A": "B", "B": "A", "C": None}, "A", ("B", "A"), 0),
        ({"1": "x", "2": "y"}, "1", ("x", "y"), 0),
    ],
)
def test_choices(
    choices: object, answer: object, text: object, reference: Json, tmp_path: Path
) -> None:
    [task] = load(tmp_path, [{"prompt": "Q", "choices": choices, "answer": answer}]).tasks
    assert (task.choices, task.reference) == (text, reference)


def test_the_byte_order_mark_and_odd_line_ends_are_read(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"prompt": "a\xe2\x80\xa8b", "answer": "1"}\r\n\r\n'
        b'{"prompt": "c", "answer": "2"}'
    )
    assert [task.prompt for task in load_taskset_file(str(path)).tasks] == ["a\u2028b", "c"]


GOOD = {"prompt": "2+2=", "answer": "4"}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ('{"prompt": "x", ', r"line 2: is not JSON \(.* at column 16\): .*one object on one line"),
        ("[1, 2]", r"line 2: holds a JSON list, \[1, 2\]; a row is one object"),
        ('"text"', "line 2: holds a JSON str"),
        ('{"prompt": "x", "answer": NaN}', "line 2: is not JSON .*NaN is not a JSON value"),
        ("[" * 100_000, "line 2: is not JSON"),
        ({"promt": "x", "answer": "1"}, "line 2: has no field 'prompt'; it has 'promt', 'answer'"),
        ({"prompt": "x"}, "line 2: has no field 'answer'; it has 'prompt'"),
        ({"prompt": "", "answer": "1"}, "line 2: 'prompt' is empty"),
        ({"prompt": " \n", "answer": "1"}, "line 2: 'prompt' is empty"),
        ({"prompt": None, "answer": "1"}, "line 2: 'prompt' is NoneType None; it must be a text"),
        ({"prompt": 5, "answer": "1"}, "line 2: 'prompt' is int 5; it must be a text"),
        ({"prompt": [], "answer": "1"}, r"line 2: 'prompt' is list \[\]"),
        ({"prompt": ["hi"], "answer": "1"}, "line 2: 'prompt' holds str 'hi'; a message is"),
        ({"prompt": [{"role": "user"}], "answer": "1"}, "line 2: 'prompt' holds dict"),
        (
            {"prompt": [{"role": "assistant", "content": "x"}], "answer": "1"},
            "line 2: 'prompt' ends with the assistant's message",
        ),
        ({"prompt": "x", "answer": None}, "line 2: exact needs a text"),
        ({"prompt": "x", "answer": {"a": 1}}, "line 2: exact needs a text"),
    ],
)
def test_a_broken_row_names_its_line(row: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"data\.jsonl " + words):
        load(tmp_path, [GOOD, row, GOOD])


def test_bytes_that_are_not_utf8_name_their_line(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"prompt": "a", "answer": "1"}\n{"prompt": "\xff"}\n')
    with pytest.raises(TaskError, match="line 2: is not UTF-8"):
        load_taskset_file(str(path))


@pytest.mark.parametrize(
    ("row", "fields", "words"),
    [
        ({"x": 1}, {}, "line 1: found no prompt among the fields 'x'. Name the field"),
        ({"prompt": "a", "messages": [], "answer": 1}, {}, "has both 'prompt' and 'messages'"),
        ({"prompt": "a", "question": "b"}, {}, "'prompt' and 'question' could each be the prompt"),
        ({"prompt": "a", "answer": 1, "completion": 2}, {}, r"Say which with fields\.reference"),
        (
            {"prompt": "a", "solution": 1},
            {"fields": {"reference": "soluton"}},
            "fields.reference is 'soluton' .* Did you mean 'solution'",
        ),
        ({"prompt": "a", "answer": 1, "choices": "xy"}, {}, "'choices' is str 'xy'; it must be a"),
        ({"prompt": "a", "answer": 1, "choices": [1, 2]}, {}, "it must be a list of texts"),
        ({"prompt": "a", "answer": 1, "choices": {"A": 1}}, {}, "{A: text, B: text, ...}"),
        ({"prompt": "a", "answer": 1, "choices": {"text": "x", "n": 2}}, {}, "is dict {'text'"),
        (
            {"prompt": "a", "answer": 7, "choices": ["x", "y"]},
            {},
            "line 1: choice got the reference 7",
        ),
        ({"id": None, "prompt": "a", "answer": 1}, {}, "'id' is NoneType None; an id is a text"),
        ({"id": 1.5, "prompt": "a", "answer": 1}, {}, "'id' is float 1.5"),
        ({"id": True, "prompt": "a", "answer": 1}, {}, "'id' is bool True"),
        (
            {"q": "x", "answer": 1},
            {"prompt_template": "{{ question }}"},
            "line 1: .*'question' is undefined. Fields found: q, answer",
        ),
        (
            {"q": "x", "answer": 1},
            {"prompt_template": "{{ q / 2 }}"},
            "line 1: the prompt template fails on this row",
        ),
        (
            {"q": "x", "answer": 1},
            {"prompt_template": "{{ q.__class__.__mro__ }}"},
            "line 1: the prompt template",
        ),
        ({"prompt": "a", "answer": "x"}, {"scorer": {"type": "numeric"}}, "numeric needs a number"),
    ],
)
def test_a_row_that_does_not_fit_the_config(
    row: dict[str, Any], fields: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(TaskError, match=words):
        load(tmp_path, [row], **fields)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt_template": "{q}"}, "uses no field"),
        ({"prompt_template": "{{ q"}, "is not jinja2"),
        ({"prompt_template": "{{ q }}", "fields": {"prompt": "q"}}, "give one of them"),
        ({"limit": 0}, "greater than or equal to 1"),
        ({"weight": 0}, "greater than 0"),
        ({"sampling": {"stop": [""]}}, "at least 1 character"),
        ({"splits": {"search": 1.0}}, "must be 1"),
        ({"scorer": {"type": "exakt"}}, "exakt"),
    ],
)
def test_a_wrong_config_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        JsonlConfig(path=Path("x.jsonl"), **fields)


def test_an_empty_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"data\.jsonl has no rows"):
        load(tmp_path, [])
    with pytest.raises(TaskError, match=r"data\.jsonl has no rows"):
        load(tmp_path, ["", "  "])


def test_a_given_id_twice_names_both_lines(tmp_path: Path) -> None:
    rows = [{"id": "a", **GOOD}, {"id": "b", **GOOD}, "", {"id": "a", "prompt": "x", "answer": "1"}]
    with pytest.raises(TaskError, match=r"line 4: the id 'a' is taken by .*line 1"):
        load(tmp_path, rows)


QUESTION = {"id": 1, "prompt": "Q", "choices": ["x", "y"], "answer": "x"}
MIXED = [
    QUESTION,
    QUESTION | {"id": 2, "choices": ["x", "x"]},
    QUESTION | {"prompt": "another"},
    '{"prompt": ',
    QUESTION | {"id": 3, "prompt": "third"},
    QUESTION | {"id": 4, "answer": "z"},
    QUESTION | {"id": 5, "prompt": ""},
]


def test_a_few_bad_rows_are_refused_with_their_number_and_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(TaskError) as refused:
        load(tmp_path, MIXED)
    words = str(refused.value)
    assert "line 3: the id '1' is taken by" in words and "{id: null}" in words
    assert "5 of 7 rows cannot be used" in words and "bad_rows: skip" in words


def test_bad_rows_are_skipped_and_counted(tmp_path: Path) -> None:
    made = load(tmp_path, MIXED, bad_rows="skip")
    assert [task.id for task in made.tasks] == ["data/1", "data/3"]
    assert (made.skipped.num_skipped, made.skipped.num_rows) == (5, 7)
    [note] = made.notes
    assert note.startswith("data: 5 of 7 rows were skipped. The first: ")
    for place in ("line 3: the id", "line 4: is not JSON", "line 7: 'prompt' is empty"):
        assert place in note, note
    assert load(tmp_path, [QUESTION], bad_rows="skip").notes == ()


def test_a_file_of_nothing_but_bad_rows_is_an_error_even_when_they_are_skipped(
    tmp_path: Path,
) -> None:
    rows = [QUESTION | {"answer": "z"}, QUESTION | {"answer": "z", "id": 2}]
    with pytest.raises(TaskError, match=r"line 1: choice got .* None of 2 rows can be used"):
        load(tmp_path, rows, bad_rows="skip")


def test_ids_are_made_where_the_file_repeats_its_own(tmp_path: Path) -> None:
    rows = [{"id": 7, "prompt": f"question {i}", "answer": "x"} for i in range(3)]
    made = load(tmp_path, rows, fields={"id": None})
    without = load(tmp_path, [{"prompt": r["prompt"], "answer": "x"} for r in rows])
    assert made.tasks == without.tasks


def test_any_value_of_the_config_follows_the_name_of_a_file(tmp_path: Path) -> None:
    path = write(tmp_path / "data.jsonl", MIXED)
    assert len(load_taskset_file(f"{path}?bad_rows=skip").tasks) == 2
    assert len(load_taskset_file(f"{path}?bad_rows=skip&limit=1").tasks) == 1
    asking = path.with_name("what?.jsonl")
    asking.write_bytes(path.read_bytes())
    assert len(load_taskset_file(f"{asking}?bad_rows=skip&limit=1").tasks) == 1
    with pytest.raises(ConfigError, match=r"bad_row is not a key\. Did you mean bad_rows"):
        load_taskset_file(f"{path}?bad_row=skip")
    strange = write(tmp_path / "what?limit=x.jsonl", [GOOD])
    assert load_taskset_file(str(strange)).tasks
    (tmp_path / "set.yaml").write_text("type: jsonl\npath: data.jsonl\n")
    assert len(load_taskset_file(f"{tmp_path}/set.yaml?bad_rows=skip").tasks) == 2


def test_ids_made_from_content_are_stable_and_numbered_when_rows_repeat(tmp_path: Path) -> None:
    other = {"prompt": "2+2=", "answer": "5"}
    made = load(tmp_path, [GOOD, other, GOOD, GOOD])
    again = load(tmp_path, [other, GOOD, GOOD, GOOD])
    ids = [task.id for task in made.tasks]
    assert len(set(ids)) == 4
    assert ids[2:] == [f"{ids[0]}-2", f"{ids[0]}-3"]
    assert {task.id for task in again.tasks} == set(ids)


def test_scorers_that_need_no_reference_take_rows_without_one(tmp_path: Path) -> None:
    for scorer in (JudgeConfig(model="critic@1"), RegexConfig(pattern="x")):
        [task] = load(tmp_path, [{"prompt": "Write a poem"}], scorer=scorer).tasks
        assert task.reference is None


texts = st.lists(st.text("abcdef ", min_size=1).filter(str.strip), min_size=3, max_size=20)


PAIRS: list[dict[str, Any]] = [
    {
        "prompt": "Which sentence is correct?",
        "choices": [f"The cats {i} sleep.", f"The cats {i} sleeps."],
        "answer": 0,
        "pair": i,
    }
    for i in range(60)
]
"""Minimal pairs: one prompt, and the choices make the question."""


def test_minimal_pairs_of_one_prompt_are_told_apart_by_their_group(tmp_path: Path) -> None:
    rows = [*PAIRS, {**PAIRS[0], "choices": PAIRS[0]["choices"][::-1], "answer": 1}]
    made = load(tmp_path, rows, fields={"group": "pair"})
    parts = {name: made.split(name) for name in SPLITS}
    assert sum(map(len, parts.values())) == 61 and all(len(part) > 3 for part in parts.values())
    assert join_splits([made])[0].moved == {}
    held = {name: {task.group for task in part} for name, part in parts.items()}
    assert not held["search"] & held["select"] and not held["search"] & held["report"]
    # The same choices in another group would be one question in two splits.
    with pytest.raises(TaskError, match=r"has the prompt and choices of .* and another group"):
        load(tmp_path, [*rows[:-1], {**rows[-1], "pair": 99}], fields={"group": "pair"})


def test_minimal_pairs_without_a_group_are_one_question_and_the_error_says_so(
    tmp_path: Path,
) -> None:
    made = load(tmp_path, PAIRS)
    assert len(made.tasks) == 60
    with pytest.raises(TaskError, match=r"60 tasks and none .* 1 prompts.* fields\.group"):
        for name in SPLITS:
            made.split(name)
    whole = load(tmp_path, PAIRS, splits={"search": 0, "select": 0, "report": 1})
    assert len(whole.split("report")) == 60


def test_one_prompt_in_two_groups_is_an_error(tmp_path: Path) -> None:
    rows = [{"prompt": "same", "answer": "x", "g": 1}, {"prompt": "Same ", "answer": "x", "g": 2}]
    with pytest.raises(TaskError, match=r"line 2: has the prompt of .*line 1 and another group"):
        load(tmp_path, rows, fields={"group": "g"})


def test_a_limit_draws_the_same_tasks_from_any_order_and_from_every_split(tmp_path: Path) -> None:
    rows = [{"id": i, "prompt": f"question {i}", "answer": "x"} for i in range(300)]
    made = load(tmp_path, rows, limit=100)
    turned = load(tmp_path, rows[::-1], limit=100)
    assert len(made.tasks) == 100
    assert {task.id for task in made.tasks} == {task.id for task in turned.tasks}
    ids = [int(task.id.removeprefix("data/")) for task in made.tasks]
    assert ids == sorted(ids)
    assert all(len(made.split(name)) >= 8 for name in ("search", "select", "report"))
    assert len(load(tmp_path, rows, limit=1000).tasks) == 300


def test_missing_files_suggest_near_names(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", [GOOD])
    with pytest.raises(
        TaskError, match=r"There is no taskset .*trian\.jsonl\. Did you mean .*train\.jsonl\?"
    ):
        load_taskset_file(str(tmp_path / "trian.jsonl"))
    with pytest.raises(TaskError, match=r"There is no file .*trian\.jsonl\. Did you mean"):
        load_taskset(JsonlConfig(path=tmp_path / "trian.jsonl"))
    with pytest.raises(TaskError, match="is a folder"):
        load_taskset(JsonlConfig(path=tmp_path))


@pytest.mark.parametrize(
    ("spec", "error", "words"),
    [
        ("generated:arithmetc", ConfigError, "Did you mean arithmetic"),
        ("generated:arithmetic?sise=3", ConfigError, "sise is not a key. Did you mean size"),
        ("generated:arithmetic?size=many", ConfigError, 'size is "many"'),
        ("hf:gsm8k", TaskError, "a dataset of the hub is hf://datasets/ID"),
        ("hf://datasets/", TaskError, "a dataset of the hub is hf://datasets/ID"),
        ("nothing/here", TaskError, "There is no taskset nothing/here. A taskset is"),
    ],
)
def test_a_wrong_spec_is_answered_with_what_is_allowed(
    spec: str, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        load_taskset_file(spec)


def test_a_generated_spec_takes_size_and_seed() -> None:
    made = load_taskset_file("generated:arithmetic?size=7&seed=2&limit=5")
    assert len(made.tasks) == 5
    whole = load_taskset(GeneratedConfig(generator="arithmetic", size=7, seed=2))
    assert set(made.tasks) <= set(whole.tasks)


def test_taskset_files_take_paths_from_their_folder(tmp_path: Path) -> None:
    write(tmp_path / "rows.jsonl", [GOOD])
    (tmp_path / "mine.py").write_text("def one(task, completion): return 1")
    (tmp_path / "set.yaml").write_text(
        "type: jsonl\npath: rows.jsonl\nname: sums\n"
        "scorer: {type: python, function: 'mine.py:one', timeout_s: 5}\n"
    )
    (tmp_path / "set.toml").write_text('type = "jsonl"\npath = "rows.jsonl"\n')
    made = load_taskset_file(str(tmp_path / "set.yaml"))
    assert made.name == "sums"
    assert made.scorer == PythonConfig(function=f"{tmp_path}/mine.py:one", timeout_s=5.0)
    assert load_taskset_file(str(tmp_path / "set.toml")).tasks[0].prompt == "2+2="


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("path: x.jsonl\n", "type is missing; write type: and one of generated, hf, jsonl"),
        ("type: jsnl\n", "type is 'jsnl'"),
        ("type: jsonl\npth: x.jsonl\n", "pth is not a key. Did you mean path"),
        ("type: jsonl\n", "path is missing"),
    ],
)
def test_a_wrong_taskset_file_is_a_config_error(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "set.yaml").write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_taskset_file(str(tmp_path / "set.yaml"))


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(RookeryError, match=r"notes\.txt is neither"):
        load_taskset_file(str(tmp_path / "notes.txt"))


def test_tasksets_are_a_union_inside_other_configs(tmp_path: Path) -> None:
    class Loop(Config):
        tasksets: tuple[TasksetConfig, ...]

    path = tmp_path / "loop.yaml"
    path.write_text("tasksets: [{type: generated, generator: arithmetic}, {type: jsonl, path: x}]")
    first, second = load_config(Loop, path).tasksets
    assert isinstance(first, GeneratedConfig)
    assert isinstance(second, JsonlConfig)
    dumped = Loop(tasksets=(first, second)).model_dump_json()
    assert Loop.model_validate_json(dumped).tasksets == (first, second)
    third = TypeAdapter[TasksetConfig](TasksetConfig).validate_python(
        {"type": "hf", "dataset": "x"}
    )
    assert isinstance(third, HfConfig) and third.split == "train"


ROWS = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(3)]


@pytest.mark.parametrize(
    ("document", "key", "answers"),
    [
        (ROWS, "", ["1", "2", "3"]),
        ({"name": "sums", "data": ROWS}, "", ["1", "2", "3"]),
        ({"dataset": "sums", "dev": ROWS[:1], "test": ROWS[1:]}, "test", ["2", "3"]),
        ({"dev": ROWS[:1], "test": ROWS[1:2]}, "test", ["2"]),
        ({"data": {"dev": ROWS[:1], "test": ROWS}}, "data.dev", ["1"]),
        ({"prompt": ["0+1=", "1+1="], "answer": ["1", "2"]}, "", ["1", "2"]),
        ({"test": {"prompt": ["0+1="], "answer": ["1"]}}, "test", ["1"]),
    ],
)
def test_a_json_file_of_any_shape_is_read(
    document: Any, key: str, answers: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "sums.json"
    path.write_text(json.dumps(document))
    made = load_taskset(HfConfig(dataset=str(path), key=key))
    assert [task.reference for task in made.tasks] == answers


def test_json_lines_called_json_are_read(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.json", ROWS)
    assert len(load_taskset_file(str(path)).tasks) == 3


@pytest.mark.parametrize(
    ("document", "query", "words"),
    [
        (
            {"dataset": "sums", "dev": ROWS[:1], "test": ROWS},
            "",
            r"holds 2 lists of rows: dev \(1 rows\), test \(3 rows\)\. .* key: dev .*\?key=dev",
        ),
        (
            {"dataset": "sums", "dev": ROWS},
            "?key=tst",
            r"has no 'tst': .* holds 'dataset' \(a text\), 'dev' \(a list of 3\)",
        ),
        ({"a": 1, "b": {"c": "x"}}, "", r"holds 'a' \(1\), 'b' \(an object of 1 keys\); rows are"),
        ("text", "", "holds a text; rows are a list of objects"),
        ([1, *ROWS], "", r"row 1: holds 1; a row is an object.* 1 of 4 rows cannot be used"),
        ({"dev": ROWS, "test": ROWS}, "?split=test", "split is 'test', .* named by key"),
    ],
)
def test_a_json_file_without_clear_rows_says_what_is_there(
    document: Any, query: str, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "sums.json"
    path.write_text(json.dumps(document))
    with pytest.raises(TaskError, match=words):
        load_taskset_file(f"{path}{query}")


def test_broken_json_files_are_sentences(tmp_path: Path) -> None:
    path = tmp_path / "sums.json"
    for text, words in [
        (b'[{"prompt": ', r"sums\.json is not JSON: Expecting value"),
        (b"[\xff]", "is not UTF-8"),
        (b"[NaN]", "NaN is not a JSON value"),
    ]:
        path.write_bytes(text)
        with pytest.raises(TaskError, match=words):
            load_taskset_file(str(path))
    write(tmp_path / "sums.jsonl", [GOOD])
    with pytest.raises(TaskError, match=r"names the list of rows in a \.json file"):
        load_taskset(HfConfig(dataset=str(tmp_path / "sums.jsonl"), key="x"))


@pytest.fixture
def datasets_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()
    return datasets


def test_datasets_from_local_files_and_folders(tmp_path: Path, datasets_cache: Any) -> None:
    (tmp_path / "sums.csv").write_text("question,answer\n2+2=,4\n1+1=,2\n")
    made = load_taskset_file(str(tmp_path / "sums.csv"))
    assert made.name == "sums"
    assert [(task.prompt, task.reference) for task in made.tasks] == [("2+2=", "4"), ("1+1=", "2")]
    table = datasets_cache.Dataset.from_dict({"prompt": ["a", "b"], "answer": ["1", ""]})
    table.save_to_disk(tmp_path / "saved")
    with pytest.raises(TaskError, match=r"saved \[train\] row 2: exact got the reference ''"):
        load_taskset(HfConfig(dataset=str(tmp_path / "saved")))


def test_a_dataset_that_is_not_there_is_a_sentence(tmp_path: Path, datasets_cache: Any) -> None:
    (tmp_path / "sums.csv").write_text("question,answer\n2+2=,4\n")
    with pytest.raises(TaskError, match=r"split is 'test', and the file .*sums\.csv has none"):
        load_taskset(HfConfig(dataset=str(tmp_path / "sums.csv"), split="test"))
    (tmp_path / "sums.parquet").write_text("not parquet")
    with pytest.raises(TaskError, match=r"Reading the split 'train' .*sums\.parquet: .*[Pp]arquet"):
        load_taskset(HfConfig(dataset=str(tmp_path / "sums.parquet")))
    (tmp_path / "sums.xyz").write_text("?")
    with pytest.raises(TaskError, match=r"sums\.xyz is none of \.csv, \.json, \.jsonl, \.parquet"):
        load_taskset(HfConfig(dataset=str(tmp_path / "sums.xyz")))
    with pytest.raises(TaskError, match=r"Reading the split 'train' of the dataset no/such"):
        load_taskset(HfConfig(dataset="no/such"))


@pytest.mark.parametrize("weight", [-1, "much", None, True])
def test_a_weight_that_is_none_is_named(tmp_path: Path, weight: object) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "a", "answer": "b", "sure": weight}) + "\n")
    with pytest.raises(TaskError, match=r"'sure' is .*; it must be 0 or more"):
        load_taskset_file(f"{path}?fields.weight=sure")


def test_rows_may_weigh_differently(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"p{index}", "answer": "b", "sure": index / 2} for index in range(3)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    taskset = load_taskset_file(f"{path}?fields.weight=sure")
    weights = {task.prompt: task.weight for task in taskset.tasks}
    assert weights == {"p1": 0.5, "p2": 1}, "a row that counts nothing is left out"
    assert {task.weight for task in load_taskset_file(str(path)).tasks} == {1.0}
    path.write_text(json.dumps(rows[0]) + "\n")
    with pytest.raises(TaskError, match="all rows have the weight 0"):
        load_taskset_file(f"{path}?fields.weight=sure")
