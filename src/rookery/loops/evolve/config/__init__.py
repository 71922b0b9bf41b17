"""The config of an evolution.

sections.py  its sections
whole.py     all of them, and the keys of no section
"""

from rookery.loops.evolve.config.sections import (
    BudgetConfig,
    DatabaseConfig,
    EvaluatorConfig,
    LearnConfig,
    LlmConfig,
    ModelConfig,
    PromptConfig,
    RookeryConfig,
    SandboxSettings,
    TraceConfig,
)
from rookery.loops.evolve.config.whole import EvolveConfig

__all__ = [
    "BudgetConfig",
    "DatabaseConfig",
    "EvaluatorConfig",
    "EvolveConfig",
    "LearnConfig",
    "LlmConfig",
    "ModelConfig",
    "PromptConfig",
    "RookeryConfig",
    "SandboxSettings",
    "TraceConfig",
]
