"""Evolve adapters with the library call: the demo's job in a few lines.

Hardware: 2 CPU cores, about 4 minutes. Expect the evolved adapter well above the best founder.

    python examples/genome.py
"""

import asyncio
from pathlib import Path

from rookery.config import load_config
from rookery.embedded import EngineConfig, open_engine, resolve_model
from rookery.loops.genome import GenomeConfig, evolve
from rookery.loops.genome.founders import FileInit, read_founders
from rookery.rollout import RolloutLog, TasksetEvaluator
from rookery.runs import Run
from rookery.tasks.taskset import load_tasksets
from rookery.tasks.template import load_template

CONFIG = Path(__file__).parents[1] / "configs" / "demo.yaml"


async def main() -> None:
    config = load_config(GenomeConfig, CONFIG).from_folder(CONFIG.parent)
    assert isinstance(config.init, FileInit) and isinstance(config.engine, EngineConfig)
    tasksets = load_tasksets(config.tasksets)
    template = load_template(resolve_model(config.engine.model).path)
    document = config.model_dump(mode="json")
    async with open_engine(config.engine) as engine:
        with Run.create(Path("runs"), kind="genome", config=document) as run:
            log = RolloutLog(run)
            evaluator = TasksetEvaluator(engine, template=template, tasksets=tasksets, log=log)
            result = await evolve(
                config,
                founders=read_founders(config.init),
                tasksets=tasksets,
                engine=engine,
                evaluator=evaluator,
                run=run,
            )
    for row in result.report["rows"]:
        print(f"{row['name']:<20} {row['mean']:.3f} ({row['low']:.3f} to {row['high']:.3f})")


if __name__ == "__main__":
    asyncio.run(main())
