"""grpo: trains a policy by group-relative policy optimisation, the engine on the newest weights.

config.py          the config of a run
batch.py           the rollouts of one step, their advantages, and their encoding on disk
group_source.py    tasks -> groups whose rewards differ, durable, each drawn once
policy_weights.py  the weights in training: a LoRA adapter, or all weights of a model
policy_trainer.py  groups -> advantages -> rows -> gradients -> step, with checks before and after
checkpoints.py     folders of weights: one is chosen on the select split and reported
documents.py       the record of each step, the report and its warnings
loop.py            the loop
"""

from rookery.loops.grpo.config import GrpoConfig
from rookery.loops.grpo.documents import Step
from rookery.loops.grpo.loop import GrpoInputs, train_policy

__all__ = ["GrpoConfig", "GrpoInputs", "Step", "train_policy"]
