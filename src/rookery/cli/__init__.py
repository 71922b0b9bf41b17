"""The command line over `compose`: flags, error lines, tables, exit codes.

Each command imports what it needs inside its function, so that `--help` is fast.
"""

from rookery.cli.app import app, main

__all__ = ["app", "main"]
