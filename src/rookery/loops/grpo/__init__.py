"""grpo: trains a policy by group-relative policy optimisation, the engine on the newest weights.

config.py          what a run is told
checks.py          what is refused before the run is made
task_order.py      which task each draw takes
batch.py           the rollouts of one step, and how they are kept
batch_drawer.py    tasks -> groups whose rewards differ
group_source.py    the batches of a run: drawn once, oldest first, durable
advantages.py      rewards of a group -> advantages
data.py            groups -> training rows
policy_weights.py  what is trained, as the loop sees it
adapter_policy.py  a LoRA adapter
full_policy.py     all weights of a model
policy_trainer.py  rows -> gradients -> step, and the check against the engine
checkpoints.py     folders of weights, and the trainer's state
selection.py       choosing on the select split, measuring on the report split, once
step_log.py        what is recorded of each step, and who is told
documents.py       what is left behind, and the warnings
loop.py            the loop
"""

from rookery.loops.grpo.config import GrpoConfig
from rookery.loops.grpo.documents import Step, Watcher
from rookery.loops.grpo.loop import GrpoInputs, GrpoResult, train_policy

__all__ = ["GrpoConfig", "GrpoInputs", "GrpoResult", "Step", "Watcher", "train_policy"]
