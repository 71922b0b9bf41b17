"""Decides which replica takes which call, and handles the loss of replicas."""

__all__: list[str] = []
