"""Who may be compared with whom, who wins, what is refused, what is said first."""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loops.evolution import Faulty, Genome, Inputs
from marks import long
from tiny import tiny_adapter

from rookery.errors import AdapterError, ConfigError, EngineError, TaskError
from rookery.loops.comparison import compare
from rookery.reports import GenomeReport, ReportRow
from rookery.runs import Run
from rookery.seeding import stream
from rookery.tasks.splits import SPLITS
from rookery.tasks.taskset import load_taskset
from rookery.types import Adapter, ModelRef, Score, ScoreRequest, Task
from rookery.weights import read_adapter, write_adapter

FEW = {"finals": {"random_search": False, "num_finalists": 3}}


def _run(root: Path, name: str = "a") -> Run:
    return Run.create(root, kind="genome", config={}, name=name)


def _tasksets(inputs: Inputs, **changes: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "type": "jsonl",
            "path": str(inputs.tasks / f"{name}.jsonl"),
            "name": name,
            **changes.get(name, {}),
        }
        for name in ("first", "second")
    ]


class Failing(Faulty):
    """Fails on the tokens of some prompts under some models."""

    def __init__(self, engine: Any, *, is_bad: Callable[[ScoreRequest], bool]) -> None:
        super().__init__(engine, share=0.0)
        self._is_bad = is_bad

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        if any(map(self._is_bad, requests)):
            raise EngineError("This one fails.")
        return await super().score(requests)


async def test_a_finalist_that_fails_on_select_cannot_win(
    genome: Genome, inputs: Inputs, tmp_path: Path
) -> None:
    """It would win: it fails where it is wrong, and is right on all that is left."""
    with _run(tmp_path, "whole") as run:
        winner = (await genome(run, **FEW)).winner_id
        version = {e.key: e.payload["version"] for e in run.events("candidate")}[winner]
        rollouts = [e.payload for e in run.events("rollout") if e.key.startswith(version)]
    wrong = {payload["task"] for payload in rollouts if payload["reward"] == 0.0}
    tasks = [
        task
        for document in inputs.document()["tasksets"]  # type: ignore[attr-defined]
        for task in load_taskset(_parse(document)).split("select")
    ]
    prompts = {tuple(_encode(task)) for task in tasks if task.id in wrong}
    assert prompts

    def is_bad(request: ScoreRequest) -> bool:
        return request.model.version == version and request.tokens in prompts

    with _run(tmp_path, "failing") as run:
        report = await genome(run, wrap=lambda e: Failing(e, is_bad=is_bad), **FEW)
    assert report.winner_id != winner
    assert any("1 of 3 finalists failed on the select tasks" in w for w in report.warnings)


def _parse(document: dict[str, Any]) -> Any:
    from pydantic import TypeAdapter

    from rookery.tasks.taskset import TasksetConfig

    return TypeAdapter(TasksetConfig).validate_python(document)


def _encode(task: Task) -> list[int]:
    return [int(word[1:]) for word in str(task.prompt).split()]


async def test_when_all_finalists_fail_on_select_the_report_says_so(
    genome: Genome, inputs: Inputs, tmp_path: Path
) -> None:
    tasksets = [load_taskset(_parse(document)) for document in _tasksets(inputs)]
    prompts = {tuple(_encode(task)) for t in tasksets for task in t.split("select")}
    with _run(tmp_path) as run:
        report = await genome(
            run,
            wrap=lambda e: Failing(e, is_bad=lambda r: r.tokens in prompts),
            merit="reward",
            **FEW,
        )
        scores = {e.key: e.payload["score"] for e in run.events("candidate")}
    assert scores[report.winner_id] == max(s for s in scores.values() if s is not None)
    assert any("Every finalist failed on the select tasks" in w for w in report.warnings)


@pytest.mark.parametrize(("prefix", "outcome"), [
    ("r", "7 of 7 random merges failed and there is no random search to compare with"),
    ("r0003", "1 of 7 random merges failed and lost"),
])  # fmt: skip
async def test_random_merges_that_fail_are_in_the_report(
    genome: Genome, tmp_path: Path, prefix: str, outcome: str
) -> None:
    class Refusing(Faulty):
        async def load(self, adapter: Adapter) -> ModelRef:
            if adapter.name.startswith(prefix):
                raise EngineError(f"There is no room for {adapter.name}.")
            return await super().load(adapter)

    with _run(tmp_path) as run:
        report = await genome(run, wrap=partial(Refusing, share=0.0))
    [warning] = [w for w in report.warnings if "random merges" in w]
    first = "r0000" if prefix == "r" else prefix
    assert warning == f"{outcome}. The first error: There is no room for {first}."
    assert ("random search" in [row.name for row in report.rows]) == (prefix == "r0003")


async def test_floors_bind_founders_too(genome: Genome, tmp_path: Path) -> None:
    with _run(tmp_path, "high") as run:
        report = await genome(run, floors={"first": 0.99}, **FEW)
        founders = [
            e.payload for e in run.events("candidate") if e.payload["operator"] == "founder"
        ]
    assert len(founders) == 4 and all(f["violation"] > 0.2 for f in founders)
    assert any("keeps every floor: the winner misses" in warning for warning in report.warnings)


async def test_a_floor_of_a_founder_is_kept_by_whom_it_is_taken_from(
    genome: Genome, tmp_path: Path
) -> None:
    with _run(tmp_path) as run:
        report = await genome(run, floors={"first": "founder"}, **FEW)
        found = {e.key: e.payload for e in run.events("candidate")}
        founders = [node for node in report.lineage if node.operator == "founder"]
        best = max(_mean(report, node.id, run) for node in founders)
    assert min(found[node.id]["violation"] for node in founders) == 0
    assert max(found[node.id]["violation"] for node in founders) > 0
    assert found[report.winner_id]["violation"] == 0
    assert report.floors["first"] == pytest.approx(best)


async def test_a_floor_on_report_tasks_says_where_it_was_measured(
    genome: Genome, tmp_path: Path
) -> None:
    """The founder itself may have less on the report tasks."""
    with _run(tmp_path, "a") as run:
        measured = await genome(run, floors={"second": "founder"}, **FEW)
    with _run(tmp_path, "b") as run:
        given = await genome(run, floors={"second": 0.99}, **FEW)
    [of_founder] = [w for w in measured.warnings if "below the floor" in w]
    assert of_founder.endswith("0.656, the best founder's mean on the search tasks.")
    [of_config] = [w for w in given.warnings if "below the floor" in w]
    assert of_config.endswith("below the floor of 0.990.")


def _mean(report: GenomeReport, name: str, run: Run) -> float:
    """A founder's mean on the search tasks of the first taskset, from its answers."""
    version = {e.key: e.payload["version"] for e in run.events("candidate")}[name]
    seen: dict[str, float] = {}
    for event in run.events("rollout"):
        if event.key.startswith(version) and event.payload["task"].startswith("first/"):
            seen.setdefault(event.payload["task"], event.payload["reward"])
    size = next(t.num_search for t in report.tasksets if t.name == "first")
    return sum(list(seen.values())[:size]) / size


@pytest.mark.parametrize("floors", [{}, {"first": "founder"}])
async def test_a_race_with_floors_finds_the_winner_of_no_race(
    genome: Genome, tmp_path: Path, floors: dict[str, Any]
) -> None:
    reports = {}
    for enabled in (True, False):
        with _run(tmp_path, f"race-{enabled}") as run:
            race = {"enabled": enabled, "block": 4}
            reports[enabled] = await genome(run, race=race, seed=5, floors=floors, **FEW)
    assert reports[True].winner_id == reports[False].winner_id
    assert reports[True].num_rollouts <= reports[False].num_rollouts


async def test_a_taskset_without_select_tasks_counts_by_its_search_tasks(
    genome: Genome, inputs: Inputs, tmp_path: Path
) -> None:
    splits = {"search": 0.7, "select": 0.0, "report": 0.3}
    tasksets = _tasksets(inputs, second={"splits": splits})
    with _run(tmp_path) as run:
        report = await genome(run, tasksets=tasksets, **FEW)
        candidates = {e.key: e.payload for e in run.events("candidate")}
        select = {t.id for t in load_taskset(_parse(tasksets[0])).split("select")}
        rewards: dict[tuple[str, str], float] = {}
        for event in run.events("rollout"):
            version, task = event.key.split("|")[:2]
            rewards[version, task] = event.payload["reward"]
    assert "the search tasks again of second." in " ".join(report.warnings)
    ranked = sorted(candidates.values(), key=lambda c: c["score"], reverse=True)
    finalists = [c for c in ranked if {(c["version"], t) for t in select} <= set(rewards)]
    assert len(finalists) == 3

    def chosen_by(candidate: Mapping[str, Any]) -> float:
        """The mean of the first taskset's select tasks and the second's search tasks."""
        own = [rewards[candidate["version"], task] for task in select]
        search = [t.id for t in load_taskset(_parse(tasksets[1])).split("search")]
        other = [rewards[candidate["version"], task] for task in search]
        return sum(own) / len(own) + sum(other) / len(other)

    assert report.winner_id == max(finalists, key=chosen_by)["id"]


@pytest.mark.parametrize("use", ["pairs", "both", pytest.param("adapters", marks=long)])
async def test_what_the_search_begins_with(
    genome: Genome, inputs: Inputs, tmp_path: Path, use: str
) -> None:
    init = {"type": "file", "path": str(inputs.founders), "use": use, "num_pairs": 5}
    with _run(tmp_path) as run:
        report = await genome(run, init=init, **FEW)
    nodes = {node.id: node for node in report.lineage}
    pairs = {name for name in nodes if name.startswith("g000-")}
    assert len(pairs) == (0 if use == "adapters" else 5)
    first = [node for node in nodes.values() if node.id.startswith("g001-")]
    parents = {parent for node in first for parent in node.parents}
    assert first and parents
    founders = {name for name, node in nodes.items() if node.operator == "founder"}
    if use == "pairs":
        assert parents <= pairs, "founders are baselines only"
    elif use == "both":
        assert parents <= pairs | founders and parents & founders
    else:
        assert parents <= founders


async def test_the_report_tasks_are_asked_once_and_at_the_end(
    genome: Genome, inputs: Inputs, tmp_path: Path
) -> None:
    tasksets = [load_taskset(_parse(document)) for document in _tasksets(inputs)]
    ids = {s: {task.id for t in tasksets for task in t.split(s)} for s in SPLITS}
    with _run(tmp_path) as run:
        await genome(run)
        rollouts = list(run.events("rollout"))
    kinds = [next(s for s in SPLITS if e.payload["task"] in ids[s]) for e in rollouts]
    first_report = kinds.index("report")
    assert set(kinds[first_report:]) == {"report"}, "nothing is decided after it was read"
    asked = Counter(event.key for event in rollouts)
    assert max(asked.values()) == 1


async def test_the_vote_counts_answers_and_not_their_wording(
    genome: Genome, inputs: Inputs, tmp_path: Path
) -> None:
    from rookery.loops.genome.final_report import FinalReport
    from rookery.rollout import TasksetEvaluator
    from rookery.tasks.scorers import NumericConfig
    from rookery.tasks.taskset import Taskset
    from rookery.tasks.template import load_template
    from rookery.testing import BASE, FakeSampler
    from rookery.types import Completion, Group, Rollout

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
    rows = compare(
        {"evolved": full, "best founder": missing, "sum": full},
        tasks,
        weights={"a": 1.0, "b": 1.0},
        seed=0,
    )
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
        own = [dict(zip(ids, part.ravel().tolist(), strict=True)) for part in rows]
        named = {"evolved": own[0], "best founder": own[1]}
        return compare(named, tasks, weights={"a": 1.0}, seed=0)

    clustered, means = report(rewards, 8), report(rewards.mean(axis=2), 1)
    assert clustered[0].gain is not None and means[0].gain is not None
    for one, other in ((clustered[0], means[0]), (clustered[0].gain, means[0].gain)):
        assert (one.mean, one.low, one.high) == pytest.approx((other.mean, other.low, other.high))


async def test_a_baseline_that_beats_the_winner_is_said_first(
    genome: Genome, inputs: Inputs, tmp_path: Path
) -> None:
    """References are the base model's own answers: no adapter can do better."""
    with _run(tmp_path, "base") as run:
        await genome(run, **FEW)
    rows = []
    for line in (inputs.tasks / "first.jsonl").read_text().splitlines():
        rows.append(json.loads(line))
    scorer = tmp_path / "strict.py"
    scorer.write_text(
        "def reward(task, completion):\n    return float(completion.model.name == 'base')\n"
    )
    tasksets = _tasksets(inputs)[:1]
    tasksets[0] |= {
        "scorer": {"type": "python", "function": f"{scorer}:reward"},
        "sampling": {"max_tokens": 1},
    }
    with _run(tmp_path, "beaten") as run:
        report = await genome(run, tasksets=tasksets, **FEW)
    assert "The base model is better than the winner by 1.000" in report.warnings[0]


async def test_what_is_left_behind(genome: Genome, tmp_path: Path) -> None:
    with _run(tmp_path) as run:
        report = await genome(run)
        population = {entry.id for entry in report.population}
        assert {path.name for path in (run.path / "population").iterdir()} == population
        assert len(population) == 4
        for name in population:
            read_adapter(run.path / "population" / name)
    front = [{s: m for s, m in e.by_source.items() if m is not None} for e in report.front]
    assert front and all(set(means) == {"first", "second"} for means in front)
    for means in front:
        for other in front:
            assert not (
                all(other[s] >= means[s] for s in means) and any(other[s] > means[s] for s in means)
            )
    costs = {row.name: row for row in report.rows}
    assert costs["evolved"].num_candidates == report.num_candidates
    assert costs["evolved"].num_tokens > costs["best founder"].num_tokens > 0
    assert costs["random search"].num_candidates == report.num_candidates
    assert costs["random search"].num_tokens > 0 and (costs["random search"].seconds or 0) > 0
    assert costs["base model"].num_tokens == 0
    assert costs["uniform average"].num_candidates == 1


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"rank": 65}, ConfigError, "rank is 65, and the engine takes adapters up to rank 64"),
    ({"floors": {"third": 0.5}}, ConfigError, "floors names 'third'"),
]


@pytest.mark.parametrize(("changes", "error", "message"), BAD, ids=[m for *_, m in BAD])
async def test_what_cannot_work_is_refused_before_the_first_question(
    genome: Genome,
    tmp_path: Path,
    changes: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    with _run(tmp_path) as run:
        with pytest.raises(error, match=message):
            await genome(run, **changes)
        assert not list(run.events("rollout"))


@pytest.mark.parametrize(
    "name", ["g001-c00", "e002-centre", "m001-p00", "s1-n003-p02", "r001-p00", "r0001"]
)
async def test_founders_with_names_of_candidates_are_refused(
    genome: Genome, tmp_path: Path, name: str
) -> None:
    folder = tmp_path / "founders"
    write_adapter(tiny_adapter("x", seed=1), folder / name)
    with _run(tmp_path, "names") as run, pytest.raises(AdapterError, match=f"'{name}'"):
        await genome(run, init={"type": "file", "path": str(folder)})


async def test_lone_pairs_are_refused(genome: Genome, tmp_path: Path) -> None:
    alone = tmp_path / "one"
    write_adapter(tiny_adapter("x", seed=1), alone / "only")
    with _run(tmp_path, "alone") as run, pytest.raises(ConfigError, match="there is only one"):
        await genome(run, init={"type": "file", "path": str(alone), "use": "both"})


async def test_tasks_that_are_too_long_or_too_few_are_refused(
    genome: Genome, inputs: Inputs, tmp_path: Path
) -> None:
    rows = (inputs.tasks / "first.jsonl").read_text().splitlines()
    long = {"prompt": "w5 " * 130, "choices": ["w90", "w91"], "reference": "w90"}
    path = tmp_path / "long.jsonl"
    path.write_text("\n".join([*rows, json.dumps(long)]) + "\n")
    with _run(tmp_path, "long") as run:
        with pytest.raises(TaskError, match="1 of 61 tasks do not fit"):
            await genome(run, tasksets=[{"type": "jsonl", "path": str(path), "name": "first"}])
        assert not list(run.events("rollout"))
    path.write_text("\n".join(rows[:6]) + "\n")
    splits = {"search": 0.6, "select": 0.2, "report": 0.2}
    few = [{"type": "jsonl", "path": str(path), "name": "first", "splits": splits}]
    with _run(tmp_path, "few") as run, pytest.raises(TaskError, match="report split"):
        await genome(run, tasksets=few)


async def test_rewards_above_one_need_a_range_only_for_a_race(
    genome: Genome, inputs: Inputs, tmp_path: Path
) -> None:
    scorer = tmp_path / "big.py"
    scorer.write_text("def reward(task, completion):\n    return 5.0 + completion.tokens[0] % 2\n")
    tasksets = _tasksets(inputs)[:1]
    tasksets[0] |= {
        "scorer": {"type": "python", "function": f"{scorer}:reward"},
        "sampling": {"max_tokens": 1},
    }
    with _run(tmp_path, "off") as run:
        report = await genome(run, tasksets=tasksets, race={"enabled": False}, **FEW)
        assert (report.rows[0].mean or 0) > 4
    with _run(tmp_path, "on") as run, pytest.raises((TaskError, ConfigError), match="high"):
        await genome(run, tasksets=tasksets, **FEW)


async def test_a_taskset_that_is_only_reported_has_no_say_in_search_and_choice(
    genome: Genome, inputs: Inputs, tmp_path: Path
) -> None:
    splits = {"search": 0.0, "select": 0.0, "report": 1.0}
    tasksets = _tasksets(inputs, second={"splits": splits})
    with _run(tmp_path) as run:
        report = await genome(run, tasksets=tasksets, floors={"first": 0.99}, **FEW)
        found = [e.payload for e in run.events("candidate")]
    assert all(candidate["violation"] > 0 for candidate in found), "floors bind all the same"
    assert set(report.rows[0].by_source) == {"first", "second"}
    assert "No search tasks: the search does not see second." in report.warnings


async def test_founders_may_be_called_like_report_entries(
    genome: Genome, inputs: Inputs, tmp_path: Path
) -> None:
    folder = tmp_path / "named"
    names = ("evolved", "base", "best founder", "plain sum")
    for name, source in zip(names, sorted(inputs.founders.iterdir()), strict=True):
        write_adapter(read_adapter(source), folder / name)
    with _run(tmp_path) as run:
        await genome(run, init={"type": "file", "path": str(folder)}, **FEW)
        versions = {e.key: e.payload["version"] for e in run.events("candidate")}
        tasks = {
            task.id
            for document in _tasksets(inputs)
            for task in load_taskset(_parse(document)).split("report")
        }
        asked = Counter(
            event.key.split("|")[0]
            for event in run.events("rollout")
            if event.payload["task"] in tasks
        )
    # The best three founders vote, and each has its own answers.
    assert sum(asked[versions[name]] == len(tasks) for name in names) >= 3


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
    select = {
        task.id
        for document in _tasksets(inputs)
        for task in load_taskset(_parse(document)).split("select")
    }
    with _run(tmp_path) as run:
        await genome(run, init={"type": "file", "path": str(folder)}, stages=[stage], **FEW)
        found = [e.payload["version"] for e in run.events("candidate")]
        asked = {e.key.split("|")[0] for e in run.events("rollout") if e.payload["task"] in select}
    assert 3 < len(set(found)) < len(found)
    assert len(asked) == 3


def test_who_only_lost_may_have_won_what_others_won() -> None:
    """A game is worth 10: three losses do not prove a mean below 1."""
    tasks = [Task(id=f"t{i}", prompt=f"p{i}", reference=None) for i in range(3)]
    lost, won = {t.id: 0.0 for t in tasks}, {t.id: 10.0 for t in tasks}
    [loser, _] = compare({"lost": lost, "won": won}, tasks, weights={}, seed=0)
    assert loser.high is not None and loser.high > 1
