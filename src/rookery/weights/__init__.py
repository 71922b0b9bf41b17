"""LoRA adapters as data: read and write PEFT folders, hash, stack, merge, mutate, move."""

from rookery.weights.folder import read_adapter, write_adapter
from rookery.weights.version import adapter_version, make_adapter

__all__ = ["adapter_version", "make_adapter", "read_adapter", "write_adapter"]
