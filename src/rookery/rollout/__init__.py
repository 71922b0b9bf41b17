"""Task x Sampler x Scorer -> Group: many models and tasks together, logged, never asked twice.

evaluator.py  rollouts and evaluations of models on tasks, found again in the run
ask_once.py   a question that is under way is not asked again
asking.py     how a taskset's tasks are put to a model; text models over engines
group_sampler.py  groups to train on: many answers to each task, drawn at random
"""

from rookery.rollout.asking import EngineTextModel
from rookery.rollout.evaluator import (
    Progress,
    RolloutLog,
    TasksetEvaluator,
    mean_by_source,
    set_scores_aside,
)
from rookery.rollout.group_sampler import GroupSampler

__all__ = [
    "EngineTextModel",
    "GroupSampler",
    "Progress",
    "RolloutLog",
    "TasksetEvaluator",
    "mean_by_source",
    "set_scores_aside",
]
