"""Rookery: one vLLM fleet, every way to make a model better on it.

    outcome = rookery.run_genome("mine.yaml", seed=3)
    outcome.report.winner.mean, outcome.path / "winner"

Importing the package is light: no torch, no network. The records that flow between the parts are
here; the functions that open engines and run loops are loaded when they are first used. Everything
else is imported from its own module (`rookery.weights`, `rookery.tasks`, ...).
"""

import importlib
import logging
from typing import TYPE_CHECKING, Any

from rookery.errors import RookeryError, missing_extra
from rookery.types import (
    Adapter,
    Completion,
    Datum,
    Group,
    ModelRef,
    Rollout,
    SampleRequest,
    SamplingParams,
    Score,
    ScoreRequest,
    Task,
)

if TYPE_CHECKING:
    from rookery import ui
    from rookery.compose.evaluation import evaluate
    from rookery.compose.evolve import evolve_prompt, run_evolution, run_evolve
    from rookery.compose.genome import run_genome
    from rookery.compose.grpo import run_grpo
    from rookery.compose.grpo.plan import plan_grpo
    from rookery.compose.icm import run_icm
    from rookery.compose.kinds import resume
    from rookery.compose.league import run_league
    from rookery.compose.pipeline import run_pipeline
    from rookery.compose.sft import run_sft
    from rookery.engines import open_engine

__all__ = [
    "Adapter",
    "Completion",
    "Datum",
    "Group",
    "ModelRef",
    "Rollout",
    "RookeryError",
    "SampleRequest",
    "SamplingParams",
    "Score",
    "ScoreRequest",
    "Task",
    "evaluate",
    "evolve_prompt",
    "open_engine",
    "plan_grpo",
    "resume",
    "run_evolution",
    "run_evolve",
    "run_genome",
    "run_grpo",
    "run_icm",
    "run_league",
    "run_pipeline",
    "run_sft",
    "ui",
]

_LAZY = {
    "evaluate": "rookery.compose.evaluation",
    "evolve_prompt": "rookery.compose.evolve",
    "open_engine": "rookery.engines",
    "plan_grpo": "rookery.compose.grpo.plan",
    "resume": "rookery.compose.kinds",
    "run_evolution": "rookery.compose.evolve",
    "run_evolve": "rookery.compose.evolve",
    "run_genome": "rookery.compose.genome",
    "run_grpo": "rookery.compose.grpo",
    "run_icm": "rookery.compose.icm",
    "run_league": "rookery.compose.league",
    "run_pipeline": "rookery.compose.pipeline",
    "run_sft": "rookery.compose.sft",
    "ui": "rookery.ui",
}
"""Functions that are imported on first use, with their modules: most of these need torch."""


# transformers imports torchao where it is installed, and torchao warns of its own code.
for _logger in ("torch.utils._pytree", "torchao"):
    logging.getLogger(_logger).setLevel(logging.ERROR)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("rookery")
    if name not in _LAZY:
        raise AttributeError(f"module 'rookery' has no attribute {name!r}")
    try:
        module = importlib.import_module(_LAZY[name])
        return module if name == "ui" else getattr(module, name)
    except ModuleNotFoundError as error:
        missing = missing_extra(error)
        if missing is None:
            raise
        raise missing from error


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
