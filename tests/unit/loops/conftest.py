"""A tiny labelling problem on the tiny model: founders that each know one half of it."""

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from loops import training
from loops.evolution import SEARCHED, Evolved, Genome, Inputs, evolve_in

from rookery.slots import SlottedModel
from rookery.weights import write_adapter


@pytest.fixture(scope="session")
def founders_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four adapters of unequal ranks and targets."""
    from tiny import tiny_adapter

    folder = tmp_path_factory.mktemp("founders")
    shapes: list[dict[str, Any]] = [
        {"rank": 2},
        {"rank": 4, "targets": ("self_attn.q_proj", "self_attn.v_proj")},
        {"rank": 3, "targets": ("mlp.down_proj", "self_attn.v_proj")},
        {"rank": 4},
    ]
    for index, shape in enumerate(shapes):
        adapter = tiny_adapter(f"f{index}", seed=index, layers=range(2, 4), **shape)
        write_adapter(adapter, folder / f"f{index}")
    return folder


@pytest.fixture(scope="session")
def tasks_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tasksets of one-token choices over the tiny model's vocabulary."""
    folder = tmp_path_factory.mktemp("tasks")
    for name, offset in (("first", 0), ("second", 1)):
        rows = [
            f'{{"prompt": "w{4 + i % 80} w{5 + (i * 7) % 80} w{10 + offset}", '
            f'"choices": ["w90", "w91"], "reference": "w{90 + (i + offset) % 2}"}}'
            for i in range(60)
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    return folder


@pytest.fixture(scope="session")
def inputs(tiny_folder: Path, founders_folder: Path, tasks_folder: Path) -> Inputs:
    return Inputs(model=tiny_folder, founders=founders_folder, tasks=tasks_folder)


@pytest.fixture
def genome(inputs: Inputs, tiny_model: SlottedModel, tmp_path: Path) -> Genome:
    """Runs an evolution on the tiny model; see `run_evolution`."""
    return partial(evolve_in, tmp_path, inputs=inputs, model=tiny_model)


@pytest.fixture(scope="session")
def evolved(
    inputs: Inputs, tiny_model: SlottedModel, tmp_path_factory: pytest.TempPathFactory
) -> Evolved:
    """A whole evolution with every baseline, to look at."""
    root = tmp_path_factory.mktemp("evolved")
    return asyncio.run(evolve_in(root, inputs=inputs, model=tiny_model, finals=SEARCHED))


@pytest.fixture(scope="session")
def grpo_inputs(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> training.Inputs:
    """Tasks that the tiny model answers anyhow: the reward is of the tokens."""
    tasks = tmp_path_factory.mktemp("grpo") / "tasks.jsonl"
    rows = [{"prompt": f"w{4 + i} w{5 + (i * 7) % 80}", "reference": "x"} for i in range(24)]
    tasks.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return training.Inputs(model=tiny_folder, tasks=tasks)


@pytest.fixture(scope="session")
def secret_numbers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tasks of the guessing game: each has a number of the upper part of the vocabulary."""
    tasks = tmp_path_factory.mktemp("game") / "numbers.jsonl"
    rows = [{"prompt": f"w{6 + i} w7", "reference": str(60 + i % 30)} for i in range(48)]
    tasks.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tasks


@pytest.fixture(scope="session")
def plain_model(tiny_folder: Path) -> SlottedModel:
    """Not packed: an engine and a trainer share it."""
    from rookery.slots import load_model

    return load_model(tiny_folder)
