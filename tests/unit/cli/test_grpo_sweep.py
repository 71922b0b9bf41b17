"""`rookery grpo sweep`: many adapters in one run, each with the bits that it has alone."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from driving import Command, status_of, write_rows
from forked import forked, kill_at_event, run_command
from marks import long
from ui.made_runs import read_saved

from rookery.loops.grpo.batch import Batch, decode_batch
from rookery.runs import Run
from rookery.weights import read_adapter

REWARD = """\
def reward(task, completion):
    return sum(token % 2 == 0 for token in completion.tokens) / len(completion.tokens)
"""
FAILING = """\
from pathlib import Path
STATE, CALLS = Path(__file__).with_name("state"), []

def check():
    CALLS.append(0)
    if len(CALLS) > 12 and not STATE.exists():
        STATE.write_text("broken")
    if STATE.exists() and STATE.read_text() == "broken":
        raise ValueError("no reward")

"""
CONFIG = """\
engine: {model: tiny, cache_gib: 0.01}
tasksets: [{type: jsonl, path: drawn.jsonl, sampling: {max_tokens: 3},
            scorer: {type: python, function: 'reward.py:reward'}}]
lora: {rank: 2, targets: [q_proj, down_proj]}
learning_rate: 1.0e-2
steps: 3
groups_per_step: 2
group_size: 3
drawing: {max_tokens: 3}
save_every: 2
keep_rollouts: true
"""
SWEEP = ("--vary", "learning-rate=1e-2,3e-2", "--seeds", "2")


@pytest.fixture
def config(place: Path) -> Path:
    (place / "g.yaml").write_text(CONFIG)
    (place / "reward.py").write_text(REWARD)
    rows = [{"prompt": f"w{4 + i} w{5 + (i * 7) % 80}", "reference": "x"} for i in range(24)]
    write_rows(place / "drawn.jsonl", rows)
    return place


def batches(folder: Path) -> list[Batch]:
    """All rollouts of a run, as they were drawn."""
    with Run.view(folder) as run:
        digests = [str(event.payload["digest"]) for event in run.events("batch")]
        return [decode_batch(run.blobs.read_bytes(digest)) for digest in digests]


def what_was_learned(folder: Path) -> tuple[Any, ...]:
    """Weights of all checkpoints by their hashes, rollouts, and metrics but times."""
    with Run.view(folder) as run:
        checkpoints = [(e.payload["step"], e.payload["version"]) for e in run.events("checkpoint")]
        selects = [(e.key, e.payload["mean"]) for e in run.events("select")]
        metrics = [
            {k: v for k, v in event.payload["metrics"].items() if not k.startswith("time/")}
            for event in run.events("step")
        ]
    groups = [batch.groups for batch in batches(folder)]
    return checkpoints, selects, metrics, groups, read_adapter(folder / "trained").version


def flags(folder: Path) -> list[str]:
    """What makes `grpo run` train the same adapter alone."""
    config = json.loads((folder / "config.json").read_text())
    values = {key: config[key] for key in ("learning_rate", "seed")}
    return [f"--{k}={v}" for k, v in {**values, "loss.type": config["loss"]["type"]}.items()]


@pytest.mark.parametrize(
    "changes", [("--staleness", "1", "--share", "true"), pytest.param((), marks=long)]
)
def test_every_adapter_has_the_bits_that_it_has_alone(
    rookery: Command, config: Path, changes: tuple[str, ...]
) -> None:
    varied = ("--vary", "loss.type=grpo,dr_grpo", "--seeds", "2")
    assert rookery("grpo", "sweep", "g.yaml", *varied, "--name", "s", *changes).code == 0
    names = sorted(path.name for path in (config / "runs/s/adapters").iterdir())
    assert len(names) == 4 and names[0] == "loss.type-dr_grpo_seed-0"
    for name in names[::3]:
        own = config / "runs/s/adapters" / name
        assert rookery("grpo", "run", "g.yaml", "--name", name, *flags(own), *changes).code == 0
        assert what_was_learned(own) == what_was_learned(config / "runs" / name)
        assert status_of(own) == "finished"


def test_the_report_ranks_all_by_the_select_tasks(rookery: Command, config: Path) -> None:
    ended = rookery("grpo", "sweep", "g.yaml", *SWEEP, "--name", "s")
    assert ended.code == 0
    report = json.loads((config / "runs/s/report.json").read_text())
    sweep = report["sweep"]
    selects = [setting["select"] for setting in sweep["settings"]]
    assert selects == sorted(selects, reverse=True) and len(selects) == 2
    assert [row["num_seeds"] for row in sweep["settings"]] == [2] * 2
    chosen, *others = sweep["adapters"]
    assert chosen["is_chosen"] and not any(other["is_chosen"] for other in others)
    assert chosen["setting"] == sweep["settings"][0]["name"]
    same = [a for a in sweep["adapters"] if a["setting"] == chosen["setting"]]
    assert chosen["select"] == max(a["select"] for a in same)
    assert all(len(adapter["rewards"]) == 3 for adapter in sweep["adapters"])
    assert all({"mean", "low", "high", "gain"} <= set(a["row"]) for a in sweep["adapters"])
    trained = config / "runs/s/adapters" / chosen["name"] / "trained"
    assert read_adapter(config / "runs/s/trained").version == read_adapter(trained).version
    assert report["rows"][0]["mean"] == chosen["row"]["mean"]
    own = json.loads((trained.parent / "report.json").read_text())
    assert own["rows"][0]["mean"] == chosen["row"]["mean"] and "sweep" not in own
    shown = read_saved((config / "runs/s/report.html").read_text())["answers"]["runs/s/report"]
    assert [a["name"] for a in shown["sweep"]["adapters"]] == [a["name"] for a in (chosen, *others)]
    assert len(shown["chosen"]["curves"]["train/loss"]) == len(shown["chosen"]["steps"]) == 3
    assert len(shown["settings"]["rows"]) == 2
    with Run.view(config / "runs/s") as run:
        assert {event.key for event in run.events("adapter")} == {
            a["name"] for a in [chosen, *others]
        }
        rows = run.metrics()
    assert [row.step for row in rows] == [0, 1, 2]
    assert len([name for name in rows[0].values if name.startswith("reward/")]) == 5
    assert "4 adapters, ranked by the select tasks" in ended.words


def sweep_until(number: int, errors: Path, *words: str) -> None:
    kill_at_event(number)
    run_command(errors, "grpo", "sweep", "g.yaml", *words)


def num_events(folder: Path) -> int:
    """Of a sweep, with the runs of its adapters."""
    total = 0
    for path in (folder, *(folder / "adapters").iterdir()):
        with Run.view(path) as run:
            total += sum(run.counts().values())
    return total


def ranking(folder: Path) -> Any:
    """What the report says of the adapters, without the run's name and what the clock says."""
    report = json.loads((folder / "report.json").read_text())
    return report["rows"], report["sweep"], report["chosen_step"], report["num_tokens"]


# In the midst; when the runs of adapters are made, when the report tasks are read.
@long
@pytest.mark.parametrize("part", [0.5, 0.02, 0.92])
def test_a_sweep_that_is_killed_goes_on(rookery: Command, config: Path, part: float) -> None:
    words = ("--vary", "learning_rate=1e-2,3e-2", "--staleness", "1")
    assert rookery("grpo", "sweep", "g.yaml", *words, "--name", "whole").code == 0
    number = int(part * num_events(config / "runs/whole"))
    with forked(sweep_until, number, config / "err", *words, "--name", "killed") as process:
        assert process.wait() == -signal.SIGKILL
    ended = rookery("runs", "resume", "runs/killed")
    assert ended.code == 0, ended.err
    assert ranking(config / "runs/killed") == ranking(config / "runs/whole")
    for own in (config / "runs/whole/adapters").iterdir():
        again = config / "runs/killed/adapters" / own.name
        assert what_was_learned(again) == what_was_learned(own)
        assert status_of(again) == "finished"
    with Run.view(config / "runs/killed") as run:
        assert {row.step for row in run.metrics()} == {0, 1, 2}


def test_an_adapter_that_cannot_be_trained_ends_alone(rookery: Command, config: Path) -> None:
    words = ("--vary", "max_gap=0.2,1e-30", "--name", "s")
    ended = rookery("grpo", "sweep", "g.yaml", *words)
    assert ended.code == 0 and "1 of 2 adapters could not be trained" in ended.words
    good, bad = json.loads((config / "runs/s/report.json").read_text())["sweep"]["adapters"]
    assert good["is_chosen"] and "row" not in bad and "error" in bad
    assert status_of(config / "runs/s/adapters" / bad["name"]) == "failed"
    before = ranking(config / "runs/s")
    assert rookery("runs", "resume", "runs/s").code == 0 and ranking(config / "runs/s") == before


def test_when_all_adapters_fail_a_resumed_sweep_tries_all_again(
    rookery: Command, config: Path
) -> None:
    (config / "reward.py").write_text(FAILING + REWARD.replace("return", "check()\n    return"))
    ended = rookery("grpo", "sweep", "g.yaml", "--seeds", "2", "--name", "s")
    assert ended.code == 2 and "no reward" in ended.words
    again = rookery("runs", "resume", "runs/s")
    assert again.code == 2 and "no reward" in again.words
    (config / "state").write_text("mended")
    ended = rookery("runs", "resume", "runs/s")
    assert ended.code == 0, ended.err
    adapters = json.loads((config / "runs/s/report.json").read_text())["sweep"]["adapters"]
    assert len(adapters) == 2 and all("row" in adapter for adapter in adapters)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), "nothing to vary"),
        (("--vary", "learning_rate"), "--vary got 'learning_rate'"),
        (("--vary", "lora.rank=2,4"), "adapters of one sweep have lora in common"),
        (("--vary", "engine.model=a,b"), "have engine in common"),
        (("--vary", "tasksets.0.path=a,b"), "have tasksets in common"),
        (("--vary", "learning_rat=1,2"), "learning_rat is not a key. Did you mean learning_rate?"),
        (("--vary", "learning_rate=1e-2,1e-2"), "each once"),
        (("--vary", "learning_rate=0,1"), "learning_rate is 0"),
        (("--vary", "loss.type=grpo,none"), "loss.type is"),
        (("--vary", "seed=1,2", "--seeds", "2"), "leave one of them out"),
        (("--seeds", "2", "--full", "true"), "full trains one model"),
        (
            ("--vary", "learning_rate=1e-2", "--vary", "learning-rate=2e-2"),
            "--vary has learning_rate twice",
        ),
        (
            ("--sweep.vary", "{keep-rollouts: [true, false]}", "--seeds", "2"),
            "have keep_rollouts in",
        ),
        (("--sweep.vary", "{warm-up: [0], warm_up: [1]}", "--seeds", "2"), "warm_up twice"),
        (
            ("--seeds", "1", "--bridge", "merge", "--engine", "{type: fleet, urls: ['http://a']}"),
            "sweep trains many: write bridge: slot",
        ),
    ],
)
def test_what_cannot_be_swept_is_refused(
    refused: Command, config: Path, flags: tuple[str, ...], said: str
) -> None:
    assert said in refused("grpo", "sweep", "g.yaml", *flags).words
