"""OpenEvolve's files: read unchanged, and written so that OpenEvolve reads them.

config_files.py  the config of an evolution from a file, the environment and flags
checkpoints.py   checkpoint and `best` folders
traces.py        evolution_trace

The module is an `OutputFormat` of the loop: `evolve(..., output_format=openevolve)`.
"""

from rookery.compat.openevolve.checkpoints import (
    fill_best,
    fill_checkpoint,
    list_checkpoints,
    read_checkpoint,
)
from rookery.compat.openevolve.config_files import Flags, LoadedConfig, read_config, with_keys
from rookery.compat.openevolve.traces import TraceWriter as open_trace

__all__ = [
    "Flags",
    "LoadedConfig",
    "fill_best",
    "fill_checkpoint",
    "list_checkpoints",
    "open_trace",
    "read_checkpoint",
    "read_config",
    "with_keys",
]
