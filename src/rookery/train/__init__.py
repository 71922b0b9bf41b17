"""Training: data -> gradients -> adapters, over a slotted model.

losses/             the losses, and how the tokens of a step are averaged
packing.py          data -> passes without padding
stacks.py           factors of several trainees as the slots of one pass; the cached layers below
head.py             hidden states -> log-probabilities of targets, in chunks
trainee.py          weights in training: gradients, AdamW, save and load
lora_trainee.py     an adapter in training: its layers, its start, its factors in one tensor
running_request.py  one request on its way through the passes; passes of several as one
slotted_trainer.py  shared by all trainers: trainees by name, requests in, outputs out; publishers
lora_trainer.py     LoraTrainer: any number of adapters over one model, on device, memory or disk
full.py             FullTrainer, ShardedTrainer: a model's own weights, also spread over processes
processes.py        the processes of torchrun: the data of each, sums of gradients
memory.py           memory of a training step, measured without weights
schedule.py         the rows, the learning rate and the optimizer of every step
sft.py              supervised fine-tuning from tasks to adapter
"""

from rookery.train.full import FullConfig, FullTrainer, FullWeights
from rookery.train.lora_trainee import LoraConfig, initial_adapter, new_adapter
from rookery.train.lora_trainer import LoraTrainer
from rookery.train.slotted_trainer import AdapterPublisher, ModelPublisher, TrainerConfig

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
    "new_adapter",
]
