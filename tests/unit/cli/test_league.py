"""`rookery league`: entrants under one budget, on the tiny model."""

import errno
import json
import math
import os
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import yaml
from driving import Command

from rookery.compose.league.entrants import League, LeagueConfig
from rookery.reports import LeagueReport, parse_league_report
from rookery.runs import Run
from rookery.tasks.taskset import load_taskset_file
from rookery.tasks.template import load_template
from rookery.types import SampleRequest

BUDGET = 300
HIDDEN = 'splits.hidden=["report"]'
SCORER = """
def score(task, completion):
    return sum(token % 2 == 0 for token in completion.tokens) / len(completion.tokens)
"""


@pytest.fixture
def league(place: Path) -> Path:
    """Answers of the tiny model are drawn, and even tokens rewarded; every task has a reference."""
    rows = [{"prompt": f"w{4 + i} w{5 + (i * 7) % 80}", "answer": f"w{50 + 2 * i % 40}"}
            for i in range(40)]  # fmt: skip
    (place / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (place / "scorer.py").write_text(SCORER)
    taskset = {
        "type": "jsonl",
        "path": "rows.jsonl",
        "scorer": {"type": "python", "function": "scorer.py:score"},
        "sampling": {"max_tokens": 4},
    }
    (place / "drawn.yaml").write_text(yaml.safe_dump(taskset))
    return write(place)


def write(place: Path, **changes: Any) -> Path:
    document = {
        "engine": {"model": "tiny", "cache_gib": 0.01},
        "taskset": "drawn.yaml",
        "budget": {"max_answer_tokens": BUDGET},
        "num_seeds": 2,
        "num_answers": 3,
        "entrants": ["sft", "es", "best_of_n", "icm"],
        "settings": {
            "sft": {"rank": 2, "layers": 1, "batch_size": 4},
            "es": {"init": {"rank": 2}, "stages": [{"type": "es", "rank": 1, "num_pairs": 1}]},
        },
        **changes,
    }
    path = place / "league.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def read(place: Path, name: str) -> LeagueReport:
    return parse_league_report(json.loads((place / f"runs/{name}/report.json").read_text()))


def earned(run: Path, model: str) -> dict[str, float]:
    """What a model has first earned for each task, as the run's events have it."""
    rewards: dict[str, float] = {}
    with Run.view(run) as view:
        for event in view.events("rollout"):
            if event.payload["model"].startswith(f"{model}@"):
                rewards.setdefault(event.payload["task"], event.payload["reward"])
    return rewards


def test_entrants_are_runs_under_one_budget_and_ranked(
    rookery: Command, place: Path, league: Path
) -> None:
    ended = rookery("league", league, "--name", "l")
    assert ended.code == 0, ended.err
    report = read(place, "l")
    taskset = load_taskset_file(str(place / "drawn.yaml"))
    asked = {task.id for task in taskset.split("report")}
    assert {row.name for row in report.rows} == {"base", "sft", "es", "best_of_n"}
    assert [one.name for one in report.left_out] == ["icm"]
    means = [row.mean or 0.0 for row in report.rows]
    assert means == sorted(means, reverse=True) and means[0] > means[-1]
    assert len(report.pairs) == 6 and report.num_tasks == len(asked)

    rows = {row.name: row for row in report.rows}
    for name in ("sft", "es", "best_of_n"):
        assert all(run.spent.tokens <= BUDGET for run in rows[name].runs), name
        assert len({run.name for run in rows[name].runs}) == 2
    assert rows["sft"].spent.trained_tokens > 0 < rows["best_of_n"].spent.drawn_tokens
    assert rows["sft"].settings == "batch_size 4, layers 1, rank 2"

    listed = rookery("runs", "list").out
    for name in ("sft-0", "sft-1", "es-0", "es-1"):
        assert f"l.{name}" in listed
        with Run.view(place / f"runs/l.{name}") as run:
            seen = {event.payload["task"] for event in run.events("rollout")}
            assert bool(seen) == name.startswith("es") and not seen & asked
            assert HIDDEN in run.config.get("taskset", HIDDEN)
    base, own = earned(place / "runs/l", "base"), earned(place / "runs/l", "sft-0")
    assert set(base) == asked == set(own)
    seeds = [own, earned(place / "runs/l", "sft-1")]
    gain = fmean(fmean(seed[task] for seed in seeds) - base[task] for task in asked)
    assert rows["sft"].gain is not None and rows["sft"].gain.mean == pytest.approx(gain)
    assert "best_of_n" in (place / "runs/l/report.html").read_text()
    with Run.view(place / "runs/l") as run:
        num_answers = len(list(run.events("rollout")))
    told = json.loads((place / "runs/l/progress.json").read_text())
    assert told["done"] == told["total"] == num_answers


def test_a_league_that_was_interrupted_ends_as_one_that_was_not(
    rookery: Command, place: Path, league: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(place, entrants=["es", "best_of_n"], num_seeds=1)
    assert rookery("league", league, "--name", "whole").code == 0

    from rookery.compose.league import measure
    from rookery.loops.genome import loop

    def press(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    for module, name in ((loop, "GenomeSummary"), (measure, "stream_seed"), (measure, "model_row")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, press)
            begun = (place / "runs/cut").exists()
            words = ("runs", "resume", "cut") if begun else ("league", league, "--name", "cut")
            assert rookery(*words).code == 130
    assert rookery("league", league, "--name", "cut", "--resume").code == 0
    whole, cut = (read(place, name) for name in ("whole", "cut"))
    assert clockless(cut) == clockless(whole)
    with Run.view(place / "runs/cut") as run:
        counts = run.counts()
    with Run.view(place / "runs/whole") as run:
        assert counts["rollout"] == run.counts()["rollout"]


def test_an_entrant_whose_least_work_is_beyond_the_budget_is_named(
    rookery: Command, place: Path, league: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Founders are measured in any case; and steps are made once, however many there are."""
    made, steps = [], League.steps

    def count(self: League, folder: Path) -> Any:
        made.append(folder)
        return steps(self, folder)

    monkeypatch.setattr(League, "steps", count)
    founders = {"founders": ["a", "b"], "entrants": ["sft", "genome"]}
    write(place, **founders, num_seeds=2, budget={"max_answer_tokens": 40})
    assert rookery("league", league, "--name", "small").code == 0
    assert len(made) == 2
    report = read(place, "small")
    over = [line for line in report.warnings if "answer tokens of 40" in line]
    assert [line.split()[0] for line in over] == [f"genome-{seed}" for seed in range(2)]
    for row in report.rows:
        for each in (row.gain, row.lead):
            assert each is None or math.copysign(1, each.mean or 0.0) == 1 or each.mean != 0.0


def clockless(report: LeagueReport) -> list[Any]:
    return [(row.name, row.mean, row.gain, row.spent) for row in report.rows] + [*report.pairs]


def test_an_entrant_that_fails_is_left_out_and_the_others_go_on(
    rookery: Command, place: Path, league: Path
) -> None:
    write(place, entrants=["sft", "es"], num_seeds=1, engine={"model": "tiny", "max_rank": 1})
    for words in (("league", league, "--name", "l"), ("runs", "resume", "l")):
        ended = rookery(*words)
        assert ended.code == 2, "it is said by the exit code too"
    report = read(place, "l")
    assert {row.name for row in report.rows} == {"base", "sft"}
    [failed] = report.left_out
    assert failed.is_failure and failed.name == "es-0"
    assert "the engine takes adapters up to rank 1" in failed.reason


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"budget": {}}, "budget has no limit"),
        ({"taskset": "nowhere.jsonl"}, "There is no taskset"),
        ({"entrants": ["icm"]}, "No entrant applies. icm: The tasks have no choices in common"),
        ({"entrants": ["sft", "sft"]}, "name each once"),
        ({"settings": {"sft": {"rnk": 3}}}, "the step sft-0 is not a valid config: rnk"),
        ({"settings": {"stf": {}}}, "settings.stf"),
        ({"settings": {"sft": {"budget": {}}}}, "settings.sft.budget is the league's"),
        (
            {"settings": {"prompt": {"rookery": {"tasks": {"taskset": "rows.jsonl"}}}}},
            "settings.prompt.rookery.tasks.taskset is the league's",
        ),
        (
            {"settings": {"prompt": {"rookery": {"tasks": {"model": "a"}}}}},
            "settings.prompt.rookery.tasks.model is the league's",
        ),
        (
            {"settings": {"icm": {"data": {"path": "rows.jsonl"}}}},
            "settings.icm.data.path is the league's",
        ),
        (
            {"settings": {"genome": {"init": {"path": ["a", "b"]}}}},
            "settings.genome.init.path is the league's",
        ),
        ({"taskset": "drawn.yaml?splits.select=0&splits.search=0.7"}, "splits.select is 0"),
        (
            {
                "engine": {"type": "fleet", "launch": {"model": "tiny", "max_lora_rank": 8}},
                "settings": {"sft": {"rank": 32}},
            },
            "The rank of sft-0 is 32, and the engine takes adapters up to rank 8",
        ),
        ({"engine": {"model": "nowhere/at/all"}}, "There is no model folder"),
        (
            {"settings": {"sft": {"init_from": "nowhere"}}},
            "nowhere has no adapter_config.json",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_the_first_entrant(
    refused: Command, place: Path, league: Path, change: dict[str, Any], sentence: str
) -> None:
    assert sentence in refused("league", write(place, **change)).words


def test_a_prompt_that_a_report_task_cannot_fill_is_refused_before_the_first_entrant(
    refused: Command, place: Path, league: Path
) -> None:
    """The entrant is not shown these tasks: it would be found when all have ended."""
    report = {task.prompt for task in load_taskset_file(str(place / "drawn.yaml")).split("report")}
    rows = [json.loads(line) for line in (place / "rows.jsonl").read_text().splitlines()]
    rows = [row if row["prompt"] in report else row | {"hint": "w9"} for row in rows]
    (place / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (place / "first.txt").write_text("{{ hint }} {{ prompt }}")
    engine = {"model": str(place / "chat")}
    ended = refused("league", write(place, entrants=["prompt"], prompt="first.txt", engine=engine))
    assert "The prompt names {{ hint }}, and the task" in ended.words


def test_a_model_that_takes_no_messages_proposes_no_prompts(
    rookery: Command, place: Path, league: Path
) -> None:
    assert (
        rookery("league", write(place, entrants=["sft", "prompt"], num_seeds=1), "--name", "l").code
        == 0
    )
    [one] = read(place, "l").left_out
    assert one.name == "prompt" and not one.is_failure and "no chat template" in one.reason
    settings = {"prompt": {"llm": {"primary_model": "big", "api_base": "http://127.0.0.1:9"}}}
    named = LeagueConfig.model_validate(
        {"taskset": "drawn.yaml", "budget": {"max_answer_tokens": 9}, "settings": settings,
         "engine": {"model": "tiny"}}
    )  # fmt: skip
    assert "prompt" not in League.read(named).reasons


def test_flags_name_tasksets_and_lists_of_files(
    refused: Command, place: Path, league: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(place, entrants=["genome"])
    (place / "here").mkdir()
    monkeypatch.chdir(place / "here")
    words = ("league", league, "--taskset", "generated:arithmetic", "--founders")
    assert f"no folder {place}/here/nowhere" in refused(*words, "[../a, nowhere]").words
    assert (
        "founders.1 is run:nowhere/trained" in refused(*words, "[../a, run:nowhere/trained]").words
    )
    assert "--founders is [a: a list is" in refused(*words, "[a").words


def test_tasks_that_change_between_two_entrants_end_the_league(
    rookery: Command, place: Path, league: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(place, entrants=["sft"], num_seeds=2)
    rows = (place / "rows.jsonl").read_text()

    from rookery.ui.steps import Steps

    def edit(*_: object) -> None:
        (place / "rows.jsonl").write_text(rows.replace("w50", "w51"))

    monkeypatch.setattr(Steps, "end", edit)
    ended = rookery("league", league, "--name", "l")
    assert ended.code == 2 and "The data of rows changed since" in ended.words
    assert (place / "runs/l.sft-0").exists() and not (place / "runs/l.sft-1").exists()
    monkeypatch.setattr(Steps, "end", lambda *_: None)
    ended = rookery("runs", "resume", "l")
    assert ended.code == 2 and "The data of rows changed since" in ended.words
    (place / "rows.jsonl").write_text(rows)
    assert rookery("runs", "resume", "l").code == 0


def test_tasks_that_are_gone_end_the_league_and_no_entrant_is_left_out(
    rookery: Command, place: Path, league: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(place, entrants=["sft"], num_seeds=2)

    from rookery.ui.steps import Steps

    with monkeypatch.context() as patch:
        patch.setattr(Steps, "end", lambda *_: (place / "rows.jsonl").rename(place / "away"))
        ended = rookery("league", league, "--name", "l")
    assert ended.code == 2 and "rows.jsonl" in ended.words
    (place / "away").rename(place / "rows.jsonl")
    assert rookery("runs", "resume", "l").code == 0
    assert not read(place, "l").left_out


def test_a_full_disk_ends_the_league_and_no_entrant_is_left_out(
    rookery: Command, place: Path, league: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(place, entrants=["sft"], num_seeds=1)

    from rookery.weights import folder

    def fill(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(folder, "save_file", fill)
        ended = rookery("league", league, "--name", "l")
    assert ended.code == 2 and "The disk is full" in ended.words
    assert not (place / "runs/l/report.json").exists()
    assert rookery("runs", "resume", "l").code == 0
    assert not read(place, "l").left_out


def test_an_entrant_that_took_more_than_its_hours_is_named(
    rookery: Command, place: Path, league: Path
) -> None:
    write(place, entrants=["sft", "best_of_n"], num_seeds=1, budget={"max_hours": 1e-9})
    assert rookery("league", league, "--name", "l").code == 0
    over = [line for line in read(place, "l").warnings if " minutes of 6e-08" in line]
    assert {line.split()[0] for line in over} == {"sft-0", "best_of_n-0"}


def test_a_prompt_is_measured_as_the_search_asked_it(
    rookery: Command,
    place: Path,
    league: Path,
    drawn: list[SampleRequest],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A field that only a child names is never filled in."""
    (place / "first.txt").write_text("Answer.")
    engine = {"model": "chat", "cache_gib": 0.01}
    prompt = {"llm": {"max_tokens": 8}}
    write(place, entrants=["prompt"], num_seeds=1, prompt="first.txt", engine=engine,
          settings={"prompt": prompt})  # fmt: skip

    from rookery.compose.league import measure

    found = measure.find_results

    def evolved(*words: Any) -> Any:
        results, left_out = found(*words)
        return [replace(one, prompt="As {{ prompt }} asks:") for one in results], left_out

    monkeypatch.setattr("rookery.compose.league.run.find_results", evolved)
    assert rookery("league", league, "--name", "l").code == 0
    read = load_template(place / "chat").decode
    assert any("As {{ prompt }} asks:" in read(request.prompt) for request in drawn)


def test_a_failed_report_task_is_said_and_not_averaged_away(
    rookery: Command, place: Path, league: Path
) -> None:
    tasks = load_taskset_file(str(place / "drawn.yaml")).split("report")
    refusing = f"    if task.prompt == {tasks[0].prompt!r}:\n        raise ValueError('no')\n"
    (place / "scorer.py").write_text(SCORER.replace("completion):\n", f"completion):\n{refusing}"))
    write(place, entrants=["sft"], num_seeds=1)
    ended = rookery("league", league, "--name", "l")
    assert ended.code == 2 and "sft failed on 1 of the report tasks" in ended.words
    rows = {row.name: row for row in read(place, "l").rows}
    assert rows["sft"].mean is None and rows["sft"].runs[0].mean is None
