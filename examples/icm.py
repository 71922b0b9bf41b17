"""Label reviews without labels with the library call: the demo's job in a few lines.

Hardware: 2 CPU cores, under 10 minutes. Expect all 16 labels right.

    python examples/icm.py
"""

import asyncio
from pathlib import Path

from rookery.config import load_config
from rookery.embedded import EngineConfig, open_engine, resolve_model
from rookery.loops.icm import Bench, IcmConfig, label, load_encoder, read_gold, read_items
from rookery.runs import Run

CONFIG = Path(__file__).parents[1] / "configs" / "icm_reviews.yaml"


async def main() -> None:
    config = load_config(IcmConfig, CONFIG).from_folder(CONFIG.parent)
    assert isinstance(config.engine, EngineConfig)
    items = read_items(config.data)
    encoder = load_encoder(resolve_model(config.engine.model).path)
    document = config.model_dump(mode="json")
    async with open_engine(config.engine) as engine:
        with Run.create(Path("runs"), kind="icm", config=document) as run:
            result = await label(
                config,
                items=items,
                bench=Bench(sampler=engine, model=engine.base, encoder=encoder),
                run=run,
                gold=lambda: read_gold(config.data, items),
            )
    for row in result.report["rows"]:
        print(f"{row['name']:<18} {row['num_labelled']:>3} labelled, true {row['accuracy']:.2f}")
    print(f"{result.report['verdict']}: {run.path / 'labels.jsonl'}")


if __name__ == "__main__":
    asyncio.run(main())
