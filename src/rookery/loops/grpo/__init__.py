"""grpo: trains a policy by group-relative policy optimisation, the engine on the newest weights.

config.py          what a run is told
batch.py           the rollouts of one step, and how they are kept
batch_drawer.py    tasks -> groups whose rewards differ
group_source.py    the batches of a run: drawn once, oldest first, durable
data.py            groups -> advantages -> training rows; what is refused before the run is made
policy_weights.py  what is trained: a LoRA adapter, or all weights of a model
policy_trainer.py  rows -> gradients -> step, and the check against the engine
checkpoints.py     folders of weights, and the trainer's state
selection.py       choosing on the select split, measuring on the report split, once
documents.py       what is recorded of each step; what is left behind, and the warnings
loop.py            the loop
"""

from rookery.loops.grpo.config import GrpoConfig
from rookery.loops.grpo.documents import Step
from rookery.loops.grpo.loop import GrpoInputs, train_policy

__all__ = ["GrpoConfig", "GrpoInputs", "Step", "train_policy"]
