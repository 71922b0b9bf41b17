"""A tiny labelling problem on the tiny model: founders that each know one half of it."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from loops.evolution import Genome, Inputs, run_evolution

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
def genome(inputs: Inputs, tiny_model: SlottedModel) -> Genome:
    """Runs an evolution on the tiny model; see `run_evolution`."""
    return partial(run_evolution, inputs=inputs, model=tiny_model)
