"""Runs through the library functions, over the tiny model."""

from working_folder import files, place

__all__ = ["files", "place"]
