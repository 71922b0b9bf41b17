"""Task x Sampler x Scorer -> Group: many models and tasks together, logged, never asked twice.

evaluator.py  rollouts and evaluations of models on tasks
asking.py     how a taskset's tasks are put to a model
group_sampler.py  groups to train on: many answers to each task, drawn at random
log.py        the rollouts of a run, found again
text_model.py engines behind a chat template, and ensembles, as text models
"""

from rookery.rollout.asking import EngineTextModel, EnsembleTextModel, Member
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
    "EnsembleTextModel",
    "GroupSampler",
    "Member",
    "Progress",
    "RolloutLog",
    "TasksetEvaluator",
    "mean_by_source",
    "set_scores_aside",
]
