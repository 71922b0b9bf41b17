"""Adapters on their way to the servers and on them."""

__all__: list[str] = []
