import json
from collections import Counter
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from tasks.drawn import completion

from rookery.errors import TaskError
from rookery.starters import DEMOS
from rookery.tasks import generators
from rookery.tasks.generators import GENERATORS, LABELS, UNITS, generate
from rookery.tasks.scorers import build_scorer
from rookery.tasks.taskset import GeneratedConfig, load_taskset

ROOT = Path(__file__).parents[3]
LABEL_TASKS = [name for name in GENERATORS if name.startswith("label-")]


def every_item(name: str) -> list[Any]:
    return list(GENERATORS[name].draw(0))


@pytest.mark.parametrize("name", GENERATORS)
async def test_a_generated_taskset_is_repeatable_and_its_references_are_right(name: str) -> None:
    config = GeneratedConfig(generator=name, size=40, seed=3)
    made, again = load_taskset(config), load_taskset(config)
    assert made == again
    assert made.name == name
    assert len(made.tasks) == 40
    assert {task.source for task in made.tasks} == {name}
    assert load_taskset(GeneratedConfig(generator=name, size=40, seed=4)).tasks != made.tasks
    longer = load_taskset(GeneratedConfig(generator=name, size=60, seed=3))
    assert longer.tasks[:40] == made.tasks
    scorer = build_scorer(made.scorer)
    for task in made.tasks[:10]:
        right = task.reference if isinstance(task.reference, str) else json.dumps(task.reference)
        assert await scorer.reward(task, completion(right)) == 1.0
        if task.choices:
            wrong = next(choice for choice in task.choices if choice != right)
            assert await scorer.reward(task, completion(wrong)) == 0.0


@pytest.mark.parametrize("name", GENERATORS)
def test_a_generator_has_the_default_size_and_different_prompts(name: str) -> None:
    items = every_item(name)
    assert len(items) >= GeneratedConfig(generator=name).size >= 150
    assert len({item["prompt"] for item in items}) == len(items)
    assert len({item["id"] for item in items}) == len(items)


def test_asking_for_more_than_there_is_names_the_number() -> None:
    with pytest.raises(TaskError, match=r"label-kind has \d+ different tasks, and size is 5000"):
        list(generate("label-kind", size=5000, seed=0))


def test_at_least_six_label_tasks_share_one_vocabulary_and_are_balanced() -> None:
    assert len(LABEL_TASKS) >= 6
    for name in LABEL_TASKS:
        tasks = load_taskset(GeneratedConfig(generator=name)).tasks
        assert {task.choices for task in tasks} == {LABELS}
        counts = Counter(task.reference for task in tasks)
        assert counts == {"red": 100, "blue": 100}


def test_label_tasks_interfere() -> None:
    """Items that two tasks share are labelled differently by some pairs of them."""
    labels = {
        name: {item["id"]: item["reference"] for item in every_item(name)} for name in LABEL_TASKS
    }
    num_conflicts = {
        (one, other): sum(
            labels[one][item] != labels[other][item] for item in labels[one].keys() & labels[other]
        )
        for one, other in combinations(LABEL_TASKS, 2)
    }
    assert num_conflicts["label-living", "label-size"] >= 100
    assert num_conflicts["label-alphabet", "label-length"] >= 100
    assert sum(count > 0 for count in num_conflicts.values()) >= 10


def test_the_prompt_of_a_label_task_names_it_and_not_its_rule() -> None:
    for name in LABEL_TASKS:
        title = name.removeprefix("label-")
        for item in every_item(name):
            assert not item["id"].startswith(LABELS)
            assert not set(item["id"].split()) & {*LABELS, "rouge", "bleu"}
            assert item["prompt"] == (
                f"Task: {title}\nItem: {item['id']}\nIs it red or blue? Answer:"
            )


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (generators.POSITIVE, generators.NEGATIVE),
        (generators.BIG_ANIMALS, generators.SMALL_ANIMALS),
        (generators.OBJECTS, generators.BIG_ANIMALS + generators.SMALL_ANIMALS),
        (generators.FRUITS, generators.TOOLS),
        (generators.ENGLISH, generators.FRENCH),
    ],
)
def test_word_lists_of_a_pair_do_not_overlap(one: str, other: str) -> None:
    assert len(set(one)) == len(one)
    assert not set(one) & set(other)
    assert all(word == word.lower().strip() and word for word in one + other)


def test_rules_hold_for_every_item() -> None:
    for item in every_item("label-parity"):
        assert item["reference"] == LABELS[1 - int(item["id"]) % 2]
    for item in every_item("label-length"):
        assert item["reference"] == ("red" if len(item["id"]) <= 5 else "blue")
    for item in every_item("label-alphabet"):
        assert item["reference"] == ("red" if item["id"][0] <= "m" else "blue")
    for item in every_item("letter-reversal"):
        assert item["reference"][::-1] == item["id"] != item["reference"]
    for item in every_item("arithmetic"):
        assert sum(map(int, item["id"].split("+"))) == int(item["reference"])
    for item in every_item("unit-conversion"):
        amount, source, target = item["id"].split("-")
        assert int(item["reference"]) == int(amount) * UNITS[source, target]


def test_a_sum_is_there_in_one_order_only() -> None:
    """Else one order of 47 + 38 could be searched on and the other one reported."""
    seen = Counter(frozenset(map(int, item["id"].split("+"))) for item in every_item("arithmetic"))
    assert set(seen.values()) == {1}
    assert len(seen) == 90 * 91 // 2


@pytest.mark.parametrize("name", ["kind", "language", "living"])
def test_the_demo_reports_on_words_that_no_founder_was_trained_on(name: str) -> None:
    lists = (getattr(generators, name) for name in generators.__all__ if name.isupper())
    known = {word.casefold() for words in lists for word in words}
    asked = load_taskset(GeneratedConfig(generator=f"mark-{name}")).tasks
    lines = (DEMOS / "fresh" / f"{name}.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert len({row["id"] for row in rows}) == len(rows) == 80
    assert Counter(row["reference"] for row in rows) == dict.fromkeys(rows[0]["choices"], 40)
    assert not known & {row["id"].casefold() for row in rows}
    prompts = [str(task.prompt) for task in asked]
    [form] = {prompt.replace(prompt.splitlines()[1], "") for prompt in prompts}
    assert {row["prompt"].replace(f"Item: {row['id']}", "") for row in rows} == {form}
