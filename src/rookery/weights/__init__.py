"""LoRA adapters as data: read and write PEFT folders, hash, stack, merge, mutate.

This package exports folders and versions. Import an operator from its own module, for example
`from rookery.weights.merge import merge`.
"""

from rookery.weights.folder import adapter_version, make_adapter, read_adapter, write_adapter

__all__ = ["adapter_version", "make_adapter", "read_adapter", "write_adapter"]
