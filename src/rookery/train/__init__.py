"""Training: data -> gradients -> adapters, over a slotted model.

losses/     what is minimised, one pure function per file
packing.py  data -> passes without padding
trunk.py    the layers below the adapters, computed once per sequence
mount.py    trainable factors in a model's layers, for one pass
lora.py     which layers are adapted, and the adapter to start from
trainer.py  LoraTrainer: gradients, AdamW, save and load, publish
order.py    which rows each step takes
sft.py      supervised fine-tuning from tasks to adapter
"""

from rookery.train.lora import LoraConfig, initial_adapter
from rookery.train.trainer import LoraTrainer, TrainerConfig

__all__ = ["LoraConfig", "LoraTrainer", "TrainerConfig", "initial_adapter"]
