"""Training through a Megatron server, over HTTP.

client.py     a server as a Trainer and an Engine
wire.py       records as JSON, adapters as safetensors
server.py     HTTP routes over a trainer and an engine
engine.py     trainer and engine, kept in step over all tensor-parallel ranks
model.py      a slotted model whose layers are megatron-core's

The client needs no megatron-core; the server runs in an environment that has it:

    torchrun --nproc-per-node 2 -m rookery.megatron --model FOLDER --port 5000
"""

from rookery.megatron.client import (
    MegatronEngine,
    MegatronServer,
    MegatronTrainer,
    open_megatron,
)
from rookery.megatron.wire import LoraStart

__all__ = ["LoraStart", "MegatronEngine", "MegatronServer", "MegatronTrainer", "open_megatron"]
