"""Atropos environments: their API, spoken by a gateway whose groups are durable.

scored_group.py   one group as environments send it, and what is refused
registry.py       the trainer and the environments, with their weights; what a run is told of them
group_queue.py    groups that wait, durable in the run, and which of them make a batch or come again
engine_side.py    completions and log-probabilities for environments, and which policy drew what
gateway.py        the API without HTTP; batches for a trainer elsewhere
feed.py           groups of a run for its trainer, from this gateway or one elsewhere
programs.py       environments that are started, watched and stopped
"""

from rookery.environments.atropos.gateway import Gateway
from rookery.environments.atropos.registry import (
    AtroposConfig,
    EnvironmentCommand,
    TrainerRegistration,
)
from rookery.environments.atropos.scored_group import ScoredGroup

__all__ = [
    "AtroposConfig",
    "EnvironmentCommand",
    "Gateway",
    "ScoredGroup",
    "TrainerRegistration",
]
