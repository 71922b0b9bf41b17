"""The plan of a training's memory beside what a real step takes, and runs that do not fit."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from marks import long
from tiny import write_tiny_model

from rookery.compose.grpo import plan as grpo_plan
from rookery.compose.grpo.plan import plan_grpo
from rookery.compose.grpo.run import run_grpo
from rookery.engines import trainer_place
from rookery.errors import ConfigError
from rookery.fleet.servers.settings import LaunchConfig
from rookery.loops.grpo import GrpoConfig
from rookery.train import FullConfig, LoraConfig, TrainerConfig, memory
from rookery.train.memory import Lengths, ModelPlace, measure_step

# A model whose step takes far more than what the allocator rounds to.
SIZES: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
MEASURE = """
import asyncio, json, os, sys
from pathlib import Path
import torch
from rookery.slots import load_model
from rookery.train import FullConfig, FullTrainer, LoraConfig, LoraTrainer, TrainerConfig
from rookery.train import initial_adapter
from rookery.types import Datum, OptimStep, TrainRequest

torch.set_num_threads(1)

def peak():
    # Not ru_maxrss: it begins with what the process that started this one held.
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

def make(folder, kind, options):
    model = load_model(folder, is_exact=kind == "exact")
    if kind == "full":
        return FullTrainer(model, name="p", config=FullConfig(**options), like=folder)
    trainer = LoraTrainer(model, config=TrainerConfig(**options))
    trainer.add("p", initial_adapter(model, LoraConfig(), name="p", base="", seed=0))
    return trainer

def data(num):
    return tuple(
        Datum(tokens=(5,) * 127, positions=tuple(range(63, 127)), targets=(6,) * 64,
              weights=(1.0,) * 64)
        for _ in range(num)
    )

async def step(trainer, num):
    [output] = await trainer.forward_backward([TrainRequest(trainee="p", data=data(num))])
    assert not output.error, output.error
    [output] = await trainer.optim_step([OptimStep(trainee="p", learning_rate=1e-4)])
    assert not output.error, output.error

def measure(kind, options):
    trainer = make(Path(sys.argv[1]), kind, options)
    asyncio.run(step(trainer, 1))  # libraries have their own memory from here on
    before = resident()
    asyncio.run(step(trainer, int(sys.argv[2])))
    print(json.dumps({"before": before, "peak": peak()}), flush=True)

for case in json.loads(sys.argv[3]):
    if not (pid := os.fork()):  # each has a peak of its own
        measure(*case)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
"""
NUM_DATA = 16
CASES: list[tuple[str, dict[str, Any]]] = [
    ("lora", {"pass_tokens": 2048}),
    ("lora", {"pass_tokens": 4096, "checkpoint_layers": True}),
    ("full", {"pass_tokens": 4096}),
    ("exact", {"pass_tokens": 2048}),
]


@pytest.mark.parametrize("cases", [CASES[:1], pytest.param(CASES[1:], marks=long)])
def test_a_planned_pass_is_the_measured_one(
    tmp_path: Path, cases: list[tuple[str, dict[str, Any]]]
) -> None:
    """Each case in a process that does nothing else."""
    folder = write_tiny_model(tmp_path / "model", **SIZES)
    words = [sys.executable, "-c", MEASURE, str(folder), str(NUM_DATA), json.dumps(cases)]
    # Without a heap that keeps what was freed, the peak is that of the tensors.
    environment = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    ended = subprocess.run(
        words, env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    lines = ended.stdout.splitlines()
    for (kind, options), measured in zip(cases, map(json.loads, lines), strict=True):
        planned = measure_step(
            folder,
            trained=FullConfig(**options) if kind == "full" else LoraConfig(),
            trainer=TrainerConfig(**options),
            lengths=Lengths(prompt_tokens=64, answer_tokens=64, num_data=NUM_DATA),
            place=ModelPlace(is_exact=kind == "exact"),
        )
        found = measured["peak"] - measured["before"]
        expected = planned.one_pass + planned.gradients
        assert found > 50 * 2**20
        assert abs(expected - found) < 0.1 * found, (kind, expected / 2**20, found / 2**20)


@pytest.mark.parametrize("options", [{"checkpoint_layers": True}, pytest.param({}, marks=long)])
def test_huge_passes_are_planned_from_smaller_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Equal to what a run of the whole pass finds, and a plan of a billion tokens takes no more."""
    folder = write_tiny_model(tmp_path / "model")

    def one_pass(num_data: int) -> int:
        trainer = TrainerConfig(pass_tokens=10**9, **options)
        lengths = Lengths(prompt_tokens=8, answer_tokens=25, num_data=num_data)
        held = measure_step(
            folder, trained=LoraConfig(), trainer=trainer, lengths=lengths, place=ModelPlace()
        )
        return held.one_pass

    whole = one_pass(128)
    monkeypatch.setattr(memory, "MEASURED_TOKENS", 1024)
    assert one_pass(128) == pytest.approx(whole, rel=0.01)
    assert one_pass(10**7) == pytest.approx(whole / 128 * 10**7, rel=0.1)


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    write_tiny_model(tmp_path / "model")
    rows = [{"id": str(i), "prompt": f"w{4 + i} w5", "reference": "w6"} for i in range(20)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "engine": {"model": str(tmp_path / "model"), "device": "cpu"},
        "tasksets": [
            {
                "type": "jsonl",
                "path": str(tmp_path / "tasks.jsonl"),
                "scorer": {"type": "exact"},
                "splits": {"search": 0.6, "select": 0.2, "report": 0.2},
            }
        ],
        "drawing": {"max_tokens": 16},
        "groups_per_step": 2,
        "group_size": 4,
    }


def test_each_part_is_a_row(config: dict[str, Any]) -> None:
    plan = plan_grpo(config)
    rows = {row.name: row.num_bytes for row in plan.rows}
    assert plan.fits and plan.complaint == ""
    assert plan.total_bytes == sum(rows.values())
    assert rows["moments"] == 2 * rows["gradients"] == 2 * rows["masters"]
    shared = {row.name: row.num_bytes for row in plan_grpo(config, share=True).rows}
    assert "engine weights" in rows and "engine weights" not in shared
    assert shared["weights"] == rows["trainer weights"]
    full = {row.name: row.num_bytes for row in plan_grpo(config, full=True).rows}
    assert full["gradients"] == rows["trainer weights"]
    assert "masters" not in full  # a float32 model is trained in place
    checkpointed = plan_grpo(config, trainer={"checkpoint_layers": True})
    assert {r.name: r.num_bytes for r in checkpointed.rows}["one pass"] < rows["one pass"]


@pytest.mark.parametrize("full", [True, False])
def test_processes_share_a_model_and_its_training(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, full: bool
) -> None:
    """An adapter is in each of them; the memory of this machine is that of all."""

    def planned() -> dict[str, int]:
        rows = plan_grpo(config, full=full, steps=1).rows
        return {row.name: row.num_bytes for row in rows if row.name != "this process"}

    alone = planned()
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    many = planned()
    share = 2 / 8 if full else 2
    for name in ("trainer weights", "gradients", "moments"):
        assert many[name] == share * alone[name]
    assert many["engine weights"] == alone["engine weights"]
    assert many["one pass"] <= 2 * alone["one pass"]


def test_a_game_is_planned_with_all_that_it_may_draw(
    config: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "game.py").write_text("async def play(task, chat): return 1.0")
    config["tasksets"][0].pop("scorer")
    config["environment"] = {"function": f"{tmp_path / 'game.py'}:play", "max_tokens": 16}
    config["trainer"] = {"pass_tokens": 1_000_000}

    def planned(**environment: int) -> dict[str, int]:
        plan = plan_grpo(config, environment=environment)
        return {row.name: row.num_bytes for row in plan.rows if row.name != "this process"}

    short, longer = planned(), planned(max_tokens=100)
    assert longer["one pass"] > 3 * short["one pass"]
    assert longer["answers in flight"] > 3 * short["answers in flight"]
    # No game is longer than the model's context.
    assert planned(max_tokens=10_000) == planned(max_tokens=100_000)


def test_a_plan_that_does_not_fit_names_the_key(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(grpo_plan, "memory_bytes", lambda _: 100 * 2**20)
    values: dict[str, Any] = {"groups_per_step": 500, "trainer": {"pass_tokens": 65536}}
    with pytest.raises(ConfigError, match=r"lower trainer.pass_tokens .*checkpoint_layers: true"):
        run_grpo(config, name="big", runs_dir=tmp_path / "runs", **values)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("key", ["group_size", pytest.param("groups_per_step", marks=long)])
def test_answers_that_wait_to_be_trained_on_count(
    config: dict[str, Any], tmp_path: Path, key: str
) -> None:
    with pytest.raises(ConfigError, match=r"answers of up to 18 tokens .* lower groups_per_step"):
        plan_grpo(config | {key: 10**9})
    with pytest.raises(ConfigError, match="lower groups_per_step"):
        run_grpo(config | {key: 10**9}, name="big", runs_dir=tmp_path / "runs")


def test_a_sweep_is_planned_with_its_largest_adapter(config: dict[str, Any]) -> None:
    def drawn(**values: Any) -> int:
        [row] = [own for own in plan_grpo(config, **values).rows if own.name == "drawn answers"]
        return row.num_bytes

    assert drawn(sweep={"vary": {"group_size": [2, 64]}}) == 2 * drawn(group_size=64)


def test_a_server_gets_what_the_trainer_leaves_of_its_gpu() -> None:
    gib = 2**30
    trainer = [grpo_plan.MemoryRow(name="masters", num_bytes=40 * gib, note="")]
    own = LaunchConfig(model="m", device="cuda")
    row = grpo_plan.server_row(own, 14 * gib, total=100 * gib, beside=trainer)
    assert row.num_bytes == 52 * gib, "8 % stay free"
    much = [grpo_plan.MemoryRow(name="masters", num_bytes=90 * gib, note="")]
    row = grpo_plan.server_row(own, 14 * gib, total=100 * gib, beside=much)
    assert row.num_bytes == 15 * gib and not row.remedy, "it must at least hold its weights"
    several = own.model_copy(update={"servers_per_gpu": 3})
    row = grpo_plan.server_row(several, 14 * gib, total=100 * gib, beside=much)
    assert row.num_bytes == 45 * gib and row.note.endswith("3 times"), "each has its own weights"
    given = own.model_copy(update={"gpu_memory_utilization": 0.3})
    row = grpo_plan.server_row(given, 14 * gib, total=100 * gib, beside=much)
    assert row.num_bytes == 30 * gib and "gpu_memory_utilization" in row.remedy


def test_a_trainer_computes_on_the_gpu_that_servers_leave(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,5")
    folder = write_tiny_model(tmp_path / "tiny")
    tasksets = [{"type": "jsonl", "path": "none.jsonl", "scorer": {"type": "exact"}}]
    launch = {"model": str(folder), "device": "cuda"}
    for num, device in ((0, "cuda"), (1, "cuda:2"), (2, "cuda:1")):
        engine = {"type": "fleet", "launch": {**launch, "spare_gpus": num}}
        config = GrpoConfig.model_validate({"engine": engine, "tasksets": tasksets})
        assert trainer_place(config.engine) == (device, "auto")
    engine = {"type": "fleet", "launch": {**launch, "spare_gpus": 1}}
    with pytest.raises(ValueError, match="spare_gpus is 1: one copy of the weights is on one GPU"):
        GrpoConfig.model_validate(
            {"engine": engine, "tasksets": tasksets, "full": True, "bridge": "alias"}
        )


@pytest.mark.parametrize(
    ("asked", "trained_on"), [((4096, 64), (512, 64)), ((128, 2048), (128, 127))]
)
def test_sequences_of_environments_are_planned_as_far_as_they_are_trained_on(
    tmp_path: Path, asked: tuple[int, int], trained_on: tuple[int, int]
) -> None:
    """Up to what the model reads and `max_token_len`, whatever more is asked for."""
    folder = write_tiny_model(tmp_path / "tiny", **SIZES)

    def one_pass(longest: int, drawn: int) -> int:
        document = {
            "engine": {"type": "embedded", "model": str(folder), "device": "cpu"},
            "environment": {"type": "atropos", "max_token_len": longest},
            "drawing": {"max_tokens": drawn}, "groups_per_step": 1, "group_size": 2,
        }  # fmt: skip
        plan = plan_grpo(GrpoConfig.model_validate(document))
        return next(row.num_bytes for row in plan.rows if row.name == "one pass")

    assert one_pass(*asked) == pytest.approx(one_pass(*trained_on), rel=0.01)
