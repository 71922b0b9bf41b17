"""Every command that makes a run: killed with `kill -9` it goes on and leaves what one leaves that
was not killed, and does nothing twice; ended, it repeats nothing; and it takes neither another
config nor other data. `loops/evolve/test_loop_resume.py` has the same of evolutions."""

import json
import re
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from driving import Command, change_weights, status_of, write_rows
from forked import forked, kill_at_event, run_command
from marks import long

from rookery.embedded import EmbeddedEngine
from rookery.runs import Run

REWARD = """\
def reward(task, completion):
    return sum(token % 2 == 0 for token in completion.tokens) / len(completion.tokens)
"""
SFT = {"model": "tiny", "rank": 2, "layers": 1, "steps": 3, "save_every": 1}
CONFIGS: dict[str, dict[str, Any]] = {
    "genome": {
        "engine": {"model": "tiny"},
        "init": {"type": "file", "path": "founders"},
        "tasksets": [{"type": "jsonl", "path": "tasks.jsonl"}],
        "stages": [
            {"type": "random", "count": 3},
            {"type": "es", "steps": 1, "num_pairs": 2},
            {"type": "ga", "generations": 1, "population": {"size": 2, "children": {"count": 2}}},
        ],
        "finals": {"num_finalists": 2, "num_voters": 2, "random_search": False},
    },
    "grpo": {
        "engine": {"model": "tiny", "cache_gib": 0.01},
        "tasksets": [
            {"type": "jsonl", "path": "drawn.jsonl", "sampling": {"max_tokens": 3},
             "scorer": {"type": "python", "function": "reward.py:reward"}}
        ],
        "lora": {"rank": 2, "targets": ["q_proj"]},
        "steps": 4,
        "groups_per_step": 2,
        "group_size": 3,
        "drawing": {"max_tokens": 3},
        "save_every": 2,
        "keep": 1,
    },
    "icm": {
        "engine": {"model": "tiny"},
        "data": {"path": "items.jsonl", "prompt": "w{{ a }} w{{ b }} w20", "separator": "\nw21\n",
                 "labels": ["w90", "w91"], "group": "pair"},
        "constraints": [{"type": "exclusive", "count": "exactly_one"}],
        "search": {"iterations": 20, "num_start": 4},
        "baselines": {"inverted": False},
        "num_chains": 2,
    },
    "pipeline": {
        "steps": {
            "first": {"loop": "sft", "values": {**SFT, "taskset": "tasks.jsonl"}},
            "second": {"loop": "sft", "values": {**SFT, "taskset": "tasks.jsonl", "seed": 1,
                                                 "init_from": "run:first/trained"}},
        },
        "report": {"model": "tiny", "taskset": "held_out.jsonl"},
    },
    "league": {
        "engine": {"model": "tiny", "cache_gib": 0.01},
        "taskset": "drawn.yaml",
        "budget": {"max_answer_tokens": 200},
        "num_seeds": 1,
        "num_answers": 2,
        "entrants": ["sft", "es", "best_of_n"],
        "settings": {"sft": {"rank": 2, "layers": 1, "batch_size": 4},
                     "es": {"init": {"rank": 2},
                            "stages": [{"type": "es", "rank": 1, "num_pairs": 1}]}},
    },
}  # fmt: skip
DRAWN = CONFIGS["grpo"]["tasksets"][0]
COMMANDS = {
    "eval": ("eval", "tiny", "tasks.jsonl", "--adapter", "a"),
    "sft": ("sft", "tiny", "tasks.jsonl", "out", "--rank", "2", "--layers", "1", "--steps", "4",
            "--save-every", "1"),
    **{name: (name, "run", f"{name}.yaml") for name in CONFIGS},
    "league": ("league", "league.yaml"),
}  # fmt: skip
CLOCKS = re.compile(
    r"seconds|_s$|time|per_s$|^run$|^name$|made_from|^runs$|num_computed|computed|cached|^tokens$"
)
"""Keys of what depends on the clock, on the name of the run or on what was asked before."""


CHANGES = {
    "eval": {"tiny/model.safetensors": "the model", "a/adapter_model.safetensors": "adapters"},
    "genome": {
        "tiny/model.safetensors": "the model",
        "founders/a/adapter_model.safetensors": "init",
    },
    "grpo": {"tiny/model.safetensors": "the model"},
    "icm": {"tiny/model.safetensors": "the model"},
    "sft": {"tiny/model.safetensors": "the model"},
}
"""What refuses to go on when these weights are others."""


@pytest.fixture
def configs(place: Path, files: Path) -> Path:
    for name in ("tiny", "a", "founders"):  # which the tests change
        (place / name).unlink()
        shutil.copytree(files / name, place / name)
    drawn = [{"prompt": f"w{4 + i} w{5 + i}", "reference": "w90"} for i in range(24)]
    write_rows(place / "drawn.jsonl", drawn)
    held_out = [
        {"prompt": f"w{50 + i} w4 w5", "choices": ["w90", "w91"], "answer": "w90"} for i in range(8)
    ]
    write_rows(place / "held_out.jsonl", held_out)
    items = [{"id": f"i{i}", "pair": i // 2, "a": 4 + i, "b": 40 + 3 * i} for i in range(8)]
    write_rows(place / "items.jsonl", items)
    (place / "reward.py").write_text(REWARD)
    (place / "drawn.yaml").write_text(yaml.safe_dump(DRAWN))
    for name, config in CONFIGS.items():
        (place / f"{name}.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    return place


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Every request to an engine in this process."""
    requests: list[object] = []
    for name in ("sample", "score"):
        call = getattr(EmbeddedEngine, name)

        async def note(self: EmbeddedEngine, batch: Sequence[object], call: Any = call) -> Any:
            requests.extend(batch)
            return await call(self, batch)

        monkeypatch.setattr(EmbeddedEngine, name, note)
    return requests


def clockless(document: Any) -> Any:
    if isinstance(document, dict):
        return {k: clockless(v) for k, v in document.items() if not CLOCKS.search(str(k))}
    return [clockless(one) for one in document] if isinstance(document, list) else document


def left_behind(path: Path) -> dict[str, Any]:
    """What a run and those of its steps stored, in order of the keys: answers arrive in any
    order."""
    with Run.view(path) as run:
        events = [
            (event.kind, str(event.key), json.dumps(clockless(dict(event.payload)), sort_keys=True))
            for event in run.events()
            if not event.kind.startswith("run/")
        ]
    weights = {
        str(file.relative_to(path.parent)).removeprefix(path.name): file.read_bytes()
        for folder in sorted(path.parent.glob(f"{path.name}*"))
        for file in sorted(folder.rglob("*.safetensors"))
        if "blobs" not in file.parts
    }
    report = clockless(json.loads((path / "report.json").read_text()))
    return {"events": sorted(events), "report": report, "weights": weights}


def killed_at(number: int, errors: Path, *words: str) -> None:
    kill_at_event(number)
    run_command(errors, *words)


ONCE, OFTEN = (0.4,), (0.05, 0.1, 0.1, 0.2, 0.2)
"""After which parts of all events each session is killed."""


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        *((name, ONCE) for name in ("genome", "grpo", "pipeline")),
        *(pytest.param(name, ONCE, marks=long) for name in ("eval", "sft", "icm")),
        *(pytest.param(name, OFTEN, marks=long) for name in ("genome", "grpo", "icm", "league")),
    ],
)
def test_a_killed_command_goes_on_to_the_same_end(
    rookery: Command, configs: Path, asked: list[object], name: str, parts: tuple[float, ...]
) -> None:
    words = COMMANDS[name]
    assert rookery(*words, "--name", "whole").code == 0
    num_asked = len(asked)
    whole = left_behind(configs / "runs/whole")
    command: tuple[str, ...] = (*words, "--name", "x")
    for part in parts:
        at = max(int(len(whole["events"]) * part), 2)
        with forked(killed_at, at, configs / "errors", *command) as process:
            assert process.wait() == -signal.SIGKILL, (configs / "errors").read_text()
        command = ("runs", "resume", "x")
    assert rookery(*command).code == 0
    if name not in ("sft", "pipeline"):  # they ask the engine at their end, if at all
        assert len(asked) - num_asked < num_asked, "what was answered is not asked again"
    killed = left_behind(configs / "runs/x")
    assert killed["report"] == whole["report"]
    assert killed["events"] == whole["events"]
    assert killed["weights"] == whole["weights"]
    num_asked = len(asked)
    assert rookery("runs", "resume", "x").code == 0
    assert len(asked) == num_asked and left_behind(configs / "runs/x")["report"] == whole["report"]
    if name in ("genome", "grpo", "icm"):
        ended = rookery(*words, "--name", "x", "--resume", "--seed", "9")
        assert ended.code == 2 and "seed is 0 there and 9 here" in ended.words
    for file, data in CHANGES.get(name, {}).items():
        weights = (configs / file).read_bytes()
        change_weights(configs / file)
        ended = rookery("runs", "resume", "x")
        assert ended.code == 2 and f"The data of {data} changed since" in ended.words
        assert status_of(configs / "runs/x") == "finished", "a refusal leaves it as it was"
        (configs / file).write_bytes(weights)
