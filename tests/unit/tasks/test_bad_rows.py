"""Rows that a parser lets through and a taskset cannot use; CSV files; what settles the fields."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rookery.errors import ConfigError, TaskError
from rookery.tasks.scorers import ChoiceConfig, ExactConfig
from rookery.tasks.taskset import load_taskset_file

GOOD = [{"prompt": f"q {i}", "answer": f"a{i}"} for i in range(3)]


def write(
    tmp_path: Path, first: str, rows: Sequence[object] = GOOD, *, suffix: str = "jsonl"
) -> str:
    lines = [first, *map(json.dumps, rows)]
    text = f"[{','.join(lines)}]" if suffix == "json" else "\n".join(lines)
    path = tmp_path / f"data.{suffix}"
    path.write_text(text, encoding="utf-8")
    return str(path)


NESTED = "[" * 500 + "]" * 500


@pytest.mark.parametrize("suffix", ["jsonl", "json"])
@pytest.mark.parametrize(
    ("first", "words"),
    [
        ('{"prompt": "a \\ud800 b", "answer": "x"}', "half of a surrogate pair"),
        ('{"prompt": "a", "answer": {"\\udc00": 1}}', "half of a surrogate pair"),
        ('{"prompt": "a", "answer": "x", "id": "\\ud800"}', "half of a surrogate pair"),
        ('{"prompt": "a", "answer": 1e999}', "too large for a float"),
        ('{"prompt": "a", "answer": [-1e999]}', "too large for a float"),
        (f'{{"prompt": "a", "answer": {NESTED}}}', "more than 100 deep"),
        ('{"version": 1}', "found no prompt"),
        ('{"prompt": "x"}', "exact needs"),
    ],
)
def test_a_bad_first_row_is_refused_or_skipped(
    tmp_path: Path, first: str, words: str, suffix: str
) -> None:
    path = write(tmp_path, first, suffix=suffix)
    with pytest.raises(TaskError, match=f"(line|row) 1: .*{words}.* 1 of 4 rows"):
        load_taskset_file(path)
    made = load_taskset_file(f"{path}?bad_rows=skip")
    assert [task.reference for task in made.tasks] == ["a0", "a1", "a2"]
    assert made.skipped.num_skipped == 1
    made.notes[0].encode()


def test_whole_surrogate_pairs_and_plain_nesting_are_kept(tmp_path: Path) -> None:
    path = write(tmp_path, '{"prompt": "\\ud83d\\ude00 é", "answer": ["x"], "note": [{"a": []}]}')
    assert load_taskset_file(path).tasks[0].prompt == "\U0001f600 é"


@pytest.mark.parametrize(
    ("extra", "role"),
    [
        ({"choices": ["x", "y"], "answer": "B"}, "choices"),
        ({"answer": "B", "id": 3}, "id"),
        ({"answer": "B", "reference": "C"}, "reference"),
        ({"answer": "B", "messages": [{"role": "user", "content": "a"}]}, "messages"),
    ],
)
def test_a_field_that_the_settled_reading_ignores_is_a_bad_row(
    tmp_path: Path, extra: dict[str, Any], role: str
) -> None:
    path = write(tmp_path, '{"prompt": "x", "answer": "B"}', [{"prompt": "c", **extra}])
    with pytest.raises(TaskError, match=rf"line 2: has the field '{role}', usually the {role}"):
        load_taskset_file(path)
    made = load_taskset_file(f"{path}?bad_rows=skip")
    assert (len(made.tasks), made.skipped.num_skipped) == (1, 1)


def test_null_fields_and_fields_the_config_decides_are_not_ignored_ones(tmp_path: Path) -> None:
    rows = [{"prompt": "c", "answer": "B", "choices": None, "id": 1}]
    path = write(tmp_path, '{"prompt": "x", "answer": "B"}', rows)
    made = load_taskset_file(f"{path}?fields.id=null")
    assert (len(made.tasks), made.scorer) == (2, ExactConfig())


def test_a_first_row_with_bad_choices_does_not_settle_the_fields(tmp_path: Path) -> None:
    rows = [{"prompt": f"c{i}", "choices": ["x", "y"], "answer": "B"} for i in range(2)]
    path = write(tmp_path, '{"prompt": "x", "choices": ["x", "x"], "answer": "x"}', rows)
    made = load_taskset_file(f"{path}?bad_rows=skip")
    assert (len(made.tasks), made.scorer) == (2, ChoiceConfig())


@pytest.mark.parametrize("labels", [["C", "A"], ["A", "A", "B"], "ABC", []])
def test_labels_must_be_one_for_each_choice_and_differ(tmp_path: Path, labels: object) -> None:
    choices = {"text": ["3", "4", "5"], "label": labels}
    row = {"prompt": "q", "choices": choices, "answer": "A"}
    with pytest.raises(TaskError, match="line 1: 'choices' has 3 texts and the labels"):
        load_taskset_file(write(tmp_path, json.dumps(row), []))
    choices["label"] = None
    made = load_taskset_file(write(tmp_path, json.dumps(row), []))
    assert made.tasks[0].reference == "A"


def test_many_equal_rows_are_numbered_in_linear_time(tmp_path: Path) -> None:
    path = write(tmp_path, json.dumps(GOOD[0]), [GOOD[0]] * 19_999)
    start = time.process_time()
    made = load_taskset_file(path)
    assert time.process_time() - start < 10  # looking for a free number takes minutes
    first = made.tasks[0].id
    assert [task.id for task in made.tasks[1:3]] == [f"{first}-2", f"{first}-3"]
    assert made.tasks[-1].id == f"{first}-20000"


def csv(tmp_path: Path, text: str) -> str:
    path = tmp_path / "data.csv"
    path.write_bytes(text.encode("utf-8-sig"))
    return str(path)


def test_a_csv_cell_is_text_whatever_the_other_rows_hold(tmp_path: Path) -> None:
    path = csv(tmp_path, 'prompt,answer\r\na,1\r\n"b, c",007\r\n\r\nd,None\r\ne,\r\nf\r\n')
    with pytest.raises(TaskError, match=r"data\.csv line 6: exact needs .* 2 of 5 rows"):
        load_taskset_file(path)
    made = load_taskset_file(f"{path}?bad_rows=skip")
    found = [(task.prompt, task.reference) for task in made.tasks]
    assert found == [("a", "1"), ("b, c", "007"), ("d", "None")]


def test_a_large_csv_cell_is_read(tmp_path: Path) -> None:
    made = load_taskset_file(csv(tmp_path, f"prompt,answer\n{'x' * 200_000},1\n"))
    assert len(made.tasks[0].prompt) == 200_000


def test_a_csv_row_of_too_many_cells_is_a_bad_row(tmp_path: Path) -> None:
    path = csv(tmp_path, "prompt,answer\na,b,1\nc,2\n")
    with pytest.raises(TaskError, match="line 2: has 3 cells, and the first line names 2 fields"):
        load_taskset_file(path)
    assert len(load_taskset_file(f"{path}?bad_rows=skip").tasks) == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('prompt,answer\n"a,1\nb,2\n', "is not CSV: .* line 3: unexpected end of data"),
        ("prompt,prompt\na,1\n", "line 1: names the field 'prompt' twice"),
        ("", "has no rows"),
        ("prompt,answer\n", "has no rows"),
    ],
)
def test_a_malformed_csv_shows_the_cause(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(TaskError, match=words):
        load_taskset_file(csv(tmp_path, text))


def test_dotted_keys_follow_a_file_name(tmp_path: Path) -> None:
    row = {"id": 1, "prompt": "a", "answer": "1"}
    path = write(tmp_path, json.dumps(row), [{**row, "prompt": "b"}])
    made = load_taskset_file(f"{path}?fields.id=null&sampling.max_tokens=9")
    assert len({task.id for task in made.tasks}) == 2
    assert made.sampling.max_tokens == 9
    config = tmp_path / "set.yaml"
    config.write_text("type: jsonl\npath: data.jsonl\nfields: {reference: answer}\n")
    made = load_taskset_file(f"{config}?fields.id=null")
    assert [task.reference for task in made.tasks] == ["1", "1"]
    with pytest.raises(ConfigError, match=r"fields\.ids"):
        load_taskset_file(f"{path}?fields.ids=null")


def test_a_first_reference_with_a_heading_is_usable(tmp_path: Path) -> None:
    path = write(tmp_path, '{"prompt": "x", "answer": "#### Title"}')
    assert (len(load_taskset_file(path).tasks), load_taskset_file(path).scorer) == (
        4,
        ExactConfig(),
    )
