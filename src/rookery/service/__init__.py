"""The service: sampling and training for many tenants. What they speak comes from `compat`.

config.py           limits and times; weights to download, encrypted where asked for
keys.py             API keys, hashed at rest
wire.py             bodies of requests, as routes take them and the journal keeps them
requests.py         what clients ask for, checked
work.py             one accepted request on its way, its result, and the port of formats
records.py          sessions, models, sampling sessions, checkpoints; JSON of many in slices
state.py            all of them by tenant, as one document; accepted requests in the journal
commands.py         what changes the state: a table of one function per kind of request
futures.py          results to be fetched, held until they were
fair_queue.py       whose request is next: fair between tenants by tokens
context.py          ServiceContext: what the loops share; numbers for /metrics
trainer_calls.py    requests of one kind as one call of the trainer; what came of them, made durable
training.py         the loop: requests in the order of their numbers -> passes of many models
drawing.py          sample requests -> engine -> results; sampler weights in the engine
recovery.py         snapshots, and how a service goes on after a kill
service.py          Service: the parts joined; what a tenant may take
request_context.py  what all routes share
app.py              the web application: HTTP of clients without an SDK, and what the operator sees
"""

__all__: list[str] = []
