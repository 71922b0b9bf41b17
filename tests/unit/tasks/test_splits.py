from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from rookery.errors import TaskError
from rookery.tasks.scorers import ExactConfig
from rookery.tasks.splits import SPLITS, SplitName, SplitsConfig, split_key, split_of
from rookery.tasks.taskset import Taskset, join_splits
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
@settings(max_examples=30)
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
@settings(max_examples=60, deadline=None)
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
