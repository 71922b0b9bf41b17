"""grpo from its config to its report: one training, a sweep, a plan of memory, a gateway.

run.py      `run_grpo`: config -> objects -> loop -> report and page; sweeps too
files.py    what is read before a model is loaded
policy.py   what is trained, and what the KL term is to
bridge.py   how the trainer's weights reach the engine
plan.py     `plan_grpo`: what a training holds in memory, and whether it fits
service.py  an adapter that a service elsewhere trains
progress.py what a progress bar shows
atropos.py  groups from Atropos environments; the gateway alone
"""

from rookery.compose.grpo.run import GRPO, run_grpo

__all__ = ["GRPO", "run_grpo"]
