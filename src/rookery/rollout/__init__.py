"""Task x Sampler x Scorer -> Group: many models and tasks together, logged, never asked twice.

evaluator.py  rollouts and evaluations of models on tasks, found again in the run
asking.py     how tasks are put to a model; groups to train on; text models over engines
"""

from rookery.rollout.asking import EngineTextModel, GroupSampler
from rookery.rollout.evaluator import (
    BlockProgress,
    RolloutLog,
    TasksetEvaluator,
    mean_by_source,
    set_scores_aside,
)

__all__ = [
    "BlockProgress",
    "EngineTextModel",
    "GroupSampler",
    "RolloutLog",
    "TasksetEvaluator",
    "mean_by_source",
    "set_scores_aside",
]
