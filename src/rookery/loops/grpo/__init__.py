"""grpo: trains a policy by group-relative policy optimisation, the engine on the newest weights.

config.py          what a run is told
batch.py           the rollouts of one step, and how they are kept
group_source.py    tasks -> groups whose rewards differ; drawn once, oldest first, durable
policy_weights.py  what is trained: a LoRA adapter, or all weights of a model
policy_trainer.py  groups -> advantages -> rows -> gradients -> step; checks beforehand and after
checkpoints.py     folders of weights; one chosen on the select split, measured on the report split
documents.py       what is recorded of each step; what is left behind, and the warnings
loop.py            the loop
"""

from rookery.loops.grpo.config import GrpoConfig
from rookery.loops.grpo.documents import Step
from rookery.loops.grpo.loop import GrpoInputs, train_policy

__all__ = ["GrpoConfig", "GrpoInputs", "Step", "train_policy"]
