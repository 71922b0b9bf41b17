"""The embedded engine: a `Sampler` in this process, no server and no GPU needed."""

from rookery.embedded.engine import EmbeddedEngine, EngineConfig
from rookery.embedded.folders import ModelFolder, resolve_model
from rookery.embedded.opening import open_engine, run_engine
from rookery.embedded.stats import EngineStats

__all__ = [
    "EmbeddedEngine",
    "EngineConfig",
    "EngineStats",
    "ModelFolder",
    "open_engine",
    "resolve_model",
    "run_engine",
]
