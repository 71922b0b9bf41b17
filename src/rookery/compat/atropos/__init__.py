"""Atropos environments: their API, spoken by a gateway whose groups are durable.

scored_group.py   one group as environments send it, and what is refused
registry.py       the trainer and the environments, with their weights
group_queue.py    groups that wait, durable in the run, and which of them make a batch or come again
engine_side.py    completions and log-probabilities for environments, and which policy drew what
gateway.py        the API without HTTP; batches for a trainer elsewhere
programs.py       environments that are started, watched and stopped
feed.py           groups of a run for its trainer, from this gateway or one elsewhere
source.py         those groups as the batches of a grpo run
app.py            the API over HTTP: keys, limits, compression, the thirteen routes of `run-api`
engine_routes.py  the routes that environments ask the engine by
options.py        the flags of Atropos's own trainer as a grpo config
"""

__all__: list[str] = []
