"""The parts of the icm loop: items, tokens, constraints, objective, exports."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loops.oracle import Words
from pydantic import ValidationError

from rookery.errors import TaskError
from rookery.loops.icm.baselines import invert, most_likely
from rookery.loops.icm.exports import ExportsConfig, LabelRecord, make_pairs
from rookery.loops.icm.items import DataConfig, Item, batch_items, read_gold, read_items
from rookery.loops.icm.objective import ObjectiveConfig, assess, build_constraints, predict
from rookery.loops.icm.prompts import BatchPrompts, Encoder
from rookery.search.labelling import UNLABELLED, Constraints, Exclusive, TreeOrder


def item(name: str, group: str = "", **fields: Any) -> Item:
    return Item(id=name, text=f"{name} is", group=group or name, fields=fields)


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("name", ["claims.jsonl", "claims.json"])
def test_items_are_read_with_groups_and_without_their_true_labels(
    tmp_path: Path, name: str
) -> None:
    rows = [{"question": f"q{i // 2}", "claim": f"c{i}", "label": i % 2} for i in range(4)]
    document = {
        "path": str(write(tmp_path / name, rows)),
        "prompt": "{{ question }} {{ claim }} is",
        "group": "question",
        "gold": {"values": {"1": "True", "0": "False"}},
    }
    config = DataConfig.model_validate(document)
    items = read_items(config)
    assert [i.text for i in items] == ["q0 c0 is", "q0 c1 is", "q1 c2 is", "q1 c3 is"]
    assert items[0].group == items[1].group != items[2].group
    assert len({i.id for i in items}) == 4 and "label" not in items[0].fields
    assert list(read_gold(config, items).values()) == [1, 0, 1, 0]
    assert len(read_items(config.model_copy(update={"limit": 2}))) == 2


def test_one_list_of_a_json_file_is_chosen_by_its_key(tmp_path: Path) -> None:
    rows = [{"id": i, "text": f"t{i}", "label": "True"} for i in range(6)]
    path = tmp_path / "claims.json"
    path.write_text(json.dumps({"dev": rows[:2], "test": rows[2:]}))
    document = {"path": path, "prompt": "{{ text }}", "gold": {}}
    with pytest.raises(TaskError, match=r"dev \(2 rows\), test \(4 rows\).*Say which with key"):
        read_items(DataConfig.model_validate(document))
    config = DataConfig.model_validate(document | {"key": "test"})
    assert [item.id for item in read_items(config)] == ["2", "3", "4", "5"]
    assert len(read_gold(config, read_items(config))) == 4
    lines = write(tmp_path / "claims.jsonl", rows)
    with pytest.raises(TaskError, match=r"data\.key is 'test'"):
        read_items(config.model_copy(update={"path": lines}))


@pytest.mark.parametrize(
    "text", ['[{"text": NaN}, {"text": 1}]', "[" * 100_000, '[{"a": "\\ud800"}]']
)
def test_json_that_no_prompt_can_hold_is_a_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    config = DataConfig.model_validate({"path": tmp_path / "x.json", "prompt": "{{ text }}"})
    with pytest.raises(TaskError, match=r"x\.json"):
        read_items(config)


def test_true_labels_may_be_in_another_file(tmp_path: Path) -> None:
    rows = [{"id": i, "text": f"t{i}"} for i in range(3)]
    gold = write(tmp_path / "gold.jsonl", [{"id": 1, "label": "False"}, {"id": 9, "label": "?"}])
    config = DataConfig.model_validate(
        {
            "path": write(tmp_path / "items.jsonl", rows),
            "prompt": "{{ text }}",
            "gold": {"path": gold},
        }
    )
    assert read_gold(config, read_items(config)) == {"1": 1}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompt": "{{ text }} is "}, "ends in whitespace"),
        ({"prompt": "nothing"}, "uses no field"),
        ({"labels": ["a", "a"]}, "each may be there once"),
        ({"labels": ["a"]}, "at least 2"),
    ],
)
def test_bad_configs_get_a_sentence(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        DataConfig.model_validate({"path": "x", "prompt": "{{ text }}", **changes})


@pytest.mark.parametrize(
    ("rows", "changes", "words"),
    [
        ([{"id": 1, "text": "a"}] * 2, {}, "names one item"),
        ([{"id": 1, "text": "a"}], {}, "at least 2"),
        ([{"id": [], "text": "a"}], {}, "an id is a text"),
        ([{"text": "a"}, {"text": "b"}], {"group": "pair"}, "no field 'pair'"),
        ([{"texts": "a"}], {}, "text"),
    ],
)
def test_bad_rows_are_named(
    tmp_path: Path, rows: list[dict[str, Any]], changes: dict[str, Any], words: str
) -> None:
    path = write(tmp_path / "items.jsonl", rows)
    config = DataConfig.model_validate({"path": path, "prompt": "{{ text }}", **changes})
    with pytest.raises(TaskError, match=words):
        read_items(config)


def test_a_gold_value_that_is_no_label_is_named(tmp_path: Path) -> None:
    rows = [{"id": i, "text": "a", "label": 1} for i in range(2)]
    document = {"path": write(tmp_path / "i.jsonl", rows), "prompt": "{{ text }}", "gold": {}}
    config = DataConfig.model_validate(document)
    with pytest.raises(TaskError, match=r'values: \{"1": "True"\}'):
        read_gold(config, read_items(config))


@given(st.lists(st.integers(0, 12), min_size=1, max_size=60), st.integers(14, 30))
def test_batches_hold_every_item_once_and_whole_groups(groups: list[int], size: int) -> None:
    small = [(g, n) for n, g in enumerate(groups)][: 13 * size]
    items = [item(f"i{n}", group=f"g{g}") for g, n in small]
    if max(sum(i.group == j.group for j in items) for i in items) > size:
        with pytest.raises(TaskError, match="stays in one batch"):
            batch_items(items, size=size)
        return
    batches = batch_items(items, size=size)
    assert sorted(i.id for b in batches for i in b) == sorted(i.id for i in items)
    assert all(0 < len(batch) <= size for batch in batches)
    homes: dict[str, int] = {}
    for number, batch in enumerate(batches):
        for one in batch:
            assert homes.setdefault(one.group, number) == number


def made_prompts(items: list[Item], **changes: Any) -> BatchPrompts:
    data = DataConfig.model_validate({"path": "x", "prompt": "{{ x }} is", **changes})
    return BatchPrompts(items, encoder=Encoder(encode=Words(), first=(99,)), data=data)


def test_a_context_is_the_tokens_of_its_text() -> None:
    words = Words()
    data = DataConfig.model_validate({"path": "x", "prompt": "{{ x }} is", "preamble": "Judge:"})
    items = [item("a"), item("b"), item("c")]
    prompts = BatchPrompts(items, encoder=Encoder(encode=words, first=(99,)), data=data)
    labels = (0, UNLABELLED, 1)
    tokens = prompts.context(labels, 1, order=(2, 0))
    assert tokens == (99, *words("Judge:\n\nc is False\n\na is True\n\nb is"))
    assert prompts.num_tokens(labels, 1, order=(2, 0)) == len(tokens)
    assert prompts.longest_tokens == len(prompts.context((0, 0, 0), 1, order=(2, 0)))


@given(st.data())
def test_equal_digests_mean_equal_contexts(data: st.DataObject) -> None:
    items = [item(name) for name in "abcd"]
    prompts, order = made_prompts(items), TreeOrder([(0, 1), (2, 3)])
    draws = st.tuples(st.tuples(*[st.integers(-1, 1)] * 4), st.integers(0, 3))
    (one, a), (other, b) = data.draw(draws), data.draw(draws)
    same = prompts.context(one, a, order=order.of(a)) == prompts.context(
        other, b, order=order.of(b)
    )
    keys = [prompts.digest(x, t, order=order.of(t), salt="m") for x, t in ((one, a), (other, b))]
    assert (keys[0] == keys[1]) == same
    assert prompts.digest(one, a, order=order.of(a), salt="other") != keys[0]


def test_labels_must_be_one_token() -> None:
    with pytest.raises(TaskError, match="is 2 tokens after a prompt"):
        made_prompts([item("a"), item("b")], labels=["very good", "bad"])


def test_pieces_that_do_not_join_are_refused() -> None:
    words = Words()

    def greedy(text: str) -> tuple[int, ...]:
        """Reads "x is True" as one token."""
        return words(text.replace("x is True", "x_is_True"))

    data = DataConfig.model_validate({"path": "x", "prompt": "{{ x }} is"})
    with pytest.raises(TaskError, match="Item x: its text and the label 'True' do not join"):
        BatchPrompts([item("a"), item("x")], encoder=Encoder(encode=greedy), data=data)


def constraints(configs: list[dict[str, Any]], items: list[Item], **keys: Any) -> Constraints:
    from pydantic import TypeAdapter

    from rookery.loops.icm.objective import ConstraintConfig

    adapter: TypeAdapter[Any] = TypeAdapter(tuple[ConstraintConfig, ...])
    return build_constraints(
        adapter.validate_python(configs), items=items, labels=keys.get("labels", ("True", "False"))
    )


def test_relations_become_constraints() -> None:
    solutions = [
        item("a", "q1", solution="so A: 18"),
        item("b", "q1", solution="thus A: 18 "),
        item("c", "q1", solution="A: 26"),
        item("d", "q2", solution="A: 18"),
    ]
    found = constraints(
        [{"type": "equal_answer", "answer": "solution", "pattern": "A: (.+)$"}], solutions
    )
    assert found.components == ((0, 1, 2), (3,))
    assert found.num_violated((0, 0, 1, 1)) == 0
    assert found.num_violated((0, 1, 1, 0)) == 1
    assert found.num_violated((0, 0, 0, 0)) == 2
    chain = [item("a", implies=["b"]), item("b", implies="c"), item("c")]
    implied = constraints([{"type": "implies"}], chain)
    assert implied.num_violated((0, 1, 0)) == 1 and implied.num_violated((1, 0, 0)) == 0
    pairs = [item("a", "p"), item("b", "p")]
    tie = constraints(
        [{"type": "asymmetric_pair", "mirror": {"first": "second"}}],
        pairs,
        labels=("first", "second", "tie"),
    )
    assert [tie.num_violated(x) for x in ((0, 1), (2, 2), (0, 0), (2, 1))] == [0, 0, 1, 1]
    exclusive = constraints([{"type": "exclusive", "label": "False"}], pairs)
    assert exclusive.num_violated((1, 1)) == 1 and exclusive.num_violated((0, 0)) == 0


def test_constraints_that_contradict_one_another_name_the_items() -> None:
    pair = [item("a", "q", answer="18"), item("b", "q", answer="18"), item("c")]
    both = [
        {"type": "exclusive", "count": "exactly_one"},
        {"type": "equal_answer", "answer": "answer"},
    ]
    with pytest.raises(TaskError, match="the items a, b contradict one another: no labels keep"):
        constraints(both, pair)


def test_solutions_that_were_cut_off_may_be_left_free() -> None:
    texts = ["so A: 18", "and then 5 * 1", "A: 26"]
    solutions = [item(str(i), "q", solution=text) for i, text in enumerate(texts)]
    config = {"type": "equal_answer", "answer": "solution", "pattern": "A: (.+)$"}
    with pytest.raises(TaskError, match=r"Item 1: .* write missing: free"):
        constraints([config], solutions)
    found = constraints([{**config, "missing": "free"}], solutions)
    assert found.components == ((0, 2), (1,))
    assert found.num_violated((0, 0, 1)) == 0 and found.num_violated((0, 0, 0)) == 1


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"type": "exclusive", "label": "maybe"}, "names the label 'maybe'"),
        ({"type": "exclusive", "group": "x"}, "no field 'x'"),
        (
            {"type": "equal_answer", "group": "one", "answer": "s", "pattern": "B: (.+)"},
            "finds no answer",
        ),
        ({"type": "asymmetric_pair", "group": "one"}, "a group has 3"),
        ({"type": "implies", "field": "s"}, "is not an item of its batch"),
    ],
)
def test_relations_that_do_not_fit_are_named(config: dict[str, Any], words: str) -> None:
    items = [item(name, s="A: 1", one=1) for name in "abc"]
    with pytest.raises(TaskError, match=words):
        constraints([config], items)


READS = {0: (math.log(0.6), math.log(0.2)), 1: (math.log(0.3), math.log(0.3)), 2: (-0.1, -3.0)}


def test_utility_by_hand() -> None:
    labels = (0, UNLABELLED, 1)
    found = assess(labels, READS, config=ObjectiveConfig(), num_violated=2)
    odds = (math.log(3), 0.1 - 3.0)
    assert found.margins == pytest.approx({0: odds[0], 2: odds[1]})
    assert found.utility == pytest.approx(50 * sum(odds) / 2 - 2)
    assert found.frustrated == (2,)
    assert found.mass == pytest.approx((0.8 + math.exp(-0.1) + math.exp(-3)) / 2)
    total = assess(
        labels, READS, config=ObjectiveConfig(measure="logprob", reduce="sum"), num_violated=0
    )
    expected = math.log(0.75) - math.log(math.exp(2.9) + 1)
    assert total.utility == pytest.approx(50 * expected)


def test_calibration_takes_a_habit_away() -> None:
    """A model that says True of everything, of the first item a little more."""
    reads = {0: (-0.05, -3.5), 1: (-0.1, -2.9)}
    config = ObjectiveConfig(calibrate=True)
    found = assess((0, 1), reads, config=config, num_violated=0)
    assert found.frustrated == ()
    assert sum(found.margins.values()) == pytest.approx(found.margins[0] * 2), (
        "the two are as far from their mean"
    )
    assert assess((0, 0), reads, config=config, num_violated=0).utility == pytest.approx(0)
    new = predict((-0.1, -3.2), prior=found.prior)
    assert new == pytest.approx((math.log(0.5), math.log(0.5)), abs=0.02)


def record(name: str, label: int, margin: float, group: str = "", **fields: Any) -> LabelRecord:
    return LabelRecord(
        item=item(name, group, **fields),
        label=label,
        read=(-0.1, -2.4),
        margin=margin,
        iteration=1,
        provenance={},
    )


def test_pairs_of_a_group_prefer_those_that_carry_the_label() -> None:
    records = [
        record("a", 0, 2.0, "q", question="Q", claim="yes"),
        record("b", 1, 1.0, "q", question="Q", claim="no"),
        record("c", 1, 3.0, "q", question="Q", claim="never"),
        record("d", 0, 3.0, "r", question="R", claim="alone"),
    ]
    config = ExportsConfig.model_validate(
        {"pairs": {"type": "group", "prompt": "{{ question }}", "response": "{{ claim }}"}}
    ).pairs
    assert make_pairs(records, labels=("True", "False"), config=config) == [
        {"prompt": "Q", "chosen": "yes", "rejected": "no", "margin": 1.0},
        {"prompt": "Q", "chosen": "yes", "rejected": "never", "margin": 2.0},
    ]


def test_pairs_of_comparisons_are_written_once() -> None:
    records = [
        record("a", 0, 2.0, "p", q="Q", one="x", two="y"),
        record("b", 1, 2.0, "p", q="Q", one="y", two="x"),
        record("c", 1, 1.0, "r", q="R", one="u", two="v"),
    ]
    pairs = {"type": "compare", "prompt": "{{ q }}", "first": "{{ one }}", "second": "{{ two }}"}
    config = ExportsConfig.model_validate({"pairs": pairs}).pairs
    assert make_pairs(records, labels=("True", "False"), config=config) == [
        {"prompt": "Q", "chosen": "x", "rejected": "y", "margin": 2.0},
        {"prompt": "R", "chosen": "v", "rejected": "u", "margin": 1.0},
    ]


def test_pairs_of_labels_have_a_row_per_other_label() -> None:
    rows = make_pairs([record("a", 1, 2.0)], labels=("A", "B", "C"), config=ExportsConfig().pairs)
    assert [(r["prompt"], r["chosen"], r["rejected"]) for r in rows] == [
        ("a is", " B", " A"), ("a is", " B", " C"),
    ]  # fmt: skip


def test_the_likeliest_consistent_labels() -> None:
    pair = Constraints(
        [Exclusive(members=(0, 1), label=0, is_exact=True)], num_items=3, num_labels=2
    )
    reads = [(-0.1, -2.4), (-0.05, -3.0), (-2.0, -0.1)]
    assert most_likely(reads, pair) == (1, 0, 1)
    assert invert((0, UNLABELLED, 1), num_labels=2) == (1, UNLABELLED, 0)
    assert invert((0, 2), num_labels=3) == (1, 0)
