"""grpo from its config to its report: one training, a sweep, a plan of memory, a gateway.

setup.py    what the config names, read, and what it means, decided, before anything is opened
plan.py     `plan_grpo`: what a training holds in memory, and whether it fits
bridge.py   the engine and the trainer's model, open for a block, and how weights pass between
policy.py   what is trained, and what the KL term is to
run.py      `run_grpo`: config -> objects -> loop -> report and page; sweeps too
atropos.py  groups from Atropos environments; the gateway alone
"""

from rookery.compose.grpo.run import GRPO, run_grpo

__all__ = ["GRPO", "run_grpo"]
