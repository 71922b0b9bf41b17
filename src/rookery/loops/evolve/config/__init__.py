"""The config of an evolution.

sections.py  OpenEvolve's sections, and our own
reading.py   the whole config from a file, the environment and flags; keys that change nothing
"""

from rookery.loops.evolve.config.reading import EvolveConfig, Flags, LoadedConfig, read_config
from rookery.loops.evolve.config.sections import (
    BudgetConfig,
    DatabaseConfig,
    EvaluatorConfig,
    LlmConfig,
    ModelConfig,
    PromptConfig,
    RookeryConfig,
    SandboxSettings,
    TraceConfig,
)

__all__ = [
    "BudgetConfig",
    "DatabaseConfig",
    "EvaluatorConfig",
    "EvolveConfig",
    "Flags",
    "LlmConfig",
    "LoadedConfig",
    "ModelConfig",
    "PromptConfig",
    "RookeryConfig",
    "SandboxSettings",
    "TraceConfig",
    "read_config",
]
