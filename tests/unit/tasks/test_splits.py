import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rookery.errors import ConfigError, TaskError
from rookery.tasks.scorers import ChoiceConfig, ExactConfig
from rookery.tasks.splits import SPLITS, SplitName, SplitsConfig, split_key, split_of
from rookery.tasks.taskset import Taskset, join_splits, load_taskset_file
from rookery.types import Message, Task

prompts = st.lists(st.text(min_size=1, max_size=20), min_size=1, max_size=30, unique=True)
weights = st.tuples(*[st.integers(0, 5)] * 3).filter(any)
ONE_IN_THREE = SplitsConfig(search=0.4, select=0.3, report=0.3)


def fractions(parts: tuple[int, int, int]) -> SplitsConfig:
    search, select, report = (part / sum(parts) for part in parts)
    return SplitsConfig(search=search, select=select, report=report)


def taskset(
    texts: Sequence[str], splits: SplitsConfig = ONE_IN_THREE, name: str = "set"
) -> Taskset:
    tasks = tuple(
        Task(id=f"{name}/{i}", prompt=text, reference="x") for i, text in enumerate(texts)
    )
    return Taskset(name=name, tasks=tasks, scorer=ExactConfig(), splits=splits)


def by_split(made: Taskset) -> dict[str, list[str]]:
    """Prompts by split, for splits that are allowed to come out empty."""
    found: dict[str, list[str]] = {}
    for name in SPLITS:
        try:
            found[name] = [str(task.prompt) for task in made.split(name)]
        except TaskError as error:
            assert "none of them falls into" in str(error)
            found[name] = []
    return found


@given(prompts, weights)
def test_splits_are_disjoint_and_make_up_the_whole(
    texts: list[str], parts: tuple[int, int, int]
) -> None:
    made = taskset(texts, fractions(parts))
    found = by_split(made)
    joined = [text for name in SPLITS for text in found[name]]
    assert sorted(joined) == sorted(texts)
    assert [task.prompt for task in made.split("all")] == texts
    for name, part in zip(SPLITS, parts, strict=True):
        if part == 0:
            assert found[name] == []


@given(prompts, st.randoms(use_true_random=False))
def test_splits_do_not_depend_on_row_order_or_name(texts: list[str], random: Random) -> None:
    shuffled = list(texts)
    random.shuffle(shuffled)
    one, other = by_split(taskset(texts)), by_split(taskset(shuffled, name="other"))
    assert {name: sorted(found) for name, found in one.items()} == {
        name: sorted(found) for name, found in other.items()
    }


@given(prompts, prompts)
def test_added_rows_move_no_other(texts: list[str], added: list[str]) -> None:
    before = by_split(taskset(texts))
    after = by_split(taskset([*added, *texts]))
    for name in SPLITS:
        assert set(before[name]) <= set(after[name])


@given(st.text(min_size=1, max_size=30))
def test_one_content_has_one_split_whatever_its_id_and_shape(text: str) -> None:
    splits = SplitsConfig()
    same: list[str | tuple[Message, ...]] = [
        text,
        f"  {text}\n",
        (Message(role="user", content=text),),
    ]
    keys = {split_key(prompt) for prompt in same}
    assert len(keys) == 1
    assert len({split_of(key, splits) for key in keys}) == 1


def test_case_spacing_and_unicode_form_do_not_make_another_task() -> None:
    assert split_key("What is  2+2?\n") == split_key("what IS 2+2?")
    assert split_key("caf\u00e9") == split_key("cafe\u0301")
    assert split_key("2+2") != split_key("2+3")


def test_messages_differ_by_any_of_their_turns() -> None:
    one = (Message(role="user", content="a"), Message(role="user", content="b"))
    other = (Message(role="user", content="a"), Message(role="user", content="c"))
    assert split_key(one) != split_key(other)


def test_fractions_are_met_and_salts_differ() -> None:
    texts = [f"question {i}" for i in range(5000)]
    found = by_split(taskset(texts, SplitsConfig()))
    assert len(found["search"]) == pytest.approx(2500, abs=150)
    assert len(found["select"]) == pytest.approx(1000, abs=120)
    salted = by_split(taskset(texts, SplitsConfig(salt="again")))
    overlap = len(set(found["search"]) & set(salted["search"]))
    assert overlap == pytest.approx(1250, abs=150)


@pytest.mark.parametrize(
    ("text", "split"), [("2+2=", "report"), ("question 0", "search"), ("question 1", "select")]
)
def test_the_assignment_never_changes_between_versions(text: str, split: str) -> None:
    assert split_of(split_key(text), SplitsConfig()) == split


def test_the_whole_range_is_covered_when_fractions_do_not_add_up_exactly() -> None:
    splits = SplitsConfig(search=0.7, select=0.3 - 1e-7, report=0.0)
    assert {split_of(str(i), splits) for i in range(2000)} == {"search", "select"}


def test_a_split_that_should_have_tasks_and_has_none_is_an_error() -> None:
    made = taskset(["only one"], SplitsConfig(search=0.5, select=0.5, report=0.0))
    found = by_split(made)
    empty: SplitName = "select" if found["search"] else "search"
    with pytest.raises(TaskError, match=f"has 1 tasks and none of them falls into its {empty}"):
        made.split(empty)
    assert made.split("report") == ()


@pytest.mark.parametrize("parts", [(0.5, 0.5, 0.5), (1.0, 0.1, 0.0), (0.3, 0.3, 0.3)])
def test_fractions_that_do_not_sum_to_one_are_refused(parts: tuple[float, float, float]) -> None:
    search, select, report = parts
    with pytest.raises(ValidationError, match="must be 1"):
        SplitsConfig(search=search, select=select, report=report)


@given(st.integers(0, 10_000), st.integers(1, 200))
def test_groups_decide_the_split_in_place_of_the_prompt(group: int, size: int) -> None:
    tasks = tuple(
        Task(id=f"s/{i}", prompt=f"claim {i}", reference="x", group=str(group)) for i in range(size)
    )
    made = Taskset(name="s", tasks=tasks, scorer=ExactConfig(), splits=ONE_IN_THREE)
    assert sorted(map(len, by_split(made).values())) == [0, 0, size]


few = st.lists(st.sampled_from([f"question {i}" for i in range(40)]), min_size=1, unique=True)
splits = st.builds(
    lambda parts, salt: fractions(parts).model_copy(update={"salt": salt}),
    weights,
    st.sampled_from(["rookery", "again"]),
)
groups = st.sampled_from(["", "", "1", "2", "3"])


@given(st.lists(st.tuples(few, splits, st.data()), min_size=2, max_size=4))
def test_a_question_is_in_one_split_of_all_tasksets_of_a_run(
    given_sets: list[tuple[list[str], SplitsConfig, st.DataObject]],
) -> None:
    made = []
    for number, (texts, own, data) in enumerate(given_sets):
        one = taskset(texts, own, name=f"set{number}")
        drawn = tuple(replace(task, group=data.draw(groups)) for task in one.tasks)
        made.append(replace(one, tasks=drawn))
    joined = join_splits(made)
    seen: dict[str, set[str]] = {}
    for before, after in zip(made, joined, strict=True):
        assert after.tasks == before.tasks
        found = by_split(after)
        for name in SPLITS:
            for task in after.tasks:
                if task.prompt in found[name]:
                    for key in (str(task.prompt), task.group):
                        seen.setdefault(key or str(task.prompt), set()).add(name)
            if before.splits.fraction(name) == 0:
                assert found[name] == []
        assert set(by_split(before)["report"]) <= set(found["report"]), "a report loses no task"
    assert all(len(names) == 1 for names in seen.values()), seen
    assert [one.moved for one in join_splits(joined)] == [one.moved for one in joined]
    assert [one.moved for one in join_splits(joined[::-1])][::-1] == [one.moved for one in joined]


def test_tasksets_of_equal_splits_keep_every_task_where_it_is() -> None:
    texts = [f"question {i}" for i in range(200)]
    for one in join_splits([taskset(texts), taskset(texts[:90], name="other")]):
        assert one.moved == {} and one.notes == ()


def test_unequal_fractions_move_the_shared_questions_and_say_so() -> None:
    texts = [f"question {i}" for i in range(300)]
    early, late = SplitsConfig(search=0.8, select=0.1, report=0.1), SplitsConfig()
    first, second = join_splits([taskset(texts, early), taskset(texts[:200], late, name="other")])
    shared = set(texts[:200])
    assert set(by_split(second)["report"]) == shared & set(by_split(first)["report"])
    assert len(first.moved) > 40 and not second.moved
    assert f"set: {len(first.moved)} of 300 tasks are in a later split" in first.notes[0]


def test_a_taskset_without_a_report_leaves_out_what_another_reports_on() -> None:
    texts = [f"question {i}" for i in range(60)]
    train = SplitsConfig(search=1.0, select=0.0, report=0.0)
    test = SplitsConfig(search=0.0, select=0.0, report=1.0)
    first, second = join_splits([taskset(texts, train), taskset(texts[:20], test, name="test")])
    assert by_split(first) == {"search": texts[20:], "select": [], "report": []}
    assert by_split(second)["report"] == texts[:20]
    assert "20 are left out" in first.notes[0]
    with pytest.raises(TaskError, match=r"none of them .* 20 moved for another taskset"):
        join_splits([taskset(texts[:20], train), second])[0].split("search")


# Rows that a parser lets through and a taskset cannot use; CSV files; what settles the fields.


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
