"""The config of an evolution.

evolve.py    OpenEvolve's config as a whole
llm.py       its models
sections.py  its other sections
section.py   exact types
own.py       our own keys
ignored.py   keys that change nothing
reading.py   from a file, the environment and flags
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
