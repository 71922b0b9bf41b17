"""Who may be compared with whom, who wins, what is refused, what is said first."""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loops.evolution import SEARCHED, Evolved, Faulty, Genome, Inputs
from pydantic import TypeAdapter
from tiny import tiny_adapter

from rookery.errors import AdapterError, ConfigError, EngineError, TaskError
from rookery.loops.comparison import compare
from rookery.loops.genome.final_report import FinalReport
from rookery.reports import ReportRow
from rookery.rollout import TasksetEvaluator
from rookery.runs import Run
from rookery.seeding import stream
from rookery.tasks.scorers import NumericConfig
from rookery.tasks.splits import SPLITS
from rookery.tasks.taskset import Taskset, TasksetConfig, load_taskset
from rookery.tasks.template import load_template
from rookery.testing import BASE, FakeSampler
from rookery.types import (
    Adapter,
    Completion,
    Group,
    ModelRef,
    Rollout,
    Score,
    ScoreRequest,
    Task,
)
from rookery.weights import read_adapter, write_adapter


def _tasksets(inputs: Inputs, **changes: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"type": "jsonl", "path": str(inputs.tasks / f"{name}.jsonl"), "name": name}
        | changes.get(name, {})
        for name in ("first", "second")
    ]


def load(document: dict[str, Any]) -> Taskset:
    config: Any = TypeAdapter(TasksetConfig).validate_python(document)
    return load_taskset(config)


def tasks_of(inputs: Inputs, split: Any) -> list[Task]:
    return [task for document in _tasksets(inputs) for task in load(document).split(split)]


def judged_by(tmp_path: Path, inputs: Inputs, reward: str) -> list[dict[str, Any]]:
    """The first taskset, judged by an expression of `completion`."""
    scorer = tmp_path / "scorer.py"
    scorer.write_text(f"def reward(task, completion):\n    return float({reward})\n")
    function = {"type": "python", "function": f"{scorer}:reward"}
    return [_tasksets(inputs)[0] | {"scorer": function, "sampling": {"max_tokens": 1}}]


class Failing(Faulty):
    """Fails on the tokens of some prompts under some models."""

    def __init__(self, engine: Any, *, is_bad: Callable[[ScoreRequest], bool]) -> None:
        super().__init__(engine, share=0.0)
        self._is_bad = is_bad

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        if any(map(self._is_bad, requests)):
            raise EngineError("This one fails.")
        return await super().score(requests)


def tokens_of(task: Task) -> tuple[int, ...]:
    return tuple(int(word[1:]) for word in str(task.prompt).split())


async def test_a_finalist_that_fails_on_select_cannot_win(
    genome: Genome, evolved: Evolved, inputs: Inputs
) -> None:
    """It would win: it fails where it is wrong, and is right on all that is left."""
    winner = evolved.report.winner_id
    version = evolved.candidates[winner]["version"]
    rollouts = [e.payload for e in evolved.events("rollout") if e.key.startswith(version)]
    wrong = {payload["task"] for payload in rollouts if payload["reward"] == 0.0}
    prompts = {tokens_of(task) for task in tasks_of(inputs, "select") if task.id in wrong}
    assert prompts

    def is_bad(request: ScoreRequest) -> bool:
        return request.model.version == version and request.tokens in prompts

    report = (await genome(wrap=lambda e: Failing(e, is_bad=is_bad))).report
    assert report.winner_id != winner
    assert any("1 of 3 finalists failed on the select tasks" in w for w in report.warnings)


async def test_when_all_finalists_fail_on_select_the_report_says_so(
    genome: Genome, inputs: Inputs
) -> None:
    prompts = {tokens_of(task) for task in tasks_of(inputs, "select")}
    found = await genome(
        wrap=lambda e: Failing(e, is_bad=lambda r: r.tokens in prompts), merit="reward"
    )
    scores = {id: candidate["score"] for id, candidate in found.candidates.items()}
    best = max(score for score in scores.values() if score is not None)
    assert scores[found.report.winner_id] == best
    assert any("Every finalist failed on the select tasks" in w for w in found.report.warnings)


async def test_random_merges_that_fail_are_in_the_report(genome: Genome) -> None:
    class Refusing(Faulty):
        async def load(self, adapter: Adapter) -> ModelRef:
            if adapter.name == "r0003":
                raise EngineError(f"There is no room for {adapter.name}.")
            return await super().load(adapter)

    report = (await genome(wrap=partial(Refusing, share=0.0), finals=SEARCHED)).report
    [warning] = [w for w in report.warnings if "random merges" in w]
    outcome = "1 of 7 random merges failed and lost"
    assert warning == f"{outcome}. The first error: There is no room for r0003."
    assert "random search" in [row.name for row in report.rows]


async def test_a_floor_of_a_founder_is_kept_by_whom_it_is_taken_from(genome: Genome) -> None:
    found = await genome(floors={"first": "founder"})
    report, candidates = found.report, found.candidates
    founders = [node.id for node in report.lineage if node.operator == "founder"]
    size = next(t.num_search for t in report.tasksets if t.name == "first")

    def mean(name: str) -> float:
        """On the search tasks of the first taskset, from its answers."""
        seen: dict[str, float] = {}
        for event in found.events("rollout"):
            task = event.payload["task"]
            if event.key.startswith(candidates[name]["version"]) and task.startswith("first/"):
                seen.setdefault(task, event.payload["reward"])
        return sum(list(seen.values())[:size]) / size

    violations = [candidates[name]["violation"] for name in founders]
    assert min(violations) == 0 < max(violations)
    assert candidates[report.winner_id]["violation"] == 0
    assert report.floors["first"] == pytest.approx(max(map(mean, founders)))


async def test_a_floor_on_report_tasks_says_where_it_was_measured(genome: Genome) -> None:
    """The founder itself may have less on the report tasks."""
    report = (await genome(floors={"second": "founder"})).report
    [said] = [w for w in report.warnings if "below the floor" in w]
    assert said.endswith("0.656, the best founder's mean on the search tasks.")


async def test_a_race_with_floors_finds_the_winner_of_no_race(genome: Genome) -> None:
    floors = {"first": "founder"}
    raced, whole = [
        (
            await genome(
                f"race-{enabled}", race={"enabled": enabled, "block": 4}, seed=5, floors=floors
            )
        ).report
        for enabled in (True, False)
    ]
    assert raced.winner_id == whole.winner_id
    assert raced.num_rollouts <= whole.num_rollouts


async def test_a_taskset_without_select_tasks_counts_by_its_search_tasks(
    genome: Genome, inputs: Inputs
) -> None:
    splits = {"search": 0.7, "select": 0.0, "report": 0.3}
    tasksets = _tasksets(inputs, second={"splits": splits})
    found = await genome(tasksets=tasksets)
    select = {t.id for t in load(tasksets[0]).split("select")}
    search = [t.id for t in load(tasksets[1]).split("search")]
    rewards: dict[tuple[str, str], float] = {}
    for event in found.events("rollout"):
        version, task = event.key.split("|")[:2]
        rewards[version, task] = event.payload["reward"]
    assert "No select tasks in second: the choice among" in " ".join(found.report.warnings)
    ranked = sorted(found.candidates.values(), key=lambda c: c["score"], reverse=True)
    finalists = [c for c in ranked if {(c["version"], t) for t in select} <= set(rewards)]
    assert len(finalists) == 3

    def chosen_by(candidate: Mapping[str, Any]) -> float:
        """The mean of the first taskset's select tasks and the second's search tasks."""
        version = candidate["version"]
        return sum(
            sum(rewards[version, task] for task in tasks) / len(tasks) for tasks in (select, search)
        )

    assert found.report.winner_id == max(finalists, key=chosen_by)["id"]


@pytest.mark.parametrize("use", ["pairs", "both"])
async def test_what_the_search_begins_with(genome: Genome, inputs: Inputs, use: str) -> None:
    init = {"type": "file", "path": str(inputs.founders), "use": use, "num_pairs": 5}
    nodes = {node.id: node for node in (await genome(init=init)).report.lineage}
    pairs = {name for name in nodes if name.startswith("g000-")}
    assert len(pairs) == 5
    first = [node for node in nodes.values() if node.id.startswith("g001-")]
    parents = {parent for node in first for parent in node.parents}
    founders = {name for name, node in nodes.items() if node.operator == "founder"}
    assert first and parents
    if use == "pairs":
        assert parents <= pairs, "founders are baselines only"
    else:
        assert parents <= pairs | founders and parents & founders


def test_the_report_tasks_are_asked_once_and_at_the_end(evolved: Evolved, inputs: Inputs) -> None:
    ids = {split: {task.id for task in tasks_of(inputs, split)} for split in SPLITS}
    rollouts = evolved.events("rollout")
    kinds = [next(s for s in SPLITS if e.payload["task"] in ids[s]) for e in rollouts]
    first_report = kinds.index("report")
    assert set(kinds[first_report:]) == {"report"}, "nothing is decided after it was read"
    assert max(Counter(event.key for event in rollouts).values()) == 1


def test_the_vote_counts_answers_and_not_their_wording(inputs: Inputs) -> None:
    task = Task(id="t/0", prompt="w5", reference="12", source="t")
    taskset = Taskset(name="t", tasks=(task,), scorer=NumericConfig())
    template = load_template(inputs.model)
    evaluator = TasksetEvaluator(FakeSampler(), template=template, tasksets=[taskset])

    def ballot(text: str, reward: float) -> list[Group]:
        completion = Completion(
            model=BASE, tokens=(5,), logprobs=(-1.0,), text=text, finish_reason="stop"
        )
        rollout = Rollout(task=task, completion=completion, reward=reward)
        return [Group(task=task, model=BASE, rollouts=(rollout,))]

    final = FinalReport(evaluator, loader=None, base=BASE, builder=None, search=None, weights={})  # type: ignore[arg-type]
    texts = {"I get 7": 0.0, "The answer is 12": 1.0, "#### 12": 1.0}
    assert final.vote([ballot(text, reward) for text, reward in texts.items()]) == {"t/0": 1.0}
    unread = [ballot("no number", 0.0), ballot("none either", 0.0)]
    assert final.vote(unread) == {"t/0": 0.0}


def test_an_entry_that_misses_a_task_has_no_mean_and_no_difference() -> None:
    tasks = [Task(id=f"{s}{i}", prompt="", reference="", source=s) for s in "ab" for i in range(9)]
    full = {task.id: float(i % 2) for i, task in enumerate(tasks)}
    missing = {id: reward for id, reward in full.items() if id != "a3"}
    named = {"evolved": full, "best founder": missing, "sum": full}
    rows = compare(named, tasks, weights={"a": 1.0, "b": 1.0}, seed=0)
    assert rows[0].mean is not None and rows[0].gain is None
    assert rows[1].mean is None and rows[1].num_failed == 1
    assert set(rows[1].by_source) == {"b"} and rows[1].lead is None
    assert rows[2].lead is not None and rows[2].lead.mean == 0.0


@pytest.mark.parametrize("grouping", ["group", "prompt"])
def test_tasks_of_one_question_count_once(grouping: str) -> None:
    """30 questions of 8 rows: the intervals of the 30 mean rewards, not of 240 tasks."""
    rng = stream(0)
    rewards = (rng.random((2, 30, 8)) < rng.beta(0.6, 0.4, size=(2, 30, 1))) * 1.0

    def report(rows: np.ndarray, num_rows: int) -> list[ReportRow]:
        tasks = [
            Task(
                id=f"{q}-{r}",
                prompt=f"{q}" if grouping == "prompt" else f"{q}-{r}",
                reference="",
                source="a",
                group=f"{q}" if grouping == "group" else "",
            )
            for q in range(30)
            for r in range(num_rows)
        ]
        ids = [task.id for task in tasks]
        first, second = [dict(zip(ids, part.ravel().tolist(), strict=True)) for part in rows]
        named = {"evolved": first, "best founder": second}
        return compare(named, tasks, weights={"a": 1.0}, seed=0)

    clustered, means = report(rewards, 8), report(rewards.mean(axis=2), 1)
    assert clustered[0].gain is not None and means[0].gain is not None
    for one, other in ((clustered[0], means[0]), (clustered[0].gain, means[0].gain)):
        assert (one.mean, one.low, one.high) == pytest.approx((other.mean, other.low, other.high))


async def test_a_baseline_that_beats_the_winner_is_said_first(
    genome: Genome, inputs: Inputs, tmp_path: Path
) -> None:
    """No adapter can do better than the base model."""
    tasksets = judged_by(tmp_path, inputs, "completion.model.name == 'base'")
    report = (await genome(tasksets=tasksets)).report
    assert "The base model is better than the winner by 1.000" in report.warnings[0]


def test_what_is_left_behind(evolved: Evolved) -> None:
    report = evolved.report
    population = {entry.id for entry in report.population}
    assert {path.name for path in (evolved.path / "population").iterdir()} == population
    assert len(population) == 4
    for name in population:
        read_adapter(evolved.path / "population" / name)
    front = [{s: m for s, m in e.by_source.items() if m is not None} for e in report.front]
    assert front and all(set(means) == {"first", "second"} for means in front)
    for means in front:
        for other in front:
            is_worse = all(other[s] >= means[s] for s in means) and other != means
            assert not is_worse
    costs = {row.name: row for row in report.rows}
    assert costs["evolved"].num_candidates == report.num_candidates
    assert costs["evolved"].num_tokens > costs["best founder"].num_tokens > 0
    assert costs["random search"].num_candidates == report.num_candidates
    assert costs["random search"].num_tokens > 0 and (costs["random search"].seconds or 0) > 0
    assert costs["base model"].num_tokens == 0
    assert costs["uniform average"].num_candidates == 1


LONG = {"prompt": "w5 " * 130, "choices": ["w90", "w91"], "reference": "w90"}
FIRST = {"type": "jsonl", "name": "first"}
FEW = {"search": 0.6, "select": 0.2, "report": 0.2}
LONE = {"init": {"type": "file", "path": "one", "use": "both"}}
NAMES = ("g001-c00", "e002-centre", "m001-p00", "s1-n003-p02", "r001-p00", "r0001")


@pytest.fixture
def wrong_files(inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks that are too long or too few, a lone founder, and founders with candidates' names."""
    monkeypatch.chdir(tmp_path)
    for name in ("only", *NAMES):
        write_adapter(tiny_adapter("x", seed=1), Path("one" if name == "only" else name, name))
    rows = (inputs.tasks / "first.jsonl").read_text().splitlines(keepends=True)
    Path("long.jsonl").write_text("".join([*rows, json.dumps(LONG)]))
    Path("few.jsonl").write_text("".join(rows[:6]))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"rank": 65}, ConfigError, "rank is 65, and the engine takes adapters up to rank 64"),
        ({"floors": {"third": 0.5}}, ConfigError, "floors names 'third'"),
        (LONE, ConfigError, "there is only one"),
        ({"tasksets": [{**FIRST, "path": "long.jsonl"}]}, TaskError, "1 of 61 tasks do not fit"),
        (
            {"tasksets": [{**FIRST, "path": "few.jsonl", "splits": FEW}]},
            TaskError,
            "report split",
        ),
        *(({"init": {"type": "file", "path": name}}, AdapterError, f"'{name}'") for name in NAMES),
    ],
)
@pytest.mark.usefixtures("wrong_files")
async def test_what_cannot_work_is_refused_before_the_first_question(
    genome: Genome,
    tmp_path: Path,
    changes: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        await genome(**changes)
    with Run.view(tmp_path / "a") as run:
        assert not list(run.events("rollout"))


async def test_rewards_above_one_need_a_range_only_for_a_race(
    genome: Genome, inputs: Inputs, tmp_path: Path
) -> None:
    tasksets = judged_by(tmp_path, inputs, "5.0 + completion.tokens[0] % 2")
    report = (await genome("off", tasksets=tasksets, race={"enabled": False})).report
    assert (report.rows[0].mean or 0) > 4
    with pytest.raises((TaskError, ConfigError), match="high"):
        await genome("on", tasksets=tasksets)


async def test_a_taskset_that_is_only_reported_has_no_say_in_search_and_choice(
    genome: Genome, inputs: Inputs
) -> None:
    splits = {"search": 0.0, "select": 0.0, "report": 1.0}
    tasksets = _tasksets(inputs, second={"splits": splits})
    found = await genome(tasksets=tasksets, floors={"first": 0.99})
    violations = [candidate["violation"] for candidate in found.candidates.values()]
    assert min(violations) > 0, "floors bind all the same, founders too"
    said = found.report.warnings
    assert any("keeps every floor: the winner misses" in warning for warning in said)
    assert set(found.report.rows[0].by_source) == {"first", "second"}
    assert "second" not in " ".join(found.report.warnings), "its splits say so"


async def test_founders_may_be_called_like_report_entries(
    genome: Genome, inputs: Inputs, tmp_path: Path
) -> None:
    folder = tmp_path / "named"
    names = ("evolved", "base", "best founder", "plain sum")
    for name, source in zip(names, sorted(inputs.founders.iterdir()), strict=True):
        write_adapter(read_adapter(source), folder / name)
    found = await genome(init={"type": "file", "path": str(folder)})
    tasks = {task.id for task in tasks_of(inputs, "report")}
    asked = Counter(
        event.key.split("|")[0]
        for event in found.events("rollout")
        if event.payload["task"] in tasks
    )
    # The best three founders vote, and each has its own answers.
    versions = [found.candidates[name]["version"] for name in names]
    assert sum(asked[version] == len(tasks) for version in versions) >= 3


async def test_finalists_differ_in_their_weights(
    genome: Genome, inputs: Inputs, tmp_path: Path
) -> None:
    """Many children of few parents are the same average."""
    folder = tmp_path / "two"
    for name in ("f1", "f2"):
        write_adapter(read_adapter(inputs.founders / name), folder / name)
    operators = [{"type": "crossover", "name": "linear", "weights": "uniform"}]
    children = {"count": 6, "operators": operators}
    stage = {"type": "ga", "generations": 2, "population": {"size": 6, "children": children}}
    select = {task.id for task in tasks_of(inputs, "select")}
    found = await genome(init={"type": "file", "path": str(folder)}, stages=[stage])
    versions = [candidate["version"] for candidate in found.candidates.values()]
    rollouts = found.events("rollout")
    asked = {e.key.split("|")[0] for e in rollouts if e.payload["task"] in select}
    assert 3 < len(set(versions)) < len(versions)
    assert len(asked) == 3


def test_who_only_lost_may_have_won_what_others_won() -> None:
    """A game is worth 10: three losses do not prove a mean below 1."""
    tasks = [Task(id=f"t{i}", prompt=f"p{i}", reference=None) for i in range(3)]
    lost, won = {t.id: 0.0 for t in tasks}, {t.id: 10.0 for t in tasks}
    [loser, _] = compare({"lost": lost, "won": won}, tasks, weights={}, seed=0)
    assert loser.high is not None and loser.high > 1
