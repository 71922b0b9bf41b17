"""Several answers to each report task: pass@1, pass@k and the majority, wherever some are drawn."""

import json
from collections import Counter
from itertools import combinations
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import pytest
from driving import Command, write_rows
from ui.made_runs import read_saved

from rookery.loops.comparison import best_of
from rookery.runs import Run
from rookery.types import SampleRequest

REWARD = """\
def reward(task, completion):
    return float(completion.tokens[0] % 2 == 0)
"""
TASKSET = """\
{type: jsonl, path: drawn.jsonl, sampling: {max_tokens: 2},
 scorer: {type: python, function: 'reward.py:reward'}}
"""
GRPO = f"""\
engine: {{model: tiny, cache_gib: 0.01}}
tasksets: [{TASKSET}]
lora: {{rank: 2, targets: [q_proj]}}
steps: 1
groups_per_step: 2
group_size: 4
drawing: {{max_tokens: 2, temperature: 0.9}}
save_every: 1
report: {{samples: 4}}
"""
GENOME = f"""\
engine: {{model: tiny}}
init: {{type: file, path: founders}}
tasksets: [{TASKSET}]
stages: [{{type: ga, generations: 1, population: {{size: 2, children: {{count: 2}}}}}}]
finals: {{num_finalists: 2, num_voters: 2, random_search: false}}
report: {{samples: 4}}
"""


@pytest.fixture
def config(place: Path) -> Path:
    (place / "grpo.yaml").write_text(GRPO)
    (place / "genome.yaml").write_text(GENOME)
    (place / "taskset.yaml").write_text(TASKSET)
    (place / "reward.py").write_text(REWARD)
    rows = [{"prompt": f"w{4 + i} w{5 + (i * 7) % 80}", "reference": "x"} for i in range(40)]
    write_rows(place / "drawn.jsonl", rows)
    return place


def test_the_estimate_is_the_mean_over_all_ways_to_take_k() -> None:
    random = Random(3)
    for num in (2, 3, 8):
        for rewards in (
            [float(random.random() < 0.3) for _ in range(num)],
            [random.uniform(-1.0, 2.0) for _ in range(num)],
        ):
            for k in range(1, num + 1):
                every = fmean(max(taken) for taken in combinations(rewards, k))
                assert best_of(rewards, k) == pytest.approx(every)


def expected(folder: Path, version: str) -> dict[str, float]:
    """Pass@1, pass@4 and the majority of one model, from the run's answers alone."""
    groups: dict[str, list[tuple[float, str]]] = {}
    with Run.view(folder) as run:
        drawn = _drawn(run, 4)
        for event in run.events("rollout"):
            model, task = event.payload["model"], event.payload["task"]
            if str(model).endswith(version) and event.key.rpartition("|")[0] in drawn:
                text = event.payload["completion"]["text"]
                groups.setdefault(task, []).append((event.payload["reward"], text))
    assert groups and all(len(own) == 4 for own in groups.values())

    def majority(own: list[tuple[float, str]]) -> float:
        [(text, _), *_] = Counter(text for _, text in own).most_common()
        return next(reward for reward, other in own if other == text)

    return {
        "1": fmean(fmean(reward for reward, _ in own) for own in groups.values()),
        "4": fmean(any(reward for reward, _ in own) for own in groups.values()),
        "majority": fmean(majority(own) for own in groups.values()),
    }


def _drawn(run: Any, num: int) -> set[str]:
    """Questions with so many answers."""
    counts = Counter(event.key.rpartition("|")[0] for event in run.events("rollout"))
    return {question for question, count in counts.items() if count == num}


@pytest.mark.parametrize(
    ("words", "rows", "temperature"),
    [
        (("grpo", "run", "grpo.yaml"), "rows", 0.9),
        (("genome", "run", "genome.yaml"), "rows", 1.0),
        (("eval", "tiny", "taskset.yaml", "--adapter", "a", "--samples", "4"), "models", 1.0),
    ],
)
def test_each_loop_that_draws_reports_them(
    rookery: Command,
    config: Path,
    drawn: list[SampleRequest],
    words: tuple[str, ...],
    rows: str,
    temperature: float,
) -> None:
    ended = rookery(*words, "--name", "x")
    assert ended.code == 0, ended.err
    report = json.loads((config / "runs/x/report.json").read_text())
    own = [row for row in report[rows] if "sampled" in row]
    assert len(own) >= 2 and "pass@4" in ended.words and "majority of 4" in ended.words
    shown = read_saved((config / "runs/x/report.html").read_text())["answers"]["runs/x/report"]
    assert "pass@4" in shown["sampled"]["columns"] and len(shown["sampled"]["rows"]) == len(own)
    for row in own:
        sampled = row["sampled"]
        assert set(sampled["pass_at"]) == {"1", "2", "4"} and sampled["num"] == 4
        means = [sampled["pass_at"][k]["mean"] for k in ("1", "2", "4")]
        assert means == sorted(means)
        for one in (*sampled["pass_at"].values(), sampled["majority"]):
            assert one["low"] <= one["mean"] <= one["high"]
    asked = [request for request in drawn if request.params.n == 4]
    assert {request.params.temperature for request in asked} == {temperature}
    base = next(row for row in own if row["name"].startswith("base"))["sampled"]
    found = {**base["pass_at"], "majority": base["majority"]}
    [version] = {r.model.version for r in asked if r.model.version.endswith("tiny")}
    for key, value in expected(config / "runs/x", version).items():
        assert found[key]["mean"] == pytest.approx(value)
    # A run that goes on draws nothing again.
    drawn.clear()
    assert rookery("runs", "resume", "runs/x").code == 0 and not drawn


@pytest.mark.parametrize(("words", "is_there"), [((), False), (("--report.samples", "2"), True)])
def test_without_it_the_report_is_as_it_was(
    rookery: Command, config: Path, words: tuple[str, ...], is_there: bool
) -> None:
    (config / "grpo.yaml").write_text(GRPO.replace("report: {samples: 4}\n", ""))
    assert rookery("grpo", "run", "grpo.yaml", "--name", "x", *words).code == 0
    assert ("sampled" in (config / "runs/x/report.json").read_text()) is is_there
    shown = read_saved((config / "runs/x/report.html").read_text())["answers"]["runs/x/report"]
    assert bool(shown["sampled"]) is is_there


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("grpo", "run", "grpo.yaml", "--report.samples", "1"), "report.samples is 1"),
        (("eval", "tiny", "taskset.yaml", "--samples", "0"), "report.samples is 0"),
    ],
)
def test_fewer_than_two_are_refused(
    refused: Command, config: Path, words: tuple[str, ...], said: str
) -> None:
    assert said in refused(*words).words
