"""New base weights for running servers."""

__all__: list[str] = []
