"""Task x Sampler x Scorer -> Group: many models and tasks together, logged, never asked twice.

evaluator.py  rollouts and evaluations of models on tasks
asking.py     how a taskset's tasks are put to a model
log.py        the rollouts of a run, found again
"""

from rookery.rollout.evaluator import Progress, TasksetEvaluator, mean_by_source
from rookery.rollout.log import RolloutLog

__all__ = ["Progress", "RolloutLog", "TasksetEvaluator", "mean_by_source"]
