"""OpenEvolve's files: read as they are, and written so that it reads them.

config_files.py  the config of an evolution from a file, the environment and flags
"""

from rookery.compat.openevolve.config_files import Flags, LoadedConfig, read_config, with_keys

__all__ = ["Flags", "LoadedConfig", "read_config", "with_keys"]
