"""Training: data -> gradients -> adapters, over a slotted model.

losses/       what is minimised, one file each
packing.py    data -> passes without padding
trunk.py      the layers below the adapters, computed once per sequence
stacks.py     factors of several trainees as the slots of one pass
mixed.py      passes of several requests as one
head.py       hidden states -> log-probabilities of targets, in chunks
averaging.py  how the tokens of a step are averaged, over all its calls
metrics.py    the metrics of several calls as those of one
trainee.py    weights in training: gradients, AdamW, save and load
lora_trainee.py     an adapter in training, all its factors in one tensor
parking.py    where trainees are while they are not used: device, memory, files
running_request.py  one request on its way through the passes
slotted_trainer.py  what trainers share: trainees by name, requests in, outputs out
lora_trainer.py     LoraTrainer: any number of adapters over one model
full.py       FullTrainer: a model's own weights
processes.py  the processes of torchrun: who computes which data, sums of gradients
part.py       what one process computes of a request
sharded.py    ShardedTrainer: a model's own weights, spread over processes
spreading.py  tensors that are spread over processes beside plain ones
memory.py     what a step holds in memory, without weights
checkpoints.py      folders of weights with the trainer's state beside them
schedule.py   the learning rate of every step
publisher.py  new weights to engines, old ones retired
lora.py       which layers are adapted, and the adapter to start from
order.py      which rows each step takes
sft.py        supervised fine-tuning from tasks to adapter
"""

from rookery.train.checkpoints import AdapterPublisher, ModelPublisher
from rookery.train.full import FullConfig, FullTrainer, FullWeights
from rookery.train.lora_trainee import LoraConfig, initial_adapter
from rookery.train.lora_trainer import LoraTrainer
from rookery.train.slotted_trainer import TrainerConfig

__all__ = [
    "AdapterPublisher",
    "FullConfig",
    "FullTrainer",
    "FullWeights",
    "LoraConfig",
    "LoraTrainer",
    "ModelPublisher",
    "TrainerConfig",
    "initial_adapter",
]
