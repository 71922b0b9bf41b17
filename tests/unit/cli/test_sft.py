"""`rookery sft` on the tiny model."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from driving import Command, tree

from rookery.errors import TrainError
from rookery.train import LoraTrainer
from rookery.types import OptimStep
from rookery.weights import read_adapter

SMALL = ("--rank", "2", "--layers", "2", "--steps", "3", "--batch-size", "4")


def test_an_adapter_is_made_and_can_be_used(rookery: Command, place: Path) -> None:
    (place / "runs/broken").mkdir(parents=True)
    (place / "runs/broken/events.db").write_text("no database")
    before = tree(place)
    ended = rookery("sft", "tiny", "tasks.jsonl", "out/mine", *SMALL, "--learning-rate", "1e-2")
    assert ended.code == 0
    adapter = read_adapter(place / "out/mine")
    assert adapter.rank == 2 and adapter.base == str(place / "tiny"), "found from any folder"
    num_modules = len(adapter.factors)
    assert (
        f"out/mine: rank 2, {num_modules} modules in 2 layers, version {adapter.version}"
        in ended.out
    )
    assert (
        f"loading {place / 'tiny'}" in ended.err
        and "  3 of 3  " in ended.err
        and "loss" in ended.err
    )
    made = {Path(p).parts[:2] for p in tree(place) - before if len(Path(p).parts) > 1}
    assert {name for folder, name in made if folder == "out"} == {"mine"}
    [run] = (place / "runs").glob("sft-*")
    assert read_adapter(run / "trained").version == adapter.version
    assert {"report.json", "report.html"} <= {path.name for path in run.iterdir()}
    assert json.loads((run / "report.json").read_text())["seconds"] > 0
    assert "loss of the first step" in ended.out.lower() and not (run / "training").exists()
    used = rookery("eval", "tiny", "tasks.jsonl", "--adapter", "out/mine", "--json")
    assert used.code == 0 and used.document["models"][1]["name"] == "mine"


def test_a_config_file_and_flags_over_it(rookery: Command, place: Path) -> None:
    (place / "sft.toml").write_text('rank = 3\nsteps = 9\ntargets = ["q_proj"]\nlayers = 1\n')
    words = ["--config", "sft.toml", "--steps", "1", "--targets", "[v_proj, o_proj]"]
    assert rookery("sft", "tiny", "tasks.jsonl", "out", *words).code == 0
    adapter = read_adapter(place / "out")
    assert adapter.rank == 3
    assert {name.rpartition(".")[2] for name in adapter.factors} == {"v_proj", "o_proj"}


def test_an_adapter_there_is_replaced_and_one_may_be_the_start(
    rookery: Command, place: Path
) -> None:
    assert rookery("sft", "tiny", "tasks.jsonl", "out", *SMALL).code == 0
    first = read_adapter(place / "out").version
    words = ["--init-from", "out", "--steps", "2"]
    assert rookery("sft", "tiny", "tasks.jsonl", "out", *words).code == 0
    assert read_adapter(place / "out").version != first


def test_an_interrupted_training_goes_on(
    rookery: Command, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rookery.train import LoraTrainer

    words = ["sft", "tiny", "tasks.jsonl", "out", *SMALL, "--save-every", "1"]
    steps: list[float] = []
    step = LoraTrainer.optim_step

    async def press_in_the_third(self: LoraTrainer, wanted: list[OptimStep]) -> object:
        steps.append(wanted[0].learning_rate)
        if len(steps) == 3:
            raise KeyboardInterrupt
        return await step(self, wanted)

    monkeypatch.setattr(LoraTrainer, "optim_step", press_in_the_third)
    ended = rookery(*words)
    assert ended.code == 130 and "Go on with: rookery runs resume" in ended.err
    assert not (place / "out").exists()
    assert rookery(*words).code == 0 and len(steps) == 4, "two steps were kept, one was left"
    resumed = read_adapter(place / "out").version
    assert rookery("sft", "tiny", "tasks.jsonl", "whole", *SMALL, "--save-every", "1").code == 0
    assert read_adapter(place / "whole").version == resumed and len(steps) == 7


def test_a_training_that_has_ended_is_not_repeated(
    rookery: Command, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["sft", "tiny", "tasks.jsonl", "out", *SMALL, "--name", "x"]

    def press(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("rookery.compose.running.render_run", press)
        assert rookery(*words).code == 130
    version = read_adapter(place / "out").version
    report = json.loads((place / "runs/x/report.json").read_text())
    shutil.rmtree(place / "out")
    monkeypatch.setattr(LoraTrainer, "forward_backward", press)
    for _ in ("interrupted", "finished"):
        assert rookery("runs", "resume", "x").code == 0
        assert read_adapter(place / "out").version == version
        again = json.loads((place / "runs/x/report.json").read_text())
        assert again | {"seconds": 0} == report | {"seconds": 0}


def test_rows_that_changed_their_weights_are_other_data(rookery: Command, place: Path) -> None:
    def write(*weights: float) -> None:
        rows = [
            {"id": str(at), "prompt": f"w{at}", "answer": "w9", "weight": weight}
            for at, weight in enumerate(weights)
        ]
        (place / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    write(0.5, 1.0)
    rows = "rows.jsonl?fields.weight=weight"
    words = ["sft", "tiny", rows, "out", *SMALL, "--split", "all", "--name", "x"]
    assert rookery(*words).code == 0
    write(1.0, 0.5)
    ended = rookery("runs", "resume", "x")
    assert ended.code == 2 and "The data of rows changed since" in ended.words


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("tiny", "tasks.jsonl", "/proc/out/mine"), "/proc/out/mine cannot be made in /proc"),
        (("tiny", "tasks.jsonl", "out", "--device", "cuda"), "torch sees no GPU here: write cpu"),
        (("smolm2", "tasks.jsonl", "out"), "There is no model 'smolm2'. Did you mean `smollm2`?"),
    ],
)
def test_what_cannot_work_is_refused_before_the_training(
    refused: Command, words: tuple[str, ...], sentence: str
) -> None:
    assert sentence in refused("sft", *words).err


def test_the_bar_knows_its_end_before_the_first_step(
    rookery: Command, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(self: LoraTrainer, requests: Any) -> Any:
        raise TrainError("no step today")

    monkeypatch.setattr(LoraTrainer, "forward_backward", fail)
    ended = rookery("sft", "tiny", "tasks.jsonl", "out/mine", *SMALL)
    assert ended.code == 2 and "tasks  0 of 3  " in ended.err
