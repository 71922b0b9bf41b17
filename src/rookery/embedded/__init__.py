"""The embedded engine: an `Engine` in this process that needs no server and no GPU."""

from rookery.embedded.engine import EmbeddedEngine, EngineConfig, EngineStats
from rookery.embedded.folders import ModelFolder, open_engine, resolve_model, run_engine

__all__ = [
    "EmbeddedEngine",
    "EngineConfig",
    "EngineStats",
    "ModelFolder",
    "open_engine",
    "resolve_model",
    "run_engine",
]
