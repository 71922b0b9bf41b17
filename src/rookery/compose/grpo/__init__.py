"""Runs grpo from its config to its report: one training, a sweep, a memory plan, a gateway.

setup.py    reads all that the config names, and decides what it means, before anything is opened
plan.py     `plan_grpo`: the memory that a training needs, and whether it fits
bridge.py   opens the engine and the trainer's model, and passes weights between them
policy.py   makes the weights that are trained, and the reference of the KL term
run.py      `run_grpo`: config -> objects -> loop -> report and page; sweeps too
atropos.py  groups from Atropos environments; the gateway alone
"""

from rookery.compose.grpo.run import GRPO, run_grpo

__all__ = ["GRPO", "run_grpo"]
