"""Servers that this process starts and owns: on this machine or on a Ray cluster."""

__all__: list[str] = []
