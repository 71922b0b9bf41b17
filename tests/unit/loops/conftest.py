"""A tiny labelling problem on the tiny model: founders that each know one half of it."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from rookery.embedded import EngineConfig, run_engine
from rookery.fleet import Fleet
from rookery.loops.genome import GenomeConfig, GenomeResult, Watcher, evolve
from rookery.loops.genome.founders import FileInit, make_founders, read_founders
from rookery.rollout import RolloutLog, TasksetEvaluator
from rookery.runs import Run
from rookery.slots import SlottedModel
from rookery.tasks.taskset import load_taskset
from rookery.tasks.template import load_template
from rookery.weights import write_adapter


@pytest.fixture(scope="session")
def founders_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four adapters of unequal ranks and targets."""
    from tiny import tiny_adapter

    folder = tmp_path_factory.mktemp("founders")
    shapes = [
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


Evolve = Callable[..., GenomeResult]


@pytest.fixture
def genome(tiny_folder: Path, tiny_model: SlottedModel, founders_folder: Path, tasks_folder: Path):
    """Runs an evolution on the tiny model, or on a fleet; keyword arguments change the config.

    `wrap` is given the engine and returns what the loop runs on.
    """

    async def run(
        run: Run,
        *,
        watcher: Watcher = Watcher(),
        fleet: Fleet | None = None,
        wrap=lambda engine: engine,
        **changes: object,
    ) -> GenomeResult:
        document = {
            "engine": {"model": str(tiny_folder)},
            "init": {"type": "file", "path": str(founders_folder)},
            "tasksets": [
                {"type": "jsonl", "path": str(tasks_folder / f"{name}.jsonl"), "name": name}
                for name in ("first", "second")
            ],
            "stages": [
                {"type": "ga", "generations": 2,
                 "population": {"size": 4, "children": {"count": 4}}}
            ],
            "finals": {"num_finalists": 3, "num_voters": 3},
            **changes,
        }  # fmt: skip
        config = GenomeConfig.model_validate(document)
        tasksets = [load_taskset(taskset) for taskset in config.tasksets]
        settings = EngineConfig(model=str(tiny_folder))
        embedded = run_engine(
            tiny_model, config=settings, detokenize=lambda tokens: str(tokens), name="tiny"
        )
        async with nullcontext(fleet) if fleet else embedded as opened:
            engine = wrap(opened)
            evaluator = TasksetEvaluator(
                engine,
                template=load_template(tiny_folder),
                tasksets=tasksets,
                log=RolloutLog(run),
            )
            founders = (
                read_founders(config.init)
                if isinstance(config.init, FileInit)
                else make_founders(
                    config.init, layers=engine.linear_layers, base="tiny", seed=config.seed
                )
            )
            return await evolve(
                config,
                founders=founders,
                tasksets=tasksets,
                engine=engine,
                evaluator=evaluator,
                run=run,
                watcher=watcher,
            )

    return run
