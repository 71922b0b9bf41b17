"""Atropos environments: a gateway with their API, whose groups are durable.

scored_group.py   one group as environments send it, and its checks
group_queue.py    the registered programs; durable waiting groups, and the choice of a batch
engine_side.py    completions and log-probabilities for environments, and an index of the draws
gateway.py        the API without HTTP; batches for a trainer elsewhere
programs.py       environments that are started, watched and stopped
feed.py           groups as the batches of a grpo run, from this gateway or one elsewhere
app.py            the API over HTTP: keys, limits, compression, the routes of both
options.py        the flags of Atropos's own trainer as a grpo config
"""

__all__: list[str] = []
