"""Bridges bring a trainer's new weights to running servers."""

__all__: list[str] = []
