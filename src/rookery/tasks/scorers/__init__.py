"""Scorers: functions from an answer to a reward, chosen by `type` in a config.

A new scorer is a file with its config and class, one line in the union and one in the dict.
"""

from collections.abc import Callable
from typing import Annotated

from pydantic import Field

from rookery.errors import TaskError
from rookery.ports import Sampler, Scorer
from rookery.tasks.scorers.json_schema import JsonSchemaConfig, JsonSchemaScorer
from rookery.tasks.scorers.judge import JudgeConfig, JudgeScorer
from rookery.tasks.scorers.numeric import MathConfig, MathScorer, NumericConfig, NumericScorer
from rookery.tasks.scorers.python import PythonConfig, PythonScorer
from rookery.tasks.scorers.text import (
    ChoiceConfig,
    ChoiceScorer,
    ExactConfig,
    ExactScorer,
    RegexConfig,
    RegexScorer,
)
from rookery.tasks.template import Template

__all__ = [
    "SCORERS",
    "ChoiceConfig",
    "ExactConfig",
    "JsonSchemaConfig",
    "JudgeConfig",
    "MathConfig",
    "NumericConfig",
    "PythonConfig",
    "RegexConfig",
    "ScorerConfig",
    "build_scorer",
]

ScorerConfig = Annotated[
    ChoiceConfig
    | ExactConfig
    | JsonSchemaConfig
    | JudgeConfig
    | MathConfig
    | NumericConfig
    | PythonConfig
    | RegexConfig,
    Field(discriminator="type"),
]

SCORERS: dict[str, Callable[..., Scorer]] = {
    "choice": ChoiceScorer,
    "exact": ExactScorer,
    "json_schema": JsonSchemaScorer,
    "judge": JudgeScorer,
    "math": MathScorer,
    "numeric": NumericScorer,
    "python": PythonScorer,
    "regex": RegexScorer,
}


def build_scorer(
    config: ScorerConfig, *, judge: Sampler | None = None, template: Template | None = None
) -> Scorer:
    """Build a config's scorer. Only `type: judge` needs the judge's sampler and its template."""
    if not isinstance(config, JudgeConfig):
        return SCORERS[config.type](config)
    if judge is None or template is None:
        missing = "a sampler" if judge is None else "the template of its model"
        raise TaskError(
            f"The judge scorer needs {missing} to ask {config.model}, and was built without: "
            "pass judge= and template= to build_scorer."
        )
    return SCORERS[config.type](config, sampler=judge, template=template)
