"""The improvement loops, each written as its paper's pseudocode over the ports."""

__all__: list[str] = []
