"""Atropos environments: their API, spoken by a gateway whose groups are durable.

scored_group.py   one group as environments send it, and what is refused
registry.py       the trainer and the environments, with their weights
packing.py        which groups make a batch
group_queue.py    groups that wait, durable in the run
answers.py        groups that come again, as their sender was not told
draw_book.py      which policy drew a sequence, and how
gateway.py        the API without HTTP
engine_side.py    completions and log-probabilities for environments
client.py         a gateway or a `run-api` elsewhere
programs.py       environments that are started, watched and stopped
config.py         what a run is told about all of it
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
