"""The service over a real model, in this process."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from service.tenants import Served, serve

from rookery.compose.serve import open_backend
from rookery.embedded import EngineConfig
from rookery.train import TrainerConfig


@asynccontextmanager
async def served_model(
    folder: Path, model: Path, trainer: TrainerConfig | None = None, **rest: Any
) -> AsyncIterator[Served]:
    engine = EngineConfig(model=str(model))
    config = trainer or TrainerConfig()
    async with (
        open_backend(str(model), engine=engine, trainer=config, alpha=32.0) as backend,
        serve(folder, backend=backend, **rest) as served,
    ):
        yield served
