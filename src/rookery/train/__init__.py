"""Training: data -> gradients -> adapters, over a slotted model.

losses/       what is minimised, one file each
packing.py    data -> passes without padding
trunk.py      the layers below the adapters, computed once per sequence
stacks.py     a trainee's factors as the slot of a pass
head.py       hidden states -> log-probabilities of targets, in chunks
averaging.py  how the tokens of a step are averaged, over all its calls
metrics.py    the metrics of several calls as those of one
trainee.py    weights in training: gradients, AdamW, save and load
slotted_trainer.py  what trainers share: trainees by name, requests in, outputs out
lora_trainer.py     LoraTrainer: any number of adapters over one model
full.py       FullTrainer: a model's own weights
checkpoints.py      folders of weights with the trainer's state beside them
schedule.py   the learning rate of every step
publisher.py  new weights to engines, old ones retired
lora.py       which layers are adapted, and the adapter to start from
order.py      which rows each step takes
sft.py        supervised fine-tuning from tasks to adapter
"""

from rookery.train.full import FullConfig, FullTrainer, FullWeights
from rookery.train.lora import LoraConfig, initial_adapter
from rookery.train.lora_trainer import LoraTrainer
from rookery.train.publisher import AdapterPublisher, ModelPublisher
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
