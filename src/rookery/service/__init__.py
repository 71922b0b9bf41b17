"""The service: sampling and training for many tenants. `compat` has the formats of its clients.

config.py           limits and times; weights to download, encrypted on request
keys.py             API keys, hashed at rest
wire.py             bodies of requests, as routes take them and the journal keeps them
requests.py         JSON requests of clients, validated
work.py             an accepted request, its result, and the port of formats
records.py          sessions, models, sampling sessions, checkpoints; JSON of many, in slices
state.py            all of these by tenant, as one document; the journal of accepted requests
commands.py         what changes the state: a table of one function per kind of request
futures.py          results, held until they are fetched
fair_queue.py       the order of requests: fair between tenants by tokens
context.py          ServiceContext: state that the loops share; numbers for /metrics
trainer_calls.py    requests of one kind as one call of the trainer, and their durable outcomes
training.py         the loop: requests in the order of their numbers -> passes of many models
drawing.py          sample requests -> engine -> results; sampler weights in the engine
recovery.py         snapshots, and the restart after a kill
service.py          Service: joins the parts and applies the limits of tenants
request_context.py  code that all routes share
app.py              the web application: HTTP for clients without an SDK, pages for the operator
"""

__all__: list[str] = []
