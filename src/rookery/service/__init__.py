"""The HTTP service: sampling and training for many tenants, by the protocol of the `tinker` SDK.

refusals.py   requests that are refused, with the HTTP status that clients understand
config.py     limits and times
keys.py       API keys, hashed at rest, and the tenants they belong to
wire/         request bodies -> records, results -> bodies: protobuf, JSON, zstd
records.py    sessions, models, sampling sessions, checkpoints
state.py      all of them, looked up by tenant, saved and restored as one document
commands.py   what changes the state, one function per kind of request
futures.py    results to be fetched, held until they were
fair_queue.py whose request is next: fair between tenants by tokens
throughput.py how many tokens are computed in a second
ordering.py   requests of one model in the order of their numbers
work.py       one accepted request on its way through the queues
provenance.py with which log-probabilities targets were drawn, by the spans that data carry
training.py   ready requests -> passes of many models -> results
sampling.py   sample requests -> engine -> results
peft_config.py  the shape of an uploaded adapter
residency.py  sampler weights in the engine: loaded when asked for, the idle ones unloaded
wal.py        accepted requests and passes in the journal, snapshots, replay
backend.py    what the service asks of the engine and the trainer behind it
service.py    Service: the parts joined
metrics.py    numbers for /metrics
status.py     what the operator sees
routes/       HTTP: one file per group of paths
app.py        the web application
client/       a service elsewhere as an engine and a trainer
"""

__all__: list[str] = []
