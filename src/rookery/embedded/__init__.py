"""The embedded engine: a `Sampler` in this process, no server and no GPU needed."""

from rookery.embedded.engine import (
    EmbeddedEngine,
    EngineConfig,
    EngineStats,
    open_engine,
    run_engine,
)
from rookery.embedded.folders import ModelFolder, resolve_model

__all__ = [
    "EmbeddedEngine",
    "EngineConfig",
    "EngineStats",
    "ModelFolder",
    "open_engine",
    "resolve_model",
    "run_engine",
]
