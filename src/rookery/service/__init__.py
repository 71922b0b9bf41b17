"""The HTTP service: sampling and training for many tenants, by the protocol of the `tinker` SDK.

config.py         limits and times; weights to download, encrypted where asked for
keys.py           API keys, hashed at rest
limits.py         what a tenant may take
wire/             the SDK's format: bodies -> records, results -> bodies; protobuf, JSON, zstd
work.py           one accepted request on its way through the queues, and its result
records.py        sessions, models, sampling sessions, checkpoints; JSON of many in slices
state.py          all of them, looked up by tenant, saved and restored as one document
commands.py       what changes the state: a table of one function per kind of request
futures.py        results to be fetched, held until they were
fair_queue.py     whose request is next: fair between tenants by tokens
wal.py            accepted requests and passes in the journal, snapshots
metrics.py        numbers for /metrics, and how many tokens are computed in a second
context.py        ServiceContext: what the loops share
trainer_calls.py  requests of one kind as one call of the trainer; what came of them, made durable
training.py       the loop: requests in the order of their numbers -> passes of many models
drawing.py        sample requests -> engine -> results; sampler weights in the engine
recovery.py       snapshots, and how a service goes on after a kill
service.py        Service: the parts joined
routes/           HTTP of the SDK and of plain clients: one file per group of paths
openai/           HTTP of OpenAI and vLLM clients
app.py            the web application, and what the operator sees
client/           a service elsewhere as an engine and a trainer
"""

__all__: list[str] = []
