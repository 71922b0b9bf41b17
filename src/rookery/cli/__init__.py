"""The command line over `compose`: flags, error lines, tables, exit codes.

A command's own imports are inside it, so that `--help` answers at once.
"""

from rookery.cli.app import app, main

__all__ = ["app", "main"]
